package analysis

import "testing"

func TestSample(t *testing.T) {
	var s Sample
	if s.Mean() != 0 || s.Quantile(.5) != 0 {
		t.Errorf("got %g and %d of no numbers, want 0", s.Mean(), s.Quantile(.5))
	}
	for v := int64(100); v > 0; v-- {
		s.Add(v)
	}
	for q, want := range map[float64]int64{0: 1, .01: 1, .5: 50, .99: 99, 1: 100} {
		if got := s.Quantile(q); got != want {
			t.Errorf("%g: got %d, want %d", q, got, want)
		}
	}
	s.Add(-5)
	if s.Len() != 101 || s.Sum() != 5050 || s.Mean() != 50 || s.Quantile(0) != 0 {
		t.Errorf("got %d numbers, sum %g, mean %g, least %d", s.Len(), s.Sum(), s.Mean(), s.Quantile(0))
	}
}
