package engine

import (
	"context"
	"errors"
	"time"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/outcome"
	"github.com/gohvd/gohvd/tensorqueue"
)

// Queue submits tensors of one process set to the engine. If one of them is refused, it submits none. The
// caller has checked the requests. If Queue returns nil, the engine owns the buffers of each entry until it
// calls the entry's Done, which it does exactly once. If Queue returns an error, the error is an *OpError,
// and the engine never calls Done. After Queue the caller must call Drive, Notify or NotifyLater.
func (e *Engine) Queue(entries ...*tensorqueue.Entry) error {
	s := e.sets.find(entries[0].Set)
	err := error(ErrNoProcessSet)
	setDeadlines(entries, e.observer.Since())
	if s != nil {
		err = s.queue.Add(entries...)
	}
	if err == nil {
		return nil
	}
	var duplicate *tensorqueue.DuplicateNameError
	if errors.As(err, &duplicate) { // the duplicate need not be the first entry of a group
		return &OpError{Op: duplicate.Op, Tensor: duplicate.Name, Err: err}
	}
	return outcome.Of(&entries[0].Request, err)
}

// setDeadlines sets the submission time of entries to now, and their deadlines.
func setDeadlines(entries []*tensorqueue.Entry, now time.Duration) {
	for _, e := range entries {
		e.Times.Submitted, e.Deadline = max(now, 1), 0
		if e.Timeout > 0 {
			e.Deadline = now + min(e.Timeout, controller.Never-now)
		}
	}
}

// Drive runs turns of the loop in the calling goroutine until done returns true or ctx ends. If nothing
// happens for the poll budget, Drive returns early, and the caller then waits for its operation without
// driving the loop. In all cases, a turn takes the queued operations. Any goroutine may call Drive. Drive
// also calls Done of entries that other goroutines have submitted.
func (e *Engine) Drive(ctx context.Context, done func() bool) {
	e.sched.Drive(ctx, controller.Never, done)
}

// DriveUntil does the same as Drive, but it ends at a deadline, which costs less than a context.
func (e *Engine) DriveUntil(deadline time.Time, done func() bool) {
	e.sched.Drive(context.Background(), deadline.Sub(e.start), done)
}

// Notify makes the loop run a turn, which takes the queued operations.
func (e *Engine) Notify() { e.sched.Notify() }

// NotifyLater notifies the loop as Notify does. If an immediate notification would delay the caller,
// NotifyLater defers it for a short time.
func (e *Engine) NotifyLater() { e.sched.NotifyLater() }

// Flush notifies the loop now if NotifyLater has deferred the notification.
func (e *Engine) Flush() { e.sched.Flush() }

// Arrived implements sched.Loop.
func (e *Engine) Arrived() bool {
	if e.negotiation.reads() && e.links.Poll() {
		return true
	}
	if e.exec.InTurns() > 0 {
		moved, turn := e.exec.Step()
		if moved {
			e.sched.Extend()
		}
		if turn {
			return true
		}
	}
	return e.negotiation.arrived()
}

// Executing implements sched.Loop.
func (e *Engine) Executing() bool { return e.granted > e.exec.InTurns() }

// Queued implements sched.Loop.
func (e *Engine) Queued() (n int) {
	for _, s := range e.sets.snapshot() {
		n += s.queue.Pending()
	}
	return n
}

// Submitted implements sched.Loop.
func (e *Engine) Submitted() (newest time.Duration) {
	for _, s := range e.sets.all {
		newest = max(newest, s.queue.Newest())
	}
	return newest
}

// HandOff implements sched.Loop.
func (e *Engine) HandOff() { e.exec.HandOff() }
