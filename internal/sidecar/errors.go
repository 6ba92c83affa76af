package sidecar

import (
	"errors"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/tensorqueue"
)

// Classes of errors, as docs/sidecar.md numbers them.
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

// usage makes an error one of the client's making, as hvd's are.
func usage(op, tensor string, err error) error {
	return &engine.UsageError{Op: op, Tensor: tensor, Err: err}
}

// describe is err for a client.
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
	if _, ok := errors.AsType[*engine.StallError](err); ok { // before ErrShutDown, which it is too
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
	return classInternal
}
