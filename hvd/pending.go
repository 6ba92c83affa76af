package hvd

import (
	"errors"
	"fmt"
	"slices"
	"sync"
)

// Pending is an operation in flight, whatever its result: a *Handle, a *GroupHandle, a *JoinHandle, or a change of the
// process sets.
type Pending interface {
	// Name is the tensor's name, or the group's.
	Name() string
	// Poll reports whether the operation is done. Its name is then free.
	Poll() bool
	// Done returns a channel that is closed when the operation is done. Its name is free from then on.
	Done() <-chan struct{}
}

// PendingError is the error of a wait whose context has ended before the operation. The request is not withdrawn: the
// operation goes on, its slices are in use until it is done, and its name until Handle was seen done.
//
//	sum, err := hvd.Allreduce(ctx, x, hvd.Name("gradient"))
//	var late *hvd.PendingError
//	if errors.As(err, &late) {
//		// other work, then
//		sum, err = late.Handle.(*hvd.Handle[float32]).Wait(longer)
//	}
type PendingError struct {
	// Op is the operation, as "allreduce"; Tensor the name.
	Op, Tensor string
	// Handle is what the asynchronous form of the call would have given. A change of the process sets has a Pending without
	// a result: ProcessSets has that.
	Handle Pending
	// Err is why the wait has ended: that of the context, and its cause.
	Err error
}

func (e *PendingError) Error() string {
	return fmt.Sprintf("hvd: %s %q: gave up waiting, while the operation goes on and keeps its name: %v", e.Op, e.Tensor, e.Err)
}

func (e *PendingError) Unwrap() error { return e.Err }

// abandonedWaits are the waits of a rank that have ended with their contexts, of operations that were not done when the job
// ended. They may be the reason: a rank that waits no longer makes others wait.
type abandonedWaits struct {
	mu   sync.Mutex
	ops  []*operation
	errs []*PendingError
}

// add notes that a wait for o has ended with p. The first of an operation counts.
func (a *abandonedWaits) add(o *operation, p *PendingError) {
	if o.flags.Or(gaveUp)&gaveUp != 0 {
		return
	}
	a.mu.Lock()
	a.ops, a.errs = append(a.ops, o), append(a.errs, p)
	a.mu.Unlock()
	if o.ended() && !jobOver(o.err) { // complete may not have seen gaveUp
		a.remove(o)
	}
}

// remove notes that o is done.
func (a *abandonedWaits) remove(o *operation) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if i := slices.Index(a.ops, o); i >= 0 {
		a.ops, a.errs = slices.Delete(a.ops, i, i+1), slices.Delete(a.errs, i, i+1)
	}
}

// explain adds to an error that says that the job is over what this rank had given up waiting for.
func (a *abandonedWaits) explain(err error) error {
	if !jobOver(err) {
		return err
	}
	what := a.what()
	if what == "" || errors.As(err, new(*afterTimeoutError)) {
		return err
	}
	return &afterTimeoutError{fmt.Sprintf("%v; before that, this rank %s", err, what), err}
}

// what says what this rank has given up, as a clause without its subject. It is empty if that is nothing.
func (a *abandonedWaits) what() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.errs) == 0 {
		return ""
	}
	first := a.errs[0]
	text := fmt.Sprintf("gave up waiting for %s %q (%v)", first.Op, first.Tensor, first.Err)
	if more := len(a.errs) - 1; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

// jobOver reports whether err says that the job is.
func jobOver(err error) bool {
	return errors.Is(err, ErrShutDown) || errors.Is(err, ErrClosed) || errors.As(err, new(*PeerError))
}

// afterTimeoutError is the end of the job at a rank whose own timeout came before.
type afterTimeoutError struct {
	text string
	err  error
}

func (e *afterTimeoutError) Error() string { return e.text }

func (e *afterTimeoutError) Unwrap() error { return e.err }
