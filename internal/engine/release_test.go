package engine

import (
	"testing"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

// releases is a mesh that records the lanes that are released.
type releases struct {
	transport.Mesh
	lanes map[transport.Lane]bool
}

func (r *releases) Release(l transport.Lane) { r.lanes[l] = true }

// With a process set, a rank releases the lanes of all sets with lower IDs that it does not know.
func TestDropReleasesEarlierSets(t *testing.T) {
	mesh := &releases{lanes: make(map[transport.Lane]bool)}
	table := setTable{mesh: mesh, forget: func(topo.ProcessSetID) {}}
	table.replace([]*processSet{{Set: controller.Global(2)}, {Set: controller.Set{ID: 3}}})
	table.drop(5)
	for id := range topo.ProcessSetID(7) {
		want := id != topo.Global && id != 3 && id <= 5
		for _, l := range []transport.Lane{transport.DataLane(id), transport.OuterLane(id),
			transport.DeviceLane(id)} {
			if mesh.lanes[l] != want {
				t.Errorf("process set %d: lane %d was released: %t, want %t", id, l, mesh.lanes[l], want)
			}
		}
	}
}
