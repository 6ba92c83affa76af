package engine

import (
	"errors"
	"fmt"
	"strings"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/message"
)

// ErrShutDown is the error of operations that do not run anymore because this rank has shut down, or because
// every rank that could have submitted them has.
var ErrShutDown = errors.New("shut down before every rank had submitted the operation")

// ErrClosed is the error of an epoch that Close has ended.
var ErrClosed = errors.New("the engine was closed")

// ErrCutShort is the error of a shutdown that was cut short because operations that were still running made
// no progress.
var ErrCutShort = fmt.Errorf("%w: running operations were aborted because they made no progress", ErrShutDown)

// StallError is the error of a job that was shut down because a tensor waited too long for ranks that did not
// submit it. It matches ErrShutDown.
type StallError struct {
	// Reason names operation, tensor, the ranks that are missing and how long was waited.
	Reason string
}

func (e *StallError) Error() string { return fmt.Sprintf("the job was shut down: %s", e.Reason) }

// Is reports whether target is ErrShutDown.
func (e *StallError) Is(target error) bool { return target == ErrShutDown }

// UsageError is the error of a call that this rank should not have made: a name that is in flight, a process
// set without this rank, options that do not fit. Nothing was submitted, and other ranks do not know of the
// call.
type UsageError struct {
	// Op is the operation, as "allreduce"; Tensor the name, empty if the call gave none.
	Op, Tensor string
	Err        error
}

func (e *UsageError) Error() string {
	if e.Tensor == "" {
		return fmt.Sprintf("hvd: %s: %v", e.Op, e.Err)
	}
	return (&OpError{Op: e.Op, Tensor: e.Tensor, Err: e.Err}).Error()
}

func (e *UsageError) Unwrap() error { return e.Err }

// MismatchError is the error of a tensor for which the ranks' requests contradict each other, or together ask
// for something impossible. It comes from the coordinator, or from this rank if its output has no room for
// the result. The job continues: the program is wrong, not the machine.
type MismatchError struct {
	// Tensor is the name that the ranks share.
	Tensor string
	// Text names the operation, the tensor, and which rank sent what.
	Text string
}

func (e *MismatchError) Error() string { return e.Text }

// PeerError is the error of an epoch that has ended because ranks failed. Every operation that was pending at
// a surviving rank has ended with it, and every later one will.
type PeerError struct {
	// Ranks are the ranks that failed. If it is unknown which of two ranks failed, it has both.
	Ranks []int
	// Reason is what was observed.
	Reason string
	// ShutDown says that the ranks have shut down in order while other ranks waited for an operation that
	// they had not submitted. The error then also matches ErrShutDown.
	ShutDown bool
}

// Is reports whether target is ErrShutDown and the ranks have shut down.
func (e *PeerError) Is(target error) bool { return e.ShutDown && target == ErrShutDown }

func (e *PeerError) Error() string {
	var b strings.Builder
	for i, r := range e.Ranks {
		if i > 0 {
			b.WriteString(" or ")
		}
		fmt.Fprintf(&b, "rank %d", r)
	}
	return fmt.Sprintf("%s failed: %s", b.String(), e.Reason)
}

func newPeerError(v *controller.Verdict) *PeerError {
	e := &PeerError{Reason: v.Reason}
	for _, r := range v.Ranks {
		e.Ranks = append(e.Ranks, int(r))
	}
	return e
}

// OpError is the error of one operation.
type OpError struct {
	// Op is the operation, as "allreduce"; Tensor the name.
	Op, Tensor string
	Err        error
}

func (e *OpError) Error() string {
	text := e.Err.Error()
	// Some causes already name the operation and the tensor, or say that ranks disagree about the operation.
	if strings.HasPrefix(text, fmt.Sprintf("%s %q", e.Op, e.Tensor)) ||
		strings.HasPrefix(text, fmt.Sprintf("tensor %q", e.Tensor)) {
		return "hvd: " + text
	}
	return fmt.Sprintf("hvd: %s %q: %s", e.Op, e.Tensor, text)
}

func (e *OpError) Unwrap() error { return e.Err }

func opError(q *message.Request, err error) error {
	return &OpError{Op: q.Kind.String(), Tensor: q.Name, Err: err}
}
