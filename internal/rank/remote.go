package rank

import (
	"context"
	"slices"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/p2p"
	"github.com/gohvd/gohvd/internal/topo"
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
	r.Global = r.newSet(topo.Global, topo.UpTo(j.Place.Size), false)
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
