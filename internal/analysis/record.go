// Package analysis finds which ranks wait for which others and which were late, from what the ranks of a job
// report of their operations.
//
// There is one kind of record, an operation on a tensor at a rank, and three sources. The coordinator adds
// each operation when the last member has asked for it (Held). The flight recorders provide a Snapshot of
// each rank, from which Analyse finds the pending operations and the ranks that have not asked for them. The
// timelines provide the operations of all ranks in order (Late), and Lateness.Suspects chooses the ranks that
// a report names. Lateness has the same rules in all of them.
package analysis

import (
	"encoding/json"
	"fmt"
	"time"
)

// Record is an operation on a tensor at a rank. Times are in nanoseconds since the start of the rank's
// engine, or on a clock that the ranks share; 0 is a time that has not come or is not known. Records of one
// set with the same number ran as one operation, on all members.
type Record struct {
	Set uint32 `json:"set,omitempty"`
	// Number is the number of the grant, from 1. It is 0 if there is no grant or the number is not known.
	Number    uint64        `json:"number,omitempty"`
	Kind      string        `json:"kind"`
	Name      string        `json:"name"`
	DType     string        `json:"dtype,omitempty"`
	Shape     []int64       `json:"shape,omitempty"`
	Bytes     int64         `json:"bytes,omitempty"`
	Backend   string        `json:"backend,omitempty"`
	Cached    bool          `json:"cached,omitempty"`
	Absent    bool          `json:"absent,omitempty"` // the rank was absent: it had joined
	Error     string        `json:"error,omitempty"`
	Submitted time.Duration `json:"submitted_ns,omitempty"`
	Sent      time.Duration `json:"sent_ns,omitempty"`
	Granted   time.Duration `json:"granted_ns,omitempty"`
	Begun     time.Duration `json:"begun_ns,omitempty"`
	Ended     time.Duration `json:"ended_ns,omitempty"`
}

// Set is a process set other than 0.
type Set struct {
	ID    uint32 `json:"id"`
	Ranks []int  `json:"ranks"`
}

// Snapshot is what a rank's flight recorder knows at one moment.
type Snapshot struct {
	Format  int       `json:"format"`
	Version string    `json:"version"` // version of this module
	Why     string    `json:"why"`
	Rank    int       `json:"rank"`
	Size    int       `json:"size"`
	Host    string    `json:"host"`
	PID     int       `json:"pid"`
	Epoch   uint64    `json:"epoch"`
	Time    time.Time `json:"time"`
	// At is the time of the snapshot, since the engine's start.
	At time.Duration `json:"at_ns"`
	// Start, Domain and Monotonic are the fields of trace.Clock; Measured, Offset and OffsetError are the
	// fields of trace.Offset.
	Start       time.Time     `json:"start"`
	Domain      string        `json:"clock_domain"`
	Monotonic   time.Duration `json:"monotonic_ns"`
	Measured    time.Duration `json:"measured_ns"`
	Offset      time.Duration `json:"offset_ns"`
	OffsetError time.Duration `json:"offset_error_ns"`

	// Stalls are descriptions of the stalls that rank 0 knows of.
	Stalls []string `json:"stalls,omitempty"`
	Sets   []Set    `json:"process_sets,omitempty"`
	// Pending are the operations that have not ended, oldest first. NotShown is the number of further ones.
	Pending  []Record `json:"pending"`
	NotShown int      `json:"pending_not_shown,omitempty"`
	// Recorded is the number of operations that have ended. Operations are the last of them, oldest first.
	Recorded   uint64   `json:"recorded"`
	Operations []Record `json:"operations"`
}

// JSON returns the snapshot as indented JSON with a final newline.
func (s *Snapshot) JSON() ([]byte, error) {
	text, err := json.MarshalIndent(s, "", " ")
	if err != nil {
		return nil, fmt.Errorf("dump of rank %d: %w", s.Rank, err)
	}
	return append(text, '\n'), nil
}
