// Package recorder implements the flight recorder of a rank. The recorder keeps the rank's last operations in
// memory of limited size. Reports use them if the job stalls or fails.
//
// A [Recorder] records every operation. [Recorder.Dump] returns the recorded operations and the operations
// that the rank waits for as an analysis.Snapshot. Encode encodes a dump to be sent to another process, and
// WriteFile writes a dump to a file. analysis.Analyse compares the dumps of all ranks and finds out which
// ranks wait for which operations, and which ranks never called them.
package recorder

import (
	"slices"
	"sync"

	"github.com/gohvd/gohvd/internal/trace"
)

// DefaultOperations is the default number of slots of a Recorder: about 60 steps of ResNet-50, in 1.6 MB.
const DefaultOperations = 10000

// Recorder keeps the records of the last operations of a rank, each in a slot. A Recorder is safe for
// concurrent use. A nil Recorder records nothing.
type Recorder struct {
	mu    sync.Mutex
	room  int // the largest number of slots
	slots []trace.Record
	at    int    // the index of the next slot to fill
	total uint64 // the number of records so far, including overwritten ones
}

// firstSlots is the number of slots for which the first record allocates memory.
const firstSlots = 64

// New returns a recorder with room for the given number of operations, or for 1 if the number is less. Its
// memory grows with the recorded operations to 160 bytes for each slot. In addition, the names and shapes of
// the recorded tensors stay in memory until their slots are overwritten.
func New(operations int) *Recorder { return &Recorder{room: max(operations, 1)} }

// Record records an operation that has ended. It allocates no memory, except that the slots double a few
// times until there is room for all. It blocks only while another goroutine is in Record, or copies the slots
// in Dump.
func (r *Recorder) Record(op *trace.Operation) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range op.Records {
		if n := len(r.slots); n == r.at { // the slots are not all in use yet
			if n == cap(r.slots) {
				// slices.Grow would allocate more slots than these.
				grown := make([]trace.Record, n, min(max(2*n, firstSlots), r.room))
				copy(grown, r.slots)
				r.slots = grown
			}
			r.slots = r.slots[:n+1]
		}
		r.slots[r.at] = op.Records[i]
		if r.at++; r.at == r.room {
			r.at = 0
		}
	}
	r.total += uint64(len(op.Records))
}

// copy returns a copy of the most recent slots, the oldest first, and the number of records so far. most is
// the maximum number of slots.
func (r *Recorder) copy(most int) (slots []trace.Record, total uint64) {
	if r == nil {
		return []trace.Record{}, 0
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	n := int(min(r.total, uint64(len(r.slots)), uint64(most)))
	if n <= r.at {
		return slices.Clone(r.slots[r.at-n : r.at]), r.total
	}
	return slices.Concat(r.slots[len(r.slots)-(n-r.at):], r.slots[:r.at]), r.total
}
