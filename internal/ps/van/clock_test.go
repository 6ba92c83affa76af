package van

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/gohvd/gohvd/internal/testnet"
)

// checkWait checks that the scheduler says in which call which nodes wait for which others, and whom the
// others have waited for alone.
func checkWait(t *testing.T, v *Van, what string, waiting, missing []string) {
	t.Helper()
	s := v.Stats()
	if len(s.Waits) != 1 || s.Waits[0].What != what || s.Waits[0].Time <= 0 ||
		!slices.Equal(s.Waits[0].Waiting, waiting) || !slices.Equal(s.Waits[0].Missing, missing) {
		t.Errorf("the scheduler says that nodes wait: %+v, want that %v wait for %v in %s", s.Waits, waiting,
			missing, what)
	}
}

// checkHeldUp checks for which nodes alone others have waited.
func checkHeldUp(t *testing.T, v *Van, want ...string) {
	t.Helper()
	var got []string
	for _, p := range v.Stats().Peers {
		if p.HeldUp > 0 {
			got = append(got, p.Name)
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("others have waited only for %v, want %v", got, want)
	}
}

// TestHeldUp checks that the scheduler says for whom a barrier waits, and counts the time during which it
// waits for a single node.
func TestHeldUp(t *testing.T) {
	nodes := startJob(t, 1, 3, func(*Config) {})
	ended := make(chan error, 3)
	enter := func(rank, want int) {
		go func() { ended <- nodes[WorkerID(rank)].Barrier(t.Context(), 0, GroupWorkers) }()
		waitIn(t, nodes[SchedulerID], GroupWorkers, want)
	}
	enter(2, 1)
	checkWait(t, nodes[SchedulerID].Van, "barrier of group 4", []string{"worker 2"},
		[]string{"worker 0", "worker 1"})
	checkHeldUp(t, nodes[SchedulerID].Van)
	enter(0, 2)
	checkWait(t, nodes[SchedulerID].Van, "barrier of group 4", []string{"worker 0", "worker 2"},
		[]string{"worker 1"})
	checkHeldUp(t, nodes[SchedulerID].Van, "worker 1")
	enter(1, 0)
	for range 3 {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	checkHeldUp(t, nodes[SchedulerID].Van, "worker 1")
	if s := nodes[SchedulerID].Stats(); len(s.Waits) != 0 {
		t.Errorf("the scheduler says that nodes wait: %+v", s.Waits)
	}
}

// TestClock checks for which workers a worker waits if the bound is 1: for those that are alive and too far
// behind. It waits for none that has left, and fails because of one that has died.
func TestClock(t *testing.T) {
	nodes := startJob(t, 1, 4, func(c *Config) { c.Staleness = 1 })
	clock := func(rank int, n int64) error { return nodes[WorkerID(rank)].Clock(t.Context(), 0, n) }
	waiting := func(want int) {
		s := nodes[SchedulerID].sched
		testnet.Eventually(t, "the scheduler knows which nodes wait", func() bool {
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
	checkWait(t, nodes[SchedulerID].Van, "Clock", []string{"worker 0"},
		[]string{"worker 1", "worker 2", "worker 3"})
	for _, err := range []error{clock(1, 1), clock(2, 1), nodes[WorkerID(3)].EndClock(0), <-ended} {
		if err != nil {
			t.Error(err)
		}
	}

	if s := nodes[SchedulerID].Stats(); len(s.Waits) != 0 {
		t.Errorf("the scheduler says that nodes wait: %+v", s.Waits)
	}

	go func() { ended <- clock(0, 3) }()
	waiting(1)
	checkWait(t, nodes[SchedulerID].Van, "Clock", []string{"worker 0"}, []string{"worker 1", "worker 2"})
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
