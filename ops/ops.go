// Package ops runs granted responses. It tries an ordered list of backends, and the first that can run a
// response runs it, as in Horovod's operation manager.
package ops

import (
	"context"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
)

// Backend runs collectives among the members of one process set on one lane, one after another. All members
// start the same operations in the same order with matching arguments. Calls are not concurrent. Ranks are
// positions in the set: 0 to n-1 in the order of the set.
//
// An operation runs from Start until Step returns Finished or an error. After that nothing reads or writes
// its buffers. After an error the contents of the buffers are undefined and the backend cannot be used any
// more, because its streams have lost their position.
type Backend interface {
	// Plan returns the algorithm with which the backend would run a response of r's kind on numBytes of
	// output, or an error if it cannot run it. The error has only the reason: the Manager adds the backend
	// and the operation. Plan must return the same result on every rank that has the same capabilities: only
	// the coordinator calls it, and its result binds all ranks.
	Plan(r *message.Response, numBytes int64) (message.Algorithm, error)

	// Start begins op. It does not wait for other ranks.
	Start(op Operation) error

	// Step runs the next step of the operation. If wait is set, Step waits for other ranks until ctx ends,
	// and may run all remaining steps. If wait is not set, Step ignores ctx and returns Waiting or Blocked
	// instead of waiting. A backend whose operations can only block returns Blocked, and finishes in its
	// first step with wait set.
	Step(ctx context.Context, wait bool) (Progress, error)

	// Close releases the resources of the backend. It abandons an operation that has not ended.
	Close()
}

// Progress is the result of a step.
type Progress uint8

const (
	// Waiting means that the step was not done because another rank is not ready for it. It may be tried
	// again.
	Waiting Progress = iota
	// Blocked means that the step can only be done by a call with wait set.
	Blocked
	// Moving means that the step was done and that other steps remain.
	Moving
	// Finished means that the last step was done.
	Finished
)

// Operation is this rank's part in a collective. Kind decides which of the other fields are used.
type Operation struct {
	// Kind is Allreduce, Allgather, Broadcast, Alltoall or Reducescatter.
	Kind      message.Kind
	Algorithm message.Algorithm

	// DType is the type of the elements that are reduced. Op is the reduction: Sum, Min, Max or Product, or
	// Adasum for an Allreduce. An average is a Sum with Scaling.
	DType tensor.DType
	Op    tensor.ReduceOp

	// Tensors are the tensors that an Allreduce reduces, as if they were concatenated. The number and the
	// lengths of the tensors may differ between ranks, but their total length must not. Afterwards all ranks
	// hold the same bits. A backend that is not registered with Lists takes one tensor, whose In is its Out,
	// and does not scale.
	Tensors []Tensor
	Scaling Scaling

	// Buf is the buffer of all kinds other than Allreduce. An Allgather fills it with the contributions of
	// all ranks in order; the caller has put this rank's contribution in its place. A Broadcast copies the
	// Buf of Root to all other ranks. A Reducescatter reduces it and leaves the result in this rank's block;
	// the other blocks are then undefined. An Alltoall sends each rank its block of it.
	Buf []byte

	// Counts are the sizes of the blocks of Buf in bytes, by rank. For Adasum they are the sizes in bytes of
	// the tensors that are concatenated in the one tensor of the operation; each of them is combined
	// separately.
	Counts []int64

	// Root is the rank whose Buf is broadcast.
	Root int

	// Allocate returns the output buffer of an Alltoall, for the blocks that the ranks send to this rank, in
	// the order of the ranks. The backend calls it once, with the number of bytes from each rank, which this
	// rank does not know before; counts is valid during the call. An error from Allocate ends the operation.
	Allocate func(counts []int64) ([]byte, error)
}

// Tensor is this rank's part in one tensor of an allreduce. Its elements are given as bytes.
type Tensor struct {
	// In is the rank's contribution, and Out receives the result. They have the same length and are aligned
	// for the elements. They are the same memory or do not overlap.
	In, Out []byte
}

// Scaling multiplies and divides the elements around a reduction. All contributions are multiplied by Pre.
// The result is divided by Divisor (integer types only; 0 and 1 do nothing) and multiplied by Post. The
// factors are rounded as in kernel.Scale.
type Scaling struct {
	Pre, Post float64
	Divisor   int64
}

// Run starts op and waits until it has ended.
func Run(ctx context.Context, b Backend, op Operation) error {
	if err := b.Start(op); err != nil {
		return err
	}
	for {
		if p, err := b.Step(ctx, true); err != nil || p == Finished {
			return err
		}
	}
}
