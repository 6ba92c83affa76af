package analysis

import (
	"math"
	"slices"
)

// Sample is a list of numbers, such as durations in ns, of which statistics are wanted. It counts negative
// numbers as 0.
type Sample struct {
	numbers []int64
	sorted  bool
}

// Add adds a number.
func (s *Sample) Add(v int64) { s.numbers, s.sorted = append(s.numbers, max(v, 0)), false }

// Len returns how many numbers there are.
func (s *Sample) Len() int { return len(s.numbers) }

// Sum returns the sum of the numbers.
func (s *Sample) Sum() (sum float64) {
	for _, v := range s.numbers {
		sum += float64(v)
	}
	return sum
}

// Mean returns the mean of the numbers, or 0 if there are none.
func (s *Sample) Mean() float64 { return s.Sum() / float64(max(len(s.numbers), 1)) }

// Quantile returns the q-quantile, for q from 0 to 1: 0.5 is the median, and 1 the greatest number. It
// returns 0 if there are no numbers.
func (s *Sample) Quantile(q float64) int64 {
	if len(s.numbers) == 0 {
		return 0
	}
	if !s.sorted {
		slices.Sort(s.numbers)
		s.sorted = true
	}
	return s.numbers[max(int(math.Ceil(q*float64(len(s.numbers))))-1, 0)]
}
