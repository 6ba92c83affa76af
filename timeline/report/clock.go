package report

import (
	"cmp"
	"slices"
	"strconv"
	"time"
)

// clock converts times on a rank's clock to times on rank 0's clock. Ranks that read the same clock form a
// domain. The leader of a domain is the rank whose measurements the whole domain uses.
type clock struct {
	// base is the time on the domain's clock, in ns, at which the times in the rank's file begin.
	base int64
	// points are the clock measurements of the domain's leader. If there are no measurements, shift is added
	// to the leader's times instead.
	points []clockPoint
	shift  int64
	// lead is added to a time of this rank to get the leader's time. This is exact, because both ranks read
	// the same clock.
	lead int64
	// err is the greatest error of a converted time. known is false if no bound for this error is known.
	err   int64
	known bool
	// domain is a number for the rank's domain. The times of two ranks with the same number are exact
	// relative to each other.
	domain int
}

// reference converts a time of this rank to rank 0's clock. Between two measurements it interpolates.
func (c *clock) reference(at int64) int64 {
	at += c.lead
	if len(c.points) == 0 {
		return at + c.shift
	}
	i, found := slices.BinarySearchFunc(c.points, at, func(p clockPoint, at int64) int {
		return cmp.Compare(p.at, at)
	})
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

// setClocks sets the clock of every rank. If a rank and rank 0 read the same clock, the conversion is exact.
// Otherwise setClocks uses the measurements of the lowest rank in the domain that has measurements, so that
// the ranks of one host stay exact relative to each other. If the domain has no measurements, setClocks uses
// the time of day, whose error is unknown.
func (j *Job) setClocks() {
	type leader struct {
		number int
		rank   *rankFiles
		points []clockPoint
	}
	leaders := make(map[string]*leader)
	of := func(r *rankFiles) *leader {
		// A rank whose file names no domain has a domain of its own.
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
		r.clock.base = r.segments[0].monotonic
		if len(l.points) > 0 || r.rank == 0 {
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
	// If no rank has measurements and rank 0 has no file, the clock of the lowest rank with a file replaces
	// rank 0's clock as the reference.
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
