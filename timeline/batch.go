package timeline

import (
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/trace"
)

// record is the data of one call of Record, Offset, Tuned or Cycle: an operation, a clock measurement, a
// change of settings, or the beginning of a cycle.
type record struct {
	trace.Operation
	// offset is the clock measurement. It is nil in records of other kinds.
	offset *trace.Offset
	// tuning has the settings from the time Granted on. It is nil in records of other kinds.
	tuning *message.Tuning
	// cycle is set if the record marks the beginning of a cycle. In that case Granted is the time of the
	// beginning.
	cycle bool
	// fused is the number of tensors in the operation, including tensors that this rank did not submit
	// because it had joined.
	fused int32
}

// batch holds records in flat slices of fixed capacity, so that adding a record does not allocate memory. If
// an operation does not fit even into an empty batch, the batch allocates memory for this operation. It does
// so at most once between two calls of reset.
type batch struct {
	records    []record
	tensors    []trace.Tensor
	activities []trace.Activity
	arrivals   []time.Duration
	grown      bool
}

// newBatch makes room for this many activities and arrivals per tensor.
const (
	activitiesPerTensor = 2
	arrivalsPerTensor   = 32
)

// newBatch returns an empty batch with room for the given number of tensors.
func newBatch(tensors int) *batch {
	return &batch{
		records: make([]record, 0, tensors), tensors: make([]trace.Tensor, 0, tensors),
		activities: make([]trace.Activity, 0, activitiesPerTensor*tensors),
		// Only rank 0 has arrivals. At other ranks this memory costs nothing: its pages stay untouched, and
		// the garbage collector does not scan it, because it holds no pointers.
		arrivals: make([]time.Duration, 0, arrivalsPerTensor*tensors),
	}
}

// operation copies op into the batch. If there is no room it returns false and leaves the batch unchanged.
func (b *batch) operation(op *trace.Operation) bool {
	tensors, arrivals, fused := 0, 0, int32(0)
	for i := range op.Tensors {
		n := &op.Tensors[i]
		fused += int32(max(n.Parts, 1))
		if !stoodIn(op, n) {
			tensors++
			arrivals += len(n.Arrivals)
		}
	}
	if tensors == 0 {
		return true
	}
	if len(b.records) == cap(b.records) {
		return false
	}
	from := b
	if !b.room(len(b.tensors)+tensors, len(b.activities)+len(op.Activities), len(b.arrivals)+arrivals) {
		if b.grown || b.room(tensors, len(op.Activities), arrivals) {
			return false
		}
		b.grown = true
		from = &batch{make([]record, 0, 1), make([]trace.Tensor, 0, tensors),
			make([]trace.Activity, 0, len(op.Activities)), make([]time.Duration, 0, arrivals), true}
	}
	b.records = append(b.records, record{Operation: *op, fused: fused})
	r, first := &b.records[len(b.records)-1], len(from.tensors)
	for i := range op.Tensors {
		if n := &op.Tensors[i]; !stoodIn(op, n) {
			from.tensors = append(from.tensors, *n)
			from.tensors[len(from.tensors)-1].Arrivals = keep(&from.arrivals, n.Arrivals)
		}
	}
	r.Tensors = from.tensors[first:]
	r.Activities = keep(&from.activities, op.Activities)
	return true
}

// stoodIn reports whether this rank took part in op as an absent rank, without having submitted tensor n.
func stoodIn(op *trace.Operation, n *trace.Tensor) bool { return op.Absent && n.Submitted == 0 }

// keep appends a copy of the second slice to the first, and returns the copy. The first slice must have
// enough capacity, because earlier copies share its array.
func keep[T any](memory *[]T, what []T) []T {
	n := len(*memory)
	*memory = append(*memory, what...)
	return (*memory)[n:]
}

// room reports whether the batch has the capacity for these numbers of tensors, activities and arrivals. The
// numbers include the elements that the batch has already.
func (b *batch) room(tensors, activities, arrivals int) bool {
	return tensors <= cap(b.tensors) && activities <= cap(b.activities) && arrivals <= cap(b.arrivals)
}

// mark adds a record that is not an operation. If there is no room it returns false.
func (b *batch) mark(r record) bool {
	if len(b.records) == cap(b.records) {
		return false
	}
	b.records = append(b.records, r)
	return true
}

// fill returns the fill level of the fullest slice of the batch, from 0 to 1.
func (b *batch) fill() float64 {
	part := func(n, of int) float64 { return float64(n) / float64(of) }
	return max(part(len(b.records), cap(b.records)), part(len(b.tensors), cap(b.tensors)),
		part(len(b.activities), cap(b.activities)), part(len(b.arrivals), cap(b.arrivals)))
}

// reset empties the batch, and drops its references to names, errors and extra memory.
func (b *batch) reset() {
	clear(b.records)
	clear(b.tensors)
	clear(b.activities)
	*b = batch{b.records[:0], b.tensors[:0], b.activities[:0], b.arrivals[:0], false}
}
