//go:build nccl && cgo

package cuda_test

import (
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/cuda"
)

// TestPollNapsAreShort checks that Poll asks again after less than a millisecond, which a time.Sleep of a few
// microseconds takes. It looks at the shortest of many naps, because others may take longer on a busy
// machine.
func TestPollNapsAreShort(t *testing.T) {
	shortest, begun, last, calls := time.Hour, time.Now(), time.Now(), 0
	err := cuda.Poll(t.Context(), func() (bool, error) {
		now := time.Now()
		if calls++; last.Sub(begun) > time.Millisecond { // it no longer spins
			shortest = min(shortest, now.Sub(last))
		}
		last = now
		return now.Sub(begun) > time.Second && calls > 100, nil
	})
	if err != nil || shortest > 700*time.Microsecond {
		t.Errorf("the shortest nap took %v, want about 200 us: %v", shortest, err)
	}
}
