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
	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/trace"
)

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

	chunks  chunks
	unwatch func()          // ends the calls about chunks of the arena; nil if no memory is shared
	ctx     context.Context // ends when the van is stopped or has failed
	cancel  context.CancelCauseFunc
	stopped chan struct{} // closed by ended, when everything has ended
	ended   func()
	wg      sync.WaitGroup
	links   atomic.Pointer[map[int]*link] // by id of the peer, including further ids of its process
	holding atomic.Bool                   // a link may hold requests back
	polling atomic.Bool                   // a goroutine polls, as only one may do at a time
	made    atomic.Uint64                 // number of connections so far
	yielder shmem.Yielder                 // used by the goroutine that polls
	sched   *scheduler                    // nil except at the scheduler
	failing atomic.Bool                   // this process leaves because it has failed
}

// New returns a Van that is not connected. It calls the methods of h from the beginning of Start until the
// end of Stop.
func New(cfg Config, h Handler) *Van {
	v := &Van{cfg: cfg, log: cfg.Log, handler: h}
	if v.log == nil {
		v.log = zap.NewNop()
	}
	v.links.Store(&map[int]*link{})
	v.stopped = make(chan struct{})
	v.ended = sync.OnceFunc(func() { close(v.stopped) })
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
	ctx, cancel := v.cfg.LimitStart(ctx)
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
		s.Name, s.Returned = Name(v.ID()), v.members.self[0].Generation > 0
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
			return nil, fmt.Errorf("%s is connected with %s already", Name(int(n.Id)), Name(v.ID()))
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
		v.log.Info("ps: connected", zap.String("node", Name(v.ID())), zap.String("with", Name(l.peer)))
	}
	return l, nil
}

// up tells the handler of a new link.
func (v *Van) up(l *link) {
	if l.restored {
		v.log.Info("ps: connected again", zap.String("node", Name(v.ID())), zap.String("with", Name(l.peer)))
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
			Name(v.ID()), Name(id))
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
	m.Header.Error = validText(m.Header.Error)
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
	if !v.cfg.Resend || m.buf != nil || m.Data == nil {
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

// verbose logs a message if cfg.Verbose says so.
func (v *Van) verbose(what string, peer int, m *Message) {
	if v.cfg.Verbose < 2 {
		return
	}
	v.log.Info("ps: "+what, zap.String("node", Name(v.ID())), zap.String("peer", Name(peer)),
		zap.Stringer("header", m.Header), zap.Int("bytes", m.Bytes()))
}

// Stop leaves the job. It sends what is queued and TERMINATE to all peers, and waits until they have closed
// their connections, but only until ctx ends. Then it closes all connections, and waits until no call of the
// handler is in progress. Only the first call of Stop or Fail has an effect; later ones wait until it has
// ended.
func (v *Van) Stop(ctx context.Context) { v.leave(ctx, nil) }

// StopListening makes a scheduler that is about to leave refuse further connections, so that the next one
// can listen at its address. A process that joins the next job waits for that one. At other nodes it does
// nothing.
func (v *Van) StopListening() {
	if v.sched != nil {
		v.endpoint.accepts.StopListening()
	}
}

// Finish says that this process will leave the job after a barrier of all nodes that it enters next. Once
// that is complete, the scheduler gives no process a place in the job.
func (v *Van) Finish() {
	if v.sched != nil {
		v.sched.finishing.Store(true)
	}
}

// maxReasonBytes is the maximum length of a reason that a node gives for its end.
const maxReasonBytes = 4096

// Fail is like Stop, but tells the peers that this process has failed because of reason, which is not empty.
func (v *Van) Fail(ctx context.Context, reason string) {
	reason = validText(reason[:min(len(reason), maxReasonBytes)])
	v.failing.Store(true)
	v.leave(ctx, []*pspb.Node{{Gone: reason}})
}

// validText returns a text of the program as protobuf requires it. It is empty only if the text is.
func validText(text string) string { return strings.ToValidUTF8(text, "\uFFFD") }

// leave sends TERMINATE with nodes, and ends everything.
func (v *Van) leave(ctx context.Context, nodes []*pspb.Node) {
	if !v.members.leave() {
		<-v.stopped
		return
	}
	v.calls.refuse()
	v.StopListening()
	var wg sync.WaitGroup
	for id, l := range *v.links.Load() {
		if id == l.peer && l.conn != nil {
			wg.Go(func() { l.leave(ctx, nodes) })
		}
	}
	wg.Wait()
	if v.sched != nil {
		answering, cancel := context.WithTimeout(ctx, answerTime)
		_ = v.endpoint.accepts.Idle(answering) // such a process may have connected already
		cancel()
	}
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
	defer v.ended()
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

// Ended reports whether the scheduler, or the process p itself, has said that p has ended. If only the
// connection with p has ended, p may live and serve others.
func (v *Van) Ended(p Process) bool { return v.members.ended(p) }

// Current returns the process that has the place of node id, even if it has ended. Before Start has returned,
// it may have no incarnation.
func (v *Van) Current(id int) Process { return v.members.current(id) }

// Since says when the process that has the place of node id has joined the job: it returns its generation if
// it has taken the place of another one (IsRecovery), or 0 if it takes part from the beginning.
func (v *Van) Since(id int) uint64 { return v.members.since(id) }

// Gone returns the reason why node id has ended as far as this process knows, or nil.
func (v *Van) Gone(id int) error { return v.members.goneError(id) }

// Done returns a channel that is closed when the van is stopped or has failed.
func (v *Van) Done() <-chan struct{} { return v.ctx.Done() }

// Err returns the reason why the van was stopped or has failed, or nil.
func (v *Van) Err() error { return context.Cause(v.ctx) }

// IsRecovery reports whether this process has taken the place of one that has ended. If the old process has
// ended before all nodes have met (Config.Meets), the new one takes part from the beginning, and IsRecovery
// returns false.
func (v *Van) IsRecovery() bool { return v.members.self[0].IsRecovery }
