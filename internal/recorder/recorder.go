// Package recorder implements the flight recorder of a rank. The recorder keeps the rank's last operations in
// memory of fixed size. Reports use them if the job stalls or fails.
//
// A [Recorder] records every operation. [Recorder.Dump] returns the recorded operations and the operations
// that the rank waits for as an analysis.Snapshot. Encode encodes a dump to be sent to another process, and
// WriteFile writes a dump to a file. analysis.Analyse compares the dumps of all ranks and finds out which
// ranks wait for which operations, and which ranks never called them.
package recorder

import (
	"sync"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
)

// DefaultOperations is the default number of slots of a Recorder: about 60 steps of ResNet-50, in 1.3 MB.
const DefaultOperations = 10000

// Recorder keeps the last operations of a rank in slots. An operation takes one slot for each of its tensors.
// An operation without tensors, such as a barrier in which the rank was absent, takes one slot. A Recorder is
// safe for concurrent use. A nil Recorder records nothing.
type Recorder struct {
	mu    sync.Mutex
	slots []slot
	at    int    // the index of the next slot to fill
	total uint64 // how often a slot was filled so far, including overwritten slots
}

// slot has one tensor of an operation that has ended.
type slot struct {
	number                                 uint64
	name                                   string
	shape                                  tensor.Shape
	bytes                                  int64
	submitted, sent, granted, begun, ended time.Duration
	err                                    error
	set                                    topo.ProcessSetID
	peer                                   topo.Rank // the other rank of a message
	kind                                   message.Kind
	backend                                message.Backend
	algorithm                              message.Algorithm
	dtype                                  tensor.DType
	cached, absent                         bool
}

// New returns a recorder with room for the given number of operations, or for 1 if the number is less. It
// allocates all memory of the recorder, which is 128 bytes per operation. In addition, the names and shapes
// of the recorded tensors stay in memory until their slots are overwritten.
func New(operations int) *Recorder { return &Recorder{slots: make([]slot, max(operations, 1))} }

// Record records an operation that has ended. It allocates no memory. It blocks only while another goroutine
// is in Record, or copies the slots in Dump.
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

// next returns the next slot to fill, which may have old content. The caller must hold r.mu.
func (r *Recorder) next() *slot {
	s := &r.slots[r.at]
	if r.at++; r.at == len(r.slots) {
		r.at = 0
	}
	r.total++
	return s
}

// fill sets the fields that describe the operation and clears the fields that describe a tensor.
func (s *slot) fill(op *trace.Operation) {
	*s = slot{
		set: op.Set, number: op.Number, peer: op.Peer, kind: op.Kind, backend: op.Backend,
		algorithm: op.Algorithm, absent: op.Absent,
		granted: op.Granted, begun: op.Begun, ended: op.Ended, err: op.Failed,
	}
}

// copy returns a copy of the filled slots, the oldest first, and how often a slot was filled so far.
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
