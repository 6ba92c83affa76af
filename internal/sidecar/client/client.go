// Package client is the client of a sidecar. It submits the operations of this process to an engine in
// another process. It implements rank.Remote, so that a rank.Rank and its operations are used in the same way
// as if the engine were in this process. docs/sidecar.md describes the protocol.
//
// Invariants:
//
//  1. A thread that waits for an operation sleeps until the state of this operation in the ring changes. The
//     goroutine read only reads answers. When the connection ends, read ends all operations and requests.
//  2. read never waits for room in the socket, because a sidecar whose answers are not read does not read
//     either. Frames that read sends go through sendLater.
//  3. The memory of a tensor is used only between the submission and the end of its operation. Results that
//     are in other memory for the sidecar are copied before Done is called.
package client

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/internal/sidecar/wire"
)

const (
	// helloTimeout is the limit of the exchange of greetings.
	helloTimeout = 30 * time.Second
	// Spawn is the value of HVD_SIDECAR with which the client starts a sidecar.
	Spawn = "spawn"
	// addressPrefix begins the address of a sidecar that already runs.
	addressPrefix = "unix://"
)

// DeadError reports that the connection to the sidecar has ended, or that there was none.
type DeadError struct {
	// Text names the sidecar and says why.
	Text string
}

func (e *DeadError) Error() string { return "hvd: " + e.Text }

// Config says which sidecar a client uses.
type Config struct {
	// Address is unix:///path, or Spawn.
	Address string
	// Binary is the path of hvdd, or "". Near has the folders in which hvdd is looked for otherwise, before
	// PATH. They are used only with Spawn.
	Binary string
	Near   []string
	// Environ is the environment of the program, in the form of os.Environ.
	Environ []string
}

// Client is a connection to a sidecar. Its methods are safe for concurrent use.
type Client struct {
	conn   *net.UnixConn // only until greetings were exchanged
	fd     int           // of the socket afterwards
	listed *os.File      // see list
	name   string        // of the sidecar, in errors
	child  *child        // nil if the client has not started the sidecar
	began  map[string]string
	ring   *ring
	memory memory
	// using is read-locked by callers that use the ring or staged memory. Close locks it before it unmaps
	// them.
	using sync.RWMutex

	writing sync.Mutex             // held while a frame is written
	reason  atomic.Pointer[string] // why the connection is ending
	later   later
	running sync.WaitGroup // the goroutines of the client
	ended   chan struct{}  // closed when all operations have ended after the end of the connection

	maps map[uint32]*shmem.Segment // the arenas of the sidecar; only read uses it
	me   atomic.Int64              // this rank

	mu       sync.Mutex
	over     error // why the connection has ended, or nil
	lastID   uint64
	requests map[uint64]func(*sidecarpb.Reply, error)
	job      *job // nil outside of a job
	calls    calls
	plans    plans
	closed   bool
}

// newClient returns a Client without a connection.
func newClient(environ []string) (c *Client, err error) {
	c = &Client{began: settings(environ), requests: make(map[uint64]func(*sidecarpb.Reply, error)),
		lastID: firstRequest, ended: make(chan struct{}), maps: make(map[uint32]*shmem.Segment)}
	c.calls.init()
	c.plans.init()
	c.later.wake = make(chan struct{}, 1)
	c.ring, err = newRing()
	return c, err
}

// Open connects to a sidecar or starts one.
func Open(ctx context.Context, cfg Config) (*Client, error) {
	c, err := newClient(cfg.Environ)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	if err := c.connect(ctx, &cfg); err != nil {
		return nil, errors.Join(err, c.ring.segment.Close(), c.child.end())
	}
	c.memory.watch(c)
	c.running.Go(c.read)
	c.running.Go(c.sendQueued)
	if err := c.sendRing(ctx); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// connect sets conn to a connection on which greetings were exchanged.
func (c *Client) connect(ctx context.Context, cfg *Config) (err error) {
	switch path, unixSocket := strings.CutPrefix(cfg.Address, addressPrefix); {
	case cfg.Address == Spawn:
		if c.child, c.conn, err = start(cfg); err != nil {
			return &DeadError{err.Error()}
		}
		c.name = fmt.Sprintf("the sidecar of this process (hvdd, process %d)", c.child.cmd.Process.Pid)
	case !unixSocket || path == "":
		return fmt.Errorf("HVD_SIDECAR is %q, want unix:///path or %s", cfg.Address, Spawn)
	default:
		c.name = "the sidecar at " + cfg.Address
		conn, err := new(net.Dialer).DialContext(ctx, "unix", path)
		if err != nil {
			return &DeadError{fmt.Sprintf("cannot connect to %s: %v", c.name, err)}
		}
		c.conn = conn.(*net.UnixConn)
	}
	stop := context.AfterFunc(ctx, func() { _ = c.conn.SetDeadline(time.Unix(1, 0)) })
	if err := c.greet(); err != nil {
		stop()
		if ctx.Err() == context.Canceled {
			err = ctx.Err()
		}
		text := c.name + ": " + err.Error()
		if c.child != nil {
			text = c.child.describe(c.name, err.Error())
		}
		return errors.Join(&DeadError{text}, c.conn.Close())
	}
	if !stop() {
		return errors.Join(&DeadError{c.name + ": the exchange of greetings was interrupted"}, c.conn.Close())
	}
	// Go's poller would be woken each time the sidecar reads a doorbell, because the socket has more room
	// then. A thread that polls the socket only for data is not.
	if c.fd, err = dial.RawSocket(c.conn); err != nil {
		return err
	}
	if c.listed, err = list(c.fd); err != nil {
		err = errors.Join(err, unix.Close(c.fd))
	}
	return err
}

// list puts a socket into an epoll instance that reports only its end, and puts that into Go's poller. There
// libgohvd finds the sockets that a forked child closes.
func list(fd int) (*os.File, error) {
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, err
	}
	if err = unix.EpollCtl(epoll, unix.EPOLL_CTL_ADD, fd, new(unix.EpollEvent)); err == nil {
		err = unix.SetNonblock(epoll, true) // package os puts only such files into Go's poller
	}
	if err != nil {
		return nil, errors.Join(err, unix.Close(epoll))
	}
	return os.NewFile(uintptr(epoll), "epoll"), nil
}

// greet checks who listens, and exchanges greetings.
func (c *Client) greet() error {
	if c.child == nil {
		// Another user may have taken the path. The sidecar sees all tensors.
		if err := dial.CheckUserOrRoot(c.conn); err != nil {
			return err
		}
	}
	if _, err := c.conn.Write(dial.Greeting(wire.Magic, wire.Version)); err != nil {
		return fmt.Errorf("it did not take the greeting: %w", err)
	}
	switch got, err := dial.ReadGreeting(c.conn, wire.Magic); {
	case err != nil:
		return fmt.Errorf("it did not answer the greeting: %w", err)
	case got != wire.Version:
		return fmt.Errorf("got protocol version %d, want %d: use hvdd and this library of the same version", got,
			wire.Version)
	}
	return nil
}

func (c *Client) sendRing(ctx context.Context) error {
	fd, err := unix.FcntlInt(uintptr(c.ring.segment.FD()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return err
	}
	_, err = c.request(ctx, &sidecarpb.Request{What: &sidecarpb.Request_Ring{
		Ring: &sidecarpb.Ring{Bytes: uint64(len(c.ring.bytes))}}}, fd)
	return err
}

// Close closes the connection. A sidecar that the client has started then exits, and Close waits for its
// exit. The rank of the sidecar fails if it is in a job. A further call does nothing.
func (c *Client) Close() error {
	c.mu.Lock()
	closed := c.closed
	c.closed = true
	c.mu.Unlock()
	if closed {
		return nil
	}
	// The error means that the connection has ended already.
	_ = c.send(&sidecarpb.Request{What: &sidecarpb.Request_Bye{Bye: new(sidecarpb.Bye)}}, -1, nil)
	c.fail("this process has closed the connection")
	c.running.Wait()
	// The end of the connection has woken all waiters.
	c.using.Lock()
	defer c.using.Unlock()
	errs := []error{c.listed.Close(), unix.Close(c.fd), c.memory.close(), c.ring.segment.Close(),
		c.child.end()}
	for _, s := range c.maps {
		errs = append(errs, s.Close())
	}
	return errors.Join(errs...)
}

// Pid returns the process ID of the sidecar if the client has started it, and otherwise 0.
func (c *Client) Pid() int {
	if c.child == nil {
		return 0
	}
	return c.child.cmd.Process.Pid
}

// Check returns why the connection or the job has ended, or nil. If the job was shut down in order, it
// returns engine.ErrShutDown.
func (c *Client) Check() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.over != nil:
		return c.over
	case c.job == nil:
		return rank.ErrNotInitialized
	case c.job.ended && c.job.why == nil:
		return engine.ErrShutDown
	}
	return c.job.why
}

// Ending reports whether the connection has ended, or is about to. After that, only Close is of use.
func (c *Client) Ending() bool { return c.reason.Load() != nil || c.Over() != nil }

// Over returns why the connection has ended, or nil.
func (c *Client) Over() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.over
}

// fail ends the connection. The first call determines the reason.
func (c *Client) fail(reason string) {
	c.reason.CompareAndSwap(nil, &reason)
	c.shut()
}

// shut makes read return. An error means that the connection has ended already.
func (c *Client) shut() { _ = unix.Shutdown(c.fd, unix.SHUT_RDWR) }

// end ends all operations and requests, after the connection has ended because of err.
func (c *Client) end(err error) {
	c.fail(err.Error())
	reason := *c.reason.Load()
	c.mu.Lock()
	closed := c.closed
	c.mu.Unlock()
	text := c.name + ": " + reason
	if c.child != nil && !closed {
		text = c.child.describe(c.name, reason)
	}
	c.mu.Lock()
	c.over = &DeadError{text}
	requests := c.requests
	c.requests = nil
	c.mu.Unlock()
	for _, answer := range requests {
		answer(nil, c.over)
	}
	c.calls.each(func(k *call) { c.finish(k, nil, c.over) })
	close(c.ended)
	c.ring.changed()
	c.later.close()
}
