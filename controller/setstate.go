package controller

import (
	"fmt"

	"github.com/gohvd/gohvd/fusion"
	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/responsecache"
)

// Planner chooses who runs a response and how. It must be pure. An error becomes the answer to the request.
type Planner func(r *message.Response, numBytes int64) (message.Backend, message.Algorithm, error)

// setState is the controller of one process set inside the coordinator.
type setState struct {
	Set
	cache *responsecache.Primary
	// table has the requests in full that are not granted yet, by name.
	table map[string]*tableRow
	// ready is what every member asked for and nobody was granted, in the order of the completing votes.
	ready []readyItem
	// granted and done count responses; done those that the lowest rank has finished.
	granted, done uint64

	// Scratch of plan.
	responses []*message.Response
	groups    [][]int
}

type tableRow struct {
	requests []message.Request // by member; Kind is NoKind where none came yet
	count    int
}

// readyItem is a response to grant. If cached, bit stands for it.
type readyItem struct {
	response *message.Response
	cached   bool
	bit      uint32
}

func newSetState(s Set, cacheCapacity int) *setState {
	return &setState{
		Set:   s,
		cache: responsecache.NewPrimary(cacheCapacity, len(s.Ranks)),
		table: make(map[string]*tableRow),
	}
}

// vote counts a member's vote for bit, cast when it had seen the given cycle. An error is the member's.
func (s *setState) vote(member int, bit uint32, seen uint64) error {
	late, complete, err := s.cache.Vote(member, bit, seen)
	switch {
	case err != nil:
		return err
	case late != nil:
		return s.request(member, *late)
	case complete:
		s.ready = append(s.ready, readyItem{response: s.cache.At(bit), cached: true, bit: bit})
	}
	return nil
}

// request counts a member's request in full. An error is the member's.
func (s *setState) request(member int, q message.Request) error {
	// No name is both cached and in the table: the votes for it are requests from now on.
	if bit, ok := s.cache.BitOf(q.Name); ok {
		if s.cache.Voted(member, bit) {
			return fmt.Errorf("request for %v %q, for which its vote is not answered", q.Kind, q.Name)
		}
		if err := s.invalidate(bit); err != nil {
			return err
		}
	}
	row := s.table[q.Name]
	if row == nil {
		row = &tableRow{requests: make([]message.Request, len(s.Ranks))}
		s.table[q.Name] = row
	}
	if row.requests[member].Kind != message.NoKind {
		return fmt.Errorf("second request for %v %q, which is not answered", q.Kind, q.Name)
	}
	row.requests[member] = q
	if row.count++; row.count == len(s.Ranks) {
		s.ready = append(s.ready, readyItem{response: agree(&s.Set, row.requests)})
	}
	return nil
}

// invalid erases bit, because a member that had seen the given cycle submits its tensor with other parameters. If it
// is erased already there is nothing to do. An error is the member's.
func (s *setState) invalid(member int, bit uint32, seen uint64) error {
	name, current, err := s.cache.NameAt(bit, seen)
	switch {
	case err != nil:
		return err
	case !current:
		return nil
	case s.cache.Voted(member, bit):
		return fmt.Errorf("bit %d, %q, is invalid, for which its vote is not answered", bit, name)
	}
	return s.invalidate(bit)
}

// invalidate erases bit and makes requests of the votes for it. Not every member has voted: a response that
// waits for the gate keeps its bit.
func (s *setState) invalidate(bit uint32) error {
	for _, l := range s.cache.Invalidate(bit) {
		if err := s.request(l.Member, l.Request); err != nil {
			return err
		}
	}
	return nil
}

// open is the gate: votes are matched while responses execute, and granted together when all but one are
// finished. Without it every tensor would be granted alone as its last vote arrives.
func (s *setState) open() bool { return s.granted-s.done <= 1 }

// decide grants everything that is ready, as news of the given cycle in d. Entries of pinned keep their
// bits (Lockstep: votes that only other ranks know).
func (s *setState) decide(d *message.DownSet, cycle uint64, thresholdBytes int64, plan Planner, pinned message.Bits) {
	s.responses = s.responses[:0]
	for _, item := range s.ready {
		s.responses = append(s.responses, item.response)
		if !item.cached {
			delete(s.table, item.response.Name)
		}
	}
	s.groups = fusion.Plan(s.groups[:0], s.responses, thresholdBytes)
	for _, group := range s.groups {
		s.grant(d, group, plan)
	}
	clear(s.ready)
	s.ready = s.ready[:0]
	clear(s.responses)
	// Bits are given only after all grants have made their entries the most recent, so that a put evicts what was
	// granted in the same cycle last.
	for g := range d.Grants {
		for t, r := range d.Grants[g].Full {
			if bit, ok := s.cache.Assign(r, cycle, pinned); ok {
				d.Puts = append(d.Puts, message.Put{Grant: uint32(g), Tensor: uint32(t), Bit: bit})
			}
		}
	}
	d.Erase = s.cache.Issue(cycle, d.Erase)
}

// grant adds one fused response to d.
func (s *setState) grant(d *message.DownSet, group []int, plan Planner) {
	first := s.ready[group[0]].response
	backend, algorithm := message.NoBackend, message.NoAlgorithm
	if first.Kind != message.Error && first.Kind != message.Barrier {
		var numBytes int64
		for _, i := range group {
			numBytes += s.ready[i].response.NumBytes()
		}
		var err error
		if backend, algorithm, err = plan(first, numBytes); err != nil {
			s.refuse(d, group, err)
			return
		}
	}
	g := d.AddGrant()
	g.Backend, g.Algorithm = backend, algorithm
	for _, i := range group {
		if item := s.ready[i]; item.cached {
			g.Bits = append(g.Bits, item.bit)
			s.cache.Granted(item.bit)
		} else {
			g.Full = append(g.Full, item.response)
		}
	}
	s.granted++
}

// refuse answers each tensor of a group with an error, because no backend can run it.
func (s *setState) refuse(d *message.DownSet, group []int, reason error) {
	for _, i := range group {
		item := s.ready[i]
		if item.cached {
			s.cache.Granted(item.bit)
		}
		r := item.response
		g := d.AddGrant()
		g.Full = append(g.Full, &message.Response{
			Kind: message.Error, Name: r.Name, Text: fmt.Sprintf("%v %q: %v", r.Kind, r.Name, reason),
		})
		s.granted++
	}
}
