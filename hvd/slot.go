package hvd

import (
	"sync"

	"github.com/gohvd/gohvd/tensorqueue"
)

// slot is an entry that is used again. It is four times as large as the rest of a handle, which the program keeps for as long as it
// likes.
type slot struct {
	entry tensorqueue.Entry
	of    interface{ finished(err error) }
	pool  *slots
}

// slots are the free ones of an engine. They stay with it, so that no queue but its own has ever had their entries.
type slots struct{ pool sync.Pool }

// take is an empty slot, whose end of hears.
func (p *slots) take(of interface{ finished(err error) }) *slot {
	s, ok := p.pool.Get().(*slot)
	if !ok {
		s = &slot{pool: p}
		s.entry.Done = s.done
	}
	s.of = of
	return s
}

// done is the Done of the entry.
func (s *slot) done(err error) { s.of.finished(err) }

// free gives back s, which is done. One that is not submitted, because the call is wrong, is left to the garbage collector.
func (s *slot) free() {
	s.of, s.entry = nil, tensorqueue.Entry{Done: s.entry.Done}
	s.pool.pool.Put(s)
}
