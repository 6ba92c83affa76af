package engine

import (
	"context"
	"errors"
	"slices"

	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/tensorqueue"
)

// Queue hands tensors of one process set to the engine, all of them or none, whose requests the caller has checked. The buffers are
// the engine's until Done is called, which happens exactly once for each if Queue returns nil and never otherwise. The caller calls
// Drive or NotifyLater next.
func (e *Engine) Queue(entries ...*tensorqueue.Entry) error {
	l := e.lanes.find(entries[0].Set)
	err := error(ErrNoProcessSet)
	e.observer.submitted(entries)
	if l != nil {
		err = l.queue.Add(entries...)
	}
	if err == nil {
		return nil
	}
	var duplicate *tensorqueue.DuplicateNameError
	if errors.As(err, &duplicate) { // it need not be the first of a group
		return &OpError{Op: duplicate.Kind.String(), Tensor: duplicate.Name, Err: err}
	}
	return opError(&entries[0].Request, err)
}

// Drive runs turns of the loop in the calling goroutine until done reports true or ctx has ended, but not for long if nothing
// happens: the caller goes on to wait. What was queued is noticed in any case. It may be called from any goroutine; Done of other
// operations is called by it too.
func (e *Engine) Drive(ctx context.Context, done func() bool) { e.sched.drive(ctx, done) }

// Notify makes the loop notice what was queued.
func (e *Engine) Notify() { e.sched.notify() }

// NotifyLater makes the loop notice what was queued, but not at once if that would delay the caller.
func (e *Engine) NotifyLater() { e.sched.notifyLater() }

// Flush notifies the loop now if NotifyLater has deferred that.
func (e *Engine) Flush() { e.sched.flush() }

// arrived implements loop.
func (e *Engine) arrived() bool {
	for _, f := range e.polled {
		if f.fill() {
			return true
		}
	}
	return len(e.started) > 0 && e.stepStarted()
}

// executing implements loop.
func (e *Engine) executing() bool { return e.granted > len(e.started) }

// queued implements loop.
func (e *Engine) queued() (n int) {
	for _, l := range e.lanes.snapshot() {
		n += l.queue.Pending()
	}
	return n
}

// handOff implements loop.
func (e *Engine) handOff() {
	for _, l := range e.started {
		l.unclaim(l.execution.work)
	}
	clear(e.started)
	e.started = e.started[:0]
}

// startInTurn starts w here if turns of the loop may do it. Else it reports false, and w is to be pushed to the lane.
func (e *Engine) startInTurn(l *lane, w *work) bool {
	moves := w.grant.Responses[0].Kind.MovesData()
	// A caller that waits has time for many steps. If others are late for one of them, or ctx ends, the lane goes on.
	// A barrier is not answered before what it comes after.
	if !e.sched.drivable || moves && !l.isBrief(w, !e.sched.background.Load()) || !l.claim(!moves) {
		return false
	}
	e.observer.begin(w, e.now)
	if err := l.start(w); err != nil || !moves {
		e.complete(l, w, err)
	} else {
		e.started = append(e.started, l)
	}
	return true
}

// complete answers w, or leaves it to the lane until the verdict if err is not nil, and gives the lane back.
func (e *Engine) complete(l *lane, w *work, err error) {
	if w.failed = err != nil; !w.failed {
		l.answer(w)
	}
	e.laneFinished(w, err)
	if err == nil {
		w = nil
	}
	l.unclaim(w)
}

// stepStarted does the next step of what was started where that is possible by now, and reports whether there was one.
func (e *Engine) stepStarted() (some bool) {
	for i := 0; i < len(e.started); {
		l := e.started[i]
		w := l.execution.work
		progress, err := l.step(e.ctx, false)
		switch {
		case err == nil && progress == ops.Waiting:
			i++
			continue
		case err == nil && progress == ops.Moving:
			some = true
			e.sched.extend()
			i++
			continue
		case err == nil && progress == ops.Blocked:
			l.unclaim(w)
		default:
			e.complete(l, w, err)
		}
		some = true
		e.started = slices.Delete(e.started, i, i+1)
	}
	return some
}
