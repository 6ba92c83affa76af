package hvd

import (
	"slices"
	"sync"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/tensorqueue"
)

// slot holds a tensorqueue.Entry and is reused for one operation after another. It is not part of the handle:
// an entry is four times as large as the rest of a handle, and the program may keep the handle long after the
// operation.
type slot struct {
	entry tensorqueue.Entry
	of    interface{ finished(err error) }
	pool  *sync.Pool
	// parts is the description of the last group that used this slot. It is kept because the next group
	// usually has the same description. draft is the description that is being built. A description that was
	// submitted is not changed afterwards, because the response cache may keep it.
	parts, draft message.Parts
}

// slots holds the free slots of an engine, in one pool for single tensors and one for groups that are one
// request. Each engine has its own slots, so that an entry is never in the queues of two engines.
type slots struct{ single, group sync.Pool }

// take returns an empty slot from pool. When the operation of the slot ends, the slot calls of.finished, a
// method of its owner.
func take(pool *sync.Pool, of interface{ finished(err error) }) *slot {
	s, ok := pool.Get().(*slot)
	if !ok {
		s = &slot{pool: pool}
		s.entry.Done = s.done
	}
	s.of = of
	return s
}

// done implements the Done callback of the entry. It passes the result to the owner of the slot.
func (s *slot) done(err error) { s.of.finished(err) }

// free returns s to its pool. The operation of s must be done. If a call was wrong and so its slot was not
// submitted, the slot is not freed but left to the garbage collector.
func (s *slot) free() {
	clear(s.entry.Parts)
	s.of, s.entry = nil, tensorqueue.Entry{Done: s.entry.Done, Parts: s.entry.Parts[:0]}
	s.pool.Put(s)
}

// drafted returns a description equal to draft that will never be changed. It returns parts if that is equal
// to draft, and else makes a copy of draft.
func (s *slot) drafted() message.Parts {
	if !s.draft.Equal(s.parts) {
		s.parts = slices.Clone(s.draft)
	}
	return s.parts
}
