// Package recorder is the flight recorder of a rank: its last operations, in memory of a fixed size, and what is made of them when
// the job stalls or fails.
//
// A [Recorder] is told of every operation. A [Dump] is what it has at a moment, with what the rank waits for; it travels to who
// asks, and into files. [Analyse] holds the dumps of all ranks against each other: who waits for what, and who never called it.
package recorder

import (
	"sync"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
)

// DefaultOperations is how many a rank keeps: some 60 steps of ResNet-50, in 1.3 MB.
const DefaultOperations = 10000

// Recorder keeps the last operations of a rank, one slot per tensor; an operation without tensors, as a barrier of a rank that
// stands in, takes one. It is safe for concurrent use. A nil Recorder keeps nothing.
type Recorder struct {
	mu    sync.Mutex
	slots []slot
	at    int    // the next
	total uint64 // slots that were ever filled
}

// slot is a tensor of an operation that has ended.
type slot struct {
	number                                 uint64
	name                                   string
	shape                                  tensor.Shape
	bytes                                  int64
	submitted, sent, granted, begun, ended time.Duration
	err                                    error
	set                                    topo.ProcessSetID
	kind                                   message.Kind
	backend                                message.Backend
	dtype                                  tensor.DType
	cached, absent                         bool
}

// New makes a recorder of some operations, at least 1. All its memory is allocated here: 128 bytes for each, besides names and
// shapes, which it keeps alive.
func New(operations int) *Recorder { return &Recorder{slots: make([]slot, max(operations, 1))} }

// Record takes in an operation that has ended. It allocates nothing, and waits for nobody but a Dump that copies the slots.
func (r *Recorder) Record(op *trace.Operation) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(op.Tensors) == 0 {
		r.next().fill(op)
		return
	}
	for i := range op.Tensors {
		t := &op.Tensors[i]
		s := r.next()
		s.fill(op)
		s.name, s.dtype, s.shape, s.bytes, s.cached = t.Name, t.DType, t.Shape, t.Bytes, t.Cached
		s.submitted, s.sent = t.Submitted, t.Sent
		if t.Refused != nil {
			s.err = t.Refused
		}
	}
}

// next returns the slot that is to be filled, empty. r is locked.
func (r *Recorder) next() *slot {
	s := &r.slots[r.at]
	if r.at++; r.at == len(r.slots) {
		r.at = 0
	}
	r.total++
	return s
}

// fill sets all that a slot has of the operation, and clears what it has of a tensor.
func (s *slot) fill(op *trace.Operation) {
	*s = slot{
		set: op.Set, number: op.Number, kind: op.Kind, backend: op.Backend, absent: op.Absent,
		granted: op.Granted, begun: op.Begun, ended: op.Ended, err: op.Failed,
	}
}

// copy returns what the slots have, oldest first, and how many were filled in all.
func (r *Recorder) copy() (slots []slot, total uint64) {
	if r == nil {
		return nil, 0
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.total > uint64(len(r.slots)) {
		return append(append(slots, r.slots[r.at:]...), r.slots[:r.at]...), r.total
	}
	return append(slots, r.slots[:r.total]...), r.total
}
