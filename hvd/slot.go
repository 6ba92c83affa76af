package hvd

import (
	"slices"
	"sync"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/tensorqueue"
)

// slot is a tensorqueue.Entry that is reused. It is four times as large as the rest of a handle, and the
// program may keep a handle for long after the operation.
type slot struct {
	entry tensorqueue.Entry
	of    interface{ finished(err error) }
	pool  *sync.Pool
	// parts describes the last group, which the next group mostly equals. draft is the description that is
	// being built. A description that was submitted is not changed afterwards, because the response cache may
	// keep it.
	parts, draft message.Parts
}

// slots holds the free slots of an engine, for single tensors and for groups that are one request. They
// belong to the engine, so each entry is only ever in the queue of one engine.
type slots struct{ single, group sync.Pool }

// take returns an empty slot of a pool. It calls of.finished when the operation ends.
func take(pool *sync.Pool, of interface{ finished(err error) }) *slot {
	s, ok := pool.Get().(*slot)
	if !ok {
		s = &slot{pool: pool}
		s.entry.Done = s.done
	}
	s.of = of
	return s
}

// done implements the Done callback of the entry.
func (s *slot) done(err error) { s.of.finished(err) }

// free returns s, whose operation is done, to its pool. A slot that was not submitted, because the call was
// wrong, is left to the garbage collector.
func (s *slot) free() {
	clear(s.entry.Parts)
	s.of, s.entry = nil, tensorqueue.Entry{Done: s.entry.Done, Parts: s.entry.Parts[:0]}
	s.pool.Put(s)
}

// drafted returns the parts in draft, in memory that nobody changes afterwards.
func (s *slot) drafted() message.Parts {
	if !s.draft.Equal(s.parts) {
		s.parts = slices.Clone(s.draft)
	}
	return s.parts
}
