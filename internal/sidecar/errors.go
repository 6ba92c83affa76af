package sidecar

import (
	"errors"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/internal/sidecar/wire"
)

// usage makes an error one of the client's making, as hvd's are.
func usage(op, tensor string, err error) error {
	return &hvd.UsageError{Op: op, Tensor: tensor, Err: err}
}

// describe is err for a client.
func describe(err error) *sidecarpb.Error {
	e := &sidecarpb.Error{Class: classOf(err), Text: err.Error()}
	if of, ok := errors.AsType[*hvd.OpError](err); ok {
		e.Operation, e.Tensor = of.Op, of.Tensor
	}
	if of, ok := errors.AsType[*hvd.UsageError](err); ok {
		e.Operation, e.Tensor = of.Op, of.Tensor
	}
	if of, ok := errors.AsType[*hvd.PeerError](err); ok {
		for _, r := range of.Ranks {
			e.Ranks = append(e.Ranks, int32(r))
		}
		e.ShutDown = of.ShutDown
	}
	return e
}

func classOf(err error) uint32 {
	if _, ok := errors.AsType[*hvd.DuplicateNameError](err); ok {
		return wire.ClassDuplicate
	}
	if _, ok := errors.AsType[*hvd.MismatchError](err); ok {
		return wire.ClassMismatch
	}
	if _, ok := errors.AsType[*hvd.PeerError](err); ok {
		return wire.ClassPeer
	}
	if _, ok := errors.AsType[*hvd.StallError](err); ok { // before ErrShutDown, which it is too
		return wire.ClassStall
	}
	switch {
	case errors.Is(err, hvd.ErrNotInitialized):
		return wire.ClassNotInitialized
	case errors.Is(err, hvd.ErrShutDown):
		return wire.ClassShutDown
	case errors.Is(err, hvd.ErrClosed):
		return wire.ClassClosed
	case errors.Is(err, hvd.ErrNoProcessSet):
		return wire.ClassUsage
	}
	if _, ok := errors.AsType[*hvd.UsageError](err); ok {
		return wire.ClassUsage
	}
	return wire.ClassInternal
}
