package analysis

import (
	"cmp"
	"slices"
	"time"

	"github.com/gohvd/gohvd/internal/trace"
)

const (
	// maxCells limits the entries of the table of steps times the ranks.
	maxCells = 1 << 18
	// maxSteps and minSteps limit the entries of the table of steps.
	maxSteps, minSteps = 1 << 12, 1 << 6
	// maxRecent limits the latest ranges and gaps of a rank that are compared with each other.
	maxRecent = 1 << 10
	// maxRanges limits the names of ranges for which the time is added up. The time in further ranges counts
	// as time in no range.
	maxRanges = 1 << 8
)

// Step has what happened in one training step or, if there are too many steps, in some successive ones.
type Step struct {
	// Number is the number of the first of these steps, and Count is how many they are.
	Number uint64
	Count  int64
	// Begin is when the first of them begins, and Length is how long they are together. The last step ends
	// with the last operation.
	Begin, Length time.Duration
	// Held has, by rank, how long the rank held up all others, and Exposed for how long its program waited
	// for results. Ranks at the end whose times are 0 are left out.
	Held, Exposed []time.Duration
}

// steps is the table of the steps after the start-up.
type steps struct {
	all []Step
	per int64 // the number of steps of an entry
}

// begin begins a step. If the program does not number its steps, number is nil. ranks is greater than the
// number of each rank that is known so far.
func (s *steps) begin(at time.Duration, number *uint64, ranks int) {
	s.per = max(s.per, 1)
	next := uint64(0)
	if n := len(s.all); n > 0 {
		last := &s.all[n-1]
		last.Length = at - last.Begin
		if last.Count < s.per {
			last.Count++
			return
		}
		next = last.Number + uint64(last.Count)
	}
	if number != nil {
		next = *number
	}
	for len(s.all) >= min(max(maxCells/max(ranks, 1), minSteps), maxSteps) {
		s.halve()
	}
	if n := len(s.all); n > 0 && s.all[n-1].Count < s.per {
		s.all[n-1].Count++
		return
	}
	s.all = append(s.all, Step{Number: next, Count: 1, Begin: at})
}

// halve joins every two successive entries.
func (s *steps) halve() {
	s.per *= 2
	n := 0
	for i := 0; i < len(s.all); i += 2 {
		step := s.all[i]
		if i+1 < len(s.all) {
			other := s.all[i+1]
			step.Count += other.Count
			step.Length += other.Length
			step.Held, step.Exposed = sum(step.Held, other.Held), sum(step.Exposed, other.Exposed)
		}
		s.all[n] = step
		n++
	}
	s.all = s.all[:n]
}

// sum returns the sums of the times of each rank.
func sum(a, b []time.Duration) []time.Duration {
	for rank, d := range b {
		add(&a, rank, d)
	}
	return a
}

// add adds a time to that of a rank.
func add(to *[]time.Duration, rank int, d time.Duration) {
	for len(*to) <= rank {
		*to = append(*to, 0)
	}
	(*to)[rank] += d
}

// current returns the entry of the present step, or nil before the first one.
func (s *steps) current() *Step {
	if len(s.all) == 0 {
		return nil
	}
	return &s.all[len(s.all)-1]
}

// interval is a time of a rank in which its program was in the range with the given name, or, without a name,
// in which the rank held up all others.
type interval struct {
	name       string
	begin, end time.Duration
}

// program has what is known of the program of a rank.
type program struct {
	// ranges has the latest ranges of the program, in the order in which they ended. gaps has the latest
	// times in which the rank held up all others, without those for which the range is known.
	ranges, gaps []interval
	// doing has, by the name of a range, how long the rank held up all others in it.
	doing map[string]time.Duration
	// exposed is for how long the program waited for results, and waitedUntil when the last wait ended.
	exposed, waitedUntil time.Duration
}

// Doing is how long a rank held up all others while its program was in a range. Range is empty for the time
// in which it was in none.
type Doing struct {
	Range string
	Time  time.Duration
}

// overlap attributes the part of the gap g that is in the range r, and appends the other parts to rest.
func (p *program) overlap(rest []interval, g, r interval) []interval {
	begin, end := max(g.begin, r.begin), min(g.end, r.end)
	if begin >= end {
		return append(rest, g)
	}
	if _, known := p.doing[r.name]; known || len(p.doing) < maxRanges {
		if p.doing == nil {
			p.doing = make(map[string]time.Duration)
		}
		p.doing[r.name] += end - begin
	}
	if g.begin < begin {
		rest = append(rest, interval{begin: g.begin, end: begin})
	}
	if end < g.end {
		rest = append(rest, interval{begin: end, end: g.end})
	}
	return rest
}

// recent appends an interval and drops the oldest if there are too many.
func recent(all *[]interval, more ...interval) {
	*all = append(*all, more...)
	if len(*all) > 2*maxRecent {
		*all = slices.Delete(*all, 0, len(*all)-maxRecent)
	}
}

// firstAfter returns the index of the first of the last intervals that end after the given time. The search
// begins at the last one, because usually few do.
func firstAfter(all []interval, at time.Duration) int {
	i := len(all)
	for i > 0 && all[i-1].end > at {
		i--
	}
	return i
}

// inRange says that the program was in a range that has ended. Ranges must be added in the order in which
// they ended, so that a range comes before those that it is inside of. So a gap counts for the innermost
// range.
func (p *program) inRange(r interval) {
	first := firstAfter(p.gaps, r.begin)
	gaps := slices.Clone(p.gaps[first:])
	p.gaps = p.gaps[:first]
	for _, g := range gaps {
		p.gaps = p.overlap(p.gaps, g, r)
	}
	recent(&p.ranges, r)
}

// heldUp says that the rank held up all others.
func (p *program) heldUp(from, to time.Duration) {
	left := []interval{{begin: from, end: to}}
	for _, r := range p.ranges[firstAfter(p.ranges, from):] {
		var next []interval
		for _, g := range left {
			next = p.overlap(next, g, r)
		}
		left = next
	}
	recent(&p.gaps, left...)
}

// waited says that the program waited for a result. It returns the part of the time that is not counted yet.
func (p *program) waited(from, to time.Duration) time.Duration {
	more := max(to-max(from, p.waitedUntil), 0)
	p.waitedUntil = max(p.waitedUntil, to)
	p.exposed += more
	return more
}

// did returns in which ranges the rank was while it held up all others for the time held, the longest first.
// If the program has no ranges, it returns none.
func (p *program) did(held time.Duration) (all []Doing) {
	if p == nil || len(p.ranges) == 0 {
		return nil
	}
	for name, d := range p.doing {
		all = append(all, Doing{name, d})
		held -= d
	}
	if held > 0 {
		all = append(all, Doing{"", held})
	}
	slices.SortFunc(all, func(a, b Doing) int {
		return cmp.Or(cmp.Compare(b.Time, a.Time), cmp.Compare(a.Range, b.Range))
	})
	return all
}

// Span adds what the program of rank m did. Late does not require that spans are in order.
func (l *Late) Span(m *Member, s trace.Span) {
	l.waits = append(l.waits, wait{rank: m.Rank, first: s.Begun, asked: s.End, span: &s})
}

// program returns what is known of the program of a rank.
func (l *Late) program(rank int) *program {
	p := l.programs[rank]
	if p == nil {
		p = new(program)
		l.programs[rank] = p
	}
	return p
}

// countSpan counts what a program did, in the order in which it ended.
func (l *Late) countSpan(rank int, s *trace.Span) {
	begun, p := max(s.Begun, l.steadyFrom), l.program(rank)
	if s.End <= begun {
		return
	}
	if s.Kind == trace.Range {
		p.inRange(interval{s.Name, begun, s.End})
		return
	}
	l.waitsKnown = true
	d := p.waited(begun, s.End)
	if step := l.steps.current(); step != nil && d > 0 {
		add(&step.Exposed, rank, d)
	}
}
