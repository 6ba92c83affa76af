package analysis

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
)

const (
	// maxPending limits the total number of records and arrivals that are kept for operations with missing
	// records. A record is missing if a rank has not added it yet.
	maxPending = 1 << 19
	// window is how long an operation waits for missing records. Ranks usually end an operation at nearly the
	// same time, but some may be far ahead, for example the root of a broadcast.
	window = 10 * time.Second
	// maxWaits limits the number of waits that are kept to be sorted.
	maxWaits = 1 << 15
	// maxEnds is the number of ended operations that a member remembers.
	maxEnds = 64
	// maxTensors limits the names of tensors that are known. A program that makes up a new name for each
	// operation reaches it. Then all are forgotten, and those that occur again are learned again.
	maxTensors = 1 << 16
	// maxOrigins limits the number of pairs of a rank and a tensor of which is known for how long the rank
	// held up all others from that tensor on.
	maxOrigins = 1 << 16

	never   = time.Duration(math.MinInt64)
	forever = time.Duration(math.MaxInt64)
)

// Clock says how a rank's times relate to the times of other ranks, and how exact they are.
type Clock struct {
	// Domain is a number for the clock that the rank reads. Times of ranks with the same number are exact
	// relative to each other.
	Domain int
	// Error is the greatest error of the rank's times relative to ranks in other domains. Known is false if
	// no bound for this error is known.
	Error time.Duration
	Known bool
}

// apart returns the greatest difference at which times of the two ranks count as equal.
func (c Clock) apart(other Clock) time.Duration {
	if c.Domain == other.Domain {
		return 0
	}
	return c.Error + other.Error
}

// Late finds out which ranks were late in the operations of a job, by the rules in docs/timeline.md. The
// records of one rank must be added in the order in which its operations ended. The records of different
// ranks may alternate in any way. The memory that Late uses is bounded by constants, and by the number of
// records by which one rank is ahead of another.
type Late struct {
	// waited is called each time a rank waited for the submissions of other ranks.
	waited   func(m *Member, from, to, granted time.Duration)
	members  []*Member
	clockErr time.Duration // the greatest clock error of any member

	pending map[operation]*slot
	// queue has the slots in pending, in the order in which they were added, beginning at index head. A slot
	// that is done is removed when it is the first.
	queue []*slot
	head  int
	// kept is the total number of records and arrivals in the slots of pending.
	kept    int
	tensors map[string]*tensor
	asked   []*Member // indexed by rank; has an entry for each rank without records

	// held measures how long each rank held up all others.
	held Held
	// any measures how long at least one rank waited, by the same rules. Its only entry, rank 0, stands for
	// whichever rank was last.
	any Held
	// waits has the waits that are not in held and any yet, because these must get them in the order in
	// which they ended. It also has the steps and the spans that are not counted yet.
	waits []wait
	// origins has the parts of the time after the start-up for which ranks held up all others, by the tensor
	// for which the others waited first.
	origins map[origin]time.Duration
	// steps is the table of the steps after the start-up. programs has what is known of the programs, by
	// rank. waitsKnown is set if the files show waits for results.
	steps      steps
	programs   map[int]*program
	waitsKnown bool
	// steadyFrom is the time at which the start-up ends. The first operation that is counted after it sets
	// startupEnd to steadyFrom.
	steadyFrom, startupEnd time.Duration
	// startup and startupAny are the values of held and any at the time startupEnd.
	startup    []trace.HeldUp
	startupAny time.Duration

	end   time.Duration // the end of the last operation
	found Lateness
	ranks map[int]*RankLateness

	watcher Watcher

	// These have the memory of judge, charge and tell, and the slots that are not used any more.
	all                    []submission
	order, late            []arrived
	waiters, fewer, blamed []int
	free                   []*slot
}

// Watcher is told the single waits of which the numbers of a Lateness are sums. A Late calls its methods.
type Watcher interface {
	// Waited says that, in an operation after the start-up, each of the ranks in waiters waited for each of
	// the ranks in late until the time at. The argument d is the time for which a waiter waited for one of
	// them, and tensor is the name of the operation's tensor, or of one of its tensors. The slices are only
	// valid during the call.
	Waited(tensor string, waiters, late []int, at, d time.Duration)
	// HeldUp says that a rank held up all others. steady is false if that belongs to the start-up.
	HeldUp(rank int, from, to time.Duration, steady bool)
}

// Lateness is the result of Late. It says which ranks were late and how late. Unless a field says otherwise,
// it is about the time after the start-up.
type Lateness struct {
	// Compared is the number of operations for which the submission times of at least two ranks are known.
	// Alone is the number of operations of process set 0 for which the submission time of only one rank is
	// known.
	Compared, Alone int64
	// Arrivals is set if the submission times of some ranks are unknown, so that the times at which their
	// requests arrived at rank 0 are used instead. It covers the start-up too.
	Arrivals bool
	// Waited is the total waiting time, in ns. For each operation, each rank contributes the time from its
	// own submission to the last rank's submission.
	Waited float64
	// Anybody is the wall time during which at least one rank waited for another.
	Anybody time.Duration
	// Ranks has the ranks that were compared, in ascending order.
	Ranks []*RankLateness
	// Steps has the steps after the start-up.
	Steps []Step
	// Exposed has, by rank, for how long the program waited for results. It is nil if no rank has recorded
	// this.
	Exposed map[int]time.Duration
}

// RankLateness says how late one rank was.
type RankLateness struct {
	Rank int
	// Last is the number of operations that this rank submitted last. If the clocks are not exact enough to
	// tell which of several ranks was last, the operation counts for each of them.
	Last int64
	// Caused is the part of Lateness.Waited that was caused by this rank, in ns.
	Caused float64
	// Held is the time after the start-up for which the rank held up all others. StartupHeld is the same for
	// the start-up.
	Held, StartupHeld time.Duration
	// Origin is the tensor with which most of the time Held begins, and OriginHeld is that part: the rank was
	// late with this tensor, and the others did not wait for another one already. Origin is empty if that is
	// not known.
	Origin     string
	OriginHeld time.Duration
	// Lateness has one value for each operation: the time in ns from the first rank's submission to this
	// rank's submission.
	Lateness Sample
	// Doing says in which ranges the program was in the time Held, the longest first. It is empty if the
	// program has no ranges.
	Doing []Doing
}

// Member identifies a rank of the job when the rank's records are added to a Late.
type Member struct {
	Rank  int
	Clock Clock
	ends  []ending // a ring buffer of the most recently ended operations, at most maxEnds
	ended int      // the number of operations that have ended
}

// operation identifies an operation by its process set and its number, and a message also by its name.
type operation struct {
	set     topo.ProcessSetID
	number  uint64
	message string
}

// tensor is the state that Late keeps for a tensor name.
type tensor struct {
	name string
	// overtaken is set if a rank submitted another operation while this tensor was in flight. This shows that
	// the program goes on without waiting for this tensor.
	overtaken bool
}

// origin is a rank and the name of a tensor with which it was late.
type origin struct {
	rank int
	name string
}

// slot is an operation for which some members have not added their records yet.
type slot struct {
	operation
	kind      message.Kind
	last      *tensor
	submitted []submission
	arrivals  []time.Duration
	lastEnded time.Duration
	done      bool
}

// submission is the submission of an operation by a rank. The field before is the operation that had ended
// last at the rank when it submitted.
type submission struct {
	*Member
	at, granted time.Duration // the time of submission (0 if it is not known) and of the grant
	before      ending
	sends       bool    // whether the rank sends a message
	first       *tensor // the tensor of the operation that the rank submitted first; nil if it is not known
}

// arrived has what charge needs of a submission.
type arrived struct {
	at time.Duration
	*Member
	first *tensor
}

// later reports whether a was submitted later than b by more than the error of the clocks.
func (a *arrived) later(b *arrived) bool { return a.at-b.at > a.Clock.apart(b.Clock) }

// ending is an operation that has ended at a rank. If there is no such operation, the field ended has the
// value never.
type ending struct {
	operation
	submitted, ended time.Duration
	last             *tensor
}

// wait records that ranks waited for one rank, which was the last to submit an operation. The field rank is
// the number of this rank. The field first is the time of the first submission, others the time of the last
// but one, and asked the time of the last one. The field last is the tensor of the operation, which records
// whether ranks went on without waiting for the operation (see overtaken). It is nil if the ranks certainly
// waited. The field origin is the tensor of the operation that the rank submitted first, or nil.
//
// If step is set, it is the beginning of a step, with its number unless that is unknown. If span is set, it
// is what the program of the rank did until the time in asked.
type wait struct {
	rank                 int
	first, others, asked time.Duration
	last, origin         *tensor
	step                 bool
	number               *uint64
	span                 *trace.Span
}

// NewLate returns an empty Late. It calls the function waited for each rank of an operation that waited for
// other ranks. The argument from is the time of this rank's submission, and the argument to is the time of
// the last rank's submission, until which the rank waited. The argument granted is the time of the grant,
// which followed a little later.
func NewLate(waited func(m *Member, from, to, granted time.Duration)) *Late {
	return &Late{
		waited: waited, pending: make(map[operation]*slot), tensors: make(map[string]*tensor),
		ranks:      make(map[int]*RankLateness),
		origins:    make(map[origin]time.Duration),
		programs:   make(map[int]*program),
		steadyFrom: never, startupEnd: never,
	}
}

// Member adds a rank. All ranks must be added before the first record, in ascending order.
func (l *Late) Member(rank int, clock Clock) *Member {
	m := &Member{Rank: rank, Clock: clock}
	l.members = append(l.members, m)
	if clock.Known {
		l.clockErr = max(l.clockErr, clock.Error)
	}
	return m
}

// Watch tells w from now on what l finds. It must be called before the first record is added.
func (l *Late) Watch(w Watcher) { l.watcher = w }

// rank returns the findings about a rank. If there are none yet, it adds an empty entry.
func (l *Late) rank(rank int) *RankLateness {
	s := l.ranks[rank]
	if s == nil {
		s = &RankLateness{Rank: rank}
		l.ranks[rank] = s
	}
	return s
}

// Steady says that the start-up ended at the given time. Of the findings about the start-up, it keeps only
// how long each rank held up the other ranks.
func (l *Late) Steady(at time.Duration) {
	l.steadyFrom, l.found = at, Lateness{Arrivals: l.found.Arrivals}
	clear(l.ranks)
	clear(l.programs)
	clear(l.origins)
	l.steps = steps{}
}

// Step records that a training step began at rank m. The beginning counts as an operation that the ranks wait
// for, because a program waits for at least one operation in each step. number is nil if the program does not
// number its steps. Only one rank may add steps.
func (l *Late) Step(m *Member, at time.Duration, number *uint64) {
	l.waits = append(l.waits, wait{rank: m.Rank, first: at, others: at, asked: at, step: true,
		number: number})
}

// Add adds an operation that has ended at a rank. The rank has submitted it when it has submitted the last of
// its tensors. An operation without a number is not compared with other ranks' operations, nor is a message
// without a name.
func (l *Late) Add(m *Member, op *trace.Operation) {
	r := lastSubmitted(op)
	o, last, members := operation{set: r.Set, number: r.Number}, l.tensor(r.Name), len(l.members)
	if r.Kind.IsMessage() {
		o.message, members = r.Name, 2
		if r.Name == "" {
			o.number = 0
		}
	}
	p := l.pending[o]
	if p == nil {
		p = new(slot)
		if o.set == topo.Global {
			p = l.slot()
		}
		p.operation, p.kind, p.last, p.lastEnded = o, r.Kind, last, never
		l.queue = append(l.queue, p)
		if o.number > 0 {
			l.pending[o] = p
		}
	}
	p.submitted = append(p.submitted, submission{m, r.Submitted, r.Granted, m.before(r.Submitted),
		r.Kind == message.Send, l.tensor(firstSubmitted(op).Name)})
	p.lastEnded = max(p.lastEnded, r.Ended)
	m.end(ending{o, r.Submitted, r.Ended, last})
	l.end = max(l.end, r.Ended)
	l.kept++
	// Arrivals are indexed by position in the process set. The position equals the rank only in process set
	// 0.
	if r.Set == topo.Global && len(p.arrivals) == 0 {
		p.arrivals = appendLastArrivals(p.arrivals, op)
		l.kept += len(p.arrivals)
	}
	if len(p.submitted) == members || o.number == 0 {
		l.judge(p)
	}
}

// slot returns an empty slot for an operation of all ranks.
func (l *Late) slot() *slot {
	n := len(l.free)
	if n == 0 {
		return new(slot)
	}
	p := l.free[n-1]
	l.free = l.free[:n-1]
	clear(p.submitted)
	*p = slot{submitted: p.submitted[:0], arrivals: p.arrivals[:0]}
	return p
}

// lastSubmitted returns the record of the tensor that the rank submitted last.
func lastSubmitted(op *trace.Operation) *trace.Record {
	last := &op.Records[0]
	for i := range op.Records {
		if r := &op.Records[i]; r.Submitted >= last.Submitted {
			last = r
		}
	}
	return last
}

// firstSubmitted returns the record of the tensor that the rank submitted first.
func firstSubmitted(op *trace.Operation) *trace.Record {
	first := &op.Records[0]
	for i := range op.Records {
		if r := &op.Records[i]; r.Submitted < first.Submitted {
			first = r
		}
	}
	return first
}

// LastArrivals returns, for each position in the process set, when the last request for a tensor of the
// operation arrived at rank 0. The time is 0 if no request arrived.
func LastArrivals(op *trace.Operation) []time.Duration { return appendLastArrivals(nil, op) }

// appendLastArrivals appends what LastArrivals returns to last, which is empty.
func appendLastArrivals(last []time.Duration, op *trace.Operation) []time.Duration {
	last = append(last, op.ArrivalsOf(0)...)
	for i := range op.Records {
		for position, at := range op.ArrivalsOf(i) {
			last[position] = max(last[position], at)
		}
	}
	return last
}

// tensor returns the entry of a tensor name. If there is none yet, it adds one. For an empty name it returns
// nil.
func (l *Late) tensor(name string) *tensor {
	if name == "" {
		return nil
	}
	t := l.tensors[name]
	if t == nil {
		if len(l.tensors) >= maxTensors {
			clear(l.tensors)
		}
		t = &tensor{name: name}
		l.tensors[name] = t
	}
	return t
}

// before returns the last operation that had ended at the rank at a given time.
func (m *Member) before(by time.Duration) ending {
	last := ending{ended: never}
	for i := range m.ends {
		if p := &m.ends[i]; p.ended <= by && p.ended > last.ended {
			last = *p
		}
	}
	return last
}

// end records an operation that has ended. A program that waits for an operation cannot submit another one in
// the meantime. So end marks as overtaken each operation that was in flight when this operation was
// submitted. It marks this operation as overtaken if another one was submitted while it was in flight. In
// later steps too, the program does not wait for an overtaken operation before it goes on.
func (m *Member) end(o ending) {
	for i := range m.ends {
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
	if len(m.ends) < maxEnds {
		m.ends = append(m.ends, o)
	} else {
		m.ends[m.ended%maxEnds] = o
	}
	m.ended++
}

// Advance records that each member has added its records up to the time frontier. It judges the operations
// that ended long before this time, even if some of their records are missing.
func (l *Late) Advance(frontier time.Duration) {
	for ; l.head < len(l.queue); l.head++ {
		p := l.queue[l.head]
		if !p.done && frontier != forever && frontier <= p.lastEnded+window && l.kept <= maxPending {
			break
		}
		if !p.done {
			l.judge(p)
		}
		l.queue[l.head] = nil
		if p.set == topo.Global { // slots of other process sets would take as much memory if they used these
			l.free = append(l.free, p)
		}
	}
	if 2*l.head >= len(l.queue) {
		l.queue = append(l.queue[:0], l.queue[l.head:]...)
		l.head = 0
	}
	if len(l.waits) >= maxWaits || frontier == forever {
		l.countUntil(frontier)
	}
}

// countUntil counts the waits that are complete if each member has added its records up to the time frontier.
// Operations that are judged later were submitted later, unless they took longer than the window.
func (l *Late) countUntil(frontier time.Duration) {
	slices.SortStableFunc(l.waits, func(a, b wait) int { return cmp.Compare(a.asked, b.asked) })
	n := len(l.waits)
	for frontier != forever && n > maxWaits/2 && l.waits[n-1].asked+2*window > frontier {
		n--
	}
	for _, w := range l.waits[:n] {
		l.count(w)
	}
	l.waits = slices.Delete(l.waits, 0, n)
}

// Findings judges the remaining operations and returns the result.
func (l *Late) Findings() *Lateness {
	l.Advance(forever)
	f := l.found
	startup, rest := l.startup, l.held.Ranks()
	f.Anybody = l.anybodyWaited() - l.startupAny
	if l.steadyFrom != l.startupEnd { // true if no wait after the start-up was counted
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
	for at, held := range l.origins {
		s := l.ranks[at.rank]
		if s != nil && (held > s.OriginHeld || held == s.OriginHeld && at.name < s.Origin) {
			s.Origin, s.OriginHeld = at.name, held
		}
	}
	for rank, s := range l.ranks {
		if rank < len(rest) {
			s.Held = rest[rank].Held
		}
		s.Doing = l.programs[rank].did(s.Held)
		f.Ranks = append(f.Ranks, s)
	}
	slices.SortFunc(f.Ranks, func(a, b *RankLateness) int { return cmp.Compare(a.Rank, b.Rank) })
	f.Steps = l.steps.all
	if last := l.steps.current(); last != nil {
		last.Length = max(l.end-last.Begin, 0)
	}
	if l.waitsKnown {
		f.Exposed = make(map[int]time.Duration)
		for rank, p := range l.programs {
			f.Exposed[rank] = p.exposed
		}
	}
	return &f
}

// count adds a wait to the time for which its rank held up all others. Waits must be counted in the order in
// which they ended.
func (l *Late) count(w wait) {
	if w.span != nil {
		l.countSpan(w.rank, w.span)
		return
	}
	if w.asked >= l.steadyFrom && l.startupEnd != l.steadyFrom {
		l.startupEnd, l.startup, l.startupAny = l.steadyFrom, l.held.Ranks(), l.anybodyWaited()
	}
	steady := w.asked >= l.steadyFrom && l.steadyFrom != never
	if w.step && steady {
		l.steps.begin(w.asked, w.number, max(l.members[len(l.members)-1].Rank+1, len(l.asked)))
	}
	waited := w.last == nil || !w.last.overtaken
	from, to := l.held.Add(topo.Rank(w.rank), w.others, w.asked, waited)
	if to > from && (steady || l.steadyFrom == never) {
		l.program(w.rank).heldUp(from, to)
		if w.origin != nil {
			at := origin{w.rank, w.origin.name}
			if _, known := l.origins[at]; known || len(l.origins) < maxOrigins {
				l.origins[at] += to - from
			}
		}
		if step := l.steps.current(); step != nil {
			add(&step.Held, w.rank, to-from)
		}
	}
	if to > from && l.watcher != nil {
		l.watcher.HeldUp(w.rank, from, to, w.asked >= l.steadyFrom)
	}
	l.any.Add(0, w.first, w.asked, waited)
}

// anybodyWaited returns the time so far in which some rank waited for another, including the start-up.
func (l *Late) anybodyWaited() time.Duration {
	if all := l.any.Ranks(); len(all) > 0 {
		return all[0].Held
	}
	return 0
}

// judge finds out which ranks were late for an operation and how long the other ranks waited for them.
//
// A rank that submits at time s waits until time L, when the last rank submits. To charge this time to ranks,
// judge goes backwards from L. Between the second latest submission and the latest, all others wait only for
// the latest rank. Between the third latest submission and the second latest, they wait for the latest two
// ranks. In that period it would not have helped if only one of the two had been faster. judge charges the
// time between two successive submissions to the later one. So the sum of the charges is exactly the time
// that the ranks waited. If the clocks cannot tell the submissions of several ranks apart, these ranks share
// a charge. A rank that the clocks cannot tell from the late ranks does not count as waiting for them.
func (l *Late) judge(p *slot) {
	p.done = true
	delete(l.pending, p.operation)
	l.kept -= len(p.submitted) + len(p.arrivals)
	all, latest := l.all[:0], never
	defer func() { l.all = all }()
	// A single submission cannot be compared with others, so the arrivals of all ranks' requests are compared
	// instead.
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
			// The order of the rank's tensors is not known. Ranks usually have the same order.
			all, latest = append(all, submission{Member: l.absent(rank), at: at, first: p.submitted[0].first,
				before: ending{ended: never}}), max(latest, at)
			l.found.Arrivals = true
		}
	}
	if p.kind == message.Join {
		return // ranks join because they have no more data, which is not lateness
	}
	switch {
	case sentBefore(all):
		// The message was sent before the receiver asked for it, so the sender has not waited.
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

// sentBefore reports whether a rank sent a message before the other rank asked for it.
func sentBefore(all []submission) bool {
	return slices.ContainsFunc(all, func(s submission) bool {
		s.at = s.granted
		return s.sends && slices.ContainsFunc(all, func(other submission) bool {
			return other.at-s.at > other.Clock.apart(s.Clock)
		})
	})
}

// absent returns a Member for a rank without records. For such a rank, only the times at which its requests
// arrived at rank 0 are known.
func (l *Late) absent(rank int) *Member {
	for len(l.asked) <= rank {
		l.asked = append(l.asked, &Member{Rank: len(l.asked), Clock: l.members[0].Clock})
	}
	return l.asked[rank]
}

// discountResults corrects the submissions of ranks that got the result of the previous operation at
// different times. The exchange of data caused this difference, not the program. If the previous operation is
// the same at all ranks, each submission becomes earlier by the time between the first rank's result and this
// rank's result. The two ranks of a message end it at different times by themselves.
func discountResults(all []submission) {
	first := forever
	for _, s := range all {
		if s.before.ended == never || s.before.operation != all[0].before.operation ||
			s.before.message != "" {
			return
		}
		first = min(first, s.before.ended)
	}
	for i := range all {
		all[i].at -= all[i].before.ended - first
	}
}

// charge records for how long each rank made other ranks wait. steady is false if the operation is part of
// the start-up.
func (l *Late) charge(submissions []submission, last *tensor, steady bool) {
	all := l.order[:0]
	for i := range submissions {
		s := &submissions[i]
		all = append(all, arrived{s.at, s.Member, s.first})
	}
	l.order = all
	slices.SortFunc(all, func(a, b arrived) int {
		return cmp.Or(cmp.Compare(b.at, a.at), cmp.Compare(a.Rank, b.Rank))
	})
	tell := steady && l.watcher != nil
	if tell {
		l.waiters = l.waiters[:0]
		for i := range all {
			l.waiters = append(l.waiters, all[i].Rank)
		}
	}
	first := &all[len(all)-1]
	if steady {
		l.found.Compared++
		for i := range all {
			s, late := &all[i], time.Duration(0)
			if s.later(first) {
				late = s.at - first.at
			}
			l.rank(s.Rank).Lateness.Add(int64(late))
		}
	}
	for i := 0; i < len(all); {
		top, below := &all[i], i+1
		for below < len(all) && !top.later(&all[below]) {
			below++
		}
		if below == len(all) {
			if i == 0 { // no rank was late, but the ranks may have waited for the operation
				l.waits = append(l.waits, wait{rank: top.Rank, first: top.at, others: top.at, asked: top.at,
					last: last})
			}
			break
		}
		gap, waiters, end := top.at-all[below].at, len(all)-below, below+1
		for ; end < len(all) && top.at-all[end].at <= 2*l.clockErr; end++ {
			if !top.later(&all[end]) {
				waiters--
			}
		}
		late := l.late[:0]
		for k := i; k < below; k++ {
			if all[k].later(&all[below]) {
				late = append(late, all[k])
			}
		}
		l.late = late
		if steady {
			l.found.Waited += float64(gap) * float64(waiters)
		}
		if tell {
			ranks := l.waiters[below:]
			if waiters < len(ranks) {
				l.fewer = l.fewer[:0]
				for k := below; k < len(all); k++ {
					if k >= end || top.later(&all[k]) {
						l.fewer = append(l.fewer, all[k].Rank)
					}
				}
				ranks = l.fewer
			}
			l.tell(last, top.at, late, ranks, gap/time.Duration(len(late)))
		}
		begin, from := first.at, all[below].at
		for k := range late {
			s := &late[k]
			if steady {
				r := l.rank(s.Rank)
				r.Caused += float64(gap) * float64(waiters) / float64(len(late))
				if i == 0 {
					r.Last++
				}
			}
			if i == 0 {
				// If several ranks are late, the time is divided into successive parts, one for each of them.
				to := from + (top.at-from)/time.Duration(len(late)-k)
				l.waits = append(l.waits, wait{rank: s.Rank, first: begin, others: from, asked: to,
					last: last, origin: s.first})
				begin, from = to, to
			}
		}
		i = below
	}
}

// tell tells the watcher that the waiters waited for each of the late ranks for d, until the time at.
func (l *Late) tell(last *tensor, at time.Duration, late []arrived, waiters []int, d time.Duration) {
	name := ""
	if last != nil {
		name = last.name
	}
	l.blamed = l.blamed[:0]
	for i := range late {
		l.blamed = append(l.blamed, late[i].Rank)
	}
	l.watcher.Waited(name, waiters, l.blamed, at, d)
}
