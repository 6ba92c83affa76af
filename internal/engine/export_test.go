package engine

import (
	"time"

	"github.com/gohvd/gohvd/topo"
)

// Looks is how often the loop has watched.
func (e *Engine) Looks() uint64 { return e.looks.Load() }

// SetSpin replaces how long the loop watches after what comes next.
func (e *Engine) SetSpin(d time.Duration) {
	e.wheel.mu.Lock()
	defer e.wheel.mu.Unlock()
	e.spin.budget, e.spin.watch = d, d
}

// Queued is how many grants wait for the lane of a process set.
func (e *Engine) Queued(set topo.ProcessSetID) int {
	l := e.lanes.find(set)
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.todo)
}

// SetLatePeriod replaces the time that lateBell waits, before it has.
func (e *Engine) SetLatePeriod(d time.Duration) { e.late.period = d }
