// Package sidecar runs one rank's engine for other processes of its host, over Unix sockets and shared memory.
// docs/sidecar.md is the protocol.
//
// Invariants:
//
//  1. Nothing that a client says or leaves unsaid keeps another client, the engine or another rank waiting, or takes memory
//     without a bound. What breaks the protocol ends its connection.
//  2. Memory of a client is written only while an operation of its is in flight. It is mapped until the last operation that uses
//     it is done, whatever becomes of the client.
//  3. A client that goes in the middle of a job is the death of the rank: Dead tells whoever runs the Server, which then ends
//     the process.
package sidecar

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/place"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/internal/tensor"
)

const (
	// maxConns bounds the clients of a rank.
	maxConns = 1024
	// maxPathBytes bounds a path of a client, as the system does.
	maxPathBytes = 4096
	// helloTimeout is how long a client may take to say who it is.
	helloTimeout = 30 * time.Second
)

// Config is what a Server needs.
type Config struct {
	// Version is that of the program, for who asks.
	Version string
	// Secret is what clients that come to a path have to know; zero is nothing.
	Secret secret.Secret
	// Options are those of every Init, before what the client sets.
	Options rank.Options
	// HelloTimeout is how long a client may take to begin; 0 is 30 s.
	HelloTimeout time.Duration
	// MaxInFlight bounds the operations of a connection, and its requests; 0 is 65536.
	MaxInFlight int
	Log         *zap.Logger
}

// errEnding is the end of everything.
var errEnding = errors.New("the sidecar is being ended")

// Server is one rank. Its methods are safe for concurrent use.
type Server struct {
	cfg    Config
	log    *zap.Logger
	memory memory
	chunks chunks
	unwatch,
	cancel func()
	ctx        context.Context // ends in Close
	wg         sync.WaitGroup
	operations atomic.Uint64
	// inside is the rank while there is one.
	inside atomic.Pointer[runner]
	// changing is held by who makes or ends an engine.
	changing chan struct{}

	// Of who holds changing.
	met  *place.Meeting
	last uint64 // the last epoch

	mu     sync.Mutex
	state  string
	rank   *rank.Rank
	over   chan struct{} // closed when clients have heard that rank has ended
	conns  map[*conn]struct{}
	closed bool
	dead   chan struct{}
	death  error
}

// runner runs operations: a rankRunner.
type runner interface {
	// Begin starts o. An error says that it has not begun: then it is not done either. The next Notify or Drive notices what was begun.
	Begin(o *operation) error
	Notify()
	Drive(ctx context.Context, done func() bool)
}

// States of a rank, as a StatusReport says them.
const (
	StateIdle     = "idle"
	StateStarting = "starting"
	StateRunning  = "running"
	StateEnded    = "ended" // the job is over, and nobody has said Shutdown
)

// New makes a Server without clients.
func New(cfg Config) *Server {
	if cfg.Log == nil {
		cfg.Log = zap.NewNop()
	}
	if cfg.HelloTimeout == 0 {
		cfg.HelloTimeout = helloTimeout
	}
	if cfg.MaxInFlight == 0 {
		cfg.MaxInFlight = maxInFlight
	}
	s := &Server{
		cfg: cfg, log: cfg.Log,
		memory:   memory{all: make(map[uint32]*given)},
		chunks:   chunks{all: make(map[uint32]*shmem.Segment)},
		changing: make(chan struct{}, 1),
		state:    StateIdle, conns: make(map[*conn]struct{}), dead: make(chan struct{}),
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.unwatch = arena.Watch(s.chunks.added, s.chunkRemoved)
	return s
}

// chunkRemoved is called under the lock of the arena: nobody may call that and hold a lock that is taken here.
func (s *Server) chunkRemoved(id uint32) {
	s.chunks.removed(id)
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.conns {
		c.gone(ownArenas + id)
	}
}

// Dead is closed when the rank has failed because of a client; Death then says why. Then the process has to end without
// ceremony: that is how the other ranks hear of it.
func (s *Server) Dead() <-chan struct{} { return s.dead }

// Death is why the rank has failed; nil if it has not.
func (s *Server) Death() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.death
}

// Close ends the job, if there is one, and all connections. If ctx has ended, or ends first, the other ranks take this one for
// dead.
func (s *Server) Close(ctx context.Context) error {
	s.cancel() // of an Init
	s.changing <- struct{}{}
	err := s.shutdown(ctx, "its sidecar was told to end", false)
	s.mu.Lock()
	s.closed = true
	for c := range s.conns {
		c.cut(errEnding)
	}
	s.mu.Unlock()
	s.wg.Wait()
	s.unwatch()
	<-s.changing
	return err
}

// ServeConn serves a client until it goes, which need not be an error. conn is the Server's. path says that the client found it
// by a path, where others may come too.
func (s *Server) ServeConn(conn *net.UnixConn, path bool) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return errors.Join(errEnding, conn.Close())
	}
	s.wg.Add(1) // not after Close has begun to wait
	s.mu.Unlock()
	defer s.wg.Done()
	fd, pid, pidfd, err := s.welcome(conn, path)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }() // after everybody has let go of it
	c := newConn(s, fd, pid)
	s.mu.Lock()
	var refused error
	switch {
	case s.closed:
		refused = errEnding
	case len(s.conns) >= maxConns:
		refused = fmt.Errorf("it is one more than %d clients", maxConns)
	default:
		s.conns[c] = struct{}{}
		c.out.Put(dial.Greeting(magic, version), -1) // now, for whoever has a greeting counts as a client, and before any news
	}
	s.mu.Unlock()
	if refused != nil {
		if pidfd != nil {
			err = pidfd.Close()
		}
		return errors.Join(fmt.Errorf("sidecar: client %d: %w", pid, refused), err)
	}
	if pidfd != nil {
		var watching sync.WaitGroup
		watching.Go(func() { c.watch(pidfd) })
		defer watching.Wait()
		defer pidfd.Close()
	}
	err = c.serve()
	last := s.forget(c)
	s.departed(c, err, last)
	if errors.Is(err, errBye) || errors.Is(err, errEnd) && s.Death() == nil {
		return nil
	}
	return fmt.Errorf("sidecar: client %d: %w", pid, err)
}

// forget takes out a connection, and reports whether it was the last.
func (s *Server) forget(c *conn) (last bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
	return len(s.conns) == 0
}

// departed draws the conclusions from the end of a connection.
func (s *Server) departed(c *conn, why error, last bool) {
	bye := errors.Is(why, errBye)
	s.mu.Lock()
	inJob := s.state == StateStarting || s.state == StateRunning
	dies := inJob && s.ctx.Err() == nil && s.death == nil && (!bye || last)
	if dies {
		s.death = fmt.Errorf("client %d was part of the job: %w", c.pid, why)
		close(s.dead)
	}
	if last && s.state == StateEnded {
		s.wg.Go(s.tidy)
	}
	s.mu.Unlock()
	switch {
	case dies:
		s.log.Error("the rank has failed", zap.Error(s.Death()))
	case !bye && s.ctx.Err() == nil:
		s.log.Warn("a client has gone", zap.Int("pid", c.pid), zap.Error(why))
	}
}

// tidy lets go of a job that is over, for nobody is left to say Shutdown.
func (s *Server) tidy() {
	if s.change() != nil {
		return
	}
	defer func() { <-s.changing }()
	if s.Report().State == StateEnded {
		// There is nobody to wait for: it is as good as cut short.
		over, cancel := context.WithCancel(s.ctx)
		cancel()
		s.check(s.shutdown(over, "", false))
	}
}

// watch cuts the connection when the client's process ends, also where others have the socket.
func (c *conn) watch(pidfd *os.File) {
	raw, err := pidfd.SyscallConn()
	if err == nil {
		err = raw.Read(func(fd uintptr) bool {
			fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			n, err := unix.Poll(fds, 0)
			return err == nil && n > 0
		})
	}
	if err == nil { // else it was closed, because the connection has ended
		c.cut(errors.New("its process has ended"))
	}
}

// welcome looks at who comes and gives the bare socket, over which the greeting is still to be sent. conn is closed.
func (s *Server) welcome(conn *net.UnixConn, path bool) (fd, pid int, pidfd *os.File, err error) {
	defer conn.Close()
	stop := context.AfterFunc(s.ctx, func() { conn.Close() })
	defer stop()
	fail := func(err error) (int, int, *os.File, error) {
		if pidfd != nil {
			err = errors.Join(err, pidfd.Close())
		}
		return -1, pid, nil, fmt.Errorf("sidecar: client %d: %w", pid, err)
	}
	if pid, pidfd, err = peer(conn); err != nil {
		return fail(err)
	}
	if err := conn.SetDeadline(time.Now().Add(s.cfg.HelloTimeout)); err != nil {
		return fail(err)
	}
	if path && !s.cfg.Secret.IsZero() {
		if _, err := s.cfg.Secret.Accept(conn, magic); err != nil {
			return fail(err)
		}
	}
	got, err := dial.ReadGreeting(conn, magic)
	if err != nil {
		return fail(err)
	}
	if got != version {
		_, err := conn.Write(dial.Greeting(magic, version))
		return fail(errors.Join(fmt.Errorf("it speaks version %d, want %d", got, version), err))
	}
	if fd, err = bare(conn); err != nil {
		return fail(err)
	}
	return fd, pid, pidfd, nil
}

// peer is the process at the other end, which must be of the same user. Where the kernel has no pidfd it is nil.
func peer(conn *net.UnixConn) (pid int, pidfd *os.File, err error) {
	control, err := conn.SyscallConn()
	if err != nil {
		return 0, nil, err
	}
	var failed error
	err = control.Control(func(fd uintptr) {
		var cred *unix.Ucred
		if cred, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); failed != nil {
			return
		}
		if pid = int(cred.Pid); int(cred.Uid) != os.Geteuid() {
			failed = fmt.Errorf("it is user %d, want %d", cred.Uid, os.Geteuid())
			return
		}
		pidfd, failed = openPidfd(int(fd), pid)
	})
	return pid, pidfd, errors.Join(err, failed)
}

// openPidfd asks the socket for it, which knows the process even where its number has been given to another.
func openPidfd(fd, pid int) (*os.File, error) {
	p, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PEERPIDFD)
	if err == unix.ENOPROTOOPT { // before Linux 6.5
		p, err = unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	}
	switch {
	case err == unix.ENOSYS || err == unix.EPERM || err == unix.EINVAL && pid == 0:
		return nil, nil // the end of the connection has to do
	case err != nil:
		return nil, fmt.Errorf("its process: %w", err)
	}
	if err := unix.SetNonblock(p, true); err != nil {
		return nil, errors.Join(err, unix.Close(p))
	}
	return os.NewFile(uintptr(p), "pidfd"), nil
}

// bare is a descriptor for the same socket that blocks.
func bare(conn *net.UnixConn) (int, error) {
	control, err := conn.SyscallConn()
	if err != nil {
		return -1, err
	}
	fd, failed := -1, error(nil)
	err = control.Control(func(of uintptr) { fd, failed = unix.FcntlInt(of, unix.F_DUPFD_CLOEXEC, 0) })
	if err = errors.Join(err, failed); err != nil {
		return -1, err
	}
	// The socket is taken out of the poller before its flag, which is that of both descriptors, is changed.
	if err := errors.Join(conn.Close(), unix.SetNonblock(fd, false)); err != nil {
		return -1, errors.Join(err, unix.Close(fd))
	}
	return fd, nil
}

// request does what takes long, or concerns all clients. It is answered later.
func (s *Server) request(c *conn, q *sidecarpb.Request) {
	var do func() (*sidecarpb.Reply, error)
	switch what := q.What.(type) {
	case *sidecarpb.Request_Status:
		c.answer(q.Id, &sidecarpb.Reply{What: &sidecarpb.Reply_Status{Status: s.Report()}}, nil)
		return
	case *sidecarpb.Request_Init:
		do = func() (*sidecarpb.Reply, error) { return s.init(what.Init) }
	case *sidecarpb.Request_Shutdown:
		do = func() (*sidecarpb.Reply, error) { return nil, s.end(what.Shutdown) }
	case *sidecarpb.Request_AddProcessSet:
		do = func() (*sidecarpb.Reply, error) { return s.addSet(what.AddProcessSet) }
	case *sidecarpb.Request_StartTimeline:
		do = func() (*sidecarpb.Reply, error) {
			return nil, asUsage("start timeline", s.startTimeline(what.StartTimeline))
		}
	case *sidecarpb.Request_StopTimeline:
		do = func() (*sidecarpb.Reply, error) { return nil, asUsage("stop timeline", s.stopTimeline()) }
	case *sidecarpb.Request_RemoveProcessSet:
		do = func() (*sidecarpb.Reply, error) { return nil, s.removeSet(what.RemoveProcessSet) }
	}
	s.wg.Go(func() {
		r, err := do()
		c.answer(q.Id, r, err)
	})
}

// change makes the caller the one who makes or ends engines.
func (s *Server) change() error {
	select {
	case s.changing <- struct{}{}:
	case <-s.ctx.Done():
		return errEnding
	}
	if s.ctx.Err() != nil { // both were possible
		<-s.changing
		return errEnding
	}
	return nil
}

func (s *Server) init(q *sidecarpb.Init) (*sidecarpb.Reply, error) {
	if err := s.change(); err != nil {
		return nil, err
	}
	defer func() { <-s.changing }()
	r := s.current()
	if r == nil {
		s.setState(StateStarting, nil)
		r = new(rank.Rank)
		if err := r.Start(s.ctx, s.options(q)); err != nil {
			s.setState(StateIdle, nil)
			return nil, err
		}
		s.last = r.Epoch
		s.setState(StateRunning, r)
	}
	ready := &sidecarpb.Ready{
		Rank: int32(r.Place.Rank), Size: int32(r.Place.Size), LocalRank: int32(r.Place.LocalRank), LocalSize: int32(r.Place.LocalSize),
		CrossRank: int32(r.Place.CrossRank), CrossSize: int32(r.Place.CrossSize), Epoch: r.Epoch,
		Homogeneous: r.Homogeneous,
	}
	for _, set := range r.Sets()[1:] {
		ready.ProcessSets = append(ready.ProcessSets, describeSet(set))
	}
	return &sidecarpb.Reply{What: &sidecarpb.Reply_Ready{Ready: ready}}, nil
}

func (s *Server) options(q *sidecarpb.Init) rank.Options {
	o := s.cfg.Options
	o.ForClient, o.Kept, o.LastEpoch = true, &s.met, s.last
	o.Settings = maps.Clone(o.Settings)
	if o.Settings == nil {
		o.Settings = make(map[string]string)
	}
	maps.Copy(o.Settings, q.GetSettings())
	o.Sets = slices.Clone(o.Sets)
	for _, set := range q.GetProcessSets() {
		o.Sets = append(o.Sets, ints(set.GetRanks()))
	}
	return o
}

func (s *Server) current() *rank.Rank {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rank
}

// setState sets state and rank. With a rank, its end is waited for.
func (s *Server) setState(state string, r *rank.Rank) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.state, s.rank = state, r
	if r == nil {
		s.inside.Store(nil)
		return
	}
	inside := runner(rankRunner{r})
	s.inside.Store(&inside)
	over := make(chan struct{})
	s.over = over
	s.wg.Go(func() {
		defer close(over)
		<-r.Engine.Ended()
		s.ended(r.Engine.Err())
	})
}

// ended tells all clients that the job is over.
func (s *Server) ended(why error) {
	ended := new(sidecarpb.Ended)
	if why != nil {
		ended.Error = describe(why)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.state = StateEnded
	for c := range s.conns {
		c.reply(&sidecarpb.Reply{What: &sidecarpb.Reply_Ended{Ended: ended}}, -1)
	}
}

// end is the Shutdown of a client.
func (s *Server) end(q *sidecarpb.Shutdown) error {
	if err := s.change(); err != nil {
		return err
	}
	defer func() { <-s.changing }()
	return s.shutdown(s.ctx, q.GetReason(), q.GetFailed())
}

// shutdown ends the engine. The caller holds changing.
func (s *Server) shutdown(ctx context.Context, reason string, failed bool) error {
	s.mu.Lock()
	r, over := s.rank, s.over
	s.mu.Unlock()
	if r == nil {
		return nil
	}
	var err error
	if ctx.Err() != nil {
		err = r.Close()
	} else {
		err = r.Shutdown(ctx, engine.Departure{Reason: reason, Failed: failed})
	}
	<-over
	s.setState(StateIdle, nil)
	return err
}

// begin begins an operation.
func (s *Server) begin(o *operation) error {
	inside := s.inside.Load()
	if inside == nil {
		return o.plan.Misuse("%w", rank.ErrNotInitialized)
	}
	return (*inside).Begin(o)
}

func (s *Server) addSet(q *sidecarpb.AddProcessSet) (*sidecarpb.Reply, error) {
	ch, err := s.changeSets(message.AddProcessSet, q.GetTimeoutSeconds(), func(c *rank.Call, done func(*rank.Change, error)) error {
		return c.AddSet(ints(q.GetRanks()), done)
	})
	if err != nil {
		return nil, err
	}
	return &sidecarpb.Reply{What: &sidecarpb.Reply_ProcessSet{ProcessSet: describeSet(ch.Set)}}, nil
}

func (s *Server) removeSet(q *sidecarpb.RemoveProcessSet) error {
	_, err := s.changeSets(message.RemoveProcessSet, q.GetTimeoutSeconds(), func(c *rank.Call, done func(*rank.Change, error)) error {
		set := c.Rank.FindSet(int(q.GetId()))
		if set == nil {
			return c.Misuse("process set %d: %w", q.GetId(), engine.ErrNoProcessSet)
		}
		return c.RemoveSet(set, done)
	})
	return err
}

// changeSets does what ask submits, and waits for it.
func (s *Server) changeSets(kind message.Kind, timeoutSeconds float64, ask func(c *rank.Call, done func(*rank.Change, error)) error) (*rank.Change, error) {
	c := rank.NewCall(kind, tensor.Invalid)
	if c.Rank = s.current(); c.Rank == nil {
		return nil, c.Misuse("%w", rank.ErrNotInitialized)
	}
	var err error
	if c.Timeout, err = timeoutOf(timeoutSeconds); err != nil {
		return nil, c.Misuse("%w", err)
	}
	if err := c.Check(); err != nil {
		return nil, err
	}
	var change *rank.Change
	done := make(chan error, 1)
	if err = ask(&c, func(ch *rank.Change, err error) { change = ch; done <- err }); err == nil {
		c.Rank.Engine.Drive(context.Background(), func() bool { return len(done) > 0 })
		err = <-done
	}
	return change, err
}

// startTimeline writes the timeline to where the client says. It is of the same user, so there is no file that it could not write
// itself.
func (s *Server) startTimeline(q *sidecarpb.StartTimeline) error {
	r, path := s.current(), q.GetPath()
	switch {
	case r == nil:
		return rank.ErrNotInitialized
	case len(path) > maxPathBytes:
		return fmt.Errorf("a path of %d bytes, want at most %d", len(path), maxPathBytes)
	case !filepath.IsAbs(path): // whose directory would that be?
		return fmt.Errorf("the path %q is not absolute", path)
	}
	return r.Watch.StartTimeline(path, q.GetMarkCycles())
}

func (s *Server) stopTimeline() error {
	r := s.current()
	if r == nil {
		return rank.ErrNotInitialized
	}
	return r.Watch.StopTimeline()
}

func describeSet(set *rank.Set) *sidecarpb.ProcessSet {
	d := &sidecarpb.ProcessSet{Id: int32(set.ID)}
	for _, r := range set.Ranks {
		d.Ranks = append(d.Ranks, int32(r))
	}
	return d
}

func ints(ranks []int32) []int {
	all := make([]int, len(ranks))
	for i, r := range ranks {
		all[i] = int(r)
	}
	return all
}

// Report is how the Server is.
func (s *Server) Report() *sidecarpb.StatusReport {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := &sidecarpb.StatusReport{
		Version: s.cfg.Version, Pid: uint32(os.Getpid()), State: s.state,
		Clients: uint32(len(s.conns)), Operations: s.operations.Load(),
	}
	for c := range s.conns {
		r.InFlight += uint64(c.flying.Load())
	}
	return r
}

// check logs what must not happen and hurts nobody but this process.
func (s *Server) check(err error) {
	if err != nil {
		s.log.Error("giving up what nobody uses", zap.Error(err))
	}
}
