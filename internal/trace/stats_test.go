package trace_test

import (
	"math"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/trace"
)

func TestHistogram(t *testing.T) {
	second := func(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
	for _, c := range []struct {
		d    time.Duration
		want int
	}{
		{-1, 0}, {0, 0}, {1, 0}, {953, 0}, {954, 1}, {second(0.5), 19}, {second(0.5) + 1, 20},
		{time.Second, 20},
		{time.Second + 1, 21}, {64 * time.Second, 26}, {64*time.Second + 1, 27}, {math.MaxInt64, 27},
	} {
		var h trace.Histogram
		h.Add(c.d)
		if h.Buckets[c.want] != 1 || h.Count() != 1 || h.Sum != max(c.d, 0) {
			t.Errorf("%v: got %v, sum %v, want it in bucket %d", c.d, h.Buckets, h.Sum, c.want)
		}
		s := max(c.d, 0).Seconds()
		if s > trace.UpperBound(c.want) || c.want > 0 && s <= trace.UpperBound(c.want-1) {
			t.Errorf("%v is in bucket %d, which ends at %v s", c.d, c.want, trace.UpperBound(c.want))
		}
	}
}
