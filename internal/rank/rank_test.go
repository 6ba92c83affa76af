package rank

import "testing"

// If the program of a rank runs in another process, as with the sidecar, each rank counts as two processes.
func TestProcesses(t *testing.T) {
	for _, c := range []struct {
		forClient bool
		want      int
	}{{false, 3}, {true, 6}} {
		o := Options{ForClient: c.forClient}
		if got := o.processes(3); got != c.want {
			t.Errorf("ForClient %v: 3 ranks count as %d processes, want %d", c.forClient, got, c.want)
		}
	}
}
