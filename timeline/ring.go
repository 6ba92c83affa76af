package timeline

import (
	"slices"
	"time"

	"github.com/gohvd/gohvd/internal/trace"
)

// ring keeps the records of the last seconds.
type ring struct {
	last    time.Duration // how far back records are kept
	max     int64         // cap on the bytes of text
	records []record
	head    int           // index in records of the oldest record that is kept
	size    int64         // estimated bytes of text of the records
	latest  time.Duration // the greatest time of a record
	// offset is the last measurement of the clock that was dropped, or the one that was known before the
	// first.
	offset *trace.Offset
}

// ringBytes is the most text that a ring stands for, so that the text can be written while Close waits. In
// memory it takes about a fifth of that.
const ringBytes = 256 << 20

// newRing returns an empty ring for the given seconds. If there is a cap on the bytes of the files, the ring
// takes at most half of it: record.text may underestimate.
func newRing(last time.Duration, most int64) *ring {
	r := &ring{last: last, max: ringBytes}
	if most > 0 {
		r.max = min(r.max, most/2)
	}
	return r
}

// text estimates the bytes of text that the record makes.
func (r *record) text() int64 {
	activities := int64(0)
	for i := range r.Activities {
		activities += 110 + int64(len(r.Activities[i].Name))
	}
	n := int64(100)
	for i := range r.Tensors {
		t := &r.Tensors[i]
		n += activities + 650 + 2*int64(len(t.Name)) + 60*int64(len(t.Arrivals))
		if t.Refused != nil || r.Failed != nil {
			n += 1 << 10
		}
	}
	return n
}

// add copies the records of a batch, and drops records that are too old or exceed the limit.
func (r *ring) add(b *batch) {
	for i := range b.records {
		n := b.records[i]
		n.Tensors, n.Activities = slices.Clone(n.Tensors), slices.Clone(n.Activities)
		for k := range n.Tensors {
			n.Tensors[k].Arrivals = slices.Clone(n.Tensors[k].Arrivals)
		}
		r.records = append(r.records, n)
		r.size += n.text()
		r.latest = max(r.latest, n.when())
	}
	for len(r.kept()) > 1 && (r.kept()[0].when() < r.latest-r.last || r.size > r.max) {
		r.drop(1)
	}
	if 2*r.head > len(r.records) {
		r.records = slices.Delete(r.records, 0, r.head)
		r.head = 0
	}
}

// kept returns the records, oldest first.
func (r *ring) kept() []record { return r.records[r.head:] }

// drop removes the oldest records.
func (r *ring) drop(records int) {
	for range records {
		oldest := &r.records[r.head]
		r.size -= oldest.text()
		if oldest.offset != nil {
			r.offset = oldest.offset
		}
		*oldest = record{}
		r.head++
	}
}
