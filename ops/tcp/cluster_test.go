package tcp_test

import (
	"bytes"
	"context"
	"errors"
	"runtime"
	"testing"

	"github.com/gohvd/gohvd/internal/testcluster"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/ops/opstest"
	"github.com/gohvd/gohvd/ops/tcp"
)

const lane = transport.Lane(3)

// cluster has the meshes and the backends of all ranks of a process set, in one process.
type cluster struct {
	meshes   []transport.Mesh
	backends []*opstest.Blocking
}

// newCluster makes the backends of a process set with the given ranks in the given order.
func newCluster(meshes []transport.Mesh, ranks []topo.Rank, cfg tcp.Config) *cluster {
	c := &cluster{}
	for i, r := range ranks {
		c.meshes = append(c.meshes, meshes[r])
		b := tcp.New(sharedMesh{meshes[r]}, lane, ranks, i, cfg)
		c.backends = append(c.backends, &opstest.Blocking{Backend: b})
	}
	return c
}

// sharedMesh is the mesh of a rank that shares its process with the other ranks. A backend that polls yields
// the processor to other processes only. So if nothing has arrived, a channel of a sharedMesh lets the
// goroutines of other ranks run. Otherwise a test with more ranks than processors would mostly poll.
type sharedMesh struct{ transport.Mesh }

func (m sharedMesh) Conn(ctx context.Context, l transport.Lane, peer topo.Rank) (transport.Conn, error) {
	c, err := m.Mesh.Conn(ctx, l, peer)
	if err != nil {
		return nil, err
	}
	return sharedConn{c}, nil
}

// sharedConn is a channel of a sharedMesh.
type sharedConn struct{ transport.Conn }

func (c sharedConn) TryRead(p []byte) (int, error) {
	n, err := c.Conn.TryRead(p)
	if n == 0 && err == nil {
		runtime.Gosched()
	}
	return n, err
}

// These functions make the meshes of n ranks.
var (
	memMeshes    = testcluster.MemMeshes
	tcpMeshes    = testcluster.TCPMeshes
	socketMeshes = testcluster.SecretTCPMeshes
)

// networks lists the transports with which the backend is tested.
var networks = []struct {
	name   string
	meshes func(tb testing.TB, n int) []transport.Mesh
}{
	{"mem", func(_ testing.TB, n int) []transport.Mesh { return memMeshes(n) }},
	{"tcp", tcpMeshes},
}

// each calls f for all ranks at the same time and returns their errors.
func (c *cluster) each(f func(i int, b *opstest.Blocking) error) []error {
	return opstest.Each(c.backends, func(err error) {
		for _, m := range c.meshes {
			m.Abort(lane, err)
		}
	}, f)
}

// must is like each, but fails the test if any call of f fails.
func (c *cluster) must(tb testing.TB, f func(i int, b *opstest.Blocking) error) {
	tb.Helper()
	if err := errors.Join(c.each(f)...); err != nil {
		tb.Fatal(err)
	}
}

func (c *cluster) close() {
	for _, b := range c.backends {
		b.Close()
	}
}

// strictMeshes returns the meshes of n ranks that are connected by transport/mem. Each mesh is a strictMesh.
func strictMeshes(t *testing.T, n int) []transport.Mesh {
	meshes := memMeshes(n)
	for r := range meshes {
		meshes[r] = &strictMesh{Mesh: meshes[r], t: t, conns: make(map[topo.Rank]*strictConn)}
	}
	return meshes
}

// checkReleased fails the test if a channel of strictMeshes still holds a buffer. No operation may be in
// progress.
func checkReleased(t *testing.T, c *cluster) {
	t.Helper()
	for r, m := range c.meshes {
		for peer, conn := range m.(*strictMesh).conns {
			if len(conn.pending) > 0 {
				t.Errorf("rank %d: the channel to %d still has %d buffers", r, peer, len(conn.pending))
			}
		}
	}
}

// strictMesh checks that the backend obeys the contract of transport.Conn: a buffer must not change after
// Send until Sent or Flush shows that the buffer has left. To make the check stricter, Sent returns an
// outdated value: the value that the mesh below returned at the previous call.
type strictMesh struct {
	transport.Mesh
	t     *testing.T
	conns map[topo.Rank]*strictConn
}

func (m *strictMesh) Conn(ctx context.Context, l transport.Lane, peer topo.Rank) (transport.Conn, error) {
	inner, err := m.Mesh.Conn(ctx, l, peer)
	if err != nil {
		return nil, err
	}
	if m.conns[peer] == nil {
		m.conns[peer] = &strictConn{Conn: inner, t: m.t}
	}
	return m.conns[peer], nil
}

// strictConn is a channel of a strictMesh. Only the goroutine of its rank may use it.
type strictConn struct {
	transport.Conn
	t        *testing.T
	position uint64 // the number of bytes that were passed to Send
	said     uint64
	longest  int // the greatest number of bytes that were passed to TrySend at once
	pending  []sending
}

// sending is a buffer that has been passed to Send and has not left yet.
type sending struct {
	end          uint64
	buf, content []byte
}

func (c *strictConn) Send(p []byte) error {
	if len(p) > 0 {
		c.position += uint64(len(p))
		c.pending = append(c.pending, sending{c.position, p, bytes.Clone(p)})
	}
	return c.Conn.Send(p)
}

// TrySend queues at most half of p, as a socket without much room does.
func (c *strictConn) TrySend(p []byte) (int, error) {
	c.longest = max(c.longest, len(p))
	n := (len(p) + 1) / 2
	return n, c.Send(p[:n])
}

// Sent returns the value that the channel below returned at the previous call of Sent or Flush.
func (c *strictConn) Sent() uint64 {
	said := c.said
	c.said = c.Conn.Sent()
	c.leave(said)
	return said
}

func (c *strictConn) Flush() error {
	err := c.Conn.Flush()
	c.said = c.position
	c.leave(c.position)
	return err
}

// leave removes the buffers that end at or before the given stream position. It fails the test if one of them
// was changed.
func (c *strictConn) leave(to uint64) {
	for len(c.pending) > 0 && c.pending[0].end <= to {
		if p := c.pending[0]; !bytes.Equal(p.buf, p.content) {
			c.t.Errorf("%d bytes that end at %d were changed before they had left", len(p.buf), p.end)
		}
		c.pending = c.pending[1:]
	}
}
