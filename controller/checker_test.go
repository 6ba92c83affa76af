package controller_test

import (
	"fmt"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/responsecache"
)

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
			ch.sets[i].gone = true
			if absent {
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
	s.gone, s.refused = fails, fails
	if fails {
		ch.seen.disagreed++
	} else {
		ch.seen.founded++
	}
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
