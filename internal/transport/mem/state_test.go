package mem

import (
	"errors"
	"testing"

	"github.com/gohvd/gohvd/internal/transport"
)

// TestReleaseKeepsNothing checks that the cluster keeps no state of a lane that all ranks have released. This
// must also hold for aborted lanes, and for a lane on which a rank calls Conn only after its peer has
// released the lane.
func TestReleaseKeepsNothing(t *testing.T) {
	c := New(2)
	for lane := transport.Lane(1); lane <= 200; lane++ {
		if lane%3 == 0 {
			c.Mesh(1).Release(lane)
		}
		if _, err := c.Mesh(0).Conn(t.Context(), lane, 1); err != nil {
			t.Fatal(err)
		}
		if lane%2 == 0 {
			c.Mesh(0).Abort(lane, errors.New("boom"))
		}
		c.Mesh(0).Release(lane)
		c.Mesh(1).Release(lane)
	}
	if got := len(c.channels) + len(c.meshes[0].aborted) + len(c.meshes[1].aborted); got != 0 {
		t.Errorf("%d channels and aborts are left, want none", got)
	}
}

// TestNoLatencyNoClock checks that a cluster without latency never reads the clock.
func TestNoLatencyNoClock(t *testing.T) {
	for _, c := range []*Cluster{New(2), NewWithLatency(2, 0), NewWithLatency(2, -1)} {
		if c.clock != (clock{}) {
			t.Errorf("got %+v, want none", c.clock)
		}
	}
}
