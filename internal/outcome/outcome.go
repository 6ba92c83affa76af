// Package outcome has the errors with which the operations and the epoch of a rank end.
package outcome

import (
	"errors"
	"fmt"
	"strings"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
)

// ErrShutDown reports that an operation cannot run anymore because this rank has shut down, or because every
// rank that could have submitted it has shut down.
var ErrShutDown = errors.New("this rank or the job was shut down before every rank had submitted the operation")

// ErrClosed reports that this rank has ended the epoch by a call of Close, or that the context of its
// Shutdown ended and the verdict names only this rank.
var ErrClosed = errors.New("the engine was closed")

// ErrNoProcessSet reports that the process set of an operation was removed or does not contain this rank. If
// a set is removed, the operations that wait in it also fail with this error.
var ErrNoProcessSet = errors.New("the process set was removed, or this rank is not a member of it")

// ErrCutShort reports that a shutdown of all ranks has aborted running operations because they made no
// progress.
var ErrCutShort = CutShort(ErrShutDown)

// CutShort returns an error that reports that a shutdown because of cause has aborted running operations.
func CutShort(cause error) error {
	return fmt.Errorf("%w; running operations were aborted because they made no progress", cause)
}

// StallError reports that the job was shut down because some ranks did not submit or finish a tensor for
// which the other ranks had waited too long. It matches ErrShutDown.
type StallError struct {
	// Reason names the operation, the tensor, the missing ranks and how long the other ranks have waited.
	Reason string
}

func (e *StallError) Error() string { return fmt.Sprintf("the job was shut down: %s", e.Reason) }

// Is reports whether target is ErrShutDown.
func (e *StallError) Is(target error) bool { return target == ErrShutDown }

// UsageError reports that this rank should not have made a call. For example, the name is in use, the process
// set does not contain this rank, or the options contradict each other. Nothing was submitted, and the other
// ranks do not know of the call.
type UsageError struct {
	// Op is the operation, such as "allreduce". Tensor is the name of the tensor, or "" if the call gave
	// none.
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

// MismatchError reports that the requests of the ranks for a tensor contradict each other or together ask for
// something impossible. The coordinator detects this. If the output has no room for the result, this rank
// detects it. The job continues, because the program is at fault, not a machine.
type MismatchError struct {
	// Tensor is the name of the tensor, which is equal in all requests.
	Tensor string
	// Text names the operation and the tensor, and says what each rank sent.
	Text string
}

func (e *MismatchError) Error() string { return e.Text }

// PeerError reports that the epoch ended because ranks failed. At the surviving ranks, every pending
// operation and every later operation fails with it.
type PeerError struct {
	// Ranks are the ranks that failed. If it is unknown which of several ranks failed, Ranks contains all of
	// them.
	Ranks []int
	// Reason is a clause that describes how the failure was observed. In messages it follows the ranks.
	Reason string
	// ShutDown is set if Ranks did not crash. They shut down in an orderly way, but had not submitted an
	// operation for which other ranks waited. In this case the error also matches ErrShutDown.
	ShutDown bool
}

// Is reports whether target is ErrShutDown and ShutDown is set.
func (e *PeerError) Is(target error) bool { return e.ShutDown && target == ErrShutDown }

func (e *PeerError) Error() string {
	if len(e.Ranks) == 2 { // usually the two ends of a connection that was lost
		return fmt.Sprintf("rank %d or rank %d failed: %s", e.Ranks[0], e.Ranks[1], e.Reason)
	}
	return fmt.Sprintf("%s failed: %s", topo.FormatRanks(e.Ranks), e.Reason)
}

// OfVerdict returns the error with which an epoch ends after the verdict v.
func OfVerdict(v *controller.Verdict) *PeerError {
	e := &PeerError{Reason: v.Reason}
	for _, r := range v.Ranks {
		e.Ranks = append(e.Ranks, int(r))
	}
	return e
}

// OpError reports why one operation has failed.
type OpError struct {
	// Op is the operation, such as "allreduce". Tensor is the name of the tensor.
	Op, Tensor string
	Err        error
}

func (e *OpError) Error() string {
	text := e.Err.Error()
	// Some causes already begin with the operation and the tensor. Do not repeat these.
	if strings.HasPrefix(text, fmt.Sprintf("%s %q", e.Op, e.Tensor)) ||
		strings.HasPrefix(text, fmt.Sprintf("tensor %q", e.Tensor)) {
		return "hvd: " + text
	}
	return fmt.Sprintf("hvd: %s %q: %s", e.Op, e.Tensor, text)
}

func (e *OpError) Unwrap() error { return e.Err }

// Of returns the error of the operation with the request q that has failed because of err.
func Of(q *message.Request, err error) error {
	return &OpError{Op: q.Kind.String(), Tensor: q.Name, Err: err}
}
