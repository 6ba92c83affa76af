package faulty

import (
	"context"
	"sync"

	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

// mesh is the wrapped mesh of one rank. It does not use the wrapped mesh as a Poller: its goroutines block in
// Read of the wrapped Control lane, and it notifies the polling goroutine itself.
type mesh struct {
	network *Network
	rank    topo.Rank
	inner   transport.Mesh
	waker   transport.Waker
	wg      sync.WaitGroup // counts the goroutines of the pipes
	closing sync.Mutex     // held by Close

	mu     sync.Mutex // locked before the mu of the Network
	conns  map[key]*conn
	closed bool
}

// Wrap returns a mesh that applies the rules of n to the connections of inner, which is the mesh of the given
// rank. All ranks of the epoch must use wrapped meshes of n. Closing the returned mesh closes inner. The
// returned mesh has only the methods of transport.Mesh.
func (n *Network) Wrap(rank topo.Rank, inner transport.Mesh) transport.Mesh {
	return &mesh{network: n, rank: rank, inner: inner, conns: make(map[key]*conn)}
}

// conn is a connection to one peer: the sender of one pipe and the receiver of the other.
type conn struct{ out, in *pipe }

// Conn implements transport.Mesh.
func (m *mesh) Conn(ctx context.Context, lane transport.Lane, peer topo.Rank) (transport.Conn, error) {
	if _, err := m.inner.Conn(ctx, lane, peer); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	// The mesh may have been closed, or the lane aborted or released, before mu was locked. So ask again. The
	// connection exists, so this call does not wait.
	inner, err := m.inner.Conn(ctx, lane, peer)
	if err != nil {
		return nil, err
	}
	if m.closed {
		return nil, transport.ErrClosed
	}
	k := key{lane, m.rank, peer}
	c := m.conns[k]
	if c == nil {
		c = &conn{out: m.network.pipe(k), in: m.network.pipe(k.reverse())}
		if lane == transport.Control {
			c.in.waker.Store(&m.waker)
		}
		m.conns[k] = c
		m.wg.Go(func() { c.out.forward(inner) })
		m.wg.Go(func() { c.in.receive(inner) })
	}
	return c, nil
}

// Abort implements transport.Mesh.
func (m *mesh) Abort(lane transport.Lane, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.inner.Abort(lane, err)
	m.giveUp(lane, err)
}

// Release implements transport.Mesh.
func (m *mesh) Release(lane transport.Lane) {
	if lane == transport.Control {
		m.Abort(lane, transport.ErrControl)
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.inner.Release(lane)
	m.giveUp(lane, transport.ErrReleased)
	for k := range m.conns {
		if k.lane == lane {
			delete(m.conns, k)
		}
	}
}

// giveUp makes the calls on all connections of a lane fail with err. The caller holds mu.
func (m *mesh) giveUp(lane transport.Lane, err error) {
	for k, c := range m.conns {
		if k.lane == lane {
			c.giveUp(err)
		}
	}
}

// Close implements transport.Mesh.
func (m *mesh) Close() error {
	m.closing.Lock()
	defer m.closing.Unlock()
	m.mu.Lock()
	m.closed = true
	for _, c := range m.conns {
		c.giveUp(transport.ErrClosed)
	}
	m.mu.Unlock()
	err := m.inner.Close()
	m.wg.Wait()
	return err
}

// OnNotify implements transport.Poller.
func (m *mesh) OnNotify(notify func()) { m.waker.OnNotify(notify) }

// NotifyPeers implements transport.Poller. It does nothing, because a parked peer is always notified when
// bytes arrive.
func (m *mesh) NotifyPeers() {}

// Park implements transport.Poller.
func (m *mesh) Park() bool {
	return m.waker.Park(func() bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		for k, c := range m.conns {
			if k.lane == transport.Control && c.in.hasUnread() {
				return true
			}
		}
		return false
	})
}

// Unpark implements transport.Poller.
func (m *mesh) Unpark() { m.waker.Unpark() }

// EntersKernel implements transport.Poller.
func (m *mesh) EntersKernel() bool { return false }

// Read implements transport.Conn.
func (c *conn) Read(p []byte) (int, error) { return c.in.read(p, true) }

// TryRead implements transport.Conn.
func (c *conn) TryRead(p []byte) (int, error) { return c.in.read(p, false) }

// Send implements transport.Conn.
func (c *conn) Send(p []byte) error { return c.out.send(p) }

// TrySend implements transport.Conn. It queues all of p, because the queue of a link has no limit.
func (c *conn) TrySend(p []byte) (int, error) { return len(p), c.out.send(p) }

// Sent implements transport.Conn.
func (c *conn) Sent() uint64 { return c.out.sent.Load() }

// Flush implements transport.Conn.
func (c *conn) Flush() error { return c.out.flush() }

func (c *conn) giveUp(err error) {
	c.out.giveUpSending(err)
	c.in.giveUpReceiving(err)
}
