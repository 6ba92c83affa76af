package controller_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/responsecache"
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

// checker checks that the invariants of docs/negotiation.md hold in a cluster. It is a simple model of the
// coordinator: it records which requests each frame contains, and computes from them which grants must
// result.
type checker struct {
	t    *testing.T
	seed uint64
	c    *cluster
	sets []*setModel
	// nextSet is the ID that the next added process set gets.
	nextSet topo.ProcessSetID
	// ranks holds the state of each rank.
	ranks []rankModel

	cycle     uint64
	lastCycle time.Duration
	arrivals  int  // number of news frames that the coordinator has applied
	stopping  bool // all ranks leave, or a leaving rank has not submitted an awaited tensor
	stopped   bool // whether the coordinator has stopped every rank
	order     int  // number of issued grants, over all sets
	// tuning has the settings that hold, and pending those that the next cycle must change, or nil.
	tuning  message.Tuning
	pending *message.Tuning
	verdict *controller.Verdict
	failing bool // whether the coordinator has given its verdict
	died    []topo.Rank
	accused []topo.Rank // the ranks that a false suspicion names, and the rank that reports it

	seen counts
}

// counts holds how often the random runs have reached certain situations. A test with many runs must reach
// each situation at least once.
type counts struct {
	grants, byBit, fused, errors, refused, erased, late, invalid, stopsWithWork, verdicts int
	joins, absent, absentByBit, groups, failedGroups, added, removed, impossible, crossed int
	left, awaited, closedEarly, combined, alone, tuned, emptied, emptiedLed               int
	founded, disagreed, removedByMembers, accusedSeveral, silent, agreed                  int
}

type setModel struct {
	controller.Set
	cache      responsecache.Cache // the cache after the last issued cycle
	asked      map[string][]*message.Request
	complete   map[string]bool // the names in asked that are in ready or in held
	ready      []readyName
	held       map[string]*groupModel
	joined     []bool
	empty      []bool
	joins      int
	leaving    func(topo.Rank) bool
	unfinished int
	log        []issuedGrant
	digests    map[uint64]uint64
	gone       bool // whether the set was removed
	// founding has by name the requests to add sets by their members. Only the global set has them.
	founding map[string]map[topo.Rank]*message.Request
	// byMembers is set if the members have asked to add the set. founded is set in such a set until its first
	// grant, and refused if this grant is an error.
	byMembers, founded, refused bool
}

// groupModel is a group of which some tensors are neither ready nor answered.
type groupModel struct {
	names    []readyName // the complete names that wait for the rest of the group
	failed   bool        // whether the ranks disagree about a name, so that every name fails
	answered int
}

// readyName is a name that every member has requested. Members that have joined, or agree by their shutdown,
// do not count.
type readyName struct {
	name   string
	frame  int         // the news frame that completed the name or its group
	absent []topo.Rank // members that have not requested it
	group  string      // the name and the size of the group
	fails  bool        // whether the answer must be an error
	join   bool        // whether this is the answer to the joins and not a name
}

func newSetModel(s controller.Set, leaving func(topo.Rank) bool) *setModel {
	return &setModel{
		Set: s, leaving: leaving, asked: make(map[string][]*message.Request), complete: make(map[string]bool),
		held:     make(map[string]*groupModel),
		founding: make(map[string]map[topo.Rank]*message.Request),
		joined:   make([]bool, len(s.Ranks)), empty: make([]bool, len(s.Ranks)),
		digests: make(map[uint64]uint64),
	}
}

// ask records a member's request that was in the given news frame.
func (s *setModel) ask(member int, q *message.Request, frame int) {
	if q.Kind == message.Join {
		s.join(member, q, frame)
		return
	}
	if s.asked[q.Name] == nil {
		s.asked[q.Name] = make([]*message.Request, len(s.Ranks))
	}
	s.asked[q.Name][member] = q
	s.check(q.Name, frame)
}

func (s *setModel) join(member int, q *message.Request, frame int) {
	s.joined[member], s.empty[member] = true, q.Empty
	s.joins++
	s.checkAll(frame)
	if s.joins < len(s.Ranks) {
		return
	}
	for group, g := range s.held {
		for _, x := range g.names {
			x.frame, x.fails = frame, true
			s.ready = append(s.ready, x)
		}
		delete(s.held, group)
	}
	s.ready = append(s.ready, readyName{frame: frame, join: true})
}

// checkAll calls check for every name.
func (s *setModel) checkAll(frame int) {
	for name := range s.asked {
		s.check(name, frame)
	}
}

// agrees reports whether a member agrees to the requests by its shutdown: all are to remove a set.
func (s *setModel) agrees(member int, qs []*message.Request) bool {
	return s.leaving(s.Ranks[member]) && !slices.ContainsFunc(qs, func(q *message.Request) bool {
		return q != nil && q.Kind != message.RemoveProcessSet
	})
}

// check moves a name to the list of ready or of held names if no member is missing for it.
func (s *setModel) check(name string, frame int) {
	x := readyName{name: name, frame: frame}
	var first *message.Request
	qs := s.asked[name]
	for m, q := range qs {
		switch {
		case q == nil && !s.joined[m] && !s.agrees(m, qs):
			return
		case q == nil:
			x.absent = append(x.absent, s.Ranks[m])
		case first == nil:
			first = q
		}
	}
	if s.complete[name] {
		return
	}
	s.complete[name] = true
	disagree := !agree(s.Set, qs, s.joined, s.empty)
	x.fails = disagree || first.DType == refusedType && first.Kind.Reduces()
	x.group = groupText(first)
	if x.group == "" {
		s.ready = append(s.ready, x)
	} else {
		s.group(first).names = append(s.group(first).names, x)
		s.settle(first, disagree, 0, frame)
	}
	// Other members may have named other groups for the tensor. These groups fail too.
	lost := map[string]bool{x.group: true}
	for _, q := range qs {
		if q != nil && q.Group != "" && !lost[groupText(q)] {
			lost[groupText(q)] = true
			s.settle(q, true, 1, frame)
		}
	}
}

func groupText(q *message.Request) string {
	if q.Group == "" {
		return ""
	}
	return fmt.Sprint(q.Group, q.GroupSize)
}

// group returns the group that a request names. If the group does not exist, it creates the group.
func (s *setModel) group(q *message.Request) *groupModel {
	g := s.held[groupText(q)]
	if g == nil {
		g = &groupModel{}
		s.held[groupText(q)] = g
	}
	return g
}

// settle moves the names of a group to the ready names if the group is complete or has failed. If fails is
// set, the group fails now. elsewhere is the number of tensors of the group that have just been answered
// outside the group.
func (s *setModel) settle(q *message.Request, fails bool, elsewhere, frame int) {
	g := s.group(q)
	g.failed = g.failed || fails
	g.answered += elsewhere
	complete := g.answered+len(g.names) == int(q.GroupSize)
	if complete {
		delete(s.held, groupText(q))
	}
	if !complete && !g.failed {
		return
	}
	failed := g.failed || slices.ContainsFunc(g.names, func(x readyName) bool { return x.fails })
	for _, x := range g.names {
		x.frame, x.fails = frame, failed
		s.ready = append(s.ready, x)
	}
	g.answered += len(g.names)
	g.names = nil
}

type issuedGrant struct {
	text         string
	order        int
	segmentBytes int
}

// vote is a cache bit of a process set for which a rank has voted.
type vote struct {
	set topo.ProcessSetID
	bit uint32
}

type rankModel struct {
	fresh    []request          // requests that were submitted but have not been sent
	inFlight []request          // requests in full that are in flight from the rank
	votes    map[vote][]request // votes that are in flight from the rank, oldest first
	// caches are the caches of the sets after the cycles that the rank has applied.
	caches    map[topo.ProcessSetID]*responsecache.Cache
	submitted int
	finished  int  // number of finished grants that the rank must report
	news      int  // number of news frames that the rank has sent
	shutdown  bool // whether the rank's program has called Shutdown
	leaving   bool // whether the coordinator knows that the rank leaves
	stopSent  bool
	position  map[topo.ProcessSetID]int // number of grants of each set that the rank has applied
	order     int                       // the position of the last applied grant among all issued grants
	running   map[*controller.Grant]string
	stopped   bool
}

func newChecker(t *testing.T, seed uint64, cfg controller.CoordinatorConfig) *checker {
	ch := &checker{t: t, seed: seed, lastCycle: -cfg.CycleTime,
		tuning: message.Tuning{FusionThresholdBytes: cfg.FusionThresholdBytes, CycleTime: cfg.CycleTime}}
	for _, s := range cfg.Sets {
		ch.sets = append(ch.sets, newSetModel(s, ch.isLeaving))
		ch.nextSet = max(ch.nextSet, s.ID+1)
	}
	for range cfg.Sets[0].Ranks {
		ch.ranks = append(ch.ranks, rankModel{
			position: make(map[topo.ProcessSetID]int), order: -1, running: make(map[*controller.Grant]string),
			votes: make(map[vote][]request), caches: make(map[topo.ProcessSetID]*responsecache.Cache),
		})
	}
	ch.c = newCluster(t, cfg, ch)
	return ch
}

// broken fails the test because an invariant of docs/negotiation.md does not hold. It names the invariant by
// its number there.
func (ch *checker) broken(invariant int, format string, args ...any) {
	ch.t.Helper()
	ch.t.Fatalf("invariant %d: %s\nreplay with -run %s -seed %d", invariant, fmt.Sprintf(format, args...),
		ch.t.Name(), ch.seed)
}

func (ch *checker) set(id topo.ProcessSetID) *setModel {
	return ch.sets[slices.IndexFunc(ch.sets, func(s *setModel) bool { return s.ID == id })]
}

func (ch *checker) submitted(n *node, r request) {
	k := &ch.ranks[n.rank]
	k.fresh = append(k.fresh, r)
	k.submitted++
}

func (ch *checker) sent(n *node, u *message.Up) {
	if u.Type != message.UpNews {
		return
	}
	k := &ch.ranks[n.rank]
	said := 0
	for i := range u.Sets {
		s := &u.Sets[i]
		said += len(s.Requests)
		for _, q := range s.Requests {
			k.inFlight = append(k.inFlight, request{set: s.Set, q: q})
		}
		for bit, ok := s.Hits.Next(0); ok; bit, ok = s.Hits.Next(bit + 1) {
			said++
			v, name := vote{s.Set, bit}, k.cache(s.Set).At(bit).Name
			at := slices.IndexFunc(k.fresh, func(r request) bool {
				return r.set == s.Set && r.q.Name == name
			})
			k.votes[v] = append(k.votes[v], k.fresh[at])
		}
	}
	if said != len(k.fresh) {
		ch.broken(2, "rank %d sent %d requests, of %d that were submitted", n.rank, said, len(k.fresh))
	}
	k.fresh = nil
	k.news++
	most := k.submitted + k.finished
	if k.shutdown {
		most++
	}
	if k.news > most {
		ch.broken(7, "rank %d sent %d frames for %d submissions and %d finished grants", n.rank, k.news,
			k.submitted, k.finished)
	}
}

func (ch *checker) relayed(p *message.Part, u *message.Up) {
	for i := range u.Sets {
		switch {
		case !u.Sets[i].Hits.Any():
		case len(p.Ranks) > 1:
			ch.seen.combined++
		default:
			ch.seen.alone++
		}
	}
}

func (ch *checker) arrived(n *node, u *message.Up) {
	if u.Type != message.UpNews {
		return
	}
	k := &ch.ranks[n.rank]
	meant := k.take(u)
	if k.stopSent || ch.failing {
		return
	}
	ch.arrivals++
	for _, r := range meant {
		if s := ch.set(r.set); s.gone {
			ch.seen.crossed++
		} else {
			ch.ask(s, n.rank, &r.q)
		}
	}
	for i := range u.Sets {
		s := ch.set(u.Sets[i].Set)
		if s.gone {
			continue
		}
		s.unfinished -= int(u.Sets[i].Done)
		if u.Sets[i].Invalid.Any() {
			ch.seen.invalid++
		}
		for bit, ok := u.Sets[i].Hits.Next(0); ok; bit, ok = u.Sets[i].Hits.Next(bit + 1) {
			if r := s.cache.At(bit); r == nil ||
				!slices.ContainsFunc(meant, func(m request) bool {
					return m.set == s.ID && m.q.Name == r.Name
				}) {
				ch.seen.late++
			}
		}
	}
	if u.Shutdown {
		k.leaving = true
		for _, s := range ch.sets {
			s.checkAll(ch.arrivals)
		}
	}
}

// ask records a request that has just arrived.
func (ch *checker) ask(s *setModel, r topo.Rank, q *message.Request) {
	if !q.MembersOnly {
		s.ask(slices.Index(s.Ranks, r), q, ch.arrivals)
		return
	}
	if s.founding[q.Name] == nil {
		s.founding[q.Name] = make(map[topo.Rank]*message.Request)
	}
	asked := s.founding[q.Name]
	asked[r] = q
	named := namedBy(asked)
	if len(asked) < len(named) {
		return
	}
	delete(s.founding, q.Name)
	x := newSetModel(controller.Set{ID: ch.nextSet, Ranks: named}, ch.isLeaving)
	ch.nextSet++
	var qs []*message.Request
	for _, r := range named {
		qs = append(qs, asked[r])
	}
	x.byMembers, x.founded, x.asked[q.Name], x.complete[q.Name] = true, true, qs, true
	x.ready = append(x.ready, readyName{name: q.Name, frame: ch.arrivals,
		fails: !agree(x.Set, qs, x.joined, x.empty)})
	ch.sets = append(ch.sets, x)
}

// namedBy returns all ranks that the requests name, in ascending order.
func namedBy(asked map[topo.Rank]*message.Request) (ranks []topo.Rank) {
	for _, q := range asked {
		ranks = append(ranks, q.Ranks...)
	}
	slices.Sort(ranks)
	return slices.Compact(ranks)
}

// cache returns the rank's cache of a set.
func (k *rankModel) cache(set topo.ProcessSetID) *responsecache.Cache {
	if k.caches[set] == nil {
		k.caches[set] = new(responsecache.Cache)
	}
	return k.caches[set]
}

// take returns the requests that the rank has meant with what arrives in u. They are no longer in flight.
func (k *rankModel) take(u *message.Up) (meant []request) {
	for i := range u.Sets {
		s := &u.Sets[i]
		for bit, ok := s.Hits.Next(0); ok; bit, ok = s.Hits.Next(bit + 1) {
			v := vote{s.Set, bit}
			meant = append(meant, k.votes[v][0])
			k.votes[v] = k.votes[v][1:]
		}
		for _, q := range s.Requests {
			at := slices.IndexFunc(k.inFlight, func(r request) bool {
				return r.set == s.Set && r.q.Name == q.Name
			})
			meant = append(meant, k.inFlight[at])
			k.inFlight = slices.Delete(k.inFlight, at, at+1)
		}
	}
	return meant
}

// awaited holds the ranks that wait for an operation, and the ranks that have not submitted it. If a rank has
// joined the set, it waits too, unless apart is set and it has not submitted the operation.
type awaited struct {
	waiting, missing []topo.Rank
	apart            bool
}

// awaited returns an element for each operation of the set, including joins, for which some ranks wait.
func (s *setModel) awaited() (all []awaited) {
	ranks := func(of func(member int) bool) (ranks []topo.Rank) {
		for m, r := range s.Ranks {
			if of(m) {
				ranks = append(ranks, r)
			}
		}
		return ranks
	}
	present := ranks(func(m int) bool { return !s.joined[m] })
	open := make(map[string]bool) // groups with a requested tensor that is not complete
	for name, qs := range s.asked {
		if s.complete[name] {
			continue
		}
		a := awaited{
			waiting: ranks(func(m int) bool { return qs[m] != nil && !s.joined[m] }),
			missing: ranks(func(m int) bool { return qs[m] == nil && !s.joined[m] && !s.agrees(m, qs) }),
		}
		if group := groupText(firstOf(qs)); group != "" {
			open[group] = true
			if g := s.held[group]; g != nil && len(g.names) > 0 {
				a.waiting = present
			}
		}
		all = append(all, a)
	}
	for group, g := range s.held {
		if len(g.names) > 0 && !open[group] {
			all = append(all, awaited{waiting: present, missing: present})
		}
	}
	for _, asked := range s.founding {
		named := namedBy(asked)
		a := awaited{apart: true}
		for _, r := range s.Ranks {
			switch {
			case asked[r] != nil:
				a.waiting = append(a.waiting, r)
			case slices.Contains(named, r) && slices.Contains(present, r):
				a.missing = append(a.missing, r)
			}
		}
		all = append(all, a)
	}
	if s.joins > 0 && s.joins < len(s.Ranks) {
		all = append(all, awaited{waiting: ranks(func(m int) bool { return s.joined[m] }), missing: present})
	}
	return all
}

func (ch *checker) isLeaving(r topo.Rank) bool { return ch.ranks[r].leaving }

func (ch *checker) stays(r topo.Rank) bool { return !ch.ranks[r].leaving }

// checkLeavers sets stopping if the coordinator must stop the job now.
func (ch *checker) checkLeavers() {
	if ch.stopping {
		return
	}
	if !slices.ContainsFunc(ch.ranks, func(k rankModel) bool { return !k.leaving }) {
		ch.stopping = true
		return
	}
	for _, s := range ch.sets {
		if s.gone {
			continue
		}
		for _, a := range s.awaited() {
			if slices.ContainsFunc(a.missing, ch.isLeaving) && slices.ContainsFunc(a.waiting, ch.stays) {
				ch.stopping = true
				ch.seen.awaited++
				return
			}
		}
	}
}

// outstanding reports whether an operation that the leaving rank r has submitted may still be granted.
func (ch *checker) outstanding(r topo.Rank, decided map[topo.ProcessSetID]*message.DownSet) bool {
	for _, s := range ch.sets {
		m := slices.Index(s.Ranks, r)
		if m < 0 || s.gone || removes(decided[topo.Global], s.ID) || removes(decided[s.ID], s.ID) {
			continue
		}
		if len(s.ready) > 0 && decided[s.ID] == nil {
			return true
		}
		joined := s.joined[m] && s.joins < len(s.Ranks)
		for _, a := range s.awaited() {
			if (joined && !a.apart || slices.Contains(a.waiting, r)) &&
				!slices.ContainsFunc(a.missing, ch.isLeaving) {
				return true
			}
		}
	}
	return false
}

func (ch *checker) frameReceived() {
	for _, s := range ch.sets {
		if name := ch.c.coord.CachedAndRequested(s.ID); name != "" {
			ch.broken(4, "%q of set %d is both cached and in the request table", name, s.ID)
		}
	}
}

func (ch *checker) issued(outs []controller.Outgoing) {
	ch.checkLeavers() // check only after the whole turn, because waiting ranks may have left in this turn too
	decided := make(map[topo.ProcessSetID]*message.DownSet)
	received, stops := make(map[topo.Rank]bool), make(map[topo.Rank]bool)
	var cycle *message.Down
	for _, o := range outs {
		switch o.Down.Type {
		case message.DownClose:
			for _, r := range o.To {
				ch.closing(r)
			}
		case message.DownFail:
			if ch.failing {
				ch.broken(10, "a second verdict: %v", o.Down.Ranks)
			}
			ch.failing = true
		case message.DownCycle:
			if cycle != nil && cycle.Cycle != o.Down.Cycle {
				ch.broken(1, "cycles %d and %d in one turn", cycle.Cycle, o.Down.Cycle)
			}
			cycle = o.Down
			for i := range o.Down.Sets {
				d := &o.Down.Sets[i]
				if first := decided[d.Set]; first != nil && !reflect.DeepEqual(first, d) {
					ch.broken(1, "cycle %d decides differently for %v", cycle.Cycle, o.To)
				}
				decided[d.Set] = d
			}
			for _, r := range o.To {
				if received[r] {
					ch.broken(7, "rank %d got two frames of cycle %d", r, cycle.Cycle)
				}
				received[r], stops[r] = true, o.Down.Stop
				if ch.ranks[r].stopSent {
					ch.broken(9, "rank %d receives cycle %d after STOP", r, cycle.Cycle)
				}
				for i := range o.Down.Sets {
					if s := ch.set(o.Down.Sets[i].Set); !slices.Contains(s.Ranks, r) {
						ch.broken(7, "rank %d receives news of set %d", r, s.ID)
					}
				}
				if len(o.Down.Sets) == 0 && !o.Down.Stop && o.Down.Tuning == nil {
					ch.broken(7, "rank %d got a frame about nothing", r)
				}
			}
		}
	}
	if ch.failing {
		return
	}
	ch.mustDecide(stops, decided)
	ch.mustTune(cycle, outs)
	if cycle == nil {
		return
	}
	if ch.stopped {
		ch.broken(9, "cycle %d after STOP", cycle.Cycle)
	}
	if cycle.Cycle != ch.cycle+1 {
		ch.broken(1, "cycle %d after cycle %d", cycle.Cycle, ch.cycle)
	}
	ch.cycle, ch.lastCycle, ch.stopped = cycle.Cycle, ch.c.now, ch.stopping
	for r := range stops {
		ch.ranks[r].stopSent = ch.ranks[r].stopSent || stops[r]
	}
	for _, s := range ch.sets {
		d := decided[s.ID]
		for _, r := range s.Ranks {
			if d != nil && !received[r] && !ch.ranks[r].stopSent {
				ch.broken(1, "rank %d does not receive cycle %d", r, cycle.Cycle)
			}
		}
		if d != nil {
			ch.decided(s, d)
		}
		if ch.stopped && s.unfinished > 0 {
			ch.seen.stopsWithWork++
		}
	}
}

// tune changes settings. The next cycle must tell every rank.
func (ch *checker) tune(t message.Tuning) {
	ch.pending = &t
	ch.c.tune(t)
}

// mustTune checks that a cycle tells all ranks that are not stopped about the settings that change.
func (ch *checker) mustTune(cycle *message.Down, outs []controller.Outgoing) {
	if ch.pending == nil || ch.stopped {
		return
	}
	if cycle == nil {
		if ch.c.now-ch.lastCycle >= ch.tuning.CycleTime {
			ch.broken(6, "settings change and no cycle says so")
		}
		return
	}
	told := make(map[topo.Rank]bool)
	for _, o := range outs {
		for _, r := range o.To {
			told[r] = told[r] || o.Down.Tuning != nil && *o.Down.Tuning == *ch.pending
		}
	}
	for r := range ch.ranks {
		if !told[topo.Rank(r)] && !ch.ranks[r].stopSent {
			ch.broken(1, "cycle %d does not tell rank %d that settings change to %+v", cycle.Cycle, r,
				*ch.pending)
		}
	}
	ch.tuning, ch.pending = *ch.pending, nil
	ch.seen.tuned++
}

// closing checks that no rank executes an operation with rank r when the coordinator closes rank r.
func (ch *checker) closing(r topo.Rank) {
	if ch.stopping {
		return // all ranks are closed together in this case
	}
	ch.seen.closedEarly++
	for _, n := range ch.c.nodes {
		for i, l := range n.lanes {
			if len(l) > 0 && !n.dead && slices.Contains(n.sets[i].Ranks, r) && !agreed(l[0], r) {
				ch.broken(9, "rank %d closes while rank %d executes %q with it", r, n.rank,
					l[0].Responses[0].Name)
			}
		}
	}
}

// agreed reports whether rank r, which shuts down, has only agreed to the removal that g answers, perhaps
// with an error.
func agreed(g *controller.Grant, r topo.Rank) bool {
	kind := g.Responses[0].Kind
	return (kind == message.RemoveProcessSet || kind == message.Error) && slices.Contains(g.Absent, r)
}

// mustDecide checks two properties of a cycle. It must contain decisions for exactly those sets that have
// ready tensors and an open gate. It must stop exactly those leaving ranks that have no outstanding
// operation.
func (ch *checker) mustDecide(stops map[topo.Rank]bool, decided map[topo.ProcessSetID]*message.DownSet) {
	stop := ch.stopping && !ch.stopped
	early := ch.c.now-ch.lastCycle < ch.tuning.CycleTime
	for r := range ch.ranks {
		k := &ch.ranks[r]
		alone := !early && k.leaving && !ch.outstanding(topo.Rank(r), decided)
		if want := !k.stopSent && (stop || alone); want != stops[topo.Rank(r)] {
			ch.broken(9, "rank %d leaves: %v, the job is stopping: %v, and this turn stops it: %v", r,
				k.leaving, stop, !want)
		}
		if alone && !stop && !k.stopSent {
			ch.seen.left++
		}
	}
	for _, s := range ch.sets {
		if s.gone || removes(decided[topo.Global], s.ID) {
			if decided[s.ID] != nil {
				ch.broken(5, "set %d is removed and granted %v", s.ID, decided[s.ID].Grants)
			}
			continue
		}
		open := s.unfinished <= 1 || s.leaving(s.Ranks[0])
		want := len(s.ready) > 0 && !ch.stopped && (stop || open && !early)
		switch d := decided[s.ID]; {
		case d == nil && want:
			ch.broken(6, "%v of set %d are ready, %d grants are unfinished, and nothing is granted", s.ready,
				s.ID, s.unfinished)
		case d != nil && !want:
			ch.broken(5, "set %d is granted %v with %v ready and %d unfinished", s.ID, d.Grants, s.ready,
				s.unfinished)
		}
	}
}

// removes reports whether the decisions d about a set remove the set with the given ID.
func removes(d *message.DownSet, id topo.ProcessSetID) bool {
	return d != nil && slices.ContainsFunc(d.Grants, func(g message.Grant) bool {
		return len(g.Full) > 0 && g.Full[0].Kind == message.RemoveProcessSet && g.Full[0].Set == id
	})
}

// decided checks the decisions of a cycle about a set and applies them to the model.
func (ch *checker) decided(s *setModel, d *message.DownSet) {
	if s.joins > 0 && len(d.Puts) > 0 {
		ch.broken(3, "set %d: %v is cached while ranks have joined", s.ID, d.Puts)
	}
	last := -1
	for g := range d.Grants {
		grant := &d.Grants[g]
		var responses []*message.Response
		for _, bit := range grant.Bits {
			r := s.cache.At(bit)
			if r == nil {
				ch.broken(3, "bit %d of set %d is granted and free", bit, s.ID)
			}
			if responses = append(responses, r); len(grant.Absent) > 0 {
				if ch.seen.absentByBit++; r.Kind != message.Allreduce {
					ch.broken(4, "%v %q of set %d is granted by bit without %v", r.Kind, r.Name, s.ID,
						grant.Absent)
				}
			}
			ch.seen.byBit++
		}
		if len(grant.Absent) > 0 {
			ch.seen.absent++
		}
		responses = append(responses, grant.Full...)
		if len(responses) == 0 {
			ch.broken(5, "set %d: a grant of nothing", s.ID)
		}
		var bytes int64
		first := ch.arrivals
		for _, r := range responses {
			first = min(first, ch.answered(s, grant, r))
			bytes += r.WireBytes()
		}
		if first < last && responses[0].Kind != message.RemoveProcessSet {
			ch.broken(6, "set %d: a grant completed by frame %d after one completed by frame %d", s.ID, first,
				last)
		}
		last = first
		for _, r := range responses {
			if r.Kind != responses[0].Kind || ch.c.cfg.DisableGroupFusion && (r.Group != responses[0].Group ||
				len(r.Parts) > 0 && len(responses) > 1) {
				ch.broken(5, "set %d: %v %q of group %q runs with %v %q of group %q", s.ID, r.Kind, r.Name,
					r.Group, responses[0].Kind, responses[0].Name, responses[0].Group)
			}
		}
		if len(responses) > 1 {
			if ch.seen.fused++; bytes > ch.tuning.FusionThresholdBytes {
				ch.broken(5, "set %d: %d bytes are fused, threshold %d", s.ID, bytes,
					ch.tuning.FusionThresholdBytes)
			}
		}
		s.log = append(s.log, issuedGrant{grantKey(s.ID, grant.Backend, grant.Algorithm, grant.Absent,
			responses), ch.order, ch.tuning.SegmentBytes})
		ch.order++
		ch.seen.grants++
	}
	if len(s.ready) > 0 {
		ch.broken(6, "set %d: an open gate left %v", s.ID, s.ready)
	}
	s.unfinished += len(d.Grants)
	for _, bit := range d.Erase {
		ch.seen.erased++
		if err := s.cache.Erase(bit); err != nil {
			ch.broken(3, "set %d: %v", s.ID, err)
		}
	}
	for _, p := range d.Puts {
		if err := s.cache.Put(p.Bit, d.Grants[p.Grant].Full[p.Tensor]); err != nil {
			ch.broken(3, "set %d: %v", s.ID, err)
		}
	}
	if ch.tuning.CacheOff {
		ch.seen.emptied++
		if len(d.Erase) > 0 && slices.ContainsFunc(s.Ranks, func(r topo.Rank) bool {
			return ch.c.nodes[r].leader() != nil
		}) {
			ch.seen.emptiedLed++
		}
		for bit := range s.cache.Bound() {
			if r := s.cache.At(bit); r != nil && !s.holds(r.Name) {
				ch.broken(3, "set %d: %q is cached although the cache is off", s.ID, r.Name)
			}
		}
	}
	if n := s.cache.Len(); n > ch.c.cfg.CacheCapacity {
		ch.broken(3, "set %d: %d entries, capacity %d", s.ID, n, ch.c.cfg.CacheCapacity)
	}
	s.digests[ch.cycle] = s.cache.Digest()
	if got := ch.c.coord.Digest(s.ID); !s.gone && got != s.digests[ch.cycle] {
		ch.broken(3, "the coordinator's cache of set %d is not what its frames say", s.ID)
	}
}

// holds reports whether a name waits for the rest of its group.
func (s *setModel) holds(name string) bool {
	for _, g := range s.held {
		if slices.ContainsFunc(g.names, func(x readyName) bool { return x.name == name }) {
			return true
		}
	}
	return false
}

// answered checks a granted response against the requests of the members. It returns the number of the news
// frame that made the tensor complete.
func (ch *checker) answered(s *setModel, g *message.Grant, r *message.Response) int {
	i := slices.IndexFunc(s.ready, func(x readyName) bool {
		return x.join == (r.Kind == message.Join) &&
			(x.join || x.name == r.Name)
	})
	if i < 0 {
		ch.broken(5, "%v %q of set %d is granted, requested by %v", r.Kind, r.Name, s.ID, s.asked[r.Name])
	}
	x := s.ready[i]
	s.ready = slices.Delete(s.ready, i, i+1)
	if !slices.Equal(g.Absent, x.absent) {
		ch.broken(5, "%v %q of set %d is granted without %v, want without %v", r.Kind, r.Name, s.ID, g.Absent,
			x.absent)
	}
	if x.join {
		ch.seen.joins++
		if len(s.ready) > 0 || len(s.asked) > 0 || !slices.Contains(s.Ranks, r.Root) {
			ch.broken(5, "the join of set %d is answered (last is rank %d) before %v, requested are %v", s.ID,
				r.Root, s.ready, s.asked)
		}
		clear(s.joined)
		s.joins = 0
		return x.frame
	}
	qs := s.asked[r.Name]
	delete(s.asked, r.Name)
	delete(s.complete, r.Name)
	if x.group != "" {
		ch.seen.groups++
	}
	if s.founded {
		ch.foundedBy(s, x.fails, r)
		return x.frame
	}
	if q := firstOf(qs); !x.fails && (q.Kind == message.AddProcessSet || q.Kind == message.RemoveProcessSet) {
		if s.ID != topo.Global && len(s.ready) > 0 {
			ch.broken(6, "set %d is removed before %v are granted", s.ID, s.ready)
		}
		ch.change(q, r, len(x.absent) > 0)
		return x.frame
	}
	if (r.Kind == message.Error) != x.fails {
		ch.broken(4, "%v %q of set %d is granted (%s), must it fail: %v; requested by %v", r.Kind, r.Name,
			s.ID, r.Text, x.fails, qs)
	}
	if x.fails {
		switch agreed := agree(s.Set, qs, s.joined, s.empty); {
		case !agreed:
			ch.seen.errors++
		case firstOf(qs).DType == refusedType:
			ch.seen.refused++
		default:
			ch.seen.failedGroups++
		}
		return x.frame
	}
	for m, q := range qs {
		if q != nil && !r.Matches(q, m) {
			ch.broken(4, "%v %q of set %d is granted as %v%v, rank %d requested %v", r.Kind, r.Name, s.ID,
				r.DType, r.Shape, s.Ranks[m], q)
		}
	}
	return x.frame
}

func firstOf(qs []*message.Request) *message.Request {
	return qs[slices.IndexFunc(qs, func(q *message.Request) bool { return q != nil })]
}

// change checks the answer to a request to add or remove a set and applies the answer to the model. absent
// says whether some ranks have agreed by their shutdown.
func (ch *checker) change(q *message.Request, r *message.Response, absent bool) {
	same := func(s *setModel) bool { return !s.gone && !s.byMembers && slices.Equal(s.Ranks, q.Ranks) }
	switch {
	case q.Kind == message.RemoveProcessSet:
		i := slices.IndexFunc(ch.sets, func(s *setModel) bool { return !s.gone && s.ID == q.Set })
		if (i >= 0) != (r.Kind == message.RemoveProcessSet && r.Set == q.Set) {
			ch.broken(4, "removal of set %d is answered %v (%s)", q.Set, r.Kind, r.Text)
		}
		if i >= 0 {
			if ch.sets[i].gone = true; absent {
				ch.seen.agreed++
			}
			if ch.seen.removed++; ch.sets[i].byMembers {
				ch.seen.removedByMembers++
			}
		}
	case slices.ContainsFunc(ch.sets, same) || int(q.Ranks[len(q.Ranks)-1]) >= len(ch.ranks):
		if ch.seen.impossible++; r.Kind != message.Error {
			ch.broken(4, "a set of ranks %v is added, which cannot be", q.Ranks)
		}
	default:
		if r.Kind != message.AddProcessSet || r.Set != ch.nextSet || !slices.Equal(r.Ranks, q.Ranks) {
			ch.broken(4, "a set of ranks %v is answered %v %d %v (%s), want id %d", q.Ranks, r.Kind, r.Set,
				r.Ranks, r.Text, ch.nextSet)
		}
		ch.nextSet++
		ch.sets = append(ch.sets, newSetModel(controller.Set{ID: r.Set, Ranks: r.Ranks}, ch.isLeaving))
		ch.seen.added++
	}
}

// foundedBy checks the first grant of a set that its members have added, or that they have disagreed about.
func (ch *checker) foundedBy(s *setModel, fails bool, r *message.Response) {
	s.founded = false
	if (r.Kind == message.Error) != fails || !fails && r.Kind != message.AddProcessSet || r.Set != s.ID ||
		!slices.Equal(r.Ranks, s.Ranks) {
		ch.broken(4, "the members %v of set %d add it and get %v (%s) with id %d and ranks %v, must it fail: %v",
			s.Ranks, s.ID, r.Kind, r.Text, r.Set, r.Ranks, fails)
	}
	if s.gone, s.refused = fails, fails; fails {
		ch.seen.disagreed++
	} else {
		ch.seen.founded++
	}
}

// grantKey returns a text that identifies what a grant contains. The texts for two grants are equal if and
// only if the grants have the same content.
func grantKey(set topo.ProcessSetID, b message.Backend, a message.Algorithm, absent []topo.Rank,
	responses []*message.Response) string {
	key := fmt.Sprintf("set %d %v/%v without %v", set, b, a, absent)
	for _, r := range responses {
		name := r.Name
		if r.Kind == message.Join {
			name = "" // the names of a join may differ between ranks
		}
		key += fmt.Sprintf(" %v %q %v%v%v %v %v %v %v %v %v %v %s/%d %d%v %q",
			r.Kind, name, r.DType, r.Shape, r.Parts, r.FirstDims, r.Devices, r.Op, r.Prescale, r.Postscale,
			r.Wire, r.Root, r.Group, r.GroupSize, r.Set, r.Ranks, r.Text)
	}
	return key
}

func (ch *checker) applied(n *node, d *message.Down) {
	if d.Type != message.DownCycle {
		return
	}
	for i := range d.Sets {
		c := ch.ranks[n.rank].cache(d.Sets[i].Set)
		for _, bit := range d.Sets[i].Erase {
			if err := c.Erase(bit); err != nil {
				ch.broken(3, "rank %d: %v", n.rank, err)
			}
		}
		for _, p := range d.Sets[i].Puts {
			if err := c.Put(p.Bit, d.Sets[i].Grants[p.Grant].Full[p.Tensor]); err != nil {
				ch.broken(3, "rank %d: %v", n.rank, err)
			}
		}
		if s := ch.set(d.Sets[i].Set); n.m.Digest(s.ID) != s.digests[d.Cycle] && !s.refused &&
			!slices.Contains(removals(n.m.Ready().Grants), s.ID) {
			ch.broken(3, "after cycle %d the cache of rank %d of set %d differs from the coordinator's",
				d.Cycle, n.rank, s.ID)
		}
	}
}

func (ch *checker) granted(n *node, g *controller.Grant) {
	s, k := ch.set(g.Set), &ch.ranks[n.rank]
	if k.stopped {
		ch.broken(9, "rank %d is granted %q after STOP", n.rank, g.Responses[0].Name)
	}
	i := k.position[g.Set]
	k.position[g.Set]++
	key := grantKey(g.Set, g.Backend, g.Algorithm, g.Absent, g.Responses)
	if i >= len(s.log) || s.log[i].text != key {
		ch.broken(1, "grant %d of set %d is at rank %d\n%s\nthe coordinator's are %v", i, g.Set, n.rank, key,
			s.log)
	}
	if s.log[i].order <= k.order {
		ch.broken(1, "rank %d applies grant %d after grant %d", n.rank, s.log[i].order, k.order)
	}
	if s.log[i].segmentBytes != g.SegmentBytes {
		ch.broken(1, "rank %d runs grant %d of set %d with segments of %d bytes, want %d", n.rank, i, g.Set,
			g.SegmentBytes, s.log[i].segmentBytes)
	}
	k.order = s.log[i].order
	k.running[g] = key
	for _, r := range g.Responses {
		if slices.Contains(g.Absent, n.rank) {
			continue
		}
		p := n.asked(g, r)
		if p < 0 {
			ch.broken(2, "rank %d is answered %q of set %d, which it does not wait for", n.rank, r.Name,
				g.Set)
		}
		if q := &n.pending[p].q; r.Kind != message.Error && !r.Matches(q, slices.Index(s.Ranks, n.rank)) {
			ch.broken(4, "rank %d requested %v and runs %v%v", n.rank, q, r.DType, r.Shape)
		}
	}
}

func (ch *checker) finished(n *node, g *controller.Grant) {
	if key := grantKey(g.Set, g.Backend, g.Algorithm, g.Absent,
		g.Responses); key != ch.ranks[n.rank].running[g] {
		ch.broken(1, "rank %d was given\n%s\nwhich became\n%s\nbefore it was finished", n.rank,
			ch.ranks[n.rank].running[g], key)
	}
	if ch.set(g.Set).Ranks[0] == n.rank {
		ch.ranks[n.rank].finished++
	}
}

func (ch *checker) happened(controller.Event) {}

func (ch *checker) removed(n *node, set topo.ProcessSetID, _ []request) {
	if !ch.set(set).gone {
		ch.broken(1, "rank %d says that set %d is removed", n.rank, set)
	}
}

func (ch *checker) stop(n *node, _ string, _ []request) { ch.ranks[n.rank].stopped = true }

func (ch *checker) closed(n *node) {
	for _, l := range n.lanes {
		if len(l) > 0 {
			ch.broken(9, "rank %d closes before its work is done", n.rank)
		}
	}
}

func (ch *checker) failed(n *node, v *controller.Verdict) {
	if ch.verdict == nil {
		ch.verdict = v
		ch.seen.verdicts++
	}
	// If rank 0 or a leader has died, the ranks that it connects find the verdict themselves, and may give
	// another reason.
	alone := len(ch.died) > 0 && (ch.died[0] == 0 || ch.c.nodes[ch.died[0]].comb != nil)
	if !slices.Equal(v.Ranks, ch.verdict.Ranks) || v.Reason != ch.verdict.Reason && !alone {
		ch.broken(10, "rank %d says %v, others say %v", n.rank, v, ch.verdict)
	}
	if len(ch.died) == 0 && len(ch.accused) == 0 {
		ch.broken(10, "rank %d says %v and all live", n.rank, v)
	}
	want := append(slices.Clone(ch.died), ch.accused...)
	slices.Sort(want)
	if !slices.Equal(v.Ranks, want) {
		ch.broken(10, "rank %d says %v; dead are %v, accused are %v", n.rank, v, ch.died, ch.accused)
	}
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

func (a counts) plus(b counts) counts {
	return counts{
		a.grants + b.grants, a.byBit + b.byBit, a.fused + b.fused, a.errors + b.errors, a.refused + b.refused,
		a.erased + b.erased,
		a.late + b.late, a.invalid + b.invalid, a.stopsWithWork + b.stopsWithWork, a.verdicts + b.verdicts,
		a.joins + b.joins, a.absent + b.absent, a.absentByBit + b.absentByBit, a.groups + b.groups,
		a.failedGroups + b.failedGroups,
		a.added + b.added, a.removed + b.removed, a.impossible + b.impossible, a.crossed + b.crossed,
		a.left + b.left, a.awaited + b.awaited, a.closedEarly + b.closedEarly, a.combined + b.combined,
		a.alone + b.alone, a.tuned + b.tuned, a.emptied + b.emptied, a.emptiedLed + b.emptiedLed,
		a.founded + b.founded, a.disagreed + b.disagreed, a.removedByMembers + b.removedByMembers,
		a.accusedSeveral + b.accusedSeveral, a.silent + b.silent, a.agreed + b.agreed,
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

// randomLeaders puts the ranks on random hosts and returns the leader of each rank.
func randomLeaders(rng *rand.Rand, size int) []topo.Rank {
	first := make(map[int]topo.Rank) // the lowest rank of each host
	var leaders []topo.Rank
	for r := range size {
		host := rng.IntN(2)
		if _, found := first[host]; !found || first[host] == 0 {
			first[host] = topo.Rank(r)
		}
		leaders = append(leaders, first[host])
	}
	return leaders
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
