package exec

import (
	"fmt"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/ops"
)

// Plan chooses the backend and the algorithm of a response for the coordinator. numBytes is the total size of
// the response and of all responses that are fused with it, and t has the settings that were changed last, or
// is nil. members are the members of the response's process set, of which this rank need not be one.
func (x *Executor) Plan(members []topo.Rank, r *message.Response, numBytes int64,
	t *message.Tuning) (message.Backend, message.Algorithm, error) {
	if err := x.cfg.checkResult(r.Kind, r.Devices != nil, numBytes); err != nil {
		return message.NoBackend, message.NoAlgorithm, err
	}
	backend, algorithm, err := planTypes(x.cfg.Backends, members, r, numBytes, t)
	if err != nil && r.Devices != nil && x.cfg.Devices != nil {
		// No backend for devices can run r, so the lanes copy the tensors to host memory.
		if err := x.cfg.checkResult(r.Kind, false, numBytes); err != nil {
			return message.NoBackend, message.NoAlgorithm, err
		}
		inHost := *r
		inHost.Devices = nil
		if b, a, refused := planTypes(x.cfg.Backends, members, &inHost, numBytes, t); refused == nil {
			return b, a, nil
		}
	}
	return backend, algorithm, err
}

// planTypes chooses the backend and the algorithm of r. If r is a group with several element types, they are
// reduced one after another, by the first backend that can run all types. If the algorithms for the types
// differ, planTypes chooses message.Direct, which has no preconditions.
func planTypes(backends ops.Registry, members []topo.Rank, r *message.Response, numBytes int64,
	t *message.Tuning) (backend message.Backend, algorithm message.Algorithm, err error) {
	if len(r.Parts) == 0 || r.DType.Valid() {
		return backends.Plan(members, r, numBytes, t)
	}
	one := *r
	one.Parts = nil
	for dt := range r.Parts.Types() {
		one.DType = dt
		b, a, err := backends.Plan(members, &one, numBytes, t)
		switch {
		case err != nil:
			return message.NoBackend, message.NoAlgorithm, err
		case backend == message.NoBackend:
			backend, algorithm = b, a
		case b != backend:
			// The first backend of the list cannot run one of the two types.
			if b, a, err := planTypes(backends[1:], members, r, numBytes, t); err == nil {
				return b, a, nil
			}
			return message.NoBackend, message.NoAlgorithm,
				fmt.Errorf("no backend supports all element types of the group: the backend is %v for %v, but %v for another type", b, dt, backend)
		case a != algorithm:
			algorithm = message.Direct
		}
	}
	return backend, algorithm, nil
}
