package report

import "time"

// maxStretches limits the number of stretches that can still grow. When there are more, the older half of
// them is closed. This hardly changes the sum, because intervals are added nearly in order of time.
const maxStretches = 128

// cover computes the length of the union of intervals. A moment in several intervals counts once.
type cover struct {
	open  []stretch     // in ascending order, with gaps between them
	total time.Duration // the length of the stretches that were closed
}

// stretch is a covered period without gaps.
type stretch struct{ begin, end time.Duration }

// add adds an interval to the union.
func (c *cover) add(begin, end time.Duration) {
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
		for _, s := range c.open[:maxStretches/2] {
			c.total += s.length()
		}
		c.open = append(c.open[:0], c.open[maxStretches/2:]...)
	}
}

func (s stretch) length() time.Duration { return s.end - s.begin }

// sum returns the length of the union of all intervals that were added.
func (c *cover) sum() time.Duration {
	sum := c.total
	for _, s := range c.open {
		sum += s.length()
	}
	return sum
}
