package hvd

import (
	"testing"

	"github.com/gohvd/gohvd/internal/meeting"
)

// Of a rank that is a sidecar there are two processes: it and its client.
func TestProcesses(t *testing.T) {
	var (
		o   initOptions
		met *meeting.Meeting
	)
	if got := o.processes(3); got != 3 {
		t.Errorf("3 ranks are %d processes, want 3", got)
	}
	ForSidecar(&met)(&o)
	if got := o.processes(3); got != 6 || o.kept != &met {
		t.Errorf("3 ranks with sidecars are %d processes, want 6; what is kept is %v, want %v", got, o.kept, &met)
	}
}
