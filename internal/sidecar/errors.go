package sidecar

import (
	"errors"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
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
		return classDuplicate
	}
	if _, ok := errors.AsType[*hvd.MismatchError](err); ok {
		return classMismatch
	}
	if _, ok := errors.AsType[*hvd.PeerError](err); ok {
		return classPeer
	}
	if _, ok := errors.AsType[*hvd.StallError](err); ok { // before ErrShutDown, which it is too
		return classStall
	}
	switch {
	case errors.Is(err, hvd.ErrNotInitialized):
		return classNotInitialized
	case errors.Is(err, hvd.ErrShutDown):
		return classShutDown
	case errors.Is(err, hvd.ErrClosed):
		return classClosed
	case errors.Is(err, hvd.ErrNoProcessSet):
		return classUsage
	}
	if _, ok := errors.AsType[*hvd.UsageError](err); ok {
		return classUsage
	}
	return classInternal
}
