package rank

import (
	"testing"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/ops"
)

// Operations on two levels are tuned only if the job can have them.
func TestTwoLevels(t *testing.T) {
	hier := ops.Registry{{ID: message.SHM}, {ID: message.Hier}, {ID: message.TCP}}
	for _, c := range []struct {
		groups               []topo.Rank
		backends             ops.Registry
		deterministic        bool
		allreduce, allgather bool
	}{
		{[]topo.Rank{0, 0, 2, 2}, hier, false, true, true},
		{[]topo.Rank{0, 0, 2, 2}, hier, true, false, true},
		{[]topo.Rank{0, 0, 2, 2}, hier[2:], false, false, false},
		{[]topo.Rank{0, 1, 1}, hier, false, true, true},
		{[]topo.Rank{0, 0, 0}, hier, false, false, false},
		{[]topo.Rank{0, 1, 2}, hier, false, false, false},
	} {
		allreduce, allgather := twoLevels(&engine.Config{Size: len(c.groups), Backends: c.backends},
			&config.Config{HierarchicalAllreduce: true, HierarchicalAllgather: true,
				Deterministic: c.deterministic}, &Session{Groups: c.groups})
		if allreduce != c.allreduce || allgather != c.allgather {
			t.Errorf("%+v: got %v and %v", c, allreduce, allgather)
		}
	}
}
