package van

import (
	"context"
	"errors"
	"testing"

	"github.com/gohvd/gohvd/internal/testnet"
)

// TestClock checks for which workers a worker waits if the bound is 1: for those that are alive and too far
// behind. It waits for none that has left, and fails because of one that has died.
func TestClock(t *testing.T) {
	nodes := startJob(t, 1, 4, func(c *Config) { c.Staleness = 1 })
	clock := func(rank int, n int64) error { return nodes[WorkerID(rank)].Clock(t.Context(), 0, n) }
	waiting := func(want int) {
		s := nodes[SchedulerID].sched
		testnet.Eventually(t, "the scheduler knows who waits", func() bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			return len(s.ticks) == want
		})
	}
	testnet.WantError(t, nodes[8].Clock(t.Context(), 0, 1), "clock 1: server 0 has no clock")
	if err := clock(0, 1); err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- nodes[9].Clock(ctx, 0, 2) }()
	waiting(1)
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want that the context was canceled", err)
	}
	waiting(0)

	go func() { ended <- clock(0, 2) }()
	waiting(1)
	for _, err := range []error{clock(1, 1), clock(2, 1), nodes[WorkerID(3)].EndClock(0), <-ended} {
		if err != nil {
			t.Error(err)
		}
	}

	go func() { ended <- clock(0, 3) }()
	waiting(1)
	nodes[WorkerID(1)].Stop(t.Context())
	if err := clock(2, 2); err != nil {
		t.Error(err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}

	go func() { ended <- clock(0, 4) }()
	waiting(1)
	kill(nodes[WorkerID(2)])
	testnet.WantError(t, <-ended, "clock 4: worker 2 is gone: its connection has ended")
	testnet.WantError(t, clock(0, 4), "clock 4: worker 2 is gone: its connection has ended")
}
