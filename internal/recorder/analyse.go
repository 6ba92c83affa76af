package recorder

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/gohvd/gohvd/message"
)

// shown is how many of a list are shown; of the rest only the number is said.
const shown = 10

// Findings are what the dumps of all ranks say together. Lists of names have at most 10, the longest waiting first, beside the number of
// all. Durations are in nanoseconds.
type Findings struct {
	Size int `json:"size"`
	// Epoch is the newest one; what is older was not looked at.
	Epoch uint64 `json:"epoch"`
	// Waiting are tensors that some ranks have asked for, and others have not: those that wait for known ranks come first, then
	// those that may wait for ranks that gave no answer, then those that all have asked for. Among equals the longest waiting is first.
	Waiting []Waiting `json:"waiting"`
	// Running are operations that were agreed on and have not ended everywhere, the oldest first.
	Running []Running `json:"running"`
	// Silent are the ranks without a dump.
	Silent []Silent `json:"silent"`
	// Stalls are the texts of rank 0.
	Stalls []string `json:"stalls"`
	// Ranks are those with a dump.
	Ranks []Rank `json:"ranks"`
}

// Waiting is one tensor or several of a process set for which the same ranks wait for the same others.
type Waiting struct {
	Set      uint32        `json:"set"`
	Kind     string        `json:"kind"`
	Names    []string      `json:"names"`
	NumNames int           `json:"num_names"`
	Ranks    []int         `json:"ranks"`      // have asked for it
	Longest  time.Duration `json:"longest_ns"` // has one of them waited
	Missing  []Missing     `json:"missing"`    // have not
	Silent   []int         `json:"silent"`     // nothing is known of these, if they are members at all
}

// Missing is a rank that others wait for.
type Missing struct {
	Rank int `json:"rank"`
	// Times is how often it has called the first of the names before, as far as its recorder goes back; Complete says that that is
	// to the start of the epoch. Ago is when the last call ended.
	Times    int           `json:"times"`
	Complete bool          `json:"complete"`
	Ago      time.Duration `json:"ago_ns"`
}

// Running is one tensor or several of a process set that were granted.
type Running struct {
	Set      uint32        `json:"set"`
	Number   uint64        `json:"number"` // of the grant; 0 if it is not known
	Kind     string        `json:"kind"`
	Backend  string        `json:"backend"`
	Names    []string      `json:"names"`
	NumNames int           `json:"num_names"`
	Inside   []int         `json:"inside"`  // are inside the operation
	Queued   []int         `json:"queued"`  // have not begun it
	Waiting  []int         `json:"waiting"` // have asked for it and do not know that it was granted
	Ended    []int         `json:"ended"`   // are done with it
	Longest  time.Duration `json:"longest_ns"`
}

// Silent is a rank that has given no dump, with what is known of it, in a clause.
type Silent struct {
	Rank int    `json:"rank"`
	Why  string `json:"why"`
}

// Rank is where a rank is.
type Rank struct {
	Rank    int    `json:"rank"`
	Host    string `json:"host"`
	PID     int    `json:"pid"`
	Why     string `json:"why"`
	Pending int    `json:"pending"`
	// First is the one that it waits for longest, and Waited for how long.
	First  *Pending      `json:"first,omitempty"`
	Waited time.Duration `json:"waited_ns"`
	// Last is the operation that ended last, and Ago when that was.
	Last *Operation    `json:"last,omitempty"`
	Ago  time.Duration `json:"ago_ns"`
}

// tensorKey names a tensor in the job.
type tensorKey struct {
	set  uint32
	name string
}

// view is what a dump says, to be looked up.
type view struct {
	*Dump
	pending map[tensorKey]*Pending
	calls   map[tensorKey]*calls
	joined  map[uint32]bool
	last    *Operation
}

// calls are the operations on a tensor that have ended.
type calls struct {
	times int
	last  *Operation
}

func look(d *Dump) *view {
	v := &view{Dump: d, pending: make(map[tensorKey]*Pending), calls: make(map[tensorKey]*calls), joined: make(map[uint32]bool)}
	for i := range d.Pending {
		p := &d.Pending[i]
		v.pending[tensorKey{p.Set, p.Name}] = p
		if p.Kind == message.Join.String() {
			v.joined[p.Set] = true
		}
	}
	for i := range d.Operations {
		o := &d.Operations[i]
		key := tensorKey{o.Set, o.Name}
		c := v.calls[key]
		if c == nil {
			c = new(calls)
			v.calls[key] = c
		}
		if !o.Absent {
			c.times++
		}
		c.last, v.last = o, o
	}
	return v
}

// number is that of the last grant of a tensor which has ended here.
func (v *view) number(key tensorKey) uint64 {
	if c := v.calls[key]; c != nil {
		return c.last.Number
	}
	return 0
}

// ago is how long before the dump a time of this rank was.
func (v *view) ago(t time.Duration) time.Duration { return max(v.At-t, 0) }

// analysis is Analyse under way.
type analysis struct {
	size    int
	views   []*view // by rank; nil for none
	silent  []int
	members map[uint32][]int
}

// Analyse holds dumps against each other: of a job of size ranks, one of each or fewer. absent says what is otherwise known of ranks
// without one, in a clause for people. Of two dumps of a rank that of the later epoch counts, or the later in the list.
//
// The dumps need not be of one moment: who has gone on since others were asked is told by the numbers of the grants. Time and
// memory are in proportion to the operations of all dumps.
func Analyse(dumps []*Dump, size int, absent map[int]string) *Findings {
	a := &analysis{size: size, views: make([]*view, size), members: make(map[uint32][]int)}
	f := &Findings{Size: size, Waiting: []Waiting{}, Running: []Running{}, Silent: []Silent{}, Stalls: []string{}, Ranks: []Rank{}}
	newest := make([]*Dump, size)
	for _, d := range dumps {
		if d.Rank >= 0 && d.Rank < size && (newest[d.Rank] == nil || d.Epoch >= newest[d.Rank].Epoch) {
			newest[d.Rank] = d
			f.Epoch = max(f.Epoch, d.Epoch)
		}
	}
	for r, d := range newest {
		why := absent[r]
		if d != nil && d.Epoch < f.Epoch {
			why, d = fmt.Sprintf("it is in epoch %d still, others in %d", d.Epoch, f.Epoch), nil
		}
		if d == nil {
			a.silent = append(a.silent, r)
			f.Silent = append(f.Silent, Silent{r, why})
			continue
		}
		v := look(d)
		a.views[r] = v
		f.Stalls = append(f.Stalls, d.Stalls...)
		f.Ranks = append(f.Ranks, v.state())
	}
	a.findMembers()
	f.Waiting, f.Running = a.waiting(), a.running()
	return f
}

// state is where the rank is.
func (v *view) state() Rank {
	s := Rank{Rank: v.Rank, Host: v.Host, PID: v.PID, Why: v.Why, Pending: len(v.Pending) + max(v.NotShown, 0), Last: v.last}
	for i := range v.Pending {
		if p := &v.Pending[i]; s.First == nil || p.Submitted < s.First.Submitted {
			s.First, s.Waited = p, v.ago(p.Submitted)
		}
	}
	if v.last != nil {
		s.Ago = v.ago(v.last.Ended)
	}
	return s
}

// each visits the views, by rank.
func (a *analysis) each(visit func(rank int, v *view)) {
	for r, v := range a.views {
		if v != nil {
			visit(r, v)
		}
	}
}

// findMembers finds the members of all process sets.
func (a *analysis) findMembers() {
	all := make([]int, a.size)
	for r := range all {
		all[r] = r
	}
	a.members[0] = all
	a.each(func(_ int, v *view) {
		for _, s := range v.Sets {
			if _, known := a.members[s.ID]; !known {
				a.members[s.ID] = slices.DeleteFunc(slices.Clone(s.Ranks), func(r int) bool { return r < 0 || r >= a.size })
			}
		}
	})
	seen := make(map[uint32]map[int]bool) // to use a set whose members nobody tells
	a.each(func(r int, v *view) {
		see := func(set uint32) {
			if _, known := a.members[set]; known {
				return
			}
			if seen[set] == nil {
				seen[set] = make(map[int]bool)
			}
			seen[set][r] = true
		}
		for i := range v.Pending {
			see(v.Pending[i].Set)
		}
		for i := range v.Operations {
			see(v.Operations[i].Set)
		}
	})
	for set, ranks := range seen {
		a.members[set] = slices.Sorted(maps.Keys(ranks))
	}
}

// awaited is what all ranks together say about a tensor that is pending somewhere.
type awaited struct {
	tensorKey
	kind, backend                           string
	number                                  uint64 // of the grant, if it is granted and known
	since                                   time.Duration
	waiting, queued, inside, ended, missing []int
	silent                                  []int
}

// pendings are all tensors that are pending somewhere, in the order of the ranks and of their lists.
func (a *analysis) pendings() (all []*awaited) {
	known := make(map[tensorKey]*awaited)
	a.each(func(_ int, v *view) {
		for i := range v.Pending {
			p := &v.Pending[i]
			key := tensorKey{p.Set, p.Name}
			t := known[key]
			if t == nil {
				t = &awaited{tensorKey: key, kind: p.Kind}
				for _, list := range []*[]int{&t.waiting, &t.queued, &t.inside, &t.ended, &t.missing, &t.silent} {
					*list = []int{} // empty in JSON, not null
				}
				known[key] = t
				all = append(all, t)
			}
			t.since = max(t.since, v.ago(p.Submitted))
			t.number = max(t.number, p.Number)
			t.backend = cmp.Or(t.backend, p.Backend)
		}
	})
	for _, t := range all {
		a.place(t)
	}
	return all
}

// place finds how far each member has come with a tensor.
func (a *analysis) place(t *awaited) {
	var before uint64 // the last grant that ended where the tensor is pending now
	for _, r := range a.members[t.set] {
		if v := a.views[r]; v != nil && v.pending[t.tensorKey] != nil {
			before = max(before, v.number(t.tensorKey))
		}
	}
	for _, r := range a.members[t.set] {
		v := a.views[r]
		if v == nil {
			t.silent = append(t.silent, r)
			continue
		}
		switch p := v.pending[t.tensorKey]; {
		case p != nil && p.Begun > 0:
			t.inside = append(t.inside, r)
		case p != nil && p.Granted > 0:
			t.queued = append(t.queued, r)
		case p != nil:
			t.waiting = append(t.waiting, r)
		case v.number(t.tensorKey) > before:
			t.ended = append(t.ended, r)
		case v.joined[t.set]:
			// It stands in for everything.
		default:
			t.missing = append(t.missing, r)
		}
	}
}

// granted reports whether the ranks have agreed on it: then nobody is missing, whoever has not heard of it yet.
func (t *awaited) granted() bool { return len(t.inside)+len(t.queued)+len(t.ended) > 0 }

// gather makes groups of those that are alike, in the order of their first.
func gather(all []*awaited, key func(*awaited) string) (groups [][]*awaited) {
	at := make(map[string]int)
	for _, t := range all {
		k := key(t)
		i, known := at[k]
		if !known {
			i = len(groups)
			at[k] = i
			groups = append(groups, nil)
		}
		groups[i] = append(groups[i], t)
	}
	for _, g := range groups {
		slices.SortStableFunc(g, func(a, b *awaited) int { return cmp.Compare(b.since, a.since) })
	}
	return groups
}

func names(group []*awaited) (some []string) {
	for _, t := range group[:min(len(group), shown)] {
		some = append(some, t.name)
	}
	return some
}

func (a *analysis) waiting() []Waiting {
	all := slices.DeleteFunc(a.pendings(), (*awaited).granted)
	found := []Waiting{}
	for _, g := range gather(all, func(t *awaited) string { return fmt.Sprint(t.set, t.kind, t.waiting, t.missing) }) {
		first := g[0]
		w := Waiting{
			Set: first.set, Kind: first.kind, Names: names(g), NumNames: len(g), Ranks: first.waiting, Longest: first.since,
			Missing: []Missing{}, Silent: first.silent,
		}
		for _, r := range first.missing {
			v := a.views[r]
			m := Missing{Rank: r, Complete: v.Recorded <= uint64(len(v.Operations))}
			if c := v.calls[first.tensorKey]; c != nil {
				m.Times, m.Ago = c.times, v.ago(c.last.Ended)
			}
			w.Missing = append(w.Missing, m)
		}
		found = append(found, w)
	}
	slices.SortStableFunc(found, func(a, b Waiting) int {
		return cmp.Or(cmp.Compare(a.class(), b.class()), cmp.Compare(b.Longest, a.Longest))
	})
	return found
}

// class orders Waiting by how much it says. That a rank has joined and others have not is no fault.
func (w *Waiting) class() int {
	switch {
	case len(w.Missing) > 0 && w.Kind != message.Join.String():
		return 0
	case len(w.Silent) > 0:
		return 1
	case len(w.Missing) > 0:
		return 2
	}
	return 3
}

func (a *analysis) running() []Running {
	all := slices.DeleteFunc(a.pendings(), func(t *awaited) bool { return !t.granted() })
	found := []Running{}
	alike := func(t *awaited) string {
		return fmt.Sprint(t.set, t.number, t.kind, t.inside, t.queued, t.waiting, t.ended)
	}
	for _, g := range gather(all, alike) {
		first := g[0]
		found = append(found, Running{
			Set: first.set, Number: first.number, Kind: first.kind, Backend: first.backend, Names: names(g), NumNames: len(g),
			Inside: first.inside, Queued: first.queued, Waiting: first.waiting, Ended: first.ended, Longest: first.since,
		})
	}
	// What is inside holds up what is queued behind it.
	slices.SortStableFunc(found, func(a, b Running) int {
		return cmp.Or(cmp.Compare(min(len(b.Inside), 1), min(len(a.Inside), 1)), cmp.Compare(b.Longest, a.Longest))
	})
	return found
}
