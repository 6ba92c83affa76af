package timeline

import (
	"iter"
	"slices"
	"time"

	"github.com/gohvd/gohvd/internal/trace"
)

// ring keeps the records of the last seconds.
type ring struct {
	last    time.Duration
	max     int64 // of text
	batches []kept
	size    int64
	latest  time.Duration
	// offset is the last measurement of the clock that was dropped, or what was known before any; known says that there is one.
	offset trace.Offset
	known  bool
}

// ringBytes is the most text that a ring stands for, so that it can be written while Close waits. It takes about a fifth in memory.
const ringBytes = 256 << 20

// newRing leaves half of the cap, if there is one, for what it underestimates.
func newRing(last time.Duration, most int64) *ring {
	r := &ring{last: last, max: ringBytes}
	if most > 0 {
		r.max = min(r.max, most/2)
	}
	return r
}

// kept is a batch that takes no more memory than it needs, and about how much text it makes.
type kept struct {
	*batch
	latest time.Duration
	size   int64
}

// add copies a batch, and drops those that are too old or too much.
func (r *ring) add(b *batch) {
	if len(b.entries) == 0 {
		return
	}
	k := kept{batch: &batch{
		entries: slices.Clone(b.entries), tensors: slices.Clone(b.tensors),
		activities: slices.Clone(b.activities), arrivals: slices.Clone(b.arrivals),
	}}
	t, a := 0, 0
	for i := range b.entries {
		e := &b.entries[i]
		k.latest = max(k.latest, e.when())
		var activities int64
		for _, x := range b.activities[a:][:e.activities] {
			activities += 110 + int64(len(x.Name))
		}
		k.size += 100
		for _, n := range b.tensors[t:][:e.tensors] {
			k.size += activities + 650 + 2*int64(len(n.name)+len(n.refused)+len(e.failed)) + 60*int64(n.arrivals)
		}
		t, a = t+int(e.tensors), a+int(e.activities)
	}
	r.batches = append(r.batches, k)
	r.size += k.size
	r.latest = max(r.latest, k.latest)
	drop := 0
	for drop < len(r.batches)-1 && (r.batches[drop].latest < r.latest-r.last || r.size > r.max) {
		r.size -= r.batches[drop].size
		for _, e := range r.batches[drop].entries {
			if e.what == anOffset {
				r.offset, r.known = e.offset(), true
			}
		}
		drop++
	}
	r.batches = slices.Delete(r.batches, 0, drop)
}

// shorten puts what is left of the oldest batch in its place.
func (r *ring) shorten(rest *batch) {
	if len(rest.entries) > 0 {
		r.batches[0].batch = rest
		return
	}
	r.size -= r.batches[0].size
	r.batches[0] = kept{}
	r.batches = r.batches[1:]
}

// operations is how many records there are.
func (r *ring) operations() (n int) {
	for _, k := range r.batches {
		n += k.operations()
	}
	return n
}

// when is the time that says whether a record is still wanted.
func (e *entry) when() time.Duration {
	if e.what == anOperation {
		return e.ended
	}
	return e.at
}

// all gives the batches, without the records that are too old but for measurements of the clock.
func (r *ring) all() iter.Seq[*batch] {
	return func(yield func(*batch) bool) {
		for _, k := range r.batches {
			if !yield(k.since(r.latest - r.last)) {
				return
			}
		}
	}
}

// since is what has ended at a time or later.
func (b *batch) since(from time.Duration) *batch {
	if len(b.entries) > 0 && b.entries[0].when() >= from {
		return b
	}
	n := &batch{}
	var at cursor
	for i := range b.entries {
		e := &b.entries[i]
		tensors := b.tensors[at.tensor:][:e.tensors]
		activities := b.activities[at.activity:][:e.activities]
		arrivals := 0
		for i := range tensors {
			arrivals += int(tensors[i].arrivals)
		}
		if e.when() >= from || e.what == anOffset {
			n.entries = append(n.entries, *e)
			n.tensors = append(n.tensors, tensors...)
			n.activities = append(n.activities, activities...)
			n.arrivals = append(n.arrivals, b.arrivals[at.arrival:][:arrivals]...)
		}
		at.tensor, at.activity, at.arrival = at.tensor+len(tensors), at.activity+len(activities), at.arrival+arrivals
	}
	return n
}
