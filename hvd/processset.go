package hvd

import (
	"context"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/tensor"
)

// ProcessSet is a set of ranks. An operation with the option Over runs among the ranks of a set. Each set
// negotiates, fuses and executes independently, so no set has to wait for another set. Its methods work after
// Shutdown too.
type ProcessSet struct {
	engine *Engine
	set    *rank.Set
}

// ID returns the number of the set: 0 for the set of all ranks, then 1, 2, ... in the order in which sets
// were added. The number is the same at all ranks that know the set. Unlike in Horovod it is never reused.
func (p *ProcessSet) ID() int { return int(p.set.ID) }

// Ranks returns the ranks of the members in ascending order.
func (p *ProcessSet) Ranks() []int {
	ranks := make([]int, len(p.set.Ranks))
	for i, r := range p.set.Ranks {
		ranks[i] = int(r)
	}
	return ranks
}

// Size returns the number of members.
func (p *ProcessSet) Size() int { return p.set.Size() }

// Rank returns the position of this rank among the members, or -1 if it is not a member.
func (p *ProcessSet) Rank() int { return p.set.Me }

// Included reports whether this rank is a member.
func (p *ProcessSet) Included() bool { return p.set.Me >= 0 }

// String returns a description such as "process set 2 of ranks [0 3]".
func (p *ProcessSet) String() string { return p.set.String() }

// setOf returns the ProcessSet for s. Every call for the same s returns the same ProcessSet.
func (e *Engine) setOf(s *rank.Set) *ProcessSet {
	p, ok := e.sets.Load(s)
	if !ok {
		p, _ = e.sets.LoadOrStore(s, &ProcessSet{engine: e, set: s})
	}
	return p.(*ProcessSet)
}

// ProcessSets returns the process sets that exist, in the order of their IDs, including sets of which this
// rank is not a member. It omits sets that other ranks have added with MembersOnly. The first is the set of
// all ranks.
func (e *Engine) ProcessSets() []*ProcessSet {
	sets := e.rank.Sets()
	all := make([]*ProcessSet, len(sets))
	for i, s := range sets {
		all[i] = e.setOf(s)
	}
	return all
}

// ProcessSets returns the process sets of the engine that Init started, as Engine.ProcessSets does.
func ProcessSets() []*ProcessSet { return mustCurrent("ProcessSets").ProcessSets() }

// GlobalProcessSet returns the set of all ranks. Operations run on it unless Over is given.
func GlobalProcessSet() *ProcessSet {
	e := mustCurrent("GlobalProcessSet")
	return e.setOf(e.rank.Global)
}

// AddProcessSet makes a process set of the given ranks, which may be in any order. All ranks of the job must
// call it with the same ranks, including ranks that will not be members. It returns when all ranks have
// called it. If a set of these ranks exists already, which may be that of all ranks, it fails with a
// *MismatchError. It is a *UsageError if
// there are no ranks, if one is not in the job or given twice, or if HOROVOD_DYNAMIC_PROCESS_SETS is 0. The
// options MembersOnly and Name apply, and Over does not.
//
// With MembersOnly, only the given ranks call it, and it returns when all of them have called it. This rank
// must be one of them. A set of the same ranks may exist already, and each call makes another set.
//
// Several goroutines may add sets at the same time if the calls have different names. The default name
// depends only on the ranks with MembersOnly, and is the same for all other calls. If a call of the same name
// is in flight at this rank, the call fails with a *UsageError that wraps a *DuplicateNameError. Calls of the
// same name at several ranks belong together, even if their ranks have no rank in common. So if they name
// different ranks, they fail at all these ranks with a *MismatchError that says which rank named what, as
// soon as all the named ranks have called it.
//
// A call costs a frame from each rank that calls it to rank 0, and one back. A set without operations costs
// each member about 6 KiB of memory. Its first operations open its connections and its shared memory, about
// 1.7 MiB at each member.
func AddProcessSet(ctx context.Context, ranks []int, opts ...AddProcessSetOption) (*ProcessSet, error) {
	c, err := prepare(message.AddProcessSet, tensor.Invalid, opts)
	if err != nil {
		return nil, public(err)
	}
	h := new(Handle[*ProcessSet])
	err = change(&c, h, func(done func(*rank.Change, error)) error { return c.AddSet(ranks, done) },
		func(s *rank.Set) { h.result = c.engine.setOf(s) })
	return await(ctx, h, err)
}

// RemoveProcessSet removes a process set. All ranks of the job must call it, including ranks that are not
// members. If the set was added with MembersOnly, all members must call it. It returns when all these ranks
// have called it or Shutdown. Operations on the set that have been granted still finish. All other pending
// operations on the set fail with ErrNoProcessSet. It is a *UsageError if the set is nil, is the set of all
// ranks or was removed before, or if HOROVOD_DYNAMIC_PROCESS_SETS is 0. The option On may be omitted, because
// the set belongs to an engine.
func RemoveProcessSet(ctx context.Context, set *ProcessSet, opts ...RemoveProcessSetOption) error {
	if set == nil || set.engine == nil {
		return &UsageError{Op: message.RemoveProcessSet.String(), Err: errNoSet}
	}
	c, err := prepare(message.RemoveProcessSet, tensor.Invalid,
		append([]RemoveProcessSetOption{On(set.engine)}, opts...))
	switch {
	case err == nil && c.engine != set.engine:
		err = c.Misuse(ofAnotherEngine, set)
	case err == nil && set.engine.former():
		err = c.Misuse(ofFormerEngine, set)
	}
	if err != nil {
		return public(err)
	}
	h := new(Handle[struct{}])
	err = change(&c, h, func(done func(*rank.Change, error)) error { return c.RemoveSet(set.set, done) },
		func(*rank.Set) { c.engine.sets.Delete(set.set) })
	_, err = await(ctx, h, err)
	return err
}

// change calls the function ask to request a change of the process sets. When the change is done, it calls
// changed with the set, and completes the empty handle h.
func change[R any](c *call, h *Handle[R], ask func(done func(*rank.Change, error)) error,
	changed func(*rank.Set)) error {
	c.Hold = true
	h.kind, h.engine = c.Kind, c.engine
	err := c.submitted(ask(func(ch *rank.Change, err error) {
		h.hold(&ch.Entry)
		if err == nil {
			changed(ch.Set)
		}
		h.complete(err)
	}))
	h.name = c.Name
	return err
}
