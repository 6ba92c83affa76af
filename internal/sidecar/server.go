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
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/bootstrap"
	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/internal/sidecar/wire"
)

// helloTimeout is the default of Config.HelloTimeout.
const helloTimeout = 30 * time.Second

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
	fd, pid, pidfd, err := accept(s.ctx, conn, s.cfg.HelloTimeout)
	if err != nil {
		return err
	}
	// This deferred call runs last, when nothing else uses the descriptor any more.
	defer func() { _ = unix.Close(fd) }()
	c := newConn(s, fd, pid)
	if refused := s.admit(c); refused != nil {
		c.reply(&sidecarpb.Reply{Error: wire.Describe(refused)})
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
