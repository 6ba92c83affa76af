package controller

import (
	"math/bits"
	"slices"

	"github.com/gohvd/gohvd/internal/message"
)

// repeats remembers decisions of rank 0 in lock-step (docs/negotiation.md, Repeated decisions). Without a
// gather, the decision usually depends only on the bits that are ready. If the same bits are ready again,
// every rank knows the decision, and rank 0 need not broadcast it. All ranks remember the same decisions,
// because they apply the same cycles.
type repeats struct {
	slots []remembered
	// era is the era of the decisions that are valid. A new era begins after a decision that may have changed
	// the cache, the settings or the tensors that the coordinator holds.
	era uint64
	// plain is set if the last decision only granted the bits that were ready, and all of them.
	plain bool
}

// remembered is a decision that grants the bits of ready, and does nothing else. The cycle has no number, and
// no sets without grants.
type remembered struct {
	era   uint64
	ready message.Bits
	cycle message.Down
}

const (
	// numRepeats is the number of decisions that a rank can remember.
	numRepeats = 256
	// maxRepeatWords bounds the memory for the bits of these decisions to 16 MiB. In a cycle with longer
	// vectors, a broadcast takes little of the time.
	maxRepeatWords = 8192
)

// slot returns the slot for the decision about the given bits.
func (r *repeats) slot(ready message.Bits) *remembered {
	if r.slots == nil {
		r.slots = make([]remembered, numRepeats)
	}
	var h uint64
	for i, w := range ready {
		if w != 0 {
			h = (h ^ w ^ uint64(i)) * 0x9e3779b97f4a7c15
			h ^= h >> 32
		}
	}
	return &r.slots[h%numRepeats]
}

// find returns the decision about the given bits, or nil if this rank does not remember it.
func (r *repeats) find(ready message.Bits) *remembered {
	s := r.slot(ready)
	if s.era != r.era || !slices.Equal(s.ready, ready) {
		return nil
	}
	return s
}

// decided remembers d, the decision about the given bits, if it can be repeated. more is set if the decision
// may depend on more than these bits. words is the length of the vector of a set.
func (r *repeats) decided(ready message.Bits, more bool, d *message.Down, words int) {
	before := r.plain
	more = more || len(ready) > maxRepeatWords
	r.plain = !more && grantsOnly(d, ready, words)
	if !r.plain {
		r.era++
		return
	}
	if !before {
		return // some of the tensors may have been held, and so be granted in another order than next time
	}
	s := r.slot(ready)
	s.era, s.ready = r.era, append(s.ready[:0], ready...)
	s.cycle.Reset()
	s.cycle.Type = message.DownCycle
	for i := range d.Sets {
		if len(d.Sets[i].Grants) == 0 {
			continue
		}
		set := s.cycle.AddSet(d.Sets[i].Set)
		for _, g := range d.Sets[i].Grants {
			to := set.AddGrant()
			to.Backend, to.Algorithm, to.Bits = g.Backend, g.Algorithm, append(to.Bits, g.Bits...)
		}
	}
}

// grantsOnly reports whether d only grants the given bits to all members of their sets, and grants all of
// them.
func grantsOnly(d *message.Down, ready message.Bits, words int) bool {
	if d.Stop || d.Tuning != nil || len(d.Sets)*words != len(ready) {
		return false
	}
	left := 0
	for _, w := range ready {
		left += bits.OnesCount64(w)
	}
	for i := range d.Sets {
		s, own := &d.Sets[i], ready[i*words:][:words]
		if len(s.Erase) > 0 || len(s.Puts) > 0 {
			return false
		}
		for j := range s.Grants {
			g := &s.Grants[j]
			if len(g.Absent) > 0 || len(g.Full) > 0 {
				return false
			}
			for _, bit := range g.Bits {
				if !own.Has(bit) {
					return false
				}
			}
			left -= len(g.Bits)
		}
	}
	return left == 0
}

// repeat records that all ranks repeat d as the decision of the next cycle. That has the same effect as to
// count their votes and to decide. No rank was late, and no vote for the bits of d was counted before.
func (c *Coordinator) repeat(d *message.Down) {
	c.cycle, c.lastCycle = c.cycle+1, c.now
	for i := range d.Sets {
		s := c.sets.find(d.Sets[i].Set)
		for j := range d.Sets[i].Grants {
			s.repeat(d.Sets[i].Grants[j].Bits)
		}
	}
}

// repeat grants the tensors of the given bits together, as an earlier cycle has done.
func (s *setState) repeat(bits []uint32) {
	for _, bit := range bits {
		s.cache.Granted(bit)
	}
	if s.waits.trace && s.index(0) >= 0 {
		for range len(bits) * len(s.Ranks) {
			s.arrivals.granted = append(s.arrivals.granted, max(s.waits.now, 1))
		}
	}
	s.granted++
	s.done = s.granted // as in decideAll
}
