package faulty_test

import (
	"slices"
	"testing"

	"github.com/gohvd/gohvd/internal/transport/faulty"
)

// TestMessages checks that every fault occurs, as often as its probability says, and that a seed replays.
func TestMessages(t *testing.T) {
	const n = 10000
	run := func(seed uint64) (got []int) {
		f := faulty.Messages[int]{Drop: 0.1, Duplicate: 0.05, Reorder: 0.2, Depth: 8,
			Clone: func(m int) int { return m }}
		f.Seed(seed)
		for m := range n {
			if err := f.Pass(m, func(m int) error { got = append(got, m); return nil }); err != nil {
				t.Fatal(err)
			}
		}
		return got
	}
	got := run(1)
	if !slices.Equal(got, run(1)) || slices.Equal(got, run(2)) {
		t.Error("the faults do not depend on the seed alone")
	}
	count, late := make(map[int]int), 0
	for i, m := range got {
		count[m]++
		if i > 0 && m < got[i-1] {
			late++
		}
	}
	twice := 0
	for _, c := range count {
		if c == 2 {
			twice++
		}
	}
	if lost := n - len(count); lost < 900 || lost > 1100 {
		t.Errorf("%d of %d messages are lost, want about 1000", lost, n)
	}
	if twice < 350 || twice > 550 {
		t.Errorf("%d messages came twice, want about 450", twice)
	}
	if late < 1000 {
		t.Errorf("%d messages came late, want at least 1000", late)
	}
}
