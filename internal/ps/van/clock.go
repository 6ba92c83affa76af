package van

import (
	"errors"
	"fmt"
	"math"

	"github.com/gohvd/gohvd/internal/ps/pspb"
)

// noMore is the clock of a worker that ends no more iterations.
const noMore = math.MaxInt64

// tick is a worker that waits until all workers have ended least iterations.
type tick struct {
	entry
	id    int
	least int64
}

// clock handles the message of a worker that it has ended an iteration.
func (s *scheduler) clock(l *link, h *pspb.Header) {
	id := s.van.members.nodeOf(l.peer, h.CustomerId)
	t := tick{entry{l, h.CustomerId, h.Control.Barrier}, id, h.Control.Clock - int64(s.van.cfg.Staleness)}
	if RoleOf(id) != Worker || s.van.cfg.Staleness < 0 {
		t.answer(fmt.Sprintf("%s has no clock", Name(id)), nil)
		return
	}
	s.mu.Lock()
	s.clocks[id] = max(s.clocks[id], h.Control.Clock)
	place := [2]int{0, id} // 0 is no group
	switch {
	case h.Control.Withdraw:
		s.withdrawn[place] = max(s.withdrawn[place], t.barrier)
		if s.ticks[id].entry == t.entry {
			t.answer(notHere(s.behind(s.ticks[id].least)), nil)
			delete(s.ticks, id)
		}
	case t.barrier > s.withdrawn[place]:
		s.ticks[id] = t
	}
	s.mu.Unlock()
	s.advance()
}

// left records that nodes end no more iterations, because they have left the job.
func (s *scheduler) left(nodes []*pspb.Node) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range nodes {
		s.clocks[int(n.Id)] = noMore
	}
}

// advance answers the workers that need not wait any longer: no worker is too far behind, or one that is has
// died.
func (s *scheduler) advance() {
	type failure struct {
		tick
		dead *pspb.Node
	}
	var failed []failure
	s.mu.Lock()
	slowest, dead := int64(noMore), make(map[int]*pspb.Node)
	for _, id := range Members(GroupWorkers, 0, s.van.cfg.NumWorkers) {
		slowest = min(slowest, s.clocks[id])
		if n := s.van.members.goneNode(id); n != nil && n.Gone != ErrLeft.Error() {
			dead[id] = n
		}
	}
	for id, t := range s.ticks {
		if t.least <= slowest {
			t.answer("", nil)
			delete(s.ticks, id)
			continue
		}
		for other, n := range dead {
			if s.clocks[other] < t.least {
				failed = append(failed, failure{t, n})
				delete(s.ticks, id)
				break
			}
		}
	}
	s.waitFor(0, s.missing(0))
	s.mu.Unlock()
	for _, f := range failed {
		s.van.blames.blame(processOf(f.dead), errors.New(f.dead.Gone))
		f.answer("", f.dead)
	}
}
