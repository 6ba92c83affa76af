package controller

import (
	"slices"
	"time"

	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
)

// arrivals holds the times at which the members' requests for tensors arrived while tracing was on.
type arrivals struct {
	bits [][]time.Duration // for cached tensors without a grant, by bit and member; nil if a bit has no votes
	// granted holds the arrival times for granted tensors. They are ordered by grant, then by tensor, then by
	// member. Arrivals has already returned granted[:taken].
	granted []time.Duration
	taken   int
}

// arrive records that the request of a member arrives now. It stores the time in the element of *at for the
// member.
func (s *setState) arrive(at *[]time.Duration, member int) {
	if !s.waits.trace {
		return
	}
	if *at == nil {
		*at = make([]time.Duration, len(s.Ranks))
	}
	(*at)[member] = max(s.waits.now, 1)
}

// bitArrivals returns the arrival times for a cached tensor.
func (s *setState) bitArrivals(bit uint32) *[]time.Duration {
	for len(s.arrivals.bits) <= int(bit) {
		s.arrivals.bits = append(s.arrivals.bits, nil)
	}
	return &s.arrivals.bits[bit]
}

// keepArrivals stores the arrival times of tensors that are granted together until Arrivals returns them. It
// does so only if rank 0 is a member, because otherwise rank 0 does not call Arrivals. The order of the times
// is that of the responses in the grant: first the tensors that are granted by bit, then the tensors that are
// granted in full.
func (s *setState) keepArrivals(group []int) {
	if !s.waits.trace || s.index(0) < 0 {
		return
	}
	for _, byBit := range []bool{true, false} {
		for _, i := range group {
			item := &s.ready[i]
			if (item.cached && !item.full) != byBit {
				continue
			}
			var at []time.Duration
			switch {
			case item.cached:
				at = *s.bitArrivals(item.bit)
			case item.row != nil:
				at = item.row.arrivals
			}
			if at == nil {
				s.arrivals.granted = slices.Grow(s.arrivals.granted, len(s.Ranks))
				at = s.arrivals.granted[len(s.arrivals.granted):][:len(s.Ranks)]
				clear(at)
			}
			s.arrivals.granted = append(s.arrivals.granted, at...)
			if item.cached {
				clear(at)
			}
		}
	}
}

// Trace switches the recording of arrival times on or off. An arrival time is the time at which a member's
// request for a tensor arrives. While recording is on, the caller must call Arrivals for each grant of the
// sets that contain rank 0, because the times accumulate until then.
func (c *Coordinator) Trace(on bool) {
	c.waits.trace = on
	if on {
		return
	}
	for _, s := range c.sets.sets {
		s.arrivals = arrivals{}
		for _, row := range s.rows {
			row.arrivals = nil
		}
	}
}

// Arrivals returns the arrival times of the requests for the tensors of one grant of a process set. This is
// the oldest grant for which Arrivals has not been called. tensors is the number of tensors in that grant.
// The result is ordered by tensor, then by member. A time is 0 if the member had joined or if the time is
// unknown. The result is nil unless Trace is on and rank 0 is a member. It is valid until the next turn.
func (c *Coordinator) Arrivals(id topo.ProcessSetID, tensors int) []time.Duration {
	s := c.sets.find(id)
	if s == nil || !c.waits.trace {
		return nil
	}
	a := &s.arrivals
	n := tensors * len(s.Ranks)
	if len(a.granted)-a.taken < n {
		return nil
	}
	at := a.granted[a.taken : a.taken+n]
	a.taken += n
	if a.taken == len(a.granted) {
		a.granted, a.taken = a.granted[:0], 0
	}
	return at
}

// Stats returns the counters of the coordinator since the epoch began.
func (c *Coordinator) Stats() trace.Coordinator {
	st := trace.Coordinator{Cycles: c.cycle, Late: c.waits.late.Ranks(), StallReports: c.stallReports}
	for _, s := range c.sets.sets {
		s.eachWaiting(func(w *wait, _ groupKey, _ func() Stall) {
			if w.reports > 0 {
				st.Stalled++
			}
		})
	}
	for r := range c.ranks.all {
		if e := &c.ranks.all[r].executing; e.tensor != "" && e.reports > 0 {
			st.Stalled++
			break // count once, because the oldest operation is usually the same at all ranks
		}
	}
	return st
}
