package engine

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/tensorqueue"
)

// Queue submits tensors of one process set to the engine. If one of them is refused, it submits none. The
// caller has checked the requests. If Queue returns nil, the engine owns the buffers of each entry until it
// calls the entry's Done, which it does exactly once. If Queue returns an error, the error is an *OpError,
// and the engine never calls Done. After Queue the caller must call Drive, Notify or NotifyLater.
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
	if errors.As(err, &duplicate) { // the duplicate need not be the first entry of a group
		return &OpError{Op: duplicate.Kind.String(), Tensor: duplicate.Name, Err: err}
	}
	return opError(&entries[0].Request, err)
}

// Drive runs turns of the loop in the calling goroutine until done returns true or ctx ends. If nothing
// happens for the poll budget, Drive returns early, and the caller then waits for its operation without
// driving the loop. In all cases, a turn takes the queued operations. Any goroutine may call Drive. Drive
// also calls Done of entries that other goroutines have submitted.
func (e *Engine) Drive(ctx context.Context, done func() bool) { e.sched.drive(ctx, never, done) }

// DriveUntil does the same as Drive, but it ends at a deadline, which costs less than a context.
func (e *Engine) DriveUntil(deadline time.Time, done func() bool) {
	e.sched.drive(context.Background(), deadline.Sub(e.observer.start), done)
}

// Notify makes the loop run a turn, which takes the queued operations.
func (e *Engine) Notify() { e.sched.notify() }

// NotifyLater notifies the loop as Notify does. If an immediate notification would delay the caller,
// NotifyLater defers it for a short time.
func (e *Engine) NotifyLater() { e.sched.notifyLater() }

// Flush notifies the loop now if NotifyLater has deferred the notification.
func (e *Engine) Flush() { e.sched.flush() }

// arrived implements the interface loop.
func (e *Engine) arrived() bool {
	if e.negotiation.reads() {
		for _, f := range e.polled {
			if f.fill() {
				e.unread = true
				return true
			}
		}
	}
	return len(e.started) > 0 && e.stepStarted() || e.negotiation.arrived()
}

// executing implements the interface loop.
func (e *Engine) executing() bool { return e.granted > len(e.started) }

// queued implements the interface loop.
func (e *Engine) queued() (n int) {
	for _, l := range e.lanes.snapshot() {
		n += l.queue.Pending()
	}
	return n
}

// submitted implements the interface loop.
func (e *Engine) submitted() (newest time.Duration) {
	for _, l := range e.lanes.all {
		newest = max(newest, l.queue.Newest())
	}
	return newest
}

// handOff implements the interface loop.
func (e *Engine) handOff() {
	for _, l := range e.started {
		l.unclaim(l.execution.work)
	}
	clear(e.started)
	e.started = e.started[:0]
}

// startInTurn reports whether turns of the loop may execute w. If so, it starts w. Otherwise the caller must
// push w to the lane.
func (e *Engine) startInTurn(l *lane, w *work) bool {
	moves := w.grant.Responses[0].Kind.MovesData()
	// A caller that runs the turns waits for its operation, so it has time for many steps. If another rank is
	// late for a step, or if the caller's context ends, the goroutine of the lane takes over.
	// A barrier must not complete before the operations that were granted before it. So a turn executes a
	// barrier only if the lane has reported the results of all earlier operations.
	if !e.sched.drivable || moves && !l.fitsInTurn(w, !e.sched.background.Load()) || !l.claim(!moves) {
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

// complete ends the execution of w in a turn and returns the lane to its goroutine. If err is nil, complete
// first reports the results of the tensors of w. Otherwise the lane reports the errors of the tensors when
// the verdict is known.
func (e *Engine) complete(l *lane, w *work, err error) {
	if err != nil {
		e.abort(l, w, err)
		return
	}
	l.answer(w)
	e.laneFinished(w, nil)
	l.unclaim(nil)
}

// abort ends the execution of w, which has failed with err.
func (e *Engine) abort(l *lane, w *work, err error) {
	w.failed = true
	e.laneFinished(w, err)
	l.unclaim(w)
}

// completeBetween does the same as complete for work that has succeeded between two turns. It reports whether
// a turn must follow. Usually none is needed, so that the caller can go on.
func (e *Engine) completeBetween(l *lane, w *work) (more bool) {
	l.answer(w)
	l.unclaim(nil)
	e.sched.extend()
	return e.retire(w)
}

// stepStarted executes the next step of each operation that a turn has started. It does not wait. If an
// operation is blocked, stepStarted hands it over to its lane. It reports whether a turn must follow, because
// the state of an operation has changed.
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
			some = true
		case err == nil:
			some = e.completeBetween(l, w) || some
		default:
			e.abort(l, w, err)
			some = true
		}
		e.started = slices.Delete(e.started, i, i+1)
	}
	return some
}
