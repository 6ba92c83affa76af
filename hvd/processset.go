package hvd

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/tensor"
	"github.com/gohvd/gohvd/tensorqueue"
	"github.com/gohvd/gohvd/topo"
)

// ProcessSet is some ranks of a job, among whom operations can run: with Over. Each set negotiates, fuses and executes by
// itself; a set that waits or works delays no other. All methods are safe for concurrent use.
type ProcessSet struct {
	engine  *Engine
	id      topo.ProcessSetID
	ranks   []topo.Rank                    // ascending
	me      int                            // position of this rank, or -1
	unnamed [message.NumKinds]atomic.Int64 // how many calls of each kind without a name this rank has made
	joined  atomic.Bool                    // this rank has joined, and not all have
}

// ID is the number of the set: 0 for that of all ranks, then 1, 2, ... in the order in which they were added. It is the
// same at all ranks and, unlike in Horovod, never used again.
func (p *ProcessSet) ID() int { return int(p.id) }

// Ranks are the members, ascending.
func (p *ProcessSet) Ranks() []int {
	ranks := make([]int, len(p.ranks))
	for i, r := range p.ranks {
		ranks[i] = int(r)
	}
	return ranks
}

// Size is the number of members.
func (p *ProcessSet) Size() int { return len(p.ranks) }

// Rank is the position of this rank among the members, or -1 if it is none.
func (p *ProcessSet) Rank() int { return p.me }

// Included reports whether this rank is a member.
func (p *ProcessSet) Included() bool { return p.me >= 0 }

// String is "process set 2 of ranks [0 3]".
func (p *ProcessSet) String() string { return fmt.Sprintf("process set %d of ranks %v", p.id, p.ranks) }

func (p *ProcessSet) contains(rank int) bool {
	_, ok := slices.BinarySearch(p.ranks, topo.Rank(rank))
	return ok
}

// setTable has the process sets of an engine.
type setTable struct {
	mu  sync.Mutex
	all []*ProcessSet // ascending by id
}

func (t *setTable) add(p *ProcessSet) {
	t.mu.Lock()
	defer t.mu.Unlock()
	i, _ := slices.BinarySearchFunc(t.all, p.id, func(q *ProcessSet, id topo.ProcessSetID) int { return int(q.id) - int(id) })
	t.all = slices.Insert(t.all, i, p)
}

func (t *setTable) remove(p *ProcessSet) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.all = slices.DeleteFunc(t.all, func(q *ProcessSet) bool { return q == p })
}

// newSet enters a set that the ranks have agreed on.
func (e *Engine) newSet(id topo.ProcessSetID, ranks []topo.Rank) *ProcessSet {
	p := &ProcessSet{engine: e, id: id, ranks: ranks, me: slices.Index(ranks, topo.Rank(e.place.Rank))}
	e.sets.add(p)
	return p
}

// ProcessSets are the process sets that exist, by ID; the first is that of all ranks. Sets without this rank are among
// them.
func (e *Engine) ProcessSets() []*ProcessSet {
	e.sets.mu.Lock()
	defer e.sets.mu.Unlock()
	return slices.Clone(e.sets.all)
}

// members are those of all sets but the global one.
func (e *Engine) members() map[topo.ProcessSetID][]topo.Rank {
	m := make(map[topo.ProcessSetID][]topo.Rank)
	for _, p := range e.ProcessSets() {
		if p.id != topo.Global {
			m[p.id] = p.ranks
		}
	}
	return m
}

// ProcessSets are those of the engine that Init started. Like all queries it panics before Init.
func ProcessSets() []*ProcessSet { return mustCurrent("ProcessSets").ProcessSets() }

// GlobalProcessSet is that of all ranks, over which operations run unless Over says otherwise. Like all queries it panics
// before Init.
func GlobalProcessSet() *ProcessSet { return mustCurrent("GlobalProcessSet").global }

// AddProcessSet makes a process set of the given ranks, in any order. All ranks of the job must call it with the same
// ranks, also those that will not be members, and it returns when all have. A rank adds one set at a time: a second call
// meanwhile is a *DuplicateNameError. Of the options, On and Timeout apply.
func AddProcessSet(ctx context.Context, ranks []int, opts ...Option) (*ProcessSet, error) {
	c, err := prepare(message.AddProcessSet, tensor.Invalid, false, opts)
	if err != nil {
		return nil, err
	}
	q := message.Request{Kind: c.kind, Name: "process_set.add"}
	if q.Ranks, err = members(ranks, c.engine.Size()); err != nil {
		return nil, c.misuse("%w", err)
	}
	var added *ProcessSet
	err = c.changeSets(ctx, q, func(r *message.Response) { added = c.engine.newSet(r.Set, r.Ranks) })
	if err != nil {
		return nil, err
	}
	return added, nil
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
	if !slices.Contains(c.engine.ProcessSets(), set) {
		return c.misuse("%w", ErrNoProcessSet)
	}
	q := message.Request{Kind: c.kind, Name: "process_set.remove", Set: set.id}
	return c.changeSets(ctx, q, func(*message.Response) { c.engine.sets.remove(set) })
}

// changeSets asks for a change of the process sets and waits for it; apply is called when all ranks have agreed.
func (c *call) changeSets(ctx context.Context, q message.Request, apply func(*message.Response)) error {
	c.name = q.Name
	if c.set != c.engine.global {
		return c.misuse("option Over does not apply: all ranks of the job take part")
	}
	if !c.engine.dynamicSets {
		return c.misuse("process sets cannot be changed after Init: HOROVOD_DYNAMIC_PROCESS_SETS is 0")
	}
	o := &operation{kind: c.kind, name: q.Name, engine: c.engine}
	e := &tensorqueue.Entry{Set: topo.Global, Request: q, Timeout: c.timeout, Hold: true}
	e.Done = func(err error) {
		if err == nil {
			apply(e.Response)
		}
		o.hold(e)
		o.complete(err)
	}
	if err := c.enter(e); err != nil {
		return err
	}
	return o.wait(ctx, o)
}

// members checks the ranks of a set and sorts them.
func members(ranks []int, size int) ([]topo.Rank, error) {
	if len(ranks) == 0 {
		return nil, fmt.Errorf("a process set without ranks")
	}
	sorted := slices.Sorted(slices.Values(ranks))
	set := make([]topo.Rank, len(sorted))
	for i, r := range sorted {
		switch {
		case r < 0 || r >= size:
			return nil, fmt.Errorf("rank %d, want 0 to %d", r, size-1)
		case i > 0 && r == sorted[i-1]:
			return nil, fmt.Errorf("rank %d twice in %v", r, ranks)
		}
		set[i] = topo.Rank(r)
	}
	return set, nil
}

// staticSets checks the sets that Init was given.
func staticSets(given [][]int, size int) ([]controller.Set, error) {
	if len(given) >= message.MaxSets {
		return nil, fmt.Errorf("%d process sets, want less than %d", len(given), message.MaxSets)
	}
	sets := []controller.Set{controller.Global(size)}
	for k, ranks := range given {
		set, err := members(ranks, size)
		if err != nil {
			return nil, fmt.Errorf("process set %d: %w", k+1, err)
		}
		for _, other := range sets {
			if slices.Equal(other.Ranks, set) {
				return nil, fmt.Errorf("process set %d is a duplicate: set %d has the ranks %v too", k+1, other.ID, set)
			}
		}
		sets = append(sets, controller.Set{ID: topo.ProcessSetID(k + 1), Ranks: set})
	}
	return sets[1:], nil
}

// maxSetsText is how long a rank's list of process sets may be to be told to the others as it is.
const maxSetsText = 4096

// setsText is what ranks compare to see that they were given the same sets.
func setsText(sets []controller.Set) string {
	var b strings.Builder
	for _, s := range sets {
		fmt.Fprint(&b, s.Ranks)
	}
	if b.Len() <= maxSetsText {
		return b.String()
	}
	hash := sha256.Sum256([]byte(b.String()))
	return fmt.Sprintf("%d sets with hash %s", len(sets), hex.EncodeToString(hash[:]))
}
