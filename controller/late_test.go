package controller_test

import (
	"slices"
	"testing"
	"time"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
)

// arrivals drives a coordinator with the frames of all ranks of a job, and checks the arrival times that the
// coordinator records.
type arrivals struct {
	t *testing.T
	c *controller.Coordinator
}

func newArrivals(t *testing.T, sets ...controller.Set) *arrivals {
	c := controller.NewCoordinator(controller.CoordinatorConfig{
		Sets: append([]controller.Set{controller.Global(3)}, sets...), CacheCapacity: 2,
		FusionThresholdBytes: 1 << 20,
		LivenessTimeout:      time.Hour, StallWarning: time.Second, Plan: plan(),
	}, 0)
	return &arrivals{t, c}
}

// at makes rank r send news, with u as its content, ms milliseconds after the start. Then it executes a turn
// of the coordinator.
func (a *arrivals) at(ms int, r topo.Rank, seen uint64, u message.UpSet) {
	a.t.Helper()
	a.c.Tick(time.Duration(ms) * time.Millisecond)
	a.c.Step(r, &message.Up{Type: message.UpNews, Seen: seen, Sets: []message.UpSet{u}})
	a.c.Expire()
	for _, o := range a.c.Ready() {
		if o.Down.Type == message.DownFail {
			a.t.Fatalf("the job failed: %s", o.Down.Reason)
		}
	}
	a.c.Advance()
}

func asks(names ...string) (u message.UpSet) {
	for _, n := range names {
		u.Requests = append(u.Requests, allreduce(n, 1))
	}
	return u
}

func (a *arrivals) want(set topo.ProcessSetID, tensors int, ms ...int) {
	a.t.Helper()
	var want []time.Duration
	for _, m := range ms {
		want = append(want, time.Duration(m)*time.Millisecond)
	}
	if got := a.c.Arrivals(set, tensors); !slices.Equal(got, want) {
		a.t.Errorf("got arrival times %v, want %v", got, want)
	}
}

func (a *arrivals) wantLate(want ...trace.HeldUp) {
	a.t.Helper()
	if got := a.c.Stats().Late; !slices.Equal(got, want) {
		a.t.Errorf("got lateness %+v, want %+v", got, want)
	}
}

// Arrivals returns the arrival times of full requests and of votes, in the order of the responses in a grant.
func TestArrivals(t *testing.T) {
	a := newArrivals(t)
	a.c.Trace(true)
	a.at(1, 1, 0, asks("a", "b"))
	a.at(2, 0, 0, asks("b"))
	a.at(5, 2, 0, asks("b", "a")) // this request completes b, which is granted
	a.want(0, 1, 2, 1, 5)
	// This request completes a. The coordinator grants a although b is unfinished, because the gate is open
	// while at most one grant is unfinished.
	a.at(9, 0, 1, asks("a"))
	a.want(0, 1, 9, 1, 5)
	a.wantLate(trace.HeldUp{Rank: 0, Last: 1, Held: 4 * time.Millisecond}, trace.HeldUp{Rank: 1},
		trace.HeldUp{Rank: 2, Last: 1, Held: 3 * time.Millisecond})

	// Now b has bit 0, and a has bit 1. The tensor c is not cached. It is requested in full, and its request
	// comes between the votes for a and b.
	a.at(20, 0, 2, message.UpSet{Done: 2})
	all := func() message.UpSet {
		u := asks("c")
		u.Hits = bits(0, 1)
		return u
	}
	a.at(21, 0, 2, all())
	a.at(22, 2, 2, all())
	a.at(25, 1, 2, all())
	a.want(0, 3, 21, 25, 22, 21, 25, 22, 21, 25, 22)
	a.want(0, 1) // a second call returns nothing
	// Rank 1 held up the other ranks for 3 ms in total, and not for 3 ms for each of the three tensors.
	a.wantLate(trace.HeldUp{Rank: 0, Last: 1, Held: 4 * time.Millisecond},
		trace.HeldUp{Rank: 1, Last: 3, Held: 3 * time.Millisecond}, trace.HeldUp{Rank: 2, Last: 1,
			Held: 3 * time.Millisecond})
}

// If a cache entry is erased, the coordinator turns the votes for it into requests. These requests keep the
// arrival times of the votes.
func TestArrivalsOfAnErasedBit(t *testing.T) {
	a := newArrivals(t)
	a.c.Trace(true)
	for r := range topo.Rank(3) {
		a.at(1, r, 0, asks("a"))
	}
	a.want(0, 1, 1, 1, 1)
	a.at(3, 1, 1, message.UpSet{Hits: bits(0)})
	other := message.UpSet{Invalid: bits(0), Requests: []message.Request{allreduce("a", 2)}}
	a.at(7, 2, 1, other)
	a.at(8, 0, 1, other) // the answer is an error, because rank 1 has voted for another shape
	a.want(0, 1, 8, 3, 7)
	a.wantLate(trace.HeldUp{Rank: 0, Last: 1, Held: time.Millisecond}, trace.HeldUp{Rank: 1},
		trace.HeldUp{Rank: 2})
}

// The coordinator keeps no arrival times for a set without rank 0, because Arrivals is never called for such
// a set. It also keeps no arrival times after Trace(false).
func TestArrivalsThatNobodyAsksFor(t *testing.T) {
	a := newArrivals(t, controller.Set{ID: 1, Ranks: []topo.Rank{1, 2}})
	a.c.Trace(true)
	u := asks("a")
	u.Set = 1
	a.at(1, 1, 0, u)
	a.at(2, 2, 0, u)
	a.want(1, 1)
	a.wantLate(trace.HeldUp{Rank: 0}, trace.HeldUp{Rank: 1}, trace.HeldUp{Rank: 2, Last: 1,
		Held: time.Millisecond})

	a.at(3, 0, 0, asks("b"))
	a.c.Trace(false)
	a.at(4, 1, 1, asks("b"))
	a.at(5, 2, 1, asks("b"))
	a.want(0, 1)
	a.c.Trace(true)
	a.at(6, 0, 2, asks("d"))
	a.at(7, 1, 2, asks("d"))
	a.at(8, 2, 2, asks("d"))
	a.want(0, 1, 6, 7, 8)
}

func TestStallsAreCounted(t *testing.T) {
	a := newArrivals(t)
	a.at(1, 1, 0, asks("a", "b"))
	a.at(1500, 0, 0, message.UpSet{})
	if st := a.c.Stats(); st.Stalled != 2 || st.StallReports != 2 {
		t.Errorf("%d stalled and %d reports, want 2 and 2", st.Stalled, st.StallReports)
	}
	a.at(2500, 0, 0, asks("a"))
	a.at(2600, 2, 0, asks("a")) // a is granted
	if st := a.c.Stats(); st.Stalled != 1 || st.StallReports != 4 || st.Cycles != 1 {
		t.Errorf("%d stalled and %d reports in %d cycles, want 1, 4 and 1", st.Stalled, st.StallReports,
			st.Cycles)
	}
}

func bits(set ...uint32) (v message.Bits) {
	for _, b := range set {
		v.Set(b)
	}
	return v
}
