// Package tcp connects ranks over TCP.
//
// A rank opens one Endpoint, makes its address known, and calls Connect once it knows the epoch and the
// addresses of all ranks. Connections are made when they are first asked for, one per lane and peer: of two
// ranks the lower dials. An Endpoint serves one epoch; the next needs a new one.
//
// A connection starts with the proof of the job's secret, if it has one, and a handshake of fixed size, which
// keeps out other jobs and other epochs that come by mistake. Without a secret whoever can reach the listener
// and knows the job can join. What fails is logged, answered if it spoke our protocol, and closed; nothing else
// notices. Afterwards a connection carries the caller's bytes alone: as they are, or in TLS if the secret is
// encrypted.
package tcp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/logs"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

const (
	// maxJobBytes is the longest job identity.
	maxJobBytes = 64
	// maxHandshakes is how many accepted connections may have yet to say who they are; one more, and the oldest is closed.
	// As many may wait for this rank to join its epoch; more are closed. The dialers of both take it for a passing failure.
	maxHandshakes = 256
	// firstPause and lastPause bound the doubling pauses between attempts to dial, and to accept.
	firstPause = 5 * time.Millisecond
	lastPause  = 500 * time.Millisecond
)

// Config says how an Endpoint behaves. Zero fields take their defaults.
type Config struct {
	// ListenAddr is the host and port to listen on. Without a host it is every interface; port 0 takes a
	// free one.
	ListenAddr string
	// DialTimeout is how long a peer may take to become reachable, from the first Conn that asks for it.
	// Default 30 s.
	DialTimeout time.Duration
	// HandshakeTimeout is how long an accepted connection may take to say its hello and, if it came early,
	// wait for Connect. Default 10 s. It should be the same on all ranks: who dials waits twice as long for
	// the answer, lest the one side give up a connection that the other just accepted.
	HandshakeTimeout time.Duration
	// LingerTimeout is how long a connection of a lane that this rank released may wait for the peer to release
	// it too. Default 30 s. What was sent still arrives when it has passed, unless the peer goes on sending.
	LingerTimeout time.Duration
	// Secret is that of the job, which both ends of a connection prove to each other. Zero is none. One that is
	// encrypted costs the processor for every byte and, because TLS has no write that does not wait, a goroutine's
	// waking for every message.
	Secret secret.Secret
	// Log receives refused connections (warnings) and attempts to dial (debug). nil discards them.
	Log *zap.Logger
}

// Epoch is one formation of a job, as rendezvous agreed on it.
type Epoch struct {
	// Job is the identity of the job, 1 to 64 bytes that mean nothing to this package.
	Job string
	// Epoch is greater than that of any earlier formation of the job.
	Epoch uint64
	// Rank is this rank.
	Rank topo.Rank
	// Addrs are the addresses of all ranks, in rank order. A rank's own is not used. Those of ranks to which there is no channel before
	// Mesh.Learn may be empty.
	Addrs []string
}

func (ep *Epoch) validate() error {
	if len(ep.Job) < 1 || len(ep.Job) > maxJobBytes {
		return fmt.Errorf("tcp: connect: job identity has %d bytes, want 1 to %d", len(ep.Job), maxJobBytes)
	}
	if ep.Rank < 0 || int(ep.Rank) >= len(ep.Addrs) {
		return fmt.Errorf("tcp: connect: rank is %d, want 0 to %d", ep.Rank, len(ep.Addrs)-1)
	}
	return checkAddrs(ep.Addrs, ep.Rank, true)
}

func checkAddrs(addrs []string, own topo.Rank, unknown bool) error {
	for r, addr := range addrs {
		if r == int(own) || addr == "" && unknown {
			continue
		}
		if _, _, err := net.SplitHostPort(addr); err != nil {
			return fmt.Errorf("tcp: connect: address of rank %d: %w", r, err)
		}
	}
	return nil
}

// Endpoint is a listener that becomes a Mesh when Connect tells it the epoch.
type Endpoint struct {
	cfg Config
	log *zap.Logger
	ln  net.Listener

	ctx       context.Context // ends when Close begins
	cancel    context.CancelFunc
	connected chan struct{} // closed by Connect
	refused   *zap.Logger   // as log
	limiter   *dial.Limiter
	slots     chan struct{} // holds a token per accepted connection that has said who it is and has no channel yet
	wg        sync.WaitGroup

	// mu is held before a conn's mu, never after.
	mu     sync.Mutex
	closed bool
	mesh   *Mesh
	loose  map[net.Conn]struct{} // connections that are no channel yet (in their handshake), or no longer (released)
}

// Listen opens an Endpoint. Connections that arrive before Connect are held until it is called, for at most
// the handshake's timeout.
func Listen(cfg Config) (*Endpoint, error) {
	// Keepalive and TCP_NODELAY are on by default. Multipath is too, for listeners, and is of no use here: no
	// dialer asks for it.
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	ln, err := lc.Listen(context.Background(), "tcp", cfg.ListenAddr)
	if err != nil {
		return nil, fmt.Errorf("tcp: listen: %w", err)
	}
	return newEndpoint(cfg, ln), nil
}

func newEndpoint(cfg Config, ln net.Listener) *Endpoint {
	cfg.DialTimeout = cmp.Or(cfg.DialTimeout, 30*time.Second)
	cfg.HandshakeTimeout = cmp.Or(cfg.HandshakeTimeout, 10*time.Second)
	cfg.LingerTimeout = cmp.Or(cfg.LingerTimeout, 30*time.Second)
	e := &Endpoint{
		cfg:       cfg,
		log:       cmp.Or(cfg.Log, zap.NewNop()),
		ln:        ln,
		connected: make(chan struct{}),
		limiter:   dial.NewLimiter(maxHandshakes),
		slots:     make(chan struct{}, maxHandshakes),
		loose:     make(map[net.Conn]struct{}),
	}
	e.refused = logs.Quiet(e.log)
	e.ctx, e.cancel = context.WithCancel(context.Background())
	e.wg.Go(e.accept)
	return e
}

// Addr is the address that the Endpoint listens on, with the port it got. If it listens on every interface
// the host is unspecified, and callers must put in one that their peers can reach.
func (e *Endpoint) Addr() string { return e.ln.Addr().String() }

// Connect makes the Endpoint this rank's end of the epoch. It returns at once: connections are made by the
// Mesh when they are asked for. It may succeed once.
func (e *Endpoint) Connect(ep Epoch) (*Mesh, error) {
	if err := ep.validate(); err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil, transport.ErrClosed
	}
	if e.mesh != nil {
		return nil, fmt.Errorf("tcp: connect: endpoint already serves epoch %d, got epoch %d", e.mesh.epoch, ep.Epoch)
	}
	poller, err := newPoller()
	if err != nil {
		return nil, err
	}
	e.wg.Go(poller.watch)
	e.mesh = &Mesh{
		e:     e,
		poll:  poller,
		job:   hashJob(ep.Job),
		epoch: ep.Epoch,
		rank:  ep.Rank,
		addrs: slices.Clone(ep.Addrs),
		lanes: make(map[transport.Lane]*lane),
	}
	// All ranks may dial this one at once.
	e.limiter.Grow(2 * len(ep.Addrs))
	close(e.connected)
	return e.mesh, nil
}

// Close closes the listener and the Mesh, if there is one, and waits for all goroutines.
func (e *Endpoint) Close() error {
	e.mu.Lock()
	first := !e.closed
	e.closed = true
	if first {
		e.cancel()
		for nc := range e.loose {
			hangUp(nc)
		}
		if e.mesh != nil {
			e.mesh.closeConns()
		}
	}
	e.mu.Unlock()

	var err error
	if first {
		if err = e.ln.Close(); err != nil {
			err = fmt.Errorf("tcp: close: %w", err)
		}
		if e.mesh != nil {
			err = errors.Join(err, e.mesh.poll.close())
		}
	}
	e.wg.Wait()
	return err
}

// accept runs until the listener is closed. Other failures pass (out of file descriptors, a connection reset
// before it was accepted); it pauses after each, lest it spin. Those who wait for a connection hear at once that there is no descriptor
// for it.
func (e *Endpoint) accept() {
	pause := firstPause
	for {
		nc, err := e.ln.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			if dial.IsExhausted(err) {
				e.starve(dial.ExplainLimit(fmt.Errorf("tcp: accept: %w", err)))
			}
			e.log.Warn("tcp: accept failed", zap.Error(err), zap.Duration("pause", pause))
			select {
			case <-e.ctx.Done():
				return
			case <-time.After(pause):
			}
			pause = min(2*pause, lastPause)
			continue
		}
		pause = firstPause
		s, err := newSocket(nc)
		if err != nil {
			e.logRefused(nc, err)
			continue
		}
		e.wg.Go(func() { e.receive(s) })
	}
}

// starve fails those who wait for a peer that dials. A later Conn waits afresh.
func (e *Endpoint) starve(err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.mesh == nil {
		return
	}
	for _, l := range e.mesh.lanes {
		for peer := range l.waits {
			if peer < e.mesh.rank {
				l.finish(peer, nil, err)
			}
		}
	}
}

// receive makes an accepted connection a channel, or logs why not and closes it.
func (e *Endpoint) receive(nc *socket) {
	if !e.track(nc) {
		hangUp(nc)
		return
	}
	if err := e.handshake(nc); err != nil {
		e.untrack(nc)
		e.logRefused(nc, err)
		hangUp(nc)
	}
}

// handshake is the accepting side's.
func (e *Endpoint) handshake(nc *socket) error {
	deadline := time.Now().Add(e.cfg.HandshakeTimeout)
	if err := nc.SetDeadline(deadline); err != nil {
		return fmt.Errorf("tcp: handshake: %w", err)
	}
	slot := e.limiter.Acquire(nc)
	over, h, err := e.meet(nc)
	if !slot.Release() {
		return fmt.Errorf("tcp: handshake: %w", dial.ErrEvicted)
	}
	if err != nil {
		return err
	}
	select {
	case e.slots <- struct{}{}:
		defer func() { <-e.slots }()
	default:
		return fmt.Errorf("tcp: %d handshakes are under way", maxHandshakes)
	}
	if h.version != version {
		return refuse(over, fmt.Errorf("%w: got %d, want %d", WrongVersion, h.version, version))
	}
	m, err := e.awaitConnect(deadline)
	if err != nil {
		return err
	}
	l, err := m.reserve(h)
	if err != nil {
		return refuse(over, err)
	}
	if err := e.welcome(m, l, h.from, nc, over); err != nil {
		m.unreserve(l, h.from)
		return err
	}
	return nil
}

// meet has the dialer prove the secret and say who it is.
func (e *Endpoint) meet(nc net.Conn) (over net.Conn, h hello, err error) {
	if over, err = seal(e.cfg.Secret, nc, secret.Secret.Accept); err != nil {
		return nil, h, fmt.Errorf("tcp: handshake: %w", err)
	}
	h, err = readHello(over)
	return over, h, err
}

// welcome answers a hello that has its channel reserved, and publishes the channel. nc and over are as for newConn.
func (e *Endpoint) welcome(m *Mesh, l *lane, peer topo.Rank, nc *socket, over net.Conn) error {
	if err := answer(over, accepted); err != nil {
		return err
	}
	c := newConn(&e.wg, l.id, peer, nc, over)
	// Before the channel is public: from then on the deadline is Abort's.
	if err := nc.SetDeadline(time.Time{}); err != nil {
		return fmt.Errorf("tcp: handshake: %w", err)
	}
	return m.publish(l, c)
}

// refuse answers a hello with the Refusal in reason, and returns reason.
func refuse(nc net.Conn, reason error) error {
	var r Refusal
	if !errors.As(reason, &r) {
		panic("tcp: refused without a refusal: " + reason.Error())
	}
	if err := answer(nc, r); err != nil {
		return fmt.Errorf("%w; the peer could not be told: %w", reason, err)
	}
	return reason
}

func answer(nc net.Conn, r Refusal) error {
	if _, err := nc.Write(encodeAnswer(r)); err != nil {
		return fmt.Errorf("tcp: answer to hello: %w", err)
	}
	return nil
}

// awaitConnect returns the Mesh once there is one.
func (e *Endpoint) awaitConnect(deadline time.Time) (*Mesh, error) {
	expired := time.NewTimer(time.Until(deadline))
	defer expired.Stop()
	select {
	case <-e.connected:
		return e.mesh, nil // set before connected was closed, and never again
	case <-e.ctx.Done():
		return nil, transport.ErrClosed
	case <-expired.C:
		return nil, fmt.Errorf("tcp: handshake: this rank did not join an epoch within %v", e.cfg.HandshakeTimeout)
	}
}

// track lets Close find a connection that is no channel. It reports false if Close was first.
func (e *Endpoint) track(nc net.Conn) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return false
	}
	e.loose[nc] = struct{}{}
	return true
}

func (e *Endpoint) untrack(nc net.Conn) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.loose, nc)
}

func (e *Endpoint) logRefused(nc net.Conn, reason error) {
	if e.ctx.Err() != nil {
		return // not refused: we are closing
	}
	e.refused.Warn("tcp: connection refused", zap.Stringer("remote", nc.RemoteAddr()), zap.Error(reason))
}

// hangUp closes a connection of which nothing is expected any more; that it fails to close changes nothing.
func hangUp(nc net.Conn) { _ = nc.Close() }
