package hvd

import (
	"errors"
	"fmt"
	"slices"
	"sync"
)

// Pending is an operation in flight, without the type of its result. Its dynamic type is *Handle.
type Pending interface {
	// Name returns the name of the tensor or group, or of a message, such as "rank 2 to rank 0, tag 7".
	Name() string
	// Poll reports whether the operation is done. If the operation is done, its name is free from then on.
	Poll() bool
	// Done returns a channel that is closed when the operation is done. The operation's name is free from
	// then on.
	Done() <-chan struct{}
}

// PendingError reports that the context of a wait ended before the operation was done. The request is not
// withdrawn and the operation goes on. The slices stay in use until the operation is done. The name stays in
// use until the program has observed through Handle that the operation is done.
//
//	sum, err := hvd.Allreduce(ctx, x, hvd.Name("gradient"))
//	var late *hvd.PendingError
//	if errors.As(err, &late) {
//		// other work, then
//		sum, err = late.Handle.(*hvd.Handle[[]float32]).Wait(longer)
//	}
type PendingError struct {
	// Op is the operation, such as "allreduce". Tensor is its name.
	Op, Tensor string
	// Handle is the handle that the asynchronous form of the call would have returned. For AddProcessSet it
	// is a *Handle[*ProcessSet], and for RemoveProcessSet a *Handle[struct{}].
	Handle Pending
	// Err is the error of the context, with its cause.
	Err error
}

func (e *PendingError) Error() string {
	return fmt.Sprintf("hvd: %s %q: gave up waiting: %v; the operation continues, and its name and slices stay in use", e.Op, e.Tensor, e.Err)
}

func (e *PendingError) Unwrap() error { return e.Err }

// abandonedWaits holds the waits of a rank whose contexts ended before their operations were done. If a rank
// gives up a wait and leaves, other ranks may wait for it until the job ends. So errors about the end of the
// job mention such waits.
type abandonedWaits struct {
	mu   sync.Mutex
	ops  []*operation
	errs []*PendingError
}

// add records p, the error of a wait for o whose context ended. It records only the first such wait for each
// operation.
func (a *abandonedWaits) add(o *operation, p *PendingError) {
	if o.flags.Or(gaveUp)&gaveUp != 0 {
		return
	}
	a.mu.Lock()
	a.ops, a.errs = append(a.ops, o), append(a.errs, p)
	a.mu.Unlock()
	if o.ended() && !jobOver(o.err) { // complete may have run before gaveUp was set
		a.remove(o)
	}
}

// remove deletes the recorded wait for o, because o is done.
func (a *abandonedWaits) remove(o *operation) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if i := slices.Index(a.ops, o); i >= 0 {
		a.ops, a.errs = slices.Delete(a.ops, i, i+1), slices.Delete(a.errs, i, i+1)
	}
}

// explain makes err public. If err says that the job is over, explain adds to its text which operations this
// rank had given up waiting for.
func (a *abandonedWaits) explain(err error) error {
	if err = public(err); !jobOver(err) {
		return err
	}
	what := a.describe()
	if what == "" || errors.As(err, new(*afterTimeoutError)) {
		return err
	}
	return &afterTimeoutError{fmt.Sprintf("%v; before that, this rank %s", err, what), err}
}

// describe returns a clause such as "gave up waiting for allreduce ...", of which this rank is the subject.
// It returns "" if no wait is recorded.
func (a *abandonedWaits) describe() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.errs) == 0 {
		return ""
	}
	first := a.errs[0]
	text := fmt.Sprintf("gave up waiting for %s %q (%v)", first.Op, first.Tensor, first.Err)
	if more := len(a.errs) - 1; more > 0 {
		text += fmt.Sprintf(" and for %d other operations", more)
	}
	return text
}

// jobOver reports whether err says that the job has ended for this rank.
func jobOver(err error) bool {
	return errors.Is(err, ErrShutDown) || errors.Is(err, ErrClosed) || errors.As(err, new(*PeerError))
}

// afterTimeoutError reports that the job ended after a wait of this rank had timed out.
type afterTimeoutError struct {
	text string
	err  error
}

func (e *afterTimeoutError) Error() string { return e.text }

func (e *afterTimeoutError) Unwrap() error { return e.err }
