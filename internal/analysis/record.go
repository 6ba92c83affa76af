// Package analysis finds out which ranks wait for which other ranks, and which ranks were late. Its input is
// what the ranks of a job report about their operations.
//
// The input consists of records. A record describes one operation on one tensor at one rank. The
// package has three users. The coordinator adds each operation to a Held when the last member has asked for
// it. The flight recorder of each rank provides a Snapshot, and Analyse finds the pending operations and the
// ranks that have not asked for them. The timelines provide the operations of all ranks in order to a Late,
// and Lateness.Suspects chooses the ranks that a report names. All of them use the same rules for lateness.
package analysis

import (
	"encoding/json"
	"fmt"
	"time"
)

// Record is one operation on one tensor at one rank. Times are in nanoseconds since the start of the rank's
// engine, or on a clock that all ranks share. A time is 0 if it is not known or has not been reached. Records
// of one process set with the same number describe the same operation, which ran on all members. Records of
// a message, whose kinds are send and recv, also have the same name.
type Record struct {
	Set uint32 `json:"set,omitempty"`
	// Number is the number of the grant, counted from 1, or the number of a message among those of its sender
	// to its receiver. It is 0 if there is no grant or the number is not known.
	Number    uint64        `json:"number,omitempty"`
	Kind      string        `json:"kind"`
	Name      string        `json:"name"`
	DType     string        `json:"dtype,omitempty"`
	Shape     []int64       `json:"shape,omitempty"`
	Bytes     int64         `json:"bytes,omitempty"`
	Backend   string        `json:"backend,omitempty"`
	Algorithm string        `json:"algorithm,omitempty"`
	Cached    bool          `json:"cached,omitempty"`
	Absent    bool          `json:"absent,omitempty"` // the rank had joined and took part as an absent rank
	Error     string        `json:"error,omitempty"`
	Submitted time.Duration `json:"submitted_ns,omitempty"`
	Sent      time.Duration `json:"sent_ns,omitempty"`
	Granted   time.Duration `json:"granted_ns,omitempty"`
	Begun     time.Duration `json:"begun_ns,omitempty"`
	Ended     time.Duration `json:"ended_ns,omitempty"`
	// Among are the ranks that take part in a message or in a pending operation if these are not all members
	// of the process set. Otherwise it is empty.
	Among []int `json:"among,omitempty"`
}

// These are the names of the kinds message.Send and message.Recv.
const (
	send = "send"
	recv = "recv"
)

// IsMessage reports whether the record describes a message between two ranks, that is a send or a receive.
func (r *Record) IsMessage() bool { return r.Kind == send || r.Kind == recv }

// Set is a process set other than 0, with its members.
type Set struct {
	ID    uint32 `json:"id"`
	Ranks []int  `json:"ranks"`
}

// Snapshot is the content of a rank's flight recorder at one moment, with the operations that were pending.
type Snapshot struct {
	Format  int       `json:"format"`
	Version string    `json:"version"` // the version of this module
	Why     string    `json:"why"`
	Rank    int       `json:"rank"`
	Size    int       `json:"size"`
	Host    string    `json:"host"`
	PID     int       `json:"pid"`
	Epoch   uint64    `json:"epoch"`
	Time    time.Time `json:"time"`
	// At is the time from the engine's start to the snapshot.
	At time.Duration `json:"at_ns"`
	// Start, Domain and Monotonic are the fields of trace.Clock. Measured, Offset and OffsetError are the
	// fields of trace.Offset.
	Start       time.Time     `json:"start"`
	Domain      string        `json:"clock_domain"`
	Monotonic   time.Duration `json:"monotonic_ns"`
	Measured    time.Duration `json:"measured_ns"`
	Offset      time.Duration `json:"offset_ns"`
	OffsetError time.Duration `json:"offset_error_ns"`

	// Stalls has descriptions of the stalls that the coordinator knows of. It is empty except at rank 0.
	Stalls []string `json:"stalls,omitempty"`
	Sets   []Set    `json:"process_sets,omitempty"`
	// Pending has the operations that have not ended, the oldest first. NotShown is the number of pending
	// operations that are not in Pending.
	Pending  []Record `json:"pending"`
	NotShown int      `json:"pending_not_shown,omitempty"`
	// Recorded is the total number of operations that have ended. Operations has the most recent of them, the
	// oldest first.
	Recorded   uint64   `json:"recorded"`
	Operations []Record `json:"operations"`
}

// JSON returns the snapshot as indented JSON with a final newline.
func (s *Snapshot) JSON() ([]byte, error) {
	text, err := json.MarshalIndent(s, "", " ")
	if err != nil {
		return nil, fmt.Errorf("encode the dump of rank %d: %w", s.Rank, err)
	}
	return append(text, '\n'), nil
}
