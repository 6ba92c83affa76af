// Package analysis finds out which ranks wait for which other ranks, and which ranks were late. Its input
// is what the ranks of a job report about their operations.
//
// Held has the rules that say for how long a rank or node held up all others. It is fed live, by the
// coordinator when the last member has asked for an operation, and by the scheduler of a parameter server
// when a barrier or the clock no longer waits for a node; or by a Late, which compares the operations of
// all ranks. These come from timelines. Lateness.Suspects chooses the ranks that a report names, and
// Span.Long says which waits are long.
//
// Analyse compares the flight recorders of all ranks, and finds the pending operations and the ranks that
// have not asked for them. AnalyseNodes does the same for the nodes of a parameter server, and says which
// were late.
package analysis

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
)

// Set is a process set other than 0, with its members.
type Set struct {
	ID    topo.ProcessSetID `json:"id"`
	Ranks []topo.Rank       `json:"ranks"`
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
	Pending  []trace.Record `json:"pending"`
	NotShown int            `json:"pending_not_shown,omitempty"`
	// Recorded is the total number of operations that have ended. Operations has the most recent of them, the
	// oldest first. Both are empty if Off is set, because the rank has no flight recorder.
	Off        bool           `json:"recorder_off,omitempty"`
	Recorded   uint64         `json:"recorded"`
	Operations []trace.Record `json:"operations"`
}

// JSON returns the snapshot as indented JSON with a final newline.
func (s *Snapshot) JSON() ([]byte, error) {
	text, err := json.MarshalIndent(s, "", " ")
	if err != nil {
		return nil, fmt.Errorf("encode the dump of rank %d: %w", s.Rank, err)
	}
	return append(text, '\n'), nil
}
