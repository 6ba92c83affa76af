package report

import (
	"math"
	"math/bits"
)

// sketch counts durations of 0 and more in buckets that grow with them: 2^bits to an octave, so that a quantile is off by at most
// 1/2^(bits+1) of itself. It has room for the buckets between its least and its greatest alone: at most 63 octaves.
type sketch struct {
	bits     uint8
	low      int // bucket of counts[0]
	counts   []uint32
	n        uint64
	sum      float64
	min, max int64
}

func (s *sketch) bucket(v int64) int {
	if v < 1<<s.bits {
		return int(v)
	}
	shift := bits.Len64(uint64(v)) - 1 - int(s.bits)
	return shift<<s.bits + int(v>>shift)
}

// middle is that of a bucket.
func (s *sketch) middle(bucket int) int64 {
	if bucket < 2<<s.bits {
		return int64(bucket)
	}
	shift := bucket>>s.bits - 1
	return (int64(bucket)-int64(shift)<<s.bits)<<shift + 1<<(shift-1)
}

func (s *sketch) add(v int64) {
	v = max(v, 0)
	b := s.bucket(v)
	if s.n == 0 {
		s.low, s.min, s.max = b, v, v
	}
	s.n++
	s.sum += float64(v)
	s.min, s.max = min(s.min, v), max(s.max, v)
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

// quantile is the q-th, of 0 to 1; 0 if there are none.
func (s *sketch) quantile(q float64) int64 {
	want := uint64(math.Ceil(q * float64(s.n)))
	seen := uint64(0)
	for i, c := range s.counts {
		if seen += uint64(c); seen >= want && seen > 0 {
			return min(max(s.middle(s.low+i), s.min), s.max)
		}
	}
	return s.max
}

func (s *sketch) mean() float64 {
	if s.n == 0 {
		return 0
	}
	return s.sum / float64(s.n)
}

// maxStretches bounds what a cover remembers. Intervals come nearly in order; what is older than this many has been passed.
const maxStretches = 64

// cover adds up the time that intervals cover together, however they overlap.
type cover struct {
	open  []stretch // in order, apart from each other
	total float64   // what is covered, without those in open
}

// stretch is one without gaps.
type stretch struct{ begin, end int64 }

func (c *cover) add(begin, end int64) {
	if end <= begin {
		return
	}
	s := stretch{begin, end}
	first := len(c.open)
	for first > 0 && c.open[first-1].end >= begin {
		first--
	}
	last := first
	for last < len(c.open) && c.open[last].begin <= end {
		s.begin, s.end = min(s.begin, c.open[last].begin), max(s.end, c.open[last].end)
		last++
	}
	if last > first {
		c.open[first] = s
		c.open = append(c.open[:first+1], c.open[last:]...)
		return
	}
	c.open = append(c.open, stretch{})
	copy(c.open[first+1:], c.open[first:])
	c.open[first] = s
	if len(c.open) > maxStretches {
		c.total += c.open[0].length()
		c.open = append(c.open[:0], c.open[1:]...)
	}
}

func (s stretch) length() float64 { return float64(s.end - s.begin) }

// sum is the time that is covered.
func (c *cover) sum() float64 {
	sum := c.total
	for _, s := range c.open {
		sum += s.length()
	}
	return sum
}
