package rank

import (
	"context"
	"slices"
	"time"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/p2p"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
	"github.com/gohvd/gohvd/tensorqueue"
)

// Remote runs operations in an engine that is in another process. The client of a sidecar implements it.
type Remote interface {
	// Queue submits entries, which are one operation, as Engine.Queue does. If it returns an error, nothing
	// was submitted. Otherwise it finishes each entry, possibly not before a call of Drive or Flush for the
	// operation. Entries that add or remove a process set need no such call.
	Queue(entries ...*tensorqueue.Entry) error
	// Post begins a message, as Engine.Post does. Done of o may be called in the same calls.
	Post(set topo.ProcessSetID, o *p2p.Op, receive bool) error
	// NotifyLater makes the engine notice the operations of Queue within a short time.
	NotifyLater()
	// Drive waits until done returns true or ctx ends. The operation in which done is interested is of, which
	// is the first entry of Queue or the message. If of is nil, done may depend on any operations.
	Drive(ctx context.Context, of any, done func() bool)
	// Flush finishes the operation if it is done. of is as in Drive.
	Flush(of any)
	// Shutdown leaves the job, as Rank.Shutdown does.
	Shutdown(ctx context.Context, why engine.Departure) error
	// Check returns why the job is over, or nil while it runs.
	Check() error
}

// Joined describes a rank that has joined its job in another process.
type Joined struct {
	Place       topo.Topology
	Homogeneous bool
	Epoch       uint64
	// Sets has the process sets by ID, without the set of all ranks.
	Sets map[topo.ProcessSetID][]topo.Rank
}

// NewRemote returns a rank whose engine is in another process.
func NewRemote(j Joined, remote Remote) *Rank {
	r := &Rank{Place: j.Place, Homogeneous: j.Homogeneous, Epoch: j.Epoch, Remote: remote, dynamicSets: true}
	all := make([]topo.Rank, j.Place.Size)
	for i := range all {
		all[i] = topo.Rank(i)
	}
	r.Global = r.newSet(topo.Global, all, false)
	for id, ranks := range j.Sets {
		r.newSet(id, ranks, false)
	}
	return r
}

// Check returns why the job of r is over, or nil while it runs. If the job was shut down in order, Check
// returns engine.ErrShutDown.
func (r *Rank) Check() error {
	if r.Remote != nil {
		return r.Remote.Check()
	}
	select {
	case <-r.Engine.Over():
		if err := r.Engine.Err(); err != nil {
			return err
		}
		return engine.ErrShutDown
	default:
		return nil
	}
}

// queue submits entries to the engine of r.
func (r *Rank) queue(entries []*tensorqueue.Entry) error {
	if r.Remote != nil {
		// The slice escapes. The copy keeps entries of a process with an engine on the stack of the caller.
		return r.Remote.Queue(slices.Clone(entries)...)
	}
	return r.Engine.Queue(entries...)
}

// post begins a message in the engine of r.
func (r *Rank) post(set topo.ProcessSetID, o *p2p.Op, receive bool) error {
	if r.Remote != nil {
		return r.Remote.Post(set, o, receive)
	}
	return r.Engine.Post(set, o, receive)
}

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
