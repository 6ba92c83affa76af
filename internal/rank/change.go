package rank

import (
	"context"
	"fmt"
	"slices"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/tensorqueue"
)

// Change is an operation of all ranks, or of the members of a process set, that adds or removes the set.
type Change struct {
	tensorqueue.Entry
	// Set is the set to remove, or the set that was added. While an addition has not completed, Set is nil.
	Set *Set
}

// AddSet queues an operation that adds a process set of the given ranks. All ranks take part in it, or with
// c.MembersOnly only the given ranks. AddSet calls done when the operation has ended.
func (c *Call) AddSet(ranks []int, done func(*Change, error)) error {
	members, err := membersOf(ranks, c.Rank.Place.Size)
	if err != nil {
		return c.Misuse("%w", err)
	}
	q := message.Request{Name: "process_set.add", Ranks: members, MembersOnly: c.MembersOnly}
	if c.MembersOnly && !slices.Contains(members, topo.Rank(c.Rank.Place.Rank)) {
		return c.Misuse("rank %d is not among the ranks %v, and only these ranks add the process set: call it only at a member",
			c.Rank.Place.Rank, members)
	}
	switch {
	case c.Name != "":
		q.Name += "." + c.Name
	case c.MembersOnly: // sets with different members may be added at the same time
		q.Name += short(fmt.Sprint(members), maxRanksText, "ranks", len(members))
	}
	return c.change(&Change{}, topo.Global, q, done)
}

// RemoveSet queues an operation that removes s. If only the members have added s, only they take part in it,
// otherwise all ranks. RemoveSet calls done when the operation has ended.
func (c *Call) RemoveSet(s *Set, done func(*Change, error)) error {
	if !slices.Contains(c.Rank.Sets(), s) {
		return c.Misuse("%w", engine.ErrNoProcessSet)
	}
	in := topo.Global
	if s.ByMembers {
		in = s.ID
	}
	return c.change(&Change{Set: s}, in, message.Request{Name: "process_set.remove", Set: s.ID}, done)
}

// AddSetNow adds a process set and returns when all ranks, or with membersOnly all members, have added it. A
// name tells calls apart that are made at the same time. It may be empty. timeoutSeconds is as in Spec.
func (r *Rank) AddSetNow(ranks []int, membersOnly bool, name string, timeoutSeconds float64) (*Set, error) {
	return r.changeNow(message.AddProcessSet, timeoutSeconds,
		func(c *Call, done func(*Change, error)) error {
			c.MembersOnly, c.Name = membersOnly, name
			return c.AddSet(ranks, done)
		})
}

// RemoveSetNow removes a process set and returns when all ranks, or all members of a set that only they have
// added, have removed it.
func (r *Rank) RemoveSetNow(id int, timeoutSeconds float64) error {
	_, err := r.changeNow(message.RemoveProcessSet, timeoutSeconds,
		func(c *Call, done func(*Change, error)) error {
			set := r.FindSet(id)
			if set == nil {
				return c.Misuse("process set %d: %w", id, engine.ErrNoProcessSet)
			}
			return c.RemoveSet(set, done)
		})
	return err
}

// changeNow calls the function ask, which submits a change of the process sets, and waits until the change is
// done. It returns the set.
func (r *Rank) changeNow(kind message.Kind, timeoutSeconds float64,
	ask func(c *Call, done func(*Change, error)) error) (*Set, error) {
	c := NewCall(kind, tensor.Invalid)
	c.Rank = r
	var err error
	if c.Timeout, err = TimeoutOf(timeoutSeconds); err != nil {
		return nil, c.Misuse("%w", err)
	}
	if err := c.Check(); err != nil {
		return nil, err
	}
	var set *Set
	done := make(chan error, 1)
	if err = ask(&c, func(ch *Change, err error) { set = ch.Set; done <- err }); err == nil {
		if r.Remote == nil {
			r.Engine.Drive(context.Background(), func() bool { return len(done) > 0 })
		}
		err = <-done
	}
	return set, err
}

// change queues the request q in the process set in.
func (c *Call) change(ch *Change, in topo.ProcessSetID, q message.Request, done func(*Change, error)) error {
	r := c.Rank
	q.Kind, c.Name = c.Kind, q.Name
	if c.Set != r.Global {
		return c.Misuse("option Over does not apply to this operation, because all ranks of the job take part in it")
	}
	if !r.dynamicSets {
		return c.Misuse("process sets cannot be changed after Init: HOROVOD_DYNAMIC_PROCESS_SETS is 0")
	}
	ch.Entry = tensorqueue.Entry{Set: in, Request: q, Timeout: c.Timeout, Hold: c.Hold}
	ch.Done = func(err error) {
		switch {
		case err != nil:
		case c.Kind == message.AddProcessSet:
			ch.Set = r.newSet(ch.Response.Set, ch.Response.Ranks, q.MembersOnly)
		default:
			r.removeSet(ch.Set)
		}
		done(ch, err)
	}
	return c.checkAndQueue(&ch.Entry)
}
