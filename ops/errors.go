package ops

import "github.com/gohvd/gohvd/internal/topo"

// UnknownRankError reports that an operation has failed, and that the backend cannot tell which of the given
// ranks has caused this. If the backend knows the rank, it returns a *transport.PeerError instead.
type UnknownRankError struct {
	// Ranks are the ranks that run the operation, in ascending order. This rank is one of them.
	Ranks []topo.Rank
	Err   error
}

func (e *UnknownRankError) Error() string { return e.Err.Error() }

func (e *UnknownRankError) Unwrap() error { return e.Err }

// InUseError reports that an operation has failed, but a device may still read or write its buffers. The
// program must not use or free these buffers.
type InUseError struct{ Err error }

func (e *InUseError) Error() string { return e.Err.Error() }

func (e *InUseError) Unwrap() error { return e.Err }
