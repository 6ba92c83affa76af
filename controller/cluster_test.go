package controller_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
)

const livenessTimeout = 10 * time.Second

// cluster is a job that runs in one goroutine. It has a Coordinator, a node for each rank, and the encoded
// frames in flight between them. Nothing happens by itself: a test chooses which rank acts next.
type cluster struct {
	tb    testing.TB
	cfg   controller.CoordinatorConfig
	coord *controller.Coordinator
	nodes []*node
	now   time.Duration
	watch watcher
	names setNames

	in message.Up // memory that is reused for every frame, as in the engine
}

// node is a rank. It consists of the rank's Member and those parts of an engine that the protocol needs.
type node struct {
	c    *cluster
	rank topo.Rank
	m    *controller.Member
	sets []controller.Set

	up, down [][]byte // the frames in flight from and to this rank, oldest first
	in       message.Down
	// A leader has the fields below. ups and downs are the frames in flight between the leader and rank 0.
	comb       *controller.Combiner
	ups, downs [][]byte

	pending []request // requests that were submitted and have not been answered
	gone    []topo.ProcessSetID
	lanes   []lane // lanes[i] belongs to sets[i]; a removed set keeps its lane until its grants finish
	numbers map[topo.ProcessSetID]uint64
	stopped bool // whether the member has applied a stop
	drained bool
	over    bool // whether the member has closed or failed
	dead    bool // whether the rank was killed; the coordinator dies with rank 0
}

// request is a request of a rank on a process set.
//
// If await is set, the rank makes the request only when no other request of the rank is in flight. If the
// request is for a tensor of a group, step is the number of the step in which the group is submitted. The
// rank submits the group of the next step only after all tensors of the previous group have been answered.
//
// A random program does not know the IDs of the sets that it adds, and uses planned IDs instead. If the
// request adds a process set, adds is its planned ID.
type request struct {
	set   topo.ProcessSetID
	q     message.Request
	await bool
	step  int
	adds  topo.ProcessSetID
}

// firstPlanned is the lowest planned ID. It is greater than the IDs of all sets of the random jobs.
const firstPlanned topo.ProcessSetID = 1000

// setNames has the ID of each process set that was added in a job, by planned ID.
type setNames map[topo.ProcessSetID]topo.ProcessSetID

// resolve returns the request r with IDs in place of planned IDs. It returns false if an ID is not known yet.
func (s setNames) resolve(r request) (request, bool) {
	for _, id := range []*topo.ProcessSetID{&r.set, &r.q.Set} {
		if *id >= firstPlanned {
			if s[*id] == 0 {
				return r, false
			}
			*id = s[*id]
		}
	}
	return r, true
}

// planned returns the planned ID of a set, or the ID itself if the set has no planned ID.
func (s setNames) planned(id topo.ProcessSetID) topo.ProcessSetID {
	for planned, x := range s {
		if x == id {
			return planned
		}
	}
	return id
}

// answered records the ID of a set that the request r has added.
func (s setNames) answered(tb testing.TB, r request, to *message.Response) {
	if to.Kind != message.AddProcessSet || r.adds == 0 {
		return
	}
	if old, known := s[r.adds]; known && old != to.Set {
		tb.Fatalf("the set %v has the ID %d at one member and %d at another", r.q.Ranks, old, to.Set)
	}
	s[r.adds] = to.Set
}

// turn says when a rank can make the next request of its program.
type turn uint8

const (
	turnNow turn = iota
	turnLater
	turnNever // the process set of the request was removed
)

// turnOf returns when a rank can make request r. pending are the rank's unanswered requests. sets are the
// process sets to which the rank belongs, and gone are the removed process sets to which it belonged.
func turnOf(r request, pending []request, sets []controller.Set, gone []topo.ProcessSetID) turn {
	blocks := func(p request) bool {
		return r.await || p.set == r.set && (p.q.Name == r.q.Name || p.q.Kind == message.Join ||
			p.step*r.step > 0 && p.step != r.step)
	}
	switch {
	case slices.Contains(gone, r.set):
		return turnNever
	case !slices.ContainsFunc(sets, func(s controller.Set) bool { return s.ID == r.set }),
		slices.ContainsFunc(pending, blocks):
		return turnLater
	}
	return turnNow
}

// A lane holds the unfinished grants of one process set, oldest first.
type lane []*controller.Grant

// watcher receives the events of a cluster. A frame is valid only during the call.
type watcher interface {
	submitted(n *node, r request)
	sent(n *node, u *message.Up)
	arrived(n *node, u *message.Up)                    // the coordinator is about to apply u
	relayed(p *message.Part, u *message.Up)            // a leader has passed on u
	issued(outs []controller.Outgoing)                 // the coordinator has sent outs, which may be empty
	happened(e controller.Event)                       // the coordinator has reported e
	applied(n *node, d *message.Down)                  // the member has applied d
	granted(n *node, g *controller.Grant)              // the member has received g
	finished(n *node, g *controller.Grant)             // the member is about to finish g
	stop(n *node, reason string, unanswered []request) // the member has applied a stop
	removed(n *node, set topo.ProcessSetID, unanswered []request)
	closed(n *node)                        // the member has closed
	failed(n *node, v *controller.Verdict) // the member has received or given verdict v
	frameReceived()                        // the coordinator has applied one frame
}

// plan returns the Planner of the tests. It chooses the algorithm tree for broadcasts and ring for all other
// operations. It returns an error for reductions of an element type in refused.
func plan(refused ...tensor.DType) controller.Planner {
	return func(_ []topo.Rank, r *message.Response, _ int64, _ *message.Tuning) (
		message.Backend, message.Algorithm, error,
	) {
		switch {
		case r.Kind.Reduces() && slices.Contains(refused, r.DType):
			return message.NoBackend, message.NoAlgorithm, fmt.Errorf("no backend: tcp: %v is not supported",
				r.DType)
		case r.Kind == message.Broadcast:
			return message.TCP, message.Tree, nil
		}
		return message.TCP, message.Ring, nil
	}
}

func newCluster(tb testing.TB, cfg controller.CoordinatorConfig, w watcher) *cluster {
	c := &cluster{tb: tb, cfg: cfg, watch: w, names: make(setNames), coord: controller.NewCoordinator(cfg, 0)}
	for _, r := range cfg.Sets[0].Ranks {
		n := &node{c: c, rank: r, numbers: make(map[topo.ProcessSetID]uint64)}
		for _, s := range cfg.Sets {
			if slices.Contains(s.Ranks, r) {
				n.sets = append(n.sets, s)
			}
		}
		n.lanes = make([]lane, len(n.sets))
		n.comb = controller.NewCombiner(r, cfg.Leaders, cfg.Sets, 0)
		n.m = controller.NewMember(controller.MemberConfig{Rank: r, Sets: n.sets, Leader: c.upstream(r),
			Combiner: n.comb, Keeps: n.comb != nil || cfg.Groups != nil && lowest(cfg.Groups, r),
			LivenessTimeout: cfg.LivenessTimeout}, 0)
		c.nodes = append(c.nodes, n)
	}
	return c
}

// lowest reports whether rank r is the lowest of a group of several ranks.
func lowest(groups []topo.Rank, r topo.Rank) bool {
	return groups[r] == r && slices.Contains(groups[r+1:], r)
}

// upstream returns the rank to which rank r has its control connection.
func (c *cluster) upstream(r topo.Rank) topo.Rank { return c.cfg.Leaders.Upstream(r) }

// led returns leader r and the ranks with a connection to it.
func (c *cluster) led(r topo.Rank) []topo.Rank {
	ranks := []topo.Rank{r}
	for f, leader := range c.cfg.Leaders {
		if leader == r && topo.Rank(f) != r {
			ranks = append(ranks, topo.Rank(f))
		}
	}
	return ranks
}

// leader returns the node of the leader that combines the frames of the rank, or nil. A leader combines its
// own frames.
func (n *node) leader() *node {
	if n.comb != nil {
		return n
	}
	if l := n.c.cfg.Leaders.Of(n.rank); l != n.rank {
		return n.c.nodes[l]
	}
	return nil
}

// all makes all frames in flight from a rank arrive (combine).
func all(of *node) int { return len(of.up) + len(of.ups) }

// combine executes a turn of a leader. In this turn, the oldest frames in flight from some of its ranks
// arrive: as many as the function pick returns for each rank.
func (n *node) combine(pick func(of *node) int) (moved bool) {
	n.comb.Tick(n.c.now)
	for _, r := range n.c.led(n.rank) {
		of := n.c.nodes[r]
		if of != n && of.comb != nil {
			moved = n.relay(of, min(pick(of), len(of.ups))) || moved
			continue
		}
		for range min(pick(of), len(of.up)) {
			n.comb.Up(r, of.up[0])
			of.up = of.up[1:]
			moved = true
		}
	}
	return n.combined() || moved
}

// relay passes on frames of a leader behind the leader n.
func (n *node) relay(of *node, frames int) (moved bool) {
	for range frames {
		parts, err := message.DecodeCombined(of.ups[0], nil)
		if err != nil {
			n.c.tb.Fatal(err)
		}
		of.ups = of.ups[1:]
		for i := range parts {
			n.comb.Relay(of.rank, &parts[i])
		}
	}
	return frames > 0
}

// combined sends the frames that the combiner returns.
func (n *node) combined() bool {
	parts, quiet := n.comb.Ready()
	if len(parts) > 0 {
		n.ups = append(n.ups, message.AppendCombined(nil, parts))
	}
	n.comb.Advance()
	if beat, err := message.AppendDown(nil, &message.Down{Type: message.DownHeartbeat}); err != nil {
		n.c.tb.Fatal(err)
	} else {
		n.passDown(quiet, beat)
	}
	return len(parts) > 0
}

func (n *node) passDown(to []topo.Rank, frame []byte) {
	behind := make(map[*node][]topo.Rank)
	for _, r := range to {
		of, hop := n.c.nodes[r], n.c.nodes[n.c.cfg.Leaders.Hop(n.rank, r)]
		switch {
		case hop != n && hop.comb != nil:
			behind[hop] = append(behind[hop], r)
		case !of.dead:
			of.down = append(of.down, frame)
		}
	}
	for hop, to := range behind {
		if !hop.dead {
			hop.downs = append(hop.downs, n.c.addressed(hop, to, frame))
		}
	}
}

// distribute executes a turn of a leader in which the oldest frame in flight from rank 0 arrives.
func (n *node) distribute() {
	n.comb.Tick(n.c.now)
	to, frame, err := message.DecodeAddressed(n.downs[0], nil)
	n.downs = n.downs[1:]
	var d message.Down
	if err == nil {
		err = message.DecodeDown(frame, &d)
	}
	if err != nil {
		n.c.tb.Fatalf("leader %d: %v", n.rank, err)
	}
	n.comb.Down(to, &d)
	if n.combined(); len(to) == 0 {
		to = n.c.behind(n.rank)
	}
	n.passDown(to, frame)
}

// submit submits a request to the member. The next call of send sends it.
func (n *node) submit(set topo.ProcessSetID, q message.Request) {
	n.c.tb.Helper()
	if err := n.trySubmit(set, q); err != nil {
		n.c.tb.Fatalf("rank %d: %v", n.rank, err)
	}
}

func (n *node) trySubmit(set topo.ProcessSetID, q message.Request) error {
	return n.trySubmitRequest(request{set: set, q: q})
}

func (n *node) trySubmitRequest(r request) error {
	if err := r.q.Check(); err != nil {
		return err
	}
	n.m.Tick(n.c.now)
	if err := n.m.Submit(r.set, &r.q); err != nil {
		return err
	}
	n.pending = append(n.pending, r)
	n.c.watch.submitted(n, r)
	return nil
}

// waits reports whether the rank has an unanswered request with the given name.
func (n *node) waits(set topo.ProcessSetID, name string) bool {
	return n.pendingIndex(set, name) >= 0
}

func (n *node) pendingIndex(set topo.ProcessSetID, name string) int {
	return slices.IndexFunc(n.pending, func(r request) bool { return r.set == set && r.q.Name == name })
}

// send executes a turn of the rank. No frame arrives in this turn.
func (n *node) send() {
	tick(n.m, n.c.now)
	n.take()
}

// read executes a turn of the rank. In this turn, the oldest frame in flight from the coordinator arrives.
func (n *node) read() {
	n.m.Tick(n.c.now)
	if n.take(); n.over {
		return
	}
	frame := n.down[0]
	n.down = n.down[1:]
	if err := message.DecodeDown(frame, &n.in); err != nil {
		n.c.tb.Fatalf("rank %d: %v", n.rank, err)
	}
	if err := n.m.Step(&n.in); err != nil {
		n.c.tb.Fatalf("rank %d: %v", n.rank, err)
	}
	n.c.watch.applied(n, &n.in)
	n.m.Expire()
	n.take()
}

// take calls Ready of the member, sends the frames that Ready returns and executes the grants.
func (n *node) take() {
	if n.over {
		return
	}
	output := n.m.HasOutput()
	r := n.m.Ready()
	if !output && (len(r.Ups) > 0 || len(r.Grants) > 0 || r.Stop) {
		n.c.tb.Fatalf("rank %d: HasOutput is false, but Ready returns %+v", n.rank, r)
	}
	for _, u := range r.Ups {
		if u == nil {
			continue
		}
		frame, err := message.AppendUp(nil, u)
		if err != nil {
			n.c.tb.Fatalf("rank %d: %v", n.rank, err)
		}
		n.up = append(n.up, frame)
		n.c.watch.sent(n, u)
	}
	for _, g := range r.Grants {
		n.c.watch.granted(n, g)
		if n.numbers[g.Set]++; g.Number != n.numbers[g.Set] {
			n.c.tb.Fatalf("rank %d: grant %d of process set %d is number %d", n.rank, n.numbers[g.Set], g.Set,
				g.Number)
		}
		for _, resp := range g.Responses {
			if i := n.asked(g, resp); i >= 0 {
				n.c.names.answered(n.c.tb, n.pending[i], resp)
				n.pending = slices.Delete(n.pending, i, i+1)
			}
			if resp.Kind == message.AddProcessSet && slices.Contains(resp.Ranks, n.rank) {
				n.sets = append(n.sets, controller.Set{ID: resp.Set, Ranks: resp.Ranks})
				n.lanes = append(n.lanes, nil)
			}
		}
		l := n.lane(g)
		*l = append(*l, g)
	}
	for _, set := range removals(r.Grants) {
		if !slices.ContainsFunc(n.sets, func(s controller.Set) bool { return s.ID == set }) {
			continue
		}
		n.gone = append(n.gone, set)
		var left []request
		n.pending = slices.DeleteFunc(n.pending, func(p request) bool {
			if p.set == set {
				left = append(left, p)
			}
			return p.set == set
		})
		n.c.watch.removed(n, set, left)
	}
	stop, reason := r.Stop, r.StopReason
	n.m.Advance()
	if stop {
		n.c.watch.stop(n, reason, n.pending)
		n.pending, n.stopped = nil, true
	}
	n.drain()
	switch {
	case n.over:
	case n.m.Verdict() != nil:
		n.over = true
		if n.comb != nil {
			n.tell(n.m.Verdict())
		}
		n.c.watch.failed(n, n.m.Verdict())
	case n.m.Closed():
		n.over = true
		n.c.watch.closed(n)
	}
}

// asked returns the index in n.pending of the request that the granted response r answers. If there is no
// such request, it returns -1.
func (n *node) asked(g *controller.Grant, r *message.Response) int {
	return answers(n.pending, n.rank, g, r)
}

// answers returns the index in pending of the request that the granted response r answers. If there is no
// such request, it returns -1. The slice pending holds the requests of the given rank.
func answers(pending []request, rank topo.Rank, g *controller.Grant, r *message.Response) int {
	if slices.Contains(g.Absent, rank) {
		return -1
	}
	return slices.IndexFunc(pending, func(p request) bool {
		return p.set == g.Asked && p.q.Name == r.Name
	})
}

// lane returns the lane that executes g. If g answers requests for a process set that is not added because
// the members disagree, this is the lane of the global set.
func (n *node) lane(g *controller.Grant) *lane {
	i := slices.IndexFunc(n.sets, func(s controller.Set) bool { return s.ID == g.Set })
	return &n.lanes[max(i, 0)]
}

// finish marks the oldest grant of lane i as finished. The next call of send reports that to the coordinator.
func (n *node) finish(i int) {
	g := n.lanes[i][0]
	n.lanes[i] = n.lanes[i][1:]
	n.c.watch.finished(n, g)
	n.m.Tick(n.c.now)
	n.m.Finished(g)
}

// drain makes the member send bye if it was stopped and all its grants have finished.
func (n *node) drain() {
	if !n.stopped || n.drained || n.over {
		return
	}
	for _, l := range n.lanes {
		if len(l) > 0 {
			return
		}
	}
	n.drained = true
	n.m.Drained()
	n.take()
}

// arriving reports whether a frame is in flight from the node to the coordinator.
func (n *node) arriving() bool {
	switch {
	case n.c.upstream(n.rank) != 0:
		return false
	case n.comb != nil:
		return len(n.ups) > 0
	}
	return len(n.up) > 0
}

// receive executes the first part of a turn of the coordinator: it applies the oldest frame in flight from a
// rank.
func (c *cluster) receive(n *node) {
	if n.comb != nil {
		c.receiveCombined(n)
		return
	}
	frame := n.up[0]
	n.up = n.up[1:]
	if err := message.DecodeUp(frame, &c.in); err != nil {
		c.tb.Fatalf("coordinator: frame of rank %d: %v", n.rank, err)
	}
	c.watch.arrived(n, &c.in)
	c.coord.Step(n.rank, &c.in)
	c.watch.frameReceived()
}

// receiveCombined applies the oldest frame in flight from a leader.
func (c *cluster) receiveCombined(n *node) {
	parts, err := message.DecodeCombined(n.ups[0], nil)
	n.ups = n.ups[1:]
	if err != nil {
		c.tb.Fatalf("coordinator: frame of leader %d: %v", n.rank, err)
	}
	for _, p := range parts {
		if err := message.DecodeUp(p.Frame, &c.in); err != nil {
			c.tb.Fatalf("coordinator: frame of ranks %v: %v", p.Ranks, err)
		}
		listed := p
		if p.All {
			listed.Ranks = c.behind(n.rank)
		}
		c.watch.relayed(&listed, &c.in)
		for _, r := range listed.Ranks {
			c.watch.arrived(c.nodes[r], &c.in)
		}
		c.coord.Relay(n.rank, &p, &c.in)
		c.watch.frameReceived()
	}
}

// behind returns rank r and all ranks behind it.
func (c *cluster) behind(r topo.Rank) (ranks []topo.Rank) {
	for f := range c.cfg.Leaders {
		if of := topo.Rank(f); of == r || c.cfg.Leaders.Lead(r, of) {
			ranks = append(ranks, of)
		}
	}
	return ranks
}

// addressed returns a frame for ranks behind a leader.
func (c *cluster) addressed(leader *node, to []topo.Rank, frame []byte) []byte {
	if len(to) == len(c.behind(leader.rank)) {
		to = nil
	}
	return message.AppendAddressed(nil, to, frame)
}

// decide executes the last part of a turn of the coordinator: it sends the frames that Ready returns, and
// reports whether there were any.
func (c *cluster) decide() bool {
	c.coord.Expire()
	outs := c.coord.Ready()
	sent := len(outs) > 0
	c.watch.issued(outs)
	for _, e := range c.coord.Events() {
		c.watch.happened(e)
	}
	for _, o := range outs {
		frame, err := message.AppendDown(nil, o.Down)
		if err != nil {
			c.tb.Fatalf("coordinator: %v", err)
		}
		led := make(map[*node][]topo.Rank)
		for _, r := range o.To {
			n := c.nodes[r]
			if l := c.nodes[c.cfg.Leaders.Hop(0, r)]; l.comb != nil {
				led[l] = append(led[l], r)
			} else if !n.dead {
				n.down = append(n.down, frame)
			}
		}
		for l, to := range led {
			if !l.dead {
				l.downs = append(l.downs, c.addressed(l, to, frame))
			}
		}
	}
	c.coord.Advance()
	return sent
}

// tune changes settings in a turn of the coordinator.
func (c *cluster) tune(t message.Tuning) {
	c.coord.Tick(c.now)
	c.coord.Tune(t)
}

// kill ends the process of a rank. Frames in flight from and to the rank are lost, and its control connection
// ends. If the rank is rank 0, the coordinator dies too, and frames from the coordinator that other ranks
// have not read are lost.
func (c *cluster) kill(r topo.Rank, reason string) {
	c.die(r)
	c.endConnection(r, reason)
}

func (c *cluster) die(r topo.Rank) {
	n := c.nodes[r]
	n.dead, n.over = true, true
	n.up, n.down, n.ups, n.downs = nil, nil, nil, nil
}

func (c *cluster) endConnection(r topo.Rank, reason string) {
	switch l := c.nodes[c.upstream(r)]; {
	case l.comb != nil:
		if !l.over {
			l.comb.Tick(c.now)
			l.comb.Lost(r, reason)
			l.combined()
		}
	case r != 0 && !c.nodes[0].dead:
		c.coord.Tick(c.now)
		c.coord.Lost(r, reason)
	}
	for _, n := range c.nodes {
		if n.rank == r || c.upstream(n.rank) != r || n.over {
			continue
		}
		n.down, n.downs = nil, nil
		n.send()
		if !n.over {
			n.m.Lost(reason)
			n.take()
		}
	}
}

// tell sends the verdict that the leader has found to its ranks, if they have got none.
func (n *node) tell(v *controller.Verdict) {
	frame, err := message.AppendDown(nil, &message.Down{Type: message.DownFail, Ranks: v.Ranks,
		Reason: v.Reason})
	if err != nil {
		n.c.tb.Fatal(err)
	}
	n.passDown(n.comb.Fail(), frame)
}

// next returns the earliest time at which a turn is due. It considers the coordinator and the ranks for which
// the function pass returns true.
func (c *cluster) next(pass func(n *node) bool) time.Duration {
	next := controller.Never
	if !c.nodes[0].dead && pass(c.nodes[0]) {
		next = c.coord.Next()
	}
	for _, n := range c.nodes {
		if !n.over && pass(n) {
			next = min(next, n.m.Next())
		}
		if n.comb != nil && !n.over && pass(n) {
			next = min(next, n.comb.Next())
		}
	}
	return next
}

// settle executes turns until no frame is in flight. Grants finish at once.
func (c *cluster) settle() {
	c.tb.Helper()
	turns := 0
	for moved := true; moved; {
		if turns++; turns > 10_000 {
			c.tb.Fatalf("frames still move after %d turns", turns)
		}
		moved = false
		for _, n := range c.nodes {
			if !n.over {
				n.send()
			}
		}
		for _, n := range c.nodes {
			if n.comb != nil && !n.over {
				moved = n.combine(all) || moved
			}
		}
		if !c.nodes[0].dead {
			c.coord.Tick(c.now)
			for _, n := range c.nodes {
				for ; n.arriving(); moved = true {
					c.receive(n)
				}
			}
			moved = c.decide() || moved
		}
		for _, n := range c.nodes {
			for ; n.comb != nil && !n.over && len(n.downs) > 0; moved = true {
				n.distribute()
			}
			for ; !n.over && len(n.down) > 0; moved = true {
				n.read()
			}
			for i := range n.lanes {
				for ; !n.over && len(n.lanes[i]) > 0; moved = true {
					n.finish(i)
				}
			}
			n.drain()
		}
	}
}

// removals returns the process sets that the grants remove.
func removals(grants []*controller.Grant) (sets []topo.ProcessSetID) {
	for _, g := range grants {
		if r := g.Responses[0]; r.Kind == message.RemoveProcessSet {
			sets = append(sets, r.Set)
		}
	}
	return sets
}
