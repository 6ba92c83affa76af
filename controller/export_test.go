package controller

import (
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
)

// These are internal durations of the package that tests need.
const (
	HeartbeatPeriod = heartbeatPeriod
	SuspectGrace    = suspectGrace
	VerdictTimeout  = verdictTimeout
	CloseTimeout    = closeTimeout
)

// CachedAndRequested returns a name that is both in the cache of a set and in its request table, or "" if
// there is none. The coordinator must never let a name be in both.
func (c *Coordinator) CachedAndRequested(id topo.ProcessSetID) string {
	if s := c.sets.find(id); s != nil {
		for name := range s.table {
			if _, ok := s.cache.BitOf(name); ok {
				return name
			}
		}
	}
	return ""
}

// SetWords sets the length of the bit vector of a set, as if a decision had assigned a bit of its last word.
func (l *Lockstep) SetWords(n int) { l.words = n }

// Forget makes the rank forget all decisions, so that rank 0 decides the next cycle.
func (l *Lockstep) Forget() { l.repeats = repeats{} }

// Counters returns, for each set, the number of grants, how many of them are done and the number of arrival
// times that are kept, and then the time of the last cycle.
func (c *Coordinator) Counters() (all []uint64) {
	for _, s := range c.sets.sets {
		all = append(all, s.granted, s.done, uint64(len(s.arrivals.granted)))
	}
	return append(all, uint64(c.lastCycle))
}

// Rows returns the number of tensors of a set for which the coordinator has full requests.
func (c *Coordinator) Rows(id topo.ProcessSetID) int { return len(c.sets.find(id).rows) }

// RememberedSets returns the number of removed sets that the coordinator remembers because requests for them
// may still arrive.
func (c *Coordinator) RememberedSets() int { return len(c.sets.removed) }

// Remembered returns the number of erased cache entries of a set that the coordinator remembers because votes
// for them may still arrive.
func (c *Coordinator) Remembered(id topo.ProcessSetID) int {
	if s := c.sets.find(id); s != nil {
		return s.cache.Remembered()
	}
	return 0
}

// Remembered returns the number of erased cache entries of a set that the leader remembers because votes for
// them may still arrive.
func (c *Combiner) Remembered(id topo.ProcessSetID) int { return len(c.set(id).erasures) }

// DistinctRequests returns the number of requests that the coordinator keeps for a tensor of the global set.
func (c *Coordinator) DistinctRequests(name string) int {
	kept := make(map[*message.Request]struct{})
	for _, q := range c.sets.find(topo.Global).table[name].requests {
		if q != nil {
			kept[q] = struct{}{}
		}
	}
	return len(kept)
}
