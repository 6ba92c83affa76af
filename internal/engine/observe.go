package engine

import (
	"cmp"
	"slices"

	"github.com/gohvd/gohvd/internal/p2p"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
	"github.com/gohvd/gohvd/internal/watch"
	"github.com/gohvd/gohvd/tensorqueue"
)

// Observer returns the observer that records the operations, spans and steps of this rank.
func (e *Engine) Observer() *watch.Observer { return e.observer }

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
