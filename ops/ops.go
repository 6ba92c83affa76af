// Package ops runs granted responses: an ordered list of backends, the first of which that can do the
// work does it (the form of Horovod's operation manager).
package ops

import (
	"context"

	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/tensor"
)

// Backend runs collectives among the members of one process set on one lane. All members call the same
// methods in the same order with agreeing arguments. Calls are not concurrent. Ranks are counted within
// the set: 0 to n-1 in the order of the set.
//
// Whenever a method returns, nothing reads or writes its buffers any more. An error leaves their contents undefined
// and the backend dead: its streams have lost their position.
type Backend interface {
	// ID names the backend on the wire.
	ID() message.Backend

	// Plan says by which algorithm the backend would run a response of r's kind on numBytes of output, or
	// why it cannot (the reason alone: the Manager adds whose it is, and for what). It must give the same
	// answer on every rank that has the same capabilities; the coordinator asks, and its answer binds all.
	Plan(r *message.Response, numBytes int64) (message.Algorithm, error)

	// Allreduce reduces buf, elements of dt and aligned for them, in place with op (Sum, Min, Max or Product;
	// averages are made by scaling). Afterwards all ranks hold the same bits.
	Allreduce(ctx context.Context, alg message.Algorithm, dt tensor.DType, op tensor.ReduceOp, buf []byte) error

	// Adasum combines the tensors that lie one behind the other in buf, elements of dt, in place and each by
	// itself; counts has the bytes of each. Afterwards all ranks hold the same bits.
	Adasum(ctx context.Context, alg message.Algorithm, dt tensor.DType, buf []byte, counts []int64) error

	// Allgather fills out with the contributions of all ranks in order; rank i gives counts[i] bytes. The
	// caller has put its own contribution in place already.
	Allgather(ctx context.Context, alg message.Algorithm, out []byte, counts []int64) error

	// Broadcast copies root's buf to the buf of all others.
	Broadcast(ctx context.Context, alg message.Algorithm, root int, buf []byte) error

	// Reducescatter reduces buf, elements of dt in one block for each rank, with op as Allreduce does. Block i has
	// counts[i] bytes, whole elements. Afterwards each rank holds the result in its own block; the others are undefined.
	Reducescatter(ctx context.Context, alg message.Algorithm, dt tensor.DType, op tensor.ReduceOp, buf []byte, counts []int64) error

	// Alltoall gives each rank i its block of in, which has counts[i] bytes, and collects the blocks that the ranks
	// have for this one, in their order. What each rank gives is known only now: allocate is called once, with the
	// bytes from each rank (valid during the call), and returns the output of their sum, or an error, which ends
	// the operation.
	Alltoall(ctx context.Context, alg message.Algorithm, in []byte, counts []int64, allocate func(counts []int64) ([]byte, error)) error
}

// Tensor is this rank's part in one tensor of a fused reduction: elements, as bytes.
type Tensor struct {
	// In is what the rank contributes and Out where it wants the result. They have the same length and are aligned for
	// the elements; they are the same memory or do not overlap.
	In, Out []byte
}

// Scaling is what happens to the elements around a reduction: all contributions are multiplied by Pre, and the result
// divided by Divisor (integers only; 0 and 1 do nothing) and multiplied by Post. The factors round as kernel.Scale does.
type Scaling struct {
	Pre, Post float64
	Divisor   int64
}

// Fuser is a Backend that takes the tensors of a fused allreduce from where they lie and puts them there, scaling them
// on the way, so that they pass through no fusion buffer.
type Fuser interface {
	Backend

	// AllreduceFused is Allreduce of the tensors as if they lay one behind the other. What each rank's tensors are called
	// and where one ends may differ between ranks; their total length may not.
	AllreduceFused(ctx context.Context, alg message.Algorithm, dt tensor.DType, op tensor.ReduceOp, s Scaling, tensors []Tensor) error
}

// Starter is a Fuser that can do operations step by step, so that who waits for other ranks can do something else
// meanwhile.
type Starter interface {
	Fuser

	// StartAllreduce begins AllreduceFused: it gives the others what they need first of this rank. It does not wait. If it
	// cannot, or if more than one step is left and long does not allow that, it does nothing and reports false, and
	// AllreduceFused is to be called. The buffers are the backend's until the operation is finished, which comes before
	// any other call.
	StartAllreduce(alg message.Algorithm, dt tensor.DType, op tensor.ReduceOp, s Scaling, tensors []Tensor, long bool) (started bool, err error)

	// StartAllgather begins Allgather, which has more than one step.
	StartAllgather(alg message.Algorithm, out []byte, counts []int64) (started bool, err error)

	// StartBroadcast begins Broadcast, which has more than one step.
	StartBroadcast(alg message.Algorithm, root int, buf []byte) (started bool, err error)

	// TryFinish does the next step, unless that would have to wait for another rank.
	TryFinish() (Progress, error)

	// Finish does what is left. It waits until ctx ends.
	Finish(ctx context.Context) error
}

// Progress is what came of a step.
type Progress uint8

const (
	// Waiting is a step that has to wait for another rank.
	Waiting Progress = iota
	// Moving is a step that was done, and others are left.
	Moving
	// Finished is the last step.
	Finished
)
