// Package van moves messages between the nodes of a parameter server: one scheduler, servers and workers. It
// knows who they are, connects them, and notices when one dies. docs/ps.md describes the protocol.
//
// Invariants:
//
//  1. Every node is connected with the scheduler, and every worker with every server. Workers are not
//     connected with workers. Servers are connected with servers only with Config.Replicas: each with those
//     of the next and the previous rank.
//  2. A message that was passed to Send arrives at most once. With Config.Resend it arrives exactly once,
//     unless the receiver or the sender ends first, even if messages are lost, duplicated or reordered.
//  3. A message waits in a bounded queue. Only requests wait for room in it (Request), so no two nodes wait
//     for each other.
//  4. Frames of a received message may be in memory of the sender that is mapped for reading. They are valid
//     until Release, except that the sender may change them if the connection ends (Intact).
//  5. If a node dies, all nodes that are connected with it learn it, and their requests to it fail.
//  6. A process that has ended can be replaced by another one, which takes its ids. No message of the old
//     process is handled after the first message of the new one, and no answer to the old one reaches the new
//     one. A worker connects again with a server if their connection has ended although both live. The same
//     holds then for the messages of the two connections.
//  7. If the scheduler has declared a process dead, the process fails as soon as it reads that, or that its
//     connection with the scheduler has ended. Of two servers that accuse each other, the scheduler declares
//     one dead.
//
// The methods of a Van are safe for concurrent use.
package van

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/ps/pspb"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/trace"
)

// Config is the configuration of a Van.
type Config struct {
	// Role is the role of this process. NumWorkers and NumServers are the size of the job, which must be the
	// same at all nodes.
	Role                   Role
	NumWorkers, NumServers int
	// Customers is the number of workers in this process. It is at least 1, and 1 for other roles.
	Customers int
	// Rank is the rank that the first node of this process wants, or -1.
	Rank int
	// Root is the address of the scheduler, host:port. The scheduler listens there, or on Listen if that is
	// not empty.
	Root string
	// Host is the name or address under which other hosts reach a server. Listen is the address on which a
	// server listens, host:port.
	Host, Listen string
	// Staleness is the number of iterations by which a worker may be ahead of the slowest one, or -1 if there
	// is no bound. It must be the same at all nodes.
	Staleness int
	// Meets says that the caller enters a barrier of all nodes next, unless IsRecovery is true.
	Meets bool
	// Replicas is the number of further servers that have the values of each key, 0 or 1. It must be the same
	// at all nodes.
	Replicas int
	// Secret is the secret of the job.
	Secret secret.Secret
	// StartTimeout is the time limit of Start.
	StartTimeout time.Duration
	// HeartbeatInterval is the time between two heartbeats, and HeartbeatTimeout the time without a message
	// after which a node is dead. HeartbeatTimeout is also the time without an acknowledgement after which
	// the connection between a worker and a server has failed. If either is 0, no node dies of silence.
	HeartbeatInterval, HeartbeatTimeout time.Duration
	// Resend makes the van send messages again that were not acknowledged for ResendTimeout.
	Resend        bool
	ResendTimeout time.Duration
	// HostID identifies the memory of this host. A worker and a server with the same HostID use a Unix
	// connection and shared memory. They do not if it is empty, or with encryption or Resend.
	HostID string
	// WaterMark is the maximum number of unanswered requests to a node.
	WaterMark int
	// Verbose is 1 to log connections, and 2 to log every message.
	Verbose int
	// Log receives the log. It may be nil.
	Log *zap.Logger
	// Faults injects faults, for tests. For each message from a node it calls deliver any number of times. It
	// is called by one goroutine for each pair of processes.
	Faults func(from, to Process, m *Message, deliver func(*Message) error) error
}

// Process identifies a process of the job, or a connection with it. A process that takes the place of another
// one has the same id and another incarnation.
type Process struct {
	// ID is the id of the process's first node.
	ID          int
	Incarnation uint64
	// Generation is higher than that of the processes that have had the same ids before.
	Generation uint64
	// Connection is the number of a connection of this process with the process, or 0 for any connection. The
	// sender of a message and the receiver of a request have a number, others do not.
	Connection uint64
}

// Whole returns the process with any connection.
func (p Process) Whole() Process {
	p.Connection = 0
	return p
}

// Handler receives what happens at a node. Its methods must not wait for messages of other nodes.
type Handler interface {
	// Receive handles a message of the process from, which belongs to the handler from then on. There is one
	// call at a time for each process.
	Receive(from Process, m *Message)
	// Blame handles the failure of a node: it has died, or has left while nodes wait for it in a barrier or
	// have requests to it, or before such a request. It is called once, for the first such node, and the
	// calls that fail because of it return only after that. If the job does not start because nodes have not
	// registered, failed has these nodes, whose incarnations are not known.
	Blame(failed []Process, err error)
	// Lost handles the end of a node, which has died or left. It is called once for each process, and before
	// another process takes its place.
	Lost(id int, err error)
	// Restored is called when the connection with a process that had ended for this one works again.
	Restored(p Process)
	// News is called when a connection has been made or has ended, or a process has ended.
	News()
	// Tick is called regularly.
	Tick(now time.Time)
}

// NodeError reports that a node has died or left the job.
type NodeError struct {
	// ID is the id of the node.
	ID int
	// Err is the reason.
	Err error
}

func (e *NodeError) Error() string { return Name(e.ID) + " is gone: " + e.Err.Error() }

func (e *NodeError) Unwrap() error { return e.Err }

// ErrStopped is the error of calls after Stop.
var ErrStopped = errors.New("this node has been finalized")

// LimitError reports that a message is longer than a peer would accept, or than the queue has room for.
type LimitError struct{ text string }

func (e *LimitError) Error() string { return e.text }

// Van is the connection of this process with the other nodes of its job.
type Van struct {
	cfg      Config
	log      *zap.Logger
	handler  Handler
	timing   timing
	endpoint *endpoint
	members  *members
	blames   *blames
	calls    calls // to the scheduler
	reliable bool

	chunks  chunks
	unwatch func()          // ends the calls about chunks of the arena; nil if no memory is shared
	ctx     context.Context // ends when the van is stopped or has failed
	cancel  context.CancelCauseFunc
	wg      sync.WaitGroup
	links   atomic.Pointer[map[int]*link] // by id of the peer, including further ids of its process
	holding atomic.Bool                   // a link may hold requests back
	polling atomic.Bool                   // a goroutine polls, as only one may do at a time
	made    atomic.Uint64                 // number of connections so far
	yielder shmem.Yielder                 // used by the goroutine that polls
	sched   *scheduler                    // nil except at the scheduler
}

// New returns a Van that is not connected. It calls the methods of h from the beginning of Start until the
// end of Stop.
func New(cfg Config, h Handler) *Van {
	v := &Van{cfg: cfg, log: cfg.Log, handler: h, reliable: cfg.Resend}
	if v.log == nil {
		v.log = zap.NewNop()
	}
	v.links.Store(&map[int]*link{})
	v.ctx, v.cancel = context.WithCancelCause(context.Background())
	v.timing = timing{&v.cfg, time.Now()}
	v.members = newMembers(&v.cfg, h)
	v.blames = v.members.blames
	v.endpoint = &endpoint{cfg: &v.cfg, log: v.log, timing: v.timing, members: v.members, ctx: v.ctx}
	return v
}

// Start joins the job: it registers with the scheduler, waits until all nodes have registered, and connects
// with those that it needs. It takes at most Config.StartTimeout. If it fails, Stop need not be called.
func (v *Van) Start(ctx context.Context) error {
	dial.NeedDescriptors(1 + v.cfg.NumServers + v.cfg.NumWorkers)
	ctx, cancel := context.WithTimeoutCause(ctx, v.cfg.StartTimeout,
		fmt.Errorf("the time limit of %v has passed", v.cfg.StartTimeout))
	defer cancel()
	if v.cfg.shares() && v.cfg.Role != Scheduler {
		v.unwatch = arena.Watch(v.chunks.added, v.chunkRemoved)
	}
	if err := v.start(ctx); err != nil {
		v.close(err)
		return fmt.Errorf("start of a %s: %w", v.cfg.Role, err)
	}
	return nil
}

func (v *Van) start(ctx context.Context) error {
	if v.cfg.Role == Scheduler {
		v.sched = newScheduler(v)
		if err := v.endpoint.listen(cmp.Or(v.cfg.Listen, v.cfg.Root), v.serve); err != nil {
			return fmt.Errorf("listen as the scheduler (is there another scheduler?): %w", err)
		}
		if err := v.sched.wait(ctx); err != nil {
			return err
		}
		v.wg.Go(v.tick)
		return nil
	}
	if v.cfg.Role == Server {
		if err := v.endpoint.listenAsServer(v.serve); err != nil {
			return err
		}
	}
	table, err := v.join(ctx)
	if err != nil {
		return err
	}
	return v.connectServers(ctx, table)
}

// ID returns the id of the first node of this process.
func (v *Van) ID() int { return v.members.id }

// Process identifies this process.
func (v *Van) Process() Process { return processOf(v.members.self[0]) }

// IDs returns the ids of the nodes of this process.
func (v *Van) IDs() (ids []int) {
	for _, n := range v.members.self {
		ids = append(ids, int(n.Id))
	}
	return ids
}

// Processes returns the ids of a group, in which the first id of a process stands for all ids of the process.
func (v *Van) Processes(group int) (ids []int) { return v.members.processes(group) }

// Stats returns the counters of this process.
func (v *Van) Stats() trace.Node {
	links := *v.links.Load()
	s := trace.Node{Name: v.cfg.Role.String(), Role: v.cfg.Role.String()}
	select {
	case <-v.members.ready:
		s.Name, s.Returned = Name(v.members.id), v.members.self[0].Generation > 0
	default: // it has no rank yet
	}
	for _, id := range slices.Sorted(maps.Keys(links)) {
		if l := links[id]; id == l.peer && l.conn != nil {
			s.Peers = append(s.Peers, l.stats())
		}
	}
	s.Up = v.timing.now()
	if v.sched != nil {
		v.sched.addStats(&s)
	}
	return s
}

// addLink makes the link with the process of the given nodes. The caller must start the goroutines of the
// link and then call the method up. If there is such a link already, or the van is stopped, addLink returns
// an error. The link replaces one that has ended.
func (v *Van) addLink(nodes []*pspb.Node, conn net.Conn, r *reader) (*link, error) {
	l := newLink(v, processOf(nodes[0]), conn)
	if r != nil {
		l.sock = r.sock
	}
	v.members.mu.Lock()
	defer v.members.mu.Unlock()
	if v.members.leaving || v.ctx.Err() != nil {
		return nil, ErrStopped
	}
	links := maps.Clone(*v.links.Load())
	if !v.members.takesPart(l.process) {
		return nil, fmt.Errorf("%s has ended", Name(l.peer))
	}
	for _, n := range nodes {
		if old := links[int(n.Id)]; old != nil && !isClosed(old.over) {
			return nil, fmt.Errorf("%s is connected with %s already", Name(int(n.Id)), Name(v.members.id))
		}
		links[int(n.Id)] = l
		l.restored = v.members.restore(int(n.Id)) || l.restored
	}
	if l.restored && v.blames.accused == l.process.Whole() {
		v.blames.forgive()
	}
	if v.members.cores.Load() && l.shares() {
		l.poll()
	}
	v.links.Store(&links)
	v.members.changed()
	if v.cfg.Verbose > 0 {
		v.log.Info("ps: connected", zap.String("node", Name(v.members.id)), zap.String("with", Name(l.peer)))
	}
	return l, nil
}

// up tells the handler of a new link.
func (v *Van) up(l *link) {
	if l.restored {
		v.log.Info("ps: connected again", zap.String("node", Name(v.members.id)), zap.String("with", Name(l.peer)))
		v.handler.Restored(l.process)
	}
	v.handler.News()
}

// link returns the link with a node.
func (v *Van) link(id int) (*link, error) {
	if l := (*v.links.Load())[id]; l != nil {
		return l, nil
	}
	if err := context.Cause(v.ctx); err != nil {
		return nil, err
	}
	known, gone := v.members.lookUp(id)
	switch {
	case gone != nil:
		return nil, nodeError(id, gone)
	case known && v.cfg.Role == Worker && RoleOf(id) == Server:
		return nil, &NodeError{id, errors.New("it has returned, and is not connected yet")}
	case known:
		return nil, fmt.Errorf("%s has no connection with %s: only the scheduler is connected with all nodes",
			Name(v.members.id), Name(id))
	}
	return nil, fmt.Errorf("the job has no node with the id %d", id)
}

// Allocate gives a message for the node to a frame of each given size, whose content is undefined. Long
// frames are in shared memory if the node is on the same host. The caller must pass the message to Request or
// Reply, or call its method Drop.
func (v *Van) Allocate(to int, m *Message, sizes ...int) {
	if l, err := v.link(to); err == nil {
		l.allocate(m, sizes)
		return
	}
	m.allocate(sizes)
}

// Request sends a request to a node. If the node has not answered Config.WaterMark requests, it waits until
// ctx ends. It returns the process to which the request goes. If it returns no error, the caller must call
// Answered once. The message belongs to the van in any case.
func (v *Van) Request(ctx context.Context, to int, m *Message) (Process, error) {
	l, err := v.link(to)
	if err != nil {
		m.Drop()
		return Process{}, err
	}
	return l.process, v.sendOn(l, m, func(l *link, m *Message) error { return l.request(ctx, m) })
}

// Reply sends the answer to a request of the process to. It does not wait. The message belongs to the van in
// any case.
func (v *Van) Reply(to Process, m *Message) error {
	l, err := v.linkTo(to)
	if err != nil {
		m.Drop()
		return err
	}
	return v.sendOn(l, m, (*link).reply)
}

// linkTo returns the link with a process.
func (v *Van) linkTo(p Process) (*link, error) {
	l, err := v.link(p.ID)
	switch {
	case err != nil || l.process == p || l.process.Whole() == p:
		return l, err
	case l.process.Whole() == p.Whole():
		return nil, &NodeError{p.ID, errAgain}
	}
	return nil, &NodeError{p.ID, errReplaced}
}

// Connected reports whether this process is connected with the process p, which has not ended. If p has the
// number of a connection, it reports whether that connection has not ended.
func (v *Van) Connected(p Process) bool {
	l, err := v.linkTo(p)
	return err == nil && !isClosed(l.done)
}

// sendOn passes a message to a link with the function queue.
func (v *Van) sendOn(l *link, m *Message, queue func(*link, *Message) error) error {
	err := m.checkLimits()
	if err == nil {
		m = l.share(v.own(m))
		err = queue(l, m)
	}
	if err != nil {
		m.Drop()
	}
	return err
}

// own returns a message that stays the same until it is acknowledged. If the van may have to send m again,
// and the frames of m belong to the caller, it copies them.
func (v *Van) own(m *Message) *Message {
	if !v.reliable || m.buf != nil || m.Data == nil {
		return m
	}
	c := m.Clone()
	m.Drop()
	return c
}

// Flush sends the requests that wait to be sent together with others. The caller is about to wait.
func (v *Van) Flush() {
	if !v.holding.Load() || !v.holding.Swap(false) {
		return
	}
	for id, l := range *v.links.Load() {
		if id == l.peer {
			l.writeHeld()
		}
	}
}

// Answered tells the van that a request to the process was answered or has failed.
func (v *Van) Answered(to Process) {
	if l, err := v.linkTo(to); err == nil {
		l.answered()
	}
}

// loop delivers a message that this process has sent to itself.
func (v *Van) loop(l *link, m *Message) {
	c := m.Clone()
	m.Drop()
	if err := v.arrive(l, c); err != nil {
		v.log.Warn("ps: a message to this node is malformed", zap.Error(err))
	}
}

// arrive handles a message that has arrived and is not a duplicate.
func (v *Van) arrive(l *link, m *Message) error {
	c := m.Header.Control
	if c == nil {
		v.handler.Receive(l.process, m)
		return nil
	}
	defer m.Release()
	switch c.Command {
	case pspb.Command_ACK:
		l.acked(c.Acks)
	case pspb.Command_HEARTBEAT:
		switch {
		case v.sched == nil:
		case m.Header.Request: // an answer says that the sender takes part in the job
			entry{l, m.Header.CustomerId, c.Barrier}.answer("", nil)
		default:
			l.heartbeat()
		}
	case pspb.Command_TERMINATE:
		l.mu.Lock()
		if len(c.Nodes) > 0 && c.Nodes[0].Gone != "" {
			l.failure = errors.New(c.Nodes[0].Gone)
		} else {
			l.left = true
		}
		l.mu.Unlock()
	case pspb.Command_BARRIER, pspb.Command_CLOCK:
		switch {
		case !m.Header.Request:
			if v.sched == nil {
				v.learn(c.Nodes)
			}
			v.calls.answer(m.Header)
		case v.sched == nil:
		case c.Command == pspb.Command_CLOCK:
			v.sched.clock(l, m.Header)
		default:
			v.sched.enter(l, m.Header)
		}
	case pspb.Command_RELEASE:
		l.own.released(c.Blocks)
	case pspb.Command_UNMAP:
		l.theirs.free(c.Blocks)
	case pspb.Command_EVICT:
		if v.sched != nil {
			v.sched.evict(l, c.Nodes)
		}
	case pspb.Command_LOST, pspb.Command_ADD_NODE:
		if l.peer != SchedulerID {
			break
		}
		if n := c.Nodes; len(n) > 0 && n[0].Incarnation == v.members.self[0].Incarnation && n[0].Gone != "" {
			return &NodeError{v.members.id, errors.New("the scheduler has declared it dead: " + n[0].Gone)}
		}
		v.learn(c.Nodes)
	default:
		v.log.Warn("ps: dropped an unknown message", zap.String("from", Name(l.peer)),
			zap.Int32("command", int32(c.Command)))
	}
	return nil
}

// linkEnded handles the end of a link because of err, for which the process culprit is to blame.
func (v *Van) linkEnded(l *link, culprit Process, left bool, err error) {
	l.mu.Lock()
	said := left || l.failure != nil // the process has said that it ends
	l.mu.Unlock()
	ended, leaving := v.members.recordEnd(l.process, said, err)
	if leaving {
		return
	}
	if v.cfg.Verbose > 0 || !left {
		v.log.Info("ps: a connection has ended", zap.String("node", Name(v.members.id)),
			zap.String("with", Name(l.peer)), zap.Error(err))
	}
	switch {
	case v.sched != nil:
		v.sched.lost(ended, left, err)
	case l.peer == SchedulerID:
		v.schedulerGone(culprit, left, err)
	case v.cfg.Role == Server && RoleOf(l.peer) == Server && !left &&
		v.members.self[0].Generation <= l.process.Generation:
		// The older server has the values, and the other one perhaps not yet. So the younger one lets the
		// older one accuse it.
		v.Evict(l.process, fmt.Errorf("its connection with %s has ended: %w", Name(v.members.id), err))
	}
	v.handler.Lost(l.peer, nodeError(l.peer, err))
	v.handler.News()
}

// nodeError returns the error of a request to a node that is gone because of err. If this van has failed, the
// node may be alive, and the error says why the van has failed.
func nodeError(id int, err error) error {
	if failed, ok := errors.AsType[*NodeError](err); ok {
		return failed
	}
	return &NodeError{id, err}
}

// schedulerGone handles the end of the connection with the scheduler. If the scheduler has left, the other
// nodes can go on without barriers. If it has died, the job has failed. If it has declared this process dead,
// which is p then, this process has failed.
func (v *Van) schedulerGone(p Process, left bool, why error) {
	if failed, reason := v.members.died(); failed.ID != 0 && left {
		p, why = failed, reason
	}
	err := nodeError(p.ID, why)
	if v.calls.any() {
		v.blames.blame(p, why)
	}
	v.calls.fail(err)
	if left {
		v.members.schedulerLeft()
		return
	}
	v.members.mu.Lock() // so that addLink makes no link that nobody ends
	v.cancel(err)
	v.members.mu.Unlock()
	for _, l := range *v.links.Load() {
		l.fail(err)
	}
}

// Dead returns the ids of the nodes that have died, or from which no message came for the time timeout: at
// the scheduler of all workers and servers, at other nodes that of the scheduler and those that the scheduler
// has declared dead. A node that has sent nothing yet is silent since it has connected. If timeout is 0, Dead
// returns nil.
func (v *Van) Dead(timeout time.Duration) (dead []int) {
	if timeout <= 0 {
		return nil
	}
	gone := v.members.goneErrors()
	for id, err := range gone {
		if err != ErrLeft {
			dead = append(dead, id)
		}
	}
	for id, l := range *v.links.Load() {
		if l.silent() > timeout && gone[id] == nil && l.conn != nil && (v.sched != nil || id == SchedulerID) {
			dead = append(dead, id)
		}
	}
	slices.Sort(dead)
	return dead
}

// tick does what time requires until the van is stopped: heartbeats, resending, and noticing silent nodes.
func (v *Van) tick() {
	ticker := time.NewTicker(v.timing.interval())
	defer ticker.Stop()
	var beaten, checked time.Duration
	ticked := v.timing.now()
	for {
		select {
		case now := <-ticker.C:
			if late := v.timing.stopped(ticked); late > 0 {
				v.excuse(late)
			}
			ticked = v.timing.now()
			check := v.timing.now()-checked >= dial.CheckPeriod(v.cfg.HeartbeatTimeout)
			if check {
				checked = v.timing.now()
			}
			if v.timing.beats() {
				beat := v.timing.now()-beaten >= v.cfg.HeartbeatInterval
				if beat {
					beaten = v.timing.now()
				}
				v.heartbeat(beat)
			}
			for id, l := range *v.links.Load() {
				if v.reliable && l.conn != nil {
					l.resend(now)
				}
				// The goroutine that reads may be in a handler that takes long.
				if lazy, held := l.lazy.Swap(false), l.held.Swap(false); lazy || held {
					l.notify()
				}
				if check && id == l.peer {
					l.checkSilence(now)
				}
			}
			v.handler.Tick(now)
		case <-v.ctx.Done():
			return
		}
	}
}

// heartbeat ends links that have been silent for too long and, if beat is set, sends a heartbeat to the
// scheduler. The scheduler answers heartbeats.
func (v *Van) heartbeat(beat bool) {
	for id, l := range *v.links.Load() {
		if l.conn == nil || v.sched == nil && id != SchedulerID {
			continue
		}
		if v.sched == nil && beat {
			l.heartbeat()
		}
		silent := l.silent()
		if silent <= v.cfg.HeartbeatTimeout {
			continue
		}
		err := &silenceError{silent, v.cfg.HeartbeatTimeout}
		if v.sched != nil {
			v.sched.declareDead(l, err)
		} else {
			// The scheduler may live: it declares this node dead if the network between the two has failed.
			l.abort(fmt.Errorf("%w: it has failed, or the network between it and %s has", err, Name(v.members.id)))
		}
	}
}

// excuse makes a time not count in which this process has read nothing. It may have read messages since, so
// that less time than that counts.
func (v *Van) excuse(t time.Duration) {
	for id, l := range *v.links.Load() {
		if id == l.peer {
			l.excused.Add(int64(min(t, l.silent())))
		}
	}
}

// verbose logs a message if cfg.Verbose says so.
func (v *Van) verbose(what string, peer int, m *Message) {
	if v.cfg.Verbose < 2 {
		return
	}
	v.log.Info("ps: "+what, zap.String("node", Name(v.members.id)), zap.String("peer", Name(peer)),
		zap.Stringer("header", m.Header), zap.Int("bytes", m.Bytes()))
}

// Stop leaves the job. It sends what is queued and TERMINATE to all peers, and waits until they have closed
// their connections, but only until ctx ends. Then it closes all connections. Only the first call of Stop or
// Fail has an effect.
func (v *Van) Stop(ctx context.Context) { v.leave(ctx, nil) }

// maxReasonBytes is the maximum length of a reason that a node gives for its end.
const maxReasonBytes = 4096

// Fail is like Stop, but tells the peers that this process has failed because of reason, which is not empty.
func (v *Van) Fail(ctx context.Context, reason string) {
	reason = strings.ToValidUTF8(reason[:min(len(reason), maxReasonBytes)], "")
	v.leave(ctx, []*pspb.Node{{Gone: reason}})
}

// leave sends TERMINATE with nodes, and ends everything.
func (v *Van) leave(ctx context.Context, nodes []*pspb.Node) {
	if !v.members.leave() {
		return
	}
	v.calls.refuse()
	var wg sync.WaitGroup
	for id, l := range *v.links.Load() {
		if id == l.peer && l.conn != nil {
			wg.Go(func() { l.leave(ctx, nodes) })
		}
	}
	wg.Wait()
	v.close(ErrStopped)
}

// leave tells the peer that this process leaves the job, and waits until the peer has closed the connection.
func (l *link) leave(ctx context.Context, nodes []*pspb.Node) {
	bye := controlMessage(&pspb.Control{Command: pspb.Command_TERMINATE, Nodes: nodes})
	bye.Header.Priority = math.MinInt32 // after all other messages
	if l.reply(bye) != nil {
		return
	}
	l.flush(ctx)
	// Bytes that this process has not read when it closes the connection would make the kernel reset the
	// connection, and the peer could lose the last messages. So this process reads until the peer closes.
	if half, ok := l.conn.(interface{ CloseWrite() error }); ok && half.CloseWrite() == nil {
		select {
		case <-l.done:
		case <-ctx.Done():
		}
	}
}

// close ends everything because of err.
func (v *Van) close(err error) {
	v.members.leave()
	v.calls.refuse()
	v.calls.fail(err)
	v.cancel(err)
	for _, l := range *v.links.Load() {
		l.fail(err) // first, because an acceptor waits for the end of its links, and cannot close polled ones
	}
	v.endpoint.close()
	v.wg.Wait()
	if v.unwatch != nil {
		v.unwatch()
	}
}
