// Package client runs the operations of a rank in a sidecar: an Engine here is to package hvd what an engine.Engine is, over a
// connection to the process that has the engine. docs/sidecar.md is the protocol.
//
// Tensors of package arena are not copied: their chunks are given to the sidecar as they appear, which maps them. Others are
// copied into memory of the Engine's own that the sidecar has too, and results out of it. Results whose size other ranks decide
// come in memory of the sidecar's.
//
// Invariants:
//
//  1. Every entry that Queue took is finished once, whatever becomes of the sidecar.
//  2. An operation is not sent before the sidecar has confirmed the memory that it names.
//  3. The allocators call in here under their locks, so none of them is called under mu.
package client

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/memfd"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/internal/sidecar/wire"
	"github.com/gohvd/gohvd/secret"
	"github.com/gohvd/gohvd/tensorqueue"
	"github.com/gohvd/gohvd/topo"
)

const (
	// maxFlying bounds the operations that are sent and not answered. The rest of wire.MaxInFlight is for other requests.
	maxFlying = wire.MaxInFlight - 4096
	// helping is how long a caller that waits reads after the last thing has come, and glance how long it waits at a time.
	helping = 2 * time.Millisecond
	glance  = 1 // ms
	// rest is how long the Engine's own reader leaves the socket alone after a caller has read, when nothing is in flight.
	rest = 10 * time.Millisecond
)

// Config says which sidecar, and what to tell it.
type Config struct {
	// Path is that of its socket.
	Path string
	// Secret is what both ends prove to know; zero is nothing.
	Secret secret.Secret
	// ConnectTimeout bounds the wait for the sidecar to be there, within that of Start's context.
	ConnectTimeout time.Duration
	// Settings and Sets are those of Init.
	Settings map[string]string
	Sets     [][]int
	Log      *zap.Logger
}

// Engine is one rank of one epoch, or a part in it: other clients of the sidecar may be the same rank. Its methods are safe for
// concurrent use.
type Engine struct {
	cfg Config
	fd  int
	out *wire.Outbox

	// Place, Homogeneous, Epoch and Sets are what the sidecar has found: Homogeneous reports that every host has the same
	// number of ranks, and Sets are all process sets but that of all ranks.
	Place       topo.Topology
	Homogeneous bool
	Epoch       uint64
	Sets        []controller.Set

	stage   stage
	running sync.WaitGroup
	unwatch []func()

	reading sync.Mutex // held by who reads
	in      wire.Inbox
	broken  error                     // why there is nothing more to read
	theirs  map[uint32]*memfd.Segment // arenas of the sidecar

	// attended says that a caller reads, and attendedAt when one did last, since start.
	start      time.Time
	attended   atomic.Bool
	attendedAt atomic.Int64
	// away says that the Engine's own reader leaves the socket to callers, until kick.
	away atomic.Bool
	kick chan struct{}

	mu      sync.Mutex
	calls   map[uint64]call // requests that were not answered
	lastID  uint64
	pending []*operation // not sent
	flying  int          // operations that were sent, by their weight
	open    int          // operations that are not finished
	shares  map[chunk]*share
	numbers map[uint32]bool // of arenas
	unheard int             // arenas that the sidecar has not confirmed
	allSent chan struct{}   // not nil in Shutdown: closed when nothing is pending
	queues  map[topo.ProcessSetID]*tensorqueue.Queue
	over    bool  // the job is, for this rank
	failure error // why, if not by a shutdown
	lost    error // why the connection has ended; nil while there is one

	ended     chan struct{} // closed: over, and every operation is finished
	endedOnce sync.Once
	closing   sync.Once
}

// call is a request that waits for its answer. One of its methods is called, once, and without mu.
type call interface {
	// answer takes the reply. An error is a breach of the protocol.
	answer(*sidecarpb.Reply) error
	fail(error)
}

// Start connects to the sidecar and joins its job, or its part in one that it is in already.
func Start(ctx context.Context, cfg Config) (*Engine, error) {
	if cfg.Log == nil {
		cfg.Log = zap.NewNop()
	}
	conn, err := connect(ctx, &cfg)
	if err != nil {
		return nil, err
	}
	fd, err := bare(conn)
	if err != nil {
		return nil, fmt.Errorf("sidecar %s: %w", cfg.Path, err)
	}
	e := &Engine{
		cfg: cfg, fd: fd, start: time.Now(), kick: make(chan struct{}, 1), out: wire.NewOutbox(fd), in: wire.Inbox{FD: fd},
		theirs: make(map[uint32]*memfd.Segment), calls: make(map[uint64]call),
		shares: make(map[chunk]*share), numbers: make(map[uint32]bool),
		queues: make(map[topo.ProcessSetID]*tensorqueue.Queue), ended: make(chan struct{}),
	}
	e.stage.limit = maxIdleBytes
	e.attendedAt.Store(int64(-rest))
	e.running.Go(e.out.Run)
	e.running.Go(e.receive)
	if err := e.init(ctx); err != nil {
		return nil, errors.Join(err, e.close(err))
	}
	e.unwatch = []func(){
		arena.Watch(func(c arena.Chunk) { e.offer(false, c) }, func(id uint32) { e.withdraw(chunk{false, id}) }),
		e.stage.memory.Watch(func(c arena.Chunk) { e.offer(true, c) }, func(id uint32) { e.withdraw(chunk{true, id}) }),
	}
	return e, nil
}

// bare is a descriptor for the same socket, out of the runtime's hands. conn is closed.
func bare(conn *net.UnixConn) (int, error) {
	control, err := conn.SyscallConn()
	if err != nil {
		return -1, errors.Join(err, conn.Close())
	}
	fd, failed := -1, error(nil)
	err = control.Control(func(of uintptr) { fd, failed = unix.FcntlInt(of, unix.F_DUPFD_CLOEXEC, 0) })
	if err = errors.Join(err, failed, conn.Close()); err != nil && fd >= 0 {
		err = errors.Join(err, unix.Close(fd))
	}
	return fd, err
}

// init says Init and takes what comes of it.
func (e *Engine) init(ctx context.Context) error {
	q := &sidecarpb.Init{Settings: e.cfg.Settings}
	for _, set := range e.cfg.Sets {
		ranks := new(sidecarpb.Ranks)
		for _, r := range set {
			ranks.Ranks = append(ranks.Ranks, int32(r))
		}
		q.ProcessSets = append(q.ProcessSets, ranks)
	}
	r, err := e.ask(ctx, &sidecarpb.Request{What: &sidecarpb.Request_Init{Init: q}})
	if err != nil {
		return fmt.Errorf("sidecar %s: init: %w", e.cfg.Path, err)
	}
	if r.Error != nil {
		return fmt.Errorf("sidecar %s: %w", e.cfg.Path, initError(r.Error))
	}
	ready := r.GetReady()
	if ready == nil {
		return fmt.Errorf("sidecar %s: init: the answer is none", e.cfg.Path)
	}
	e.Place = topo.Topology{
		Rank: int(ready.Rank), Size: int(ready.Size), LocalRank: int(ready.LocalRank), LocalSize: int(ready.LocalSize),
		CrossRank: int(ready.CrossRank), CrossSize: int(ready.CrossSize),
	}
	if err := e.Place.Validate(); err != nil {
		return fmt.Errorf("sidecar %s: init: %w", e.cfg.Path, err)
	}
	e.Homogeneous, e.Epoch = ready.Homogeneous, ready.Epoch
	e.mu.Lock()
	defer e.mu.Unlock()
	e.addSet(controller.Global(e.Place.Size))
	for _, p := range ready.ProcessSets {
		set := setOf(p)
		e.Sets = append(e.Sets, set)
		e.addSet(set)
	}
	return nil
}

func setOf(p *sidecarpb.ProcessSet) controller.Set {
	set := controller.Set{ID: topo.ProcessSetID(p.GetId())}
	for _, r := range p.GetRanks() {
		set.Ranks = append(set.Ranks, topo.Rank(r))
	}
	return set
}

// addSet makes the queue of a process set, unless this rank is not in it. The caller holds mu.
func (e *Engine) addSet(set controller.Set) {
	for _, r := range set.Ranks {
		if int(r) == e.Place.Rank {
			e.queues[set.ID] = tensorqueue.New()
			if e.over || e.lost != nil {
				e.queues[set.ID].Close(e.why())
			}
			return
		}
	}
}

// request gives q a number, and sends it; c hears of the answer. The caller holds mu. It fails if the connection has ended.
func (e *Engine) request(q *sidecarpb.Request, fd int, c call) error {
	if e.lost != nil {
		if fd >= 0 {
			_ = unix.Close(fd) // of a duplicate
		}
		return e.lost
	}
	e.lastID++
	q.Id = e.lastID
	if err := e.out.Send(q, fd); err != nil {
		return err
	}
	if c != nil {
		e.calls[q.Id] = c
	}
	return nil
}

// waiter is a call that somebody waits for.
type waiter chan answered

type answered struct {
	reply *sidecarpb.Reply
	err   error
}

func (w waiter) answer(r *sidecarpb.Reply) error {
	w <- answered{reply: r}
	return nil
}

func (w waiter) fail(err error) { w <- answered{err: err} }

// ask sends a request and waits for the reply.
func (e *Engine) ask(ctx context.Context, q *sidecarpb.Request) (*sidecarpb.Reply, error) {
	w := make(waiter, 1)
	e.mu.Lock()
	err := e.request(q, -1, w)
	e.mu.Unlock()
	if err != nil {
		return nil, err
	}
	e.recall()
	select {
	case a := <-w:
		return a.reply, a.err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// StartTimeline has the sidecar write a timeline, to a path as this process sees it.
func (e *Engine) StartTimeline(path string, markCycles bool) error {
	path, err := filepath.Abs(path)
	if err != nil {
		return err
	}
	return e.tell(&sidecarpb.Request{What: &sidecarpb.Request_StartTimeline{
		StartTimeline: &sidecarpb.StartTimeline{Path: path, MarkCycles: markCycles},
	}})
}

// StopTimeline has the sidecar end it, and returns when the file is complete.
func (e *Engine) StopTimeline() error {
	return e.tell(&sidecarpb.Request{What: &sidecarpb.Request_StopTimeline{StopTimeline: new(sidecarpb.StopTimeline)}})
}

// tell asks for what has an empty answer, and waits for that as long as there is a connection.
func (e *Engine) tell(q *sidecarpb.Request) error {
	r, err := e.ask(context.Background(), q)
	if err == nil && r.Error != nil {
		err = cause(r.Error, nil)
	}
	return err
}

// Queue takes tensors, all of them or none: one, or a group. The next Ring or Help has the sidecar see them. Tensors that are
// not in an arena are copied before it returns.
func (e *Engine) Queue(entries ...*tensorqueue.Entry) error {
	first := &entries[0].Request
	e.mu.Lock()
	queue := e.queues[entries[0].Set]
	e.mu.Unlock()
	if queue == nil {
		return opError(first, engine.ErrNoProcessSet)
	}
	if err := queue.Add(entries...); err != nil {
		if duplicate, ok := errors.AsType[*tensorqueue.DuplicateNameError](err); ok { // it need not be the first of a group
			return &engine.OpError{Op: duplicate.Kind.String(), Tensor: duplicate.Name, Err: err}
		}
		return opError(first, err)
	}
	queue.Pop(nil) // the order is that of pending
	o := &operation{engine: e, entries: entries}
	placed := o.place()
	e.mu.Lock()
	err := e.lost
	e.open++
	if placed == nil && err == nil {
		e.pending = append(e.pending, o)
		e.mu.Unlock()
		return nil
	}
	e.mu.Unlock()
	if placed != nil {
		err = placed
	}
	o.refuse(err)
	return nil
}

// Ring has the sidecar see what was queued.
func (e *Engine) Ring() {
	e.mu.Lock()
	e.send()
	e.mu.Unlock()
	if e.away.Load() {
		e.recall()
	}
}

// recall has the Engine's own reader look whether it is needed.
func (e *Engine) recall() {
	select {
	case e.kick <- struct{}{}:
	default:
	}
}

// send sends what is pending, as far as it may be sent. The caller holds mu, which is let go meanwhile where memory was refused.
func (e *Engine) send() {
	var data []byte
	for len(e.pending) > 0 && e.unheard == 0 && e.lost == nil {
		o := e.pending[0]
		if w := o.weight(); e.flying > 0 && e.flying+w > maxFlying {
			break
		}
		e.pending = e.pending[1:]
		if o.refused() {
			e.mu.Unlock()
			err := o.replace()
			e.mu.Lock()
			switch {
			case err == nil && e.lost == nil:
				e.pending = append([]*operation{o}, e.pending...)
			default:
				e.refuseLater(o, errors.Join(err, e.lost))
			}
			continue
		}
		e.lastID++
		frame := o.request(e.lastID)
		if n := proto.Size(frame); n > wire.MaxFrameBytes {
			e.refuseLater(o, fmt.Errorf("its description is %d bytes, want at most %d", n, wire.MaxFrameBytes))
			continue
		}
		more, err := wire.AppendFrame(data, frame)
		if err != nil {
			e.refuseLater(o, err)
			continue
		}
		data = more
		e.calls[e.lastID] = o
		e.flying += o.weight()
	}
	if len(data) > 0 {
		e.out.Put(data, -1)
	}
	if len(e.pending) == 0 {
		e.pending = nil
		if e.allSent != nil {
			close(e.allSent)
			e.allSent = nil
		}
	}
}

// refuseLater finishes o without mu, which the caller holds.
func (e *Engine) refuseLater(o *operation, err error) {
	e.running.Go(func() { o.refuse(err) })
}

// Help sends what was queued and takes what comes, until done reports true or ctx has ended, but not for long when nothing
// comes: the caller goes on to wait.
func (e *Engine) Help(ctx context.Context, done func() bool) {
	e.mu.Lock()
	e.send()
	e.mu.Unlock()
	if !e.reading.TryLock() {
		// Another reads, for all, and looks whether there is more when it leaves.
		if e.away.Load() {
			e.recall()
		}
		return
	}
	e.attended.Store(true)
	e.help(ctx, done)
	e.reading.Unlock()
	e.attendedAt.Store(int64(time.Since(e.start)))
	e.attended.Store(false)
	e.mu.Lock()
	more := e.open > 0
	e.mu.Unlock()
	if more && e.away.Load() {
		e.recall()
	}
}

// help reads for Help.
func (e *Engine) help(ctx context.Context, done func() bool) {
	for until := time.Now().Add(helping); e.broken == nil && !done() && ctx.Err() == nil; {
		fds := [1]unix.PollFd{{Fd: int32(e.fd), Events: unix.POLLIN}}
		n, err := unix.Poll(fds[:], glance)
		switch now := time.Now(); {
		case n > 0:
			if err := e.read(); err != nil {
				// What was read is gone: receive hears of the end, and then why.
				_ = unix.Shutdown(e.fd, unix.SHUT_RDWR)
				return
			}
			until = now.Add(helping)
		case err != nil && !errors.Is(err, unix.EINTR) || now.After(until):
			return
		}
	}
}

// receive takes what comes, until the connection ends. While callers read it sleeps apart from the socket, so that what comes for
// them wakes them alone.
func (e *Engine) receive() {
	for {
		e.stayAway()
		fds := []unix.PollFd{{Fd: int32(e.fd), Events: unix.POLLIN}}
		_, err := unix.Poll(fds, -1)
		if err == nil || errors.Is(err, unix.EINTR) {
			e.reading.Lock()
			err = e.read()
			e.reading.Unlock()
		}
		if err != nil {
			e.lose(err)
			return
		}
	}
}

// stayAway waits until no caller reads, and there is something to read or none has done so for a while.
func (e *Engine) stayAway() {
	e.away.Store(true)
	defer e.away.Store(false)
	for {
		e.mu.Lock()
		open := e.open > 0 || len(e.calls) > 0
		e.mu.Unlock()
		since := time.Since(e.start) - time.Duration(e.attendedAt.Load())
		if !e.attended.Load() && (open || since >= rest) {
			return
		}
		t := time.NewTimer(rest)
		select {
		case <-e.kick:
		case <-t.C:
		}
		t.Stop()
	}
}

// read takes something of what has come, without waiting. After an error there is no more. The caller holds reading.
func (e *Engine) read() error {
	if e.broken == nil {
		e.broken = e.readSome()
	}
	return e.broken
}

func (e *Engine) readSome() error {
	if _, err := e.in.Fill(false); err != nil {
		return err
	}
	for {
		body, ok, err := e.in.Next()
		if err != nil {
			return err
		}
		if !ok {
			return e.in.Spare()
		}
		if err := e.take(body); err != nil {
			return err
		}
	}
}

// take takes a frame.
func (e *Engine) take(body []byte) error {
	if len(body) == 0 {
		return nil // a doorbell, of a ring that there is none of
	}
	r := new(sidecarpb.Reply)
	if err := proto.Unmarshal(body, r); err != nil {
		return fmt.Errorf("%w: %w", wire.ErrFrame, err)
	}
	if r.Id == 0 {
		return e.news(r)
	}
	e.mu.Lock()
	c := e.calls[r.Id]
	delete(e.calls, r.Id)
	e.mu.Unlock()
	if c == nil {
		return fmt.Errorf("%w: an answer to request %d, which nobody has made", wire.ErrFrame, r.Id)
	}
	return c.answer(r)
}

// news takes what nobody has asked for. What this version does not know is none of its business.
func (e *Engine) news(r *sidecarpb.Reply) error {
	switch what := r.What.(type) {
	case *sidecarpb.Reply_Arena:
		return e.shown(what.Arena)
	case *sidecarpb.Reply_DropArena:
		return e.hidden(what.DropArena.GetArena())
	case *sidecarpb.Reply_Ended:
		e.mu.Lock()
		defer e.mu.Unlock()
		var why error
		if what.Ended.GetError() != nil {
			why = cause(what.Ended.GetError(), nil)
		}
		e.end(why)
	}
	return nil
}

// end notes that the job is over for this rank, because of why or by a shutdown. The caller holds mu.
func (e *Engine) end(why error) {
	if !e.over {
		e.over, e.failure = true, why
	}
	for _, q := range e.queues {
		q.Close(e.why())
	}
	e.rest()
}

// why is what later operations are refused with. The caller holds mu.
func (e *Engine) why() error {
	switch {
	case e.failure != nil:
		return e.failure
	case e.lost != nil && !e.over:
		return e.lost
	}
	return engine.ErrShutDown
}

// rest closes ended when all is done. The caller holds mu.
func (e *Engine) rest() {
	if e.over && e.open == 0 {
		e.endedOnce.Do(func() { close(e.ended) })
	}
}

// lose finishes everything with the end of the connection.
func (e *Engine) lose(err error) {
	e.mu.Lock()
	if e.lost == nil {
		e.lost = &engine.PeerError{
			Ranks: []int{e.Place.Rank}, Reason: fmt.Sprintf("the sidecar at %s is gone: %v", e.cfg.Path, err),
		}
	}
	lost := e.lost
	calls, pending := e.calls, e.pending
	e.calls, e.pending = make(map[uint64]call), nil
	if !e.over {
		why := lost
		if errors.Is(lost, engine.ErrClosed) {
			why = nil
		}
		e.over, e.failure = true, why
	}
	for _, q := range e.queues {
		q.Close(lost)
	}
	e.mu.Unlock()
	e.out.Close()
	for _, c := range calls {
		c.fail(lost)
	}
	for _, o := range pending {
		o.refuse(lost)
	}
	e.mu.Lock()
	e.rest()
	e.mu.Unlock()
}

// Shutdown takes the rank out of the job, as engine.Engine.Shutdown does. If ctx ends first the other ranks take this one
// for dead. The error is why the job had failed before, or ctx's.
func (e *Engine) Shutdown(ctx context.Context, why engine.Departure) error {
	allSent := make(chan struct{})
	e.mu.Lock()
	e.allSent = allSent
	e.send()
	for _, q := range e.queues {
		q.Close(engine.ErrShutDown)
	}
	gone := e.lost != nil
	e.mu.Unlock()
	if gone {
		return errors.Join(e.failed(), e.close(nil))
	}
	// Submissions must be sent before the shutdown. They may still wait for the sidecar to confirm their memory.
	select {
	case <-allSent:
	case <-e.ended:
	case <-ctx.Done():
		return errors.Join(fmt.Errorf("rank %d: shutdown: %w", e.Place.Rank, context.Cause(ctx)), e.close(engine.ErrClosed))
	}
	r, err := e.ask(ctx, &sidecarpb.Request{What: &sidecarpb.Request_Shutdown{
		Shutdown: &sidecarpb.Shutdown{Reason: why.Reason, Failed: why.Failed},
	}})
	if err == nil {
		e.mu.Lock()
		var why error
		if r.Error != nil {
			why = cause(r.Error, nil)
		}
		e.end(why)
		e.mu.Unlock()
		select {
		case <-e.ended:
			return errors.Join(e.failed(), e.Leave())
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
	}
	if ctx.Err() == nil {
		<-e.ended // the connection has
		return errors.Join(e.failed(), e.close(nil))
	}
	return errors.Join(fmt.Errorf("rank %d: shutdown: %w", e.Place.Rank, err), e.close(engine.ErrClosed))
}

// Leave ends the connection, and the job too if the sidecar has no other client: to the other ranks that is this one's death, unless
// it was over.
func (e *Engine) Leave() error {
	e.mu.Lock()
	// The connection may have ended: then nobody has to be told.
	_ = e.request(&sidecarpb.Request{What: &sidecarpb.Request_Bye{Bye: &sidecarpb.Bye{}}}, -1, nil)
	e.mu.Unlock()
	return e.close(nil)
}

// failed is why the job has failed.
func (e *Engine) failed() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.failure
}

// close ends the connection, because of why, and lets go of everything.
func (e *Engine) close(why error) (err error) {
	e.closing.Do(func() {
		e.mu.Lock()
		if e.lost == nil && why != nil {
			e.lost = why
		}
		e.mu.Unlock()
		for _, stop := range e.unwatch {
			stop()
		}
		// For receive and the Outbox.
		_ = unix.Shutdown(e.fd, unix.SHUT_RDWR)
		e.running.Wait()
		e.reading.Lock() // nobody helps any more
		defer e.reading.Unlock()
		e.in.Close()
		errs := []error{unix.Close(e.fd), e.stage.close()}
		for _, s := range e.theirs {
			errs = append(errs, s.Close())
		}
		err = errors.Join(errs...)
	})
	return err
}

// Ended is closed when the job is over for this rank and every operation is finished. Err then says why.
func (e *Engine) Ended() <-chan struct{} { return e.ended }

// Err is why the job has failed; nil after a shutdown. It must not be called before Ended is closed.
func (e *Engine) Err() error { return e.failed() }
