// Package mem connects the ranks of a cluster within one process, for tests. It behaves like transport/tcp
// where callers could tell: the higher rank's Conn waits for the lower's, lanes are independent, a rank that
// closes gives its peers a *transport.PeerError after what it had sent. It does no I/O, starts no goroutine
// and keeps no time, so it works in a testing/synctest bubble.
//
// It is stricter in one way: there is no socket buffer. A byte leaves the sender's buffer when the receiver
// reads it, so Flush waits for the receiver, and callers that rely on a buffer which TCP happens to have are
// found out.
package mem

import (
	"context"
	"fmt"
	"io"
	"sync"

	"github.com/gohvd/gohvd/topo"
	"github.com/gohvd/gohvd/transport"
)

// Cluster holds the meshes of all ranks and the channels between them.
type Cluster struct {
	meshes []mesh

	// mu is held before a pipe's mu, never after.
	mu       sync.Mutex
	channels map[key]*channel
	changed  chan struct{} // closed and replaced when a channel is made or a mesh is aborted or closed
}

// key names a channel.
type key struct {
	lane   transport.Lane
	lo, hi topo.Rank
}

// mesh is one rank's transport.Mesh.
type mesh struct {
	c       *Cluster
	rank    topo.Rank
	closed  bool // guarded, with aborted, by the Cluster's mu
	aborted map[transport.Lane]error
}

// New makes a cluster of size ranks.
func New(size int) *Cluster {
	c := &Cluster{
		meshes:   make([]mesh, size),
		channels: make(map[key]*channel),
		changed:  make(chan struct{}),
	}
	for r := range c.meshes {
		c.meshes[r] = mesh{c: c, rank: topo.Rank(r), aborted: make(map[transport.Lane]error)}
	}
	return c
}

// Mesh returns rank's end of the cluster. Every call returns the same one.
func (c *Cluster) Mesh(rank topo.Rank) transport.Mesh { return &c.meshes[rank] }

// Kill ends rank as its peers see it when the process dies: they read what it had sent, then get a
// *transport.PeerError, as they do when they send. The calls of the rank itself fail with ErrClosed.
func (c *Cluster) Kill(rank topo.Rank) { c.meshes[rank].close() }

// notify wakes all who wait in Conn. The caller holds mu.
func (c *Cluster) notify() {
	close(c.changed)
	c.changed = make(chan struct{})
}

// Conn implements transport.Mesh.
func (m *mesh) Conn(ctx context.Context, lane transport.Lane, peer topo.Rank) (transport.Conn, error) {
	if peer < 0 || int(peer) >= len(m.c.meshes) || peer == m.rank {
		return nil, fmt.Errorf("mem: connect lane %d: peer is rank %d, want 0 to %d without %d", lane, peer, len(m.c.meshes)-1, m.rank)
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

// find returns this rank's end of a channel, which it makes if it is the lower rank, or what to wait for.
func (m *mesh) find(lane transport.Lane, peer topo.Rank) (*conn, <-chan struct{}, error) {
	m.c.mu.Lock()
	defer m.c.mu.Unlock()
	if m.closed {
		return nil, nil, transport.ErrClosed
	}
	if err := m.aborted[lane]; err != nil {
		return nil, nil, err
	}
	k := key{lane, min(m.rank, peer), max(m.rank, peer)}
	ch := m.c.channels[k]
	if ch == nil {
		if m.c.meshes[peer].closed {
			return nil, nil, &transport.PeerError{Peer: peer, Lane: lane, Err: io.ErrUnexpectedEOF}
		}
		if m.rank > peer {
			return nil, m.c.changed, nil
		}
		ch = newChannel(k)
		m.c.channels[k] = ch
		m.c.notify()
	}
	return ch.end(m.rank), nil, nil
}

// Abort implements transport.Mesh. What this rank had sent can still be read by its peers.
func (m *mesh) Abort(lane transport.Lane, err error) {
	if err == nil {
		panic("mem: abort without an error")
	}
	m.c.mu.Lock()
	defer m.c.mu.Unlock()
	if m.closed || m.aborted[lane] != nil {
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

// Close implements transport.Mesh. What this rank had sent can still be read by its peers.
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
