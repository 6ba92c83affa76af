package hvd

import (
	"slices"
	"sync"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/tensorqueue"
)

// slot is an entry that is used again. It is four times as large as the rest of a handle, which the program keeps for as long as it
// likes.
type slot struct {
	entry tensorqueue.Entry
	of    interface{ finished(err error) }
	pool  *sync.Pool
	// parts are those of the last group, which is mostly the next, and draft is where they are put together. What was submitted is
	// not changed any more: it may be kept as what the ranks have agreed on.
	parts, draft message.Parts
}

// slots are the free ones of an engine, of single tensors and of groups that are one request. They stay with it, so that no queue but
// its own has ever had their entries.
type slots struct{ single, group sync.Pool }

// take is an empty slot of a pool, whose end of hears.
func take(pool *sync.Pool, of interface{ finished(err error) }) *slot {
	s, ok := pool.Get().(*slot)
	if !ok {
		s = &slot{pool: pool}
		s.entry.Done = s.done
	}
	s.of = of
	return s
}

// done is the Done of the entry.
func (s *slot) done(err error) { s.of.finished(err) }

// free gives back s, which is done. One that is not submitted, because the call is wrong, is left to the garbage collector.
func (s *slot) free() {
	clear(s.entry.Parts)
	s.of, s.entry = nil, tensorqueue.Entry{Done: s.entry.Done, Parts: s.entry.Parts[:0]}
	s.pool.Put(s)
}

// drafted are the parts in draft.
func (s *slot) drafted() message.Parts {
	if !s.draft.Equal(s.parts) {
		s.parts = slices.Clone(s.draft)
	}
	return s.parts
}
