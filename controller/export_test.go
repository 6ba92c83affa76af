package controller

import (
	"time"

	"github.com/gohvd/gohvd/internal/topo"
)

// These constants are internal periods and timeouts that tests need.
const (
	HeartbeatPeriod = heartbeatPeriod
	SuspectGrace    = suspectGrace
	VerdictTimeout  = verdictTimeout
	CloseTimeout    = closeTimeout
)

// Never is the time that Next returns if no turn is due.
const Never time.Duration = never

// CachedAndRequested returns a name that is both in the cache of the set and in its request table. It returns
// "" if there is none, as there should be.
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

// Rows returns the number of tensors of the set for which the coordinator keeps requests in full.
func (c *Coordinator) Rows(id topo.ProcessSetID) int { return len(c.sets.find(id).rows) }

// RememberedSets returns the number of removed sets that the coordinator still keeps because requests for
// them may arrive.
func (c *Coordinator) RememberedSets() int { return len(c.sets.removed) }

// Remembered returns the number of erased cache entries of the set that the coordinator still keeps because
// late votes for them may arrive.
func (c *Coordinator) Remembered(id topo.ProcessSetID) int {
	if s := c.sets.find(id); s != nil {
		return s.cache.Remembered()
	}
	return 0
}
