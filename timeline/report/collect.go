package report

import (
	"cmp"
	"container/heap"
	"errors"
	"io"
	"math"
	"slices"
	"time"

	"github.com/gohvd/gohvd/internal/stats"
	"github.com/gohvd/gohvd/topo"
)

const (
	// maxPending bounds what is kept of operations that wait for other ranks' word of them: words of ranks, and arrivals.
	maxPending = 1 << 19
	// maxSlots bounds those operations.
	maxSlots = 1 << 16
	// maxSpare bounds what is kept to be used again.
	maxSpare = 1 << 8
	// window is for how long one waits, in ns of the job's time. Ranks end an operation within moments of each other; but a
	// broadcast's root, say, may be far ahead.
	window = 10_000_000_000
	// maxWaits bounds the waits that are kept to be put in order.
	maxWaits = 1 << 15
	// maxEnds is how many ends of operations a stream remembers.
	maxEnds = 64
)

// operation is one at one rank: its instances that ran together. Times are on rank 0's clock.
type operation struct {
	set, number int64
	kind        string
	// submitted is when the rank had handed in the last of its tensors.
	submitted, granted, ended int64
	hasSubmitted              bool
	tensors                   int64
	fused                     int64
	bytes                     int64
	backend                   string
	failed                    bool
	last                      nameID // the tensor that was submitted last
	// arrivals are, by position in the set, when the last of the tensors' requests came; never if none did.
	arrivals []int64
	parts    []part
}

const never = math.MinInt64

// stream gives the operations of a rank.
type stream struct {
	*rankReader
	clock *clock
	stats *rankStats
	// current is the operation that the last instance belongs to; it ends with the first of another.
	current, result operation
	observer        func(*instance)
	begun           bool
	ended           error
	unnumbered      int64
	frontier        int64           // when result ended
	ends            [maxEnds]ending // the last operations to end, in a ring
	endsSeen        int
}

// rankStats is what is known of a rank.
type rankStats struct {
	phases      [numPhases]cover
	inside      cover   // with an operation in flight
	stepsInside float64 // what of it is in complete steps
	// lateness is after the first, in ns; last is how often the rank was the last, and caused what others waited for it, in ns times
	// ranks. As phases and inside, they are without what was before the first complete step.
	lateness   sketch
	last       int64
	caused     float64
	begin, end int64
	any        bool
	// steadyFrom is when the first complete step began; never if there is none yet.
	steadyFrom   int64
	steps        stepFinder
	errors       int64
	instances    int64
	hits, misses int64
	// steadyHits and steadyMisses are without the first time of each name.
	steadyHits, steadyMisses int64
	unknownCache             int64
}

// nameStats is what is known of a tensor.
type nameStats struct {
	total  sketch
	bytes  int64
	shape  string
	dtype  string
	errors int64
	kind   string
	// overtaken says that a rank had it in flight when it submitted another operation: it goes on without waiting for it.
	overtaken bool
}

// collection is what is known of a job.
type collection struct {
	job     *Job
	names   *nameTable
	ranks   map[int]*rankStats
	streams []*stream
	tensors []nameStats

	pending map[opKey]*slot
	// queue has those of pending, oldest first, from head on; done ones are taken out when they come to the front.
	queue []*slot
	head  int
	spare []*slot
	// kept is what the slots of pending have: ranks and arrivals.
	kept       int
	all        []submission
	told       []int64 // by rank, the number of the last judgement that had its own word
	judgements int64

	// steadyFrom is when the first complete step of the first rank with a file began; never if there is none yet.
	// held are for how long each rank held up all others, and startup what of that was before startupEnd, which is steadyFrom as soon as
	// an operation after that was counted. waits are to be added to held, in the order in which they ended.
	// Of any is rank 0, which stands for whichever rank was the last: for how long anybody waited, by the same rules.
	held, any  stats.Lateness
	waits      waits
	startup    []stats.Late
	startupAny time.Duration
	steadyFrom int64
	startupEnd int64

	operations, judged, alone int64
	arrivalsUsed              bool
	waited                    float64
	responses, responseBytes  sketch
	backends                  map[string]int64
	clockErr                  int64
	malformed, unfinished     int64
	tooMany                   int64
}

type opKey struct{ set, number int64 }

// slot is an operation of which not all ranks have told yet.
type slot struct {
	key       opKey
	kind      string
	last      nameID
	ranks     []seen
	arrivals  []int64
	lastEnded int64
	done      bool
}

// seen is what a rank has told of an operation.
type seen struct {
	stream             *stream
	submitted, granted int64
	hasSubmitted       bool
	previous           previous
}

// previous is the last operation that had ended at a rank when it submitted another, and when it had; never if none is known.
type previous struct {
	key   opKey
	ended int64
}

// ending is an operation that has ended at a rank.
type ending struct {
	previous
	submitted int64
	last      nameID
}

// submission is when a rank had submitted.
type submission struct {
	rank     int
	at       int64
	previous previous
	clock    *clock
}

// wait is a time for which all ranks but one had submitted an operation, and first when the first had. Its last tensor is noName if it
// was certainly waited for.
type wait struct {
	rank                 int
	first, others, asked int64
	last                 nameID
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

func (s *stream) next() (*operation, error) {
	for s.ended == nil {
		i, err := s.rankReader.next()
		if err != nil {
			s.ended = err
			break
		}
		s.observer(i)
		full := s.begun && (i.op == 0 || i.op != s.current.number || i.set != s.current.set)
		if full {
			s.result, s.current = s.current, s.result
		}
		if full || !s.begun {
			s.start(i)
		}
		s.add(i)
		s.begun = true
		if full {
			return s.give(), nil
		}
	}
	if !s.begun {
		return nil, s.ended
	}
	s.begun = false
	s.result, s.current = s.current, s.result
	return s.give(), nil
}

func (s *stream) give() *operation {
	s.frontier = s.result.ended
	return &s.result
}

func (s *stream) start(i *instance) {
	arrivals, parts := s.current.arrivals[:0], s.current.parts[:0]
	s.current = operation{set: i.set, number: i.op, kind: i.kind, submitted: never, arrivals: arrivals, parts: parts}
	if i.op == 0 {
		s.unnumbered--
		s.current.number = s.unnumbered
	}
	for _, p := range i.parts {
		s.current.parts = append(s.current.parts, part{p.phase, s.clock.reference(p.begin), s.clock.reference(p.end)})
	}
}

func (s *stream) add(i *instance) {
	o := &s.current
	if at := s.clock.reference(i.submitted); i.hasSubmitted && at >= o.submitted {
		o.submitted, o.hasSubmitted, o.last = at, true, i.name
	}
	o.granted, o.ended = s.clock.reference(i.granted), max(o.ended, s.clock.reference(i.ended))
	if o.tensors == 0 {
		o.ended = s.clock.reference(i.ended)
	}
	o.tensors++
	o.fused = max(o.fused, i.fused)
	o.bytes += i.bytes
	o.failed = o.failed || i.failed
	if i.backend != "" {
		o.backend = i.backend
	}
	for _, a := range i.arrivals {
		a.at = s.clock.reference(a.at)
		for len(o.arrivals) <= a.position {
			o.arrivals = append(o.arrivals, never)
		}
		o.arrivals[a.position] = max(o.arrivals[a.position], a.at)
	}
}

// frontiers is the heap of streams by how far each has come.
type frontiers []*stream

func (f frontiers) Len() int           { return len(f) }
func (f frontiers) Less(i, j int) bool { return f[i].frontier < f[j].frontier }
func (f frontiers) Swap(i, j int)      { f[i], f[j] = f[j], f[i] }
func (f *frontiers) Push(x any)        { *f = append(*f, x.(*stream)) }
func (f *frontiers) Pop() any {
	last := len(*f) - 1
	s := (*f)[last]
	*f = (*f)[:last]
	return s
}

// collect reads all files, all ranks side by side, so that only what is under way at a moment has to be kept.
func (j *Job) collect() (c *collection, err error) {
	c = &collection{
		job: j, names: newNameTable(), ranks: make(map[int]*rankStats), pending: make(map[opKey]*slot),
		backends: make(map[string]int64), tensors: make([]nameStats, 1), steadyFrom: never, startupEnd: never,
		responses: sketch{bits: 8}, responseBytes: sketch{bits: 8},
	}
	defer func() {
		for _, s := range c.streams {
			err = errors.Join(err, s.close())
		}
	}()
	var active frontiers
	for _, f := range j.ranks {
		s := &stream{clock: &f.clock, stats: c.rank(f.rank), frontier: never}
		s.rankReader = newRankReader(f, c.names)
		s.observer = func(i *instance) { c.observe(s, i) }
		c.streams = append(c.streams, s)
		active = append(active, s)
		if f.clock.known {
			c.clockErr = max(c.clockErr, f.clock.err)
		}
	}
	for len(active) > 0 {
		s := active[0]
		o, err := s.next()
		switch {
		case errors.Is(err, io.EOF):
			heap.Pop(&active)
		case err != nil:
			return c, err
		default:
			c.take(s, o)
			heap.Fix(&active, 0)
		}
		if len(active) > 0 {
			c.expire(active[0].frontier)
		}
	}
	c.expire(math.MaxInt64)
	for _, s := range c.streams {
		c.malformed += s.malformed
		c.unfinished += s.unfinished
		c.tooMany += s.tooMany
	}
	return c, nil
}

func (c *collection) rank(rank int) *rankStats {
	s := c.ranks[rank]
	if s == nil {
		s = &rankStats{lateness: sketch{bits: 5}, steadyFrom: never}
		c.ranks[rank] = s
	}
	return s
}

// observe counts an instance.
func (c *collection) observe(s *stream, i *instance) {
	r := s.stats
	r.instances++
	for len(c.tensors) < len(c.names.names) {
		c.tensors = append(c.tensors, nameStats{total: sketch{bits: 3}})
	}
	n := &c.tensors[i.name]
	if i.name != noName {
		n.kind, n.dtype, n.shape = i.kind, i.dtype, i.shape
		if i.hasSubmitted {
			n.total.add(i.ended - i.submitted)
		}
		n.bytes = max(n.bytes, i.bytes)
	}
	if i.failed {
		r.errors++
		n.errors++
	}
	first := true
	if i.hasSubmitted {
		submitted := s.clock.reference(i.submitted)
		if i.name != noName {
			step, begins := r.steps.step, r.steps.firstStep
			first = r.steps.see(i.name, submitted)
			if r.steps.firstStep != begins {
				c.beginSteady(s, r.steps.firstBegin)
			}
			if r.steps.step != step {
				r.stepsInside = r.inside.sum()
				if s == c.streams[0] { // if nothing else is waited for, something is once a step
					heap.Push(&c.waits, wait{s.files.rank, submitted, submitted, submitted, noName})
				}
			}
		}
		r.cover(&r.inside, submitted, s.clock.reference(i.ended))
	}
	if !i.cachedKnown && c.job.horovod && i.hasSubmitted {
		// Horovod does not say; but it has arrivals of all requests that came in full.
		i.cached, i.cachedKnown = len(i.arrivals) == 0, true
	}
	switch {
	case !i.cachedKnown:
		r.unknownCache++
	case i.cached:
		r.hits++
		if !first {
			r.steadyHits++
		}
	default:
		r.misses++
		if !first && i.name != noName {
			r.steadyMisses++
		}
	}
}

// take counts an operation and keeps what the others are compared with.
func (c *collection) take(s *stream, o *operation) {
	r := s.stats
	begin := o.granted
	if o.hasSubmitted {
		begin = min(begin, o.submitted)
	}
	if !r.any {
		r.any, r.begin, r.end = true, begin, o.ended
	}
	r.begin, r.end = min(r.begin, begin), max(r.end, o.ended)
	for _, p := range o.parts {
		r.cover(&r.phases[p.phase], p.begin, p.end)
	}
	c.operations++
	if c.fuses(o.kind) && !o.failed && !c.job.horovod {
		c.responses.add(max(o.fused, o.tensors))
		c.responseBytes.add(o.bytes)
	}
	if o.backend != "" && (len(c.backends) < 16 || c.backends[o.backend] > 0) {
		c.backends[o.backend]++
	}

	key := opKey{o.set, o.number}
	p := c.pending[key]
	if p == nil {
		p = c.newSlot(key, o)
	}
	p.ranks = append(p.ranks, seen{s, o.submitted, o.granted, o.hasSubmitted, s.previous(o.submitted)})
	p.lastEnded = max(p.lastEnded, o.ended)
	c.overtake(s, o)
	s.ends[s.endsSeen%maxEnds] = ending{previous{key, o.ended}, o.submitted, o.last}
	s.endsSeen++
	c.kept++
	// Arrivals are by position in the set, which is a rank in the global one alone.
	if len(o.arrivals) > 0 && o.set == 0 && len(p.arrivals) == 0 {
		p.arrivals = append(p.arrivals, o.arrivals...)
		c.kept += len(o.arrivals)
	}
	if len(p.ranks) == len(c.streams) || o.number < 0 {
		c.judge(p)
	}
}

func (c *collection) newSlot(key opKey, o *operation) *slot {
	p := &slot{}
	if n := len(c.spare); n > 0 {
		p = c.spare[n-1]
		c.spare = c.spare[:n-1]
	}
	*p = slot{key: key, kind: o.kind, last: o.last, ranks: p.ranks[:0], arrivals: p.arrivals[:0], lastEnded: never}
	c.pending[key] = p
	c.queue = append(c.queue, p)
	return p
}

// beginSteady notes that the first complete step of a rank began at a time, and drops what was before, the start-up.
func (c *collection) beginSteady(s *stream, at int64) {
	r := s.stats
	r.steadyFrom, r.phases, r.inside = at, [numPhases]cover{}, cover{}
	if s != c.streams[0] || c.job.horovod { // which has arrivals only of what was not cached, as in the first step
		return
	}
	c.steadyFrom, c.judged, c.alone, c.waited = at, 0, 0, 0
	for _, r := range c.ranks {
		r.lateness, r.last, r.caused = sketch{bits: r.lateness.bits}, 0, 0
	}
}

// cover adds what of an interval is not start-up.
func (r *rankStats) cover(c *cover, begin, end int64) { c.add(max(begin, r.steadyFrom), end) }

// previous returns the last operation that had ended by a time.
func (s *stream) previous(by int64) previous {
	last := previous{ended: never}
	for _, p := range s.ends[:min(s.endsSeen, maxEnds)] {
		if p.ended <= by && p.ended > last.ended {
			last = p.previous
		}
	}
	return last
}

// overtake notes which operations the rank had in flight when it submitted o, and whether it submitted another while it had o. A
// program that waits for an operation cannot submit another, so it does not wait for these before it goes on: not in other steps either.
func (c *collection) overtake(s *stream, o *operation) {
	for _, e := range s.ends[:min(s.endsSeen, maxEnds)] {
		switch {
		case e.submitted < o.submitted && o.submitted < e.ended:
			c.tensors[e.last].overtaken = true
		case o.submitted < e.submitted && e.submitted < o.ended:
			c.tensors[o.last].overtaken = true
		}
	}
}

// discountResults subtracts from each submission by how much later than the first the rank had the result of the operation before,
// if that is the same operation at all ranks: the exchange of data has taken that time, not the program.
func discountResults(all []submission) {
	first := int64(math.MaxInt64)
	for _, s := range all {
		if s.previous.ended == never || s.previous.key != all[0].previous.key {
			return
		}
		first = min(first, s.previous.ended)
	}
	for i := range all {
		all[i].at -= all[i].previous.ended - first
	}
}

// expire judges what no rank will tell more of: all have come to a time that is later by the window.
func (c *collection) expire(frontier int64) {
	for ; c.head < len(c.queue); c.head++ {
		p := c.queue[c.head]
		if !p.done && frontier != math.MaxInt64 && frontier <= p.lastEnded+window && c.kept <= maxPending && len(c.pending) <= maxSlots {
			break
		}
		if !p.done {
			c.judge(p)
		}
		if len(c.spare) < maxSpare && cap(p.arrivals) <= maxPending/maxSpare {
			c.spare = append(c.spare, p)
		}
	}
	if 2*c.head >= len(c.queue) {
		c.queue = append(c.queue[:0], c.queue[c.head:]...)
		c.head = 0
	}
	// What is judged from now on was submitted after this, but for operations that took longer than the window.
	for len(c.waits) > 0 && (frontier == math.MaxInt64 || c.waits[0].asked+2*window <= frontier || len(c.waits) > maxWaits) {
		c.count(heap.Pop(&c.waits).(wait))
	}
}

// count adds a wait, which is not earlier than the one before, to the time for which its rank held up all others.
func (c *collection) count(w wait) {
	if w.asked >= c.steadyFrom && c.startupEnd != c.steadyFrom {
		c.startupEnd, c.startup, c.startupAny = c.steadyFrom, c.held.Ranks(), c.anybodyWaited()
	}
	waited := w.last == noName || !c.tensors[w.last].overtaken
	c.held.Add(topo.Rank(w.rank), time.Duration(w.others), time.Duration(w.asked), waited)
	c.any.Add(0, time.Duration(w.first), time.Duration(w.asked), waited)
}

// anybodyWaited returns for how long any rank waited for another.
func (c *collection) anybodyWaited() time.Duration {
	if all := c.any.Ranks(); len(all) > 0 {
		return all[0].Held
	}
	return 0
}

// heldUp returns for how long each rank held up all others, by rank, before the first complete step and after it, and for how long
// anybody waited after it. Ranks at the end that held up nobody may be missing.
func (c *collection) heldUp() (startup, rest []stats.Late, anybody time.Duration) {
	startup, rest = c.startup, c.held.Ranks()
	if c.steadyFrom != c.startupEnd {
		return rest, nil, 0
	}
	for r := range startup {
		rest[r].Held -= startup[r].Held
	}
	return startup, rest, c.anybodyWaited() - c.startupAny
}

// fuses says that operations of the kind can run as one.
func (c *collection) fuses(kind string) bool {
	switch kind {
	case "allreduce", "allgather", "broadcast", "reducescatter":
		return true
	}
	return false
}

// judge finds who was late for an operation and how long the others have waited for them.
//
// Who had submitted by s waits until L, when the last one has. That time is charged backwards: from the second latest submission to the
// latest all others wait for the latest alone, from the third to the second for him and the second, of whom the second alone would
// not have helped; so between two submissions it is charged to the later one. In sum it is exactly what the ranks have waited.
// Submissions that the clocks cannot tell apart share a charge, and who cannot be told from the late ones does not wait for them.
func (c *collection) judge(p *slot) {
	p.done = true
	delete(c.pending, p.key)
	c.kept -= len(p.ranks) + len(p.arrivals)
	c.judgements++
	all, latest := c.all[:0], int64(never)
	// Alone, a rank's submissions are compared with nothing, but all arrivals with each other. Horovod's file has no other: a bar begins
	// there with the first rank's request.
	if len(p.ranks) > 1 || len(p.arrivals) == 0 {
		for _, s := range p.ranks {
			if s.hasSubmitted && s.stream.clock.known {
				all = append(all, submission{s.stream.files.rank, s.submitted, s.previous, s.stream.clock})
				latest = max(latest, s.submitted)
				c.tell(s.stream.files.rank)
			}
		}
	}
	for rank, at := range p.arrivals {
		if at != never && c.tell(rank) {
			all = append(all, submission{rank, at, previous{ended: never}, c.streams[0].clock})
			latest = max(latest, at)
			c.arrivalsUsed = true
		}
	}
	c.all = all
	if p.kind == join {
		return // ranks that have no more data do not wait in vain
	}
	switch {
	case len(all) > 1:
		discountResults(all)
		c.charge(all, p.last, latest >= c.steadyFrom)
	case p.key.set == 0:
		c.alone++
	}
	for _, s := range p.ranks {
		if !s.hasSubmitted {
			continue
		}
		r := s.stream.stats
		ready := s.submitted
		if s.stream.clock.known && latest > ready {
			ready = min(latest, s.granted)
			r.cover(&r.phases[waiting], s.submitted, ready)
		}
		r.cover(&r.phases[negotiation], ready, s.granted)
	}
}

// tell notes that there is a rank's word for this judgement, and whether it is the first.
func (c *collection) tell(rank int) bool {
	for len(c.told) <= rank {
		c.told = append(c.told, 0)
	}
	first := c.told[rank] != c.judgements
	c.told[rank] = c.judgements
	return first
}

// charge notes for how long each rank made others wait. An operation that is not steady is of the start-up.
func (c *collection) charge(all []submission, last nameID, steady bool) {
	slices.SortFunc(all, func(a, b submission) int { return cmp.Or(cmp.Compare(b.at, a.at), cmp.Compare(a.rank, b.rank)) })
	first := all[len(all)-1]
	if steady {
		c.judged++
		for _, s := range all {
			late := s.at - first.at
			if !later(s, first) {
				late = 0
			}
			c.rank(s.rank).lateness.add(late)
		}
	}
	for i := 0; i < len(all); {
		top, below := all[i], i+1
		for below < len(all) && !later(top, all[below]) {
			below++
		}
		if below == len(all) {
			if i == 0 { // nobody was late; but they may have waited for it
				heap.Push(&c.waits, wait{top.rank, top.at, top.at, top.at, last})
			}
			break
		}
		gap, waiters := top.at-all[below].at, len(all)-below
		for k := below + 1; k < len(all) && top.at-all[k].at <= 2*c.clockErr; k++ {
			if !later(top, all[k]) {
				waiters--
			}
		}
		late := int64(0) // how many share the charge
		for _, s := range all[i:below] {
			if later(s, all[below]) {
				late++
			}
		}
		if steady {
			c.waited += float64(gap) * float64(waiters)
		}
		begin, from, left := first.at, all[below].at, late
		for _, s := range all[i:below] {
			if !later(s, all[below]) {
				continue
			}
			if r := c.rank(s.rank); steady {
				r.caused += float64(gap) * float64(waiters) / float64(late)
				if i == 0 {
					r.last++
				}
			}
			if i == 0 {
				// Each has a part of the time, one after the other.
				to := from + (top.at-from)/left
				heap.Push(&c.waits, wait{s.rank, begin, from, to, last})
				begin, from, left = to, to, left-1
			}
		}
		i = below
	}
}

// later says that the clocks can tell that a was later than b.
func later(a, b submission) bool { return a.at-b.at > a.clock.apart(b.clock) }
