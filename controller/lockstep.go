package controller

import (
	"slices"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
)

// Lockstep carries the requests of a Member to the Coordinator, and the decisions of the Coordinator back. It
// uses collectives that all ranks enter in every cycle (docs/negotiation.md, Lock-step), as Horovod does. All
// other frames are sent as without Lockstep. The field Lockstep must be set in the configurations of Member
// and Coordinator. A Lockstep is not safe for concurrent use.
//
// A cycle has these steps. Vectors returns two vectors, which all ranks combine by bitwise AND and OR.
// Combine accepts the results and returns gather and broadcast. If gather is true, each rank sends the result
// of Gather to rank 0. If broadcast is true, rank 0 broadcasts the result of Decide, and every rank passes it
// to Member.Step and then to Decided. If Combine returns a repeated decision, every rank passes that to
// Member.Step. Nothing may be submitted to the Member during a cycle.
//
// The combined vectors show rank 0 only for which bits every rank has voted. If a cycle does not answer a
// vote, the next cycle gathers the vote. So in lock-step the coordinator learns one cycle later which ranks
// have requested a tensor and which have not.
type Lockstep struct {
	member      *Member
	coordinator *Coordinator // nil except at rank 0
	// words is the length of the bit vector of a set in words. It is the same for all sets and at all ranks,
	// and grows with the highest bit that a decision has assigned.
	words int

	and, or  []uint64     // reused memory of Vectors
	combined []uint64     // the second combined vector
	ready    message.Bits // for all sets, the bits for which all members have voted or joined
	gathered bool         // whether this cycle has a gather
	repeats  repeats
	up       message.Up // the frame that Gather returned last
}

// These flags are bits in the first word of the vector for bitwise OR. A rank sets flagGather if it has
// something to gather. It sets flagJoined if it has unanswered votes in a set that it has joined. Then the
// rank takes part in the operations for which it has voted, and is absent from the same operations later.
const (
	flagGather = 1 << iota
	flagJoined
)

// NewLockstep returns the Lockstep of a rank. At rank 0, c is the Coordinator. At other ranks, it is nil.
func NewLockstep(m *Member, c *Coordinator) *Lockstep {
	l := &Lockstep{member: m, coordinator: c}
	l.up.Type = message.UpNews
	return l
}

// voteState holds the unanswered votes of a member in a process set. It is used only in lock-step.
type voteState struct {
	votes     message.Bits
	presented message.Bits // votes that were in the vectors of an earlier cycle
	known     message.Bits // votes that rank 0 knows
	joinKnown bool         // whether rank 0 knows that this rank has joined
}

// answered removes the vote for a bit, because the vote was answered.
func (b *voteState) answered(bit uint32) {
	b.votes.Clear(bit)
	b.presented.Clear(bit)
	b.known.Clear(bit)
}

// Vectors returns this rank's contribution to the cycle, which consists of two vectors. All ranks combine the
// first vector by bitwise AND and the second by bitwise OR. Each vector has the same length at all ranks. The
// second vector begins with one word of flags. Then both vectors contain the rank's unanswered votes in each
// set, in the order of the sets. If the rank is not a member of a set, or if rank 0 knows that it has joined
// the set, the words for that set in the first vector are all ones. The vectors are valid until the next
// call.
func (l *Lockstep) Vectors() (and, or []uint64) {
	l.and, l.or = l.and[:0], append(l.or[:0], 0)
	gather := l.gathers()
	for _, s := range l.member.sets {
		for w := range l.words {
			votes := word(s.votes, w)
			gather = gather || votes&word(s.presented, w)&^word(s.known, w) != 0
			l.or = append(l.or, votes)
			if s.me < 0 || s.joinKnown {
				if s.joinKnown && votes != 0 {
					l.or[0] |= flagJoined
				}
				votes = ^uint64(0)
			}
			l.and = append(l.and, votes)
		}
		s.presented = append(s.presented[:0], s.votes...)
	}
	if gather {
		l.or[0] |= flagGather
	}
	return l.and, l.or
}

// gathers reports whether the next cycle has to gather, apart from votes that rank 0 does not know.
func (l *Lockstep) gathers() bool {
	return l.member.news || l.coordinator != nil && l.coordinator.mustGather()
}

// mustGather reports whether the coordinator needs the next cycle, even if no rank has news.
func (c *Coordinator) mustGather() bool {
	return c.tuning != nil || len(c.sets.sets[0].founded) > 0 || c.state == stopping && !c.stopSent
}

func word(v message.Bits, w int) uint64 {
	if w < len(v) {
		return v[w]
	}
	return 0
}

// Combine accepts the combined vectors, which the caller must not change until the end of the cycle. gather
// reports whether every rank must now send a frame to rank 0. broadcast reports whether rank 0 must then
// broadcast a frame. If repeated is not nil, it is the decision of this cycle, which every rank knows without
// a broadcast. It is valid until the next cycle. The results are the same at all ranks.
func (l *Lockstep) Combine(and, or []uint64) (gather, broadcast bool, repeated *message.Down) {
	l.combined = or
	// A bit is ready if every member has voted for it or joined, and at least one member has voted for it.
	l.ready = append(l.ready[:0], and...)
	l.ready.And(or[1:])
	for i, s := range l.member.sets {
		if s.join == "" { // after a join, rank 0 gets the votes with the join, and no votes follow
			s.known.Or(l.ready[i*l.words:][:l.words])
		}
	}
	if l.coordinator != nil {
		l.coordinator.combined = l.coordinator.now
	}
	switch l.gathered = or[0]&flagGather != 0; {
	case l.gathered:
		return true, true, nil
	case !l.ready.Any():
		return false, false, nil
	}
	r := l.repeats.find(l.ready)
	if r == nil {
		return false, true, nil
	}
	if c := l.coordinator; c != nil {
		c.repeat(&r.cycle)
	}
	r.cycle.Cycle = l.member.seen + 1
	return false, false, &r.cycle
}

// Decided records that this rank has applied the decision d, which rank 0 has broadcast in this cycle.
func (l *Lockstep) Decided(d *message.Down) {
	l.repeats.decided(l.ready, l.combined[0] != 0, d, l.words) // with a flag, it may depend on more
	for i := range d.Sets {
		for _, p := range d.Sets[i].Puts {
			l.words = max(l.words, int(p.Bit/64)+1)
		}
	}
}

// Quiet reports whether no rank had votes or news in this cycle, so that the combined vectors are empty. The
// result is the same at all ranks.
func (l *Lockstep) Quiet() bool { return !message.Bits(l.combined).Any() }

// Over reports whether this rank enters no more cycles, because it has failed or was stopped. All ranks are
// stopped in the same cycle.
func (l *Lockstep) Over() bool { return l.member.state != memberRunning }

// Contributes reports whether this rank has votes or news for the next cycle.
func (l *Lockstep) Contributes() bool {
	return l.gathers() || slices.ContainsFunc(l.member.sets, func(s *memberSet) bool { return s.votes.Any() })
}

// Granted reports whether the member has grants that it has not returned yet.
func (l *Lockstep) Granted() bool { return len(l.member.grants) > 0 }

// Gather returns the frame that this rank sends to rank 0. The frame contains the rank's news and all votes
// that rank 0 does not know yet. It is valid until the next call.
func (l *Lockstep) Gather() *message.Up {
	m := l.member
	for _, s := range m.sets {
		for w := range s.votes {
			if unsent := s.votes[w] &^ word(s.known, w); unsent != 0 {
				m.up.At(s.ID).Hits.Or(append(make(message.Bits, w), unsent))
			}
		}
		s.known.Or(s.votes)
		s.joinKnown = s.join != ""
	}
	m.completeNews()
	l.up, m.up = m.up, l.up
	m.newsTaken()
	return &l.up
}

// Decide returns the decision of rank 0, which must be broadcast to all ranks. The result is valid until the
// next call. It is nil if the job has failed. ups are the gathered frames by rank, or nil if no frames were
// gathered.
func (l *Lockstep) Decide(ups []*message.Up) *message.Down {
	c := l.coordinator
	sets := c.sets.sets
	for r, up := range ups {
		c.Step(topo.Rank(r), up)
	}
	// Count the votes for the ready bits only after applying the news, because the news contain the votes of
	// ranks that join in this cycle.
	for i, s := range sets {
		c.voted(s, l.ready[i*l.words:][:l.words])
	}
	if c.leaving > 0 {
		c.checkLeavers()
	}
	if c.Closed() {
		return nil
	}
	c.sets.addFounded()
	d := c.newCycle()
	if l.gathered {
		// Without a gather, rank 0 does not know the votes for the entries that a change may erase. Also, the
		// other ranks may repeat an earlier decision.
		d.Tuning, d.Stop = c.takeTuning(), c.state == stopping
	}
	c.decideAll(d, func(i int) message.Bits {
		if i >= len(sets) {
			return nil // this cycle has added the set
		}
		return l.combined[1+i*l.words:][:l.words]
	})
	return d
}

// voted counts the votes for the given bits. Every member of the set has voted for these bits or has joined.
// voted skips votes that rank 0 has already counted.
func (c *Coordinator) voted(s *setState, bits message.Bits) {
	for bit, ok := bits.Next(0); ok; bit, ok = bits.Next(bit + 1) {
		for m, r := range s.Ranks {
			if s.joined.has(m) || s.cache.Voted(m, bit) {
				continue
			}
			if err := s.vote(m, bit, c.cycle); err != nil {
				c.failSender(r, err)
				return
			}
		}
	}
}

// newCycle returns the frame of the next cycle, without decisions about process sets.
func (c *Coordinator) newCycle() *message.Down {
	c.cycle, c.lastCycle = c.cycle+1, c.now
	d := &c.decision
	d.Reset()
	d.Type, d.Cycle, d.Reason = message.DownCycle, c.cycle, c.stopReason
	d.Ranks = append(d.Ranks, c.stopRanks...)
	return d
}

// decideAll adds the decisions about all sets to a cycle for all ranks, even if there is nothing to decide.
// The function pinned returns the bits of a set for which ranks have voted, so that the cache does not evict
// these entries.
func (c *Coordinator) decideAll(d *message.Down, pinned func(set int) message.Bits) {
	for i, s := range c.sets.sets {
		if c.sets.find(s.ID) == nil {
			continue // this cycle removes the set
		}
		s.decide(d.AddSet(s.ID), c.cycle, &c.policy, pinned(i))
		s.done = s.granted // keep the gate open, because the cycle time already batches tensors
	}
	if d.Stop {
		c.stopSent = true
		for r := range c.ranks.all {
			c.ranks.all[r].stop = c.cycle
		}
	}
}
