package controller_test

import (
	"fmt"
	"math/rand/v2"
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

// A decision is repeated only if rank 0 decides the same, although groups are incomplete, ranks have joined,
// or settings and parameters of tensors change. lockstepJob.cycle fails if rank 0 decides otherwise.
func TestRepeatedDecisionsAreThoseOfRank0(t *testing.T) {
	repeats := 0
	for _, seed := range seeds(200) {
		rng := rand.New(rand.NewPCG(seed, 0))
		sets := []controller.Set{controller.Global(3), {ID: 1, Ranks: []topo.Rank{0, 2}}}
		j := newLockstepJob(t, controller.CoordinatorConfig{Sets: sets, CacheCapacity: 3 + rng.IntN(80),
			FusionThresholdBytes: int64(8 * rng.IntN(4)), Plan: plan()})
		j.midway = func() {
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
		repeats += j.repeats
	}
	if *seedFlag == 0 && repeats < 200 {
		t.Errorf("%d decisions were repeated, want at least 200", repeats)
	}
}

// If rank 0 decides otherwise than the other ranks repeat, which only a bug can cause, the job fails.
func TestRank0DecidesOtherwise(t *testing.T) {
	algorithm := message.Ring
	j, submit := repeatJob(t, controller.CoordinatorConfig{Plan: func([]topo.Rank, *message.Response, int64,
		*message.Tuning) (message.Backend, message.Algorithm, error) {
		return message.TCP, algorithm, nil
	}})
	for range 4 {
		submit("a")
		j.cycle()
	}
	algorithm = message.Tree
	submit("a")
	for _, l := range j.ranks {
		l.Vectors()
	}
	_, broadcast, repeated := j.ranks[0].Combine([]uint64{1}, []uint64{0, 1})
	if broadcast || repeated != nil {
		t.Errorf("rank 0: broadcast %v, repeated %v, want neither", broadcast, repeated)
	}
	if v := verdictOf(j.coord); v == nil || !slices.Equal(v.Ranks, []topo.Rank{0}) ||
		!strings.Contains(v.Reason, "but the other ranks repeat") {
		t.Errorf("got verdict %v, want one on rank 0", v)
	}
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
	j.midway = func() { j.coord.Tick(time.Second) }
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
		{timeout, 4, "the operation was granted and has not finished"},
		{timeout, 5, ""},
	} {
		j, submit := repeatJob(t, controller.CoordinatorConfig{})
		for range 4 {
			submit("a")
			j.cycle()
		}
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
