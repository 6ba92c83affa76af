package controller

import (
	"fmt"
	"slices"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
)

// setTable is the coordinator's table of the process sets of a job. Operations on the global set, in which
// all ranks take part, add and remove process sets. A process set may also be added and removed by its
// members only. Then the members request the addition on the global set, the answer is the first grant of the
// new set, and they request the removal on the set itself.
type setTable struct {
	size          int // number of ranks of the job
	cacheCapacity int
	waits         *waits
	leaving       func(topo.Rank) bool
	next          topo.ProcessSetID // the ID of the next set; no ID is used twice
	// sets is in ascending order of ID. The slice is never changed in place but replaced, so that a loop over
	// it may add and remove sets.
	sets    []*setState
	removed []removedSet
}

// removedSet is a process set that was removed. It is kept until every member has seen the removal, because
// frames about the set may still be in flight.
type removedSet struct {
	Set
	cycle uint64
}

func newSetTable(sets []Set, cacheCapacity int, w *waits, leaving func(topo.Rank) bool) *setTable {
	t := &setTable{size: len(sets[0].Ranks), cacheCapacity: cacheCapacity, waits: w, leaving: leaving}
	for _, s := range sets {
		t.sets = append(t.sets, newSetState(s, cacheCapacity, w, leaving))
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
		return errorResponse(r, reason)
	}
	return &done
}

// errorResponse returns the error that answers the requests for r.
func errorResponse(r *message.Response, reason string) *message.Response {
	return &message.Response{Kind: message.Error, Name: r.Name,
		Text: fmt.Sprintf("%v %q: %s", r.Kind, r.Name, reason)}
}

// add adds a process set with the given ranks, which are in ascending order. If the set cannot be added, add
// returns the reason as text.
func (t *setTable) add(ranks []topo.Rank) (id topo.ProcessSetID, reason string) {
	if last := ranks[len(ranks)-1]; int(last) >= t.size {
		return 0, fmt.Sprintf("got rank %d, but the job has only %d ranks", last, t.size)
	}
	for _, s := range t.sets {
		if !s.byMembers && slices.Equal(s.Ranks, ranks) {
			return 0, fmt.Sprintf("duplicate process set: process set %d already consists of %s", s.ID,
				topo.FormatRanks(ranks))
		}
	}
	if reason = t.full(); reason != "" {
		return 0, reason
	}
	return t.insert(ranks).ID, ""
}

// checkChange returns an error if the request q to add or remove a process set must not be made in s.
// byMembers says whether only the members have added s.
func (s *Set) checkChange(byMembers bool, q *message.Request) error {
	switch {
	case s.ID == topo.Global, byMembers && q.Kind == message.RemoveProcessSet && q.Set == s.ID:
		return nil
	case byMembers && q.Kind == message.RemoveProcessSet:
		return fmt.Errorf("got process set %d for a request in process set %d, want the same process set", q.Set, s.ID)
	}
	return fmt.Errorf("got process set %d, want process set 0, because all ranks take part", s.ID)
}

// mayFound reports whether a member of s, the set of all ranks, may request that the given ranks, which are
// in ascending order, add a process set.
func (s *setState) mayFound(member int, ranks []topo.Rank) bool {
	return s.index(ranks[len(ranks)-1]) >= 0 && slices.Contains(ranks, s.Ranks[member])
}

// full returns a text if the job has the maximum number of process sets. Otherwise it returns "".
func (t *setTable) full() (reason string) {
	if len(t.sets) < message.MaxSets {
		return ""
	}
	return fmt.Sprintf("the job already has %d process sets, which is the maximum", len(t.sets))
}

// insert adds a process set with the next ID.
func (t *setTable) insert(ranks []topo.Rank) *setState {
	s := newSetState(Set{ID: t.next, Ranks: ranks}, t.cacheCapacity, t.waits, t.leaving)
	t.next++
	t.sets = append(t.sets[:len(t.sets):len(t.sets)], s)
	return s
}

// addFounded adds the process sets that only their members add, if all of these have requested it. The first
// grant of each set is the answer. If the members disagree, the answer is an error, and the set exists only
// until the error is granted. If a frame has no room for more answers, they wait for a later cycle.
func (t *setTable) addFounded() {
	global := t.sets[0]
	n := min(len(global.founded), message.MaxFrameSets-len(t.sets))
	if n == 0 {
		return
	}
	for _, row := range global.founded[:n] {
		t.found(row)
	}
	global.founded = slices.Delete(global.founded, 0, n)
	global.forgetRows()
}

// found adds the process set for which the requests in row ask. The row moves to the new set.
func (t *setTable) found(row *tableRow) {
	named := Set{Ranks: ranksIn(row.named)}
	r := agree(&named, pick(row.requests, named.Ranks), &t.sets[0].joined)
	if reason := t.full(); reason != "" && r.Kind != message.Error {
		r = errorResponse(r, reason)
	}
	// A rank that has joined may be named and have requested nothing. Then the answer is an error.
	asked := slices.DeleteFunc(slices.Clone(named.Ranks), func(m topo.Rank) bool {
		return row.requests[m] == nil
	})
	s := t.insert(asked)
	s.byMembers = true
	r.Set, r.Ranks = s.ID, asked
	moved := &tableRow{wait: row.wait, requests: pick(row.requests, asked), count: len(asked), complete: true}
	if row.arrivals != nil {
		moved.arrivals = pick(row.arrivals, asked)
	}
	s.table[r.Name], s.rows = moved, append(s.rows, moved)
	s.ready = append(s.ready, readyItem{response: r, row: moved})
}

// pick returns the elements of all, which has an element for each rank of the job, that belong to the given
// ranks.
func pick[T any](all []T, ranks []topo.Rank) []T {
	picked := make([]T, len(ranks))
	for i, r := range ranks {
		picked[i] = all[r]
	}
	return picked
}

// ranksIn returns the ranks whose bits are set.
func ranksIn(bits message.Bits) (ranks []topo.Rank) {
	for r, ok := bits.Next(0); ok; r, ok = bits.Next(r + 1) {
		ranks = append(ranks, topo.Rank(r))
	}
	return ranks
}

// foundingOf returns the response that ends the addition of a process set by its members if d is the grant of
// this response. Otherwise it returns nil. Such a grant is the first of its set. If the response is an error,
// the set is not added.
func foundingOf(d *message.DownSet) *message.Response {
	if len(d.Grants) != 1 || len(d.Grants[0].Full) != 1 || len(d.Grants[0].Bits) > 0 {
		return nil
	}
	r := d.Grants[0].Full[0]
	if r.Kind != message.AddProcessSet && r.Kind != message.Error || r.Set != d.Set || d.Set == topo.Global {
		return nil
	}
	return r
}

// remove removes a process set and drops the requests that wait in it. The ranks still finish the operations
// that were granted in it. If all ranks cannot remove such a set, remove returns the reason as text.
func (t *setTable) remove(id topo.ProcessSetID, cycle uint64) (reason string) {
	s := t.find(id)
	switch {
	case s == nil:
		return fmt.Sprintf("process set %d does not exist", id)
	case s.byMembers:
		return fmt.Sprintf("the members of process set %d, which are %s, have added it, and only they remove it",
			id, topo.FormatRanks(s.Ranks))
	}
	s.ready = nil // decide nothing else about the set in the cycle that removes it
	t.drop(s, cycle)
	return ""
}

// drop removes a process set that the given cycle has removed.
func (t *setTable) drop(s *setState, cycle uint64) {
	t.removed = append(t.removed, removedSet{s.Set, cycle})
	t.sets = slices.DeleteFunc(slices.Clone(t.sets), func(x *setState) bool { return x == s })
}

// crossed reports whether rank r could correctly send news of a removed set. It could if it had not seen the
// removal when it sent the news. seen is the last cycle that the rank had applied then.
func (t *setTable) crossed(id topo.ProcessSetID, r topo.Rank, seen uint64) bool {
	return slices.ContainsFunc(t.removed, func(s removedSet) bool {
		return s.ID == id && s.index(r) >= 0 && seen < s.cycle
	})
}

// forget drops the removed sets whose removal every member has seen. The function seen returns the last cycle
// that all the given ranks have applied.
func (t *setTable) forget(seen func(ranks []topo.Rank) uint64) {
	t.removed = slices.DeleteFunc(t.removed, func(s removedSet) bool { return s.cycle <= seen(s.Ranks) })
}

// change adds or removes a process set at a member, as the response r says, which was granted in the process
// set in. The engine ends the requests that wait in a removed set. Operations that were granted in the set
// still run.
func (m *Member) change(in *memberSet, r *message.Response) error {
	switch {
	case r.Kind == message.AddProcessSet && in.ID == topo.Global:
		if m.set(r.Set) != nil {
			return fmt.Errorf("got a grant that adds process set %d, which already exists", r.Set)
		}
		m.addSet(newMemberSet(Set{ID: r.Set, Ranks: r.Ranks}, m.cfg.Rank))
	case r.Kind == message.RemoveProcessSet:
		m.sets = slices.DeleteFunc(m.sets, func(s *memberSet) bool { return s.ID == r.Set })
	}
	return nil
}

// addSet adds a process set. Without Lockstep, it ignores sets that do not contain this rank.
func (m *Member) addSet(s *memberSet) {
	if s.me < 0 && !m.cfg.Lockstep {
		return
	}
	// A cycle may add several sets, and not in the order of their IDs.
	i, _ := slices.BinarySearchFunc(m.sets, s.ID, func(x *memberSet, id topo.ProcessSetID) int {
		return int(x.ID) - int(id)
	})
	m.sets = slices.Insert(m.sets, i, s)
}

// found returns the process set whose addition by its members d answers. If the answer is no error, found
// adds the set. It returns nil if d is no such answer.
func (m *Member) found(d *message.DownSet) *memberSet {
	r := foundingOf(d)
	if r == nil {
		return nil
	}
	s := newMemberSet(Set{ID: r.Set, Ranks: r.Ranks}, m.cfg.Rank)
	s.byMembers = true
	if r.Kind == message.AddProcessSet {
		m.addSet(s)
	}
	return s
}

// follow applies the decisions of a cycle about a set to which this rank does not belong. In lock-step, every
// rank knows all sets, and the members may remove theirs.
func (m *Member) follow(d *message.DownSet) {
	for i := range d.Grants {
		for _, r := range d.Grants[i].Full {
			if r.Kind == message.RemoveProcessSet {
				m.sets = slices.DeleteFunc(m.sets, func(s *memberSet) bool { return s.ID == d.Set })
			}
		}
	}
}
