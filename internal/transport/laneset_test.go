package transport

import (
	"math"
	"math/rand/v2"
	"testing"
)

// TestLaneSetAgainstMap adds the same lanes to a LaneSet and to a map. After each addition both must contain
// the same lanes, and the LaneSet must have as few runs as possible.
func TestLaneSetAgainstMap(t *testing.T) {
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, 0))
		base := []Lane{0, math.MaxUint32 - 99}[seed%2]
		var set LaneSet
		reference := make(map[Lane]bool)
		for range 80 {
			lane := base + Lane(r.IntN(100))
			set.Add(lane)
			reference[lane] = true
			for i := range Lane(100) {
				if got := set.Has(base + i); got != reference[base+i] {
					t.Fatalf("seed %d: lane %d after %d: got %v, want %v", seed, base+i, lane, got,
						reference[base+i])
				}
			}
			runs := 0
			for i := range Lane(100) {
				if reference[base+i] && (i == 0 || !reference[base+i-1]) {
					runs++
				}
			}
			if len(set.runs) != runs {
				t.Fatalf("seed %d: got %d runs, want %d: %v", seed, len(set.runs), runs, set.runs)
			}
		}
	}
}

// TestLaneSetStaysSmall releases 100,000 lanes in random order while only eight lanes are in use at a time.
// The set must never have more than nine runs.
func TestLaneSetStaysSmall(t *testing.T) {
	const inUse, lanes = 8, 100_000
	r := rand.New(rand.NewPCG(1, 0))
	var set LaneSet
	var used []Lane
	for lane := range Lane(lanes) {
		used = append(used, lane)
		if len(used) <= inUse {
			continue
		}
		k := r.IntN(len(used))
		set.Add(used[k])
		used[k] = used[len(used)-1]
		used = used[:len(used)-1]
		if len(set.runs) > inUse+1 {
			t.Fatalf("at lane %d: %d runs, want at most %d", lane, len(set.runs), inUse+1)
		}
	}
}
