package rank

import (
	"math"
	"testing"
	"time"
)

func TestTimeoutOf(t *testing.T) {
	for _, d := range []time.Duration{0, 1, time.Second, 9e18} {
		if got, err := TimeoutOf(d.Seconds()); got != d || err != nil {
			t.Errorf("%v: got %v and error %v", d, got, err)
		}
	}
	for _, s := range []float64{-1, 1e-10, 1e10, math.Inf(1), math.NaN()} {
		if got, err := TimeoutOf(s); err == nil {
			t.Errorf("%v s: got %v, want an error", s, got)
		}
	}
}
