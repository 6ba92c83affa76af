package control_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/gohvd/gohvd/internal/control"
	"github.com/gohvd/gohvd/internal/topo"
)

func TestLeaders(t *testing.T) {
	spread := func(hosts, perHost int) (all []string) {
		for r := range hosts * perHost {
			all = append(all, fmt.Sprint(r/perHost))
		}
		return all
	}
	for _, c := range []struct {
		name  string
		hosts []string
		above int
		most  int
		want  topo.Leaders
	}{
		{"a small job", spread(8, 8), 0, 0, nil},
		{"one host", spread(1, 66), 0, 0, nil},
		{"few hosts with one rank each", spread(5, 1), 4, 0, nil},
		{"one level", spread(3, 2), 1, 0, topo.Leaders{0, 1, 2, 2, 4, 4}},
		{"two levels", spread(5, 2), 1, 3, topo.Leaders{0, 1, 2, 2, 2, 4, 6, 6, 6, 8}},
		{"many hosts with one rank each", spread(6, 1), 1, 4, topo.Leaders{0, 1, 1, 1, 4, 4}},
		{"ranks placed in turns", []string{"b", "a", "b", "a", "c"}, 1, 2, topo.Leaders{0, 1, 2, 1, 4}},
	} {
		if got := control.Leaders(c.hosts, len(c.hosts), c.above, c.most); !slices.Equal(got, c.want) {
			t.Errorf("%s: got %v, want %v", c.name, got, c.want)
		}
	}
	for _, c := range []struct{ hosts, above, levels int }{{65, 0, 1}, {66, 0, 2}, {65, 1, 1}, {66, 1, 2},
		{101, 100, 1}, {102, 100, 2}, {257, 0, 2}, {258, 0, 3}, {4097, 0, 3}, {4098, 0, 4}} {
		got := control.Leaders(spread(c.hosts, 2), 2*c.hosts, c.above, 0).Levels()
		if got != c.levels {
			t.Errorf("%d hosts, leaders above %d: got %d levels, want %d", c.hosts, c.above, got, c.levels)
		}
	}
	leaders := control.Leaders(spread(2048, 8), 16384, 0, 0)
	connections := make([]int, len(leaders))
	for r := 1; r < len(leaders); r++ {
		connections[leaders.Upstream(topo.Rank(r))]++
	}
	if most := slices.Max(connections); connections[0] != 20 || most != 31 {
		t.Errorf("16384 ranks: rank 0 has %d connections to other ranks, and one rank has %d, want 20 and 31",
			connections[0], most)
	}
}
