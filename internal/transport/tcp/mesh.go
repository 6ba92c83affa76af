package tcp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

// Mesh is one rank's end of an epoch. It implements transport.Mesh.
type Mesh struct {
	e     *Endpoint // its mu guards lanes
	job   [16]byte
	epoch uint64
	rank  topo.Rank
	addrs []string // guarded by e.mu once the Mesh is in use
	lanes map[transport.Lane]*lane
	poll  *poller // of the Control lane
	// released are lanes that have gone from the map, for good.
	released transport.LaneSet
}

// lane holds the channels of one lane.
type lane struct {
	id     transport.Lane
	ctx    context.Context // ends with the lane, or when Close begins
	cancel context.CancelFunc

	err   error               // of Abort, or ErrReleased
	conns map[topo.Rank]*conn // nil while the channel is being made
	waits map[topo.Rank]*wait
}

// wait is shared by all who wait for one channel.
type wait struct {
	done chan struct{} // closed when conn or err is set
	conn *conn
	err  error
	// attempt is why the channel could not be made so far.
	attempt error
}

// Learn tells the Mesh the addresses of all ranks, if it was made with some of them.
func (m *Mesh) Learn(addrs []string) error {
	if len(addrs) != len(m.addrs) {
		return fmt.Errorf("tcp: connect: %d addresses, want %d", len(addrs), len(m.addrs))
	}
	if err := checkAddrs(addrs, m.rank, false); err != nil {
		return err
	}
	m.e.mu.Lock()
	defer m.e.mu.Unlock()
	copy(m.addrs, addrs)
	return nil
}

func (m *Mesh) addr(peer topo.Rank) string {
	m.e.mu.Lock()
	defer m.e.mu.Unlock()
	return m.addrs[peer]
}

// lane returns the lane with the given number. One that was released is made up each time and not kept. The caller
// holds mu.
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

// fail ends all waiting and gives the Conns an error, which later calls of Mesh.Conn get too. The caller holds mu.
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

// end makes the lane a released one. The caller holds mu.
func (l *lane) end() {
	l.fail(transport.ErrReleased)
	l.cancel()
}

// finish ends the waiting for peer. The caller holds mu.
func (l *lane) finish(peer topo.Rank, c *conn, err error) {
	if w := l.waits[peer]; w != nil {
		w.conn, w.err = c, err
		close(w.done)
		delete(l.waits, peer)
	}
}

// Conn implements transport.Mesh. The attempt to connect goes on for up to Config.DialTimeout after ctx has
// ended, because it cannot be known whether the peer has accepted it already; a later Conn joins it.
func (m *Mesh) Conn(ctx context.Context, id transport.Lane, peer topo.Rank) (transport.Conn, error) {
	if peer < 0 || int(peer) >= len(m.addrs) || peer == m.rank {
		return nil, fmt.Errorf("tcp: connect lane %d: peer is rank %d, want 0 to %d without %d", id, peer, len(m.addrs)-1, m.rank)
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
	dials := m.rank < peer
	if dials && !begun {
		l.conns[peer] = nil
		m.e.wg.Go(func() { m.dial(l, peer) })
	}
	w := l.waits[peer]
	if w == nil {
		w = &wait{done: make(chan struct{})}
		l.waits[peer] = w
	}
	m.e.mu.Unlock()

	var expired <-chan time.Time // of a dial, dial itself takes care
	if !dials {
		t := time.NewTimer(m.e.cfg.DialTimeout)
		defer t.Stop()
		expired = t.C
	}
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
	case <-expired:
		return nil, &transport.PeerError{Peer: peer, Lane: id, Err: fmt.Errorf("tcp: it did not connect within %v", m.e.cfg.DialTimeout)}
	}
}

// laneErr is why a lane gives no Conns, if it does not. The caller holds mu.
func (m *Mesh) laneErr(l *lane) error {
	if m.e.closed && l.err != transport.ErrReleased {
		return transport.ErrClosed
	}
	return l.err
}

// Abort implements transport.Mesh. A connection of the lane that is being made, or comes later, is kept open
// too.
func (m *Mesh) Abort(id transport.Lane, err error) {
	if err == nil {
		panic("tcp: abort without an error")
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

// Release implements transport.Mesh. Its connections stay for up to Config.LingerTimeout if the peer does not
// release the lane, and a handshake that has begun comes to its end.
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
			m.letGo(c)
		}
	}
}

// letGo ends an aborted connection in its own time. The caller holds mu.
func (m *Mesh) letGo(c *conn) {
	m.e.loose[c.sock] = struct{}{}
	m.e.wg.Go(func() {
		c.linger(m.e.cfg.LingerTimeout)
		m.e.untrack(c.sock)
	})
}

// OnNotify implements transport.Poller.
func (m *Mesh) OnNotify(notify func()) { m.poll.notify.Store(&notify) }

// NotifyPeers implements transport.Poller. The kernel has done it.
func (m *Mesh) NotifyPeers() {}

// Park implements transport.Poller.
func (m *Mesh) Park() bool { return m.poll.park() }

// Unpark implements transport.Poller.
func (m *Mesh) Unpark() { m.poll.unpark() }

// EntersKernel implements transport.Poller.
func (m *Mesh) EntersKernel() bool { return true }

// Close implements transport.Mesh. It closes the Endpoint.
func (m *Mesh) Close() error { return m.e.Close() }

// closeConns is the Mesh's part of Endpoint.Close. The caller holds mu and has set closed.
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

// reserve books the channel that h asks for, or says why it cannot be had by an error that wraps a Refusal. A lane
// that was released is no reason: the peer cannot tell whether it came before.
func (m *Mesh) reserve(h hello) (*lane, error) {
	switch {
	case h.job != m.job:
		return nil, WrongJob
	case h.epoch != m.epoch:
		return nil, fmt.Errorf("%w: rank %d is in epoch %d, this is epoch %d", StaleEpoch, h.from, h.epoch, m.epoch)
	case h.to != m.rank:
		return nil, fmt.Errorf("%w: rank %d looked for rank %d, this is rank %d", NotMe, h.from, h.to, m.rank)
	case h.from < 0 || h.from >= m.rank:
		return nil, fmt.Errorf("%w: got %d, want a rank below %d", UnknownRank, h.from, m.rank)
	}
	m.e.mu.Lock()
	defer m.e.mu.Unlock()
	l := m.lane(h.lane)
	if _, begun := l.conns[h.from]; begun {
		return nil, fmt.Errorf("%w: lane %d of rank %d", DuplicateChannel, h.lane, h.from)
	}
	l.conns[h.from] = nil
	return l, nil
}

// unreserve gives back what reserve booked.
func (m *Mesh) unreserve(l *lane, peer topo.Rank) {
	m.e.mu.Lock()
	defer m.e.mu.Unlock()
	delete(l.conns, peer)
}

// publish makes a connection past its handshake a channel of l, or ends it if l was released meanwhile.
func (m *Mesh) publish(l *lane, c *conn) error {
	m.e.mu.Lock()
	defer m.e.mu.Unlock()
	if m.e.closed {
		return transport.ErrClosed
	}
	if l.err == transport.ErrReleased {
		c.abort(l.err)
		m.letGo(c)
		return nil
	}
	if l.id == transport.Control {
		if err := m.poll.add(c); err != nil {
			return err
		}
		c.poll = m.poll
	}
	delete(m.e.loose, c.sock)
	l.conns[c.peer] = c
	l.finish(c.peer, c, nil) // nobody waits, nor ever will, if the lane was aborted
	return nil
}

// dial makes the channel to a higher rank, again and again until it succeeds, is refused, or takes too long.
func (m *Mesh) dial(l *lane, peer topo.Rank) {
	ctx, cancel := context.WithTimeout(l.ctx, m.e.cfg.DialTimeout)
	defer cancel()
	var last error
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		err := m.attempt(ctx, l, peer)
		if err == nil {
			return
		}
		if refusal := Refusal(0); errors.As(err, &refusal) || errors.Is(err, errNotOurs) || dial.IsExhausted(err) {
			m.giveUp(l, peer, err)
			return
		}
		if ctx.Err() == nil || last == nil {
			last = err // what the end of ctx broke off says less
		}
		m.failed(l, peer, last)
		m.e.log.Debug("tcp: connect failed", zap.Uint32("lane", uint32(l.id)), zap.Int32("peer", int32(peer)),
			zap.String("addr", m.addr(peer)), zap.Error(err), zap.Duration("pause", pause))
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			m.giveUp(l, peer, fmt.Errorf("tcp: not connected within %v: %w", m.e.cfg.DialTimeout, last))
			return
		}
	}
}

// attempt dials once.
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
	if err := m.introduce(ctx, l, peer, nc); err != nil {
		m.e.untrack(nc)
		hangUp(nc)
		return err
	}
	return nil
}

// introduce is the dialing side of the handshake, and publishes the channel.
func (m *Mesh) introduce(ctx context.Context, l *lane, peer topo.Rank, nc *socket) error {
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
		return fmt.Errorf("tcp: hello: %w", err)
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

// failed tells those who wait why they still do.
func (m *Mesh) failed(l *lane, peer topo.Rank, err error) {
	m.e.mu.Lock()
	defer m.e.mu.Unlock()
	if w := l.waits[peer]; w != nil {
		w.attempt = err
	}
}

// giveUp fails those who wait for peer. A later Conn dials afresh.
func (m *Mesh) giveUp(l *lane, peer topo.Rank, err error) {
	m.e.mu.Lock()
	defer m.e.mu.Unlock()
	delete(l.conns, peer)
	if dial.IsExhausted(err) {
		err = dial.ExplainLimit(err) // which is no fault of the peer
	} else {
		err = &transport.PeerError{Peer: peer, Lane: l.id, Err: err}
	}
	l.finish(peer, nil, err)
}
