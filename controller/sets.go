package controller

import (
	"fmt"
	"slices"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
)

// setTable is the coordinator's table of the process sets of a job. Operations on the global set, in which
// all ranks take part, add and remove process sets.
type setTable struct {
	size          int // number of ranks of the job
	cacheCapacity int
	waits         *waits
	next          topo.ProcessSetID // the ID of the next set; no ID is used twice
	// sets is in ascending order of ID. The slice is never changed in place but replaced, so that a loop over
	// it may add and remove sets.
	sets    []*setState
	removed []removedSet
}

// removedSet is a process set that was removed. It is kept until every rank has seen the removal, because
// frames about the set may still be in flight.
type removedSet struct {
	Set
	cycle uint64
}

func newSetTable(sets []Set, cacheCapacity int, w *waits) *setTable {
	t := &setTable{size: len(sets[0].Ranks), cacheCapacity: cacheCapacity, waits: w}
	for _, s := range sets {
		t.sets = append(t.sets, newSetState(s, cacheCapacity, w))
		t.next = max(t.next, s.ID+1)
	}
	return t
}

// find returns the set with the given ID, or nil if there is none.
func (t *setTable) find(id topo.ProcessSetID) *setState {
	for _, s := range t.sets {
		if s.ID == id {
			return s
		}
	}
	return nil
}

// changesSets reports whether operations of kind k add or remove process sets.
func changesSets(k message.Kind) bool {
	return k == message.AddProcessSet || k == message.RemoveProcessSet
}

// change adds or removes a process set in the given cycle, after all ranks have agreed on that. It returns
// the response for the ranks, which is an error if the set cannot be added or removed.
func (t *setTable) change(r *message.Response, cycle uint64) *message.Response {
	done := *r
	var reason string
	switch r.Kind {
	case message.AddProcessSet:
		done.Set, reason = t.add(r.Ranks)
	case message.RemoveProcessSet:
		reason = t.remove(r.Set, cycle)
	}
	if reason != "" {
		return &message.Response{Kind: message.Error, Name: r.Name, Text: fmt.Sprintf("%v %q: %s", r.Kind,
			r.Name, reason)}
	}
	return &done
}

// add adds a process set with the given ranks, which are in ascending order. If the set cannot be added, add
// returns the reason as text.
func (t *setTable) add(ranks []topo.Rank) (id topo.ProcessSetID, reason string) {
	if last := ranks[len(ranks)-1]; int(last) >= t.size {
		return 0, fmt.Sprintf("got rank %d, but the job has only %d ranks", last, t.size)
	}
	for _, s := range t.sets {
		if slices.Equal(s.Ranks, ranks) {
			return 0, fmt.Sprintf("duplicate process set: process set %d already consists of %s", s.ID,
				topo.FormatRanks(ranks))
		}
	}
	if len(t.sets) >= message.MaxSets {
		return 0, fmt.Sprintf("the job already has %d process sets, which is the maximum", len(t.sets))
	}
	id = t.next
	t.next++
	t.sets = append(t.sets[:len(t.sets):len(t.sets)], newSetState(Set{ID: id, Ranks: ranks}, t.cacheCapacity,
		t.waits))
	return id, ""
}

// remove removes a process set and drops the requests that wait in it. The ranks still finish the operations
// that were granted in it. If the set does not exist, remove returns a text that says so.
func (t *setTable) remove(id topo.ProcessSetID, cycle uint64) (reason string) {
	s := t.find(id)
	if s == nil {
		return fmt.Sprintf("process set %d does not exist", id)
	}
	s.ready = nil // decide nothing else about the set in the cycle that removes it
	t.removed = append(t.removed, removedSet{s.Set, cycle})
	t.sets = slices.DeleteFunc(slices.Clone(t.sets), func(x *setState) bool { return x == s })
	return ""
}

// crossed reports whether rank r could correctly send news of a removed set. It could if it had not seen the
// removal when it sent the news. seen is the last cycle that the rank had applied then.
func (t *setTable) crossed(id topo.ProcessSetID, r topo.Rank, seen uint64) bool {
	return slices.ContainsFunc(t.removed, func(s removedSet) bool {
		return s.ID == id && s.index(r) >= 0 && seen < s.cycle
	})
}

// forget drops the removed sets whose removal every rank has seen. seen is the last cycle that every rank has
// applied.
func (t *setTable) forget(seen uint64) {
	t.removed = slices.DeleteFunc(t.removed, func(s removedSet) bool { return s.cycle <= seen })
}

// change adds or removes a process set at a member, as the granted response r says. The engine ends the
// requests that wait in a removed set. Operations that were granted in the set still run.
func (m *Member) change(r *message.Response) error {
	switch r.Kind {
	case message.AddProcessSet:
		if m.set(r.Set) != nil {
			return fmt.Errorf("got a grant that adds process set %d, which already exists", r.Set)
		}
		if s := newMemberSet(Set{ID: r.Set, Ranks: r.Ranks}, m.cfg.Rank); s.me >= 0 || m.cfg.Lockstep {
			m.sets = append(m.sets, s)
		}
	case message.RemoveProcessSet:
		m.sets = slices.DeleteFunc(m.sets, func(s *memberSet) bool { return s.ID == r.Set })
	}
	return nil
}
