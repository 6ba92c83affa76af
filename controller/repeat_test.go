package controller_test

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
)

// repeatJob returns a job in lock-step in which submit submits tensors of one letter at all ranks.
func repeatJob(tb testing.TB, cfg controller.CoordinatorConfig) (j *lockstepJob, submit func(names string)) {
	cfg.Sets = []controller.Set{controller.Global(2)}
	cfg.CacheCapacity, cfg.FusionThresholdBytes = 8, 1<<20
	if cfg.Plan == nil {
		cfg.Plan = plan()
	}
	j = newLockstepJob(tb, cfg)
	return j, func(names string) {
		for rank := range j.ranks {
			for _, name := range names {
				j.submit(rank, request{q: allreduce(string(name), 1)})
			}
		}
	}
}

// In lock-step, rank 0 does not broadcast a decision that all ranks know: the decision about the same tensors
// as in an earlier cycle. Nothing is known any more after a gather.
func TestRepeatedDecisions(t *testing.T) {
	j, submit := repeatJob(t, controller.CoordinatorConfig{})
	for i, step := range []struct {
		names    string
		repeated bool
	}{
		{"ab", false}, {"ab", false}, {"ab", false}, {"ab", true}, {"a", false}, {"ab", true}, {"a", true},
		{"c", false}, {"a", false}, {"a", false}, {"a", true}, {"abc", false}, {"abc", true},
	} {
		before := j.repeats
		submit(step.names)
		j.cycle()
		if got := j.repeats > before; got != step.repeated {
			t.Errorf("step %d (%s): repeated %v, want %v", i, step.names, got, step.repeated)
		}
		for rank, p := range j.pending {
			if len(p) > 0 {
				t.Fatalf("step %d: rank %d waits for %v", i, rank, p)
			}
		}
	}
	if !slices.Equal(j.grants[0], j.grants[1]) {
		t.Errorf("rank 0 runs\n%v\nrank 1\n%v", j.grants[0], j.grants[1])
	}
}

// A repeated decision makes its tensors the most recently used ones of rank 0's cache, as any decision does.
func TestRepeatedDecisionsUseTheCache(t *testing.T) {
	j, submit := repeatJob(t, controller.CoordinatorConfig{})
	for _, names := range []string{"abcdefgh", "a", "a", "bcdefgh"} { // the cache has 8 entries
		submit(names)
		j.cycle()
	}
	submit("a")
	if j.cycle(); j.repeats != 1 {
		t.Fatalf("repeated %d decisions, want 1", j.repeats)
	}
	submit("i") // evicts b
	j.cycle()
	before := j.gathers
	submit("a")
	if j.cycle(); j.gathers != before {
		t.Error("the cache has evicted a, which was used last")
	}
}

// With long bit vectors, decisions are not remembered, because that would take much memory.
func TestRepeatedDecisionsAreSmall(t *testing.T) {
	for words, want := range map[int]int{8192: 2, 8193: 0} {
		j, _ := repeatJob(t, controller.CoordinatorConfig{})
		for _, l := range j.ranks {
			l.SetWords(words)
		}
		for range 5 {
			for rank := range j.ranks {
				j.submit(rank, request{q: allreduce("a", 1)})
			}
			j.cycle()
		}
		if j.repeats != want {
			t.Errorf("with %d words, %d decisions were repeated, want %d", words, j.repeats, want)
		}
	}
}

// A rank that has voted before its join takes part in these operations, and is absent from later ones. So no
// decision is repeated that rank 0 has taken while such votes were pending.
func TestRepeatedDecisionsAfterJoin(t *testing.T) {
	j, submit := repeatJob(t, controller.CoordinatorConfig{})
	submit("ab")
	j.cycle()
	for _, name := range []string{"a", "b"} {
		j.submit(1, request{q: allreduce(name, 1)})
	}
	j.submit(1, request{q: message.Request{Kind: message.Join, Name: "j"}})
	j.cycle()
	for _, name := range []string{"a", "b", "b"} {
		j.submit(0, request{q: allreduce(name, 1)})
		if j.cycle(); len(j.pending[0]) > 0 {
			t.Fatalf("rank 0 waits for %v", j.pending[0])
		}
	}
	for _, l := range j.grants {
		if last := l[len(l)-1]; !strings.Contains(last, "without [1]") {
			t.Errorf("the last grant is %s, want one without rank 1", last)
		}
	}
}

// A decision is repeated only if rank 0 would decide the same, although groups are incomplete, ranks have
// joined, or settings and parameters of tensors change. Rank 0 counts and caches as if it had decided.
func TestRepeatedDecisionsAreThoseOfRank0(t *testing.T) {
	repeats := 0
	for _, seed := range seeds(200) {
		repeating, deciding := repeatProgram(t, seed, false), repeatProgram(t, seed, true)
		repeats += repeating.repeats
		for r := range repeating.grants {
			if got, want := repeating.grants[r], deciding.grants[r]; !slices.Equal(got, want) {
				t.Fatalf("seed %d: rank %d runs\n%v\nwithout repeated decisions\n%v", seed, r, got, want)
			}
		}
		if got, want := repeating.arrivals, deciding.arrivals; !slices.Equal(got, want) {
			t.Fatalf("seed %d: the requests arrive at\n%v\nwithout repeated decisions at\n%v", seed, got, want)
		}
		if got, want := repeating.coord.Stats(), deciding.coord.Stats(); !reflect.DeepEqual(got, want) {
			t.Fatalf("seed %d: rank 0 has counted\n%+v\nwithout repeated decisions\n%+v", seed, got, want)
		}
		if got, want := repeating.events, deciding.events; !slices.Equal(got, want) {
			t.Fatalf("seed %d: rank 0 reports\n%v\nwithout repeated decisions\n%v", seed, got, want)
		}
		if got, want := repeating.coord.Counters(), deciding.coord.Counters(); !slices.Equal(got, want) {
			t.Fatalf("seed %d: rank 0 has the counters\n%d\nwithout repeated decisions\n%d", seed, got, want)
		}
	}
	if *seedFlag == 0 && repeats < 100 {
		t.Errorf("%d decisions were repeated, want at least 100", repeats)
	}
}

// repeatProgram runs the random program of a seed and returns its job. If forgets is set, rank 0 decides each
// cycle.
func repeatProgram(t *testing.T, seed uint64, forgets bool) *lockstepJob {
	rng := rand.New(rand.NewPCG(seed, 0))
	sets := []controller.Set{controller.Global(3), {ID: 1, Ranks: []topo.Rank{0, 2}},
		{ID: 2, Ranks: []topo.Rank{1, 2}}}
	j := newLockstepJob(t, controller.CoordinatorConfig{Sets: sets, CacheCapacity: 3 + rng.IntN(80),
		FusionThresholdBytes: int64(8 * rng.IntN(4)), Plan: plan(), StallWarning: time.Microsecond})
	j.forgets = forgets
	j.coord.Trace(true)
	now := time.Duration(0)
	j.midway = func() {
		now += time.Duration(rng.IntN(1000))
		tick(j.coord, now)
		if rng.IntN(40) == 0 {
			j.coord.Tune(message.Tuning{FusionThresholdBytes: int64(8 * rng.IntN(4)),
				CacheOff: rng.IntN(10) == 0})
		}
	}
	member := func(name string) message.Request {
		q := allreduce(name, 1)
		if rng.IntN(30) == 0 {
			q = allreduce(name, 2)
		}
		q.Group, q.GroupSize = "group", 2
		return q
	}
	for range 100 {
		s := sets[rng.IntN(len(sets))]
		ranks := s.Ranks
		var requests []message.Request
		switch rng.IntN(10) {
		case 0:
			requests = append(requests, allreduce("changes", int64(rng.IntN(3))))
		case 1, 2, 3, 4:
			requests = append(requests, member("g"), member("h"))
			rng.Shuffle(2, func(i, j int) { requests[i], requests[j] = requests[j], requests[i] })
		case 5:
			// The first rank joins now, perhaps after some requests, and the others join when they have
			// submitted some tensors.
			for i := range rng.IntN(3) {
				j.submit(int(ranks[0]), request{set: s.ID, q: allreduce(fmt.Sprint("t", i), 1)})
			}
			join := request{set: s.ID, q: message.Request{Kind: message.Join, Name: "j"}}
			j.submit(int(ranks[0]), join)
			if rng.IntN(2) == 0 {
				j.cycle()
			}
			for i := range rng.IntN(5) {
				for _, rank := range ranks[1:] {
					j.submit(int(rank), request{set: s.ID, q: allreduce(fmt.Sprint("t", min(i, 1)), 1)})
				}
				j.cycle()
				j.cycle()
			}
			ranks, requests = ranks[1:], append(requests, join.q)
		default:
			for i := range 1 + rng.IntN(3) {
				requests = append(requests, allreduce(fmt.Sprint("t", i), 1))
			}
		}
		split := rng.IntN(3) == 0
		for _, q := range requests {
			for _, rank := range ranks {
				j.submit(int(rank), request{set: s.ID, q: q})
				if rng.IntN(8) == 0 {
					j.cycle()
				}
			}
			if split {
				j.cycle()
			}
			if split && q.Group != "" { // the first tensor of the group waits for the second one
				for _, rank := range ranks {
					j.submit(int(rank), request{set: s.ID, q: allreduce("between", 1)})
				}
				j.cycle()
				j.cycle()
			}
		}
		for range 4 {
			j.cycle()
		}
		for rank, p := range j.pending {
			if len(p) > 0 {
				t.Fatalf("seed %d: rank %d waits for %v", seed, rank, p)
			}
		}
	}
	return j
}

// A stop that rank 0 decides in the middle of a cycle with a repeated decision comes with the next cycle.
func TestStopDuringRepeatedDecision(t *testing.T) {
	j, submit := repeatJob(t, controller.CoordinatorConfig{StallWarning: time.Second,
		StallShutdown: time.Second})
	submit("a")
	j.cycle()
	j.submit(0, request{q: allreduce("stalls", 1)})
	for range 4 {
		submit("a")
		j.cycle()
	}
	before := j.repeats
	j.midway = func() { tick(j.coord, time.Second) }
	submit("a")
	if j.cycle(); j.repeats == before || j.ranks[0].stop {
		t.Errorf("repeated %d decisions, stopped %v, want one and no stop", j.repeats-before, j.ranks[0].stop)
	}
	j.cycle()
	for r, l := range j.ranks {
		if !l.stop || !strings.Contains(l.stopReason, `allreduce "stalls"`) {
			t.Errorf("rank %d: stopped %v with reason %q, want a stop because of the stall", r, l.stop,
				l.stopReason)
		}
	}
}

// A rank that repeats a decision may acknowledge a cycle before rank 0 has decided it. Rank 0 cannot judge a
// timeout of that rank yet, so it leaves it to the next report.
func TestAcknowledgedBeforeDecided(t *testing.T) {
	heartbeat := message.Up{Type: message.UpHeartbeat}
	timeout := message.Up{Type: message.UpTimeout, Tensor: "a", Millis: 500, Granted: true}
	for _, c := range []struct {
		up   message.Up
		seen uint64
		want string
	}{
		{heartbeat, 5, ""},
		{heartbeat, 6, "got an acknowledgment of cycle 6, want a cycle from 0 to 5"},
		{timeout, 4, `rank 1 has not finished "a"`},
		{timeout, 5, ""},
	} {
		j, submit := repeatJob(t, controller.CoordinatorConfig{})
		for range 4 {
			submit("a")
			j.cycle()
		}
		j.coord.Step(1, &message.Up{Type: message.UpHeartbeat, Tensor: "a", Millis: 1000})
		c.up.Seen = c.seen
		j.coord.Step(1, &c.up)
		got := ""
		if v := verdictOf(j.coord); v != nil {
			got = v.Reason
		}
		if (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("%v after cycle %d: got verdict %q, want %q", c.up.Type, c.seen, got, c.want)
		}
	}
}
