package engine

import (
	"time"

	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/tensorqueue"
)

// Submit queues entries, whose requests are sound, and notifies the loop.
func (e *Engine) Submit(entries ...*tensorqueue.Entry) error {
	err := e.Queue(entries...)
	if err == nil {
		e.sched.notify()
	}
	return err
}

// Polls is how often the loop was polled.
func (e *Engine) Polls() uint64 { return e.sched.polls.Load() }

// SetSpin replaces how long the loop polls before it parks.
func (e *Engine) SetSpin(d time.Duration) {
	e.sched.mu.Lock()
	defer e.sched.mu.Unlock()
	e.sched.budget, e.sched.backgroundBudget = d, d
}

// Queued is how many grants wait for the lane of a process set.
func (e *Engine) Queued(set topo.ProcessSetID) int {
	l := e.lanes.find(set)
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.todo)
}

// SetDeferralPeriod replaces the time for which NotifyLater defers, before it has.
func (e *Engine) SetDeferralPeriod(d time.Duration) { e.sched.deferred.period = d }
