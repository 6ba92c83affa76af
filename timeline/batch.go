package timeline

import (
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/trace"
)

// entry is the data of one call of Record, Offset, Tuned, Step, Span, Set, Pending or Cycle: an operation, a
// clock measurement, a change of settings, the beginning of a training step, what the program did, a process
// set, a pending operation, or the beginning of a cycle.
type entry struct {
	trace.Operation // it has no records in entries of other kinds
	// offset is the clock measurement, tuning the settings from the time in at on, and number the number of
	// the training step that begins at the time in at. If span has an end, the entry is that span. Without
	// any of them, a cycle begins at the time in at.
	offset *trace.Offset
	tuning *message.Tuning
	step   bool
	number uint64
	span   trace.Span
	// rare formats an event of a kind that is so rare that it may take memory.
	rare func(f *formatter, dst []byte) []byte
	at   time.Duration
	// fused is the number of tensors in the operation, including tensors that this rank did not submit
	// because it had joined.
	fused int32
}

// batch holds entries in flat slices of fixed capacity, so that adding an entry does not allocate memory. If
// an operation does not fit even into an empty batch, the batch allocates memory for this operation. It does
// so at most once between two calls of reset.
type batch struct {
	entries    []entry
	records    []trace.Record
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
		entries: make([]entry, 0, tensors), records: make([]trace.Record, 0, tensors),
		activities: make([]trace.Activity, 0, activitiesPerTensor*tensors),
		// Only rank 0 has arrivals. At other ranks this memory costs nothing: its pages stay untouched, and
		// the garbage collector does not scan it, because it holds no pointers.
		arrivals: make([]time.Duration, 0, arrivalsPerTensor*tensors),
	}
}

// operation copies op into the batch. If there is no room it returns false and leaves the batch unchanged.
func (b *batch) operation(op *trace.Operation) bool {
	fused, own := int32(0), false
	for i := range op.Records {
		r := &op.Records[i]
		fused += max(r.Parts, 1)
		own = own || !stoodIn(r)
	}
	if !own {
		return true
	}
	if len(b.entries) == cap(b.entries) {
		return false
	}
	from := b
	records, activities, arrivals := len(op.Records), len(op.Activities), len(op.Arrivals)
	if !b.room(len(b.records)+records, len(b.activities)+activities, len(b.arrivals)+arrivals) {
		if b.grown || b.room(records, activities, arrivals) {
			return false
		}
		b.grown = true
		from = &batch{nil, make([]trace.Record, 0, records), make([]trace.Activity, 0, activities),
			make([]time.Duration, 0, arrivals), true}
	}
	b.entries = append(b.entries, entry{fused: fused, Operation: trace.Operation{
		Records: keep(&from.records, op.Records), Activities: keep(&from.activities, op.Activities),
		Arrivals: keep(&from.arrivals, op.Arrivals),
	}})
	return true
}

// stoodIn reports whether this rank took part as an absent rank, without having submitted the tensor of r.
func stoodIn(r *trace.Record) bool { return r.Absent && r.Submitted == 0 }

// keep appends a copy of the second slice to the first, and returns the copy. The first slice must have
// enough capacity, because earlier copies share its array.
func keep[T any](memory *[]T, what []T) []T {
	n := len(*memory)
	*memory = append(*memory, what...)
	return (*memory)[n:]
}

// room reports whether the batch has the capacity for these numbers of records, activities and arrivals. The
// numbers include the elements that the batch has already.
func (b *batch) room(records, activities, arrivals int) bool {
	return records <= cap(b.records) && activities <= cap(b.activities) && arrivals <= cap(b.arrivals)
}

// mark adds an entry that is not an operation. If there is no room it returns false.
func (b *batch) mark(e entry) bool {
	if len(b.entries) == cap(b.entries) {
		return false
	}
	b.entries = append(b.entries, e)
	return true
}

// fill returns the fill level of the fullest slice of the batch, from 0 to 1.
func (b *batch) fill() float64 {
	part := func(n, of int) float64 { return float64(n) / float64(of) }
	return max(part(len(b.entries), cap(b.entries)), part(len(b.records), cap(b.records)),
		part(len(b.activities), cap(b.activities)), part(len(b.arrivals), cap(b.arrivals)))
}

// reset empties the batch, and drops its references to names, errors and extra memory.
func (b *batch) reset() {
	clear(b.entries)
	clear(b.records)
	clear(b.activities)
	*b = batch{b.entries[:0], b.records[:0], b.activities[:0], b.arrivals[:0], false}
}
