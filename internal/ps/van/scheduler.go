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

	"google.golang.org/protobuf/proto"

	"github.com/gohvd/gohvd/internal/ps/pspb"
)

// scheduler is what only the scheduler does: it assigns ids to the nodes that register, counts who has
// entered a barrier, and has the clocks of the workers.
type scheduler struct {
	van      *Van
	complete chan struct{} // closed when table or err is set

	mu       sync.Mutex
	nodes    []*pspb.Node // registered nodes, in the order of registration
	table    []*pspb.Node // the nodes with their ids, once all have registered
	err      error        // reason why the job does not start
	barriers map[int]map[int]entry
	// withdrawn has the last barrier from which a node has withdrawn, by group and id. The withdrawal may
	// arrive before the entry. The group is 0 for the clock.
	withdrawn map[[2]int]int64
	clocks    map[int]int64 // number of iterations that a worker has ended, by id
	ticks     map[int]tick  // workers that wait for slower ones, by id
}

// entry is a node that waits in a barrier or for the clock. barrier identifies its call.
type entry struct {
	link     *link
	customer int32
	barrier  int64
}

func newScheduler(v *Van) *scheduler {
	return &scheduler{van: v, complete: make(chan struct{}), barriers: make(map[int]map[int]entry),
		withdrawn: make(map[[2]int]int64), clocks: make(map[int]int64), ticks: make(map[int]tick)}
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
		if s.table == nil && s.err == nil {
			s.err = fmt.Errorf("%d of %d servers and %d of %d workers have registered: %w",
				s.count(pspb.Role_SERVER), s.van.cfg.NumServers, s.count(pspb.Role_WORKER),
				s.van.cfg.NumWorkers, context.Cause(ctx))
			close(s.complete)
		}
		s.mu.Unlock()
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

// register handles a registration. It waits until all nodes have registered.
func (s *scheduler) register(ctx context.Context, hello *pspb.Control) ([]*pspb.Node, error) {
	if err := s.add(hello); err != nil {
		return nil, fmt.Errorf("the scheduler refused the registration: %w", err)
	}
	select {
	case <-s.complete:
	case <-ctx.Done():
		return nil, ErrStopped
	}
	if s.err != nil {
		return nil, fmt.Errorf("the job does not start: %w", s.err)
	}
	return nodesOf(s.table, hello.Nodes[0].Incarnation), nil
}

// add adds the nodes of a process. If they are the last ones, it makes the table.
func (s *scheduler) add(hello *pspb.Control) error {
	cfg, first := &s.van.cfg, hello.Nodes[0]
	if int(hello.NumServers) != cfg.NumServers || int(hello.NumWorkers) != cfg.NumWorkers {
		return fmt.Errorf("the node has DMLC_NUM_SERVER=%d and DMLC_NUM_WORKER=%d, the scheduler %d and %d",
			hello.NumServers, hello.NumWorkers, cfg.NumServers, cfg.NumWorkers)
	}
	if int(hello.Staleness)-1 != cfg.Staleness {
		return fmt.Errorf("the node has HVD_STALENESS=%s, the scheduler %s", staleness(hello.Staleness-1),
			staleness(int32(cfg.Staleness)))
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
	s.mu.Lock()
	defer s.mu.Unlock()
	if have := s.count(first.Role); have+len(hello.Nodes) > want[first.Role] {
		return fmt.Errorf("the job has %d of %d %ss already, and %d more want to join: is DMLC_NUM_%s right?",
			have, want[first.Role], Role(first.Role), len(hello.Nodes),
			strings.ToUpper(Role(first.Role).String()))
	}
	if s.err != nil {
		return s.err
	}
	s.nodes = append(s.nodes, hello.Nodes...)
	return s.fill()
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
	if len(s.nodes) < cfg.NumServers+cfg.NumWorkers || s.table != nil || s.err != nil {
		return nil
	}
	self := s.van.self[0]
	self.Id = SchedulerID
	s.table = append(assign(s.nodes), self)
	defer close(s.complete)
	if s.err = s.van.setTable(s.table); s.err != nil {
		return s.err
	}
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
	id, members := v.nodeOf(l.peer, h.CustomerId), Members(group, v.cfg.NumServers, v.cfg.NumWorkers)
	if !slices.Contains(members, id) {
		e.answer(fmt.Sprintf("group %d does not have %s", group, Name(id)))
		return
	}
	if gone := s.place(e, id, group, members, h.Control.Withdraw); gone != nil {
		v.blame(gone.ID, gone.Err)
		e.answer(gone.Error())
	}
}

// place records that node id enters or leaves the barrier of a group with the given members. If a member has
// gone, it returns the error.
func (s *scheduler) place(e entry, id, group int, members []int, withdraw bool) *NodeError {
	s.mu.Lock()
	defer s.mu.Unlock()
	place := [2]int{group, id}
	if withdraw {
		s.withdrawn[place] = max(s.withdrawn[place], e.barrier)
		if s.barriers[group][id] == e {
			delete(s.barriers[group], id)
		}
		return nil
	}
	if e.barrier <= s.withdrawn[place] {
		return nil
	}
	for _, m := range members {
		if err := s.van.goneError(m); err != nil {
			return err
		}
	}
	if s.barriers[group] == nil {
		s.barriers[group] = make(map[int]entry)
	}
	s.barriers[group][id] = e
	if len(s.barriers[group]) == len(members) {
		release(s.barriers[group], "")
		delete(s.barriers, group)
	}
	return nil
}

// release answers all nodes in a barrier. If text is not empty, it is their error. The scheduler itself is
// answered last, because it may then say goodbye to the others.
func release(barrier map[int]entry, text string) {
	for _, id := range slices.Backward(slices.Sorted(maps.Keys(barrier))) {
		barrier[id].answer(text)
	}
}

// answer tells the node that it need not wait any longer. If text is not empty, it is the error of the call.
func (e entry) answer(text string) {
	m := controlMessage(&pspb.Control{Command: pspb.Command_BARRIER, Barrier: e.barrier})
	m.Header.CustomerId, m.Header.Error = e.customer, text
	_ = e.link.reply(m) // an error means that the node has gone
}

// lost handles the end of the link with a process. Barriers of groups that have one of its nodes fail. If the
// process has not left, all other nodes learn that it is dead.
func (s *scheduler) lost(peer int, left bool, err error) {
	v := s.van
	var nodes []*pspb.Node
	v.mu.Lock()
	for _, n := range v.nodes {
		if n.Incarnation == v.nodes[peer].Incarnation {
			nodes = append(nodes, &pspb.Node{Id: n.Id, Role: n.Role, Incarnation: n.Incarnation})
		}
	}
	v.mu.Unlock()
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
		}
	}
	s.mu.Unlock()
	for _, barrier := range failed {
		v.blame(peer, err)
		release(barrier, (&NodeError{peer, err}).Error())
	}
	if left {
		s.left(nodes)
	}
	s.advance()
	if left {
		return
	}
	for id, l := range *v.links.Load() {
		if id == l.peer && l.conn != nil && id != peer {
			m := controlMessage(&pspb.Control{Command: pspb.Command_LOST, Nodes: nodes})
			m.Header.Error = err.Error()
			_ = l.reply(m) // an error means that this node has gone too
		}
	}
}

// nodeOf returns the id of a customer of the process with the first id peer.
func (v *Van) nodeOf(peer int, customer int32) int {
	v.mu.Lock()
	defer v.mu.Unlock()
	first := v.nodes[peer]
	for id, n := range v.nodes {
		if n.Incarnation == first.Incarnation && n.CustomerId == customer {
			return id
		}
	}
	return peer
}

// goneError returns an error if the node has died or left, else nil.
func (v *Van) goneError(id int) *NodeError {
	v.mu.Lock()
	defer v.mu.Unlock()
	if err := v.gone[id]; err != nil {
		return &NodeError{id, err}
	}
	return nil
}

// Barrier waits until all nodes of the group have called Barrier, or until ctx ends. If a node of the group
// has died or left, the error says so. customer is the number of the node in this process. The node must be
// in the group. A group of one node needs no barrier.
func (v *Van) Barrier(ctx context.Context, customer, group int) error {
	if len(Members(group, v.cfg.NumServers, v.cfg.NumWorkers)) == 1 && slices.Contains(v.IDs(), group) {
		return nil
	}
	return v.ask(ctx, fmt.Sprintf("barrier of group %d", group), customer,
		&pspb.Control{Command: pspb.Command_BARRIER, BarrierGroup: int32(group)})
}

// ask sends a control message of a node of this process to the scheduler, and waits for the answer until ctx
// ends. Then the node withdraws.
func (v *Van) ask(ctx context.Context, what string, customer int, c *pspb.Control) error {
	l, err := v.link(SchedulerID)
	if err != nil {
		return err
	}
	done := make(chan error, 1)
	v.mu.Lock()
	if v.stopping {
		v.mu.Unlock()
		return ErrStopped
	}
	v.barrier++
	id := v.barrier
	v.barriers[id] = done
	v.mu.Unlock()
	send := func(withdraw bool) error {
		m := controlMessage(proto.CloneOf(c))
		m.Header.Control.Barrier, m.Header.Control.Withdraw = id, withdraw
		m.Header.Request, m.Header.CustomerId = true, int32(customer)
		return l.reply(m)
	}
	if err = send(false); err == nil {
		select {
		case err = <-done:
			if err != nil {
				err = fmt.Errorf("%s: %w", what, err)
			}
			return err
		case <-ctx.Done():
			err = fmt.Errorf("%s: %w", what, context.Cause(ctx))
			_ = send(true) // an error means that the scheduler has gone
		}
	}
	v.mu.Lock()
	delete(v.barriers, id)
	v.mu.Unlock()
	return err
}

// schedulerAnswer handles the answer of the scheduler to a call of ask.
func (v *Van) schedulerAnswer(h *pspb.Header) {
	v.mu.Lock()
	defer v.mu.Unlock()
	done := v.barriers[h.Control.Barrier]
	if done == nil {
		return // the call has returned because its context has ended
	}
	delete(v.barriers, h.Control.Barrier)
	var err error
	if h.Error != "" {
		err = errors.New(h.Error)
	}
	done <- err
}
