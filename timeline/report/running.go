package report

import (
	"cmp"
	"slices"
	"time"

	"github.com/gohvd/gohvd/internal/live"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
)

// OfRecords returns a running job of which ranks have recorded the given operations. If there are none, it is
// a job without operations. The entries must not change until the job is not used any more.
func OfRecords(size int, all []*live.Records) *Job {
	j := &Job{size: size, running: true}
	for _, r := range all {
		s := &source{entries: r.Entries, rank: r.Rank, size: size, host: clip(r.Host), domain: r.Clock.Domain,
			epoch: int64(r.Epoch), segment: 1, monotonic: int64(r.Clock.Monotonic),
			start: r.Clock.Start.UnixMicro()}
		for _, o := range r.Offsets {
			s.points = append(s.points, clockPoint{int64(o.At), int64(o.Offset), int64(max(o.Error, 0))})
		}
		for i := range r.Entries {
			if r.Entries[i].Step != nil {
				s.steps++
			}
		}
		for _, set := range r.Sets {
			s.about.Sets = append(s.about.Sets, ProcessSet(set))
		}
		slices.SortFunc(s.about.Sets, func(a, b ProcessSet) int { return cmp.Compare(a.ID, b.ID) })
		j.ranks = append(j.ranks, &rankFiles{rank: r.Rank, segments: []*source{s}})
	}
	if len(j.ranks) == 0 {
		j.ranks = []*rankFiles{{segments: []*source{{size: size, segment: 1}}}}
	}
	slices.SortFunc(j.ranks, func(a, b *rankFiles) int { return cmp.Compare(a.rank, b.rank) })
	j.setClocks()
	return j
}

// recorded passes the recorded operations of a source to yield until yield returns false, and reports whether
// it has not.
func (r *rankReader) recorded(s *source, yield func(*operation) bool) bool {
	for i := range s.entries {
		switch e := &s.entries[i]; {
		case e.Step != nil:
			r.mark(mark{at: r.reference(stamp(e.Step.At)), step: e.Step.Number})
		case e.Span != nil:
			r.mark(mark{isSpan: true, span: trace.Span{Kind: e.Span.Kind, Name: clip(e.Span.Name),
				Begun: r.reference(stamp(e.Span.Begun)), End: r.reference(stamp(e.Span.End))}})
		case e.Operation != nil && !slices.ContainsFunc(e.Operation.Records, notSubmitted):
			if !yield(r.ofEntry(e, s.size)) {
				return false
			}
		}
	}
	return true
}

// notSubmitted reports whether the rank has not submitted a tensor, because it has joined. A file has no
// events for such a tensor either.
func notSubmitted(n trace.Record) bool { return n.Submitted == 0 }

// ofEntry returns the operation of an entry with times on rank 0's clock. All its tensors have the same
// arrivals. If there are more than size, the number of ranks, it has none: no process set has more members,
// and each tensor gets a copy of them.
func (r *rankReader) ofEntry(e *live.Entry, size int) *operation {
	op, o := e.Operation, r.fresh()
	o.fused = int64(len(op.Records))
	o.Records, o.Activities = append(o.Records[:0], op.Records...), append(o.Activities, op.Activities...)
	arrivals := e.Arrivals
	if len(arrivals) > size {
		arrivals = nil
	}
	o.Arrivals = append(o.Arrivals[:0], arrivals...)
	convert := func(t *time.Duration) {
		if *t != 0 {
			*t = r.reference(stamp(*t))
		}
	}
	for i := range o.Records {
		n := &o.Records[i]
		n.Name, n.Error, n.Peer = clip(n.Name), clip(n.Error), max(n.Peer, topo.Rank(-1))
		convert(&n.Submitted)
		convert(&n.Sent)
		convert(&n.Granted)
		convert(&n.Begun)
		convert(&n.Ended)
	}
	for i := range o.Activities {
		convert(&o.Activities[i].Begun)
		convert(&o.Activities[i].End)
	}
	for i := range o.Arrivals {
		convert(&o.Arrivals[i])
	}
	for range len(o.Records) - 1 {
		o.Arrivals = append(o.Arrivals, o.Arrivals[:len(arrivals)]...)
	}
	return o
}
