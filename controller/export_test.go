package controller

import (
	"time"

	"github.com/gohvd/gohvd/internal/topo"
)

// Internal state that tests of invariants check.
const (
	HeartbeatPeriod = heartbeatPeriod
	SuspectGrace    = suspectGrace
	VerdictTimeout  = verdictTimeout
	CloseTimeout    = closeTimeout
)

// Never is the result of Next if no turn is due.
const Never time.Duration = never

// CachedAndRequested returns a name of the set that is both cached and in the request table, or empty.
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

// Rows returns the number of tensors of the set with requests in full.
func (c *Coordinator) Rows(id topo.ProcessSetID) int { return len(c.sets.find(id).rows) }

// RememberedSets returns the number of removed sets for which requests may still arrive.
func (c *Coordinator) RememberedSets() int { return len(c.sets.removed) }

// Remembered returns the number of erased entries of the set that late votes can still mean.
func (c *Coordinator) Remembered(id topo.ProcessSetID) int {
	if s := c.sets.find(id); s != nil {
		return s.cache.Remembered()
	}
	return 0
}
