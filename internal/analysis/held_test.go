package analysis_test

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/analysis"
	"github.com/gohvd/gohvd/internal/topo"
)

// ask describes the requests for one operation. All ranks but one had asked by the time others, and the last
// rank asked at the time asked. Times are in ms. If rank is at least 0, it is the last rank, and the ranks
// waited for the operation. If rank is negative, the last rank is ^rank, and the others went on without
// waiting.
type ask struct{ rank, others, asked int }

func held(asks ...ask) []int {
	l := analysis.NewHeld(3)
	for _, a := range asks {
		ms := func(n int) time.Duration { return time.Duration(n) * time.Millisecond }
		rank, waited := a.rank, a.rank >= 0
		if !waited {
			rank = ^a.rank
		}
		l.Add(topo.Rank(rank), ms(a.others), ms(a.asked), waited)
	}
	var all []int
	for _, r := range l.Ranks() {
		all = append(all, int(r.Held.Milliseconds()))
	}
	return all
}

func TestHeld(t *testing.T) {
	for name, c := range map[string]struct {
		asks []ask
		want []int
	}{
		"nothing":             {nil, []int{0, 0, 0}},
		"at the same time":    {[]ask{{1, 7, 7}}, []int{0, 0, 0}},
		"one operation":       {[]ask{{1, 3, 8}}, []int{0, 5, 0}},
		"before time began":   {[]ask{{1, -9, -7}, {1, -6, -5}}, []int{0, 3, 0}},
		"one after the other": {[]ask{{1, 0, 5}, {1, 10, 15}, {1, 20, 25}}, []int{0, 15, 0}},
		// Rank 0 reads a checkpoint, and the other ranks wait for it in twelve broadcasts at once.
		"side by side": {slices.Repeat([]ask{{0, 0, 10}}, 12), []int{10, 0, 0}},
		// Rank 2 is always 5 ms behind, falls behind slowly, or catches up slowly.
		"behind all the time": {[]ask{{2, 0, 5}, {2, 2, 7}, {2, 4, 9}, {2, 6, 11}}, []int{0, 0, 5}},
		"falls behind":        {[]ask{{2, 0, 1}, {2, 1, 3}, {2, 2, 5}, {2, 3, 7}}, []int{0, 0, 4}},
		"catches up":          {[]ask{{2, 0, 5}, {2, 4, 7}, {2, 6, 8}}, []int{0, 0, 5}},
		// Rank 1 is 2 or 3 ms behind, which is less than the time between operations. Either the other ranks
		// do not wait for all operations, or rank 1 is not late in the operations that they wait for.
		"not waited for": {[]ask{{^1, 0, 2}, {^1, 10, 12}, {^1, 20, 23}, {1, 30, 32}},
			[]int{0, 3, 0}},
		"waited for at last":     {[]ask{{^1, 0, 2}, {1, 10, 12}, {^1, 20, 22}, {1, 30, 32}}, []int{0, 4, 0}},
		"waited for, not behind": {[]ask{{^1, 0, 2}, {1, 10, 10}, {^1, 20, 22}, {1, 30, 30}}, []int{0, 4, 0}},
		// The time up to 6 ms is charged to rank 0, and only the rest to rank 1.
		"two ranks": {[]ask{{0, 0, 6}, {1, 1, 8}}, []int{6, 2, 0}},
		// The wait for the last operation began first. The time that was charged for the operations before it
		// does not count again.
		"a long one around others": {[]ask{{1, 1, 5}, {1, 10, 14}, {1, 20, 24}, {1, 0, 26}}, []int{0, 14, 0}},
	} {
		if got := held(c.asks...); !slices.Equal(got, c.want) {
			t.Errorf("%s: got %v ms, want %v", name, got, c.want)
		}
	}
}

// Random operations are added. The times charged to all ranks add up to at most the time during which some
// operation waited for exactly one rank. If each operation is added twice, the result is the same.
func TestLatenessIsWallTime(t *testing.T) {
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 1))
		asks := make([]ask, 60)
		for i := range asks {
			asked := rng.IntN(400)
			others := asked - rng.IntN(1+rng.IntN(60))
			asks[i] = ask{rng.IntN(6) - 3, others, asked}
		}
		slices.SortFunc(asks, func(a, b ask) int { return a.asked - b.asked })
		got := held(asks...)
		waited := make(map[int]bool)
		var twice []ask
		for _, a := range asks {
			for ms := a.others; ms < a.asked; ms++ {
				waited[ms] = true
			}
			twice = append(twice, a, a)
		}
		if sum := got[0] + got[1] + got[2]; sum > len(waited) || sum == 0 {
			t.Errorf("seed %d: got %v, want more than nothing and at most the %d ms for which somebody waited", seed, got, len(waited))
		}
		if again := held(twice...); !slices.Equal(again, got) {
			t.Errorf("seed %d: got %v with each operation twice and %v with each once", seed, again, got)
		}
	}
}

func TestLatenessAllocatesNothing(t *testing.T) {
	l, now := analysis.NewHeld(4), time.Duration(0)
	if n := testing.AllocsPerRun(100, func() { now++; l.Add(3, now-1, now, true) }); n != 0 {
		t.Errorf("%g allocations", n)
	}
}
