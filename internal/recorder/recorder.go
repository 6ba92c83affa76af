// Package recorder is the flight recorder of a rank: it keeps the rank's last operations in memory of a fixed
// size, for reports when the job stalls or fails.
//
// A [Recorder] records every operation. [Recorder.Dump] returns its content at a moment as an
// analysis.Snapshot, together with the operations that the rank waits for. Encode and WriteFile send it to
// other processes and write it to files. analysis.Analyse compares the dumps of all ranks: which ranks wait
// for which operation, and which never called it.
package recorder

import (
	"sync"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
)

// DefaultOperations is the number of operations that a rank keeps: about 60 steps of ResNet-50, in 1.3 MB.
const DefaultOperations = 10000

// Recorder keeps the last operations of a rank, one slot per tensor. An operation without tensors, such as a
// barrier of an absent rank, takes one slot. It is safe for concurrent use. A nil Recorder keeps nothing.
type Recorder struct {
	mu    sync.Mutex
	slots []slot
	at    int    // the next slot to fill
	total uint64 // number of slots filled so far
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

// New returns a recorder with room for a number of operations, at least 1. All its memory is allocated here:
// 128 bytes per operation. Names and shapes of recorded tensors are kept alive in addition.
func New(operations int) *Recorder { return &Recorder{slots: make([]slot, max(operations, 1))} }

// Record records an operation that has ended. It allocates nothing, and blocks only for other calls of Record
// and while Dump copies the slots.
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

// next returns the next slot to fill, which may have old content. The caller holds r.mu.
func (r *Recorder) next() *slot {
	s := &r.slots[r.at]
	if r.at++; r.at == len(r.slots) {
		r.at = 0
	}
	r.total++
	return s
}

// fill sets the slot's fields of the operation, and clears its fields of a tensor.
func (s *slot) fill(op *trace.Operation) {
	*s = slot{
		set: op.Set, number: op.Number, kind: op.Kind, backend: op.Backend, absent: op.Absent,
		granted: op.Granted, begun: op.Begun, ended: op.Ended, err: op.Failed,
	}
}

// copy returns a copy of the filled slots, oldest first, and the number of slots filled so far.
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
