package shm

import (
	"bytes"
	"fmt"
	"testing"
	"time"
)

// stagerTimes has how long a copy of 64 KiB takes in each way.
type stagerTimes struct{ through, bypassing time.Duration }

// trial brings a stager to the end of its next trial. All copies have 64 KiB and take the given times.
func (c *stagerTimes) trial(s *stager) {
	for range 2 {
		took := c.through
		if s.way() {
			took = c.bypassing
		}
		for range samples {
			s.note(took, 64<<10)
		}
		s.turn()
	}
}

// TestStagerChooses checks which way a stager uses while the machine goes from one state to the next.
func TestStagerChooses(t *testing.T) {
	var s stager
	for _, c := range []struct {
		name  string
		times stagerTimes
		want  bool
	}{
		{"the caches are faster", stagerTimes{2100, 2500}, false},
		{"bypassing is a little faster", stagerTimes{4000, 2500}, false},
		{"bypassing is much faster", stagerTimes{8600, 2500}, true},
		{"bypassing is still much faster", stagerTimes{8600, 2500}, true},
		{"the caches are faster again", stagerTimes{2100, 2500}, false},
		{"bypassing is faster again", stagerTimes{8600, 2500}, true},
		{"bypassing is a little faster than before", stagerTimes{4000, 2500}, false},
	} {
		if c.times.trial(&s); s.bypasses != c.want || s.trying {
			t.Errorf("%s: the stager bypasses the caches: %v, is in a trial: %v, want %v, false", c.name, s.bypasses,
				s.trying, c.want)
		}
	}
}

// TestStagerIgnoresInterruptions checks that copies that were interrupted do not count.
func TestStagerIgnoresInterruptions(t *testing.T) {
	var s stager
	(&stagerTimes{2100, 2500}).trial(&s)
	for range samples - 1 {
		s.note(time.Second, 64<<10)
	}
	s.turn()
	for range samples {
		s.note(2500, 64<<10)
	}
	if s.turn(); s.bypasses {
		t.Error("the stager has changed the way because of slow copies, want no change")
	}
}

// TestStagerNeedsSamples makes only few copies in a trial, because they are large. The trial goes on until
// there are enough of them, and the samples of the trial before do not count.
func TestStagerNeedsSamples(t *testing.T) {
	var s stager
	(&stagerTimes{8600, 9000}).trial(&s)
	if s.turn(); !s.trying {
		t.Fatal("no trial has begun")
	}
	for i := range samples {
		if s.turn(); !s.trying {
			t.Fatalf("the trial has ended after %d measured copies, want %d", i, samples)
		}
		s.note(2500, 64<<10)
	}
	if s.turn(); s.trying || !s.bypasses {
		t.Errorf("after %d measured copies, a trial is in progress: %v, copies bypass the caches: %v, want false, true",
			samples, s.trying, s.bypasses)
	}
	s = stager{}
	if s.turn(); s.trying {
		t.Error("a trial has begun before a copy in the usual way was measured")
	}
}

// TestStagerIntervals checks when trials begin.
func TestStagerIntervals(t *testing.T) {
	same, other := stagerTimes{2100, 2500}, stagerTimes{8600, 2500}
	var s stager
	buf := make([]byte, 64<<10)
	s.copy(buf, make([]byte, len(buf)))
	if got, want := s.left, int64(firstInterval-len(buf)); got != want || s.trying {
		t.Errorf("after the first copy, the first trial begins in %d bytes, want %d", got, want)
	}
	for want := int64(2 * firstInterval); want < 4*longestInterval; want *= 2 {
		if same.trial(&s); s.left != min(want, longestInterval) {
			t.Errorf("after a trial that changes nothing, the next begins in %d bytes, want %d", s.left,
				min(want, longestInterval))
		}
	}
	if other.trial(&s); s.left != firstInterval {
		t.Errorf("after a change, the next trial begins in %d bytes, want %d", s.left, firstInterval)
	}
}

// TestStagerCopies checks that copies of all sizes are right in both ways, and which of them are measured.
func TestStagerCopies(t *testing.T) {
	for _, bypasses := range []bool{false, true} {
		for _, size := range []int{0, 1, bypassBytes - 1, bypassBytes, measuredBytes - 1, measuredBytes,
			100_000} {
			t.Run(fmt.Sprintf("bypasses=%v,bytes=%d", bypasses, size), func(t *testing.T) {
				src := make([]byte, size)
				for i := range src {
					src[i] = byte(i*7 + i>>8)
				}
				s := stager{bypasses: bypasses}
				copies := func(n int) (measured int) {
					for range n {
						dst := make([]byte, size)
						s.costs = [2][samples]float32{}
						if s.copy(dst, src); !bytes.Equal(dst, src) {
							t.Fatal("the copy is not equal to the source")
						}
						if s.costs != [2][samples]float32{} {
							measured++
						}
					}
					return measured
				}
				small := size < measuredBytes
				if got := copies(2 * measureEvery); small && got != 0 || !small && got != 2 {
					t.Errorf("%d of %d copies were measured, want 2 if they are large, else none", got, 2*measureEvery)
				}
				if small {
					return
				}
				s.trying, s.left = true, trialBytes
				warm := (ringBytes - 1) / size
				if got := copies(warm); got != 0 {
					t.Errorf("%d of the first %d copies of a trial were measured, want none", got, warm)
				}
				s.left = countedBytes
				if got := copies(3); got != 3 {
					t.Errorf("%d of 3 copies at the end of a trial were measured, want all", got)
				}
				for range samples {
					s.copy(make([]byte, size), src)
				}
				s.left = 1
				if s.copy(make([]byte, size), src); s.trying {
					t.Error("the trial has not ended")
				}
			})
		}
	}
}
