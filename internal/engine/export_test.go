package engine

import (
	"time"

	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/tensorqueue"
)

// Submit queues entries with valid requests and notifies the loop.
func (e *Engine) Submit(entries ...*tensorqueue.Entry) error {
	err := e.Queue(entries...)
	if err == nil {
		e.sched.notify()
	}
	return err
}

// Polls returns the number of times that the loop has polled.
func (e *Engine) Polls() uint64 { return e.sched.polls.Load() }

// SetSpin sets the time for which the loop polls before it parks.
func (e *Engine) SetSpin(d time.Duration) {
	e.sched.mu.Lock()
	defer e.sched.mu.Unlock()
	e.sched.budget, e.sched.backgroundBudget = d, d
}

// Queued returns the number of grants that wait in the lane of a process set.
func (e *Engine) Queued(set topo.ProcessSetID) int { return e.sets.find(set).lane.Queued() }

// SetDeferralPeriod sets the time for which NotifyLater defers a notification. It must be called before
// NotifyLater.
func (e *Engine) SetDeferralPeriod(d time.Duration) { e.sched.deferred.period = d }
