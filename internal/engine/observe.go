package engine

import (
	"cmp"
	"slices"
	"time"

	"github.com/gohvd/gohvd/internal/p2p"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
	"github.com/gohvd/gohvd/internal/watch"
	"github.com/gohvd/gohvd/tensorqueue"
)

// Watch switches a timeline on (watch.Observer).
func (e *Engine) Watch(t watch.Timeline) { e.observer.Watch(t) }

// Unwatch switches a timeline off (watch.Observer).
func (e *Engine) Unwatch(t watch.Timeline) { e.observer.Unwatch(t) }

// BeginSpan returns the time at which the program begins something, for EndSpan. If there is no timeline, it
// returns 0.
func (e *Engine) BeginSpan() time.Duration { return e.observer.BeginSpan() }

// EndSpan records what the program has done from begun, the result of BeginSpan, until now. If begun is 0, it
// does nothing.
func (e *Engine) EndSpan(kind trace.SpanKind, name string, begun time.Duration) {
	e.observer.EndSpan(kind, name, begun)
}

// MarkStep records that the program begins the training step with the given number.
func (e *Engine) MarkStep(number uint64) { e.observer.MarkStep(number) }

// Offset returns the last measurement of the offset of this rank's clock from rank 0's clock, and whether
// there has been a measurement.
func (e *Engine) Offset() (o trace.Offset, ok bool) { return e.observer.Offset() }

// Clock returns the engine's clock. The engine's times are counted from the clock's Start.
func (e *Engine) Clock() trace.Clock { return e.clock.Clock }

// Pending returns the operations, also messages, that were submitted and have not ended, oldest first. Any
// goroutine may call Pending.
func (e *Engine) Pending() []trace.Record {
	var all []trace.Record
	for _, s := range e.sets.snapshot() {
		s.queue.Each(func(entry *tensorqueue.Entry) { all = append(all, watch.Pending(s.ID, entry)) })
	}
	e.messages.each(func(set topo.ProcessSetID, o *p2p.Op) {
		all = append(all, e.observer.PendingMessage(e.cfg.Rank, set, o))
	})
	slices.SortFunc(all, func(a, b trace.Record) int {
		return cmp.Or(cmp.Compare(a.Submitted, b.Submitted), cmp.Compare(a.Set, b.Set),
			cmp.Compare(a.Name, b.Name))
	})
	return all
}

// Steps returns the steps that have ended since the one with the given sequence number (watch.Observer).
func (e *Engine) Steps(since uint64) []trace.Step { return e.observer.Steps(since) }

// Stats returns the counters of this rank. It leaves Host, Epoch and the fields of the timeline empty, and
// the caller sets them. Any goroutine may call Stats, even in a callback from the engine. The coordinator's
// counters may be up to one second old.
func (e *Engine) Stats() trace.Stats {
	// The observer has what has ended until now, because Pending is called later.
	now := e.observer.Since()
	st := e.observer.Stats(now, e.Pending())
	st.Rank, st.Size = int(e.cfg.Rank), e.cfg.Size
	for _, s := range e.sets.snapshot() {
		st.InFlight += s.queue.Len()
	}
	st.InFlight += e.messages.inFlight()
	if e.cfg.Tuner != nil {
		st.Tuning = e.cfg.Tuner.Stats()
	}
	return st
}
