// Package opstest lets tests and benchmarks of backends call collectives as functions that block until the
// operation has ended.
package opstest

import (
	"context"
	"runtime"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ops"
)

// Blocking calls the operations of a backend and blocks until they have ended. If Steps is set, it polls Step
// instead of waiting for other ranks, unless the backend returns ops.Blocked.
type Blocking struct {
	ops.Backend
	Steps bool

	one [1]ops.Tensor // the tensor of the running operation, kept so that steady state allocates nothing
}

func (b *Blocking) run(ctx context.Context, op ops.Operation) error {
	if !b.Steps {
		return ops.Run(ctx, b.Backend, op)
	}
	if err := b.Start(op); err != nil {
		return err
	}
	for wait := false; ; {
		p, err := b.Step(ctx, wait)
		if err != nil || p == ops.Finished {
			return err
		}
		wait = p == ops.Blocked
		if p == ops.Waiting {
			if err := context.Cause(ctx); err != nil {
				wait = true // a step that waits returns the cause of the context
			}
			runtime.Gosched()
		}
	}
}

// single returns buf as the tensor of an operation in place.
func (b *Blocking) single(buf []byte) []ops.Tensor {
	b.one[0] = ops.Tensor{In: buf, Out: buf}
	return b.one[:]
}

// Allreduce reduces buf in place.
func (b *Blocking) Allreduce(ctx context.Context, alg message.Algorithm, dt tensor.DType, op tensor.ReduceOp,
	buf []byte) error {
	return b.AllreduceFused(ctx, alg, dt, op, ops.Scaling{Pre: 1, Post: 1}, b.single(buf))
}

// AllreduceFused reduces tensors and scales them.
func (b *Blocking) AllreduceFused(ctx context.Context, alg message.Algorithm, dt tensor.DType,
	op tensor.ReduceOp, s ops.Scaling, tensors []ops.Tensor) error {
	return b.run(ctx, ops.Operation{Kind: message.Allreduce, Algorithm: alg, DType: dt, Op: op,
		Tensors: tensors, Scaling: s})
}

// Adasum combines the tensors in buf in place. counts has their sizes in bytes.
func (b *Blocking) Adasum(ctx context.Context, alg message.Algorithm, dt tensor.DType, buf []byte,
	counts []int64) error {
	return b.run(ctx, ops.Operation{
		Kind: message.Allreduce, Algorithm: alg, DType: dt, Op: tensor.Adasum, Tensors: b.single(buf),
		Counts: counts,
	})
}

// Allgather fills out with the blocks of all ranks. Before the call out has this rank's own block.
func (b *Blocking) Allgather(ctx context.Context, alg message.Algorithm, out []byte, counts []int64) error {
	return b.run(ctx, ops.Operation{Kind: message.Allgather, Algorithm: alg, Buf: out, Counts: counts})
}

// Broadcast copies buf of rank root to the buf of the other ranks.
func (b *Blocking) Broadcast(ctx context.Context, alg message.Algorithm, root int, buf []byte) error {
	return b.run(ctx, ops.Operation{Kind: message.Broadcast, Algorithm: alg, Buf: buf, Root: root})
}

// Reducescatter reduces buf, of which each rank gets the result of its own block in place.
func (b *Blocking) Reducescatter(ctx context.Context, alg message.Algorithm, dt tensor.DType,
	op tensor.ReduceOp, buf []byte, counts []int64) error {
	return b.run(ctx, ops.Operation{Kind: message.Reducescatter, Algorithm: alg, DType: dt, Op: op, Buf: buf,
		Counts: counts})
}

// Alltoall sends the blocks of in to the ranks. It puts the blocks that it receives into the memory from
// allocate.
func (b *Blocking) Alltoall(ctx context.Context, alg message.Algorithm, in []byte, counts []int64,
	allocate func(counts []int64) ([]byte, error)) error {
	return b.run(ctx, ops.Operation{Kind: message.Alltoall, Algorithm: alg, Buf: in, Counts: counts,
		Allocate: allocate})
}
