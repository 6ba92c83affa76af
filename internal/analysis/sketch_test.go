package analysis

import (
	"math"
	"testing"
)

func TestSketch(t *testing.T) {
	for _, bits := range []uint8{3, 5} {
		s := Sketch{Bits: bits}
		for v := int64(1); v <= 1_000_000; v += 7 {
			s.Add(1_000_001 - v)
		}
		for _, q := range []float64{.01, .5, .9, .99, 1} {
			got, want := float64(s.Quantile(q)), q*1e6
			if off := math.Abs(got-want) / want; off > 1/float64(int(2)<<bits)+0.001 {
				t.Errorf("%d bits, %g: got %g, want %g: off by %g", bits, q, got, want, off)
			}
		}
		s.Add(math.MaxInt64)
		s.Add(-5)
		if !(float64(s.Quantile(1)) > 0.93*math.MaxInt64) || s.Quantile(0) != 0 || len(s.counts) > 64<<bits {
			t.Errorf("%d bits: got %d to %d in %d buckets", bits, s.Quantile(0), s.Quantile(1), len(s.counts))
		}
	}
}
