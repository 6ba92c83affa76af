package control_test

import (
	"slices"
	"testing"

	"github.com/gohvd/gohvd/internal/control"
	"github.com/gohvd/gohvd/internal/topo"
)

// In a cycle of lock-step that only combines vectors, no rank allocates memory.
func TestStarAllocatesNothing(t *testing.T) {
	const size = 3
	stars := make([]*control.Star, size)
	take := func(to, from topo.Rank, frame []byte) {
		if !stars[to].Take(from, frame) {
			t.Errorf("rank %d does not take a frame from rank %d", to, from)
		}
	}
	for r := range topo.Rank(size) {
		stars[r] = control.NewStar(control.StarConfig{
			Rank: r, Size: size,
			Up:        func(frame []byte) { take(0, r, frame) },
			Down:      func(to topo.Rank, frame []byte) { take(to, 0, frame) },
			Malformed: func(from topo.Rank, err error) { t.Errorf("rank %d, from rank %d: %v", r, from, err) },
		})
	}
	var and, or [size][]uint64
	for r := range size {
		and[r], or[r] = make([]uint64, 2), make([]uint64, 2)
	}
	wantAnd, wantOr := []uint64{1 << size, 0}, []uint64{1<<size - 1, 0}
	cycle := func() {
		for r := range size {
			and[r][0], or[r][0] = 1<<r|1<<size, 1<<r
		}
		for r, s := range stars {
			if s.AndOr(and[r], or[r]); r < size-1 {
				if _, done, err := stars[0].Test(); done || err != nil {
					t.Errorf("rank 0 is done: %v, error %v, before rank %d has started", done, err, size-1)
				}
			}
		}
		for r, s := range stars {
			if _, done, err := s.Test(); !done || err != nil {
				t.Errorf("rank %d is done: %v, error %v", r, done, err)
			}
			if !slices.Equal(and[r], wantAnd) || !slices.Equal(or[r], wantOr) {
				t.Errorf("rank %d: got AND %v and OR %v, want %v and %v", r, and[r], or[r], wantAnd, wantOr)
			}
		}
	}
	if n := testing.AllocsPerRun(20, cycle); n != 0 {
		t.Errorf("a cycle of %d ranks allocates memory %.0f times, want none", size, n)
	}
}
