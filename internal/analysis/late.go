package analysis

import (
	"cmp"
	"container/heap"
	"math"
	"slices"
	"time"

	"github.com/gohvd/gohvd/internal/topo"
)

const (
	// maxPending limits the number of records and arrivals that are kept of operations that lack other ranks'
	// records.
	maxPending = 1 << 19
	// maxSlots limits the number of these operations.
	maxSlots = 1 << 16
	// window is how long an operation waits for records. Ranks end an operation within moments of each other,
	// but the root of a broadcast, for example, may be far ahead.
	window = 10 * time.Second
	// maxWaits limits the number of waits that are kept to be sorted.
	maxWaits = 1 << 15
	// maxEnds is the number of ended operations that a member remembers.
	maxEnds = 64

	never   = time.Duration(math.MinInt64)
	forever = time.Duration(math.MaxInt64)
)

// Clock describes how exactly a rank's times are known on the clock that the ranks share.
type Clock struct {
	// Domain is equal for ranks whose times are exact relative to each other.
	Domain int
	// Error is the greatest error of the rank's times relative to ranks of other domains. Known is false if
	// there is no such bound.
	Error time.Duration
	Known bool
}

// apart returns the greatest difference at which the times of two ranks count as equal.
func (c Clock) apart(other Clock) time.Duration {
	if c.Domain == other.Domain {
		return 0
	}
	return c.Error + other.Error
}

// Late finds which ranks were late in the operations of a job, by the rules of docs/timeline.md. The records
// of a rank are added in the order in which the operations ended; the records of different ranks may
// alternate in any way. Memory is bounded by the number of records by which ranks are apart, and by
// constants.
type Late struct {
	// waited is called with the time for which a rank waited for the submissions of others.
	waited   func(m *Member, from, to, granted time.Duration)
	members  []*Member
	clockErr time.Duration // the greatest clock error of the members

	pending map[operation]*slot
	// queue has the slots of pending from head on, oldest first. Slots that are done are removed when they
	// reach the front.
	queue []*slot
	head  int
	// kept is the number of records and arrivals in the slots of pending.
	kept    int
	tensors map[string]*tensor
	asked   []*Member // by rank; stands for ranks that are not members but whose requests were seen to arrive

	// held is for how long each rank held up all others. startup is the part of it before startupEnd, which
	// becomes steadyFrom when the first operation after steadyFrom is counted. waits are added to held in the
	// order in which they ended. any has one entry, rank 0, which stands for whichever rank was the last: it
	// is for how long any rank waited, by the same rules, and startupAny is the part of it before startupEnd.
	held, any              Held
	waits                  waits
	startup                []HeldUp
	startupAny             time.Duration
	steadyFrom, startupEnd time.Duration

	found Lateness
	ranks map[int]*RankLateness
}

// Lateness is the result of Late: which ranks were late. It covers the time after the start-up, except fields
// that say otherwise.
type Lateness struct {
	// Compared is the number of operations for which the submissions of at least two ranks are known. Alone
	// is the number of operations of the global set for which the submission of only one rank is known.
	Compared, Alone int64
	// Arrivals says that for some ranks the time when their request arrived at rank 0 is used instead of the
	// time of their submission. It includes the start-up.
	Arrivals bool
	// Waited is the time in ns for which all ranks waited, added up: for each operation and rank, from its
	// own submission to the last one.
	Waited float64
	// Anybody is the wall time during which any rank waited for another.
	Anybody time.Duration
	// Ranks are the ranks that were compared, ascending.
	Ranks []*RankLateness
}

// RankLateness is how late a rank was.
type RankLateness struct {
	Rank int
	// Last is the number of operations for which the rank was the last, by itself or together with ranks that
	// the clocks cannot tell from it.
	Last int64
	// Caused is the part of Lateness.Waited that the rank caused, in ns.
	Caused float64
	// Held is for how long the rank held up all others after the start-up, StartupHeld for how long in the
	// start-up.
	Held, StartupHeld time.Duration
	// Lateness has, for each operation, the time from the first rank's submission to this rank's, in ns.
	Lateness Sketch
}

// Member is a rank whose records are added.
type Member struct {
	Rank  int
	Clock Clock
	ends  [maxEnds]ending // the operations that ended last, in a ring
	ended int
}

// operation identifies an operation in the job.
type operation struct {
	set    uint32
	number uint64
}

// tensor is what is known of a tensor name.
type tensor struct {
	// overtaken says that a rank submitted another operation while this tensor was in flight: the program
	// goes on without waiting for it.
	overtaken bool
}

// slot is an operation for which not all members have added their record yet.
type slot struct {
	operation
	kind      string
	last      *tensor
	submitted []submission
	arrivals  []time.Duration
	lastEnded time.Duration
	done      bool
}

// submission is when a rank submitted an operation, and which operation had ended there before.
type submission struct {
	*Member
	at, granted time.Duration // at is 0 if it is not known
	before      ending
}

// ending is an operation that has ended at a rank; ended is never if no operation has.
type ending struct {
	operation
	submitted, ended time.Duration
	last             *tensor
}

// wait is the time from others to asked, in which all ranks but one had submitted an operation; the first
// rank had submitted it at first. last is the tensor of the operation; if it is nil, the ranks certainly
// waited for the operation.
type wait struct {
	rank                 int
	first, others, asked time.Duration
	last                 *tensor
}

// waits is a heap of waits, ordered by the time at which they ended.
type waits []wait

func (w waits) Len() int           { return len(w) }
func (w waits) Less(i, j int) bool { return w[i].asked < w[j].asked }
func (w waits) Swap(i, j int)      { w[i], w[j] = w[j], w[i] }
func (w *waits) Push(x any)        { *w = append(*w, x.(wait)) }
func (w *waits) Pop() any {
	last := len(*w) - 1
	x := (*w)[last]
	*w = (*w)[:last]
	return x
}

// NewLate returns an empty Late. waited is called for each rank of an operation: the rank waited for the
// submissions of others from its own submission, at from, until the last one, at to, and the operation was
// granted a little later, at granted.
func NewLate(waited func(m *Member, from, to, granted time.Duration)) *Late {
	return &Late{
		waited: waited, pending: make(map[operation]*slot), tensors: make(map[string]*tensor),
		ranks:      make(map[int]*RankLateness),
		steadyFrom: never, startupEnd: never,
	}
}

// Member adds a rank. All ranks are added before the first record, and rank 0, if it is one of them, first.
func (l *Late) Member(rank int, clock Clock) *Member {
	m := &Member{Rank: rank, Clock: clock}
	l.members = append(l.members, m)
	if clock.Known {
		l.clockErr = max(l.clockErr, clock.Error)
	}
	return m
}

// rank returns the findings on a rank, which it makes if there are none.
func (l *Late) rank(rank int) *RankLateness {
	s := l.ranks[rank]
	if s == nil {
		s = &RankLateness{Rank: rank, Lateness: Sketch{Bits: 5}}
		l.ranks[rank] = s
	}
	return s
}

// Steady ends the start-up at a time. It drops the findings up to then, except for how long each rank held up
// the others.
func (l *Late) Steady(at time.Duration) {
	l.steadyFrom, l.found = at, Lateness{Arrivals: l.found.Arrivals}
	clear(l.ranks)
}

// Step records that a step of the program began at m. It counts as an operation that the ranks wait for: a
// program waits for at least one in each step.
func (l *Late) Step(m *Member, at time.Duration) { heap.Push(&l.waits, wait{m.Rank, at, at, at, nil}) }

// Add adds the record of an operation that has ended at a rank. arrivals has, by position in the process set,
// the times when the requests of the ranks arrived at rank 0; it is empty if they are not known. If the
// operation has several tensors, r is the record of the tensor that was submitted last. An operation without
// a number is not compared with others.
func (l *Late) Add(m *Member, r *Record, arrivals []time.Duration) {
	o, last := operation{r.Set, r.Number}, l.tensor(r.Name)
	p := l.pending[o]
	if p == nil {
		p = &slot{operation: o, kind: r.Kind, last: last, lastEnded: never}
		l.queue = append(l.queue, p)
		if r.Number > 0 {
			l.pending[o] = p
		}
	}
	p.submitted = append(p.submitted, submission{m, r.Submitted, r.Granted, m.before(r.Submitted)})
	p.lastEnded = max(p.lastEnded, r.Ended)
	m.end(ending{o, r.Submitted, r.Ended, last})
	l.kept++
	// Arrivals are by position in the set, which is a rank in the global one only.
	if r.Set == 0 && len(p.arrivals) == 0 {
		p.arrivals = append(p.arrivals, arrivals...)
		l.kept += len(arrivals)
	}
	if len(p.submitted) == len(l.members) || r.Number == 0 {
		l.judge(p)
	}
}

// tensor returns the entry of a tensor name, which it makes if there is none; nil for an empty name.
func (l *Late) tensor(name string) *tensor {
	if name == "" {
		return nil
	}
	t := l.tensors[name]
	if t == nil {
		t = new(tensor)
		l.tensors[name] = t
	}
	return t
}

// before returns the last operation that ended at the rank at or before a time.
func (m *Member) before(by time.Duration) ending {
	last := ending{ended: never}
	for i := range m.ends[:min(m.ended, maxEnds)] {
		if p := &m.ends[i]; p.ended <= by && p.ended > last.ended {
			last = *p
		}
	}
	return last
}

// end records an operation that has ended. It marks as overtaken the operations that were in flight when this
// one was submitted, and this one if another was submitted while it was in flight. A program that waits for
// an operation cannot submit another, so it does not wait for these operations before it goes on, in other
// steps neither.
func (m *Member) end(o ending) {
	for i := range m.ends[:min(m.ended, maxEnds)] {
		overtaken := o.last
		switch e := &m.ends[i]; {
		case e.submitted < o.submitted && o.submitted < e.ended:
			overtaken = e.last
		case o.submitted < e.submitted && e.submitted < o.ended:
		default:
			continue
		}
		if overtaken != nil {
			overtaken.overtaken = true
		}
	}
	m.ends[m.ended%maxEnds] = o
	m.ended++
}

// Advance states that the records of all members have reached a time. It judges operations that ended long
// before it without the records that are still missing.
func (l *Late) Advance(frontier time.Duration) {
	for ; l.head < len(l.queue); l.head++ {
		p := l.queue[l.head]
		if !p.done && frontier != forever && frontier <= p.lastEnded+window && l.kept <= maxPending &&
			len(l.pending) <= maxSlots {
			break
		}
		if !p.done {
			l.judge(p)
		}
		l.queue[l.head] = nil
	}
	if 2*l.head >= len(l.queue) {
		l.queue = append(l.queue[:0], l.queue[l.head:]...)
		l.head = 0
	}
	// Operations that are judged from now on were submitted after this time, except those that took longer
	// than the window.
	for len(l.waits) > 0 && (frontier == forever || l.waits[0].asked+2*window <= frontier ||
		len(l.waits) > maxWaits) {
		l.count(heap.Pop(&l.waits).(wait))
	}
}

// Findings judges the remaining operations and returns which ranks were late.
func (l *Late) Findings() *Lateness {
	l.Advance(forever)
	f := l.found
	startup, rest := l.startup, l.held.Ranks()
	f.Anybody = l.anybodyWaited() - l.startupAny
	if l.steadyFrom != l.startupEnd { // nothing was counted after the start-up
		startup, rest, f.Anybody = rest, nil, 0
	}
	for rank := range rest {
		if rank < len(startup) {
			rest[rank].Held -= startup[rank].Held
		}
		if rest[rank].Held > 0 {
			l.rank(rank)
		}
	}
	for rank := range startup {
		if startup[rank].Held > 0 {
			l.rank(rank).StartupHeld = startup[rank].Held
		}
	}
	for rank, s := range l.ranks {
		if rank < len(rest) {
			s.Held = rest[rank].Held
		}
		f.Ranks = append(f.Ranks, s)
	}
	slices.SortFunc(f.Ranks, func(a, b *RankLateness) int { return cmp.Compare(a.Rank, b.Rank) })
	return &f
}

// count adds a wait to the time for which its rank held up all others. Waits are counted in the order in
// which they ended.
func (l *Late) count(w wait) {
	if w.asked >= l.steadyFrom && l.startupEnd != l.steadyFrom {
		l.startupEnd, l.startup, l.startupAny = l.steadyFrom, l.held.Ranks(), l.anybodyWaited()
	}
	waited := w.last == nil || !w.last.overtaken
	l.held.Add(topo.Rank(w.rank), w.others, w.asked, waited)
	l.any.Add(0, w.first, w.asked, waited)
}

// anybodyWaited returns for how long any rank has waited for another so far, including the start-up.
func (l *Late) anybodyWaited() time.Duration {
	if all := l.any.Ranks(); len(all) > 0 {
		return all[0].Held
	}
	return 0
}

// judge finds which ranks were late for an operation and how long the others waited for them.
//
// A rank that had submitted by s waits until L, when the last rank submits. That time is charged backwards.
// From the second latest submission to the latest, all others wait for the latest rank only. From the third
// latest to the second latest, they wait for the latest two ranks, and it would not have helped if only the
// second latest had been faster; so the time between two submissions is charged to the later one. The sum of
// the charges is exactly the time that the ranks waited. Ranks whose submissions the clocks cannot tell apart
// share a charge, and a rank that the clocks cannot tell from the late ones does not wait for them.
func (l *Late) judge(p *slot) {
	p.done = true
	delete(l.pending, p.operation)
	l.kept -= len(p.submitted) + len(p.arrivals)
	var all []submission
	latest := never
	// The submission of a single rank cannot be compared with anything, but the arrivals of all ranks can be
	// compared with each other. Horovod's file has no other submission: a bar there begins with the first
	// rank's request.
	if len(p.submitted) > 1 || len(p.arrivals) == 0 {
		for _, s := range p.submitted {
			if s.at != 0 && s.Clock.Known {
				all, latest = append(all, s), max(latest, s.at)
			}
		}
	}
	for _, s := range all {
		if s.Rank < len(p.arrivals) {
			p.arrivals[s.Rank] = 0
		}
	}
	for rank, at := range p.arrivals {
		if at != 0 {
			all, latest = append(all, submission{Member: l.absent(rank), at: at,
				before: ending{ended: never}}), max(latest, at)
			l.found.Arrivals = true
		}
	}
	if p.kind == join {
		return // a rank that has no more data is not late
	}
	switch {
	case len(all) > 1:
		discountResults(all)
		l.charge(all, p.last, latest >= l.steadyFrom)
	case p.set == 0:
		l.found.Alone++
	}
	for _, s := range p.submitted {
		if s.at == 0 {
			continue
		}
		until := s.at
		if s.Clock.Known && latest > until {
			until = min(latest, s.granted)
		}
		l.waited(s.Member, s.at, until, s.granted)
	}
}

// absent returns a stand-in for a rank that is not a member but whose arrivals at rank 0 are known.
func (l *Late) absent(rank int) *Member {
	for len(l.asked) <= rank {
		l.asked = append(l.asked, &Member{Rank: len(l.asked), Clock: l.members[0].Clock})
	}
	return l.asked[rank]
}

// discountResults subtracts from each submission by how much later than the first rank this rank had the
// result of the previous operation, if that is the same operation at all ranks: the exchange of data took
// that time, not the program.
func discountResults(all []submission) {
	first := forever
	for _, s := range all {
		if s.before.ended == never || s.before.operation != all[0].before.operation {
			return
		}
		first = min(first, s.before.ended)
	}
	for i := range all {
		all[i].at -= all[i].before.ended - first
	}
}

// charge records for how long each rank made others wait. steady is false for operations of the start-up.
func (l *Late) charge(all []submission, last *tensor, steady bool) {
	slices.SortFunc(all, func(a, b submission) int {
		return cmp.Or(cmp.Compare(b.at, a.at), cmp.Compare(a.Rank, b.Rank))
	})
	first := all[len(all)-1]
	if steady {
		l.found.Compared++
		for _, s := range all {
			late := time.Duration(0)
			if later(s, first) {
				late = s.at - first.at
			}
			l.rank(s.Rank).Lateness.Add(int64(late))
		}
	}
	for i := 0; i < len(all); {
		top, below := all[i], i+1
		for below < len(all) && !later(top, all[below]) {
			below++
		}
		if below == len(all) {
			if i == 0 { // no rank was late, but the ranks may have waited for the operation
				heap.Push(&l.waits, wait{top.Rank, top.at, top.at, top.at, last})
			}
			break
		}
		gap, waiters := top.at-all[below].at, len(all)-below
		for k := below + 1; k < len(all) && top.at-all[k].at <= 2*l.clockErr; k++ {
			if !later(top, all[k]) {
				waiters--
			}
		}
		late := slices.DeleteFunc(slices.Clone(all[i:below]), func(s submission) bool {
			return !later(s, all[below])
		})
		if steady {
			l.found.Waited += float64(gap) * float64(waiters)
		}
		begin, from := first.at, all[below].at
		for k, s := range late {
			if steady {
				r := l.rank(s.Rank)
				r.Caused += float64(gap) * float64(waiters) / float64(len(late))
				if i == 0 {
					r.Last++
				}
			}
			if i == 0 {
				// The late ranks share the time: each gets a part of it, one after the other.
				to := from + (top.at-from)/time.Duration(len(late)-k)
				heap.Push(&l.waits, wait{s.Rank, begin, from, to, last})
				begin, from = to, to
			}
		}
		i = below
	}
}

// later reports whether a was later than b by more than the error of their clocks.
func later(a, b submission) bool { return a.at-b.at > a.Clock.apart(b.Clock) }
