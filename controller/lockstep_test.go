package controller_test

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
)

// lockstepJob is a job in lock-step. It executes the collectives of the negotiation by function calls,
// without connections.
type lockstepJob struct {
	tb    testing.TB
	sets  []controller.Set
	coord *controller.Coordinator
	ranks []lockstepRank
	// pending holds the unanswered requests of each rank, and answers holds the answers to its earlier
	// requests.
	pending [][]request
	answers []map[string]string
	turns   []map[string]int
	// grants holds the grants of each rank, in the order in which it got them. segments holds their segment
	// sizes.
	grants, segments [][]string
	gathers, repeats int // numbers of cycles with a gather, and with a repeated decision
	gone             []topo.ProcessSetID
	names            setNames
	forgets          bool     // whether no decision is repeated
	arrivals         []string // the arrival times of the requests for each grant of rank 0
	events           []string // the stalls that rank 0 has reported
	midway           func()   // called in every cycle after the vectors were made; may be nil
}

// lockstepRank is a rank of a lockstepJob.
type lockstepRank struct {
	*controller.Member
	*controller.Lockstep
	stop       bool // whether the rank was stopped
	stopReason string
}

func newLockstepJob(tb testing.TB, cfg controller.CoordinatorConfig) *lockstepJob {
	cfg.Lockstep, cfg.LivenessTimeout = true, livenessTimeout
	j := &lockstepJob{tb: tb, sets: cfg.Sets, names: make(setNames), coord: controller.NewCoordinator(cfg, 0)}
	for _, r := range cfg.Sets[0].Ranks {
		m := controller.NewMember(controller.MemberConfig{Rank: r, Sets: cfg.Sets,
			LivenessTimeout: livenessTimeout, Lockstep: true}, 0)
		c := j.coord
		if r != 0 {
			c = nil
		}
		j.ranks = append(j.ranks,
			lockstepRank{Member: m, Lockstep: controller.NewLockstep(m, c)})
		j.answers = append(j.answers, make(map[string]string))
		j.turns = append(j.turns, make(map[string]int))
	}
	j.pending = make([][]request, len(j.ranks))
	j.grants, j.segments = make([][]string, len(j.ranks)), make([][]string, len(j.ranks))
	return j
}

func (j *lockstepJob) submit(rank int, r request) {
	j.tb.Helper()
	if err := j.ranks[rank].Submit(r.set, &r.q); err != nil {
		j.tb.Fatal(err)
	}
	j.pending[rank] = append(j.pending[rank], r)
}

// cycle executes one cycle at all ranks. It reports whether rank 0 has decided anything.
func (j *lockstepJob) cycle() bool {
	j.tb.Helper()
	var and, or []uint64
	for i, l := range j.ranks {
		if j.forgets {
			l.Forget()
		}
		a, o := l.Vectors()
		if i == 0 {
			and, or = slices.Clone(a), slices.Clone(o)
			continue
		}
		if len(a) != len(and) || len(o) != len(or) {
			j.tb.Fatalf("rank %d has vectors of %d and %d words, rank 0 of %d and %d", i, len(a), len(o),
				len(and), len(or))
		}
		for w := range a {
			and[w] &= a[w]
		}
		for w := range o {
			or[w] |= o[w]
		}
	}
	if j.midway != nil {
		j.midway()
	}
	for _, e := range j.coord.Events() {
		j.events = append(j.events, fmt.Sprint(e.Stall))
	}
	var gather, broadcast bool
	var repeated []*message.Down
	for i, l := range j.ranks {
		g, b, r := l.Combine(and, or)
		if i > 0 && (g != gather || b != broadcast) {
			j.tb.Fatalf("rank %d: gather %v, broadcast %v; rank 0: %v, %v", i, g, b, gather, broadcast)
		}
		gather, broadcast, repeated = g, b, append(repeated, r)
		if (r == nil) != (repeated[0] == nil) {
			j.tb.Fatalf("rank %d repeats %v; rank 0: %v, verdict %v", i, r, repeated[0], verdictOf(j.coord))
		}
	}
	if repeated[0] != nil {
		j.repeats++
		for i, d := range repeated {
			j.apply(i, d)
		}
		j.checkCaches()
		return true
	}
	if !broadcast {
		if gather {
			j.tb.Fatal("a gather and no broadcast")
		}
		return false
	}
	var ups []*message.Up
	if gather {
		j.gathers++
		for _, l := range j.ranks {
			frame, err := message.AppendUp(nil, l.Gather())
			if err != nil {
				j.tb.Fatal(err)
			}
			u := new(message.Up)
			if err := message.DecodeUp(frame, u); err != nil {
				j.tb.Fatal(err)
			}
			ups = append(ups, u)
		}
	}
	down := j.ranks[0].Decide(ups)
	if down == nil {
		j.tb.Fatalf("rank 0 has failed the job: %v", verdictOf(j.coord))
	}
	frame, err := message.AppendDown(nil, down)
	if err != nil {
		j.tb.Fatal(err)
	}
	for i, l := range j.ranks {
		d := new(message.Down)
		if err := message.DecodeDown(frame, d); err != nil {
			j.tb.Fatal(err)
		}
		j.apply(i, d)
		l.Decided(d)
	}
	j.checkCaches()
	return true
}

// checkCaches checks that the members of each set have the same cache.
func (j *lockstepJob) checkCaches() {
	j.tb.Helper()
	for _, s := range j.sets {
		for _, r := range s.Ranks {
			if j.ranks[r].Digest(s.ID) != j.ranks[s.Ranks[0]].Digest(s.ID) {
				j.tb.Fatalf("caches of set %d differ at ranks %d and %d", s.ID, s.Ranks[0], r)
			}
		}
	}
}

// checkAnswered checks that no rank waits for an answer.
func (j *lockstepJob) checkAnswered() {
	j.tb.Helper()
	for rank, pending := range j.pending {
		if len(pending) > 0 {
			j.tb.Fatalf("rank %d still waits for %v", rank, pending)
		}
	}
}

func (j *lockstepJob) apply(rank int, d *message.Down) {
	j.tb.Helper()
	m := &j.ranks[rank]
	if err := m.Step(d); err != nil {
		j.tb.Fatal(err)
	}
	ready := m.Ready()
	grants := slices.Clone(ready.Grants)
	m.stop, m.stopReason = ready.Stop, ready.StopReason
	m.Advance()
	for _, g := range grants {
		j.grants[rank] = append(j.grants[rank], grantKey(g.Set, g.Backend, g.Algorithm, g.Absent,
			g.Responses))
		if rank == 0 {
			j.arrivals = append(j.arrivals, fmt.Sprint(j.coord.Arrivals(g.Set, len(g.Responses))))
		}
		j.segments[rank] = append(j.segments[rank], fmt.Sprintf("set %d %d bytes", g.Set, g.SegmentBytes))
		for _, r := range g.Responses {
			if slices.Contains(g.Absent, topo.Rank(rank)) {
				continue
			}
			p := answers(j.pending[rank], topo.Rank(rank), g, r)
			if p < 0 {
				j.tb.Fatalf("rank %d got an answer to %q of set %d, which it does not wait for", rank, r.Name,
					g.Set)
			}
			j.names.answered(j.tb, j.pending[rank][p], r)
			j.pending[rank] = slices.Delete(j.pending[rank], p, p+1)
			answer(j.answers[rank], j.turns[rank], j.names, g, r)
			j.change(r)
		}
	}
	removed := removals(grants)
	for _, g := range grants {
		m.Finished(g)
	}
	for _, id := range removed {
		for _, p := range j.pending[rank] {
			if p.set == id {
				j.tb.Fatalf("rank %d waits for %q of set %d, which is removed", rank, p.q.Name, id)
			}
		}
	}
}

// verdictOf returns the verdict that c will send next, or nil if there is none.
func verdictOf(c *controller.Coordinator) *controller.Verdict {
	c.Expire()
	for _, o := range c.Ready() {
		if o.Down.Type == message.DownFail {
			return &controller.Verdict{Ranks: o.Down.Ranks, Reason: o.Down.Reason}
		}
	}
	return nil
}

// change records that a response has added or removed a process set. The first rank that gets the response
// changes the sets of the whole job.
func (j *lockstepJob) change(r *message.Response) {
	known := slices.ContainsFunc(j.sets, func(s controller.Set) bool { return s.ID == r.Set })
	switch {
	case r.Kind == message.AddProcessSet && !known:
		j.sets = append(j.sets, controller.Set{ID: r.Set, Ranks: r.Ranks})
	case r.Kind == message.RemoveProcessSet && known:
		j.gone = append(j.gone, r.Set)
		j.sets = slices.DeleteFunc(slices.Clone(j.sets), func(s controller.Set) bool { return s.ID == r.Set })
	}
}

// answer records the answer to the next request for a name. It does not record which rank joined last,
// because that depends on timing. The IDs of sets that the programs have added also depend on timing, so it
// records their planned IDs.
func answer(answers map[string]string, turns map[string]int, names setNames, g *controller.Grant,
	r *message.Response) {
	planned := *r
	switch planned.Set = names.planned(r.Set); r.Kind {
	case message.Join:
		planned = message.Response{Kind: r.Kind, Name: r.Name}
	case message.Error:
		planned.Set = 0
		planned.Text = numberedSet.ReplaceAllStringFunc(r.Text, func(text string) string {
			id, _ := strconv.Atoi(strings.TrimPrefix(text, "process set "))
			return fmt.Sprintf("process set %d", names.planned(topo.ProcessSetID(id)))
		})
	}
	if r.Devices != nil && len(g.Absent) > 0 {
		planned.Devices = []tensor.Device{tensor.CUDA(0)} // of an absent rank it may be an older one
	}
	set := names.planned(g.Asked)
	name := fmt.Sprintf("set %d %q", set, r.Name)
	turns[name]++
	answers[fmt.Sprintf("%s, turn %d", name, turns[name])] = grantKey(set, 0, 0, g.Absent,
		[]*message.Response{&planned})
}

var numberedSet = regexp.MustCompile(`process set \d+`)

// unwatched is a watcher that ignores all events.
type unwatched struct{}

func (unwatched) submitted(*node, request)                    {}
func (unwatched) sent(*node, *message.Up)                     {}
func (unwatched) arrived(*node, *message.Up)                  {}
func (unwatched) relayed(*message.Part, *message.Up)          {}
func (unwatched) issued([]controller.Outgoing)                {}
func (unwatched) applied(*node, *message.Down)                {}
func (unwatched) granted(*node, *controller.Grant)            {}
func (unwatched) finished(*node, *controller.Grant)           {}
func (unwatched) stop(*node, string, []request)               {}
func (unwatched) happened(controller.Event)                   {}
func (unwatched) removed(*node, topo.ProcessSetID, []request) {}
func (unwatched) closed(*node)                                {}
func (unwatched) failed(*node, *controller.Verdict)           {}
func (unwatched) frameReceived()                              {}

// answering records the answers that each rank gets in a job that negotiates by events.
type answering struct {
	*checker
	answers []map[string]string
	turns   []map[string]int
}

func (a *answering) granted(n *node, g *controller.Grant) {
	a.checker.granted(n, g)
	for _, r := range g.Responses {
		if !slices.Contains(g.Absent, n.rank) {
			a.c.names.answered(a.t, n.pending[n.asked(g, r)], r)
			answer(a.answers[n.rank], a.turns[n.rank], a.c.names, g, r)
		}
	}
}

// TestEventsAndLockstepAgree checks invariant 14: if the ranks of a job that negotiates by events and the
// ranks of a job in lock-step submit the same requests, they get the same answers. This holds for all cache
// capacities and fusion thresholds, with and without leaders.
func TestEventsAndLockstepAgree(t *testing.T) {
	n := 300
	if testing.Short() {
		n = 30
	}
	for _, seed := range seeds(n) {
		rng := rand.New(rand.NewPCG(seed, 0))
		pick := func(v ...int) int { return v[rng.IntN(len(v))] }
		sets := randomSets(rng)
		programs := randomPrograms(rng, sets, 1+rng.IntN(16), false)

		cfg := controller.CoordinatorConfig{
			Sets: sets, CacheCapacity: pick(0, 1, 2, 4, 64), FusionThresholdBytes: int64(pick(0, 16, 1<<20)),
			LivenessTimeout: livenessTimeout, Plan: plan(refusedType),
		}
		if pick(0, 1) == 1 {
			cfg.Leaders = randomLeaders(rng, len(sets[0].Ranks))
		}
		events := &answering{checker: newChecker(t, seed, cfg)}
		events.c.watch = events
		for range sets[0].Ranks {
			events.answers = append(events.answers, make(map[string]string))
			events.turns = append(events.turns, make(map[string]int))
		}
		r := &run{checker: events.checker, rng: rng, todo: slices.Clone(programs), halfDead: -1}
		for range 300 {
			r.act()
		}
		r.finish()

		l := newLockstepJob(t, controller.CoordinatorConfig{
			Sets: sets, CacheCapacity: pick(0, 1, 2, 4, 64, 65),
			FusionThresholdBytes: int64(pick(0, 16, 1<<20)), Plan: plan(refusedType),
			DisableGroupFusion: pick(0, 1) == 1, Deterministic: pick(0, 1) == 1,
		})
		l.run(rng, programs, r.randomTuning)
		for rank := range programs {
			if got, want := sameReasons(l.answers[rank]), sameReasons(
				events.answers[rank]); !reflect.DeepEqual(got, want) {
				events.broken(14, "rank %d is answered\n%v", rank, differences(want, got))
			}
		}
		for _, s := range l.sets {
			for _, r := range s.Ranks {
				if got, want := ofSet(l.grants[r], s.ID), ofSet(l.grants[s.Ranks[0]], s.ID); !slices.Equal(
					got, want) {
					events.broken(1, "in lock-step rank %d runs\n%v\nrank %d\n%v", r, got, s.Ranks[0], want)
				}
				if got, want := ofSet(l.segments[r], s.ID), ofSet(l.segments[s.Ranks[0]],
					s.ID); !slices.Equal(got, want) {
					events.broken(1, "in lock-step rank %d has segments of\n%v\nrank %d\n%v", r, got, s.Ranks[0],
						want)
				}
			}
		}
	}
}

func ofSet(grants []string, id topo.ProcessSetID) []string {
	var of []string
	for _, g := range grants {
		if strings.HasPrefix(g, fmt.Sprintf("set %d ", id)) {
			of = append(of, g)
		}
	}
	return of
}

// run executes the programs to their ends. In each cycle every rank submits a random number of requests. In
// some cycles the settings change.
func (j *lockstepJob) run(rng *rand.Rand, programs [][]request, tuning func() message.Tuning) {
	j.tb.Helper()
	tune := func() {
		if rng.IntN(10) == 0 {
			j.coord.Tune(tuning())
		}
	}
	j.midway = tune
	todo := slices.Clone(programs)
	cycles := 0
	for idle := 0; idle < 3; {
		if cycles++; cycles > 10_000 {
			j.tb.Fatalf("requests are unanswered after %d cycles: %v", cycles, j.pending)
		}
		for rank := range todo {
			for range rng.IntN(6) {
				if len(todo[rank]) == 0 {
					break
				}
				next, known := j.names.resolve(todo[rank][0])
				if !known {
					break
				}
				turn := turnOf(next, j.pending[rank], j.sets, j.gone)
				if turn == turnLater {
					break
				}
				if turn == turnNow {
					j.submit(rank, next)
				}
				todo[rank] = todo[rank][1:]
			}
		}
		tune()
		decided := j.cycle()
		if idle++; decided || slices.ContainsFunc(todo, func(t []request) bool { return len(t) > 0 }) {
			idle = 0
		}
	}
	j.checkAnswered()
	for rank := range todo {
		if !j.ranks[rank].Quiet() {
			j.tb.Fatalf("rank %d is not quiet, although no rank had votes or news", rank)
		}
	}
}

// news returns the frame of a rank that requests tensors of the set of all ranks.
func news(requests ...message.Request) *message.Up {
	return &message.Up{Type: message.UpNews, Sets: []message.UpSet{{Requests: requests}}}
}

func allreduce(name string, numElems int64) message.Request {
	return message.Request{
		Kind: message.Allreduce, Name: name, DType: tensor.Float32, Shape: tensor.Shape{numElems},
		Op: tensor.Sum, Prescale: 1, Postscale: 1,
	}
}

// If no backend can run cached tensors together because the fused response is too large, each tensor is
// answered once, with an error.
func TestRefusedThoughCached(t *testing.T) {
	large := errors.New("no backend: tcp: more than 16 bytes")
	planner := func(_ []topo.Rank, _ *message.Response, numBytes int64, _ *message.Tuning) (
		message.Backend, message.Algorithm, error,
	) {
		if numBytes > 16 {
			return message.NoBackend, message.NoAlgorithm, large
		}
		return message.TCP, message.Ring, nil
	}
	want := []string{"a run", "b run", "a " + large.Error(), "b " + large.Error(), "a run"}

	t.Run("lockstep", func(t *testing.T) {
		j := newLockstepJob(t, controller.CoordinatorConfig{
			Sets: []controller.Set{controller.Global(2)}, CacheCapacity: 4, FusionThresholdBytes: 64,
			Plan: planner,
		})
		for _, names := range []string{"a", "b", "ab", "a"} {
			for rank := range 2 {
				for _, name := range names {
					j.submit(rank, request{q: allreduce(string(name), 3)})
				}
			}
			for range 3 {
				j.cycle()
			}
		}
		for rank := range 2 {
			if got := results(j.grants[rank]); !slices.Equal(got, want) {
				t.Errorf("rank %d: got %q, want %q", rank, got, want)
			}
		}
	})
	t.Run("events", func(t *testing.T) {
		w := &refusals{}
		c := newCluster(t, controller.CoordinatorConfig{
			Sets: []controller.Set{controller.Global(2)}, CacheCapacity: 4, FusionThresholdBytes: 64,
			LivenessTimeout: livenessTimeout, Plan: planner,
		}, w)
		for _, names := range []string{"a", "b", "ab", "a"} {
			for _, n := range c.nodes {
				for _, name := range names {
					n.submit(topo.Global, allreduce(string(name), 3))
				}
			}
			c.settle()
		}
		if got := results(w.grants); !slices.Equal(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
	})
}

type refusals struct {
	unwatched
	grants []string
}

func (w *refusals) granted(n *node, g *controller.Grant) {
	if n.rank == 1 {
		w.grants = append(w.grants, grantKey(g.Set, g.Backend, g.Algorithm, g.Absent, g.Responses))
	}
}

// results shortens the keys of grants with one response. A short key consists of the name and "run", or of
// the name and the error.
func results(keys []string) []string {
	var short []string
	for _, k := range keys {
		name := strings.Split(k, `"`)[1]
		if at := strings.Index(k, "no backend"); at >= 0 {
			short = append(short, name+" "+strings.TrimSuffix(k[at:], `"`))
		} else {
			short = append(short, name+" run")
		}
	}
	return short
}

// In lock-step, all ranks are stopped in one cycle. It is the cycle in which the last rank leaves, or the
// cycle in which a rank waits for a tensor that a leaving rank has not requested. That cycle still grants
// tensors that every rank has requested.
func TestLockstepShutdown(t *testing.T) {
	start := func() *lockstepJob {
		j := newLockstepJob(t, controller.CoordinatorConfig{
			Sets: []controller.Set{controller.Global(3)}, CacheCapacity: 4, FusionThresholdBytes: 64,
			Plan: plan(), CycleTime: time.Millisecond,
		})
		for range 2 { // a is cached in the second cycle
			for rank := range 3 {
				j.submit(rank, request{q: allreduce("a", 1)})
			}
			j.cycle()
		}
		return j
	}
	t.Run("all", func(t *testing.T) {
		j := start()
		for rank := range 3 {
			j.submit(rank, request{q: allreduce("a", 1)})
			j.ranks[rank].Shutdown("", nil)
			j.cycle()
			for r, l := range j.ranks {
				if l.Quiet() {
					t.Errorf("rank %d is quiet in a cycle with a request and a shutdown", r)
				}
				if last := rank == 2; l.stop != last || l.Over() != last || l.stopReason != "" {
					t.Errorf("rank %d: stopped %v with reason %q, over %v, after %d ranks have left", r,
						l.stop, l.stopReason, l.Over(), rank+1)
				}
			}
		}
		for rank := range 3 {
			if len(j.grants[rank]) != 3 {
				t.Errorf("rank %d ran %v, want a three times", rank, j.grants[rank])
			}
		}
		if err := j.ranks[0].Submit(topo.Global, new(allreduce("c", 1))); err != nil {
			t.Errorf("submit after the stop: %v", err)
		}
		if a, o := j.ranks[0].Vectors(); slices.Max(a) != 0 || slices.Max(o) != 0 {
			t.Errorf("submit after the stop counts: and %x, or %x", a, o)
		}
	})
	for name, tensor := range map[string]string{"cached": "a", "not cached": "b"} {
		t.Run(name, func(t *testing.T) {
			j := start()
			j.ranks[2].Shutdown("that was all", nil)
			j.cycle()
			if next := j.coord.Next(); next < controller.HeartbeatPeriod {
				t.Errorf("the coordinator wants a turn at %v, but only a cycle can make progress", next)
			}
			j.submit(1, request{q: allreduce(tensor, 1)})
			for range 2 { // rank 0 learns of a vote only in the second cycle
				if j.ranks[0].Over() {
					break
				}
				j.cycle()
			}
			want := fmt.Sprintf(
				`shut down (that was all) after 2 operations, the last allreduce "a", while rank 1 waits for allreduce %q`, tensor)
			for r, l := range j.ranks {
				if !l.stop || !strings.HasPrefix(l.stopReason, want) {
					t.Errorf("rank %d: stopped %v with reason %q, want %q", r, l.stop, l.stopReason, want)
				}
			}
		})
	}
}

// The negotiation in lock-step works if bit vectors have more than one word, and if a process set contains
// only some ranks or none. The vectors have as many words as the highest bit so far needs, although a
// decision erases entries and puts others, or puts only low bits.
func TestLockstepManyBits(t *testing.T) {
	sets := []controller.Set{controller.Global(3), {ID: 1, Ranks: []topo.Rank{0, 2}}, {ID: 2}}
	j := newLockstepJob(t, controller.CoordinatorConfig{Sets: sets, CacheCapacity: 1024,
		FusionThresholdBytes: 1 << 20, Plan: plan()})
	// Requests for cached tensors are only votes. So only cycles with new tensors or parameters gather
	// requests.
	for turn, step := range []struct {
		tensors        int
		first          int64 // the number of elements of the first tensor
		words, gathers int
	}{{64, 1, 1, 1}, {65, 2, 2, 2}, {130, 2, 3, 3}, {130, 2, 3, 3}, {130, 3, 3, 4}, {130, 3, 3, 4}} {
		for _, s := range sets {
			for _, r := range s.Ranks {
				for i := range step.tensors {
					numElems := int64(s.ID) + 1
					if i == 0 {
						numElems = step.first
					}
					j.submit(int(r), request{set: s.ID, q: allreduce(fmt.Sprintf("t%d", i), numElems)})
				}
			}
		}
		if !j.cycle() {
			t.Fatalf("turn %d: nothing is decided", turn)
		}
		j.checkAnswered()
		if j.gathers != step.gathers {
			t.Errorf("turn %d: %d gathers so far, want %d", turn, j.gathers, step.gathers)
		}
		if and, or := j.ranks[1].Vectors(); len(and) != 3*step.words || len(or) != 3*step.words+1 {
			t.Errorf("turn %d: got vectors of %d and %d words, want %d and %d", turn, len(and), len(or),
				3*step.words, 3*step.words+1)
		}
	}
	for r, want := range []int{12, 6, 12} {
		if len(j.grants[r]) != want {
			t.Errorf("rank %d ran %d responses, want %d", r, len(j.grants[r]), want)
		}
	}
}

// In lock-step, a cycle without a gather may complete a group and so cache a tensor. It does not evict an
// entry for which a rank has voted in this cycle, because rank 0 does not know this vote.
func TestLockstepKeepsEntriesWithVotes(t *testing.T) {
	j := newLockstepJob(t, controller.CoordinatorConfig{Sets: []controller.Set{controller.Global(2)},
		CacheCapacity: 3, FusionThresholdBytes: 1 << 20, Plan: plan()})
	submit := func(rank int, name string, numElems int64) {
		q := allreduce(name, numElems)
		if name == "g" || name == "h" {
			q.Group, q.GroupSize = "group", 2
		}
		j.submit(rank, request{q: q})
	}
	for _, names := range []string{"x", "gh"} {
		for rank := range 2 {
			for _, name := range names {
				submit(rank, string(name), 1)
			}
		}
		j.cycle()
	}
	for rank := range 2 {
		submit(rank, "h", 2) // has new parameters and waits for g
		submit(rank, "y", 1) // takes the place of h in the cache
	}
	j.cycle()
	before := j.gathers
	submit(0, "x", 1) // the entry that was used last the longest time ago
	for rank := range 2 {
		submit(rank, "g", 1)
	}
	if j.cycle(); j.gathers != before || len(j.pending[1]) > 0 {
		t.Fatalf("%d gathers, and rank 1 waits for %v, want no gather and nothing", j.gathers-before,
			j.pending[1])
	}
	submit(1, "x", 1)
	j.cycle()
	j.checkAnswered()
}

// In lock-step, a change that arrives in the middle of a cycle without a gather waits for a gather. So no
// vote is lost that rank 0 does not know when it erases the cache.
func TestLockstepCacheOff(t *testing.T) {
	j := newLockstepJob(t, controller.CoordinatorConfig{Sets: []controller.Set{controller.Global(2)},
		CacheCapacity: 4, FusionThresholdBytes: 1 << 20, Plan: plan()})
	submit := func(rank int, name string) { j.submit(rank, request{q: allreduce(name, 1)}) }
	for r := range 2 {
		submit(r, "a")
		submit(r, "b")
	}
	j.cycle()
	submit(0, "a")
	submit(0, "b")
	submit(1, "a")
	j.midway = func() { j.coord.Tune(message.Tuning{CacheOff: true}) }
	if j.cycle(); j.gathers != 1 {
		t.Fatalf("%d gathers after a cycle with votes only, want 1", j.gathers)
	}
	j.midway = nil
	j.cycle()
	submit(1, "b")
	for range 3 {
		j.cycle()
	}
	j.checkAnswered()
	empty := controller.NewMember(controller.MemberConfig{Sets: j.sets}, 0)
	if j.ranks[1].Digest(topo.Global) != empty.Digest(topo.Global) {
		t.Error("the cache has entries although it is off")
	}
}

// In lock-step, if a rank sends a frame that breaks the protocol, the job fails, and the verdict names that
// rank.
func TestLockstepErrors(t *testing.T) {
	cfg := controller.CoordinatorConfig{
		Sets:          []controller.Set{controller.Global(2), {ID: 1, Ranks: []topo.Rank{0}}},
		CacheCapacity: 4, FusionThresholdBytes: 64, LivenessTimeout: livenessTimeout, Plan: plan(),
	}
	q := allreduce("a", 1)
	up := func(set topo.ProcessSetID, qs ...message.Request) *message.Up {
		return &message.Up{Type: message.UpNews, Sets: []message.UpSet{{Set: set, Requests: qs}}}
	}
	decide := func(ready uint64, ups ...*message.Up) error {
		j := newLockstepJob(t, cfg)
		j.ranks[0].SetWords(1)
		j.coord.Ready() // as in the turns before the error
		j.coord.Advance()
		j.coord.Next()
		j.ranks[0].Combine([]uint64{ready, 0}, []uint64{0, ready, 0})
		if d := j.ranks[0].Decide(ups); d != nil {
			return nil
		}
		return verdictOf(j.coord)
	}
	step := func(d *message.Down) error {
		d.Type, d.Cycle = message.DownCycle, 1
		return newLockstepJob(t, cfg).ranks[0].Step(d)
	}
	hits := up(0, message.Request{Kind: message.Join, Name: "j"})
	hits.Sets[0].Hits.Set(0)
	for _, c := range []struct {
		name string
		err  error
		want string
	}{
		{"vote for a free bit before a join", decide(0, hits),
			"rank 0 failed: protocol error: responsecache: got a vote for cache bit 0, which had no entry"},
		{"request after a join", decide(0, up(0, message.Request{Kind: message.Join, Name: "j"}, q)),
			`rank 0 failed: protocol error: got a request for allreduce "a" of process set 0 after the rank had joined`},
		{"set that is there",
			step(&message.Down{Sets: []message.DownSet{{Grants: []message.Grant{{Full: []*message.Response{
				{Kind: message.AddProcessSet, Name: "s", Set: 1, Ranks: []topo.Rank{0}},
			}}}}}}), "adds process set 1, which already exists"},
		{"ready bit that is free", decide(1),
			"rank 0 failed: protocol error: responsecache: got a vote for cache bit 0, which had no entry"},
		{"news of another's set", decide(0, up(0), up(1, q)),
			"rank 1 failed: protocol error: got requests for process set 1, but rank 1 is not a member of it"},
		{"second request", decide(0, up(0, q, q)),
			`rank 0 failed: protocol error: got a second request for allreduce "a"`},
		{"submit to another's set", newLockstepJob(t, cfg).ranks[1].Submit(1, &q),
			"rank 1 is not a member of process set 1"},
		{"submit to no set", newLockstepJob(t, cfg).ranks[0].Submit(7, &q),
			"rank 0 is not a member of process set 7"},
	} {
		if c.err == nil || !strings.Contains(c.err.Error(), c.want) {
			t.Errorf("%s: got error %v, want %q", c.name, c.err, c.want)
		}
	}
}

// In lock-step, a rank that has joined cannot submit requests until its join has completed. Afterwards it
// can.
func TestLockstepJoin(t *testing.T) {
	j := newLockstepJob(t, controller.CoordinatorConfig{
		Sets: []controller.Set{controller.Global(3)}, CacheCapacity: 4, FusionThresholdBytes: 64,
		Plan: plan(),
	})
	join := request{q: message.Request{Kind: message.Join, Name: "j"}}
	j.submit(2, join)
	j.submit(0, request{q: allreduce("a", 1)})
	j.cycle()
	if err := j.ranks[2].Submit(topo.Global, new(allreduce("b", 1))); err == nil ||
		!strings.Contains(err.Error(), "this rank has joined process set 0: wait for the join to end") {
		t.Errorf("submit after a join: got error %v", err)
	}
	j.submit(1, request{q: allreduce("a", 1)})
	j.cycle()
	for rank, grants := range j.grants {
		if len(grants) != 1 || !strings.Contains(grants[0], "without [2]") {
			t.Errorf("rank %d runs %v, want a without rank 2", rank, grants)
		}
	}
	j.submit(0, join)
	j.submit(1, join)
	j.cycle()
	if err := j.ranks[2].Submit(topo.Global, new(allreduce("b", 1))); err != nil {
		t.Errorf("submit after the answer: %v", err)
	}
}

// In lock-step, stall reports, operation timeouts and lateness name the ranks that hold up a tensor, whether
// the tensor is cached or not.
func TestLockstepKnowsWhoIsMissing(t *testing.T) {
	for name, warmUp := range map[string]int{"cached": 2, "not cached": 0} {
		t.Run(name, func(t *testing.T) {
			j := newLockstepJob(t, controller.CoordinatorConfig{
				Sets: []controller.Set{controller.Global(3)}, CacheCapacity: 4, FusionThresholdBytes: 64,
				Plan: plan(), StallWarning: time.Second,
			})
			now := time.Duration(0)
			pass := func(d time.Duration) {
				now += d
				tick(j.coord, now)
				for _, l := range j.ranks {
					tick(l, now)
				}
			}
			for range warmUp {
				for rank := range 3 {
					j.submit(rank, request{q: allreduce("a", 1)})
				}
				j.cycle()
			}
			for _, rank := range []int{2, 0} {
				j.submit(rank, request{q: allreduce("a", 1)})
				j.cycle()
				j.cycle() // rank 0 learns of a vote only in the second cycle
			}
			if warmUp > 0 && j.cycle() {
				t.Error("a cycle gathers votes that rank 0 knows already")
			}
			pass(time.Second)
			events := j.coord.Events()
			if len(events) != 1 || events[0].Stall == nil || events[0].Stall.Name != "a" ||
				!slices.Equal(events[0].Stall.Missing, []topo.Rank{1}) {
				t.Errorf("got events %v, want a stall of a that waits for rank 1", events)
			}
			j.submit(1, request{q: allreduce("a", 1)})
			j.cycle()
			if late := j.coord.Stats().Late; late[1].Held != time.Second {
				t.Errorf("lateness %v, want rank 1 late by 1s", late)
			}

			j.submit(0, request{q: allreduce("a", 1)})
			j.cycle()
			j.cycle()
			j.ranks[0].Timeout(topo.Global, "a", 500*time.Millisecond)
			for _, up := range j.ranks[0].Ready().Ups {
				j.coord.Step(0, up)
			}
			v := verdictOf(j.coord)
			if v == nil || !slices.Equal(v.Ranks, []topo.Rank{1, 2}) ||
				!strings.Contains(v.Reason,
					`allreduce "a" timed out after 0.5s at rank 0: ranks 1 and 2 have not submitted it`) {
				t.Errorf("got verdict %v, want one of ranks 1 and 2", v)
			}
		})
	}
}

// In lock-step, the news of a rank may overtake its heartbeats. News that acknowledge an older cycle than
// earlier news break the protocol.
func TestNewsOvertakeHeartbeats(t *testing.T) {
	j := newLockstepJob(t, controller.CoordinatorConfig{
		Sets: []controller.Set{controller.Global(2)}, CacheCapacity: 4, FusionThresholdBytes: 64,
		Plan: plan(),
	})
	for _, name := range []string{"a", "b"} {
		for rank := range 2 {
			j.submit(rank, request{q: allreduce(name, 1)})
		}
		j.cycle() // the news of b acknowledge the cycle of a
	}
	j.coord.Step(1, &message.Up{Type: message.UpHeartbeat, Seen: 0})
	if v := verdictOf(j.coord); v != nil {
		t.Fatalf("after an old heartbeat: got verdict %v, want none", v)
	}
	j.coord.Step(1, &message.Up{Type: message.UpNews, Seen: 0})
	if v := verdictOf(j.coord); v == nil || !strings.Contains(v.Reason,
		"got an acknowledgment of cycle 0, want a cycle from 1 to 2") {
		t.Errorf("after old news: got verdict %v, want one on rank 1", v)
	}
}

// sameReasons returns answers without the parts that depend on the order of arrival. For example, if several
// tensors can make a group fail, the order determines which of them the error names.
func sameReasons(answers map[string]string) map[string]string {
	same := make(map[string]string)
	for what, answer := range answers {
		answer, _, _ = strings.Cut(answer, "its group ")
		same[what] = answer
	}
	return same
}

// differences lists the answers that differ between a job that negotiates by events and a job in lock-step.
func differences(events, lockstep map[string]string) string {
	var text strings.Builder
	for _, what := range slices.Sorted(maps.Keys(events)) {
		if events[what] != lockstep[what] {
			fmt.Fprintf(&text, "%s: %q by events, %q in lock-step\n", what, events[what], lockstep[what])
		}
	}
	for _, what := range slices.Sorted(maps.Keys(lockstep)) {
		if _, ok := events[what]; !ok {
			fmt.Fprintf(&text, "%s: %q in lock-step alone\n", what, lockstep[what])
		}
	}
	return text.String()
}

// If an operation or Shutdown times out while a rank is silent, the verdict names the silent rank. It does
// not name the ranks that the silent rank holds up.
func TestTimeoutDuringSilence(t *testing.T) {
	start := func(lockstep bool) *controller.Coordinator {
		cfg := testConfig(3)
		cfg.Lockstep = lockstep
		c := controller.NewCoordinator(cfg, 0)
		c.Step(0, news(allreduce("a", 1)))
		return c
	}
	complain := func(c *controller.Coordinator, tensor string, at time.Duration) *controller.Verdict {
		c.Tick(at)
		c.Step(1, &message.Up{Type: message.UpHeartbeat})
		c.Step(0, &message.Up{Type: message.UpTimeout, Tensor: tensor, Millis: 500})
		return verdictOf(c)
	}
	for tensor, what := range map[string]string{"a": `tensor "a"`, "": "Shutdown"} {
		for _, lockstep := range []bool{false, true} {
			c := start(lockstep)
			for _, at := range []time.Duration{controller.HeartbeatPeriod, 2*controller.HeartbeatPeriod - 1} {
				if !lockstep {
					break // without lock-step, rank 0 knows all requests at once
				}
				if v := complain(c, tensor, at); v != nil {
					t.Errorf("%s: after %v without a cycle: got verdict %v", what, at, v)
				}
			}
			if v := complain(c, tensor, 2*controller.HeartbeatPeriod); v == nil ||
				!slices.Equal(v.Ranks, []topo.Rank{2}) ||
				!strings.Contains(v.Reason,
					what+` timed out after 0.5s at rank 0: rank 2 has been silent for 2s`) {
				t.Errorf("%s, lock-step %v: got verdict %v, want that rank 2 is silent", what, lockstep, v)
			}
		}
	}
	m := controller.NewMember(controller.MemberConfig{Rank: 1, Sets: []controller.Set{controller.Global(3)},
		LivenessTimeout: livenessTimeout}, 0)
	m.Tick(2 * controller.HeartbeatPeriod)
	m.Timeout(0, "a", time.Second)
	m.Expire()
	if v := m.Verdict(); v == nil || !slices.Equal(v.Ranks, []topo.Rank{0}) ||
		!strings.Contains(v.Reason, `silent for 2s, and tensor "a" timed out after 1s`) {
		t.Errorf("got verdict %v, want that rank 0 is silent", v)
	}
}
