package main

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
)

// opSpec describes an operation to measure.
type opSpec struct {
	kind message.Kind
	dt   tensor.DType    // element type; Invalid for a barrier
	op   tensor.ReduceOp // NoReduce if operations of this kind do not reduce
	root int             // the root of a broadcast
	// count is the number of elements as nccl-tests prints it. For allreduce and broadcast it is the size of
	// the tensor, for allgather the size of each rank's input, for reducescatter the size of each rank's
	// output, and for alltoall the number of elements that each rank sends to each other rank.
	count   int64
	inPlace bool
}

// kinds lists the collectives that can be measured.
var kinds = []message.Kind{
	message.Allreduce, message.Allgather, message.Broadcast, message.Reducescatter, message.Alltoall,
	message.Barrier,
}

// parts returns the number of elements in the whole tensor of all n ranks, divided by opSpec.count.
func parts(kind message.Kind, n int) int64 {
	switch kind {
	case message.Allgather, message.Reducescatter, message.Alltoall:
		return int64(n)
	case message.Barrier:
		return 0
	}
	return 1
}

// numBytes returns the number of bytes from which bandwidth is computed: the size of the whole tensor of all
// n ranks. If each rank has only a part of the tensor, all parts count.
func (s opSpec) numBytes(n int) int64 { return s.count * int64(s.dt.Size()) * parts(s.kind, n) }

// bufferBytes returns the size of the buffer that the operation needs at each of n ranks.
func (s opSpec) bufferBytes(n int) int64 {
	if s.kind == message.Allgather && !s.inPlace {
		return s.count * int64(s.dt.Size())
	}
	return s.numBytes(n)
}

// busFactor returns the ratio of the bus bandwidth (busbw) to the algorithm bandwidth (algbw). nccl-tests
// defines both in its doc/PERFORMANCE.md.
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

// action is a prepared operation. run does only the operation itself, so that nothing else is timed.
type action struct {
	run    func(ctx context.Context) error
	result func() []byte // returns the result of the last run
	// ran returns the ways in which the operations have run. It is called after run and is not timed.
	ran func() (ways, error)
	// remote has the tensors of an action that works on memory of a device. It is nil if the action works on
	// the buffer itself.
	remote remote
}

// remote is the memory of an action that is not in the host.
type remote interface {
	load() error  // copies the buffer to the memory on which the action works
	fetch() error // copies the result of the last run to what action.result returns
	free() error
}

// copier is a path that can measure plain copies beside its operations.
type copier interface {
	prepareCopy(numBytes int64) (*action, error)
}

// load copies the buffer of a to where a works on it.
func (a *action) load() error {
	if a.remote == nil {
		return nil
	}
	return a.remote.load()
}

// verified runs a once and makes its result readable.
func (a *action) verified(ctx context.Context) error {
	err := a.load()
	if err == nil {
		err = a.run(ctx)
	}
	if err == nil && a.remote != nil {
		err = a.remote.fetch()
	}
	return err
}

// free frees the memory of a. No operation may use it any more.
func (a *action) free() error {
	if a.remote == nil {
		return nil
	}
	return a.remote.free()
}

// ways lists different ways to run operations. Each has the names of a backend and of its algorithm, such as
// "tcp ring". The list is empty if the operations need no backend, or if the flight recorder is off.
type ways []string

// add adds a way to the list, unless the list has it or the way is empty.
func (w ways) add(way string) ways {
	if way == "" || slices.Contains(w, way) {
		return w
	}
	return append(w, way)
}

func (w ways) String() string { return strings.Join(w, "+") }

// path is a way to run collectives. Every rank must make the same calls in the same order.
type path interface {
	Rank() int
	Size() int
	// String returns "negotiated" or "raw".
	String() string
	// prepare prepares the operation s on buf. If this path does not support the operation, the error is an
	// errUnsupported.
	prepare(s opSpec, name string, buf []byte) (*action, error)
	// step prepares a step that sums tensors in place. If mode is bucketed, flats holds the buckets. The
	// action has no result.
	step(mode stepMode, dt tensor.DType, tensors, flats []named) (*action, error)
}

// named is a tensor of a workload with its name.
type named struct {
	name string
	buf  []byte
}

// errUnsupported reports that a path does not support an operation. text says why.
type errUnsupported struct{ text string }

func (e errUnsupported) Error() string { return e.text }

// team has the operations with which the ranks coordinate a benchmark, such as barriers between measurements.
// They are not timed.
type team struct {
	path
	meet *action
}

// newTeam returns a team that uses p.
func newTeam(p path) (*team, error) {
	t := &team{path: p}
	var err error
	if t.meet, err = p.prepare(opSpec{kind: message.Barrier}, "hvdbench.barrier", nil); err != nil {
		return nil, fmt.Errorf("barrier: %w", err)
	}
	return t, nil
}

// barrier waits until all ranks have called it.
func (t *team) barrier(ctx context.Context) error { return t.meet.run(ctx) }

// gatherName is the name of the tensor of gather.
const gatherName = "hvdbench.gather"

// gather returns the values of all ranks, indexed by rank. All ranks must pass the same number of values.
func (t *team) gather(ctx context.Context, mine []float64) ([][]float64, error) {
	n := t.Size()
	all := make([]float64, n*len(mine))
	copy(all[t.Rank()*len(mine):], mine)
	s := opSpec{kind: message.Allgather, dt: tensor.Float64, count: int64(len(mine)), inPlace: true}
	a, err := t.prepare(s, gatherName, tensor.Bytes(all))
	if err == nil {
		err = a.run(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("gather results: %w", err)
	}
	byRank := make([][]float64, n)
	for r := range byRank {
		byRank[r] = all[r*len(mine) : (r+1)*len(mine)]
	}
	return byRank, nil
}
