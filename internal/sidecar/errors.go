package sidecar

import (
	"errors"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/ps"
	"github.com/gohvd/gohvd/tensorqueue"
)

// These are the classes of errors. docs/sidecar.md lists their numbers.
const (
	classUsage = 1 + iota
	classDuplicate
	classMismatch
	classPeer
	classShutDown
	classClosed
	classNotInitialized
	classStall
	classInternal
)

// usage returns err as an error that the client has caused. It has the same type as errors of this kind in
// package hvd.
func usage(op, tensor string, err error) error {
	return &engine.UsageError{Op: op, Tensor: tensor, Err: err}
}

// describe converts err to the message that is sent to a client.
func describe(err error) *sidecarpb.Error {
	e := &sidecarpb.Error{Class: classOf(err), Text: err.Error()}
	if of, ok := errors.AsType[*engine.OpError](err); ok {
		e.Operation, e.Tensor = of.Op, of.Tensor
	}
	if of, ok := errors.AsType[*engine.UsageError](err); ok {
		e.Operation, e.Tensor = of.Op, of.Tensor
	}
	if of, ok := errors.AsType[*engine.PeerError](err); ok {
		for _, r := range of.Ranks {
			e.Ranks = append(e.Ranks, int32(r))
		}
		e.ShutDown = of.ShutDown
	}
	return e
}

// classOf returns the class of err.
func classOf(err error) uint32 {
	if _, ok := errors.AsType[*tensorqueue.DuplicateNameError](err); ok {
		return classDuplicate
	}
	if _, ok := errors.AsType[*engine.MismatchError](err); ok {
		return classMismatch
	}
	if _, ok := errors.AsType[*engine.PeerError](err); ok {
		return classPeer
	}
	// This check comes before the check for ErrShutDown, because errors.Is(err, ErrShutDown) is true for a
	// StallError too.
	if _, ok := errors.AsType[*engine.StallError](err); ok {
		return classStall
	}
	switch {
	case errors.Is(err, rank.ErrNotInitialized):
		return classNotInitialized
	case errors.Is(err, engine.ErrShutDown):
		return classShutDown
	case errors.Is(err, engine.ErrClosed):
		return classClosed
	case errors.Is(err, engine.ErrNoProcessSet):
		return classUsage
	}
	if _, ok := errors.AsType[*engine.UsageError](err); ok {
		return classUsage
	}
	if _, ok := errors.AsType[*ps.UsageError](err); ok {
		return classUsage
	}
	return classInternal
}
