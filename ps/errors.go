package ps

import (
	"errors"

	"github.com/gohvd/gohvd/internal/ps/van"
)

// ErrFinalized is the error of calls after Finalize, Close or Fail, and of requests that these calls have
// interrupted.
var ErrFinalized = errors.New("this node has been finalized")

// NodeError reports that a node has died or left the job, or that the connection with it has ended. Requests
// to the node and barriers with it fail with this error. AwaitReturn waits until the node is back.
type NodeError struct {
	// Node is the id of the node.
	Node NodeID
	// Err is the reason.
	Err error
}

func (e *NodeError) Error() string { return e.Node.String() + " is gone: " + e.Err.Error() }

func (e *NodeError) Unwrap() error { return e.Err }

// RemoteError reports that a node has answered a request with an error.
type RemoteError struct {
	// Node is the id of the node.
	Node NodeID
	// Text is the error at that node.
	Text string
}

func (e *RemoteError) Error() string { return e.Node.String() + ": " + e.Text }

// UsageError reports that the arguments of a call are wrong, for example because keys are not sorted or
// values do not fit them, or that a node of this role cannot make the call.
type UsageError struct{ Err error }

func (e *UsageError) Error() string { return e.Err.Error() }

func (e *UsageError) Unwrap() error { return e.Err }

// vanError is an error of package van with its counterpart of this package.
type vanError struct {
	error
	public error
}

func (e *vanError) Unwrap() []error { return []error{e.public, e.error} }

// public returns err, or an error with the same text that wraps a *NodeError or ErrFinalized if err wraps the
// error of package van with the same meaning. Each error of package van that the program gets passes through
// this function.
func public(err error) error {
	if gone, ok := errors.AsType[*van.NodeError](err); ok {
		node := &NodeError{NodeID(gone.ID), gone.Err}
		if err == error(gone) {
			return node
		}
		return &vanError{err, node}
	}
	if errors.Is(err, van.ErrStopped) {
		return &vanError{err, ErrFinalized}
	}
	return err
}
