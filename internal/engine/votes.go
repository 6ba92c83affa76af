package engine

import (
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/tensorqueue"
)

// votes is a table of submitted entries, indexed by their cache bits. With it, the engine finds the entries
// of a large grant without looking up each name.
type votes []*tensorqueue.Entry

// add stores e under its cache bit. The caller must have looked up e's request in the response cache, which
// sets the bit.
func (v *votes) add(e *tensorqueue.Entry) {
	for int(e.Request.Bit) >= len(*v) {
		*v = append(*v, nil)
	}
	(*v)[e.Request.Bit] = e
}

// take removes and returns the entry with the given bit if that entry belongs to r. Otherwise it returns nil.
func (v votes) take(bit uint32, r *message.Response) *tensorqueue.Entry {
	if int64(bit) >= int64(len(v)) || v[bit] == nil {
		return nil
	}
	e := v[bit]
	if q := &e.Request; q.Hit != r && q.Name != r.Name {
		return nil
	}
	v[bit] = nil
	return e
}

// drop removes e from the table, so that the memory that e refers to can be freed. e may be nil.
func (v votes) drop(e *tensorqueue.Entry) {
	if e != nil && int64(e.Request.Bit) < int64(len(v)) && v[e.Request.Bit] == e {
		v[e.Request.Bit] = nil
	}
}
