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
		e.sched.Notify()
	}
	return err
}

// Polls returns the number of times that the loop has polled.
func (e *Engine) Polls() uint64 { return e.sched.Polls() }

// SetSpin sets the time for which the loop polls before it parks.
func (e *Engine) SetSpin(d time.Duration) {
	e.sched.SetPollBudget(d)
}

// QueuedGrants returns the number of grants that wait in the lane of a process set.
func (e *Engine) QueuedGrants(set topo.ProcessSetID) int { return e.sets.find(set).lane.Queued() }

// SetDeferralPeriod sets the time for which NotifyLater defers a notification. It must be called before
// NotifyLater.
func (e *Engine) SetDeferralPeriod(d time.Duration) { e.sched.SetDeferralPeriod(d) }
