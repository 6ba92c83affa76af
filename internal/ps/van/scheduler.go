package van

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gohvd/gohvd/internal/analysis"
	"github.com/gohvd/gohvd/internal/ps/pspb"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
)

// scheduler is what only the scheduler does: it assigns ids to the nodes that register, counts who has
// entered a barrier, and has the clocks of the workers.
type scheduler struct {
	van      *Van
	complete chan struct{} // closed when started or err is set
	// telling is held while the nodes are told that one of them was declared dead. A node whose connection
	// with that one ends asks the scheduler (link.confirm) and gets the answer only after the reason.
	telling sync.Mutex

	mu        sync.Mutex
	nodes     []*pspb.Node // registered nodes, in the order of registration
	waiting   map[*applicant]bool
	gaveUp    map[int]bool // nodes whose time limit has passed, by the id that they want
	started   bool         // all nodes have registered and have ids
	met       atomic.Bool  // a barrier of all nodes was complete
	finishing atomic.Bool  // the scheduler leaves after a barrier of all nodes
	over      atomic.Bool  // the barrier after which the scheduler leaves is complete
	err       error        // reason why the job does not start
	barriers  map[int]map[int]entry
	// withdrawn has the last barrier from which a node has withdrawn, by group and id. The withdrawal may
	// arrive before the entry. The group is 0 for the clock.
	withdrawn map[[2]int]int64
	clocks    map[int]int64 // number of iterations that a worker has ended, by id
	ticks     map[int]tick  // workers that wait for slower ones, by id
	waits     map[int]wait  // of the barriers in which nodes wait, by group; 0 is the clock
	// late says how long others have waited only for a node. Its ranks are the ids of nodes.
	late analysis.Held
	// generation is the number of processes that have taken the place of another one. It is guarded by the
	// mu of members.
	generation uint64
}

// wait is the state of a barrier or of the clock while nodes wait there.
type wait struct {
	began time.Duration // when the first one began to wait
	last  int           // the node for which alone the others wait, or 0
	alone time.Duration // since when they wait only for it
}

// entry is a node that waits in a barrier or for the clock. barrier identifies its call.
type entry struct {
	link     *link
	customer int32
	barrier  int64
}

func newScheduler(v *Van) *scheduler {
	return &scheduler{van: v, complete: make(chan struct{}), waiting: make(map[*applicant]bool),
		gaveUp: make(map[int]bool), barriers: make(map[int]map[int]entry),
		withdrawn: make(map[[2]int]int64), clocks: make(map[int]int64), ticks: make(map[int]tick),
		waits: make(map[int]wait)}
}

// wait waits until all nodes have registered.
func (s *scheduler) wait(ctx context.Context) error {
	s.mu.Lock()
	err := s.fill()
	s.mu.Unlock()
	if err != nil {
		return err
	}
	select {
	case <-s.complete:
	case <-ctx.Done():
		s.mu.Lock()
		var missing *missingError
		if !s.started && s.err == nil {
			missing = s.missingError(context.Cause(ctx))
			s.err = missing
			close(s.complete)
		}
		s.mu.Unlock()
		if missing != nil && len(missing.nodes) > 0 && isLate(ctx) {
			s.van.blames.blameAll(processesOf(missing.nodes), missing)
		}
	}
	if s.err != nil {
		s.tell()
	}
	return s.err
}

func (s *scheduler) count(r pspb.Role) (n int) {
	for _, node := range s.nodes {
		if node.Role == r {
			n++
		}
	}
	return n
}

// register handles a registration. It waits until all nodes have registered. If the job has started already,
// the process gets the place of one that has ended. If the process ends or hangs before all have registered,
// its registration does not count.
func (s *scheduler) register(ctx context.Context, hello *pspb.Control,
	a *applicant) (nodes []*pspb.Node, err error) {
	started := false
	if err = s.checkRegistration(hello); err == nil {
		if started, err = s.addProcess(hello); err == nil && started {
			nodes, err = s.replace(ctx, hello, a)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("the scheduler refused the registration: %w", err)
	}
	if started {
		return nodes, nil
	}
	select {
	case <-s.complete:
	case <-a.lost:
		if err := s.remove(hello, a.err); err != nil {
			return nil, err
		}
	case <-ctx.Done():
		return nil, ErrStopped
	}
	if s.err != nil {
		return nil, fmt.Errorf("the job does not start: %w", s.err)
	}
	return nodesOf(s.van.members.table(), hello.Nodes[0].Incarnation), nil
}

// checkRegistration returns an error if a registration does not fit the job.
func (s *scheduler) checkRegistration(hello *pspb.Control) error {
	cfg, first := &s.van.cfg, hello.Nodes[0]
	if int(hello.NumServers) != cfg.NumServers || int(hello.NumWorkers) != cfg.NumWorkers {
		return fmt.Errorf("the node has DMLC_NUM_SERVER=%d and DMLC_NUM_WORKER=%d, the scheduler %d and %d",
			hello.NumServers, hello.NumWorkers, cfg.NumServers, cfg.NumWorkers)
	}
	if int(hello.Staleness)-1 != cfg.Staleness {
		return fmt.Errorf("the node has HVD_STALENESS=%s, the scheduler %s", staleness(hello.Staleness-1),
			staleness(int32(cfg.Staleness)))
	}
	if int(hello.Replicas) != cfg.Replicas {
		return fmt.Errorf("the node has HVD_PS_REPLICAS=%d, the scheduler %d", hello.Replicas, cfg.Replicas)
	}
	want := map[pspb.Role]int{pspb.Role_SERVER: cfg.NumServers, pspb.Role_WORKER: cfg.NumWorkers}
	for i, n := range hello.Nodes {
		if n.Role != first.Role || n.Incarnation != first.Incarnation || int(n.CustomerId) != i {
			return errors.New("malformed registration: its nodes differ")
		}
	}
	if want[first.Role] == 0 {
		return fmt.Errorf("the job has no place for a %s: it has one scheduler, %d servers and %d workers",
			Role(first.Role), cfg.NumServers, cfg.NumWorkers)
	}
	return nil
}

// addProcess adds the nodes of a process. If they are the last ones, they get their ids. If the job has
// started already, addProcess only says so.
func (s *scheduler) addProcess(hello *pspb.Control) (started bool, err error) {
	cfg, role := &s.van.cfg, hello.Nodes[0].Role
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.started || s.err != nil {
		return s.started, s.err
	}
	want := cfg.NumServers
	if role == pspb.Role_WORKER {
		want = cfg.NumWorkers
	}
	if have := s.count(role); have+len(hello.Nodes) > want {
		return false, tooMany(hello, have, want)
	}
	s.nodes = append(s.nodes, hello.Nodes...)
	s.van.members.mu.Lock()
	s.van.blames.forgive() // the process may take the place of one that has ended
	s.van.members.mu.Unlock()
	return false, s.fill()
}

// tooMany returns the error of a registration for which the job has no place.
func tooMany(hello *pspb.Control, have, want int) error {
	role := Role(hello.Nodes[0].Role)
	return fmt.Errorf("the job has %d of %d %ss already, and %d more want to join: is DMLC_NUM_%s right?",
		have, want, role, len(hello.Nodes), strings.ToUpper(role.String()))
}

// staleness returns the text of a bound on staleness.
func staleness(bound int32) string {
	if bound < 0 {
		return "(asynchronous)"
	}
	return strconv.Itoa(int(bound))
}

// fill makes the table if all nodes have registered. The caller holds mu.
func (s *scheduler) fill() error {
	cfg := &s.van.cfg
	if len(s.nodes) < cfg.NumServers+cfg.NumWorkers || s.started || s.err != nil {
		return nil
	}
	self := s.van.members.self[0]
	self.Id = SchedulerID
	defer close(s.complete)
	s.err = s.van.members.setTable(append(assign(s.nodes), self))
	if s.err != nil {
		return s.err
	}
	s.started = true
	l, err := s.van.addLink([]*pspb.Node{self}, nil, nil)
	if err != nil {
		return err
	}
	l.run(nil)
	return nil
}

// assign gives ids to nodes and returns them in the order of their ranks. A node gets the rank that it
// wants, unless an earlier one has it. The others get the remaining ranks in ps-lite's order: by descending
// host name and ascending port.
func assign(nodes []*pspb.Node) []*pspb.Node {
	var table []*pspb.Node
	for _, role := range []struct {
		role pspb.Role
		id   func(rank int) int
	}{{pspb.Role_SERVER, ServerID}, {pspb.Role_WORKER, WorkerID}} {
		var waiting []*pspb.Node
		count := 0
		for _, n := range nodes {
			if n.Role == role.role {
				count++
			}
		}
		ranks := make([]*pspb.Node, count)
		for _, n := range nodes {
			switch r := int(n.Rank) - 1; {
			case n.Role != role.role:
			case r >= 0 && r < count && ranks[r] == nil:
				ranks[r] = n
			default:
				waiting = append(waiting, n)
			}
		}
		slices.SortStableFunc(waiting, func(a, b *pspb.Node) int {
			return cmp.Or(cmp.Compare(b.Hostname, a.Hostname), cmp.Compare(a.Port, b.Port))
		})
		for r := range ranks {
			if ranks[r] == nil {
				ranks[r], waiting = waiting[0], waiting[1:]
			}
			ranks[r].Id = int32(role.id(r))
		}
		table = append(table, ranks...)
	}
	return table
}

// enter handles a node that enters or leaves a barrier.
func (s *scheduler) enter(l *link, h *pspb.Header) {
	v, group := s.van, int(h.Control.BarrierGroup)
	e := entry{l, h.CustomerId, h.Control.Barrier}
	id, members := v.members.nodeOf(l.peer, h.CustomerId), Members(group, v.cfg.NumServers, v.cfg.NumWorkers)
	if !slices.Contains(members, id) {
		e.answer(fmt.Sprintf("group %d does not have %s", group, Name(id)), nil)
		return
	}
	if gone := s.enterBarrier(e, id, group, members, h.Control.Withdraw); gone != nil {
		v.blames.blame(processOf(gone), errors.New(gone.Gone))
		e.answer("", gone)
	}
}

// enterBarrier records that node id enters or leaves the barrier of a group with the given members. If a
// member has ended, it returns its record.
func (s *scheduler) enterBarrier(e entry, id, group int, members []int, withdraw bool) *pspb.Node {
	s.mu.Lock()
	defer s.mu.Unlock()
	place := [2]int{group, id}
	if withdraw {
		s.withdrawn[place] = max(s.withdrawn[place], e.barrier)
		if s.barriers[group][id] == e {
			e.answer(notHere(s.missing(group)), nil)
			delete(s.barriers[group], id)
			s.waitFor(group, s.missing(group))
		}
		return nil
	}
	if e.barrier <= s.withdrawn[place] {
		return nil
	}
	for _, m := range members {
		if n := s.van.members.goneNode(m); n != nil {
			return n
		}
	}
	if s.barriers[group] == nil {
		s.barriers[group] = make(map[int]entry)
	}
	s.barriers[group][id] = e
	if len(s.barriers[group]) == len(members) {
		if group == GroupAll {
			s.met.Store(true)
			s.over.Store(s.finishing.Load())
		}
		release(s.barriers[group], nil)
		delete(s.barriers, group)
	}
	s.waitFor(group, s.missing(group))
	return nil
}

// missing returns the nodes for which others wait: in the barrier of a group, or in the clock if group is 0.
// The caller holds mu.
func (s *scheduler) missing(group int) (ids []int) {
	cfg := &s.van.cfg
	if group != 0 {
		if len(s.barriers[group]) == 0 {
			return nil
		}
		return slices.DeleteFunc(Members(group, cfg.NumServers, cfg.NumWorkers), func(id int) bool {
			_, here := s.barriers[group][id]
			return here
		})
	}
	least := int64(0)
	for _, t := range s.ticks {
		least = max(least, t.least)
	}
	return s.behind(least)
}

// behind returns the workers that have ended fewer iterations than least. The caller holds mu.
func (s *scheduler) behind(least int64) (ids []int) {
	for _, id := range Members(GroupWorkers, 0, s.van.cfg.NumWorkers) {
		if s.clocks[id] < least {
			ids = append(ids, id)
		}
	}
	return ids
}

// notHere returns the error of a node that no longer waits for the given ones.
func notHere(missing []int) string {
	return fmt.Sprintf("it has waited for %s", strings.Join(names(missing), ", "))
}

// waitFor records that the nodes in a barrier, or in the clock if group is 0, wait for the given nodes from
// now on, or that none waits. The caller holds mu.
func (s *scheduler) waitFor(group int, missing []int) {
	now := s.van.timing.now()
	w, known := s.waits[group]
	if !known {
		w.began = now
	}
	last := 0
	if len(missing) == 1 {
		last = missing[0]
	}
	if last != w.last {
		if w.last != 0 {
			s.late.Add(topo.Rank(w.last), w.alone, now, true)
		}
		w.last, w.alone = last, now
	}
	s.waits[group] = w
	if len(missing) == 0 {
		delete(s.waits, group)
	}
}

// addStats adds the barriers and clocks in which nodes wait, and the time during which each node held others
// up.
func (s *scheduler) addStats(n *trace.Node) {
	v := s.van
	s.mu.Lock()
	defer s.mu.Unlock()
	now := v.timing.now()
	late := s.late.Clone()
	for _, group := range slices.Sorted(maps.Keys(s.waits)) {
		w := s.waits[group]
		if w.last != 0 {
			late.Add(topo.Rank(w.last), w.alone, now, true)
		}
		wait := trace.NodeWait{What: fmt.Sprintf("barrier of group %d", group), Time: now - w.began}
		waiting := slices.Sorted(maps.Keys(s.barriers[group]))
		if group == 0 {
			wait.What, waiting = "Clock", slices.Sorted(maps.Keys(s.ticks))
		}
		wait.Waiting, wait.Missing = names(waiting), names(s.missing(group))
		n.Waits = append(n.Waits, wait)
	}
	processes := make(map[int]time.Duration)
	for _, node := range late.Ranks() {
		if node.Held > 0 {
			processes[v.members.firstOf(int(node.Rank))] += node.Held
		}
	}
	for i := range n.Peers {
		n.Peers[i].HeldUp = processes[n.Peers[i].ID]
	}
}

// names returns the names of nodes.
func names(ids []int) (all []string) {
	for _, id := range ids {
		all = append(all, Name(id))
	}
	return all
}

// release answers all nodes in a barrier. If gone is not nil, the barrier has failed, because this node has
// ended. The scheduler itself is answered last, because it may then leave the job.
func release(barrier map[int]entry, gone *pspb.Node) {
	for _, id := range slices.Backward(slices.Sorted(maps.Keys(barrier))) {
		barrier[id].answer("", gone)
	}
}

// answer tells the node that it need not wait any longer. If text is not empty, it is the error of the call.
// If gone is not nil, the call has failed because this node has ended.
func (e entry) answer(text string, gone *pspb.Node) {
	m := controlMessage(&pspb.Control{Command: pspb.Command_BARRIER, Barrier: e.barrier})
	if gone != nil {
		m.Header.Control.Nodes = []*pspb.Node{gone}
	}
	m.Header.CustomerId, m.Header.Error = e.customer, text
	_ = e.link.reply(m) // an error means that the node has gone
}

// dropEntries removes the nodes of a process whose link has ended from all barriers. It is called before the
// connection is closed, so that a barrier that another node enters after the process has left fails.
func (s *scheduler) dropEntries(l *link) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for group, barrier := range s.barriers {
		maps.DeleteFunc(barrier, func(_ int, e entry) bool { return e.link == l })
		s.waitFor(group, s.missing(group))
	}
}

// lost handles the end of the link with the process of the given nodes. Barriers of groups that have one of
// its nodes fail. If the process has not left, all other nodes learn that it is dead.
func (s *scheduler) lost(nodes []*pspb.Node, left bool, err error) {
	v := s.van
	if !left {
		s.broadcast(pspb.Command_LOST, nodes)
	}
	var failed []map[int]entry
	s.mu.Lock()
	for group, barrier := range s.barriers {
		members := Members(group, v.cfg.NumServers, v.cfg.NumWorkers)
		if len(barrier) > 0 && slices.ContainsFunc(nodes, func(n *pspb.Node) bool {
			return slices.Contains(members,
				int(n.Id))
		}) {
			failed = append(failed, barrier)
			delete(s.barriers, group)
			s.waitFor(group, nil)
		}
	}
	s.mu.Unlock()
	// The barrier of the scheduler itself comes last, because it may then leave the job.
	ofScheduler := func(barrier map[int]entry) bool { return barrier[SchedulerID].link != nil }
	if i := slices.IndexFunc(failed, ofScheduler); i >= 0 {
		last := len(failed) - 1
		failed[i], failed[last] = failed[last], failed[i]
	}
	for _, barrier := range failed {
		v.blames.blame(processOf(nodes[0]), err)
		release(barrier, nodes[0])
	}
	if left {
		s.left(nodes)
	}
	s.advance()
}

// broadcast sends the records of the nodes of a process to all other nodes.
func (s *scheduler) broadcast(command pspb.Command, nodes []*pspb.Node) {
	for id, l := range *s.van.links.Load() {
		if id == l.peer && l.conn != nil && l.process.Incarnation != nodes[0].Incarnation {
			// An error means that this node has gone too.
			_ = l.reply(controlMessage(&pspb.Control{Command: command, Nodes: nodes}))
		}
	}
}
