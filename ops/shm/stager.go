package shm

import (
	"time"

	"github.com/gohvd/gohvd/internal/kernel"
)

// A stager copies data to memory that peers read and that this rank has written before.
//
// Peers have read the old content, so their caches have its lines, and a store must first invalidate these.
// How long that takes depends on where the cores of the ranks are. If they share a cache, it takes less time
// than a store that bypasses the caches. Otherwise it takes up to four times as long, and then the peers also
// read faster from memory than from another core's cache. Ranks may be moved between cores, and the host of a
// virtual machine may move its processors. So a stager measures both ways all the time and uses the faster
// one.
type stager struct {
	bypasses bool // whether copies bypass the caches
	copies   uint // the number of copies of at least measuredBytes
	// costs has the times of the last copies in nanoseconds per KiB: costs[0] of those through the caches,
	// costs[1] of those that bypass them. 0 means that there was none.
	costs [2][samples]float32
}

const (
	// bypassBytes is the smallest size of a copy that bypasses the caches. measuredBytes is the smallest size
	// of a copy that is measured.
	bypassBytes   = 8 << 10
	measuredBytes = 16 << 10
	// measureEvery is the number of copies for each one that is measured, and tryEvery the number for each
	// one that is done in the other way.
	measureEvery = 16
	tryEvery     = 128
	// samples is the number of copies that are remembered. The fastest counts, because a copy may be
	// interrupted.
	samples = 2
)

// copy copies src to dst, which has the same length.
func (s *stager) copy(dst, src []byte) {
	if len(src) < measuredBytes {
		stage(dst, src, s.bypasses)
		return
	}
	s.copies++
	bypasses := s.bypasses != (s.copies%tryEvery == 0)
	if bypasses == s.bypasses && s.copies%measureEvery != 0 {
		stage(dst, src, bypasses)
		return
	}
	began := time.Now()
	stage(dst, src, bypasses)
	s.note(bypasses, time.Since(began), len(src))
}

func stage(dst, src []byte, bypasses bool) {
	if bypasses && len(src) >= bypassBytes {
		kernel.Stream(dst, src)
	} else {
		copy(dst, src)
	}
}

// note records the time of a copy of n bytes, and chooses how the next copies are done.
func (s *stager) note(bypassed bool, took time.Duration, n int) {
	of := &s.costs[0]
	if bypassed {
		of = &s.costs[1]
	}
	copy(of[1:], of[:])
	of[0] = float32(took) / float32(n>>10)
	through, bypassing := min(s.costs[0][0], s.costs[0][1]), min(s.costs[1][0], s.costs[1][1])
	switch {
	case through == 0 || bypassing == 0:
	case s.bypasses:
		s.bypasses = bypassing < through
	default:
		// Through the caches, peers that share a cache read faster, so a small gain is not enough.
		s.bypasses = bypassing < 0.7*through
	}
}
