package hvd

import (
	"context"
	"fmt"
	"slices"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/tensor"
)

// ProcessSet is some ranks of a job, among whom operations can run: with Over. Each set negotiates, fuses and executes by
// itself; a set that waits or works delays no other. All methods are safe for concurrent use.
type ProcessSet struct {
	engine *Engine
	set    *rank.Set
}

// ID is the number of the set: 0 for that of all ranks, then 1, 2, ... in the order in which they were added. It is the
// same at all ranks and, unlike in Horovod, never used again.
func (p *ProcessSet) ID() int { return int(p.set.ID) }

// Ranks are the members, ascending.
func (p *ProcessSet) Ranks() []int {
	ranks := make([]int, len(p.set.Ranks))
	for i, r := range p.set.Ranks {
		ranks[i] = int(r)
	}
	return ranks
}

// Size is the number of members.
func (p *ProcessSet) Size() int { return p.set.Size() }

// Rank is the position of this rank among the members, or -1 if it is none.
func (p *ProcessSet) Rank() int { return p.set.Me }

// Included reports whether this rank is a member.
func (p *ProcessSet) Included() bool { return p.set.Me >= 0 }

// String is "process set 2 of ranks [0 3]".
func (p *ProcessSet) String() string { return p.set.String() }

// setOf returns the ProcessSet of s, which is always the same.
func (e *Engine) setOf(s *rank.Set) *ProcessSet {
	p, ok := e.sets.Load(s)
	if !ok {
		p, _ = e.sets.LoadOrStore(s, &ProcessSet{engine: e, set: s})
	}
	return p.(*ProcessSet)
}

// ProcessSets are the process sets that exist, by ID; the first is that of all ranks. Sets without this rank are among
// them.
func (e *Engine) ProcessSets() []*ProcessSet {
	sets := e.rank.Sets()
	all := make([]*ProcessSet, len(sets))
	for i, s := range sets {
		all[i] = e.setOf(s)
	}
	return all
}

// ProcessSets are those of the engine that Init started. Like all queries it panics before Init.
func ProcessSets() []*ProcessSet { return mustCurrent("ProcessSets").ProcessSets() }

// GlobalProcessSet is that of all ranks, over which operations run unless Over says otherwise. Like all queries it panics
// before Init.
func GlobalProcessSet() *ProcessSet {
	e := mustCurrent("GlobalProcessSet")
	return e.setOf(e.rank.Global)
}

// AddProcessSet makes a process set of the given ranks, in any order. All ranks of the job must call it with the same
// ranks, also those that will not be members, and it returns when all have. A rank adds one set at a time: a second call
// meanwhile is a *DuplicateNameError. Of the options, On and Timeout apply.
func AddProcessSet(ctx context.Context, ranks []int, opts ...Option) (*ProcessSet, error) {
	c, err := prepare(message.AddProcessSet, tensor.Invalid, false, opts)
	if err != nil {
		return nil, err
	}
	ch, err := c.change(ctx, func(done func(*rank.Change, error)) error { return c.AddSet(ranks, done) })
	if err != nil {
		return nil, err
	}
	return c.engine.setOf(ch.Set), nil
}

// RemoveProcessSet removes a process set. All ranks of the job must call it, and it returns when all have. Operations that
// were granted in the set finish, those that still wait get ErrNoProcessSet. Of the options, Timeout applies.
func RemoveProcessSet(ctx context.Context, set *ProcessSet, opts ...Option) error {
	if set == nil {
		return &UsageError{Op: message.RemoveProcessSet.String(), Err: fmt.Errorf("process set is nil")}
	}
	c, err := prepare(message.RemoveProcessSet, tensor.Invalid, false, append(slices.Clone(opts), On(set.engine)))
	if err != nil {
		return err
	}
	_, err = c.change(ctx, func(done func(*rank.Change, error)) error { return c.RemoveSet(set.set, done) })
	if err == nil {
		c.engine.sets.Delete(set.set)
	}
	return err
}

// change asks for a change of the process sets and waits for it.
func (c *call) change(ctx context.Context, ask func(done func(*rank.Change, error)) error) (*rank.Change, error) {
	c.Hold = true
	o := &operation{kind: c.Kind, engine: c.engine}
	var change *rank.Change
	err := c.submitted(ask(func(ch *rank.Change, err error) {
		change = ch
		o.hold(&ch.Entry)
		o.complete(err)
	}))
	if err == nil {
		o.name = c.Name
		err = o.wait(ctx, o)
	}
	if err != nil {
		return nil, err
	}
	return change, nil
}
