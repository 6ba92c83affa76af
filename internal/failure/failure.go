// Package failure describes errors for programs in other languages than Go, which cannot use errors.As.
package failure

import (
	"errors"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/ps"
	"github.com/gohvd/gohvd/tensorqueue"
)

// Class is a class of errors. The numbers are part of the protocol of the sidecar (docs/sidecar.md) and of
// the library for C (docs/c-api.md).
type Class uint32

// These are the classes.
const (
	Usage Class = 1 + iota
	Duplicate
	Mismatch
	Peer
	ShutDown
	Closed
	NotInitialized
	Stall
	Internal
)

// Description describes an error.
type Description struct {
	Class             Class
	Text              string
	Operation, Tensor string // empty if the error is not about one
	Ranks             []int  // the ranks that have failed, if the class is Peer
	ShutDown          bool   // these ranks did not crash, but have shut down
}

// Describe returns the description of err.
func Describe(err error) Description {
	d := Description{Class: classOf(err), Text: err.Error()}
	if of, ok := errors.AsType[*engine.MismatchError](err); ok {
		d.Tensor = of.Tensor
	}
	if of, ok := errors.AsType[*engine.OpError](err); ok {
		d.Operation, d.Tensor = of.Op, of.Tensor
	}
	if of, ok := errors.AsType[*engine.UsageError](err); ok {
		d.Operation, d.Tensor = of.Op, of.Tensor
	}
	if of, ok := errors.AsType[*engine.PeerError](err); ok {
		d.Ranks, d.ShutDown = of.Ranks, of.ShutDown
	}
	return d
}

// classOf returns the class of err.
func classOf(err error) Class {
	if _, ok := errors.AsType[*tensorqueue.DuplicateNameError](err); ok {
		return Duplicate
	}
	if _, ok := errors.AsType[*engine.MismatchError](err); ok {
		return Mismatch
	}
	if _, ok := errors.AsType[*engine.PeerError](err); ok {
		return Peer
	}
	// This check comes before the check for ErrShutDown, because errors.Is(err, ErrShutDown) is true for a
	// StallError too.
	if _, ok := errors.AsType[*engine.StallError](err); ok {
		return Stall
	}
	switch {
	case errors.Is(err, rank.ErrNotInitialized):
		return NotInitialized
	case errors.Is(err, engine.ErrShutDown):
		return ShutDown
	case errors.Is(err, engine.ErrClosed):
		return Closed
	case errors.Is(err, engine.ErrNoProcessSet):
		return Usage
	}
	if _, ok := errors.AsType[*engine.UsageError](err); ok {
		return Usage
	}
	if _, ok := errors.AsType[*ps.UsageError](err); ok {
		return Usage
	}
	return Internal
}
