package engine

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Who starts many operations one after the other needs the processor for that. Where the loop would take it away (spin.tight) it is
// not rung for each: it is when nothing was queued for a while, or the caller asks what has become of one. So they are also
// negotiated together, and fused.

const (
	// latePeriod is longer than it takes to queue an operation, and shorter than anybody minds.
	latePeriod = 100 * time.Microsecond
	// latePeriods bounds how long the loop is not rung for what keeps being queued.
	latePeriods = 10
)

// lateBell rings the loop some time after the first call that it was wanted for.
type lateBell struct {
	period time.Duration
	timer  *time.Timer
	armed  atomic.Bool // the timer will ring

	mu              sync.Mutex // for what follows
	queued, periods int        // how many operations the timer saw last, and how often
}

// Ring has what was queued noticed.
func (e *Engine) Ring() { e.ring() }

// RingSoon is Ring, but not at once where that would delay the caller: Hurry, or Help, does that.
func (e *Engine) RingSoon() {
	helped := !e.resting.Load() && !e.wheel.background.Load() // another caller takes turns
	switch {
	case !e.helpable || !e.spin.tight || helped:
		e.ring()
	case !e.late.armed.Load() && e.late.armed.CompareAndSwap(false, true):
		e.late.timer.Reset(e.late.period)
	}
}

// Hurry has noticed at once what RingSoon was called for.
func (e *Engine) Hurry() {
	if e.late.armed.Load() && e.late.armed.CompareAndSwap(true, false) {
		e.ring()
	}
}

// unneeded says that a turn follows, which notices what was queued by now.
func (b *lateBell) unneeded() {
	if b.armed.Load() {
		b.timer.Stop() // first: who arms it again has a timer that runs
		b.armed.Store(false)
	}
}

// ringLate is the function of the timer.
func (e *Engine) ringLate() {
	b := &e.late
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.armed.Load() {
		b.queued, b.periods = 0, 0 // of a batch that others have noticed
		return
	}
	queued := 0
	for _, l := range e.lanes.snapshot() {
		queued += l.queue.Pending()
	}
	if b.periods++; queued > b.queued && b.periods < latePeriods {
		b.queued = queued
		b.timer.Reset(b.period)
		return
	}
	b.queued, b.periods = 0, 0
	// In this order: what is queued from now on arms it again, and what was is rung for.
	b.armed.Store(false)
	if slices.ContainsFunc(e.lanes.snapshot(), func(l *lane) bool { return l.queue.Waiting() }) {
		e.ring()
	}
}
