package engine

import (
	"context"
	"errors"

	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/tensorqueue"
)

// Queue is Submit for a caller that calls Drive, Notify or NotifyLater next, and has checked the requests.
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

// NotifyLater is Notify, but not at once if that would delay the caller: Flush, or Drive, does that.
func (e *Engine) NotifyLater() { e.sched.notifyLater() }

// Flush makes the loop notice now what NotifyLater was called for.
func (e *Engine) Flush() { e.sched.flush() }

// arrived implements loop.
func (e *Engine) arrived() bool {
	for _, f := range e.polled {
		if f.fill() {
			return true
		}
	}
	return len(e.trying) > 0 && e.try()
}

// executing implements loop.
func (e *Engine) executing() bool { return e.granted > len(e.trying) }

// queued implements loop.
func (e *Engine) queued() (n int) {
	for _, l := range e.lanes.snapshot() {
		n += l.queue.Pending()
	}
	return n
}

// handOff implements loop.
func (e *Engine) handOff() {
	for i, l := range e.trying {
		w := l.trial
		l.trial = nil
		l.unclaim(w)
		e.trying[i] = nil
	}
	e.trying = e.trying[:0]
}

// attempt does w here, or begins it, if that needs no waiting. Else it reports false, and w is to be given to the lane.
func (e *Engine) attempt(l *lane, w *work) bool {
	kind := w.grant.Responses[0].Kind
	// A barrier is not answered before what it comes after.
	if !e.sched.drivable || !l.claim(!kind.MovesData()) {
		return false
	}
	e.observer.begin(w, e.now)
	if !kind.MovesData() {
		e.attempted(l, w, l.execute(e.ctx, w))
		return true
	}
	// A caller that waits has time for many steps. If others are late for one of them, or ctx ends, the lane goes on.
	if !l.isBrief(w, !e.sched.background.Load()) {
		l.unclaim(nil)
		return false
	}
	if err := l.start(w); err != nil {
		e.attempted(l, w, err)
		return true
	}
	l.trial = w
	e.trying = append(e.trying, l)
	return true
}

// attempted notes that w has ended, and gives the lane back.
func (e *Engine) attempted(l *lane, w *work, err error) {
	e.laneFinished(w, err)
	if err == nil {
		l.unclaim(nil)
		return
	}
	w.failed = true // it waits there for the verdict
	l.unclaim(w)
}

// try does the next step of what was started where that is possible by now, and reports whether there was one.
func (e *Engine) try() (some bool) {
	for i := 0; i < len(e.trying); i++ {
		l := e.trying[i]
		w := l.trial
		progress, err := l.step(e.ctx, false)
		switch {
		case err == nil && progress == ops.Moving:
			some = true
			e.sched.extend()
			continue
		case err == nil && progress == ops.Waiting:
			continue
		case err == nil && progress == ops.Blocked:
			l.unclaim(w)
		default:
			if err == nil {
				l.answer(w)
			}
			e.attempted(l, w, err)
		}
		l.trial = nil
		last := len(e.trying) - 1
		e.trying[i], e.trying[last] = e.trying[last], nil
		e.trying = e.trying[:last]
		i--
		some = true
	}
	return some
}
