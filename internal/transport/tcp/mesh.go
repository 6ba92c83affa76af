package tcp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

// Mesh is one rank's end of the channels of an epoch. It implements transport.Mesh.
type Mesh struct {
	e     *Endpoint // e.mu guards lanes and released
	job   [16]byte
	epoch uint64
	rank  topo.Rank
	size  int       // number of ranks
	addrs addresses // guarded by e.mu when the Mesh is in use
	lanes map[transport.Lane]*lane
	poll  *poller // polls the Control lane
	// checks is set when the goroutine that checks connections was started.
	checks bool
	// released is the set of released lanes. The map lanes does not contain them.
	released transport.LaneSet
}

// addresses holds the addresses of all ranks in one text: in a large job, strings of their own would take
// most of the memory of a Mesh.
type addresses struct {
	text string
	ends []uint32 // by rank, the end of the address in text
}

func newAddresses(addrs []string) addresses {
	a := addresses{text: strings.Join(addrs, ""), ends: make([]uint32, len(addrs))}
	end := 0
	for r, addr := range addrs {
		end += len(addr)
		a.ends[r] = uint32(end)
	}
	return a
}

// of returns the address of rank r.
func (a *addresses) of(r topo.Rank) string {
	begin := uint32(0)
	if r > 0 {
		begin = a.ends[r-1]
	}
	return a.text[begin:a.ends[r]]
}

// lane holds the channels of one lane.
type lane struct {
	id     transport.Lane
	ctx    context.Context // cancelled when the lane is released or Close begins
	cancel context.CancelFunc

	err   error               // error of Abort, ErrReleased, or nil
	conns map[topo.Rank]*conn // the conn is nil while the channel is being made
	waits map[topo.Rank]*wait
}

// wait is the state that is shared by all goroutines that wait for the same channel. It gets the result of
// the wait.
type wait struct {
	done chan struct{} // closed when conn or err is set
	conn *conn
	err  error
	// attempt is the error of the last attempt to make the channel, or nil.
	attempt error
}

// Learn sets the addresses of all ranks. If the Mesh was made without some of the addresses, Learn must be
// called.
func (m *Mesh) Learn(addrs []string) error {
	if len(addrs) != m.size {
		return fmt.Errorf("tcp: connect: got %d addresses, want %d, one for each rank", len(addrs),
			m.size)
	}
	if err := checkAddrs(addrs, m.rank, false); err != nil {
		return err
	}
	m.e.mu.Lock()
	defer m.e.mu.Unlock()
	m.addrs = newAddresses(addrs)
	return nil
}

func (m *Mesh) addr(peer topo.Rank) string {
	m.e.mu.Lock()
	defer m.e.mu.Unlock()
	return m.addrs.of(peer)
}

// lane returns the lane with the number id. If the lane does not exist, lane creates it. For a released lane,
// every call returns a new lane that has already ended, and does not keep it. The caller holds mu.
func (m *Mesh) lane(id transport.Lane) *lane {
	l := m.lanes[id]
	if l == nil {
		l = &lane{id: id, conns: make(map[topo.Rank]*conn), waits: make(map[topo.Rank]*wait)}
		l.ctx, l.cancel = context.WithCancel(m.e.ctx)
		if m.released.Has(id) {
			l.end()
		} else {
			m.lanes[id] = l
		}
	}
	return l
}

// fail makes all Conns of the lane, and all current and later calls of Mesh.Conn for the lane, fail with err.
// The caller holds mu.
func (l *lane) fail(err error) {
	l.err = err
	for _, c := range l.conns {
		if c != nil {
			c.abort(err)
		}
	}
	for peer := range l.waits {
		l.finish(peer, nil, err)
	}
}

// end makes the lane fail with ErrReleased and ends its context. The caller holds mu.
func (l *lane) end() {
	l.fail(transport.ErrReleased)
	l.cancel()
}

// finish ends the wait for the channel to peer with the result c or err. The caller holds mu.
func (l *lane) finish(peer topo.Rank, c *conn, err error) {
	if w := l.waits[peer]; w != nil {
		w.conn, w.err = c, err
		close(w.done)
		delete(l.waits, peer)
	}
}

// Conn implements transport.Mesh. The lower rank dials when it calls Conn itself. Until then the higher rank
// waits, and has no time limit but that of ctx, because its peer may need the channel much later. If ctx of
// the lower rank ends, the attempt to connect continues for up to Config.DialTimeout, because this rank
// cannot know whether the peer has already accepted. A later call of Conn waits for the same attempt.
func (m *Mesh) Conn(ctx context.Context, id transport.Lane, peer topo.Rank) (transport.Conn, error) {
	if peer < 0 || int(peer) >= m.size || peer == m.rank {
		return nil, fmt.Errorf("tcp: connect lane %d: got peer rank %d, want a rank from 0 to %d other than this rank, %d",
			id, peer, m.size-1, m.rank)
	}
	m.e.mu.Lock()
	l := m.lane(id)
	if err := m.laneErr(l); err != nil {
		m.e.mu.Unlock()
		return nil, err
	}
	c, begun := l.conns[peer]
	if c != nil {
		m.e.mu.Unlock()
		return c, nil
	}
	if m.rank < peer && !begun {
		l.conns[peer] = nil
		m.e.wg.Go(func() { m.dial(l, peer) })
	}
	w := l.waits[peer]
	if w == nil {
		w = &wait{done: make(chan struct{})}
		l.waits[peer] = w
	}
	m.e.mu.Unlock()

	select {
	case <-w.done:
		if w.err != nil {
			return nil, w.err
		}
		return w.conn, nil
	case <-ctx.Done():
		err := fmt.Errorf("tcp: connect lane %d to rank %d: %w", id, peer, ctx.Err())
		m.e.mu.Lock()
		defer m.e.mu.Unlock()
		if w.attempt != nil {
			err = fmt.Errorf("%w; the last attempt failed: %w", err, w.attempt)
		}
		return nil, err
	}
}

// laneErr returns the error that makes Conn fail for the lane, or nil. The caller holds mu.
func (m *Mesh) laneErr(l *lane) error {
	if m.e.closed && l.err != transport.ErrReleased {
		return transport.ErrClosed
	}
	return l.err
}

// Abort implements transport.Mesh. It closes no connections of the lane, not even connections that are being
// made or will be made later.
func (m *Mesh) Abort(id transport.Lane, err error) {
	if err == nil {
		panic("tcp: bug: Abort was called without an error")
	}
	m.e.mu.Lock()
	defer m.e.mu.Unlock()
	if l := m.lane(id); m.laneErr(l) == nil {
		l.fail(err)
		if id == transport.Control {
			m.poll.notifyParked()
		}
	}
}

// Release implements transport.Mesh. If the peer does not release the lane too, the connections of the lane
// stay open for up to Config.LingerTimeout. A handshake that has begun is completed.
func (m *Mesh) Release(id transport.Lane) {
	if id == transport.Control {
		m.Abort(id, transport.ErrControl)
		return
	}
	m.e.mu.Lock()
	defer m.e.mu.Unlock()
	if m.e.closed {
		return
	}
	m.released.Add(id)
	l := m.lanes[id]
	if l == nil {
		return
	}
	delete(m.lanes, id)
	l.end()
	for _, c := range l.conns {
		if c != nil {
			m.startLinger(c)
		}
	}
}

// startLinger starts a goroutine that ends the aborted connection c by calling linger. The caller holds mu.
func (m *Mesh) startLinger(c *conn) {
	m.e.unattached[c.sock] = struct{}{}
	m.e.wg.Go(func() {
		c.linger(m.e.cfg.LingerTimeout)
		m.e.untrack(c.sock)
	})
}

// OnNotify implements transport.Poller.
func (m *Mesh) OnNotify(notify func()) { m.poll.notify.Store(&notify) }

// NotifyPeers implements transport.Poller. It does nothing, because the kernel notifies peers when bytes
// arrive.
func (m *Mesh) NotifyPeers() {}

// Park implements transport.Poller.
func (m *Mesh) Park() bool { return m.poll.park() }

// Unpark implements transport.Poller.
func (m *Mesh) Unpark() { m.poll.unpark() }

// EntersKernel implements transport.Poller.
func (m *Mesh) EntersKernel() bool { return true }

// Close implements transport.Mesh. It closes the Endpoint.
func (m *Mesh) Close() error { return m.e.Close() }

// closeConns closes the connections of the Mesh because the Endpoint is being closed. The caller holds mu and
// has set closed.
func (m *Mesh) closeConns() {
	for _, l := range m.lanes {
		for _, c := range l.conns {
			if c != nil {
				c.close()
			}
		}
		for peer := range l.waits {
			l.finish(peer, nil, transport.ErrClosed)
		}
	}
	m.poll.notifyParked()
}

// reserve reserves the channel that h asks for. If the channel must be refused, reserve returns an error that
// wraps a Refusal. It does not refuse a channel of a released lane, because the peer cannot know of the
// release.
func (m *Mesh) reserve(h hello) (*lane, error) {
	switch {
	case h.job != m.job:
		return nil, WrongJob
	case h.epoch != m.epoch:
		return nil, fmt.Errorf("%w: rank %d is in epoch %d, but this rank is in epoch %d", StaleEpoch, h.from,
			h.epoch, m.epoch)
	case h.to != m.rank:
		return nil, fmt.Errorf("%w: rank %d tried to connect to rank %d, but this is rank %d", NotMe, h.from,
			h.to, m.rank)
	case h.from < 0 || h.from >= m.rank:
		return nil, fmt.Errorf("%w: got rank %d, want a rank below %d, because only lower ranks dial",
			UnknownRank, h.from, m.rank)
	}
	m.e.mu.Lock()
	defer m.e.mu.Unlock()
	l := m.lane(h.lane)
	if _, begun := l.conns[h.from]; begun {
		return nil, fmt.Errorf("%w: rank %d is already connected on lane %d", DuplicateChannel, h.from,
			h.lane)
	}
	l.conns[h.from] = nil
	return l, nil
}

// unreserve reverses reserve.
func (m *Mesh) unreserve(l *lane, peer topo.Rank) {
	m.e.mu.Lock()
	defer m.e.mu.Unlock()
	delete(l.conns, peer)
}

// publish adds a connection whose handshake is complete to the channels of l. If l has been released in the
// meantime, publish ends the connection.
func (m *Mesh) publish(l *lane, c *conn) error {
	m.e.mu.Lock()
	defer m.e.mu.Unlock()
	if m.e.closed {
		return transport.ErrClosed
	}
	if l.err == transport.ErrReleased {
		c.abort(l.err)
		m.startLinger(c)
		return nil
	}
	if l.id == transport.Control {
		if err := m.poll.add(c); err != nil {
			return err
		}
		c.poll = m.poll
	} else if limit := m.e.cfg.LivenessTimeout; limit > 0 {
		c.silence = dial.NewSilence(limit, m.e.quiet)
		if !m.checks {
			m.checks = true
			m.e.wg.Go(m.checkRegularly)
		}
	}
	delete(m.e.unattached, c.sock)
	l.conns[c.peer] = c
	l.finish(c.peer, c, nil) // does nothing if the lane was aborted, because fail has ended the waits
	return nil
}

// checkRegularly ends connections whose packets the network drops. It runs until the Endpoint is closed.
func (m *Mesh) checkRegularly() {
	ticker := time.NewTicker(dial.CheckPeriod(m.e.cfg.LivenessTimeout))
	defer ticker.Stop()
	var conns []*conn
	for {
		select {
		case now := <-ticker.C:
			conns = m.checkAll(now, conns[:0])
			clear(conns)
		case <-m.e.ctx.Done():
			return
		}
	}
}

// checkAll checks the silence of all connections. It returns conns, to which it has appended them.
func (m *Mesh) checkAll(now time.Time, conns []*conn) []*conn {
	m.e.mu.Lock()
	for _, l := range m.lanes {
		for _, c := range l.conns {
			if c != nil && c.silence != nil {
				conns = append(conns, c)
			}
		}
	}
	m.e.mu.Unlock()
	for _, c := range conns {
		c.check(now)
	}
	return conns
}

// dial makes the channel to a higher rank. It retries until an attempt succeeds, the peer refuses, or
// DialTimeout has passed.
func (m *Mesh) dial(l *lane, peer topo.Rank) {
	ctx, cancel := context.WithTimeout(l.ctx, m.e.cfg.DialTimeout)
	defer cancel()
	var last error
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		err := m.attempt(ctx, l, peer)
		if err == nil {
			return
		}
		if refusal := Refusal(0); errors.As(err, &refusal) || errors.Is(err, errNotOurs) ||
			dial.IsExhausted(err) {
			m.giveUp(l, peer, err)
			return
		}
		if ctx.Err() == nil || last == nil {
			// If ctx has ended, err says only that. So the error of the previous attempt is kept then.
			last = err
		}
		m.failed(l, peer, last)
		m.e.log.Debug("tcp: connect failed", zap.Uint32("lane", uint32(l.id)), zap.Int32("peer", int32(peer)),
			zap.String("addr", m.addr(peer)), zap.Error(err), zap.Duration("pause", pause))
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			m.giveUp(l, peer, fmt.Errorf("tcp: no connection within %v; the last attempt failed: %w",
				m.e.cfg.DialTimeout, last))
			return
		}
	}
}

// attempt dials the peer once and does the handshake.
func (m *Mesh) attempt(ctx context.Context, l *lane, peer topo.Rank) error {
	var d net.Dialer
	dialed, err := d.DialContext(ctx, "tcp", m.addr(peer))
	if err != nil {
		return err
	}
	nc, err := newSocket(dialed)
	if err != nil {
		return err
	}
	if !m.e.track(nc) {
		hangUp(nc)
		return transport.ErrClosed
	}
	if err := m.dialHandshake(ctx, l, peer, nc); err != nil {
		m.e.untrack(nc)
		hangUp(nc)
		return err
	}
	return nil
}

// dialHandshake does the handshake on the side of the dialer, and publishes the channel.
func (m *Mesh) dialHandshake(ctx context.Context, l *lane, peer topo.Rank, nc *socket) error {
	deadline := time.Now().Add(2 * m.e.cfg.HandshakeTimeout)
	if end, ok := ctx.Deadline(); ok && end.Before(deadline) {
		deadline = end
	}
	if err := nc.SetDeadline(deadline); err != nil {
		return fmt.Errorf("tcp: handshake: %w", err)
	}
	over, err := seal(m.e.cfg.Secret, nc, secret.Secret.Dial)
	if err != nil {
		return fmt.Errorf("tcp: handshake: %w", err)
	}
	h := hello{version: version, job: m.job, epoch: m.epoch, from: m.rank, to: peer, lane: l.id}
	if _, err := over.Write(h.encode()); err != nil {
		return fmt.Errorf("tcp: handshake: send the hello: %w", err)
	}
	if err := readAnswer(over); err != nil {
		return err
	}
	c := newConn(&m.e.wg, l.id, peer, nc, over)
	if err := nc.SetDeadline(time.Time{}); err != nil {
		return fmt.Errorf("tcp: handshake: %w", err)
	}
	return m.publish(l, c)
}

// failed records err as the error of the last attempt, for the goroutines that wait for the channel.
func (m *Mesh) failed(l *lane, peer topo.Rank, err error) {
	m.e.mu.Lock()
	defer m.e.mu.Unlock()
	if w := l.waits[peer]; w != nil {
		w.attempt = err
	}
}

// giveUp makes the calls of Conn that wait for the given peer fail with err. The next call of Conn dials
// again.
func (m *Mesh) giveUp(l *lane, peer topo.Rank, err error) {
	m.e.mu.Lock()
	defer m.e.mu.Unlock()
	delete(l.conns, peer)
	if dial.IsExhausted(err) {
		err = dial.ExplainLimit(err) // no PeerError, because it is not the peer that has failed
	} else {
		err = &transport.PeerError{Peer: peer, Lane: l.id, Err: err}
	}
	l.finish(peer, nil, err)
}
