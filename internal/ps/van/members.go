package van

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gohvd/gohvd/internal/ps/pspb"
	"github.com/gohvd/gohvd/ops"
)

// newsTime is how long a server waits for the scheduler's news of a worker that has connected already.
const newsTime = 5 * time.Second

// members is what this process knows about the nodes of the job: who they are, and which of them have ended.
// A process that returns has the ids of the one before.
type members struct {
	cfg *Config
	// self are the nodes of this process, and id is the first of their ids. When ready is closed they have
	// ids and addresses, id is valid, and neither changes any more.
	self  []*pspb.Node
	id    int
	ready chan struct{} // closed when nodes is complete
	cores atomic.Bool   // every server and worker on this host has a core (haveCores)

	// mu guards what follows. The van also replaces its map of links with mu held, and ends its context with
	// mu held or after leaving is set, so that it connects with no process that has ended, and makes no link
	// when it is leaving.
	mu    sync.Mutex
	nodes map[int]*pspb.Node
	first map[uint64]int // id of customer 0 of each process, by incarnation
	gone  map[int]error  // nodes that have died or left
	// over says of a node in gone that the scheduler or the node itself has said so. Otherwise this process
	// knows only that its connection has ended.
	over    map[int]bool
	orphan  bool          // the scheduler has left, so there is nobody who knows better
	leaving bool          // this process leaves the job
	change  chan struct{} // closed when nodes or gone changes
	blames  *blames       // a process that takes a place is forgiven
}

// newMembers returns the members of a job of which this process knows only itself.
func newMembers(cfg *Config, h Handler) *members {
	m := &members{cfg: cfg, ready: make(chan struct{}), nodes: make(map[int]*pspb.Node),
		first: make(map[uint64]int), gone: make(map[int]error), over: make(map[int]bool),
		change: make(chan struct{})}
	m.blames = &blames{members: m, handler: h, first: new(sync.Once)}
	incarnation := rand.Uint64()
	for i := range cfg.Customers {
		n := &pspb.Node{Role: pspb.Role(cfg.Role), Hostname: cfg.Host, CustomerId: int32(i),
			Incarnation: incarnation}
		if cfg.shares() {
			n.HostId = cfg.HostID
		}
		if cfg.Rank >= 0 {
			n.Rank = int32(cfg.Rank + i + 1)
		}
		m.self = append(m.self, n)
	}
	return m
}

// leave records that this process leaves the job, and reports whether it has not left before.
func (m *members) leave() (first bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	first = !m.leaving
	m.leaving = true
	return first
}

// processOf identifies the process of a node.
func processOf(n *pspb.Node) Process {
	return Process{ID: int(n.Id), Incarnation: n.Incarnation, Generation: n.Generation}
}

// nodesOf returns the nodes of a process, ordered by customer.
func nodesOf(table []*pspb.Node, incarnation uint64) (own []*pspb.Node) {
	for _, n := range table {
		if n.Incarnation == incarnation {
			own = append(own, n)
		}
	}
	slices.SortFunc(own, func(a, b *pspb.Node) int { return cmp.Compare(a.CustomerId, b.CustomerId) })
	return own
}

// changed wakes those that wait for a change of nodes or gone. The caller holds mu.
func (m *members) changed() {
	close(m.change)
	m.change = make(chan struct{})
}

// setTable records the table of all nodes, in which the nodes of this process have their ids.
func (m *members) setTable(table []*pspb.Node) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, n := range table {
		m.setNode(n)
	}
	own := nodesOf(table, m.self[0].Incarnation)
	if len(own) != len(m.self) || len(m.nodes) != 1+m.cfg.NumServers+m.cfg.NumWorkers {
		return fmt.Errorf("malformed table: it has %d nodes, %d of this process, want %d and %d",
			len(m.nodes),
			len(own), 1+m.cfg.NumServers+m.cfg.NumWorkers, len(m.self))
	}
	m.self, m.id = own, int(own[0].Id)
	m.cores.Store(m.haveCores())
	close(m.ready)
	return nil
}

// setNode records the node n. The caller holds mu.
func (m *members) setNode(n *pspb.Node) {
	id := int(n.Id)
	if old := m.nodes[id]; old != nil && m.first[old.Incarnation] == id {
		delete(m.first, old.Incarnation)
	}
	m.nodes[id] = n
	if n.CustomerId == 0 {
		m.first[n.Incarnation] = id
	}
	delete(m.gone, id)
	m.over[id] = n.Gone != ""
	switch n.Gone {
	case "":
	case ErrLeft.Error():
		m.gone[id] = ErrLeft
	default:
		m.gone[id] = errors.New(n.Gone)
	}
}

// table returns the records of all nodes. Those that have ended say so.
func (m *members) table() (all []*pspb.Node) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for id := range m.nodes {
		all = append(all, m.record(id))
	}
	slices.SortFunc(all, func(a, b *pspb.Node) int { return cmp.Compare(a.Id, b.Id) })
	return all
}

// record returns a copy of the record of a node, with the reason of its end. The caller holds mu.
func (m *members) record(id int) *pspb.Node {
	n := proto.CloneOf(m.nodes[id])
	if err := m.gone[id]; err != nil {
		n.Gone = err.Error()
	}
	return n
}

// recordEnd records that the connection with a process has ended because of err, and whether the process
// itself has said that it ends. It returns the records of its nodes, of which there are none if another one
// has taken its place, and whether this process leaves the job.
func (m *members) recordEnd(p Process, said bool, err error) (ended []*pspb.Node, leaving bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for id, n := range m.nodes {
		if n.Incarnation != p.Incarnation {
			continue
		}
		if m.gone[id] == nil {
			m.gone[id] = err
		}
		ended = append(ended, m.record(id))
		m.over[id] = m.over[id] || said || m.orphan
	}
	m.changed()
	return nodesOf(ended, p.Incarnation), m.leaving
}

// takesPart reports whether neither the scheduler nor the process itself has said that it has ended. The
// caller holds mu.
func (m *members) takesPart(p Process) bool {
	n := m.nodes[p.ID]
	return n != nil && n.Incarnation == p.Incarnation && !m.over[p.ID]
}

// await waits until cond, which is called with mu held, returns true. It returns false if ctx ends first.
func (m *members) await(ctx context.Context, cond func() bool) bool {
	for {
		m.mu.Lock()
		ok, change := cond(), m.change
		m.mu.Unlock()
		if ok {
			return true
		}
		select {
		case <-change:
		case <-ctx.Done():
			return false
		}
	}
}

// awaitPeer returns the nodes of the table that a peer has if it is the worker or the server with a range in
// common that it says. The news that it has taken the place of another one may still be on the way.
func (m *members) awaitPeer(ctx context.Context, claimed []*pspb.Node) (own []*pspb.Node) {
	ctx, cancel := context.WithTimeout(ctx, newsTime)
	defer cancel()
	m.await(ctx, func() bool {
		own = nil
		for _, n := range claimed {
			id := int(n.Id)
			known := m.nodes[id]
			if n.Incarnation == claimed[0].Incarnation && (RoleOf(id) == Worker || m.neighbour(id)) &&
				known != nil && known.Incarnation == n.Incarnation && !m.over[id] {
				own = append(own, known)
			}
		}
		return len(own) == len(claimed)
	})
	if len(own) != len(claimed) {
		return nil
	}
	return own
}

// dead returns the records of the nodes of a process, which say that it is dead because of err.
func (m *members) dead(p Process, err error) (nodes []*pspb.Node) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for id, n := range m.nodes {
		if n.Incarnation == p.Incarnation {
			r := m.record(id)
			r.Gone = err.Error()
			nodes = append(nodes, r)
		}
	}
	return nodesOf(nodes, p.Incarnation)
}

// died returns the node with the lowest id that has died, as a process, and the reason. If there is none, the
// process has no id. A scheduler that leaves before the others does so because of such a node.
func (m *members) died() (p Process, why error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for id, err := range m.gone {
		if n := m.nodes[id]; err != ErrLeft && id != SchedulerID && n != nil && (p.ID == 0 || id < p.ID) {
			p, why = processOf(n), err
		}
	}
	return p, why
}

// lookUp reports whether the job has node id, and the reason why it has ended, or nil.
func (m *members) lookUp(id int) (known bool, gone error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.nodes[id] != nil, m.gone[id]
}

// goneErrors returns the reasons why nodes have ended, by id.
func (m *members) goneErrors() map[int]error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return maps.Clone(m.gone)
}

// restore records that this process is connected with node id again, and reports whether that was gone
// although nobody has said that it has ended. The caller holds mu.
func (m *members) restore(id int) bool {
	if m.gone[id] == nil || m.over[id] {
		return false
	}
	delete(m.gone, id)
	return true
}

// schedulerLeft records that nobody will say any more which nodes have ended.
func (m *members) schedulerLeft() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.orphan = true
	for id := range m.gone {
		m.over[id] = true
	}
}

// isOver reports whether the scheduler or the process itself has said that it has ended.
func (m *members) isOver(p Process) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return !m.takesPart(p)
}

// hear returns the node whose place n, of which the scheduler says something, has or takes, and whether that
// is news. If it is, this process does not connect with the known process again.
func (m *members) hear(n *pspb.Node) (known *pspb.Node, fresh bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	known = m.nodes[int(n.Id)]
	if known == nil || n.Generation < known.Generation || n.Generation == known.Generation && n.Gone == "" {
		return known, false
	}
	m.over[int(n.Id)] = true
	return known, true
}

// update records what the scheduler says of the nodes of a process.
func (m *members) update(nodes []*pspb.Node) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, n := range nodes {
		if m.nodes[int(n.Id)] != nil {
			m.setNode(n)
		}
	}
	m.cores.Store(m.haveCores()) // a process may return on another host
	if nodes[0].Gone == "" {
		m.blames.forgive()
	}
	m.changed()
}

// ended does the work of Van.Ended.
func (m *members) ended(p Process) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := m.nodes[p.ID]
	return n != nil && (n.Generation > p.Generation || n.Generation == p.Generation && m.over[p.ID])
}

// current does the work of Van.Current.
func (m *members) current(id int) Process {
	m.mu.Lock()
	defer m.mu.Unlock()
	if n := m.nodes[id]; n != nil {
		return processOf(n)
	}
	return Process{ID: id}
}

// since does the work of Van.Since.
func (m *members) since(id int) uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	if n := m.nodes[id]; n != nil && n.IsRecovery {
		return n.Generation
	}
	return 0
}

// goneError does the work of Van.Gone.
func (m *members) goneError(id int) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.gone[id]
}

// processes does the work of Van.Processes.
func (m *members) processes(group int) (ids []int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, id := range Members(group, m.cfg.NumServers, m.cfg.NumWorkers) {
		if first := m.first[m.nodes[id].GetIncarnation()]; !slices.Contains(ids, first) {
			ids = append(ids, first)
		}
	}
	return ids
}

// nodeOf returns the id of a customer of the process with the first id peer.
func (m *members) nodeOf(peer int, customer int32) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	first := m.nodes[peer]
	for id, n := range m.nodes {
		if n.Incarnation == first.Incarnation && n.CustomerId == customer {
			return id
		}
	}
	return peer
}

// firstOf returns the first id of the process that has the node id.
func (m *members) firstOf(id int) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.first[m.nodes[id].GetIncarnation()]
}

// goneNode returns the record of a node if it has died or left, else nil.
func (m *members) goneNode(id int) *pspb.Node {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.gone[id] == nil {
		return nil
	}
	return m.record(id)
}

// dials reports whether this process connects with the node n by dialing it. Workers dial servers. If there
// are replicas, a server dials the servers of the next and the previous rank that have joined the job before
// it, and of those with which the job has started the ones with a higher rank.
func (m *members) dials(n *pspb.Node) bool {
	if n.Role != pspb.Role_SERVER || m.cfg.Role != Server {
		return n.Role == pspb.Role_SERVER
	}
	own := m.self[0]
	return m.neighbour(int(n.Id)) && (n.Generation < own.Generation ||
		n.Generation == own.Generation && n.Id > own.Id)
}

// neighbour reports whether this server and node id are servers that have a range of keys in common.
func (m *members) neighbour(id int) bool {
	if m.cfg.Replicas == 0 || m.cfg.Role != Server || RoleOf(id) != Server || id == m.id {
		return false
	}
	between := (Rank(id) - Rank(m.id) + m.cfg.NumServers) % m.cfg.NumServers
	return between == 1 || between == m.cfg.NumServers-1
}

// haveCores reports whether every server and worker on this host has a core, so that one that polls does not
// delay another one. The caller holds mu.
func (m *members) haveCores() bool {
	n := 0
	for _, id := range m.first {
		if id != SchedulerID && m.nodes[id].HostId == m.cfg.HostID {
			n++
		}
	}
	return !ops.Oversubscribed(n, runtime.NumCPU())
}
