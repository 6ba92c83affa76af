package analysis

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
)

// shown is the maximum number of items of a list that a report shows. For a longer list, the report also
// shows how many items it leaves out.
const shown = 10

// Findings is the result of comparing the snapshots of all ranks. A list of names has at most 10 names: those
// of the tensors that have waited longest. A field beside the list has the total number of names. Durations
// are in nanoseconds.
type Findings struct {
	Size int `json:"size"`
	// Epoch is the newest epoch in the snapshots. Snapshots of older epochs are not used.
	Epoch uint64 `json:"epoch"`
	// Waiting has the tensors that some ranks have asked for and that are not granted. They are in this
	// order: tensors that wait for known ranks, tensors of which this is not known, joins that wait for known
	// ranks, and tensors that all ranks have asked for. Within each of these classes, tensors that have
	// waited longer come first.
	Waiting []Waiting `json:"waiting"`
	// Running has the operations that were granted and have not ended at all ranks. Operations that some rank
	// is executing come first. Within each part, longer operations come first.
	Running []Running `json:"running"`
	// Silent has the ranks without a snapshot.
	Silent []Silent `json:"silent"`
	// Stalls has the descriptions of stalls that rank 0 has reported.
	Stalls []string `json:"stalls"`
	// Ranks has the ranks with a snapshot.
	Ranks []Rank `json:"ranks"`
}

// Waiting is one or more tensors of a process set that wait for the same ranks. Some ranks have asked for
// these tensors, and the ranks in Missing have not.
type Waiting struct {
	Set      topo.ProcessSetID `json:"set"`
	Kind     message.Kind      `json:"kind"`
	Names    []string          `json:"names"`
	NumNames int               `json:"num_names"`
	Ranks    []int             `json:"ranks"`      // the ranks that have asked for the tensors
	Longest  time.Duration     `json:"longest_ns"` // the longest time that one of the tensors has waited
	Missing  []Missing         `json:"missing"`    // the ranks that have not asked for the tensors
	// Silent has the ranks of which this is not known because they did not answer, and Unknown those of which
	// it is not known because not all of their pending operations are in their snapshots.
	Silent  []int `json:"silent"`
	Unknown []int `json:"unknown"`
}

// Missing is a rank that has not asked for a tensor.
type Missing struct {
	Rank int `json:"rank"`
	// Times is how often the rank has called the operation on the first of the tensors before, as far as its
	// recorder goes back. Complete is set if the recorder goes back to the start of the epoch, and is on. Ago
	// is the time since the last of these calls ended.
	Times    int           `json:"times"`
	Complete bool          `json:"complete"`
	Ago      time.Duration `json:"ago_ns"`
}

// Running is one or more tensors of a process set that were granted as one operation.
type Running struct {
	Set      topo.ProcessSetID `json:"set"`
	Number   uint64            `json:"number"` // the number of the grant; 0 if it is not known
	Kind     message.Kind      `json:"kind"`
	Backend  message.Backend   `json:"backend,omitempty"`
	Names    []string          `json:"names"`
	NumNames int               `json:"num_names"`
	Inside   []int             `json:"inside"` // the ranks that are executing the operation
	Queued   []int             `json:"queued"` // the ranks that have the grant but have not begun
	// Waiting has the ranks that have asked for the operation and have not received the grant.
	Waiting []int         `json:"waiting"`
	Ended   []int         `json:"ended"` // the ranks at which the operation has ended
	Longest time.Duration `json:"longest_ns"`
}

// Silent is a rank without a snapshot. Why is a clause that says what else is known about the rank.
type Silent struct {
	Rank int    `json:"rank"`
	Why  string `json:"why"`
}

// Rank is the state of a rank, taken from its snapshot.
type Rank struct {
	Rank    int    `json:"rank"`
	Host    string `json:"host"`
	PID     int    `json:"pid"`
	Why     string `json:"why"`
	Pending int    `json:"pending"`
	// First is the pending operation that the rank has waited for longest, or nil if no operation is pending.
	// Waited is how long the rank has waited for it.
	First  *trace.Record `json:"first,omitempty"`
	Waited time.Duration `json:"waited_ns"`
	// Last is the operation that ended last, or nil if no operation has ended, or if the rank has no flight
	// recorder (Off). Ago is the time since its end.
	Off  bool          `json:"recorder_off,omitempty"`
	Last *trace.Record `json:"last,omitempty"`
	Ago  time.Duration `json:"ago_ns"`
}

// tensorKey identifies a tensor in the job by its name and process set.
type tensorKey struct {
	set  topo.ProcessSetID
	name string
}

// view is a snapshot with maps for lookups: its records by tensor, and the process sets that the rank has
// joined.
type view struct {
	*Snapshot
	pending map[tensorKey]*trace.Record
	ended   map[tensorKey]*calls
	joined  map[topo.ProcessSetID]bool
}

// calls summarizes the operations on a tensor that have ended at a rank. times is their number, without the
// operations in which the rank took part as an absent rank. last is the most recent operation of all.
type calls struct {
	times int
	last  *trace.Record
}

// newView returns a view of a snapshot.
func newView(s *Snapshot) *view {
	v := &view{s, make(map[tensorKey]*trace.Record), make(map[tensorKey]*calls),
		make(map[topo.ProcessSetID]bool)}
	for i := range s.Pending {
		p := &s.Pending[i]
		v.pending[tensorKey{p.Set, p.Name}] = p
		if p.Kind == message.Join {
			v.joined[p.Set] = true
		}
	}
	for i := range s.Operations {
		o := &s.Operations[i]
		key := tensorKey{o.Set, o.Name}
		c := v.ended[key]
		if c == nil {
			c = new(calls)
			v.ended[key] = c
		}
		c.last = o
		if !o.Absent {
			c.times++
		}
	}
	return v
}

// number returns the number of the most recent grant of this tensor whose operation has ended at this rank,
// or 0 if there is no such grant.
func (v *view) number(key tensorKey) uint64 {
	if c := v.ended[key]; c != nil {
		return c.last.Number
	}
	return 0
}

// ago returns the time from t to the snapshot, but at least 0. t is a time on this rank's clock.
func (v *view) ago(t time.Duration) time.Duration { return max(v.At-t, 0) }

// Analyse compares the snapshots of the ranks of a job. size is the number of ranks. The map absent has, for
// each rank without a snapshot, a clause that says what else is known about the rank. If a rank has several
// snapshots, Analyse uses the one with the newest epoch. If several have this epoch, it uses the last of them
// in the list.
//
// The snapshots may be taken at different moments, because the numbers of the grants show which ranks went on
// after other snapshots had been taken. Time and memory are proportional to the number of records in all
// snapshots.
func Analyse(snapshots []*Snapshot, size int, absent map[int]string) *Findings {
	f := &Findings{Size: size, Waiting: []Waiting{}, Running: []Running{}, Silent: []Silent{},
		Stalls: []string{}, Ranks: []Rank{}}
	newest := make([]*Snapshot, size)
	for _, s := range snapshots {
		if s.Rank >= 0 && s.Rank < size && (newest[s.Rank] == nil || s.Epoch >= newest[s.Rank].Epoch) {
			newest[s.Rank] = s
			f.Epoch = max(f.Epoch, s.Epoch)
		}
	}
	views := make([]*view, size) // nil at the index of a rank without a snapshot
	for r, s := range newest {
		why := absent[r]
		if s != nil && s.Epoch < f.Epoch {
			why, s = fmt.Sprintf("it is still in epoch %d, other ranks are in epoch %d", s.Epoch, f.Epoch),
				nil
		}
		if s == nil {
			f.Silent = append(f.Silent, Silent{r, why})
			continue
		}
		views[r] = newView(s)
		f.Stalls = append(f.Stalls, s.Stalls...)
		f.Ranks = append(f.Ranks, views[r].state())
	}
	var granted, waiting []*pendingTensor
	for _, t := range pendingTensors(views) {
		if len(t.inside)+len(t.queued)+len(t.ended) > 0 {
			// The tensor is granted, so no rank is missing. Some ranks may not have received the grant yet.
			granted = append(granted, t)
		} else {
			waiting = append(waiting, t)
		}
	}
	f.addWaiting(waiting, views)
	f.addRunning(granted)
	return f
}

// state returns the rank's entry for Findings.Ranks.
func (v *view) state() Rank {
	s := Rank{Rank: v.Rank, Host: v.Host, PID: v.PID, Why: v.Why, Pending: len(v.Pending) + max(v.NotShown,
		0), Off: v.Off}
	for i := range v.Pending {
		if p := &v.Pending[i]; s.First == nil || p.Submitted < s.First.Submitted {
			s.First, s.Waited = p, v.ago(p.Submitted)
		}
	}
	if n := len(v.Operations); n > 0 {
		s.Last, s.Ago = &v.Operations[n-1], v.ago(v.Operations[n-1].Ended)
	}
	return s
}

// inJob returns the ranks in the list that a job of the given size has.
func inJob(list []topo.Rank, size int) []int {
	ranks := []int{}
	for _, r := range list {
		if r >= 0 && int(r) < size {
			ranks = append(ranks, int(r))
		}
	}
	return ranks
}

// membersOf returns the members of each process set, in ascending order. If no snapshot lists the members of
// a set, the ranks with records of operations in the set count as its members.
func membersOf(views []*view) map[topo.ProcessSetID][]int {
	members := map[topo.ProcessSetID][]int{0: make([]int, len(views))}
	for r := range views {
		members[0][r] = r
	}
	for _, v := range views {
		if v == nil {
			continue
		}
		for _, s := range v.Sets {
			if members[s.ID] == nil {
				members[s.ID] = inJob(s.Ranks, len(views))
			}
		}
	}
	used := make(map[topo.ProcessSetID][]int)
	for r, v := range views {
		if v == nil {
			continue
		}
		for _, records := range [][]trace.Record{v.Pending, v.Operations} {
			for i := range records {
				if set := records[i].Set; members[set] == nil && !slices.Contains(used[set], r) {
					used[set] = append(used[set], r)
				}
			}
		}
	}
	maps.Copy(members, used)
	return members
}

// pendingTensor combines the records of all ranks about a tensor that is pending at some rank.
type pendingTensor struct {
	tensorKey
	kind    message.Kind
	backend message.Backend
	number  uint64 // the number of the grant; 0 if there is no grant
	since   time.Duration
	// among are the ranks that the records of the tensor name. It is nil if all members of the set take
	// part.
	among                                                    []int
	waiting, queued, inside, ended, missing, silent, unknown []int
}

// pendingTensors returns all tensors that are pending at some rank. They are in the order of the ranks, and
// for one rank in the order of its list.
func pendingTensors(views []*view) (all []*pendingTensor) {
	known := make(map[tensorKey]*pendingTensor)
	members := membersOf(views)
	for _, v := range views {
		if v == nil {
			continue
		}
		for i := range v.Pending {
			p := &v.Pending[i]
			key := tensorKey{p.Set, p.Name}
			t := known[key]
			if t == nil {
				t = &pendingTensor{tensorKey: key, kind: p.Kind, among: []int{}}
				known[key] = t
				all = append(all, t)
			}
			t.addAmong(inJob(p.Among, len(views)))
			t.since = max(t.since, v.ago(p.Submitted))
			t.number = max(t.number, p.Number)
			t.backend = cmp.Or(t.backend, p.Backend)
		}
	}
	for _, t := range all {
		if t.among == nil {
			t.among = members[t.set]
		}
		t.classify(views, t.among)
	}
	return all
}

// addAmong adds the ranks that a record names to t.among. If it names none, all members of the set take part.
func (t *pendingTensor) addAmong(ranks []int) {
	if len(ranks) == 0 || t.among == nil {
		t.among = nil
		return
	}
	t.among = append(t.among, ranks...)
	slices.Sort(t.among)
	t.among = slices.Compact(t.among)
}

// classify adds each member of the process set to the list that says how far the member is with the tensor.
func (t *pendingTensor) classify(views []*view, members []int) {
	for _, list := range []*[]int{&t.waiting, &t.queued, &t.inside, &t.ended, &t.missing, &t.silent,
		&t.unknown} {
		*list = []int{} // not nil, so that JSON has [] and not null
	}
	var before uint64 // the newest grant that ended at a rank where the tensor is pending again
	for _, r := range members {
		if v := views[r]; v != nil && v.pending[t.tensorKey] != nil {
			before = max(before, v.number(t.tensorKey))
		}
	}
	for _, r := range members {
		list := &t.missing
		if v := views[r]; v == nil {
			list = &t.silent
		} else if p := v.pending[t.tensorKey]; p != nil && p.Begun > 0 {
			list = &t.inside
		} else if p != nil && p.Granted > 0 {
			list = &t.queued
		} else if p != nil {
			list = &t.waiting
		} else if v.number(t.tensorKey) > before {
			list = &t.ended
		} else if v.joined[t.set] {
			continue // a rank that has joined is never missing, because it takes part as an absent rank
		} else if v.NotShown > 0 {
			list = &t.unknown // the tensor may be one of those that are not in the snapshot
		}
		*list = append(*list, r)
	}
}

// gather groups tensors that have the same key. The groups are in the order of their first tensors. Within a
// group, tensors that have waited longer come first.
func gather(all []*pendingTensor, key func(*pendingTensor) string) (groups [][]*pendingTensor) {
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
		slices.SortStableFunc(g, func(a, b *pendingTensor) int { return cmp.Compare(b.since, a.since) })
	}
	return groups
}

// names returns the names of the first tensors of a group, at most as many as a report shows.
func names(group []*pendingTensor) (some []string) {
	for _, t := range group[:min(len(group), shown)] {
		some = append(some, t.name)
	}
	return some
}

func (f *Findings) addWaiting(all []*pendingTensor, views []*view) {
	for _, g := range gather(all, func(t *pendingTensor) string {
		return fmt.Sprint(t.set, t.kind, t.waiting, t.missing)
	}) {
		t := g[0]
		w := Waiting{
			Set: t.set, Kind: t.kind, Names: names(g), NumNames: len(g), Ranks: t.waiting, Longest: t.since,
			Missing: []Missing{}, Silent: t.silent, Unknown: t.unknown,
		}
		for _, r := range t.missing {
			v := views[r]
			m := Missing{Rank: r, Complete: !v.Off && v.Recorded <= uint64(len(v.Operations))}
			if c := v.ended[t.tensorKey]; c != nil {
				m.Times, m.Ago = c.times, v.ago(c.last.Ended)
			}
			w.Missing = append(w.Missing, m)
		}
		f.Waiting = append(f.Waiting, w)
	}
	slices.SortStableFunc(f.Waiting, func(a, b Waiting) int {
		return cmp.Or(cmp.Compare(a.class(), b.class()), cmp.Compare(b.Longest, a.Longest))
	})
}

// class returns the class of w in the order of Findings.Waiting. The lower the class, the more w says about
// the cause. Joins are in a high class, because a rank that has not joined is not at fault.
func (w *Waiting) class() int {
	switch {
	case len(w.Missing) > 0 && w.Kind != message.Join:
		return 0
	case len(w.Silent)+len(w.Unknown) > 0:
		return 1
	case len(w.Missing) > 0:
		return 2
	}
	return 3
}

func (f *Findings) addRunning(all []*pendingTensor) {
	alike := func(t *pendingTensor) string {
		return fmt.Sprint(t.set, t.number, t.kind, t.inside, t.queued, t.waiting, t.ended)
	}
	for _, g := range gather(all, alike) {
		t := g[0]
		f.Running = append(f.Running, Running{
			Set: t.set, Number: t.number, Kind: t.kind, Backend: t.backend, Names: names(g), NumNames: len(g),
			Inside: t.inside, Queued: t.queued, Waiting: t.waiting, Ended: t.ended, Longest: t.since,
		})
	}
	// Operations that some rank is executing come first, because the queued operations wait for them.
	slices.SortStableFunc(f.Running, func(a, b Running) int {
		return cmp.Or(cmp.Compare(min(len(b.Inside), 1), min(len(a.Inside), 1)),
			cmp.Compare(b.Longest, a.Longest))
	})
}
