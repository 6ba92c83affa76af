// Package view serves a page that shows the timelines of a job: which rank, host or tensor was late, in which
// steps, and who waited for whom.
//
// Invariants:
//
//  1. The page computes no number. Numbers come from package timeline/report, as hvdrun timeline --json prints
//     them; pictures are drawn from tiles, which this package computes.
//  2. A tile has a limited size, whatever the length of the timelines and the number of ranks. The page draws at
//     most 12 of them in one frame.
//  3. Nothing that a request contains is used as a path. Every answer comes from memory or from the files that
//     are built into the program.
//  4. Texts of timelines, such as names of tensors, are only data to the page. Its content security policy
//     forbids to use them as markup or script.
package view

import (
	"cmp"
	"fmt"
	"slices"
	"sort"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/trace"
	"github.com/gohvd/gohvd/timeline/report"
)

// maxBytes limits the memory of the operations and spans of all ranks that are kept to be drawn. That is
// about 2.5 million operations with one tensor and three activities. The report has all operations. The other
// constants say what an operation and a span take.
const (
	maxBytes                       = 512 << 20
	opBytes, recordBytes, actBytes = 112, 16, 24
	spanBytes                      = 32
	nameBytes                      = 64 // of each name, in addition to its text
)

// Run is a job whose timelines have been read.
type Run struct {
	// Title is shown above the page.
	Title string
	// Compared is the comparison with another run, or nil if there is none.
	Compared *report.Comparison
	live     bool // set by Live
	report   *report.Report
	*report.Details
	lanes []*lane // indexed by rank, like Details.Ranks
	order []int   // the ranks, grouped by their hosts
	names []string
	ids   map[string]int32
	// room is how many bytes further operations may take. leftOut is the number of operations for which there
	// was no room.
	room, leftOut int64
}

// lane has the operations of one rank.
type lane struct {
	ops     []op // in the order in which they began
	records []record
	acts    []act
	// ends[i] is the latest end of the operations up to ops[i].
	ends []time.Duration
	// spans are what the program did, in the order in which they began. spanEnds is for them what ends is for
	// ops.
	spans    []span
	spanEnds []time.Duration
	// tensors are the numbers of the names that the rank has submitted, in the order of their first
	// submission.
	tensors []int32
}

// op is an operation of a rank. Of its tensors, the first was submitted at the time first, and the last one
// at the time last. The rank waited for other ranks until the time waited.
type op struct {
	first, last, waited, granted, begun, ended time.Duration
	number                                     uint64
	bytes                                      int64
	set                                        int32
	record, act                                int32 // the indices of the first record and activity
	records, acts                              int32
	kind                                       message.Kind
	backend                                    message.Backend
	algorithm                                  message.Algorithm
	failed                                     string
}

// span is a time in which the program was in a range, or waited for a result.
type span struct {
	begun, end time.Duration
	name       int32
	phase      phase
}

// record is a tensor of an operation.
type record struct {
	submitted time.Duration
	name      int32
}

// act is an activity of an operation.
type act struct {
	begun, end time.Duration
	phase      phase
}

// Read reads the timelines of a job.
func Read(job *report.Job, o report.Options, title string) (*Run, error) {
	v := &Run{Title: title, ids: make(map[string]int32), room: maxBytes}
	byRank := make(map[int]*lane)
	r, d, err := job.Examine(o, func(rank int, o *trace.Operation) {
		l := byRank[rank]
		if l == nil {
			l = &lane{}
			byRank[rank] = l
		}
		v.add(l, o)
	})
	if err != nil {
		return nil, err
	}
	v.report, v.Details = r, d
	for _, i := range d.Ranks {
		l := byRank[i.Rank]
		if l == nil {
			l = &lane{}
		}
		v.lanes = append(v.lanes, l)
	}
	first := make(map[string]int) // the first rank of each host
	for _, i := range d.Ranks {
		if _, known := first[i.Host]; !known {
			first[i.Host] = i.Rank
		}
		v.order = append(v.order, i.Rank)
	}
	slices.SortStableFunc(v.order, func(a, b int) int {
		return cmp.Compare(first[d.Ranks[a].Host], first[d.Ranks[b].Host])
	})
	waits := make([][]report.Wait, len(v.lanes))
	for _, w := range d.Pending {
		waits[w.Rank] = append(waits[w.Rank], w)
	}
	for _, s := range d.Spans {
		if v.room < spanBytes {
			d.LeftOut++
			continue
		}
		v.room -= spanBytes
		n := span{s.Begun, s.End, v.name(s.Name), inRange}
		if s.Kind == trace.Wait {
			n.phase = waitsForResult
		}
		v.lanes[s.Rank].spans = append(v.lanes[s.Rank].spans, n)
	}
	d.Pending, d.Spans = nil, nil
	for rank, l := range v.lanes {
		l.finish(waits[rank], len(v.names))
	}
	if v.leftOut > 0 {
		r.Problems = append(r.Problems, fmt.Sprintf("the timeline on this page lacks %d operations, because it has room for only %d MiB; the report includes them",
			v.leftOut, maxBytes>>20))
	}
	if d.LeftOut > 0 {
		r.Problems = append(r.Problems, fmt.Sprintf("the timeline on this page lacks %d of the periods in which ranks or programs waited, or programs were in ranges, because it has no room for them; the report includes them",
			d.LeftOut))
	}
	return v, nil
}

// add adds an operation to a lane.
func (v *Run) add(l *lane, o *trace.Operation) {
	need := int64(opBytes + recordBytes*len(o.Records) + actBytes*len(o.Activities))
	if v.room < need {
		v.room = 0 // so that none of the later ones is kept
		v.leftOut++
		return
	}
	v.room -= need
	r := &o.Records[0]
	n := op{first: r.Submitted, last: r.Submitted, granted: r.Granted, begun: r.Begun, ended: r.Ended,
		number: r.Number, set: int32(r.Set), record: int32(len(l.records)), act: int32(len(l.acts)),
		records: int32(len(o.Records)), acts: int32(len(o.Activities)),
		kind: r.Kind, backend: r.Backend, algorithm: r.Algorithm}
	for i := range o.Records {
		r := &o.Records[i]
		n.first, n.last, n.bytes = min(n.first, r.Submitted), max(n.last, r.Submitted), n.bytes+r.Bytes
		n.failed = cmp.Or(n.failed, r.Error)
		l.records = append(l.records, record{r.Submitted, v.name(r.Name)})
	}
	for _, a := range o.Activities {
		l.acts = append(l.acts, act{a.Begun, a.End, phaseOf(a.Name)})
	}
	if n.begun == 0 {
		n.begun = n.granted
	}
	n.waited = n.last
	l.ops = append(l.ops, n)
}

// name returns the number of a name.
func (v *Run) name(name string) int32 {
	id, known := v.ids[name]
	if !known {
		id = int32(len(v.names))
		v.ids[name], v.names = id, append(v.names, name)
		v.room -= int64(len(name) + nameBytes)
	}
	return id
}

// finish sorts the operations and adds how long the rank waited in each of them. names is the number of names
// of all ranks.
func (l *lane) finish(waits []report.Wait, names int) {
	order := func(a, b, c, d time.Duration) int { return cmp.Or(cmp.Compare(a, b), cmp.Compare(c, d)) }
	slices.SortFunc(waits, func(a, b report.Wait) int { return order(a.From, b.From, a.Granted, b.Granted) })
	slices.SortStableFunc(l.ops, func(a, b op) int { return order(a.last, b.last, a.granted, b.granted) })
	at := 0
	for _, w := range waits {
		for at < len(l.ops) && order(l.ops[at].last, w.From, l.ops[at].granted, w.Granted) < 0 {
			at++
		}
		if at < len(l.ops) && l.ops[at].last == w.From && l.ops[at].granted == w.Granted {
			l.ops[at].waited = w.To
			at++
		}
	}
	slices.SortStableFunc(l.ops, func(a, b op) int { return cmp.Compare(a.first, b.first) })
	slices.SortStableFunc(l.spans, func(a, b span) int { return cmp.Compare(a.begun, b.begun) })
	for i, last := 0, time.Duration(0); i < len(l.spans); i++ {
		if i == 0 || l.spans[i].end > last {
			last = l.spans[i].end
		}
		l.spanEnds = append(l.spanEnds, last)
	}
	latest, seen := time.Duration(0), make([]bool, names)
	for i := range l.ops {
		o := &l.ops[i]
		if i == 0 || o.ended > latest {
			latest = o.ended
		}
		l.ends = append(l.ends, latest)
		for _, r := range l.records[o.record : o.record+o.records] {
			if !seen[r.name] {
				seen[r.name] = true
				l.tensors = append(l.tensors, r.name)
			}
		}
	}
}

// between returns the range of the operations that may overlap a period.
func (l *lane) between(from, to time.Duration) (first, end int) {
	first = sort.Search(len(l.ends), func(i int) bool { return l.ends[i] > from })
	end = sort.Search(len(l.ops), func(i int) bool { return l.ops[i].first >= to })
	return first, max(first, end)
}

// same passes each rank that took part in an operation to yield, with the operation's index in its lane.
func (v *Run) same(rank, index int, yield func(rank, index int)) {
	o := &v.lanes[rank].ops[index]
	name := v.lanes[rank].records[o.record].name // messages are unique only with their name
	for other, l := range v.lanes {
		i := index
		if other != rank {
			i = slices.IndexFunc(l.ops, func(p op) bool {
				return p.set == o.set && p.number == o.number && o.number > 0 && l.has(&p, name)
			})
		}
		if i >= 0 {
			yield(other, i)
		}
	}
}

// has reports whether an operation has a tensor of the given name.
func (l *lane) has(o *op, name int32) bool {
	all := l.records[o.record : o.record+o.records]
	return slices.ContainsFunc(all, func(r record) bool { return r.name == name })
}

// phase is a phase of an operation, as in package report, or late: the rank holds up all others. Two phases
// are not of operations: the program waits for a result, or is in a range.
type phase uint8

// phaseNames has the names of the phases. The first seven are those of package report.
var phaseNames = []string{"", "waiting", "negotiation", "queue", "copies", "exchange", "reduce", "other",
	"late", "result", "range"}

const (
	nothing phase = iota
	waiting
	negotiation
	queue
	copies
	exchange
	reduce
	other
	late
	waitsForResult
	inRange
	numPhases
)

// waits reports whether a phase is before the execution of the operation, or the program waits in it.
func (p phase) waits() bool { return p < copies || p == waitsForResult }

// phaseOf returns the phase to which an activity belongs.
func phaseOf(activity string) phase { return phase(slices.Index(phaseNames, report.PhaseOf(activity))) }

// segment is a part of an operation that is drawn: a phase and its time.
type segment struct {
	from, to time.Duration
	phase    phase
}

// segments passes the parts of an operation to yield. submitted is when the rank submitted the tensor for
// which the operation is drawn.
func (l *lane) segments(o *op, submitted time.Duration, yield func(segment)) {
	put := func(from, to time.Duration, p phase) {
		if to > from {
			yield(segment{from, to, p})
		}
	}
	put(submitted, max(o.waited, o.last), waiting)
	put(max(o.waited, o.last), o.granted, negotiation)
	put(o.granted, o.begun, queue)
	at := o.begun
	for _, a := range l.acts[o.act : o.act+o.acts] {
		put(at, a.begun, other)
		put(a.begun, a.end, a.phase)
		at = a.end
	}
	put(at, o.ended, other)
}
