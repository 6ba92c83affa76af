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
	// maxPending bounds what is kept of operations that wait for other ranks' records of them: records, and arrivals.
	maxPending = 1 << 19
	// maxSlots bounds those operations.
	maxSlots = 1 << 16
	// window is for how long an operation waits for records. Ranks end an operation within moments of each other; but a broadcast's
	// root, say, may be far ahead.
	window = 10 * time.Second
	// maxWaits bounds the waits that are kept to be put in order.
	maxWaits = 1 << 15
	// maxEnds is how many ends of operations a member remembers.
	maxEnds = 64

	never   = time.Duration(math.MinInt64)
	forever = time.Duration(math.MaxInt64)
)

// Clock is how well a rank's times are known on the clock that the ranks share.
type Clock struct {
	// Domain is equal for ranks that are exact against each other.
	Domain int
	// Error is how far times may be off for ranks of other domains, and Known is false if nobody can say.
	Error time.Duration
	Known bool
}

// apart returns by how much two ranks' times must differ to be told apart.
func (c Clock) apart(other Clock) time.Duration {
	if c.Domain == other.Domain {
		return 0
	}
	return c.Error + other.Error
}

// Late finds who was late in the operations of a job, by the rules of docs/timeline.md. Records of a rank are added in the order in
// which the operations ended, those of different ranks side by side: memory is bounded by what is between them, and by constants.
type Late struct {
	// waited is told for how long a rank waited for the submissions of others.
	waited   func(m *Member, from, to, granted time.Duration)
	members  []*Member
	clockErr time.Duration // the greatest of the members

	pending map[operation]*slot
	// queue has those of pending, oldest first, from head on; done ones are taken out when they come to the front.
	queue []*slot
	head  int
	// kept is what the slots of pending have: records and arrivals.
	kept    int
	tensors map[string]*tensor
	asked   []*Member // by rank, those whose requests were seen to arrive, for ranks that are no members

	// held are for how long each rank held up all others, and startup what of that was before startupEnd, which is steadyFrom as soon
	// as an operation after that was counted. waits are to be added to held, in the order in which they ended. Of any is rank 0, which
	// stands for whichever rank was the last: for how long anybody waited, by the same rules.
	held, any              Held
	waits                  waits
	startup                []HeldUp
	startupAny             time.Duration
	steadyFrom, startupEnd time.Duration

	found Lateness
	ranks map[int]*RankLateness
}

// Lateness says who was late, after the start-up but for what says otherwise.
type Lateness struct {
	// Compared are operations of which at least two ranks' submissions are known, Alone those of the global set of which one is.
	Compared, Alone int64
	// Arrivals says that for some ranks the time when rank 0 had their request stands for that of their submission.
	Arrivals bool
	// Waited is what all ranks have waited together, in ns: for each operation and rank, from its own submission to the last one.
	Waited float64
	// Anybody is for how long any rank waited for another.
	Anybody time.Duration
	// Ranks are in order, without those that are not compared.
	Ranks []*RankLateness
}

// RankLateness says how late a rank was.
type RankLateness struct {
	Rank int
	// Last is how often it was the last, alone or together with ranks that the clocks cannot tell from it.
	Last int64
	// Caused is its part of Waited.
	Caused float64
	// Held is for how long it held up all others, and StartupHeld that of the start-up.
	Held, StartupHeld time.Duration
	// Lateness is that of its submissions after the first rank's, in ns.
	Lateness Sketch
}

// Member is a rank that gives records.
type Member struct {
	Rank  int
	Clock Clock
	ends  [maxEnds]ending // the last operations to end, in a ring
	ended int
}

// operation names an operation in the job.
type operation struct {
	set    uint32
	number uint64
}

// tensor is what is known of a name.
type tensor struct {
	// overtaken says that a rank had it in flight when it submitted another operation: it goes on without waiting for it.
	overtaken bool
}

// slot is an operation of which not all members have told yet.
type slot struct {
	operation
	kind      string
	last      *tensor
	told      []submission
	arrivals  []time.Duration
	lastEnded time.Duration
	done      bool
}

// submission is when a rank had submitted an operation, and what it had ended before.
type submission struct {
	*Member
	at, granted time.Duration // at is 0 if it is not known
	before      ending
}

// ending is an operation that has ended at a rank; never if none has.
type ending struct {
	operation
	submitted, ended time.Duration
	last             *tensor
}

// wait is a time for which all ranks but one had submitted an operation, and first when the first had. Without a tensor the ranks
// certainly waited for it.
type wait struct {
	rank                 int
	first, others, asked time.Duration
	last                 *tensor
}

// waits is the heap of waits by when they ended.
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

// NewLate makes one. waited is called for each rank that waited for the submissions of others: from its own until the last, when the
// operation was granted a little later.
func NewLate(waited func(m *Member, from, to, granted time.Duration)) *Late {
	return &Late{
		waited: waited, pending: make(map[operation]*slot), tensors: make(map[string]*tensor), ranks: make(map[int]*RankLateness),
		steadyFrom: never, startupEnd: never,
	}
}

// Member adds a rank, before the first record. The first one is rank 0, if that is among them.
func (l *Late) Member(rank int, clock Clock) *Member {
	m := &Member{Rank: rank, Clock: clock}
	l.members = append(l.members, m)
	if clock.Known {
		l.clockErr = max(l.clockErr, clock.Error)
	}
	return m
}

func (l *Late) rank(rank int) *RankLateness {
	s := l.ranks[rank]
	if s == nil {
		s = &RankLateness{Rank: rank, Lateness: Sketch{Bits: 5}}
		l.ranks[rank] = s
	}
	return s
}

// Steady says that the start-up ended at a time: what was found before is dropped, but for what each rank held up the others.
func (l *Late) Steady(at time.Duration) {
	l.steadyFrom, l.found = at, Lateness{Arrivals: l.found.Arrivals}
	clear(l.ranks)
}

// Step says that a step of the program began: if it waits for nothing else, it waits for something once a step.
func (l *Late) Step(m *Member, at time.Duration) { heap.Push(&l.waits, wait{m.Rank, at, at, at, nil}) }

// Add takes an operation that has ended at a rank, and by position in its set when the requests of all ranks had arrived at rank 0, if
// that is known. r is of the tensor that was submitted last. An operation without a number is compared with no other.
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
	p.told = append(p.told, submission{m, r.Submitted, r.Granted, m.before(r.Submitted)})
	p.lastEnded = max(p.lastEnded, r.Ended)
	m.end(ending{o, r.Submitted, r.Ended, last})
	l.kept++
	// Arrivals are by position in the set, which is a rank in the global one only.
	if r.Set == 0 && len(p.arrivals) == 0 {
		p.arrivals = append(p.arrivals, arrivals...)
		l.kept += len(arrivals)
	}
	if len(p.told) == len(l.members) || r.Number == 0 {
		l.judge(p)
	}
}

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

// before returns the last operation that had ended by a time.
func (m *Member) before(by time.Duration) ending {
	last := ending{ended: never}
	for i := range m.ends[:min(m.ended, maxEnds)] {
		if p := &m.ends[i]; p.ended <= by && p.ended > last.ended {
			last = *p
		}
	}
	return last
}

// end notes which operations the rank had in flight when it submitted the one that has ended, and whether it submitted another while
// it had that. A program that waits for an operation cannot submit another, so it does not wait for these before it goes on: not in
// other steps either.
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

// Advance says that all members have come to a time: operations that ended long before it get no more records.
func (l *Late) Advance(frontier time.Duration) {
	for ; l.head < len(l.queue); l.head++ {
		p := l.queue[l.head]
		if !p.done && frontier != forever && frontier <= p.lastEnded+window && l.kept <= maxPending && len(l.pending) <= maxSlots {
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
	// What is judged from now on was submitted after this, but for operations that took longer than the window.
	for len(l.waits) > 0 && (frontier == forever || l.waits[0].asked+2*window <= frontier || len(l.waits) > maxWaits) {
		l.count(heap.Pop(&l.waits).(wait))
	}
}

// Findings judges what is left and says who was late.
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

// count adds a wait, which is not earlier than the one before, to the time for which its rank held up all others.
func (l *Late) count(w wait) {
	if w.asked >= l.steadyFrom && l.startupEnd != l.steadyFrom {
		l.startupEnd, l.startup, l.startupAny = l.steadyFrom, l.held.Ranks(), l.anybodyWaited()
	}
	waited := w.last == nil || !w.last.overtaken
	l.held.Add(topo.Rank(w.rank), w.others, w.asked, waited)
	l.any.Add(0, w.first, w.asked, waited)
}

func (l *Late) anybodyWaited() time.Duration {
	if all := l.any.Ranks(); len(all) > 0 {
		return all[0].Held
	}
	return 0
}

// judge finds who was late for an operation and how long the others have waited for them.
//
// A rank that had submitted by s waits until L, when the last one has. That time is charged backwards: from the second latest
// submission to the latest all others wait for the latest only, from the third to the second for it and the second, of whom the second
// alone would not have helped; so between two submissions it is charged to the later one. In sum it is exactly what the ranks have
// waited. Submissions that the clocks cannot tell apart share a charge, and a rank that cannot be told from the late ones does not wait
// for them.
func (l *Late) judge(p *slot) {
	p.done = true
	delete(l.pending, p.operation)
	l.kept -= len(p.told) + len(p.arrivals)
	var all []submission
	latest := never
	// Alone, a rank's submissions are compared with nothing, but all arrivals with each other. Horovod's file has no other: a bar begins
	// there with the first rank's request.
	if len(p.told) > 1 || len(p.arrivals) == 0 {
		for _, s := range p.told {
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
			all, latest = append(all, submission{Member: l.absent(rank), at: at, before: ending{ended: never}}), max(latest, at)
			l.found.Arrivals = true
		}
	}
	if p.kind == join {
		return // ranks that have no more data do not wait in vain
	}
	switch {
	case len(all) > 1:
		discountResults(all)
		l.charge(all, p.last, latest >= l.steadyFrom)
	case p.set == 0:
		l.found.Alone++
	}
	for _, s := range p.told {
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

// absent returns a rank that is no member, of which arrivals at rank 0 are known.
func (l *Late) absent(rank int) *Member {
	for len(l.asked) <= rank {
		l.asked = append(l.asked, &Member{Rank: len(l.asked), Clock: l.members[0].Clock})
	}
	return l.asked[rank]
}

// discountResults subtracts from each submission by how much later than the first the rank had the result of the operation before,
// if that is the same operation at all ranks: the exchange of data has taken that time, not the program.
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

// charge notes for how long each rank made others wait. An operation that is not steady is of the start-up.
func (l *Late) charge(all []submission, last *tensor, steady bool) {
	slices.SortFunc(all, func(a, b submission) int { return cmp.Or(cmp.Compare(b.at, a.at), cmp.Compare(a.Rank, b.Rank)) })
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
			if i == 0 { // nobody was late; but they may have waited for it
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
		late := slices.DeleteFunc(slices.Clone(all[i:below]), func(s submission) bool { return !later(s, all[below]) })
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
				// Each has a part of the time, one after the other.
				to := from + (top.at-from)/time.Duration(len(late)-k)
				heap.Push(&l.waits, wait{s.Rank, begin, from, to, last})
				begin, from = to, to
			}
		}
		i = below
	}
}

// later says that the clocks can tell that a was later than b.
func later(a, b submission) bool { return a.at-b.at > a.Clock.apart(b.Clock) }
