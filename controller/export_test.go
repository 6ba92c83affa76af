package controller

import (
	"time"

	"github.com/gohvd/gohvd/topo"
)

// What tests of invariants look at from inside.
const (
	HeartbeatPeriod = heartbeatPeriod
	SuspectGrace    = suspectGrace
	VerdictTimeout  = verdictTimeout
	CloseTimeout    = closeTimeout
)

// Never is what Next says when nothing is wanted.
const Never time.Duration = never

// CachedAndRequested is a name of the set that is both cached and in the request table, or empty.
func (c *Coordinator) CachedAndRequested(id topo.ProcessSetID) string {
	for _, s := range c.sets {
		if s.ID != id {
			continue
		}
		for name := range s.table {
			if _, ok := s.cache.BitOf(name); ok {
				return name
			}
		}
	}
	return ""
}

// Remembered is the number of erased entries of the set that late votes can still mean.
func (c *Coordinator) Remembered(id topo.ProcessSetID) int {
	for _, s := range c.sets {
		if s.ID == id {
			return s.cache.Remembered()
		}
	}
	return 0
}
