package sidecar

import (
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/failure"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
)

// usage returns err as an error that the client has caused. It has the same type as errors of this kind in
// package hvd.
func usage(op, tensor string, err error) error {
	return &engine.UsageError{Op: op, Tensor: tensor, Err: err}
}

// describe converts err to the message that is sent to a client.
func describe(err error) *sidecarpb.Error {
	d := failure.Describe(err)
	e := &sidecarpb.Error{Class: uint32(d.Class), Text: d.Text, Operation: d.Operation, Tensor: d.Tensor,
		ShutDown: d.ShutDown}
	for _, r := range d.Ranks {
		e.Ranks = append(e.Ranks, int32(r))
	}
	return e
}
