package tcp_test

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/gohvd/gohvd/half"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/opstest"
	"github.com/gohvd/gohvd/ops/tcp"
)

// uneven returns the ranks' contributions to a tensor. The numbers have very different magnitudes, so their
// sums and products depend on the order.
func uneven(dt tensor.DType, n, numElems int) [][]byte {
	all := make([][]byte, n)
	rng := rand.New(rand.NewPCG(1, 2))
	for r := range all {
		all[r] = floats(dt, numElems, func(int) float64 {
			return rng.NormFloat64() * math.Exp2(float64(rng.IntN(8)))
		})
	}
	return all
}

// inOrder returns the reduction of the contributions, combined in the order in which they are given. It
// computes with numbers of type acc and rounds to dt once, at the end.
func inOrder(op tensor.ReduceOp, dt, acc tensor.DType, in [][]byte) []byte {
	return floats(dt, len(in[0])/dt.Size(), func(i int) float64 {
		sum := float(dt, in[0], i)
		for _, p := range in[1:] {
			x := float(dt, p, i)
			if op == tensor.Sum {
				sum += x
			} else {
				sum *= x
			}
			sum = float(acc, floats(acc, 1, func(int) float64 { return sum }), 0)
		}
		return sum
	})
}

// float returns element i of p as a float64.
func float(dt tensor.DType, p []byte, i int) float64 {
	switch dt {
	case tensor.Float16:
		return float64(tensor.View[half.Float16](p)[i].Float32())
	case tensor.BFloat16:
		return float64(tensor.View[half.BFloat16](p)[i].Float32())
	case tensor.Float32:
		return float64(tensor.View[float32](p)[i])
	case tensor.Float64:
		return tensor.View[float64](p)[i]
	}
	panic(fmt.Sprintf("no floats of %v", dt))
}

var floatTypes = []tensor.DType{tensor.Float16, tensor.BFloat16, tensor.Float32, tensor.Float64}

// The result of Direct depends only on the contributions. The test embeds the same tensor at different
// positions in buffers of different lengths, which are cut into different segments. Each time, the result
// must have the bits that a single rank with all contributions would compute.
func TestDirectOrder(t *testing.T) {
	const numElems = 50
	for _, n := range []int{2, 3, 5} {
		c := newCluster(memMeshes(n), upTo(n), tcp.Config{SegmentBytes: 64})
		for _, red := range everyReduction {
			op, dt := red.op, red.dt
			if !dt.IsFloat() || op == tensor.Min || op == tensor.Max {
				continue
			}
			acc := dt
			if dt.IsHalf() {
				acc = tensor.Float32
			}
			in := uneven(dt, n, numElems)
			want := inOrder(op, dt, acc, in)
			for _, place := range []struct{ before, after int }{{0, 0}, {0, 1}, {3, 0}, {17, 40}, {500, 37},
				{1, 4000}} {
				checkDirectOrder(t, c, op, dt, in, want, place.before*dt.Size(), place.after*dt.Size())
			}
		}
		c.close()
	}
}

// checkDirectOrder embeds each contribution in a larger buffer and reduces these buffers. The parameters
// before and after are the numbers of bytes that the buffer has before and after the contribution. In the
// result, the reduction of the contributions must equal want.
func checkDirectOrder(t *testing.T, c *cluster, op tensor.ReduceOp, dt tensor.DType, in [][]byte, want []byte,
	before, after int) {
	t.Helper()
	bufs := make([][]byte, len(in))
	counts := make([]int64, len(in))
	counts[len(in)/2] = int64(before + len(want) + after)
	embed := func() {
		for r := range bufs {
			bufs[r] = aligned(make([]byte, before+len(want)+after))
			copy(bufs[r][before:], in[r])
		}
	}
	embed()
	c.must(t, func(r int, b *opstest.Blocking) error {
		return b.Allreduce(t.Context(), message.Direct, dt, op, bufs[r])
	})
	for r := range bufs {
		what := fmt.Sprintf("allreduce %v of %v between %d and %d bytes: rank %d", op, dt, before, after, r)
		wantElements(t, what, dt, bufs[r][before:][:len(want)], want)
	}
	embed()
	c.must(t, func(r int, b *opstest.Blocking) error {
		return b.Reducescatter(t.Context(), message.Direct, dt, op, bufs[r], counts)
	})
	what := fmt.Sprintf("reducescatter %v of %v between %d and %d bytes", op, dt, before, after)
	wantElements(t, what, dt, bufs[len(in)/2][before:][:len(want)], want)
}

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
	c := newCluster(meshes, upTo(n), tcp.Config{SegmentBytes: 2 * numBytes})
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
