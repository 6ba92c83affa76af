package rank

import (
	"context"
	"time"

	"github.com/gohvd/gohvd/internal/trace"
)

// Drive makes x proceed until done returns true or the deadline, unless it is zero. If the engine is in this
// process, Drive may return before that, and another goroutine then ends x.
func (x *Execution) Drive(deadline time.Time, done func() bool) {
	ctx := context.Background()
	switch r := x.Rank; {
	case r.Remote != nil:
		if !deadline.IsZero() {
			var cancel context.CancelFunc
			ctx, cancel = context.WithDeadline(ctx, deadline)
			defer cancel()
		}
		r.Remote.Drive(ctx, x.first(), done)
	case x.Kind.IsMessage():
	case deadline.IsZero():
		r.Engine.Drive(ctx, done)
	default:
		r.Engine.DriveUntil(deadline, done)
	}
}

// BeginWait returns the time at which a wait of the program for x begins, for EndWait. If no timeline of this
// process shows the wait, it returns 0.
func (x *Execution) BeginWait() time.Duration {
	if x.Rank.Engine == nil {
		return 0
	}
	return x.Rank.Engine.Observer().BeginSpan()
}

// EndWait shows in the timeline that the program has waited for x from begun until now. If begun is 0, it
// does nothing.
func (x *Execution) EndWait(begun time.Duration) {
	if begun == 0 {
		return
	}
	name := x.Name
	if !x.Kind.IsMessage() && len(x.entries) > 0 {
		name = x.entries[0].Request.Name // it is not empty
	}
	x.Rank.Engine.Observer().EndSpan(trace.Wait, name, begun)
}

// NotifyLater makes the engine notice x within a short time. It is called after Begin unless Drive is called
// at once.
func (x *Execution) NotifyLater() {
	switch r := x.Rank; {
	case r.Remote != nil:
		r.Remote.NotifyLater()
	case !x.Kind.IsMessage():
		r.Engine.NotifyLater()
	}
}

// Flush makes the engine notice x at once. If the engine is in another process and x is done, Flush ends x.
func (x *Execution) Flush() {
	switch r := x.Rank; {
	case r.Remote != nil:
		r.Remote.Flush(x.first())
	case !x.Kind.IsMessage():
		r.Engine.Flush()
	}
}

// first returns the message or the first entry of x, or nil if x has neither.
func (x *Execution) first() any {
	switch {
	case len(x.entries) == 0:
		return nil
	case x.Kind.IsMessage():
		return x.message
	}
	return &x.entries[0].Entry
}
