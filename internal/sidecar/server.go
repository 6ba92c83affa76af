// Package sidecar runs the engine of one rank for another process on its host, the client, over a Unix socket
// and shared memory. A Server has one client at a time. docs/sidecar.md describes the protocol.
//
// Invariants:
//
//  1. The client cannot make the engine or another rank wait, or make the sidecar use an unbounded amount of
//     memory, no matter what it sends or fails to send. If it breaks the protocol, the sidecar closes its
//     connection.
//  2. The sidecar writes to the client's memory only while an operation of the client is in flight. The memory
//     stays mapped until the last operation that uses it is done, even if the client has left.
//  3. If the client leaves in the middle of a job, the rank fails. The Server then closes the channel that
//     Dead returns, and the program that runs the Server must end the process.
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
	"github.com/gohvd/gohvd/internal/bootstrap"
	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/internal/sidecar/wire"
)

const (
	// maxPathBytes is the maximum length of a path in a request. Linux has the same limit.
	maxPathBytes = 4096
	// helloTimeout is the default of Config.HelloTimeout.
	helloTimeout = 30 * time.Second
)

// Config holds the settings of a Server.
type Config struct {
	// Version is the version of the program that runs the Server, for Report.
	Version string
	// Options are the options of each Init. Settings that the client sends override them.
	Options rank.Options
	// HelloTimeout is how long the Server waits for a client's greeting. The default, for 0, is 30 s.
	HelloTimeout time.Duration
	// MaxInFlight is the maximum number of operations in flight on a connection, and also the maximum number
	// of unanswered requests. If it is 0, the maximum is 65536.
	MaxInFlight int
	Log         *zap.Logger
}

// errEnding reports that a request or connection has arrived after Close was called.
var errEnding = errors.New("the sidecar is shutting down")

// Server runs the engine of one rank for its client. Its methods are safe for concurrent use.
type Server struct {
	cfg    Config
	log    *zap.Logger
	chunks chunks
	unwatch,
	cancel func()
	ctx        context.Context // cancelled when Close is called
	wg         sync.WaitGroup
	operations atomic.Uint64
	// running runs operations on the rank. It is nil while there is no rank.
	running atomic.Pointer[runner]
	// changing is a channel with room for one element, used as a lock. A goroutine acquires the lock by
	// putting an element in, and releases it by taking the element out. Only the holder starts or ends an
	// engine.
	changing chan struct{}

	// Only the holder of changing may use met and last.
	met  *bootstrap.Meeting
	last uint64 // epoch of the last job of this process

	mu     sync.Mutex
	state  string
	rank   *rank.Rank
	over   chan struct{} // closed when the job is over and the client has been notified
	client *conn         // nil if there is no client
	closed bool
	dead   chan struct{}
	death  error
}

// runner runs operations on a rank. rankRunner implements it.
type runner interface {
	// Begin queues o for the engine, which processes it at the next call of Notify or Drive. If Begin returns
	// an error, o is not queued and o.done will not be called.
	Begin(o *operation) error
	Notify()
	Drive(ctx context.Context, done func() bool)
}

// These are the states of the rank in a Report.
const (
	StateIdle     = "idle"
	StateStarting = "starting"
	StateRunning  = "running"
	StateEnded    = "ended" // the job is over, and the client has not sent Shutdown yet
)

// New returns a Server that has no clients yet.
func New(cfg Config) *Server {
	if cfg.Log == nil {
		cfg.Log = zap.NewNop()
	}
	if cfg.HelloTimeout == 0 {
		cfg.HelloTimeout = helloTimeout
	}
	if cfg.MaxInFlight == 0 {
		cfg.MaxInFlight = wire.MaxInFlight
	}
	s := &Server{
		cfg: cfg, log: cfg.Log,
		chunks:   chunks{all: make(map[uint32]*shmem.Segment)},
		changing: make(chan struct{}, 1),
		state:    StateIdle, dead: make(chan struct{}),
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.unwatch = arena.Watch(s.chunks.added, s.chunkRemoved)
	return s
}

// chunkRemoved notifies the client that a chunk of the sidecar's own arena was removed. The arena calls
// chunkRemoved while it holds its own lock. To avoid a deadlock, a goroutine that holds s.mu, or another lock
// that chunkRemoved acquires, must not call the arena.
func (s *Server) chunkRemoved(id uint32) {
	s.chunks.removed(id)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.client != nil {
		s.client.announceRemoval(wire.OwnArenas + id)
	}
}

// Dead returns a channel that is closed when the rank has failed because of the client. Death then returns
// the reason. The process must then exit without leaving the job in an orderly way. This shows the other
// ranks that this rank has failed.
func (s *Server) Dead() <-chan struct{} { return s.dead }

// Death returns the reason why the rank has failed if the client has made it fail. Otherwise it returns nil.
func (s *Server) Death() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.death
}

// Close leaves the job, if there is one, and closes the connection. If ctx ends before the rank has left the
// job, the other ranks consider it failed.
func (s *Server) Close(ctx context.Context) error {
	s.cancel() // cancels a waiting Init
	s.changing <- struct{}{}
	err := s.shutdown(ctx, "its sidecar received a request to exit", false)
	s.mu.Lock()
	s.closed = true
	if s.client != nil {
		s.client.disconnect(errEnding)
	}
	s.mu.Unlock()
	s.wg.Wait()
	s.unwatch()
	<-s.changing
	return err
}

// ServeConn serves a client until the connection ends. If there is another client, it refuses this one. It
// takes ownership of conn. It returns nil if the client has sent Bye, or if the connection has ended without
// Bye but the rank has not failed because of that.
func (s *Server) ServeConn(conn *net.UnixConn) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return errors.Join(errEnding, conn.Close())
	}
	// Add is called with mu held, so that it is not called after Close has started to wait.
	s.wg.Add(1)
	s.mu.Unlock()
	defer s.wg.Done()
	fd, pid, pidfd, err := s.accept(conn)
	if err != nil {
		return err
	}
	// This deferred call runs last, when nothing else uses the descriptor any more.
	defer func() { _ = unix.Close(fd) }()
	c := newConn(s, fd, pid)
	if refused := s.admit(c); refused != nil {
		c.reply(&sidecarpb.Reply{Error: wire.Describe(refused)}, -1)
		if pidfd != nil {
			err = pidfd.Close()
		}
		return errors.Join(fmt.Errorf("sidecar: client process %d: %w", pid, refused), err)
	}
	if pidfd != nil {
		var watching sync.WaitGroup
		watching.Go(func() { c.watch(pidfd) })
		defer watching.Wait()
		defer pidfd.Close()
	}
	err = c.serve()
	s.departed(c, err)
	c.node.end()
	s.mu.Lock()
	s.client = nil
	s.mu.Unlock()
	close(c.gone)
	if errors.Is(err, errBye) || errors.Is(err, errEnd) && s.Death() == nil {
		return nil
	}
	return fmt.Errorf("sidecar: client process %d: %w", pid, err)
}

// admit sends the greeting to c and makes c the client. It returns an error if there is another client. If
// the connection of that one has ended, admit first waits until it is no longer the client.
func (s *Server) admit(c *conn) error {
	timeout := time.NewTimer(s.cfg.HelloTimeout)
	defer timeout.Stop()
	for {
		s.mu.Lock()
		old := s.client
		waits := old != nil && !s.closed && s.death == nil && old.hungUp()
		if !waits {
			defer s.mu.Unlock()
			// c becomes the client after the greeting was sent, so that it receives no notice before.
			c.out.Put(dial.Greeting(wire.Magic, wire.Version), -1)
			switch {
			case s.closed:
				return errEnding
			case s.death != nil:
				return fmt.Errorf("refused: the rank has failed: %w", s.death)
			case old != nil:
				return fmt.Errorf("refused: process %d is connected, and a sidecar has one client at a time", old.pid)
			}
			s.client = c
			return nil
		}
		s.mu.Unlock()
		select {
		case <-old.gone:
		case <-timeout.C:
			return fmt.Errorf("refused: the connection of process %d has ended, but its operations have not", old.pid)
		}
	}
}

// departed handles the end of the connection of the client c and decides whether the rank has failed. The
// parameter why is the reason for the end. If the job is over, departed frees its resources.
func (s *Server) departed(c *conn, why error) {
	bye := errors.Is(why, errBye)
	s.mu.Lock()
	inJob, over := s.state == StateStarting || s.state == StateRunning, s.state == StateEnded
	dies := (inJob || c.node.inJob()) && s.ctx.Err() == nil && s.death == nil
	if dies {
		s.death = fmt.Errorf("client process %d ended during the job: %w", c.pid, why)
		close(s.dead)
	}
	s.mu.Unlock()
	switch {
	case dies:
		s.log.Error("the rank has failed", zap.Error(s.Death()))
	case !bye && s.ctx.Err() == nil:
		s.log.Warn("the client has ended without Bye", zap.Int("pid", c.pid), zap.Error(why))
	}
	if over {
		s.tidy()
	}
}

// tidy frees the resources of a job that is over, unless a Shutdown has freed them already. It is called when
// there is no client that could send Shutdown.
func (s *Server) tidy() {
	if s.change() != nil {
		return
	}
	defer func() { <-s.changing }()
	if s.Report().State == StateEnded {
		// Use a context that has already ended, because no client waits for an orderly shutdown of the
		// engine.
		over, cancel := context.WithCancel(s.ctx)
		cancel()
		s.check(s.shutdown(over, "", false))
	}
}

// watch closes the connection when the client's process ends. Without it, the connection would stay open if
// other processes have inherited the socket.
func (c *conn) watch(pidfd *os.File) {
	raw, err := pidfd.SyscallConn()
	if err == nil {
		err = raw.Read(func(fd uintptr) bool {
			fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			n, err := unix.Poll(fds, 0)
			return err == nil && n > 0
		})
	}
	// If err is not nil, the pidfd was closed, because the connection has ended.
	if err == nil {
		c.disconnect(errors.New("the client's process exited"))
	}
}

// accept authenticates a new client and reads its greeting. It returns the socket in blocking mode, the
// process ID of the client, and a pidfd of the client's process. It closes conn. The caller must send the
// greeting of the sidecar.
func (s *Server) accept(conn *net.UnixConn) (fd, pid int, pidfd *os.File, err error) {
	defer conn.Close()
	stop := context.AfterFunc(s.ctx, func() { conn.Close() })
	defer stop()
	fail := func(err error) (int, int, *os.File, error) {
		if pidfd != nil {
			err = errors.Join(err, pidfd.Close())
		}
		return -1, pid, nil, fmt.Errorf("sidecar: client process %d: %w", pid, err)
	}
	if pid, pidfd, err = peer(conn); err != nil {
		return fail(err)
	}
	if err := conn.SetDeadline(time.Now().Add(s.cfg.HelloTimeout)); err != nil {
		return fail(err)
	}
	got, err := dial.ReadGreeting(conn, wire.Magic)
	if err != nil {
		return fail(err)
	}
	if got != wire.Version {
		_, err := conn.Write(dial.Greeting(wire.Magic, wire.Version))
		return fail(errors.Join(fmt.Errorf("got protocol version %d, want %d", got, wire.Version), err))
	}
	if fd, err = rawSocket(conn); err != nil {
		return fail(err)
	}
	return fd, pid, pidfd, nil
}

// peer returns the process ID and a pidfd of the process at the other end of conn. If this process belongs to
// another user, peer returns an error. If the kernel does not support pidfds, pidfd is nil.
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
			failed = fmt.Errorf("refused: the client runs as user %d, want %d", cred.Uid, os.Geteuid())
			return
		}
		pidfd, failed = openPidfd(int(fd), pid)
	})
	return pid, pidfd, errors.Join(err, failed)
}

// openPidfd returns a pidfd for the process at the other end of the socket fd. If the kernel supports no
// pidfds, it returns nil. If the kernel can return the pidfd from the socket, openPidfd uses that one,
// because it is correct even if the process ID pid was reused.
func openPidfd(fd, pid int) (*os.File, error) {
	p, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PEERPIDFD)
	if err == unix.ENOPROTOOPT { // the kernel is older than Linux 6.5
		p, err = unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	}
	switch {
	case err == unix.ENOSYS || err == unix.EPERM || err == unix.EINVAL && pid == 0:
		// Without a pidfd, the sidecar notices the end of the process only by the end of the connection.
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("open a pidfd of the client: %w", err)
	}
	if err := unix.SetNonblock(p, true); err != nil {
		return nil, errors.Join(err, unix.Close(p))
	}
	return os.NewFile(uintptr(p), "pidfd"), nil
}

// rawSocket returns a descriptor for the socket of conn in blocking mode, and closes conn.
func rawSocket(conn *net.UnixConn) (int, error) {
	control, err := conn.SyscallConn()
	if err != nil {
		return -1, err
	}
	fd, failed := -1, error(nil)
	err = control.Control(func(of uintptr) { fd, failed = unix.FcntlInt(of, unix.F_DUPFD_CLOEXEC, 0) })
	if err = errors.Join(err, failed); err != nil {
		return -1, err
	}
	// conn and fd share the blocking mode. So conn is closed, which removes the socket from Go's poller,
	// before the mode is changed.
	if err := errors.Join(conn.Close(), unix.SetNonblock(fd, false)); err != nil {
		return -1, errors.Join(err, unix.Close(fd))
	}
	return fd, nil
}

// request handles a request that may take a long time: it starts a goroutine, which sends the answer later.
func (s *Server) request(c *conn, q *sidecarpb.Request) {
	var do func() (*sidecarpb.Reply, error)
	switch what := q.What.(type) {
	case *sidecarpb.Request_Init:
		do = func() (*sidecarpb.Reply, error) { return s.init(what.Init) }
	case *sidecarpb.Request_NewUniqueId:
		do = func() (*sidecarpb.Reply, error) { return s.newID(what.NewUniqueId) }
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

// change acquires the lock changing. It returns an error if the Server is closing.
func (s *Server) change() error {
	select {
	case s.changing <- struct{}{}:
	case <-s.ctx.Done():
		return errEnding
	}
	// If both cases of the select were ready, it may have chosen changing although ctx had ended.
	if s.ctx.Err() != nil {
		<-s.changing
		return errEnding
	}
	return nil
}

// init starts the rank. It returns the rank's place in the job.
func (s *Server) init(q *sidecarpb.Init) (*sidecarpb.Reply, error) {
	if err := s.change(); err != nil {
		return nil, err
	}
	defer func() { <-s.changing }()
	if s.current() != nil {
		return nil, usage("init", "", errors.New("this rank is in a job, or has not sent Shutdown after the last one"))
	}
	s.setState(StateStarting, nil)
	r := new(rank.Rank)
	if err := r.Start(s.ctx, s.options(q)); err != nil {
		s.setState(StateIdle, nil)
		return nil, err
	}
	s.last = r.Epoch
	s.setState(StateRunning, r)
	ready := &sidecarpb.Ready{
		Rank: int32(r.Place.Rank), Size: int32(r.Place.Size), LocalRank: int32(r.Place.LocalRank),
		LocalSize: int32(r.Place.LocalSize),
		CrossRank: int32(r.Place.CrossRank), CrossSize: int32(r.Place.CrossSize), Epoch: r.Epoch,
		Homogeneous: r.Homogeneous,
	}
	for _, set := range r.Sets()[1:] {
		ready.ProcessSets = append(ready.ProcessSets, describeSet(set))
	}
	return &sidecarpb.Reply{What: &sidecarpb.Reply_Ready{Ready: ready}}, nil
}

// newID makes a unique id and serves the store of the id until 30 s after all ranks have met, or until the
// Server ends.
func (s *Server) newID(q *sidecarpb.NewUniqueID) (*sidecarpb.Reply, error) {
	o := s.withSettings(q.GetSettings())
	id, served, err := o.NewID(s.ctx)
	if err != nil {
		return nil, err
	}
	s.wg.Go(func() { <-served })
	made := &sidecarpb.UniqueID{Text: id.String()}
	return &sidecarpb.Reply{What: &sidecarpb.Reply_UniqueId{UniqueId: made}}, nil
}

// withSettings returns the options of the configuration plus the settings of a client.
func (s *Server) withSettings(settings map[string]string) rank.Options {
	o := s.cfg.Options
	o.Settings = maps.Clone(o.Settings)
	if o.Settings == nil {
		o.Settings = make(map[string]string)
	}
	maps.Copy(o.Settings, settings)
	return o
}

// options returns the options for an Init: the options of the configuration plus the settings and process
// sets of the client.
func (s *Server) options(q *sidecarpb.Init) rank.Options {
	o := s.withSettings(q.GetSettings())
	o.ForClient, o.Kept, o.LastEpoch = true, &s.met, s.last
	o.Sets = slices.Clone(o.Sets)
	for _, set := range q.GetProcessSets() {
		o.Sets = append(o.Sets, ints(set.GetRanks()))
	}
	return o
}

// current returns the rank, or nil if there is none.
func (s *Server) current() *rank.Rank {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rank
}

// setState sets the state to state and the rank to r. If r is not nil, setState starts a goroutine that waits
// for the end of the job and then notifies the client.
func (s *Server) setState(state string, r *rank.Rank) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.state, s.rank = state, r
	if r == nil {
		s.running.Store(nil)
		return
	}
	run := runner(rankRunner{r})
	s.running.Store(&run)
	over := make(chan struct{})
	s.over = over
	s.wg.Go(func() {
		defer close(over)
		<-r.Engine.Ended()
		s.ended(r.Engine.Err())
	})
}

// ended notifies the client that the job is over, with the reason in why.
func (s *Server) ended(why error) {
	ended := new(sidecarpb.Ended)
	if why != nil {
		ended.Error = wire.Describe(why)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.state = StateEnded
	if s.client != nil {
		s.client.reply(&sidecarpb.Reply{What: &sidecarpb.Reply_Ended{Ended: ended}}, -1)
	}
}

// end handles a Shutdown request.
func (s *Server) end(q *sidecarpb.Shutdown) error {
	if r := s.current(); r != nil && q.GetFailed() {
		// The error is that of the shutdown below. A Shutdown in progress holds changing until this call.
		_ = r.Fail(engine.Departure{Reason: q.GetReason(), Failed: true})
	}
	if err := s.change(); err != nil {
		return err
	}
	defer func() { <-s.changing }()
	return s.shutdown(s.ctx, q.GetReason(), q.GetFailed())
}

// shutdown shuts down the engine, if there is one. The caller holds changing.
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

// begin starts the operation o on the rank. It returns an error if there is no rank.
func (s *Server) begin(o *operation) error {
	r := s.running.Load()
	if r == nil {
		return o.plan.Misuse("%w", rank.ErrNotInitialized)
	}
	return (*r).Begin(o)
}

// addSet adds a process set to the job. It returns when all ranks, or with members_only all members, have
// added the set.
func (s *Server) addSet(q *sidecarpb.AddProcessSet) (*sidecarpb.Reply, error) {
	r := s.current()
	if r == nil {
		return nil, usage(message.AddProcessSet.String(), "", rank.ErrNotInitialized)
	}
	set, err := r.AddSetNow(ints(q.GetRanks()), q.GetMembersOnly(), q.GetName(), q.GetTimeoutSeconds())
	if err != nil {
		return nil, err
	}
	return &sidecarpb.Reply{What: &sidecarpb.Reply_ProcessSet{ProcessSet: describeSet(set)}}, nil
}

// removeSet removes a process set from the job. It returns when all ranks, or all members of a set that only
// they have added, have removed the set.
func (s *Server) removeSet(q *sidecarpb.RemoveProcessSet) error {
	r := s.current()
	if r == nil {
		return usage(message.RemoveProcessSet.String(), "", rank.ErrNotInitialized)
	}
	return r.RemoveSetNow(int(q.GetId()), q.GetTimeoutSeconds())
}

// startTimeline starts to write the timeline to the path that the client has sent. It does not check
// permissions, because the client runs as the same user as the sidecar and can write to the same files.
func (s *Server) startTimeline(q *sidecarpb.StartTimeline) error {
	r, path := s.current(), q.GetPath()
	switch {
	case r == nil:
		return rank.ErrNotInitialized
	case len(path) > maxPathBytes:
		return fmt.Errorf("got a path of %d bytes, want at most %d", len(path), maxPathBytes)
	// A relative path is refused, because the sidecar does not know the client's working directory.
	case !filepath.IsAbs(path):
		return fmt.Errorf("got path %q, want an absolute path", path)
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

// Report describes a Server.
type Report struct {
	Version    string `json:"version"`
	PID        int    `json:"pid"`
	State      string `json:"state"`
	Connected  bool   `json:"connected"`  // there is a client
	Operations uint64 `json:"operations"` // number of operations completed so far
	InFlight   int64  `json:"in_flight"`
}

// Report describes s.
func (s *Server) Report() Report {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := Report{Version: s.cfg.Version, PID: os.Getpid(), State: s.state, Connected: s.client != nil,
		Operations: s.operations.Load()}
	if s.client != nil {
		r.InFlight = s.client.inFlight.Load()
	}
	return r
}

// check logs err, an error from releasing resources, unless it is nil. Such errors are not expected, and they
// affect only this process.
func (s *Server) check(err error) {
	if err != nil {
		s.log.Error("cannot release resources that are no longer used", zap.Error(err))
	}
}
