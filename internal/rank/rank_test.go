package rank

import "testing"

// If a rank is a sidecar, it counts as two processes: the sidecar and its client.
func TestProcesses(t *testing.T) {
	for _, c := range []struct {
		forClient bool
		want      int
	}{{false, 3}, {true, 6}} {
		o := Options{ForClient: c.forClient}
		if got := o.processes(3); got != c.want {
			t.Errorf("3 ranks, for a client: %v, are %d processes, want %d", c.forClient, got, c.want)
		}
	}
}
