package controller

import (
	"time"

	"github.com/gohvd/gohvd/internal/topo"
)

// These are internal durations of the package that tests need.
const (
	HeartbeatPeriod = heartbeatPeriod
	SuspectGrace    = suspectGrace
	VerdictTimeout  = verdictTimeout
	CloseTimeout    = closeTimeout
)

// Never is the time that Next returns if no turn is due.
const Never time.Duration = never

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
