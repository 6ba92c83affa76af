package transport_test

import (
	"testing"

	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

// No two purposes share a lane, because the channels of a lane count the bytes of one user.
func TestLanesDiffer(t *testing.T) {
	lanes := map[transport.Lane]bool{transport.Control: true}
	for _, set := range []topo.ProcessSetID{0, 1, 2, 1<<30 - 2} {
		for i, of := range []func(topo.ProcessSetID) transport.Lane{
			transport.DataLane, transport.OuterLane, transport.DeviceLane, transport.MessageLane,
		} {
			if lane := of(set); lanes[lane] {
				t.Errorf("process set %d: lane %d of purpose %d has another purpose too", set, lane, i)
			} else {
				lanes[lane] = true
			}
		}
	}
}
