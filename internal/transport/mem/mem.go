// Package mem connects the ranks of a cluster within one process, for tests. To callers it behaves like
// transport/tcp: Conn of the higher rank waits for Conn of the lower rank, and lanes are independent. If a
// rank closes its mesh, its peers receive the bytes that it had sent, and then a *transport.PeerError.
// Package mem does no I/O and leaves no goroutine behind, so it works in a testing/synctest bubble.
//
// Package mem is stricter than transport/tcp because it has no socket buffer. A byte leaves the sender's
// buffer only when the receiver reads it, so Flush waits for the receiver. So tests with this transport
// detect callers that rely on a buffer of TCP.
//
// The links of a cluster from NewWithLatency have a latency, which is exact in a bubble. A cluster from New
// does not read the clock.
package mem

import (
	"context"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

// Cluster holds the meshes of all ranks and the channels between them.
type Cluster struct {
	meshes []mesh
	clock  clock

	// mu may be locked before the mu of a pipe, but not after it.
	mu       sync.Mutex
	channels map[key]*channel
	changed  chan struct{} // closed and replaced when a channel is created or a mesh is aborted or closed
}

// key identifies a channel by its lane and its two ranks. The lower rank comes first.
type key struct {
	lane   transport.Lane
	lo, hi topo.Rank
}

// mesh is the transport.Mesh of one rank.
type mesh struct {
	c    *Cluster
	rank topo.Rank

	// closed, aborted, released and control are guarded by the Cluster's mu.
	closed   bool
	aborted  map[transport.Lane]error
	released transport.LaneSet
	control  []*conn

	waker transport.Waker
}

// New creates a cluster with size ranks. Bytes arrive as soon as they are sent.
func New(size int) *Cluster { return NewWithLatency(size, 0) }

// NewWithLatency creates a cluster with size ranks whose bytes arrive with the given latency. In a
// testing/synctest bubble the latency is exact. Otherwise bytes may arrive later. Bytes arrive in order. They
// never wait for other bytes: the bandwidth is unlimited, and each lane, each pair of ranks and each
// direction is a separate link. If a rank has closed its mesh, died or released a lane, its peers learn that
// with the same latency. Until then, their Read, Flush and Send work as before.
//
// A byte leaves the sender's buffer when the receiver reads it, and the sender's Conn.Sent counts it at once,
// without the latency. Calls of Mesh.Conn have no latency either. Abort, Release and Close take effect at
// once on the rank that calls them. If latency is 0 or negative, there is no latency.
//
// In a bubble, no loop may wait by polling Sent. The clock of a bubble does not advance while a goroutine
// polls, so bytes in flight would never arrive.
func NewWithLatency(size int, latency time.Duration) *Cluster {
	c := &Cluster{
		meshes:   make([]mesh, size),
		clock:    newClock(latency),
		channels: make(map[key]*channel),
		changed:  make(chan struct{}),
	}
	for r := range c.meshes {
		c.meshes[r] = mesh{c: c, rank: topo.Rank(r), aborted: make(map[transport.Lane]error)}
	}
	return c
}

// Mesh returns the mesh of the given rank. Every call returns the same mesh.
func (c *Cluster) Mesh(rank topo.Rank) transport.Mesh { return &c.meshes[rank] }

// Kill ends a rank as if its process had died. Its peers can still read the bytes that the rank had sent.
// After that, their reads and sends fail with a *transport.PeerError. Calls of the rank itself fail with
// ErrClosed.
func (c *Cluster) Kill(rank topo.Rank) { c.meshes[rank].close() }

// notify wakes all goroutines that wait in Mesh.Conn. The caller holds mu.
func (c *Cluster) notify() {
	close(c.changed)
	c.changed = make(chan struct{})
}

// Conn implements transport.Mesh.
func (m *mesh) Conn(ctx context.Context, lane transport.Lane, peer topo.Rank) (transport.Conn, error) {
	if peer < 0 || int(peer) >= len(m.c.meshes) || peer == m.rank {
		return nil, fmt.Errorf("mem: connect lane %d: got peer rank %d, want a rank from 0 to %d other than this rank, %d",
			lane, peer, len(m.c.meshes)-1, m.rank)
	}
	for {
		conn, changed, err := m.find(lane, peer)
		if err != nil {
			return nil, err
		}
		if conn != nil {
			return conn, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, fmt.Errorf("mem: connect lane %d to rank %d: %w", lane, peer, ctx.Err())
		}
	}
}

// find returns this rank's end of a channel. If the channel does not exist and this rank is the lower one,
// find creates it. If this rank is the higher one, find returns a Go channel instead, and the caller must
// call find again when that Go channel is closed.
func (m *mesh) find(lane transport.Lane, peer topo.Rank) (*conn, <-chan struct{}, error) {
	m.c.mu.Lock()
	defer m.c.mu.Unlock()
	if m.released.Has(lane) {
		return nil, nil, transport.ErrReleased
	}
	if m.closed {
		return nil, nil, transport.ErrClosed
	}
	if err := m.aborted[lane]; err != nil {
		return nil, nil, err
	}
	k := key{lane, min(m.rank, peer), max(m.rank, peer)}
	ch := m.c.channels[k]
	if ch == nil {
		other := &m.c.meshes[peer]
		gone := other.released.Has(lane)
		if other.closed || gone && m.rank > peer {
			return nil, nil, &transport.PeerError{Peer: peer, Lane: lane, Err: io.ErrUnexpectedEOF}
		}
		if m.rank > peer {
			return nil, m.c.changed, nil
		}
		ch = newChannel(k, &m.c.clock)
		if lane == transport.Control {
			m.attach(&ch.lo)
			other.attach(&ch.hi)
		}
		m.c.channels[k] = ch
		if gone {
			ch.end(peer).release()
		}
		m.c.notify()
	}
	return ch.end(m.rank), nil, nil
}

// Abort implements transport.Mesh. The peers can still read the bytes that this rank had sent.
func (m *mesh) Abort(lane transport.Lane, err error) {
	if err == nil {
		panic("mem: bug: Abort was called without an error")
	}
	m.c.mu.Lock()
	defer m.c.mu.Unlock()
	if m.closed || m.aborted[lane] != nil || m.released.Has(lane) {
		return
	}
	m.aborted[lane] = err
	for k, ch := range m.c.channels {
		if k.lane == lane && k.has(m.rank) {
			ch.end(m.rank).abort(err)
		}
	}
	m.c.notify()
}

// Release implements transport.Mesh. The Cluster forgets a channel when both ranks have released it.
func (m *mesh) Release(lane transport.Lane) {
	if lane == transport.Control {
		m.Abort(lane, transport.ErrControl)
		return
	}
	m.c.mu.Lock()
	defer m.c.mu.Unlock()
	if m.closed || m.released.Has(lane) {
		return
	}
	m.released.Add(lane)
	delete(m.aborted, lane)
	for k, ch := range m.c.channels {
		if k.lane != lane || !k.has(m.rank) {
			continue
		}
		ch.end(m.rank).release()
		if ch.lo.released && ch.hi.released {
			delete(m.c.channels, k)
		}
	}
	m.c.notify()
}

// Close implements transport.Mesh. The peers can still read the bytes that this rank had sent.
func (m *mesh) Close() error {
	m.close()
	return nil
}

func (m *mesh) close() {
	m.c.mu.Lock()
	defer m.c.mu.Unlock()
	if m.closed {
		return
	}
	m.closed = true
	for k, ch := range m.c.channels {
		if k.has(m.rank) {
			ch.end(m.rank).close()
		}
	}
	m.c.notify()
}

func (k key) has(r topo.Rank) bool { return r == k.lo || r == k.hi }
