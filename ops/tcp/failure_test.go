package tcp_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	transporttcp "github.com/gohvd/gohvd/internal/transport/tcp"
	"github.com/gohvd/gohvd/ops/opstest"
	"github.com/gohvd/gohvd/ops/tcp"
)

// arguments has one rank's arguments for every collective. In the buffers, every rank has a block of 400
// bytes.
type arguments struct {
	buf, out []byte
	counts   []int64
	allocate func([]int64) ([]byte, error) // returns the buffer out
}

func newArguments(n int) *arguments {
	a := &arguments{
		buf:    tensor.Bytes(make([]int64, 50*n)),
		out:    tensor.Bytes(make([]int64, 50*n)),
		counts: slices.Repeat([]int64{400}, n),
	}
	a.allocate = func([]int64) ([]byte, error) { return a.out, nil }
	return a
}

// operations has a function for each collective and each of its algorithms, by name. In each of these
// operations, every rank waits for all or nearly all other ranks.
var operations = map[string]func(ctx context.Context, b *opstest.Blocking, a *arguments) error{
	"allreduce ring": func(ctx context.Context, b *opstest.Blocking, a *arguments) error {
		return b.Allreduce(ctx, message.Ring, tensor.Float32, tensor.Sum, a.buf)
	},
	"allreduce direct": func(ctx context.Context, b *opstest.Blocking, a *arguments) error {
		return b.Allreduce(ctx, message.Direct, tensor.Float32, tensor.Sum, a.buf)
	},
	"allreduce direct halves": func(ctx context.Context, b *opstest.Blocking, a *arguments) error {
		return b.Allreduce(ctx, message.Direct, tensor.Float16, tensor.Sum, a.buf)
	},
	"allreduce exchange": func(ctx context.Context, b *opstest.Blocking, a *arguments) error {
		return b.Allreduce(ctx, message.Exchange, tensor.Float32, tensor.Sum, a.buf)
	},
	"allreduce recursive-doubling": func(ctx context.Context, b *opstest.Blocking, a *arguments) error {
		return b.Allreduce(ctx, message.RecursiveDoubling, tensor.Float32, tensor.Sum, a.buf)
	},
	"allreduce halving-doubling": func(ctx context.Context, b *opstest.Blocking, a *arguments) error {
		return b.Allreduce(ctx, message.HalvingDoubling, tensor.Float32, tensor.Sum, a.buf)
	},
	"adasum": func(ctx context.Context, b *opstest.Blocking, a *arguments) error {
		return b.Adasum(ctx, message.HalvingDoubling, tensor.BFloat16, a.buf, a.counts)
	},
	"reducescatter ring": func(ctx context.Context, b *opstest.Blocking, a *arguments) error {
		return b.Reducescatter(ctx, message.Ring, tensor.Int16, tensor.Max, a.buf, a.counts)
	},
	"reducescatter direct": func(ctx context.Context, b *opstest.Blocking, a *arguments) error {
		return b.Reducescatter(ctx, message.Direct, tensor.BFloat16, tensor.Sum, a.buf, a.counts)
	},
	"allgather ring": func(ctx context.Context, b *opstest.Blocking, a *arguments) error {
		return b.Allgather(ctx, message.Ring, a.buf, a.counts)
	},
	"allgather bruck": func(ctx context.Context, b *opstest.Blocking, a *arguments) error {
		return b.Allgather(ctx, message.Bruck, a.buf, a.counts)
	},
	"broadcast chain": func(ctx context.Context, b *opstest.Blocking, a *arguments) error {
		return b.Broadcast(ctx, message.Chain, 0, a.buf)
	},
	"broadcast tree": func(ctx context.Context, b *opstest.Blocking, a *arguments) error {
		return b.Broadcast(ctx, message.Tree, 0, a.buf)
	},
	"alltoall direct": func(ctx context.Context, b *opstest.Blocking, a *arguments) error {
		return b.Alltoall(ctx, message.Direct, a.buf, a.counts, a.allocate)
	},
	"alltoall bruck": func(ctx context.Context, b *opstest.Blocking, a *arguments) error {
		return b.Alltoall(ctx, message.Bruck, a.buf, a.counts, a.allocate)
	},
}

// runOperation runs an operation. When the operation has ended, it overwrites the buffers, so that the race
// detector reports code that still reads them.
func runOperation(ctx context.Context, name string, b *opstest.Blocking, n int) error {
	a := newArguments(n)
	err := operations[name](ctx, b, a)
	for i := range a.buf {
		a.buf[i], a.out[i] = 0xff, 0xff
	}
	return err
}

// judge is like each, but also acts as the coordinator. After the first error of a living rank, it aborts the
// lane at all ranks except the rank with number dead.
func (c *cluster) judge(dead int, f func(i int, b *opstest.Blocking) error) []error {
	var verdict sync.Once
	return c.each(func(i int, b *opstest.Blocking) error {
		err := f(i, b)
		if i != dead && err != nil {
			verdict.Do(func() {
				for k, m := range c.meshes {
					if k != dead {
						m.Abort(lane, fmt.Errorf("verdict: %w", err))
					}
				}
			})
		}
		return err
	})
}

// TestPeerDies kills a rank in the middle of an operation. The ranks that receive from it get a *PeerError
// from their channels. In a broadcast, the ranks that send to it may get one too. The test acts as the
// coordinator and aborts the lane of the other ranks, which would otherwise wait for each other forever.
func TestPeerDies(t *testing.T) {
	for _, net := range networks {
		for name := range operations {
			for dying := range 5 {
				t.Run(fmt.Sprintf("%s/%s/rank=%d", net.name, name, dying), func(t *testing.T) {
					checkPeerDies(t, net.meshes(t, 5), name, dying)
				})
			}
		}
	}
}

// parents has the parent of each of five ranks in a broadcast from rank 0.
var parents = map[string][]int{
	"broadcast tree":  {-1, 0, 0, 2, 0},
	"broadcast chain": {-1, 0, 1, 2, 3},
}

// concerned reports whether the operation must fail at rank i if the rank with number dying dies. There are
// five ranks. Over sockets, a sender finishes before the death of its receiver can make it fail.
func concerned(name string, dying, i int, sockets bool) bool {
	parents := parents[name]
	if parents == nil {
		return true
	}
	for v := i; v > 0; v = parents[v] {
		if parents[v] == dying {
			return true
		}
	}
	return !sockets && parents[dying] == i
}

func checkPeerDies(t *testing.T, meshes []transport.Mesh, name string, dying int) {
	n := len(meshes)
	dies := meshes[dying]
	_, sockets := dies.(*transporttcp.Mesh)
	meshes[dying] = &countdownMesh{Mesh: dies, left: 300, zero: func() { _ = dies.Close() }}
	c := newCluster(meshes, topo.UpTo(n), tcp.Config{SegmentBytes: 64})
	errs := c.judge(dying, func(i int, b *opstest.Blocking) error {
		return runOperation(t.Context(), name, b, n)
	})
	for i, err := range errs {
		var peer *transport.PeerError
		switch {
		case i == dying:
			if !errors.Is(err, transport.ErrClosed) {
				t.Errorf("rank %d, which died: got %v, want %v", i, err, transport.ErrClosed)
			}
		case err == nil && !concerned(name, dying, i, sockets):
		case !errors.As(err, &peer) || peer.Peer != topo.Rank(dying) || peer.Lane != lane:
			t.Errorf("rank %d: got %v, want a PeerError of rank %d on lane %d", i, err, dying, lane)
		}
	}
}

// countdownMesh calls the function zero when its rank has sent and received a given number of bytes in total.
type countdownMesh struct {
	transport.Mesh
	left int
	zero func()
}

func (m *countdownMesh) Conn(ctx context.Context, l transport.Lane, peer topo.Rank) (transport.Conn, error) {
	c, err := m.Mesh.Conn(ctx, l, peer)
	return &countdownConn{c, m}, err
}

func (m *countdownMesh) use(numBytes int) {
	m.left -= numBytes
	if m.left <= 0 {
		m.zero()
	}
}

type countdownConn struct {
	transport.Conn
	mesh *countdownMesh
}

func (c *countdownConn) Read(p []byte) (int, error) {
	c.mesh.use(len(p))
	return c.Conn.Read(p)
}

func (c *countdownConn) TryRead(p []byte) (int, error) {
	n, err := c.Conn.TryRead(p)
	c.mesh.use(n)
	return n, err
}

func (c *countdownConn) Send(p []byte) error {
	c.mesh.use(len(p))
	return c.Conn.Send(p)
}

func (c *countdownConn) TrySend(p []byte) (int, error) {
	c.mesh.use(len(p))
	return c.Conn.TrySend(p)
}

// TestAbort aborts the lane of all ranks in the middle of an operation. Every rank must get the error that
// was passed to Abort. Afterwards no channel may hold a buffer.
func TestAbort(t *testing.T) {
	const n = 5
	boom := errors.New("boom")
	for name := range operations {
		t.Run(name, func(t *testing.T) {
			meshes := strictMeshes(t, n)
			first := meshes[0].(*strictMesh)
			first.Mesh = &countdownMesh{Mesh: first.Mesh, left: 300, zero: func() {
				for _, m := range meshes {
					m.Abort(lane, boom)
				}
			}}
			c := newCluster(meshes, topo.UpTo(n), tcp.Config{SegmentBytes: 64})
			for i, err := range c.each(func(i int, b *opstest.Blocking) error {
				return runOperation(t.Context(), name, b, n)
			}) {
				if !errors.Is(err, boom) {
					t.Errorf("rank %d: got %v, want %v", i, err, boom)
				}
			}
			checkReleased(t, c)
		})
	}
}

// TestAbortUnsent aborts the lane while the ranks wait for their sent bytes to leave. Every rank must get the
// error that was passed to Abort.
func TestAbortUnsent(t *testing.T) {
	boom := errors.New("boom")
	for _, name := range []string{"allreduce ring", "allreduce direct"} {
		t.Run(name, func(t *testing.T) {
			meshes := memMeshes(2)
			for r := range meshes {
				meshes[r] = &stuckMesh{meshes[r], boom}
			}
			c := newCluster(meshes, topo.UpTo(2), tcp.Config{})
			for i, err := range c.each(func(i int, b *opstest.Blocking) error {
				return runOperation(t.Context(), name, b, 2)
			}) {
				if !errors.Is(err, boom) {
					t.Errorf("rank %d: got %v, want %v", i, err, boom)
				}
			}
		})
	}
}

// stuckMesh has channels whose Sent always returns 0. At the 100th call of Sent, the channel aborts the lane.
type stuckMesh struct {
	transport.Mesh
	reason error
}

func (m *stuckMesh) Conn(ctx context.Context, l transport.Lane, peer topo.Rank) (transport.Conn, error) {
	c, err := m.Mesh.Conn(ctx, l, peer)
	return &stuckConn{Conn: c, giveUp: func() { m.Abort(l, m.reason) }}, err
}

type stuckConn struct {
	transport.Conn
	asked  int
	giveUp func()
}

func (c *stuckConn) Sent() uint64 {
	if c.asked++; c.asked == 100 {
		c.giveUp()
	}
	return 0
}

// The context ends before the call, while four ranks wait for rank 0, or before the channels are made. In
// each case all ranks get the cause of the context.
func TestContext(t *testing.T) {
	const n = 5
	reason := errors.New("no time left")
	for _, net := range networks {
		for name := range operations {
			t.Run(net.name+"/"+name, func(t *testing.T) { checkContext(t, net.meshes, name, n, reason) })
		}
	}
	t.Run("of an earlier call", func(t *testing.T) {
		c := newCluster(memMeshes(n), topo.UpTo(n), tcp.Config{})
		for range 50 {
			ctx, cancel := context.WithCancel(t.Context())
			c.must(t, func(i int, b *opstest.Blocking) error {
				return runOperation(ctx, "allreduce ring", b, n)
			})
			cancel()
		}
	})
}

func checkContext(t *testing.T, meshes func(testing.TB, int) []transport.Mesh, name string, n int,
	reason error) {
	t.Run("before", func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(reason)
		c := newCluster(meshes(t, n), topo.UpTo(n), tcp.Config{})
		wantReason(t, reason, c.each(func(i int, b *opstest.Blocking) error {
			return runOperation(ctx, name, b, n)
		}))
	})
	t.Run("middle", func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		defer cancel(nil)
		c := newCluster(meshes(t, n), topo.UpTo(n), tcp.Config{SegmentBytes: 64})
		c.must(t, func(i int, b *opstest.Blocking) error { return runOperation(ctx, name, b, n) })
		wantReason(t, reason, c.each(func(i int, b *opstest.Blocking) error {
			if i == 0 {
				cancel(reason)
			}
			return runOperation(ctx, name, b, n)
		}))
	})
	t.Run("unconnected", func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		c := newCluster(meshes(t, n), topo.UpTo(n), tcp.Config{})
		wantReason(t, reason, c.each(func(i int, b *opstest.Blocking) error {
			if i == 0 {
				cancel(reason)
				return reason
			}
			return runOperation(ctx, name, b, n)
		}))
	})
}

// If operations alternate between two contexts, at most one function waits for the end of a context.
func TestContextsDoNotPile(t *testing.T) {
	b := newCluster(memMeshes(1), topo.UpTo(1), tcp.Config{}).backends[0]
	live := 0
	one := &countingContext{Context: t.Context(), done: make(chan struct{}), live: &live}
	two := &countingContext{Context: t.Context(), done: make(chan struct{}), live: &live}
	for range 3 {
		for _, ctx := range []context.Context{one, two, two} {
			if err := b.Broadcast(ctx, message.Tree, 0, nil); err != nil {
				t.Fatal(err)
			}
			if live != 1 {
				t.Fatalf("got %d functions that wait for a context, want 1", live)
			}
		}
	}
}

// countingContext is a context that counts how many functions wait for its end. The field live has the
// number. Package context calls AfterFunc for each of these functions.
type countingContext struct {
	context.Context
	done chan struct{}
	live *int
}

func (c *countingContext) Done() <-chan struct{} { return c.done }

func (c *countingContext) Value(any) any { return nil }

func (c *countingContext) AfterFunc(func()) func() bool {
	*c.live++
	return func() bool {
		*c.live--
		return true
	}
}

func wantReason(t *testing.T, reason error, errs []error) {
	t.Helper()
	for i, err := range errs {
		if !errors.Is(err, reason) {
			t.Errorf("rank %d: got %v, want %v", i, err, reason)
		}
	}
}
