package van

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// NodeError reports that a node has died or left the job.
type NodeError struct {
	// ID is the id of the node.
	ID int
	// Err is the reason.
	Err error
}

func (e *NodeError) Error() string { return Name(e.ID) + " is gone: " + e.Err.Error() }

func (e *NodeError) Unwrap() error { return e.Err }

// nodeError returns the error of a request to a node that is gone because of err. If this van has failed, the
// node may be alive, and the error says why the van has failed.
func nodeError(id int, err error) error {
	if failed, ok := errors.AsType[*NodeError](err); ok {
		return failed
	}
	return &NodeError{id, err}
}

// ErrStopped is the error of calls after Stop.
var ErrStopped = errors.New("this node has been finalized")

// LimitError reports that a message is longer than a peer would accept, or than the queue has room for.
type LimitError struct{ text string }

func (e *LimitError) Error() string { return e.text }

// ErrLeft is the reason why a node is gone if it has left the job.
var ErrLeft = errors.New("it has left the job")

// ErrOver is the error of a registration with a scheduler whose job has ended.
var ErrOver = errors.New("the scheduler at this address belongs to a job that has ended: no new scheduler " +
	"has started")

// errReplaced is the reason why a link has ended if another process has taken the place of the peer.
var errReplaced = errors.New("its process has ended, and another one has taken its place")

// errAgain is the reason why a link has ended if the peer has made another one.
var errAgain = errors.New("its connection has ended, and it has connected again")

// errEnded is the reason why a node is gone if its connection has ended without TERMINATE.
var errEnded = errors.New("its connection has ended")

// silenceError reports that nothing has come from a peer for the heartbeat timeout.
type silenceError struct{ silent, limit time.Duration }

func (e *silenceError) Error() string {
	return fmt.Sprintf("no message came from it for %v (PS_HEARTBEAT_TIMEOUT is %v)",
		e.silent.Round(time.Millisecond), e.limit)
}

// isLate reports whether ctx has ended because its time limit has passed.
func isLate(ctx context.Context) bool { return errors.Is(ctx.Err(), context.DeadlineExceeded) }

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
