// Package opstest has blocking collectives for tests and benchmarks of backends: each collective is a
// function that returns when the operation has ended.
package opstest

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ops"
)

// Blocking wraps a Backend and adds a method for each collective. A method starts the operation and returns
// when the operation has ended. If Steps is set, the method calls Step without waiting, until a call returns
// ops.Blocked.
type Blocking struct {
	ops.Backend
	Steps bool

	one [1]ops.Tensor // Tensors of the running operation, kept here so that no call allocates
}

// Run runs any operation.
func (b *Blocking) Run(ctx context.Context, op ops.Operation) error {
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
				wait = true // a step with wait set returns the cause instead of waiting
			}
			runtime.Gosched()
		}
	}
}

// single returns buf as the only tensor of an in-place operation.
func (b *Blocking) single(buf []byte) []ops.Tensor {
	b.one[0] = ops.Tensor{In: buf, Out: buf}
	return b.one[:]
}

// Allreduce reduces buf in place, without scaling.
func (b *Blocking) Allreduce(ctx context.Context, alg message.Algorithm, dt tensor.DType, op tensor.ReduceOp,
	buf []byte) error {
	return b.AllreduceFused(ctx, alg, dt, op, ops.Scaling{Pre: 1, Post: 1}, b.single(buf))
}

// AllreduceFused reduces tensors and scales them by s.
func (b *Blocking) AllreduceFused(ctx context.Context, alg message.Algorithm, dt tensor.DType,
	op tensor.ReduceOp, s ops.Scaling, tensors []ops.Tensor) error {
	return b.Run(ctx, ops.Operation{Kind: message.Allreduce, Algorithm: alg, DType: dt, Op: op,
		Tensors: tensors, Scaling: s})
}

// Reduce reduces tensors, without scaling. The given root gets the result.
func (b *Blocking) Reduce(ctx context.Context, alg message.Algorithm, dt tensor.DType, op tensor.ReduceOp,
	root int, tensors ...ops.Tensor) error {
	return b.Run(ctx, ops.Operation{Kind: message.Reduce, Algorithm: alg, DType: dt, Op: op, Root: root,
		Tensors: tensors, Scaling: ops.Scaling{Pre: 1, Post: 1}})
}

// Adasum combines the tensors that are concatenated in buf. counts are the sizes of the tensors in bytes.
func (b *Blocking) Adasum(ctx context.Context, alg message.Algorithm, dt tensor.DType, buf []byte,
	counts []int64) error {
	return b.Run(ctx, ops.Operation{
		Kind: message.Allreduce, Algorithm: alg, DType: dt, Op: tensor.Adasum, Tensors: b.single(buf),
		Counts: counts,
	})
}

// Allgather collects the blocks of all ranks in the buffer out. counts are the sizes of the blocks in bytes.
func (b *Blocking) Allgather(ctx context.Context, alg message.Algorithm, out []byte, counts []int64) error {
	return b.Run(ctx, ops.Operation{Kind: message.Allgather, Algorithm: alg, Buf: out, Counts: counts})
}

// Broadcast copies the buf of the given root to the buf of every other rank.
func (b *Blocking) Broadcast(ctx context.Context, alg message.Algorithm, root int, buf []byte) error {
	return b.Run(ctx, ops.Operation{Kind: message.Broadcast, Algorithm: alg, Buf: buf, Root: root})
}

// Reducescatter reduces buf and leaves the result in this rank's block of it. counts are the sizes of the
// blocks in bytes.
func (b *Blocking) Reducescatter(ctx context.Context, alg message.Algorithm, dt tensor.DType,
	op tensor.ReduceOp, buf []byte, counts []int64) error {
	return b.Run(ctx, ops.Operation{Kind: message.Reducescatter, Algorithm: alg, DType: dt, Op: op, Buf: buf,
		Counts: counts, Scaling: ops.Scaling{Pre: 1, Post: 1}})
}

// Alltoall sends a block of the input buffer to each rank: block i goes to rank i. counts are the sizes of
// the blocks in bytes.
func (b *Blocking) Alltoall(ctx context.Context, alg message.Algorithm, in []byte, counts []int64,
	allocate func(counts []int64) ([]byte, error)) error {
	return b.Run(ctx, ops.Operation{Kind: message.Alltoall, Algorithm: alg, Buf: in, Counts: counts,
		Allocate: allocate})
}

// Each calls f for the backends of all ranks at the same time and returns their errors. If the calls take
// longer than five minutes, Each calls abort, which must make them fail, so that the test fails instead of
// hanging.
func Each(backends []*Blocking, abort func(error), f func(i int, b *Blocking) error) []error {
	hung := time.AfterFunc(5*time.Minute, func() { abort(errors.New("the cluster hangs")) })
	defer hung.Stop()
	errs := make([]error, len(backends))
	var wg sync.WaitGroup
	for i, b := range backends {
		wg.Go(func() { errs[i] = f(i, b) })
	}
	wg.Wait()
	return errs
}
