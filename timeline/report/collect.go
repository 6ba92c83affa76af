package report

import (
	"cmp"
	"iter"
	"math"
	"slices"
	"time"

	"github.com/gohvd/gohvd/internal/analysis"
)

// operation is one operation at one rank. It has all tensors that were fused in it. Times are on rank 0's
// clock.
type operation struct {
	// Record is the record of the operation. Its name and its submission time are those of the tensor that
	// the rank submitted last.
	analysis.Record
	tensors, fused int64
	// arrivals has one time for each position in the process set: when the last request of that rank for a
	// tensor of the operation arrived at rank 0. The time is 0 if no request arrived.
	arrivals []time.Duration
	parts    []part
}

// stream reads the operations of one rank from its files.
type stream struct {
	*rankReader
	*rankStats
	member   *analysis.Member
	observe  func(*instance)           // called with each instance
	next     func() (*operation, bool) // returns the next operation
	frontier time.Duration             // the end of the last operation that next returned
	failed   error                     // the error that ended reading
}

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
}

// nameStats are the statistics of one tensor name.
type nameStats struct {
	total  analysis.Sketch
	bytes  int64
	shape  string
	dtype  string
	errors int64
	kind   string
}

const never = math.MinInt64

// collection holds the statistics of the files of a job from which the report is made.
type collection struct {
	job     *Job
	names   *nameTable
	streams []*stream
	tensors []nameStats
	late    *analysis.Late
	// steadyFrom is the time at which the first complete step began at the lowest rank that has a file. It is
	// the constant never if none has begun yet.
	steadyFrom time.Duration

	operations               int64
	responses, responseBytes analysis.Sketch
	backends                 map[string]int64
	clockErr                 time.Duration
	malformed, unfinished    int64
	tooMany                  int64
}

// operations passes the operations of the stream to yield, until yield returns false. Consecutive instances
// with the same operation number form one operation, unless they are messages.
func (s *stream) operations(yield func(*operation) bool) {
	var o *operation
	more := true
	s.failed = s.instances(func(i *instance) bool {
		s.observe(i)
		whole := o
		if o == nil || i.Number == 0 || i.Number != o.Number || i.Set != o.Set || i.IsMessage() ||
			o.IsMessage() {
			o = &operation{Record: analysis.Record{Set: i.Set, Number: i.Number, Kind: i.Kind, Ended: never},
				parts: i.parts}
		}
		o.add(i)
		if whole != nil && whole != o {
			s.frontier = whole.Ended
			more = yield(whole)
		}
		return more
	})
	if s.failed == nil && more && o != nil {
		s.frontier = o.Ended
		yield(o)
	}
}

// add adds an instance, which has one tensor, to the operation.
func (o *operation) add(i *instance) {
	if i.Submitted != 0 && (o.Submitted == 0 || i.Submitted >= o.Submitted) {
		o.Submitted, o.Name = i.Submitted, i.Name
	}
	o.Granted, o.Ended = i.Granted, max(o.Ended, i.Ended)
	o.tensors++
	o.fused = max(o.fused, i.fused)
	o.Bytes += i.Bytes
	o.Error, o.Backend = cmp.Or(o.Error, i.Error), cmp.Or(i.Backend, o.Backend)
	for _, a := range i.arrivals {
		for len(o.arrivals) <= a.position {
			o.arrivals = append(o.arrivals, 0)
		}
		if at := &o.arrivals[a.position]; *at == 0 || a.at > *at {
			*at = a.at
		}
	}
}

// collect reads the files of all ranks side by side, so that it keeps only the operations in progress in
// memory.
func (j *Job) collect() (*collection, error) {
	c := &collection{
		job: j, names: newNameTable(), backends: make(map[string]int64), tensors: make([]nameStats, 1),
		steadyFrom: never,
		responses:  analysis.Sketch{Bits: 8}, responseBytes: analysis.Sketch{Bits: 8},
	}
	of := make(map[*analysis.Member]*rankStats)
	c.late = analysis.NewLate(func(m *analysis.Member, from, to, granted time.Duration) {
		r := of[m]
		r.cover(&r.phases[waiting], from, to)
		r.cover(&r.phases[negotiation], to, granted)
	})
	for _, f := range j.ranks {
		s := &stream{rankReader: newRankReader(f, c.names), rankStats: &rankStats{steadyFrom: never},
			frontier: never}
		s.member = c.late.Member(f.rank, analysis.Clock{Domain: f.clock.domain,
			Error: time.Duration(f.clock.err), Known: f.clock.known})
		of[s.member] = s.rankStats
		s.observe = func(i *instance) { c.observe(s, i) }
		var stop func()
		s.next, stop = iter.Pull(s.operations)
		defer stop()
		c.streams = append(c.streams, s)
		if f.clock.known {
			c.clockErr = max(c.clockErr, time.Duration(f.clock.err))
		}
	}
	// The next operation is always read from the stream whose frontier is earliest, so that few operations of
	// the other streams have to be kept.
	for active := slices.Clone(c.streams); len(active) > 0; {
		s := slices.MinFunc(active, func(a, b *stream) int { return cmp.Compare(a.frontier, b.frontier) })
		c.late.Advance(s.frontier)
		if o, more := s.next(); more {
			c.take(s, o)
		} else if s.failed != nil {
			return nil, s.failed
		} else {
			active = slices.DeleteFunc(active, func(a *stream) bool { return a == s })
		}
	}
	for _, s := range c.streams {
		c.malformed += s.malformed
		c.unfinished += s.unfinished
		c.tooMany += s.tooMany
	}
	return c, nil
}

// observe counts an instance in the statistics.
func (c *collection) observe(s *stream, i *instance) {
	s.tensors++
	for len(c.tensors) < len(c.names.names) {
		c.tensors = append(c.tensors, nameStats{total: analysis.Sketch{Bits: 3}})
	}
	n := &c.tensors[i.name]
	if i.name != noName {
		n.kind, n.dtype, n.shape = i.Kind, i.DType, i.shape
		if i.Submitted != 0 {
			n.total.Add(int64(i.Ended - i.Submitted))
		}
		n.bytes = max(n.bytes, i.Bytes)
	}
	if i.Error != "" {
		s.errors++
		n.errors++
	}
	first := true
	if i.Submitted != 0 {
		if i.name != noName {
			step, begins := s.steps.step, s.steps.firstStep
			first = s.steps.see(i.name, i.Submitted)
			if s.steps.firstStep != begins {
				c.beginSteady(s, s.steps.firstBegin)
			}
			if s.steps.step != step {
				s.stepsInside = s.inside.sum()
				// The steps of the first stream are used for all ranks, because the ranks wait for each other
				// in each step.
				if s == c.streams[0] {
					c.late.Step(s.member, i.Submitted)
				}
			}
		}
		s.cover(&s.inside, i.Submitted, i.Ended)
	}
	again := int64(1)
	if first {
		again = 0
	}
	switch {
	case !i.cachedKnown || i.IsMessage(): // messages use no cache
	case i.Cached:
		s.hits, s.steadyHits = s.hits+1, s.steadyHits+again
	case i.name == noName:
		s.misses++
	default:
		s.misses, s.steadyMisses = s.misses+1, s.steadyMisses+again
	}
}

// take counts an operation in the statistics and adds it to the comparison with the other ranks.
func (c *collection) take(s *stream, o *operation) {
	begin := o.Granted
	if o.Submitted != 0 {
		begin = min(begin, o.Submitted)
	}
	if !s.any {
		s.any, s.begin, s.end = true, begin, o.Ended
	}
	s.begin, s.end = min(s.begin, begin), max(s.end, o.Ended)
	for _, p := range o.parts {
		s.cover(&s.phases[p.phase], p.begin, p.end)
	}
	c.operations++
	if fuses(o.Kind) && o.Error == "" {
		c.responses.Add(max(o.fused, o.tensors))
		c.responseBytes.Add(o.Bytes)
	}
	if o.Backend != "" && (len(c.backends) < 16 || c.backends[o.Backend] > 0) {
		c.backends[o.Backend]++
	}
	c.late.Add(s.member, &o.Record, o.arrivals)
}

// beginSteady records that the first complete step of a rank began at the given time. It resets the
// statistics of the rank that do not cover the start-up.
func (c *collection) beginSteady(s *stream, at time.Duration) {
	s.steadyFrom, s.phases, s.inside = at, [numPhases]cover{}, cover{}
	if s == c.streams[0] {
		c.steadyFrom = at
		c.late.Steady(at)
	}
}

// cover adds an interval to c, without the part that is before the end of the start-up.
func (r *rankStats) cover(c *cover, begin, end time.Duration) { c.add(max(begin, r.steadyFrom), end) }

// fuses reports whether operations of this kind can be fused.
func fuses(kind string) bool {
	switch kind {
	case "allreduce", "allgather", "broadcast", "reducescatter", "reduce":
		return true
	}
	return false
}
