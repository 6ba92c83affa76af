// Package ops runs granted responses: an ordered list of backends, the first of which that can do the
// work does it (the form of Horovod's operation manager).
package ops

import (
	"context"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
)

// Backend runs collectives among the members of one process set on one lane, one after the other. All members start the
// same operations in the same order with agreeing arguments. Calls are not concurrent. Ranks are counted within the set: 0
// to n-1 in the order of the set.
//
// An operation runs from Start until Step returns Finished or an error. Then nothing reads or writes its buffers any more.
// An error leaves their contents undefined and the backend dead: its streams have lost their position.
type Backend interface {
	// Plan says by which algorithm the backend would run a response of r's kind on numBytes of output, or
	// why it cannot (the reason alone: the Manager adds whose it is, and for what). It must give the same
	// answer on every rank that has the same capabilities; the coordinator asks, and its answer binds all.
	Plan(r *message.Response, numBytes int64) (message.Algorithm, error)

	// Start begins op. It does not wait for other ranks.
	Start(op Operation) error

	// Step does the next step of the operation. If wait is set, it waits for other ranks as long as ctx allows, and may do
	// all that is left. If not, it takes no notice of ctx and returns Waiting or Blocked instead. A backend whose operations
	// block returns Blocked, and finishes in its first step that waits.
	Step(ctx context.Context, wait bool) (Progress, error)

	// Close releases what the backend holds. An operation that has not ended is given up.
	Close()
}

// Progress is what came of a step.
type Progress uint8

const (
	// Waiting is a step that could not be done because another rank is not ready for it. It may be tried again.
	Waiting Progress = iota
	// Blocked is a step that can only be done by waiting for it.
	Blocked
	// Moving is a step that was done; others are left.
	Moving
	// Finished is the last step.
	Finished
)

// Operation is this rank's part in a collective. Which fields count depends on Kind.
type Operation struct {
	// Kind is Allreduce, Allgather, Broadcast, Alltoall or Reducescatter.
	Kind      message.Kind
	Algorithm message.Algorithm

	// DType is the type of the elements that are reduced, and Op how: Sum, Min, Max or Product (averages are made by
	// scaling), or Adasum for an Allreduce.
	DType tensor.DType
	Op    tensor.ReduceOp

	// Tensors are what an Allreduce reduces, as if they lay one behind the other. What each rank's tensors are and where one
	// ends may differ between ranks; their total length may not. Afterwards all ranks hold the same bits. A backend
	// that is not registered for Lists takes one tensor, whose In is its Out, and does not scale.
	Tensors []Tensor
	Scaling Scaling

	// Buf is what the others work on: an Allgather fills it with the contributions of all ranks in order, of which the
	// caller has put its own in place; a Broadcast copies that of Root to all others; a Reducescatter reduces it and leaves
	// the result in this rank's block (the other blocks are undefined); an Alltoall gives each rank its block of it.
	Buf []byte

	// Counts are the bytes of the blocks of Buf, by rank. For Adasum they are the bytes of the tensors that lie one
	// behind the other in the one that is given, each of which is combined by itself.
	Counts []int64

	// Root is the rank whose Buf is broadcast.
	Root int

	// Allocate returns the output of an Alltoall: the blocks that the ranks have for this one, in their order. It is called
	// once, with the bytes from each rank (valid during the call), which only their owners know before. Its error ends the
	// operation.
	Allocate func(counts []int64) ([]byte, error)
}

// Tensor is this rank's part in one tensor of an allreduce: elements, as bytes.
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
