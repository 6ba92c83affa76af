package report

import (
	"iter"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gohvd/gohvd/internal/analysis"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
)

// phase is a kind of work or of waiting.
type phase uint8

const (
	waiting phase = iota
	negotiation
	queue
	copies
	exchange
	reduce
	other
	numPhases
)

// phaseNames has the names of the phases as the report prints them. idle is the name for the time without an
// operation in flight.
var phaseNames = [numPhases]string{"waiting", "negotiation", "queue", "copies", "exchange", "reduce", "other"}

const idle = "outside"

// exchanges has the suffixes of the names of activities that move data between ranks. The prefix of such a
// name is the name of the backend.
var exchanges = []string{"_ALLREDUCE", "_ALLGATHER", "_BCAST", "_BROADCAST", "_ALLTOALL", "_REDUCESCATTER",
	"_REDUCE", "_GATHER", "_SCATTER", "_ADASUM", "_SEND", "_RECV"}

// phaseOf returns the phase to which an activity belongs.
func phaseOf(activity string) phase {
	switch {
	case strings.HasPrefix(activity, "MEMCPY"):
		return copies
	case strings.HasPrefix(activity, "REDUCE"):
		return reduce
	case slices.ContainsFunc(exchanges, func(end string) bool { return strings.HasSuffix(activity, end) }):
		return exchange
	}
	return other
}

// PhaseOf returns the name of the phase to which an activity belongs.
func PhaseOf(activity string) string { return phaseNames[phaseOf(activity)] }

// stream reads the operations of one rank: those of files in a goroutine of its own, so that all cores decode
// files, and those of a running job in the goroutine of the caller, because the cores belong to the job.
type stream struct {
	*rankReader // until more returns false, only for batches, except for files
	*rankStats
	index    int // in collection.streams
	member   *analysis.Member
	more     func() ([]item, bool)
	batch    []item        // what more returned last
	items    []item        // the rest of it
	used     chan []item   // batches whose memory can be reused
	frontier time.Duration // the end of the last operation that next returned
	failed   error         // the error that ended reading, once more has returned false
	running  bool          // whether the job is running
}

// item is an operation, or a mark that comes before the next one.
type item struct {
	op   *operation
	mark mark
}

// aheadOf is the number of tensors and marks of files that a stream decodes at a time, or one operation if it
// has more. At most three times as many wait. Of a running job it takes one operation at a time, so that all
// use the same memory.
const aheadOf = 16

// rankStats are the statistics of one rank.
type rankStats struct {
	phases      [numPhases]cover
	inside      cover         // the time during which at least one operation was in flight
	stepsInside time.Duration // the part of the time in inside that belongs to complete steps
	begin, end  time.Duration
	any         bool
	// steadyFrom is the time at which the first complete step of the rank began. It is the constant never if
	// none has begun yet. phases and inside do not include the time before steadyFrom.
	steadyFrom   time.Duration
	steps        stepFinder
	errors       int64
	tensors      int64
	hits, misses int64
	// steadyHits and steadyMisses count all requests except the first one of each name.
	steadyHits, steadyMisses int64
	// occurred is indexed by nameStats.id: how often the name has occurred after the start-up.
	occurred []int
}

// nameStats are the statistics of one tensor name. last is its last record.
type nameStats struct {
	id     int
	total  analysis.Sample // the times from the submission to the end
	bytes  int64
	errors int64
	last   trace.Record
	series series
	// waitedFor is how long ranks waited for others in operations on the tensor after the start-up, in ns.
	waitedFor float64
}

// maxNames limits the number of tensor names of all ranks together. The tensors of all further names are
// counted together.
const maxNames = 1 << 14

const never = math.MinInt64

// pendingKey is the name of an operation in its process set.
type pendingKey struct {
	tensor string
	set    topo.ProcessSetID
}

// latest has, for the operations of a name in the files, by rank, when the last one was granted, and when the
// last one was granted that had no error. The times are on rank 0's clock.
type latest struct{ granted, succeeded map[int]time.Duration }

// collection holds the statistics of the files of a job from which the report is made.
type collection struct {
	job     *Job
	streams []*stream
	names   map[string]*nameStats
	further nameStats // of the names beyond maxNames
	late    *analysis.Late
	// steadyFrom is the time at which the first complete step began at the lowest rank that has a file. It is
	// the constant never if none has begun yet.
	steadyFrom time.Duration
	details    *detailer
	// pending has the operations that were pending at the end of a file, and what the files say about others
	// of the same names.
	pending map[pendingKey]*latest

	operations               int64
	responses, responseBytes analysis.Sample
	backends                 [message.NumBackends]int64
	clockErr                 time.Duration
}

// batches passes the operations and marks of the stream to yield until yield returns false.
func (s *stream) batches(yield func([]item) bool) {
	var batch []item
	size, wanted := 0, true
	add := func(i item, n int) bool {
		batch = append(batch, i)
		size += n
		if size >= aheadOf || s.running {
			wanted = wanted && yield(batch)
			batch, size = s.emptied(), 0
		}
		return wanted
	}
	s.mark = func(m mark) { add(item{mark: m}, 1) }
	s.failed = s.operations(func(o *operation) bool { return add(item{op: o}, len(o.Records)) })
	if wanted {
		yield(batch)
	}
}

// emptied returns a used batch without its items, whose operations the reader reuses. It returns nil if there
// is none.
func (s *stream) emptied() []item {
	select {
	case batch := <-s.used:
		for _, i := range batch {
			// In files larger ones are rare, and would stay.
			if i.op != nil && (s.running || cap(i.op.Records) <= aheadOf) {
				s.free = append(s.free, i.op)
			}
		}
		clear(batch)
		return batch[:0]
	default:
		return nil
	}
}

// readAhead begins to read in a goroutine, until done is closed.
func (s *stream) readAhead(reading *sync.WaitGroup, done <-chan struct{}) {
	ahead := make(chan []item, 1)
	s.used = make(chan []item, 1)
	reading.Go(func() {
		defer close(ahead)
		for batch := range s.batches {
			select {
			case ahead <- batch:
			case <-done:
				return
			}
		}
	})
	s.more = func() ([]item, bool) {
		batch, more := <-ahead
		return batch, more
	}
}

// next returns the next operation, after it has passed the marks before it to take. At the end it returns
// nil. The operation is valid until the next call of next.
func (s *stream) next(take func(mark)) *operation {
	for {
		for len(s.items) > 0 {
			i := s.items[0]
			s.items = s.items[1:]
			if i.op != nil {
				s.frontier = i.op.Records[0].Ended
				return i.op
			}
			take(i.mark)
		}
		select {
		case s.used <- s.batch:
		default:
		}
		batch, more := s.more()
		if !more {
			return nil
		}
		s.batch, s.items = batch, batch
	}
}

// before reports whether the next operation of s is read before that of other.
func (s *stream) before(other *stream) bool {
	return s.frontier < other.frontier || s.frontier == other.frontier && s.index < other.index
}

// sink moves the first element of a heap, the one that is before all others, to where it belongs now.
func sink(heap []*stream) {
	for i, k := 0, 1; k < len(heap); i, k = k, 2*k+1 {
		if k+1 < len(heap) && heap[k+1].before(heap[k]) {
			k++
		}
		if !heap[k].before(heap[i]) {
			return
		}
		heap[i], heap[k] = heap[k], heap[i]
	}
}

// collect reads the files of all ranks side by side, so that it keeps only the operations in progress in
// memory. It passes each operation to see, if that is not nil.
func (j *Job) collect(see func(rank int, op *trace.Operation)) (*collection, error) {
	c := &collection{job: j, names: make(map[string]*nameStats), steadyFrom: never,
		pending: make(map[pendingKey]*latest)}
	c.details = newDetailer(j, c.names, see != nil)
	of := make(map[*analysis.Member]*rankStats)
	var reading sync.WaitGroup
	done := make(chan struct{})
	defer reading.Wait()
	defer close(done)
	c.late = analysis.NewLate(func(m *analysis.Member, from, to, granted time.Duration) {
		of[m].cover(waiting, from, to)
		of[m].cover(negotiation, to, granted)
		c.details.wait(m.Rank, from, to, granted)
	})
	c.late.Watch(c.details)
	for _, f := range j.ranks {
		for _, p := range f.last().pending {
			c.pending[pendingKey{p.tensor, p.set}] = &latest{granted: make(map[int]time.Duration),
				succeeded: make(map[int]time.Duration)}
		}
		s := &stream{rankReader: newRankReader(f), rankStats: &rankStats{steadyFrom: never},
			frontier: never, index: len(c.streams), running: j.running}
		s.steps.marked = f.marked()
		s.member = c.late.Member(f.rank, analysis.Clock{Domain: f.clock.domain,
			Error: time.Duration(f.clock.err), Known: f.clock.known})
		of[s.member] = s.rankStats
		if j.running {
			next, stop := iter.Pull(s.batches)
			defer stop()
			s.more, s.used = next, make(chan []item, 1)
		} else {
			s.readAhead(&reading, done)
		}
		c.streams = append(c.streams, s)
		if f.clock.known {
			c.clockErr = max(c.clockErr, time.Duration(f.clock.err))
		}
	}
	// The next operation is always read from the stream whose frontier is earliest, so that few operations of
	// the other streams have to be kept.
	for active := slices.Clone(c.streams); len(active) > 0; sink(active) {
		s := active[0]
		c.late.Advance(s.frontier)
		if o := s.next(func(m mark) { c.mark(s, m) }); o != nil {
			if see != nil {
				see(s.files.rank, &o.Operation)
			}
			c.take(s, o)
		} else if s.failed != nil {
			return nil, s.failed
		} else {
			last := len(active) - 1
			active[0] = active[last]
			active = active[:last]
		}
	}
	return c, nil
}

// nameOf returns the statistics of a tensor name. It adds them if the limit is not reached.
func (c *collection) nameOf(name string) *nameStats {
	n := c.names[name]
	switch {
	case n != nil:
	case len(c.names) == maxNames:
		n = &c.further
	default:
		n = &nameStats{id: len(c.names) + 1}
		c.names[name] = n
	}
	return n
}

// take counts an operation in the statistics and adds it to the comparison with the other ranks.
func (c *collection) take(s *stream, o *operation) {
	all, bytes := &o.Records[0], int64(0)
	for i := range o.Records {
		r := &o.Records[i]
		bytes += r.Bytes
		c.record(s, r)
		if !s.any {
			s.any, s.begin, s.end = true, r.Submitted, r.Ended
		}
		s.begin, s.end = min(s.begin, r.Submitted), max(s.end, r.Ended)
	}
	s.cover(queue, all.Granted, all.Begun)
	at := all.Begun
	for _, a := range o.Activities {
		s.cover(other, at, a.Begun)
		s.cover(phaseOf(a.Name), a.Begun, a.End)
		at = a.End
	}
	s.cover(other, at, all.Ended)
	c.operations++
	if all.Kind.MovesData() && !all.Kind.SendsRows() && all.Error == "" {
		c.responses.Add(max(o.fused, int64(len(o.Records))))
		c.responseBytes.Add(bytes)
	}
	c.backends[all.Backend]++
	c.late.Add(s.member, &o.Operation)
}

// record counts a tensor in the statistics.
func (c *collection) record(s *stream, r *trace.Record) {
	s.tensors++
	n := c.nameOf(r.Name)
	n.total.Add(int64(r.Ended - r.Submitted))
	n.bytes, n.last = max(n.bytes, r.Bytes), *r
	if p := c.pending[pendingKey{r.Name, r.Set}]; p != nil {
		rank := s.files.rank
		p.granted[rank] = max(p.granted[rank], r.Granted)
		if r.Error == "" {
			p.succeeded[rank] = max(p.succeeded[rank], r.Granted)
		}
	}
	if r.Error != "" {
		s.errors++
		n.errors++
	}
	first := true
	if n != &c.further {
		step, begins := s.steps.step, s.steps.firstStep
		first = s.steps.see(n.id, r.Submitted)
		if s.steps.firstStep != begins {
			c.beginSteady(s, s.steps.firstBegin)
		}
		if s.steps.step != step {
			s.stepsInside = s.inside.sum()
			// The steps of the first stream are used for all ranks, because the ranks wait for each other in
			// each step.
			if s == c.streams[0] {
				c.late.Step(s.member, r.Submitted, nil)
				if s.steps.step != s.steps.firstStep {
					c.details.step(r.Submitted)
				}
			}
		}
	}
	if n != &c.further && s.steadyFrom != never {
		if n.id >= len(s.occurred) {
			s.occurred = append(s.occurred, make([]int, n.id+1-len(s.occurred))...)
		}
		n.series.add(s.occurred[n.id], float64(r.Ended-r.Submitted))
		s.occurred[n.id]++
	}
	s.inside.add(max(r.Submitted, s.steadyFrom), r.Ended)
	if r.Kind.IsMessage() || r.Kind.IsRequest() {
		return // these use no cache
	}
	all, steady := &s.misses, &s.steadyMisses
	if r.Cached {
		all, steady = &s.hits, &s.steadyHits
	}
	*all++
	if !first {
		*steady++
	}
}

// mark counts a mark.
func (c *collection) mark(s *stream, m mark) {
	switch {
	case m.isSpan:
		c.late.Span(s.member, m.span)
		c.details.span(s.files.rank, m.span)
	case s.steps.marked:
		at, begins := m.at, s.steps.firstStep
		s.steps.mark(at)
		s.stepsInside = s.inside.sum()
		if s.steps.firstStep != begins {
			c.beginSteady(s, s.steps.firstBegin)
		}
		if s == c.streams[0] {
			c.late.Step(s.member, at, &m.step)
			if s.steps.step != s.steps.firstStep {
				c.details.step(at)
			}
		}
	}
}

// beginSteady records that the first complete step of a rank began at the given time. It resets the
// statistics of the rank that do not cover the start-up.
func (c *collection) beginSteady(s *stream, at time.Duration) {
	s.steadyFrom, s.phases, s.inside, s.occurred = at, [numPhases]cover{}, cover{}, nil
	if s == c.streams[0] {
		c.steadyFrom = at
		c.late.Steady(at)
		c.details.steady(at)
		for _, n := range c.names {
			n.series, n.waitedFor = series{}, 0
		}
	}
}

// cover adds an interval to a phase, without the part that is before the end of the start-up.
func (r *rankStats) cover(p phase, begin, end time.Duration) {
	r.phases[p].add(max(begin, r.steadyFrom), end)
}
