package report

import (
	"cmp"
	"slices"
	"strconv"
	"time"
)

// clock turns a rank's times into rank 0's.
type clock struct {
	// base is what the clock of the rank's domain showed at the rank's ts 0.
	base int64
	// shift is to be added to the times of the domain's leader, whose measurements these are, if there are none.
	points []clockPoint
	shift  int64
	// lead is to be added to get the leader's times: both read one clock.
	lead int64
	// err is how far the result may be from the truth, and known is false if nobody can say.
	err   int64
	known bool
	// domain is equal for ranks that are exact against each other.
	domain int
}

func (c *clock) reference(at int64) int64 {
	at += c.lead
	if len(c.points) == 0 {
		return at + c.shift
	}
	i, found := slices.BinarySearchFunc(c.points, at, func(p clockPoint, at int64) int { return cmp.Compare(p.at, at) })
	switch {
	case found || i == 0:
		return at + c.points[i].offset
	case i == len(c.points):
		return at + c.points[i-1].offset
	}
	a, b := c.points[i-1], c.points[i]
	part := float64(at-a.at) / float64(b.at-a.at)
	return at + a.offset + int64(part*float64(b.offset-a.offset))
}

// setClocks finds for every rank how its times become rank 0's: exactly if both read one clock; else by the measurements of the lowest
// rank of its domain that has some, so that ranks of one host stay exact against each other; else by the time of day, of which nobody
// knows how wrong it is.
func (j *Job) setClocks() {
	type leader struct {
		number int
		rank   *rankFiles
		points []clockPoint
	}
	leaders := make(map[string]*leader)
	of := func(r *rankFiles) *leader {
		// A rank without a domain has a clock of its own.
		domain := cmp.Or(r.segments[0].domain, "\x00"+strconv.Itoa(r.rank))
		l := leaders[domain]
		if l == nil {
			l = &leader{number: len(leaders), rank: r}
			leaders[domain] = l
		}
		return l
	}
	for _, r := range j.ranks {
		l := of(r)
		if r.clock.base = r.segments[0].monotonic; len(l.points) > 0 || r.rank == 0 {
			continue
		}
		for _, s := range r.segments {
			for _, p := range s.points {
				p.at += s.monotonic - r.clock.base
				if n := len(l.points); n == 0 || p.at > l.points[n-1].at {
					l.points = append(l.points, p)
				}
			}
		}
		if len(l.points) > 0 && l.rank.rank != 0 {
			l.rank = r
		}
	}
	// Without measurements anywhere and without rank 0, the first rank's clock stands for rank 0's.
	first, measured := j.ranks[0], false
	for _, l := range leaders {
		measured = measured || len(l.points) > 0
	}
	for _, r := range j.ranks {
		l := of(r)
		c := &r.clock
		c.domain = l.number
		c.lead = r.clock.base - l.rank.clock.base
		switch {
		case l.rank.rank == 0 || l == of(first) && !measured:
			c.known = true
		case len(l.points) > 0:
			c.points, c.known = l.points, true
			for _, p := range l.points {
				c.err = max(c.err, p.err)
			}
		default:
			c.shift = (l.rank.segments[0].start - first.segments[0].start) * int64(time.Microsecond)
		}
	}
}
