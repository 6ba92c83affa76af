package controller_test

import (
	"flag"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
)

var seedFlag = flag.Uint64("seed", 0, "replay the random run of this seed only")

// seeds returns n random seeds. If the flag -seed is set, it returns only that seed.
func seeds(n int) []uint64 {
	if *seedFlag != 0 {
		return []uint64{*seedFlag}
	}
	var all []uint64
	for range n {
		all = append(all, 1+rand.Uint64N(1<<62))
	}
	return all
}

// run is a random job with the state of its execution.
type run struct {
	*checker
	rng  *rand.Rand
	todo [][]request // the requests of each rank's program that have not been submitted
	// halfDead is a rank that has died although its connections are still open, or -1 if there is none.
	halfDead topo.Rank
	// silent is set if the rank that has died keeps its connections open until there is a verdict.
	silent bool
	// leavers is set if ranks may shut down before their programs are done.
	leavers bool
}

// TestInvariants checks that the invariants hold in random jobs. Ranks submit, send, read and finish in
// random orders. The jobs use several cache capacities and fusion thresholds, and end in each of the ways in
// which a job can end.
func TestInvariants(t *testing.T) {
	n := 1000
	if testing.Short() {
		n = 50
	}
	var total counts
	all := seeds(n)
	for _, seed := range all {
		total = total.plus(randomRun(t, seed))
	}
	t.Logf("%d runs: %+v", len(all), total)
	if v := reflect.ValueOf(total); len(all) >= 400 {
		for i := range v.NumField() {
			if v.Field(i).Int() == 0 {
				t.Errorf("no run had %s, want every counted situation at least once", v.Type().Field(i).Name)
			}
		}
	}
}

func randomRun(t *testing.T, seed uint64) counts {
	rng := rand.New(rand.NewPCG(seed, 0))
	pick := func(v ...int) int { return v[rng.IntN(len(v))] }
	cfg := controller.CoordinatorConfig{
		Sets:                 randomSets(rng),
		CacheCapacity:        pick(0, 1, 2, 4, 64),
		FusionThresholdBytes: int64(pick(0, 16, 64, 1<<20)),
		DisableGroupFusion:   pick(0, 0, 1) == 1,
		CycleTime:            time.Duration(pick(0, 0, 5)) * time.Millisecond,
		LivenessTimeout:      livenessTimeout,
		Plan:                 plan(refusedType),
	}
	if pick(0, 1) == 1 {
		cfg.Leaders = randomLeaders(rng, len(cfg.Sets[0].Ranks))
	}
	if pick(0, 1) == 1 {
		cfg.Groups = randomGroups(rng, len(cfg.Sets[0].Ranks))
	}
	r := &run{checker: newChecker(t, seed, cfg), rng: rng, todo: randomPrograms(rng, cfg.Sets, 1+rng.IntN(16),
		true), halfDead: -1}
	// At a random time the job begins to end in one of five ways: a shutdown after all programs are done, a
	// shutdown before that, a death, a false suspicion, or a rank that is silent.
	end, when := rng.IntN(5), rng.IntN(600)
	for i := range 600 {
		if i == when {
			r.end(end)
		}
		r.act()
		if seed%2 == 0 && i%50 == 0 && len(r.died) == 0 {
			r.settle()
			r.prompt()
		}
	}
	r.finish()
	return r.checker.seen
}

// randomLeaders returns random leaders on up to three levels. The leader of a rank is a lower rank, but not
// rank 0.
func randomLeaders(rng *rand.Rand, size int) topo.Leaders {
	leaders, levels := make(topo.Leaders, size), make([]int, size)
	for r := 1; r < size; r++ {
		leader := 1 + rng.IntN(r)
		if levels[leader] == 3 {
			leader = r
		}
		leaders[r] = topo.Rank(leader)
		if leader != r {
			levels[r] = levels[leader] + 1
		}
	}
	return leaders
}

// randomGroups puts the ranks on random hosts and returns the lowest rank of the host of each rank.
func randomGroups(rng *rand.Rand, size int) []topo.Rank {
	first := make(map[int]topo.Rank) // the lowest rank of each host
	var lowest []topo.Rank
	for r := range size {
		host := rng.IntN(2)
		if _, found := first[host]; !found || first[host] == 0 {
			first[host] = topo.Rank(r)
		}
		lowest = append(lowest, first[host])
	}
	return lowest
}

// end begins the end of the job. how selects one of the five ways (see randomRun).
func (r *run) end(how int) {
	size := len(r.c.nodes)
	n := r.c.nodes[r.rng.IntN(size)]
	switch how {
	case 1:
		r.leavers = true
		r.shutdown(n)
		r.removeWithout(n)
	case 2:
		if !n.over {
			r.halfDead = n.rank
			r.died = append(r.died, n.rank)
			r.c.die(n.rank)
		}
	case 3:
		of := r.c.nodes[r.rng.IntN(size)]
		if n != of {
			r.accused = []topo.Rank{n.rank, of.rank}
			suspects := r.accused[1:]
			if r.rng.IntN(2) == 0 {
				suspects = r.suspects(n.rank, of.rank)
				r.accused = suspects
				r.seen.accusedSeveral++
			}
			n.m.Tick(r.c.now)
			n.m.Suspect(suspects, "timeout")
		}
	case 4:
		of := r.c.nodes[r.rng.IntN(size)]
		if n != of && !n.over && !of.over {
			r.silent = true
			r.died = append(r.died, of.rank)
			r.c.die(of.rank)
			n.m.Tick(r.c.now)
			suspect := of.rank // or, if this is a leader, one of the ranks behind it
			if led := r.c.led(of.rank); len(led) > 1 && !slices.Contains(led, n.rank) {
				suspect = led[r.rng.IntN(len(led))]
			}
			n.m.Suspect(r.suspects(n.rank, suspect), "mpi: no such peer")
			r.seen.silent++
		}
	}
}

// removeWithout makes all ranks except n remove a process set next, if there is one.
func (r *run) removeWithout(n *node) {
	sets := r.c.cfg.Sets[1:]
	if len(sets) == 0 {
		return
	}
	q := message.Request{Kind: message.RemoveProcessSet, Name: "without",
		Set: sets[r.rng.IntN(len(sets))].ID}
	for _, other := range r.c.nodes {
		if other != n {
			r.todo[other.rank] = slices.Insert(r.todo[other.rank], 0, request{set: topo.Global, q: q})
		}
	}
}

// suspects returns the two ranks and random other ranks, in ascending order.
func (r *run) suspects(a, b topo.Rank) (ranks []topo.Rank) {
	for _, n := range r.c.nodes {
		if n.rank == a || n.rank == b || r.rng.IntN(2) == 0 {
			ranks = append(ranks, n.rank)
		}
	}
	return ranks
}

func (r *run) shutdown(n *node) {
	if !n.over && !n.stopped {
		n.m.Tick(r.c.now)
		n.m.Shutdown("", nil)
		r.ranks[n.rank].shutdown = true
	}
}

// act executes one event, which it chooses at random from the events that are possible next.
func (r *run) act() {
	n := r.c.nodes[r.rng.IntN(len(r.c.nodes))]
	switch k := r.rng.IntN(18); {
	case k >= 14:
		if n.comb == nil || n.over {
			return
		}
		if k < 16 {
			n.combine(func(*node) int { return r.rng.IntN(3) })
		} else if len(n.downs) > 0 {
			n.distribute()
		}
	case k < 4:
		r.submit(n)
	case k < 6:
		if !n.over {
			n.send()
		}
	case k < 8:
		if !r.c.nodes[0].dead {
			r.c.coord.Tick(r.c.now)
			for range r.rng.IntN(4) {
				if from := r.c.nodes[r.rng.IntN(len(r.c.nodes))]; from.arriving() {
					r.c.receive(from)
				}
			}
			if r.rng.IntN(20) == 0 && !r.failing {
				r.tune(r.randomTuning())
			}
			r.c.decide()
		}
	case k < 11:
		if !n.over && len(n.down) > 0 {
			n.read()
		}
	case k < 13:
		if i := r.rng.IntN(len(n.lanes)); !n.over && len(n.lanes[i]) > 0 {
			n.finish(i)
			n.drain()
		}
	default:
		if r.halfDead >= 0 {
			r.noticeDeath(n)
		} else if r.leavers && r.rng.IntN(8) == 0 {
			r.shutdown(n)
		} else if !r.failing && len(r.accused)+len(r.died) == 0 && r.c.now < 4*time.Second {
			// Sometimes enough time passes for heartbeats and for votes that leaders hold.
			r.pass(time.Duration(r.rng.IntN([]int{10, 10, 10, 400}[r.rng.IntN(4)])) * time.Millisecond)
		}
	}
}

func (r *run) randomTuning() message.Tuning {
	pick := func(v ...int) int { return v[r.rng.IntN(len(v))] }
	return message.Tuning{
		FusionThresholdBytes: int64(pick(0, 16, 64, 1<<20)),
		CycleTime:            time.Duration(pick(0, 0, 5)) * time.Millisecond,
		SegmentBytes:         pick(0, 64, 1<<10),
		CacheOff:             pick(0, 0, 0, 1) == 1,
	}
}

// noticeDeath makes a rank notice the death of halfDead: either the data connection of rank n to halfDead
// breaks, or the control connection of halfDead ends.
func (r *run) noticeDeath(n *node) {
	if r.rng.IntN(2) == 0 && !n.over && r.halfDead != 0 {
		n.m.Tick(r.c.now)
		n.m.Suspect([]topo.Rank{r.halfDead}, "data: connection reset")
		return
	}
	r.c.endConnection(r.halfDead, "connection reset")
	r.halfDead = -1
}

// submit submits the next request of the rank's program. If the process set of the request was removed,
// submit skips the request. It returns false if it can neither submit nor skip the request now.
func (r *run) submit(n *node) bool {
	todo := r.todo[n.rank]
	if len(todo) == 0 || n.over || n.stopped || r.ranks[n.rank].shutdown {
		return false
	}
	next, known := r.c.names.resolve(todo[0])
	if !known {
		return false
	}
	switch turnOf(next, n.pending, n.sets, n.gone) {
	case turnLater:
		return false
	case turnNow:
		if err := n.trySubmitRequest(next); err != nil {
			r.t.Fatalf("rank %d: %v", n.rank, err)
		}
	}
	r.todo[n.rank] = todo[1:]
	return true
}

// pass advances the time by d and executes the turns that are due.
func (r *run) pass(d time.Duration) {
	r.c.now += d
	if !r.c.nodes[0].dead && r.c.coord.Next() <= r.c.now {
		r.c.coord.Tick(r.c.now)
		r.c.decide()
	}
	for _, n := range r.c.nodes {
		if !n.over && n.m.Next() <= r.c.now {
			n.send()
		}
		if n.comb != nil && !n.over { // a leader takes its own frames in the turn in which it makes them
			n.combine(func(of *node) int {
				if of == n {
					return len(of.up)
				}
				return 0
			})
		}
	}
}

// settle submits requests and executes turns until nothing changes anymore.
func (r *run) settle() {
	for moved := true; moved; {
		moved = false
		for _, n := range r.c.nodes {
			for r.submit(n) {
				moved = true
			}
		}
		r.c.settle()
	}
}

// finish runs the job until it ends and checks that it has ended in the right way.
func (r *run) finish() {
	r.t.Helper()
	if r.halfDead >= 0 {
		r.c.endConnection(r.halfDead, "connection reset")
	}
	r.settle()
	r.prompt()
	if len(r.died)+len(r.accused) > 0 {
		// The verdict about a suspicion of several ranks takes up to 3.6 s.
		for range 50 {
			r.settle()
			r.pass(100 * time.Millisecond)
		}
	}
	if r.silent {
		r.c.endConnection(r.died[0], "connection reset") // for ranks that suspect nobody
	}
	// The last requests of the programs take a fraction of a second because of the cycle time. One more
	// second is enough for the slowest events, which are a suspicion and the heartbeat after which erased
	// entries are forgotten.
	for range 200 {
		r.settle()
		r.pass(10 * time.Millisecond)
	}
	r.settle()
	if r.verdict == nil && len(r.died) == 0 && len(r.accused) == 0 && !r.stopped {
		if !r.leavers {
			r.idle()
		}
		for _, i := range r.rng.Perm(len(r.c.nodes)) {
			r.shutdown(r.c.nodes[i])
			if r.rng.IntN(2) == 0 {
				r.settle()
			}
		}
		for range 2 { // another cycle may be due a little later
			r.settle()
			r.pass(10 * time.Millisecond)
		}
		r.settle()
	}
	for _, n := range r.c.nodes {
		switch {
		case n.dead:
		case !n.over:
			r.broken(2, "rank %d is still running; it waits for %v; died %v, accused %v, stopped %v", n.rank,
				n.pending, r.died, r.accused, r.stopped)
		case n.m.Verdict() == nil && len(n.pending) > 0:
			r.broken(2, "rank %d ended well and was not answered %v", n.rank, n.pending)
		}
	}
	switch {
	case !r.c.nodes[0].dead && !r.c.coord.Closed():
		r.broken(9, "the coordinator is not closed")
	case r.verdict != nil:
	case len(r.accused) > 0 && !r.stopped:
		r.broken(10, "rank %d accused rank %d and there is no verdict", r.accused[0], r.accused[1])
	case len(r.died) > 0 && len(r.c.nodes) > 1 && !r.c.nodes[r.died[0]].drained:
		r.broken(10, "rank %d died and there is no verdict", r.died[0])
	}
}

// prompt checks that no tensor waits for time to pass, for example because a leader holds requests for it.
func (r *run) prompt() {
	if r.tuning.CycleTime > 0 || r.leavers || r.stopping || len(r.died)+len(r.accused) > 0 {
		return
	}
	for _, s := range r.sets {
		if s.gone {
			continue
		}
		asks := func(m topo.Rank, name string) bool {
			pending := r.c.nodes[m].pending
			return r.c.nodes[m].waits(s.ID, name) || slices.ContainsFunc(pending, func(q request) bool {
				return q.set == s.ID && q.q.Kind == message.Join
			})
		}
		for _, p := range r.c.nodes[s.Ranks[0]].pending {
			if p.q.MembersOnly {
				continue // a leader may hold the requests for a while if they differ
			}
			if p.set == s.ID && p.q.Group == "" && !slices.ContainsFunc(s.Ranks, func(m topo.Rank) bool {
				return !asks(m, p.q.Name)
			}) && p.q.Kind != message.Join {
				r.broken(6, "%q of set %d is not granted, although every rank has requested it", p.q.Name, s.ID)
			}
		}
	}
}

// idle checks that a job has no work left when all its programs are done.
func (r *run) idle() {
	for _, s := range r.sets {
		if s.gone {
			continue
		}
		if s.joins > 0 || len(s.held) > 0 || len(s.ready) > 0 || len(s.asked) > 0 || s.unfinished > 0 {
			r.broken(6, "set %d: %v are ready, %v requested, %d grants unfinished", s.ID, s.ready, s.asked,
				s.unfinished)
		}
		if n := r.c.coord.Rows(s.ID); n > 0 {
			r.broken(2, "%d tensors of set %d are kept, though all are answered", n, s.ID)
		}
		for _, m := range s.Ranks {
			if r.c.nodes[m].m.Digest(s.ID) != s.cache.Digest() {
				r.broken(3, "rank %d's cache of set %d differs in an idle job", m, s.ID)
			}
		}
		if n := r.c.coord.Remembered(s.ID); n > 0 {
			r.broken(4, "%d erased entries of set %d are kept, though all ranks have seen the erasure", n,
				s.ID)
		}
	}
	if n := r.c.coord.RememberedSets(); n > 0 {
		r.broken(4, "%d removed sets are kept, though all ranks have seen the removal", n)
	}
	for _, n := range r.c.nodes {
		if len(n.pending) > 0 || len(r.todo[n.rank]) > 0 {
			r.broken(2, "rank %d waits for %v in an idle job", n.rank, n.pending)
		}
		if moving := len(n.up) + len(n.down) + len(n.ups) + len(n.downs); moving > 0 {
			r.broken(6, "%d frames move at rank %d in an idle job", moving, n.rank)
		}
	}
}
