package tcp_test

import (
	"context"
	"sync"
	"testing"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/opstest"
	"github.com/gohvd/gohvd/ops/tcp"
)

// stalledMesh is the mesh of a rank that receives only the first most bytes of the given peer until resumed
// is closed.
type stalledMesh struct {
	transport.Mesh
	peer    topo.Rank
	most    int
	resumed chan struct{}
}

func (m *stalledMesh) Conn(ctx context.Context, l transport.Lane, peer topo.Rank) (transport.Conn, error) {
	c, err := m.Mesh.Conn(ctx, l, peer)
	if err != nil || peer != m.peer {
		return c, err
	}
	return &stalledConn{Conn: c, mesh: m}, nil
}

type stalledConn struct {
	transport.Conn
	mesh     *stalledMesh
	received int
}

// room returns the part of p that may be filled. If wait is set, room waits until it is not empty.
func (c *stalledConn) room(p []byte, wait bool) []byte {
	for {
		select {
		case <-c.mesh.resumed:
			return p
		default:
		}
		if n := min(len(p), c.mesh.most-c.received); n > 0 || !wait {
			return p[:n]
		}
		<-c.mesh.resumed
	}
}

func (c *stalledConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(c.room(p, true))
	c.received += n
	return n, err
}

func (c *stalledConn) TryRead(p []byte) (int, error) {
	if p = c.room(p, false); len(p) == 0 {
		return 0, nil
	}
	n, err := c.Conn.TryRead(p)
	c.received += n
	return n, err
}

// watchedMesh is the mesh of a rank. It calls blocks when the rank has received the given number of bytes of
// the given peer and blocks until more arrive, and polled when the rank asks which bytes have left.
type watchedMesh struct {
	transport.Mesh
	peer     topo.Rank
	numBytes int
	blocks   func()
	polled   func()
}

func (m *watchedMesh) Conn(ctx context.Context, l transport.Lane, peer topo.Rank) (transport.Conn, error) {
	c, err := m.Mesh.Conn(ctx, l, peer)
	if err != nil || peer != m.peer {
		return c, err
	}
	return &watchedConn{Conn: c, mesh: m}, nil
}

type watchedConn struct {
	transport.Conn
	mesh     *watchedMesh
	received int
}

func (c *watchedConn) Sent() uint64 {
	c.mesh.polled()
	return c.Conn.Sent()
}

func (c *watchedConn) Read(p []byte) (int, error) {
	if c.received == c.mesh.numBytes {
		c.mesh.blocks()
	}
	n, err := c.Conn.Read(p)
	c.received += n
	return n, err
}

func (c *watchedConn) TryRead(p []byte) (int, error) {
	n, err := c.Conn.TryRead(p)
	c.received += n
	return n, err
}

// A rank that has the result of one tensor and waits for the result of the next one blocks, although its peer
// has not read its contribution to the next tensor yet. It does not poll until the peer does so. Here rank 1
// has reduced the first tensor, and waits for the contribution of rank 0 to the second one.
func TestDirectBlocks(t *testing.T) {
	const n, numBytes = 3, 256 << 10 // a rank reduces numBytes bytes at a time
	meshes := memMeshes(n)
	resumed := make(chan struct{})
	resume := sync.OnceFunc(func() { close(resumed) })
	polls := 0
	meshes[1] = &stalledMesh{Mesh: meshes[1], peer: 0, most: numBytes, resumed: resumed}
	meshes[2] = &watchedMesh{Mesh: meshes[2], peer: 1, numBytes: 3 * numBytes, blocks: resume,
		polled: func() {
			if polls++; polls == 10_000 {
				t.Error("rank 2 polls, want it to block")
				resume()
			}
		}}
	c := newCluster(meshes, topo.UpTo(n), tcp.Config{SegmentBytes: 2 * numBytes})
	defer c.close()
	c.must(t, func(_ int, b *opstest.Blocking) error {
		var list []ops.Tensor
		for range 2 * n { // the part of each rank has two tensors
			x := make([]byte, numBytes)
			list = append(list, ops.Tensor{In: x, Out: x})
		}
		return b.AllreduceFused(t.Context(), message.Direct, tensor.Uint8, tensor.Sum,
			ops.Scaling{Pre: 1, Post: 1}, list)
	})
}
