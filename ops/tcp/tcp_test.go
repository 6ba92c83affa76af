package tcp_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/tcp"
	"github.com/gohvd/gohvd/tensor"
	"github.com/gohvd/gohvd/topo"
	"github.com/gohvd/gohvd/transport"
	"github.com/gohvd/gohvd/transport/mem"
	transporttcp "github.com/gohvd/gohvd/transport/tcp"
)

var _ ops.Backend = (*tcp.Backend)(nil)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const lane = transport.Lane(3)

// cluster is the backends of all ranks of a process set in one process.
type cluster struct {
	meshes   []transport.Mesh
	backends []*tcp.Backend
}

// newCluster joins ranks of all meshes, in the order of ranks.
func newCluster(meshes []transport.Mesh, ranks []topo.Rank, cfg tcp.Config) *cluster {
	c := &cluster{}
	for i, r := range ranks {
		c.meshes = append(c.meshes, meshes[r])
		c.backends = append(c.backends, tcp.New(meshes[r], lane, ranks, i, cfg))
	}
	return c
}

// memMeshes are n ranks over transport/mem.
func memMeshes(n int) []transport.Mesh {
	c := mem.New(n)
	var all []transport.Mesh
	for r := range n {
		all = append(all, c.Mesh(topo.Rank(r)))
	}
	return all
}

// tcpMeshes are n ranks over the loopback interface, closed at the end.
func tcpMeshes(tb testing.TB, n int) []transport.Mesh {
	tb.Helper()
	endpoints, addrs := make([]*transporttcp.Endpoint, n), make([]string, n)
	for r := range n {
		e, err := transporttcp.Listen(transporttcp.Config{ListenAddr: "127.0.0.1:0"})
		if err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(func() { e.Close() })
		endpoints[r], addrs[r] = e, e.Addr()
	}
	all := make([]transport.Mesh, n)
	for r, e := range endpoints {
		m, err := e.Connect(transporttcp.Epoch{Job: "test", Epoch: 1, Rank: topo.Rank(r), Addrs: addrs})
		if err != nil {
			tb.Fatal(err)
		}
		all[r] = m
	}
	return all
}

// upTo lists the ranks 0 to n-1.
func upTo(n int) []topo.Rank {
	var all []topo.Rank
	for r := range n {
		all = append(all, topo.Rank(r))
	}
	return all
}

// each runs f for all ranks at once and returns their errors. A cluster that hangs is aborted, so that the test
// fails and does not.
func (c *cluster) each(f func(i int, b *tcp.Backend) error) []error {
	hung := time.AfterFunc(time.Minute, func() {
		for _, m := range c.meshes {
			m.Abort(lane, errors.New("the cluster hangs"))
		}
	})
	defer hung.Stop()
	errs := make([]error, len(c.backends))
	var wg sync.WaitGroup
	for i, b := range c.backends {
		wg.Go(func() { errs[i] = f(i, b) })
	}
	wg.Wait()
	return errs
}

// must is each for what has to succeed.
func (c *cluster) must(tb testing.TB, f func(i int, b *tcp.Backend) error) {
	tb.Helper()
	if err := errors.Join(c.each(f)...); err != nil {
		tb.Fatal(err)
	}
}

// value is what rank contributes at place i: small, of either sign, never zero, so that sums and products over eight
// ranks are exact in every type but uint8, which wraps.
func value(rank, i int) int64 {
	v := int64(rank*7+i*3)%4 - 2 // -2 to 1
	if v >= 0 {
		v++
	}
	return v
}

// fold is the reduction that the test expects, over all ranks at place i, computed one rank after the other.
func fold[T tensor.Element](op tensor.ReduceOp, n, i int) T {
	acc := T(value(0, i))
	for r := 1; r < n; r++ {
		v := T(value(r, i))
		switch {
		case op == tensor.Sum:
			acc += v
		case op == tensor.Product:
			acc *= v
		case op == tensor.Min && v < acc, op == tensor.Max && v > acc:
			acc = v
		}
	}
	return acc
}

var reduceOps = []tensor.ReduceOp{tensor.Sum, tensor.Min, tensor.Max, tensor.Product}

// checkAllreduce runs every operation on numElems of T.
func checkAllreduce[T tensor.Element](t *testing.T, c *cluster, numElems int) {
	t.Helper()
	n := len(c.backends)
	bufs := make([][]T, n)
	for r := range bufs {
		bufs[r] = make([]T, numElems)
	}
	want := make([]T, numElems)
	for _, op := range reduceOps {
		for i := range want {
			want[i] = fold[T](op, n, i)
			for r := range bufs {
				bufs[r][i] = T(value(r, i))
			}
		}
		c.must(t, func(r int, b *tcp.Backend) error {
			return b.Allreduce(t.Context(), message.Ring, tensor.Of[T](), op, tensor.Bytes(bufs[r]))
		})
		for r := range bufs {
			if !bytes.Equal(tensor.Bytes(bufs[r]), tensor.Bytes(want)) {
				for i := range want {
					if bufs[r][i] != want[i] {
						t.Fatalf("%v of %d × %T: rank %d has %v at %d, want %v", op, numElems, want[i], r, bufs[r][i], i, want[i])
					}
				}
			}
		}
	}
}

func checkAllTypes(t *testing.T, c *cluster, numElems int) {
	t.Helper()
	checkAllreduce[uint8](t, c, numElems)
	checkAllreduce[int32](t, c, numElems)
	checkAllreduce[int64](t, c, numElems)
	checkAllreduce[float32](t, c, numElems)
	checkAllreduce[float64](t, c, numElems)
}

// eachCluster tests clusters of several sizes, cut into several segments: of one element, of 64 bytes, and by default.
func eachCluster(t *testing.T, f func(t *testing.T, c *cluster, segmentBytes int)) {
	for _, n := range []int{1, 2, 3, 4, 5, 8} {
		for _, seg := range []int{1, 64, 0} {
			t.Run(fmt.Sprintf("ranks=%d/segment=%d", n, seg), func(t *testing.T) {
				f(t, newCluster(memMeshes(n), upTo(n), tcp.Config{SegmentBytes: seg}), seg)
			})
		}
	}
}

func TestAllreduce(t *testing.T) {
	eachCluster(t, func(t *testing.T, c *cluster, seg int) {
		for _, numElems := range []int{0, 1, 2, 7, 64, 1000} {
			checkAllTypes(t, c, numElems)
		}
		if seg != 1 { // 65537 segments would test nothing that 1000 do not
			checkAllTypes(t, c, 65537)
		}
	})
}

// TestAllreduceSameBits adds numbers whose sum depends on the order.
func TestAllreduceSameBits(t *testing.T) {
	eachCluster(t, func(t *testing.T, c *cluster, _ int) {
		bufs := make([][]float32, len(c.backends))
		for r := range bufs {
			bufs[r] = make([]float32, 1000)
			for i := range bufs[r] {
				bufs[r][i] = 1 / float32(1+i*len(bufs)+r*r)
			}
		}
		c.must(t, func(r int, b *tcp.Backend) error {
			return b.Allreduce(t.Context(), message.Ring, tensor.Float32, tensor.Sum, tensor.Bytes(bufs[r]))
		})
		for r := range bufs {
			if !bytes.Equal(tensor.Bytes(bufs[r]), tensor.Bytes(bufs[0])) {
				t.Errorf("rank %d has other bits than rank 0", r)
			}
		}
	})
}

func TestAllgather(t *testing.T) {
	eachCluster(t, func(t *testing.T, c *cluster, _ int) {
		n := len(c.backends)
		for _, of := range []func(r int) int64{
			func(r int) int64 { return 100 },
			func(r int) int64 { return int64(r*r*61) % 200 },    // rank 0 gives nothing
			func(r int) int64 { return int64(n-1-r) % 3 * 333 }, // nor does the last one
			func(r int) int64 { return int64(r/(n-1+1/n)) * 7 }, // only the last one gives
			func(r int) int64 { return 0 },
		} {
			checkAllgather(t, c, of)
		}
		checkAllgather(t, c, func(r int) int64 { return int64(5000 * (r + 1)) })
	})
}

func checkAllgather(t *testing.T, c *cluster, of func(r int) int64) {
	t.Helper()
	var counts []int64
	var want []byte
	for r := range c.backends {
		counts = append(counts, of(r))
		for i := range of(r) {
			want = append(want, byte(17*r+int(i)%251))
		}
	}
	got := make([][]byte, len(c.backends))
	c.must(t, func(r int, b *tcp.Backend) error {
		got[r] = bytes.Repeat([]byte{0xee}, len(want))
		from := int64(0)
		for _, k := range counts[:r] {
			from += k
		}
		copy(got[r][from:from+counts[r]], want[from:])
		return b.Allgather(t.Context(), message.Ring, got[r], counts)
	})
	for r := range got {
		if !bytes.Equal(got[r], want) {
			t.Errorf("counts %v: rank %d has other bytes than were given", counts, r)
		}
	}
}

func TestBroadcast(t *testing.T) {
	eachCluster(t, func(t *testing.T, c *cluster, _ int) {
		for root := range c.backends {
			for _, size := range []int{0, 1, 63, 64, 65, 5000} {
				want := make([]byte, size)
				for i := range want {
					want[i] = byte(i*31 + root)
				}
				got := make([][]byte, len(c.backends))
				c.must(t, func(r int, b *tcp.Backend) error {
					if got[r] = make([]byte, size); r == root {
						copy(got[r], want)
					}
					return b.Broadcast(t.Context(), message.Tree, root, got[r])
				})
				for r := range got {
					if !bytes.Equal(got[r], want) {
						t.Errorf("root %d, %d bytes: rank %d has other bytes", root, size, r)
					}
				}
			}
		}
	})
}

// TestProcessSet runs on a part of the ranks, whose order is not that of their numbers, by segments that are not whole
// elements of any type but one.
func TestProcessSet(t *testing.T) {
	c := newCluster(memMeshes(6), []topo.Rank{5, 1, 4}, tcp.Config{SegmentBytes: 61})
	checkAllTypes(t, c, 1000)
	checkAllgather(t, c, func(r int) int64 { return int64(100 * r) })
}

// TestSegmentsDiffer has another segment size on every rank.
func TestSegmentsDiffer(t *testing.T) {
	meshes, ranks := strictMeshes(t, 4), upTo(4)
	c := &cluster{meshes: meshes}
	for i, seg := range []int{1, 1000, 64, 0} {
		c.backends = append(c.backends, tcp.New(meshes[i], lane, ranks, i, tcp.Config{SegmentBytes: seg}))
	}
	checkAllTypes(t, c, 1000)
	checkAllgather(t, c, func(r int) int64 { return int64(1000*r + 1) })
}

// TestSockets goes through real sockets: those take less at once than is sent here, so that channels queue.
func TestSockets(t *testing.T) {
	for _, n := range []int{2, 3} {
		t.Run(fmt.Sprintf("ranks=%d", n), func(t *testing.T) {
			c := newCluster(tcpMeshes(t, n), upTo(n), tcp.Config{SegmentBytes: 64 << 10})
			for _, numElems := range []int{1, 1000, 4 << 20} {
				checkAllreduce[float32](t, c, numElems)
			}
			checkAllgather(t, c, func(r int) int64 { return int64(r * 4 << 20) })
			checkAllTypes(t, c, 1000)
		})
	}
}

// TestBufferOwnership runs over channels that let go of buffers late.
func TestBufferOwnership(t *testing.T) {
	for _, n := range []int{2, 3, 5} {
		t.Run(fmt.Sprintf("ranks=%d", n), func(t *testing.T) {
			c := newCluster(strictMeshes(t, n), upTo(n), tcp.Config{SegmentBytes: 64})
			for _, numElems := range []int{1, 64, 1000} {
				checkAllTypes(t, c, numElems)
				checkReleased(t, c)
			}
			checkAllgather(t, c, func(r int) int64 { return int64(100*r + 1) })
			checkReleased(t, c)
			bufs := make([][64]byte, n)
			c.must(t, func(r int, b *tcp.Backend) error { return b.Broadcast(t.Context(), message.Tree, 0, bufs[r][:]) })
			checkReleased(t, c)
		})
	}
}

// strictMeshes are n ranks over transport/mem.
func strictMeshes(t *testing.T, n int) []transport.Mesh {
	meshes := memMeshes(n)
	for r := range meshes {
		meshes[r] = &strictMesh{Mesh: meshes[r], t: t, conns: make(map[topo.Rank]*strictConn)}
	}
	return meshes
}

// checkReleased says which buffers the channels of strictMeshes hold between operations.
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

// strictMesh holds its user to the contract of transport.Conn: that what is sent does not change until Sent or Flush
// says that it has left. Sent lags behind by one call.
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

// strictConn belongs, as its mesh, to the one goroutine of its rank.
type strictConn struct {
	transport.Conn
	t        *testing.T
	position uint64 // of the stream, after all that was sent
	said     uint64
	pending  []sending
}

// sending is a buffer that has not left.
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

// Sent says what was true at the call before.
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

// leave checks what leaves up to a position.
func (c *strictConn) leave(to uint64) {
	for len(c.pending) > 0 && c.pending[0].end <= to {
		if p := c.pending[0]; !bytes.Equal(p.buf, p.content) {
			c.t.Errorf("%d bytes that end at %d were changed before they had left", len(p.buf), p.end)
		}
		c.pending = c.pending[1:]
	}
}

// TestAllocs asserts that steady state allocates nothing, with a context that cannot end and one that can. What all
// ranks allocate is counted.
func TestAllocs(t *testing.T) {
	const n = 4
	for _, ctx := range []context.Context{context.Background(), t.Context()} {
		c := newCluster(memMeshes(n), upTo(n), tcp.Config{SegmentBytes: 64})
		counts := []int64{100, 0, 300, 1648}
		bufs := make([][]byte, n)
		start, done := make([]chan struct{}, n), make(chan error)
		for r, b := range c.backends {
			start[r] = make(chan struct{})
			bufs[r] = tensor.Bytes(make([]float64, 256))
			go func() {
				for range start[r] {
					err := b.Allreduce(ctx, message.Ring, tensor.Float32, tensor.Sum, bufs[r])
					if err == nil {
						err = b.Allgather(ctx, message.Ring, bufs[r], counts)
					}
					if err == nil {
						err = b.Broadcast(ctx, message.Tree, 1, bufs[r])
					}
					done <- err
				}
			}()
			defer close(start[r])
		}
		once := func() {
			for _, s := range start {
				s <- struct{}{}
			}
			for range start {
				if err := <-done; err != nil {
					t.Error(err)
				}
			}
		}
		for range 20 { // channels are made, and their queues grow
			once()
		}
		if got := testing.AllocsPerRun(100, once); got != 0 {
			t.Errorf("context %v: got %v allocations for three collectives on %d ranks, want 0", ctx, got, n)
		}
	}
}

func TestPlan(t *testing.T) {
	b := newCluster(memMeshes(2), upTo(2), tcp.Config{}).backends[0]
	if b.ID() != message.TCP {
		t.Errorf("got ID %v, want %v", b.ID(), message.TCP)
	}
	for _, test := range []struct {
		r    message.Response
		want message.Algorithm // none: refused
	}{
		{message.Response{Kind: message.Allreduce, Op: tensor.Average, DType: tensor.Int32}, message.Ring},
		{message.Response{Kind: message.Allreduce, Op: tensor.Max, DType: tensor.Float64}, message.Ring},
		{message.Response{Kind: message.Allreduce, Op: tensor.NoReduce, DType: tensor.Float64}, message.NoAlgorithm},
		{message.Response{Kind: message.Allreduce, Op: tensor.Sum, DType: 99}, message.NoAlgorithm},
		{message.Response{Kind: message.Allgather, DType: tensor.Uint8}, message.Ring},
		{message.Response{Kind: message.Broadcast, DType: tensor.Uint8}, message.Tree},
		{message.Response{Kind: message.Barrier}, message.NoAlgorithm},
		{message.Response{Kind: message.Error}, message.NoAlgorithm},
	} {
		got, err := b.Plan(&test.r, 1<<20)
		if got != test.want || (err == nil) != (test.want != message.NoAlgorithm) {
			t.Errorf("%v: got %v, %v, want %v", test.r.Kind, got, err, test.want)
		}
	}
}

// TestRefused calls with arguments that do not fit, as a wrong frame could make a rank do.
func TestRefused(t *testing.T) {
	for name, call := range map[string]func(context.Context, *tcp.Backend) error{
		"allreduce by tree": func(ctx context.Context, b *tcp.Backend) error {
			return b.Allreduce(ctx, message.Tree, tensor.Float32, tensor.Sum, make([]byte, 8))
		},
		"average": func(ctx context.Context, b *tcp.Backend) error {
			return b.Allreduce(ctx, message.Ring, tensor.Float32, tensor.Average, make([]byte, 8))
		},
		"part of an element": func(ctx context.Context, b *tcp.Backend) error {
			return b.Allreduce(ctx, message.Ring, tensor.Float32, tensor.Sum, make([]byte, 7))
		},
		"no such type": func(ctx context.Context, b *tcp.Backend) error {
			return b.Allreduce(ctx, message.Ring, 99, tensor.Sum, make([]byte, 8))
		},
		"allgather by tree": func(ctx context.Context, b *tcp.Backend) error {
			return b.Allgather(ctx, message.Tree, make([]byte, 3), []int64{1, 1, 1})
		},
		"counts too few": func(ctx context.Context, b *tcp.Backend) error {
			return b.Allgather(ctx, message.Ring, make([]byte, 2), []int64{1, 1})
		},
		"counts too small": func(ctx context.Context, b *tcp.Backend) error {
			return b.Allgather(ctx, message.Ring, make([]byte, 4), []int64{1, 1, 1})
		},
		"counts too large": func(ctx context.Context, b *tcp.Backend) error {
			return b.Allgather(ctx, message.Ring, make([]byte, 3), []int64{1, 1, 2})
		},
		"counts that overflow": func(ctx context.Context, b *tcp.Backend) error {
			return b.Allgather(ctx, message.Ring, make([]byte, 2), []int64{1<<63 - 1, 1<<63 - 1, 4})
		},
		"negative count": func(ctx context.Context, b *tcp.Backend) error {
			return b.Allgather(ctx, message.Ring, make([]byte, 2), []int64{1, -1, 2})
		},
		"broadcast by ring": func(ctx context.Context, b *tcp.Backend) error {
			return b.Broadcast(ctx, message.Ring, 0, make([]byte, 2))
		},
		"root below": func(ctx context.Context, b *tcp.Backend) error {
			return b.Broadcast(ctx, message.Tree, -1, make([]byte, 2))
		},
		"root beyond": func(ctx context.Context, b *tcp.Backend) error {
			return b.Broadcast(ctx, message.Tree, 3, make([]byte, 2))
		},
	} {
		t.Run(name, func(t *testing.T) {
			// A call that is not refused would wait for the other ranks.
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			c := newCluster(memMeshes(3), upTo(3), tcp.Config{})
			b := c.backends[0]
			first := call(ctx, b)
			if first == nil || ctx.Err() != nil {
				t.Fatalf("got %v, want a refusal", first)
			}
			if err := b.Broadcast(ctx, message.Tree, 0, nil); !errors.Is(err, first) {
				t.Errorf("after %v: got %v, want the same", first, err)
			}
			if _, err := c.meshes[0].Conn(ctx, lane, 1); !errors.Is(err, first) {
				t.Errorf("after %v: its lane gives %v, want the same", first, err)
			}
		})
	}
}

// operations are the collectives with arguments that make every rank of n wait for all others, or nearly.
var operations = map[string]func(ctx context.Context, b *tcp.Backend, n int) error{
	"allreduce ring": func(ctx context.Context, b *tcp.Backend, n int) error {
		return own(1600, func(buf []byte) error {
			return b.Allreduce(ctx, message.Ring, tensor.Float32, tensor.Sum, buf)
		})
	},
	"allgather ring": func(ctx context.Context, b *tcp.Backend, n int) error {
		return own(400*n, func(buf []byte) error {
			return b.Allgather(ctx, message.Ring, buf, slices.Repeat([]int64{400}, n))
		})
	},
	"broadcast tree": func(ctx context.Context, b *tcp.Backend, n int) error {
		return own(1600, func(buf []byte) error {
			return b.Broadcast(ctx, message.Tree, 0, buf)
		})
	},
}

// own writes to the buffer once f gave it back: the race detector sees who still reads it.
func own(size int, f func(buf []byte) error) error {
	buf := tensor.Bytes(make([]int64, size/8))
	err := f(buf)
	for i := range buf {
		buf[i] = 0xff
	}
	return err
}

// TestPeerDies kills a rank in the middle. Who receives from it, and in the broadcast who sends to it, is told by its
// channel; the test is the coordinator that aborts the lane of the others, which would wait for each other for ever.
func TestPeerDies(t *testing.T) {
	const n = 4
	// Whom a rank's death keeps from success. The broadcast goes from 0 to 1 and 2, and from 2 to 3.
	concerned := map[string][n][]int{
		"allreduce ring": {{1, 2, 3}, {0, 2, 3}, {0, 1, 3}, {0, 1, 2}},
		"allgather ring": {{1, 2, 3}, {0, 2, 3}, {0, 1, 3}, {0, 1, 2}},
		"broadcast tree": {{1, 2, 3}, {0}, {0, 3}, {2}},
	}
	for name, op := range operations {
		for dying := range n {
			t.Run(fmt.Sprintf("%s/rank=%d", name, dying), func(t *testing.T) {
				world := mem.New(n)
				meshes := make([]transport.Mesh, n)
				for r := range meshes {
					meshes[r] = world.Mesh(topo.Rank(r))
				}
				meshes[dying] = &countdownMesh{
					Mesh: meshes[dying], left: 300, zero: func() { world.Kill(topo.Rank(dying)) },
				}
				c := newCluster(meshes, upTo(n), tcp.Config{SegmentBytes: 64})
				var verdict sync.Once
				errs := c.each(func(i int, b *tcp.Backend) error {
					err := op(t.Context(), b, n)
					if i != dying && err != nil {
						verdict.Do(func() {
							for _, m := range slices.Delete(slices.Clone(meshes), dying, dying+1) {
								m.Abort(lane, fmt.Errorf("verdict: %w", err))
							}
						})
					}
					return err
				})
				for i, err := range errs {
					var peer *transport.PeerError
					switch {
					case i == dying:
						if !errors.Is(err, transport.ErrClosed) {
							t.Errorf("rank %d, which died: got %v, want %v", i, err, transport.ErrClosed)
						}
					case err == nil && !slices.Contains(concerned[name][dying], i):
					case !errors.As(err, &peer) || peer.Peer != topo.Rank(dying) || peer.Lane != lane:
						t.Errorf("rank %d: got %v, want a PeerError of rank %d on lane %d", i, err, dying, lane)
					}
				}
			})
		}
	}
}

// countdownMesh calls zero when its rank has sent and received so many bytes.
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
	if m.left -= numBytes; m.left <= 0 {
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

func (c *countdownConn) Send(p []byte) error {
	c.mesh.use(len(p))
	return c.Conn.Send(p)
}

// TestAbort aborts all ranks in the middle.
func TestAbort(t *testing.T) {
	const n = 4
	boom := errors.New("boom")
	for name, op := range operations {
		t.Run(name, func(t *testing.T) {
			meshes := strictMeshes(t, n)
			first := meshes[0].(*strictMesh)
			first.Mesh = &countdownMesh{Mesh: first.Mesh, left: 300, zero: func() {
				for _, m := range meshes {
					m.Abort(lane, boom)
				}
			}}
			c := newCluster(meshes, upTo(n), tcp.Config{SegmentBytes: 64})
			for i, err := range c.each(func(i int, b *tcp.Backend) error { return op(t.Context(), b, n) }) {
				if !errors.Is(err, boom) {
					t.Errorf("rank %d: got %v, want %v", i, err, boom)
				}
			}
			checkReleased(t, c)
		})
	}
}

// TestAbortUnsent aborts ranks that wait for what they sent to leave.
func TestAbortUnsent(t *testing.T) {
	boom := errors.New("boom")
	meshes := memMeshes(2)
	for r := range meshes {
		meshes[r] = &stuckMesh{meshes[r], boom}
	}
	c := newCluster(meshes, upTo(2), tcp.Config{})
	for i, err := range c.each(func(i int, b *tcp.Backend) error { return operations["allreduce ring"](t.Context(), b, 2) }) {
		if !errors.Is(err, boom) {
			t.Errorf("rank %d: got %v, want %v", i, err, boom)
		}
	}
}

// stuckMesh has channels that never say that anything has left, and aborts when it is asked for too long.
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

// TestContext ends the context of three ranks that wait for the fourth: before a call, in the middle, and before the
// channels are there.
func TestContext(t *testing.T) {
	const n = 4
	reason := errors.New("no time left")
	for name, op := range operations {
		t.Run(name+"/before", func(t *testing.T) {
			ctx, cancel := context.WithCancelCause(t.Context())
			cancel(reason)
			c := newCluster(memMeshes(n), upTo(n), tcp.Config{})
			wantReason(t, reason, c.each(func(i int, b *tcp.Backend) error { return op(ctx, b, n) }))
		})
		t.Run(name+"/middle", func(t *testing.T) {
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			c := newCluster(memMeshes(n), upTo(n), tcp.Config{SegmentBytes: 64})
			c.must(t, func(i int, b *tcp.Backend) error { return op(ctx, b, n) })
			wantReason(t, reason, c.each(func(i int, b *tcp.Backend) error {
				if i == 0 {
					cancel(reason)
				}
				return op(ctx, b, n)
			}))
		})
		t.Run(name+"/unconnected", func(t *testing.T) {
			ctx, cancel := context.WithCancelCause(t.Context())
			c := newCluster(memMeshes(n), upTo(n), tcp.Config{})
			wantReason(t, reason, c.each(func(i int, b *tcp.Backend) error {
				if i == 0 {
					cancel(reason)
					return reason
				}
				return op(ctx, b, n)
			}))
		})
	}
	t.Run("of an earlier call", func(t *testing.T) {
		c := newCluster(memMeshes(n), upTo(n), tcp.Config{})
		for range 50 {
			ctx, cancel := context.WithCancel(t.Context())
			c.must(t, func(i int, b *tcp.Backend) error { return operations["allreduce ring"](ctx, b, n) })
			cancel()
		}
	})
}

// TestContextsDoNotPile alternates between two contexts that last.
func TestContextsDoNotPile(t *testing.T) {
	b := newCluster(memMeshes(1), upTo(1), tcp.Config{}).backends[0]
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

// countingContext counts who waits for it: package context uses its AfterFunc.
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

// The figures are those of nccl-tests: busbw is bytes/time × 2(n-1)/n, which of the links' speed is used, whatever n.
func BenchmarkAllreduce(b *testing.B) {
	for _, net := range []struct {
		name   string
		meshes func(tb testing.TB, n int) []transport.Mesh
	}{
		{"mem", func(_ testing.TB, n int) []transport.Mesh { return memMeshes(n) }},
		{"tcp", tcpMeshes},
	} {
		for _, n := range []int{2, 4} {
			for numBytes := 1 << 10; numBytes <= 64<<20; numBytes <<= 4 {
				b.Run(fmt.Sprintf("%s/ranks=%d/bytes=%d", net.name, n, numBytes), func(b *testing.B) {
					benchmarkAllreduce(b, newCluster(net.meshes(b, n), upTo(n), tcp.Config{}), numBytes)
				})
			}
		}
	}
}

// BenchmarkSegment is what DefaultSegmentBytes was chosen by.
func BenchmarkSegment(b *testing.B) {
	for seg := 16 << 10; seg <= 4<<20; seg <<= 1 {
		for _, n := range []int{2, 4} {
			b.Run(fmt.Sprintf("segment=%d/ranks=%d", seg, n), func(b *testing.B) {
				benchmarkAllreduce(b, newCluster(tcpMeshes(b, n), upTo(n), tcp.Config{SegmentBytes: seg}), 16<<20)
			})
		}
	}
}

func benchmarkAllreduce(b *testing.B, c *cluster, numBytes int) {
	n := len(c.backends)
	bufs := make([][]byte, n)
	for r := range bufs {
		bufs[r] = tensor.Bytes(make([]float64, numBytes/8))
	}
	sum := func(r int, be *tcp.Backend) error {
		return be.Allreduce(b.Context(), message.Ring, tensor.Float32, tensor.Sum, bufs[r])
	}
	c.must(b, sum) // channels are made
	b.SetBytes(int64(numBytes))
	b.ReportAllocs()
	b.ResetTimer()
	// Each rank loops by itself: a collective needs no further synchronisation.
	c.must(b, func(r int, be *tcp.Backend) error {
		for range b.N {
			if err := sum(r, be); err != nil {
				return err
			}
		}
		return nil
	})
	algbw := float64(numBytes) * float64(b.N) / b.Elapsed().Seconds() / 1e9
	b.ReportMetric(algbw*2*float64(n-1)/float64(n), "busbw-GB/s")
}
