// Package tcp connects ranks over TCP.
//
// A rank opens an Endpoint and publishes its address. When it knows the epoch and the addresses of all ranks,
// it calls Connect. A lane has one connection to each peer, which is made when it is first requested. The
// lower of the two ranks dials. An Endpoint serves one epoch, and the next epoch needs a new Endpoint.
//
// If the job has a secret, a connection starts with the proof of the secret. After that, a handshake of fixed
// size refuses connections that come by mistake from other jobs or other epochs. Without a secret, any
// process that can reach the listener and knows the job's identity can join. If a handshake fails, the
// Endpoint logs the reason and closes the connection. If the peer uses this protocol, the Endpoint first
// sends an answer. Other connections are not affected. After the handshake a connection carries only the
// bytes of the caller, in TLS if the secret is encrypted and in plain text if not.
package tcp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
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
	// maxJobBytes is the maximum length of a job's identity.
	maxJobBytes = 64
	// maxHandshakes is the maximum number of accepted connections that have not sent their hello yet. If
	// there are more, the oldest is closed. The same number of connections may wait for this rank to join its
	// epoch. Any further connection is closed. In both cases the dialer retries.
	maxHandshakes = 256
	// firstPause is the pause after the first failed attempt to dial or to accept. The pause doubles after
	// each further failure, up to lastPause.
	firstPause = 5 * time.Millisecond
	lastPause  = 500 * time.Millisecond
)

// Config configures an Endpoint. If a field other than ListenAddr is zero, its default applies.
type Config struct {
	// ListenAddr is the host and port to listen on. An empty host means all interfaces, and port 0 means any
	// free port.
	ListenAddr string
	// DialTimeout is how long a rank tries to reach a higher rank, counted from its first call of Conn for
	// the channel. The default is 30 s.
	DialTimeout time.Duration
	// HandshakeTimeout is the time limit for the handshake of an accepted connection. If Connect has not been
	// called yet, the handshake waits for this call. The default is 10 s. All ranks should use the same
	// value. The dialer allows twice this time, so that it does not give up a connection that the other side
	// has just accepted, unless the other side's process did not run for long. That side then refuses the
	// closed connection.
	HandshakeTimeout time.Duration
	// LingerTimeout limits how long a connection of a released lane waits for the peer to release the lane
	// too. The default is 30 s. Bytes that this rank had sent arrive even after the timeout, unless the peer
	// continues to send.
	LingerTimeout time.Duration
	// LivenessTimeout is how long a peer's host may acknowledge nothing that was sent to it. After that, the
	// connection has failed (dial.Silence). This does not apply to the Control lane, whose owner sends
	// heartbeats. 0 means that no connection fails because of silence.
	LivenessTimeout time.Duration
	// Secret is the secret of the job. Both ends of a connection prove that they know it. Zero means that the
	// job has no secret. An encrypted secret costs processor time for every byte. It also wakes a goroutine
	// for every message, because TLS cannot write without waiting.
	Secret secret.Secret
	// Log receives warnings for refused connections and debug messages for failed attempts to dial. If it is
	// nil, they are discarded.
	Log *zap.Logger
}

// Epoch describes the epoch to connect, as the ranks agreed on it in the rendezvous.
type Epoch struct {
	// Job identifies the job. It has 1 to 64 arbitrary bytes.
	Job string
	// Epoch is the number of the epoch. It is greater than the numbers of all earlier epochs of the job.
	Epoch uint64
	// Rank is the number of this rank.
	Rank topo.Rank
	// Addrs[r] is the address of rank r. The address of this rank is not used. The address of another rank
	// may be empty if no channel to that rank is needed before Mesh.Learn is called.
	Addrs []string
}

func (ep *Epoch) validate() error {
	if len(ep.Job) < 1 || len(ep.Job) > maxJobBytes {
		return fmt.Errorf("tcp: connect: the job identity has %d bytes, want 1 to %d", len(ep.Job), maxJobBytes)
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
			return fmt.Errorf("tcp: connect: parse the address of rank %d: %w", r, err)
		}
	}
	return nil
}

// Endpoint is a listener for connections of other ranks. Connect makes a Mesh from it.
type Endpoint struct {
	cfg Config
	log *zap.Logger
	ln  net.Listener

	ctx       context.Context // cancelled when Close begins
	cancel    context.CancelFunc
	connected chan struct{} // closed by Connect
	quiet     *zap.Logger   // log for messages about single connections; it shortens floods (logs.Quiet)
	limiter   *dial.Limiter
	// slots contains a token for each connection that has sent its hello and is not a channel yet.
	slots chan struct{}
	wg    sync.WaitGroup

	// mu may be locked before the mu of a conn, but not after it.
	mu     sync.Mutex
	closed bool
	mesh   *Mesh
	// unattached contains the connections that are not channels. They are in their handshake, or their lane
	// was released.
	unattached map[net.Conn]struct{}
}

// Listen opens an Endpoint. Connections that arrive before Connect wait for it, for at most
// Config.HandshakeTimeout.
func Listen(cfg Config) (*Endpoint, error) {
	// Keepalive and TCP_NODELAY are on by default. Multipath TCP is on by default for listeners, but has no
	// effect unless dialers use it too, and ours do not.
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
		cfg:        cfg,
		log:        cmp.Or(cfg.Log, zap.NewNop()),
		ln:         ln,
		connected:  make(chan struct{}),
		limiter:    dial.NewLimiter(maxHandshakes),
		slots:      make(chan struct{}, maxHandshakes),
		unattached: make(map[net.Conn]struct{}),
	}
	e.quiet = logs.Quiet(e.log)
	e.ctx, e.cancel = context.WithCancel(context.Background())
	e.wg.Go(e.accept)
	return e
}

// Addr returns the address on which the Endpoint listens, with the actual port. If the Endpoint listens on
// all interfaces, the host is unspecified, and callers must replace it with a host that their peers can
// reach.
func (e *Endpoint) Addr() string { return e.ln.Addr().String() }

// Connect joins the epoch and returns its Mesh. It does not wait: the Mesh makes connections when they are
// requested. Only one call of Connect can succeed.
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
		return nil, fmt.Errorf("tcp: connect: got epoch %[2]d, but the endpoint already serves epoch %[1]d", e.mesh.epoch,
			ep.Epoch)
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
		size:  len(ep.Addrs),
		addrs: newAddresses(ep.Addrs),
		lanes: make(map[transport.Lane]*lane),
	}
	// Grow the limit, because all ranks may dial this rank at once.
	e.limiter.Grow(2 * len(ep.Addrs))
	close(e.connected)
	return e.mesh, nil
}

// Close closes the listener and the Mesh, if Connect has made one. It waits for all goroutines.
func (e *Endpoint) Close() error {
	e.mu.Lock()
	first := !e.closed
	e.closed = true
	if first {
		e.cancel()
		for nc := range e.unattached {
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

// accept accepts connections until the listener is closed. All other errors are temporary: this process has
// no file descriptor left, or a connection was reset before it was accepted. After each error accept pauses,
// so that it does not spin. If there is no file descriptor left, the goroutines that wait for a connection
// get that error at once.
func (e *Endpoint) accept() {
	pause := firstPause
	for {
		nc, err := e.ln.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		var s *socket
		if err == nil {
			s, err = newSocket(nc)
		}
		if err != nil {
			if dial.IsExhausted(err) {
				e.failWaits(dial.ExplainLimit(fmt.Errorf("tcp: accept: %w", err)))
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
		slot := e.limiter.Acquire(s)
		e.wg.Go(func() { e.receive(s, slot) })
		e.limiter.Settle()
	}
}

// failWaits makes the calls of Conn that wait for a peer to dial fail with err. The next call of Conn waits
// again.
func (e *Endpoint) failWaits(err error) {
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

// receive does the handshake on an accepted connection, which then becomes a channel. If the handshake fails,
// receive logs the reason and closes the connection.
func (e *Endpoint) receive(nc *socket, slot *dial.Slot) {
	if !e.track(nc) {
		slot.Release()
		hangUp(nc)
		return
	}
	if err := e.handshake(nc, slot); err != nil {
		e.untrack(nc)
		e.logRefused(nc, err)
		hangUp(nc)
	}
}

// handshake does the handshake on the side of the acceptor.
func (e *Endpoint) handshake(nc *socket, slot *dial.Slot) error {
	deadline := time.Now().Add(e.cfg.HandshakeTimeout)
	over, h, err := e.authenticate(nc, deadline)
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
		return fmt.Errorf("tcp: handshake: %d other connections already wait for this rank to join its epoch; the peer will retry", maxHandshakes)
	}
	if h.version != version {
		return refuse(over, fmt.Errorf("%w: got %d, want %d", WrongVersion, h.version, version))
	}
	m, err := e.awaitConnect(deadline)
	if err != nil {
		return err
	}
	if nc.hungUp() {
		// The dialer may have given up because this process did not run for long. Its next connection must
		// not be refused as a duplicate of this one.
		return errors.New("tcp: handshake: the dialer has already closed the connection")
	}
	l, err := m.reserve(h)
	if err != nil {
		return refuse(over, err)
	}
	if err := e.acceptHello(m, l, h.from, nc, over); err != nil {
		m.unreserve(l, h.from)
		return err
	}
	return nil
}

// authenticate makes the dialer prove that it knows the secret, and reads its hello. It leaves the deadline
// set.
func (e *Endpoint) authenticate(nc net.Conn, deadline time.Time) (over net.Conn, h hello, err error) {
	if err = nc.SetDeadline(deadline); err != nil {
		return nil, h, fmt.Errorf("tcp: handshake: %w", err)
	}
	if over, err = seal(e.cfg.Secret, nc, secret.Secret.Accept); err != nil {
		return nil, h, fmt.Errorf("tcp: handshake: %w", err)
	}
	h, err = readHello(over)
	return over, h, err
}

// acceptHello sends the answer that accepts a hello, and publishes the channel, which is already reserved.
// The parameters nc and over are the arguments sock and over of newConn.
func (e *Endpoint) acceptHello(m *Mesh, l *lane, peer topo.Rank, nc *socket, over net.Conn) error {
	if err := answer(over, accepted); err != nil {
		return err
	}
	c := newConn(&e.wg, l.id, peer, nc, over)
	// This must come before publish, because Abort may set the deadline after publish.
	if err := nc.SetDeadline(time.Time{}); err != nil {
		return fmt.Errorf("tcp: handshake: %w", err)
	}
	return m.publish(l, c)
}

// refuse refuses a hello: it sends an answer that contains the Refusal that reason wraps. It returns reason.
func refuse(nc net.Conn, reason error) error {
	var r Refusal
	if !errors.As(reason, &r) {
		panic("tcp: bug: handshake refused with an error that is not a Refusal: " + reason.Error())
	}
	if err := answer(nc, r); err != nil {
		return fmt.Errorf("%w; sending the refusal failed: %w", reason, err)
	}
	return reason
}

func answer(nc net.Conn, r Refusal) error {
	if _, err := nc.Write(encodeAnswer(r)); err != nil {
		return fmt.Errorf("tcp: handshake: send the answer: %w", err)
	}
	return nil
}

// awaitConnect waits until Connect is called or the deadline has passed, and returns the Mesh.
func (e *Endpoint) awaitConnect(deadline time.Time) (*Mesh, error) {
	expired := time.NewTimer(time.Until(deadline))
	defer expired.Stop()
	select {
	case <-e.connected:
		return e.mesh, nil // mesh is set once, before connected is closed
	case <-e.ctx.Done():
		return nil, transport.ErrClosed
	case <-expired.C:
		return nil, fmt.Errorf("tcp: handshake: this rank has not joined an epoch within %v",
			e.cfg.HandshakeTimeout)
	}
}

// track registers a connection that is not a channel yet, so that Close closes it. If Close was called
// before, track returns false.
func (e *Endpoint) track(nc net.Conn) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return false
	}
	e.unattached[nc] = struct{}{}
	return true
}

func (e *Endpoint) untrack(nc net.Conn) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.unattached, nc)
}

func (e *Endpoint) logRefused(nc net.Conn, reason error) {
	if e.ctx.Err() != nil {
		return // Close has begun, so the connection was not refused
	}
	e.quiet.Warn("tcp: refused a connection", zap.Stringer("remote", nc.RemoteAddr()), zap.Error(reason))
}

// hangUp closes a connection that is not used any more. So it ignores the error of Close.
func hangUp(nc net.Conn) { _ = nc.Close() }
