package analysis

import (
	"math"
	"math/bits"
)

// Sketch is a histogram of non-negative numbers. Its buckets grow with the numbers: there are 2^Bits buckets
// from each power of two to the next. So a quantile has a relative error of at most 1/2^(Bits+1). A Sketch
// has memory only for the buckets between its smallest and its greatest number. These cover at most 63 powers
// of two.
type Sketch struct {
	Bits     uint8
	N        uint64
	Sum      float64
	Min, Max int64

	low    int // the index of the bucket whose count is counts[0]
	counts []uint32
}

// bucket returns the index of the bucket for a number.
func (s *Sketch) bucket(v int64) int {
	if v < 1<<s.Bits {
		return int(v)
	}
	shift := bits.Len64(uint64(v)) - 1 - int(s.Bits)
	return shift<<s.Bits + int(v>>shift)
}

// middle returns the number in the middle of a bucket.
func (s *Sketch) middle(bucket int) int64 {
	if bucket < 2<<s.Bits {
		return int64(bucket)
	}
	shift := bucket>>s.Bits - 1
	return (int64(bucket)-int64(shift)<<s.Bits)<<shift + 1<<(shift-1)
}

// Add counts a number. It counts a negative number as 0.
func (s *Sketch) Add(v int64) {
	v = max(v, 0)
	b := s.bucket(v)
	if s.N == 0 {
		s.low, s.Min, s.Max = b, v, v
	}
	s.N++
	s.Sum += float64(v)
	s.Min, s.Max = min(s.Min, v), max(s.Max, v)
	switch {
	case b < s.low:
		s.counts = append(make([]uint32, s.low-b), s.counts...)
		s.low = b
	case b-s.low >= len(s.counts):
		s.counts = append(s.counts, make([]uint32, b-s.low+1-len(s.counts))...)
	}
	if c := &s.counts[b-s.low]; *c < math.MaxUint32 {
		*c++
	}
}

// Quantile returns the q-quantile, for q from 0 to 1. It returns 0 if there are no numbers.
func (s *Sketch) Quantile(q float64) int64 {
	want := uint64(math.Ceil(q * float64(s.N)))
	seen := uint64(0)
	for i, c := range s.counts {
		if seen += uint64(c); seen >= want && seen > 0 {
			return min(max(s.middle(s.low+i), s.Min), s.Max)
		}
	}
	return s.Max
}

// Mean returns the mean of the numbers, or 0 if there are none.
func (s *Sketch) Mean() float64 {
	if s.N == 0 {
		return 0
	}
	return s.Sum / float64(s.N)
}
