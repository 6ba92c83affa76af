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

// TestMessagesDelay checks that delayed messages arrive together, and in their order.
func TestMessagesDelay(t *testing.T) {
	const n, depth = 10000, 8
	f := faulty.Messages[int]{Delay: 0.1, Depth: depth}
	f.Seed(1)
	want, delays := 0, 0
	for m := range n {
		first := want
		if err := f.Pass(m, func(m int) error {
			if m != want {
				t.Fatalf("got message %d, want %d", m, want)
			}
			want++
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		if waiting := m + 1 - want; waiting > depth {
			t.Fatalf("%d messages wait, want at most %d", waiting, depth)
		}
		if want > first+1 {
			delays++
		}
	}
	// A delay and the time to the next one take 4.5 and 10 messages on average.
	if delays < 550 || delays > 850 {
		t.Errorf("the stream was delayed %d times, want about 690", delays)
	}
}

// TestMessagesCut checks that a cut drops messages in succession.
func TestMessagesCut(t *testing.T) {
	const n, length = 100_000, 49
	f := faulty.Messages[int]{Cut: 0.01, CutLength: length}
	f.Seed(1)
	next, cuts := 0, 0
	for m := range n {
		if err := f.Pass(m, func(m int) error {
			if lost := m - next; lost > 0 {
				if lost%(length+1) != 0 {
					t.Fatalf("%d messages in succession are lost, want a multiple of %d", lost, length+1)
				}
				cuts += lost / (length + 1)
			}
			next = m + 1
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	// A cut and the time to the next one take 50 and 100 messages on average.
	if cuts < 550 || cuts > 800 {
		t.Errorf("the stream was cut %d times, want about 670", cuts)
	}
}
