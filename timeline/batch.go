package timeline

import (
	"slices"
	"time"

	"github.com/gohvd/gohvd/internal/trace"
	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/tensor"
	"github.com/gohvd/gohvd/topo"
)

type what uint8

const (
	anOperation what = iota
	aCycle
	anOffset
)

// entry is a record without what has no fixed length. A cycle has its time in at; an offset has At, Offset and Error of a
// trace.Offset in at, begun and ended, and its Job in failed.
type entry struct {
	what      what
	kind      message.Kind
	backend   message.Backend
	algorithm message.Algorithm
	set       topo.ProcessSetID
	number    uint64
	// at is when an operation was granted.
	at, begun, ended time.Duration
	failed           string
	// tensors and activities follow in the batch, after those of the entries before; fused is how many tensors the operation had.
	tensors, activities, fused int32
}

func (e *entry) offset() trace.Offset {
	return trace.Offset{At: e.at, Offset: e.begun, Error: e.ended, Job: e.failed}
}

type tensorEntry struct {
	name            string
	shape           tensor.Shape
	refused         string
	bytes           int64
	submitted, sent time.Duration
	arrivals        int32
	dtype           tensor.DType
	cached, partial bool
}

// batch is a run of records in flat memory of fixed capacity, so that taking one is copying alone. An operation that would have no
// room in an empty one gets more: one such operation at a time, until reset.
type batch struct {
	size       int // tensors that there is room for
	grown      bool
	entries    []entry
	tensors    []tensorEntry
	activities []trace.Activity
	arrivals   []time.Duration
}

func newBatch(tensors int) *batch {
	return &batch{
		size:    tensors,
		entries: make([]entry, 0, tensors), tensors: make([]tensorEntry, 0, tensors),
		activities: make([]trace.Activity, 0, activitiesPerTensor*tensors),
		// Only the coordinator's rank has these. Elsewhere the pages stay untouched, and the collector does not look at them.
		arrivals: make([]time.Duration, 0, arrivalsPerTensor*tensors),
	}
}

// What a batch has room for besides, by the tensors that it has room for.
const (
	activitiesPerTensor = 2
	arrivalsPerTensor   = 32
)

// operation copies op, or reports that there is no room.
func (b *batch) operation(op *trace.Operation) bool {
	return b.copy(op) || b.grow(op) && b.copy(op)
}

// grow makes room for an operation that is larger than a batch, if it is the first since reset.
func (b *batch) grow(op *trace.Operation) bool {
	arrivals := 0
	for i := range op.Tensors {
		arrivals += len(op.Tensors[i].Arrivals)
	}
	large := len(op.Tensors) > b.size || len(op.Activities) > activitiesPerTensor*b.size || arrivals > arrivalsPerTensor*b.size
	if !large || b.grown || len(b.entries) == cap(b.entries) {
		return false
	}
	b.grown = true
	b.tensors = slices.Grow(b.tensors, len(op.Tensors))
	b.activities = slices.Grow(b.activities, len(op.Activities))
	b.arrivals = slices.Grow(b.arrivals, arrivals)
	return true
}

func (b *batch) copy(op *trace.Operation) bool {
	before, fused := *b, 0
	for i := range op.Tensors {
		n := &op.Tensors[i]
		fused += max(n.Parts, 1)
		if op.Absent && n.Submitted == 0 {
			continue // it only stood in: this rank has no tensor of that name
		}
		if len(b.tensors) == cap(b.tensors) || len(b.arrivals)+len(n.Arrivals) > cap(b.arrivals) {
			*b = before
			return false
		}
		b.tensors = append(b.tensors, tensorEntry{
			name: n.Name, shape: n.Shape, refused: text(n.Refused), bytes: n.Bytes, submitted: n.Submitted, sent: n.Sent,
			arrivals: int32(len(n.Arrivals)), dtype: n.DType, cached: n.Cached, partial: n.Partial,
		})
		b.arrivals = append(b.arrivals, n.Arrivals...)
	}
	count := len(b.tensors) - len(before.tensors)
	if count == 0 {
		return true
	}
	if len(b.activities)+len(op.Activities) > cap(b.activities) || !b.entry(entry{
		kind: op.Kind, backend: op.Backend, algorithm: op.Algorithm, set: op.Set, number: op.Number,
		at: op.Granted, begun: op.Begun, ended: op.Ended, failed: text(op.Failed),
		tensors: int32(count), activities: int32(len(op.Activities)), fused: int32(fused),
	}) {
		*b = before
		return false
	}
	b.activities = append(b.activities, op.Activities...)
	return true
}

// entry takes a record, or reports that there is no room.
func (b *batch) entry(e entry) bool {
	if len(b.entries) == cap(b.entries) {
		return false
	}
	b.entries = append(b.entries, e)
	return true
}

func text(err error) string {
	if err == nil {
		return ""
	}
	if s := err.Error(); s != "" {
		return s
	}
	return "unknown error"
}

// fill is how full the batch is, from 0 to 1: what is fullest counts.
func (b *batch) fill() float64 {
	part := func(n, of int) float64 { return float64(n) / float64(of) }
	return max(part(len(b.entries), cap(b.entries)), part(len(b.tensors), cap(b.tensors)),
		part(len(b.activities), cap(b.activities)), part(len(b.arrivals), cap(b.arrivals)))
}

// operations is how many records there are.
func (b *batch) operations() int { return len(b.entries) }

// reset empties the batch and lets go of names and errors, and of memory that it has grown by.
func (b *batch) reset() {
	if b.grown {
		*b = *newBatch(b.size)
		return
	}
	clear(b.entries)
	clear(b.tensors)
	clear(b.activities)
	b.entries, b.tensors, b.activities, b.arrivals = b.entries[:0], b.tensors[:0], b.activities[:0], b.arrivals[:0]
}

// cursor is a place in a batch: the tensor with index inside in the entry, and where its tensors, activities and arrivals begin.
type cursor struct{ entry, inside, tensor, activity, arrival int }

// from is what a batch has from a place on. It shares the memory of b.
func (b *batch) from(at cursor) *batch {
	n := &batch{
		entries: slices.Clone(b.entries[at.entry:]), tensors: b.tensors[at.tensor:],
		activities: b.activities[at.activity:], arrivals: b.arrivals[at.arrival:],
	}
	if at.inside > 0 {
		n.entries[0].tensors -= int32(at.inside)
	}
	return n
}
