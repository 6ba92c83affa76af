package analysis

import (
	"slices"
	"testing"
	"time"
)

// TestNodeLateness checks from which times on a node is late.
func TestNodeLateness(t *testing.T) {
	const up = 20 * time.Second
	server := func(response time.Duration, bytes uint64) *NodeTotals {
		return &NodeTotals{Requests: 1, Responses: 1, Response: response, Sent: bytes}
	}
	worker := func(heldUp time.Duration) *NodeTotals { return &NodeTotals{Requests: 1, HeldUp: heldUp} }
	for _, c := range []struct {
		name   string
		node   *NodeTotals
		others []*NodeTotals
		late   bool
	}{
		{"twice", server(2*time.Second, 10), []*NodeTotals{server(time.Second, 10)}, true},
		{"less than twice", server(2*time.Second-time.Millisecond*10, 10), []*NodeTotals{server(time.Second, 10)}, false},
		{"three times the size", server(2*time.Second, 30), []*NodeTotals{server(time.Second, 10)}, false},
		{"six times for three times the size", server(6*time.Second, 30), []*NodeTotals{server(time.Second, 10)}, true},
		{"a third of the size", server(time.Second, 10), []*NodeTotals{server(700*time.Millisecond, 30)}, false},
		{"lateTime", server(lateTime+time.Microsecond, 10), []*NodeTotals{server(time.Microsecond, 10)}, true},
		{"less than lateTime", server(lateTime, 10), []*NodeTotals{server(time.Microsecond, 10)}, false},
		{"the mean of others", server(2*time.Second, 10),
			[]*NodeTotals{server(time.Second, 10), server(2*time.Second, 10)}, false},
		{"the only one", server(time.Hour, 10), nil, false},
		{"share", worker(time.Second), []*NodeTotals{worker(0)}, true},
		{"less than the share", worker(time.Second - 1), []*NodeTotals{worker(0)}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := c.node.lateness(slices.Concat([]*NodeTotals{c.node}, c.others), up)
			if (len(got) > 0) != c.late {
				t.Errorf("got %q, want late: %v", got, c.late)
			}
		})
	}
	// At the start of a job, leastHeld is more than the share.
	for heldUp, late := range map[time.Duration]bool{leastHeld - 1: false, leastHeld: true} {
		if got := worker(heldUp).lateness(nil, time.Second); (len(got) > 0) != late {
			t.Errorf("others waited %v: got %q, want late: %v", heldUp, got, late)
		}
	}
}
