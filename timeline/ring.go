package timeline

import (
	"slices"
	"time"

	"github.com/gohvd/gohvd/internal/trace"
)

// ring keeps the most recent records in memory.
type ring struct {
	last    time.Duration // the length of the period that the ring covers; older records are dropped
	max     int64         // the limit for size, in bytes
	records []record
	head    int           // the index in records of the oldest record in the ring
	size    int64         // the estimated size of the records as text, in bytes
	latest  time.Duration // the greatest time of any record so far
	// offset is the last clock measurement before the oldest record in the ring. It was dropped from the
	// ring, or was known when the ring was made.
	offset *trace.Offset
}

// ringBytes limits the size of the records of a ring as text, so that Close can write the text within its
// timeout. In memory the records take about a fifth of this size.
const ringBytes = 256 << 20

// newRing returns an empty ring. The ring keeps the most recent records, and the parameter last is the length
// of the period that they cover. most is the limit for the bytes of the files, or 0 if there is no limit. The
// size of the ring is limited to half of most, because record.text may underestimate the size of a record.
func newRing(last time.Duration, most int64) *ring {
	r := &ring{last: last, max: ringBytes}
	if most > 0 {
		r.max = min(r.max, most/2)
	}
	return r
}

// text estimates the size of the record as text, in bytes.
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

// add copies the records of a batch into the ring. Then it drops the oldest records until no record is too
// old and the ring is within its limit. It always keeps the newest record.
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

// kept returns the records in the ring, from oldest to newest.
func (r *ring) kept() []record { return r.records[r.head:] }

// drop removes the given number of oldest records.
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
