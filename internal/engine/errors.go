package engine

import (
	"errors"
	"fmt"
	"strings"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/message"
)

// ErrShutDown answers operations that no longer run because this rank has shut down, or because every rank that could
// have submitted them has.
var ErrShutDown = errors.New("shut down before every rank had submitted it")

// ErrClosed is the end of an epoch that Close cut short.
var ErrClosed = errors.New("the engine was closed")

// ErrCutShort is the end of a shutdown that made no progress while operations were still running.
var ErrCutShort = fmt.Errorf("%w; operations that were still running were cut off", ErrShutDown)

// StallError is the end of a job that was shut down because a tensor waited too long for ranks that did not submit it.
// It is an ErrShutDown.
type StallError struct {
	// Reason names operation, tensor, the ranks that are missing and how long was waited.
	Reason string
}

func (e *StallError) Error() string { return fmt.Sprintf("the job was shut down: %s", e.Reason) }

// Is makes a StallError an ErrShutDown.
func (e *StallError) Is(target error) bool { return target == ErrShutDown }

// UsageError refuses a call that this rank should not have made: a name in flight, a process set that it is no member
// of, options that do not fit. Nothing was submitted and other ranks do not know of it.
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

// MismatchError is the coordinator's refusal: the ranks' requests for a tensor contradict each other, or ask together
// for what cannot be done. The job goes on: the program is wrong, not the machine.
type MismatchError struct {
	// Tensor is the name that the ranks share.
	Tensor string
	// Text names operation, tensor, and who sent what.
	Text string
}

func (e *MismatchError) Error() string { return e.Text }

// PeerError says that the epoch is over because ranks failed. Every operation that was pending at any surviving
// rank has ended with it, and every later one will.
type PeerError struct {
	// Ranks are those that failed; where it cannot be told which of two, both.
	Ranks []int
	// Reason is what was observed.
	Reason string
	// ShutDown says that the ranks have shut down in order, while others waited for an operation that they had not submitted.
	// The error is then an ErrShutDown too.
	ShutDown bool
}

// Is makes the error an ErrShutDown if the ranks have shut down.
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

// OpError is the failure of one operation.
type OpError struct {
	// Op is the operation, as "allreduce"; Tensor the name.
	Op, Tensor string
	Err        error
}

func (e *OpError) Error() string {
	text := e.Err.Error()
	// Some causes name operation and tensor themselves, or that ranks disagree about the operation.
	if strings.HasPrefix(text, fmt.Sprintf("%s %q", e.Op, e.Tensor)) || strings.HasPrefix(text, fmt.Sprintf("tensor %q", e.Tensor)) {
		return "hvd: " + text
	}
	return fmt.Sprintf("hvd: %s %q: %s", e.Op, e.Tensor, text)
}

func (e *OpError) Unwrap() error { return e.Err }

func opError(q *message.Request, err error) error {
	return &OpError{Op: q.Kind.String(), Tensor: q.Name, Err: err}
}
