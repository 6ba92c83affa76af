package shm

import (
	"slices"
	"time"

	"github.com/gohvd/gohvd/internal/kernel"
)

// A stager copies data to memory that peers read and that this rank has written before.
//
// Peers have read the old content, so their caches have its lines, and a store must first invalidate these.
// How long that takes depends on where the cores of the ranks are. If they share a cache, it takes less time
// than a store that bypasses the caches. Otherwise it takes up to four times as long, and then the peers also
// read faster from memory than from another core's cache. Ranks may be moved between cores, and the host of a
// virtual machine may move its processors. So a stager tries the other way from time to time. It bypasses the
// caches if its copies then take less than 40 % of the time (see gain).
//
// A copy also takes longer if the last copy to the same memory was made in the other way. So a trial is as
// long as it takes to write all of the memory, and only the copies after that count.
type stager struct {
	bypasses bool // whether copies bypass the caches, except in a trial
	trying   bool // whether a trial of the other way is in progress
	// left is the number of bytes to copy until the trial ends or the next one begins, and interval the
	// number of bytes between the last trial and the next one.
	left, interval int64
	copies         uint // the number of copies that may be measured
	// costs has the times of the last measured copies in nanoseconds per KiB: costs[0] of those through the
	// caches, costs[1] of those that bypass them. 0 means that there was none.
	costs [2][samples]float32
}

const (
	// bypassBytes is the smallest size of a copy that bypasses the caches. measuredBytes is the smallest size
	// of a copy that is measured.
	bypassBytes   = 8 << 10
	measuredBytes = 16 << 10
	// measureEvery is the number of copies for each one that is measured while no trial is in progress.
	measureEvery = 16
	// trialBytes is the length of a trial, and countedBytes the length of its last part, in which all copies
	// are measured. The part before that is as long as the ring, which is larger than the staging area. A
	// trial is longer if its last part has fewer copies than samples.
	trialBytes   = ringBytes + countedBytes
	countedBytes = 1 << 20
	// firstInterval is the first interval between two trials. It doubles with each trial that changes
	// nothing, up to longestInterval, which takes a few tenths of a second, so that trials cost less than
	// 1 % of the time.
	firstInterval   = 16 << 20
	longestInterval = 2 << 30
	// samples is the number of measured copies that are remembered. The fastest counts, because a copy may
	// be interrupted.
	samples = 4
	// gain is the share of the time through the caches that a copy may take at most if copies are to bypass
	// them. Between cores that share a cache, a copy that bypasses it may take 60 % of the time, but peers
	// then read from memory, so that operations take twice as long. Between other cores it took 10 to 30 %.
	gain = 0.4
)

// way reports whether copies bypass the caches now.
func (s *stager) way() (bypasses bool) { return s.bypasses != s.trying }

// copy copies src to dst, which has the same length.
func (s *stager) copy(dst, src []byte) {
	if len(src) < measuredBytes {
		stage(dst, src, s.way())
		return
	}
	if s.interval == 0 {
		s.left, s.interval = firstInterval, firstInterval
	}
	s.copies++
	if s.trying && s.left <= countedBytes || !s.trying && s.copies%measureEvery == 0 {
		began := time.Now()
		stage(dst, src, s.way())
		s.note(time.Since(began), len(src))
	} else {
		stage(dst, src, s.way())
	}
	s.left -= int64(len(src))
	if s.left <= 0 {
		s.turn()
	}
}

func stage(dst, src []byte, bypasses bool) {
	if bypasses && len(src) >= bypassBytes {
		kernel.Stream(dst, src)
	} else {
		copy(dst, src)
	}
}

func (s *stager) costsOf(bypasses bool) *[samples]float32 {
	if bypasses {
		return &s.costs[1]
	}
	return &s.costs[0]
}

// note records the time of a copy of n bytes.
func (s *stager) note(took time.Duration, n int) {
	of := s.costsOf(s.way())
	copy(of[1:], of[:])
	of[0] = float32(took) / float32(n>>10)
}

// turn begins a trial, or ends it and chooses the way of the copies until the next one. If too few copies
// were measured in the present way, turn does nothing, and is called again after the next copy.
func (s *stager) turn() {
	if slices.Min(s.costsOf(s.way())[:]) == 0 {
		return
	}
	if !s.trying {
		s.trying, s.left = true, trialBytes
		*s.costsOf(s.way()) = [samples]float32{}
		return
	}
	through, bypassing := slices.Min(s.costs[0][:]), slices.Min(s.costs[1][:])
	bypasses := bypassing < gain*through
	s.interval = min(2*s.interval, longestInterval)
	if bypasses != s.bypasses {
		s.interval = firstInterval
	}
	s.bypasses, s.trying, s.left = bypasses, false, s.interval
}
