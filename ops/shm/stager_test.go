package shm

import (
	"bytes"
	"fmt"
	"testing"
	"time"
)

// TestStagerChooses gives a stager the times that copies of 64 KiB take in one state of the machine after the
// other, and checks which way it uses.
func TestStagerChooses(t *testing.T) {
	const n = 64 << 10
	var s stager
	for _, c := range []struct {
		name               string
		through, bypassing time.Duration
		want               bool
	}{
		{"the caches are faster", 2100, 2500, false},
		{"bypassing is hardly faster", 2700, 2500, false},
		{"bypassing is much faster", 8600, 2500, true},
		{"bypassing is hardly faster, and in use", 2700, 2500, true},
		{"the caches are faster again", 2100, 2500, false},
	} {
		for range samples {
			s.note(false, c.through, n)
			s.note(true, c.bypassing, n)
		}
		if s.bypasses != c.want {
			t.Errorf("%s: got %v, want %v", c.name, s.bypasses, c.want)
		}
	}
}

// TestStagerIgnoresInterruptions gives a stager one sample of a copy that was interrupted.
func TestStagerIgnoresInterruptions(t *testing.T) {
	const n = 64 << 10
	var s stager
	for range samples {
		s.note(false, 2100, n)
		s.note(true, 2500, n)
	}
	if s.note(false, time.Second, n); s.bypasses {
		t.Error("one slow copy changes the choice")
	}
}

// TestStagerCopies copies in both ways, and checks that the stager measures both, but only copies that are
// large enough.
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
				for range tryEvery {
					dst := make([]byte, size)
					if s.copy(dst, src); !bytes.Equal(dst, src) {
						t.Fatal("the copy is not equal to the source")
					}
				}
				for way, costs := range s.costs {
					if got, want := costs[0] != 0, size >= measuredBytes; got != want {
						t.Errorf("costs[%d] has a sample: %v, want %v", way, got, want)
					}
				}
			})
		}
	}
}
