package main

import (
	"context"
	"fmt"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
)

// shot is one operation to measure.
type shot struct {
	kind message.Kind
	dt   tensor.DType    // Invalid for a barrier
	op   tensor.ReduceOp // NoReduce unless kind reduces
	root int             // of a broadcast
	// count is the number of elements as nccl-tests print it: of the tensor for allreduce and broadcast, of what each
	// rank gives for allgather and gets for reducescatter, of what each rank gives each other for alltoall.
	count   int64
	inPlace bool
}

// kinds are what can be measured, by the names of the command line.
var kinds = []message.Kind{
	message.Allreduce, message.Allgather, message.Broadcast, message.Reducescatter, message.Alltoall, message.Barrier,
}

// parts returns how many times count the tensor of n ranks is.
func parts(kind message.Kind, n int) int64 {
	switch kind {
	case message.Allgather, message.Reducescatter, message.Alltoall:
		return int64(n)
	case message.Barrier:
		return 0
	}
	return 1
}

// numBytes returns the size by which bandwidth is counted: the whole tensor, which is of all ranks together where each has a
// part of it.
func (s shot) numBytes(n int) int64 { return s.count * int64(s.dt.Size()) * parts(s.kind, n) }

// bufferBytes returns the room that the argument needs.
func (s shot) bufferBytes(n int) int64 {
	if s.kind == message.Allgather && !s.inPlace {
		return s.count * int64(s.dt.Size())
	}
	return s.numBytes(n)
}

// busFactor returns busbw by algbw (nccl-tests, doc/PERFORMANCE.md).
func busFactor(kind message.Kind, n int) float64 {
	switch kind {
	case message.Allreduce:
		return 2 * float64(n-1) / float64(n)
	case message.Allgather, message.Reducescatter, message.Alltoall:
		return float64(n-1) / float64(n)
	case message.Barrier:
		return 0
	}
	return 1
}

// action is an operation that was prepared so that calling it costs nothing that is not its own.
type action struct {
	run    func(ctx context.Context) error
	result func() []byte // of the last run
}

// path is a way to run collectives. Every rank makes the same calls in the same order.
type path interface {
	Rank() int
	Size() int
	// String is negotiated or raw.
	String() string
	// prepare makes ready an operation on buf. The error is errNotHere where this path has no such operation.
	prepare(s shot, name string, buf []byte) (*action, error)
	// step makes ready one step over tensors that are summed in place. flats are the buckets, if mode is bucketed.
	step(mode stepMode, dt tensor.DType, tensors, flats []named) (func(ctx context.Context) error, error)
}

// named is a tensor of a workload.
type named struct {
	name string
	buf  []byte
}

// errNotHere is that a path has no such operation. The text says why.
type errNotHere struct{ text string }

func (e errNotHere) Error() string { return e.text }

// team is what the ranks of a path need to run a benchmark together. None of it is timed.
type team struct {
	path
	meet *action
}

func newTeam(p path) (*team, error) {
	t := &team{path: p}
	var err error
	if t.meet, err = p.prepare(shot{kind: message.Barrier}, "hvdbench.barrier", nil); err != nil {
		return nil, fmt.Errorf("barrier: %w", err)
	}
	return t, nil
}

func (t *team) barrier(ctx context.Context) error { return t.meet.run(ctx) }

// gather gives every rank the values of all, by rank. All give equally many.
func (t *team) gather(ctx context.Context, mine []float64) ([][]float64, error) {
	n := t.Size()
	all := make([]float64, n*len(mine))
	copy(all[t.Rank()*len(mine):], mine)
	s := shot{kind: message.Allgather, dt: tensor.Float64, count: int64(len(mine)), inPlace: true}
	a, err := t.prepare(s, "hvdbench.gather", tensor.Bytes(all))
	if err == nil {
		err = a.run(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("gathering results: %w", err)
	}
	byRank := make([][]float64, n)
	for r := range byRank {
		byRank[r] = all[r*len(mine) : (r+1)*len(mine)]
	}
	return byRank, nil
}
