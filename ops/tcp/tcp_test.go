package tcp_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/opstest"
	"github.com/gohvd/gohvd/ops/tcp"
)

var _ ops.Backend = (*tcp.Backend)(nil)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A process set of thousands of ranks may never run an operation on this backend.
func TestUnusedBackendIsSmall(t *testing.T) {
	opstest.UnusedIsSmall(t, func(ranks []topo.Rank) ops.Backend {
		return tcp.New(nil, 0, ranks, 0, tcp.Config{})
	})
}

// An operation uses its own segment size, and the next operation without one uses the default again.
func TestSegmentOfOperation(t *testing.T) {
	c := newCluster(strictMeshes(t, 2), topo.UpTo(2), tcp.Config{SegmentBytes: 256})
	bufs := [2][4096]byte{}
	for _, step := range []struct{ segment, longest int }{{64, 64}, {0, 256}, {1024, 1024}} {
		c.must(t, func(r int, b *opstest.Blocking) error {
			return ops.Run(t.Context(), b.Backend, ops.Operation{
				Kind: message.Allreduce, Algorithm: message.Ring, DType: tensor.Uint8, Op: tensor.Sum,
				SegmentBytes: step.segment, Scaling: ops.Scaling{Pre: 1, Post: 1},
				Tensors: []ops.Tensor{{In: bufs[r][:], Out: bufs[r][:]}},
			})
		})
		if got := c.meshes[0].(*strictMesh).conns[1].longest; got != step.longest {
			t.Errorf("segment size %d: the longest segment so far has %d bytes, want %d", step.segment, got,
				step.longest)
		}
	}
}

// Once the first operations have run, an operation allocates nothing. This holds for contexts that can end
// and for contexts that cannot.
func TestAllocs(t *testing.T) {
	const n = 5
	for _, ctx := range []context.Context{context.Background(), t.Context()} {
		for name, op := range operations {
			c := newCluster(memMeshes(n), topo.UpTo(n), tcp.Config{SegmentBytes: 64})
			start, done := make([]chan struct{}, n), make(chan error)
			for r, b := range c.backends {
				start[r] = make(chan struct{})
				args := newArguments(n)
				go func() {
					for range start[r] {
						done <- op(ctx, b, args)
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
			for range 20 { // the first operations make the channels and grow their queues
				once()
			}
			if got := testing.AllocsPerRun(100, once); got != 0 {
				t.Errorf("context %v: got %v allocations for one %s on %d ranks, want 0", ctx, got, name, n)
			}
		}
	}
}

// If no rule of the table applies, Plan chooses the first algorithm that can serve the operation. Over two
// ranks the order of the additions changes nothing, so Plan chooses the same algorithm for all types.
func TestPlan(t *testing.T) {
	fast := tcp.Register(memMeshes(3)[0], tcp.Config{Table: tcp.Table{}})
	same := tcp.Register(memMeshes(3)[0], tcp.Config{Table: tcp.Table{}, Deterministic: true})
	const none = message.NoAlgorithm // means that Plan must return an error
	for _, test := range []struct {
		r                        message.Response
		usual, wantDeterministic message.Algorithm
	}{
		{message.Response{Kind: message.Allreduce, Op: tensor.Average, DType: tensor.Int32}, message.Ring,
			message.Ring},
		{message.Response{Kind: message.Allreduce, Op: tensor.Max, DType: tensor.Float64}, message.Ring,
			message.Ring},
		{message.Response{Kind: message.Allreduce, Op: tensor.Min, DType: tensor.Bool}, message.Ring,
			message.Ring},
		{message.Response{Kind: message.Allreduce, Op: tensor.Sum, DType: tensor.Bool}, none, none},
		{message.Response{Kind: message.Allreduce, Op: tensor.Sum, DType: tensor.Float32}, message.Ring,
			message.Direct},
		{message.Response{Kind: message.Allreduce, Op: tensor.Product, DType: tensor.Float64}, message.Ring,
			message.Direct},
		{message.Response{Kind: message.Allreduce, Op: tensor.Average, DType: tensor.Float64}, message.Ring,
			message.Direct},
		{message.Response{Kind: message.Allreduce, Op: tensor.AverageActive, DType: tensor.Float16},
			message.Direct, message.Direct},
		{message.Response{Kind: message.Allreduce, Op: tensor.Product, DType: tensor.BFloat16},
			message.Direct, message.Direct},
		{message.Response{Kind: message.Allreduce, Op: tensor.Max, DType: tensor.BFloat16}, message.Ring,
			message.Ring},
		{message.Response{Kind: message.Allreduce, Op: tensor.Sum, DType: tensor.Float32,
			Wire: tensor.Float16}, message.Direct, message.Direct},
		{message.Response{Kind: message.Allreduce, Op: tensor.Adasum, DType: tensor.Float32},
			message.HalvingDoubling, message.HalvingDoubling},
		{message.Response{Kind: message.Allreduce, Op: tensor.Adasum, DType: tensor.Int32}, none, none},
		{message.Response{Kind: message.Allreduce, Op: tensor.NoReduce, DType: tensor.Float64}, none, none},
		{message.Response{Kind: message.Allreduce, Op: tensor.Sum, DType: 99}, none, none},
		{message.Response{Kind: message.Reducescatter, Op: tensor.Sum, DType: tensor.Float32}, message.Ring,
			message.Direct},
		{message.Response{Kind: message.Reducescatter, Op: tensor.Average, DType: tensor.Float16},
			message.Direct, message.Direct},
		{message.Response{Kind: message.Reducescatter, Op: tensor.Sum, DType: tensor.Int64}, message.Ring,
			message.Ring},
		{message.Response{Kind: message.Reducescatter, Op: tensor.Adasum, DType: tensor.Float32}, none, none},
		{message.Response{Kind: message.Reducescatter, Op: tensor.Average, DType: tensor.Bool}, none, none},
		{message.Response{Kind: message.Reduce, Op: tensor.Average, DType: tensor.Float32}, message.Direct,
			message.Direct},
		{message.Response{Kind: message.Reduce, Op: tensor.Adasum, DType: tensor.Float32}, none, none},
		{message.Response{Kind: message.Reduce, Op: tensor.Sum, DType: tensor.Bool}, none, none},
		{message.Response{Kind: message.Allgather, DType: tensor.Uint8}, message.Ring, message.Ring},
		{message.Response{Kind: message.Broadcast, DType: tensor.Uint8}, message.Tree, message.Tree},
		{message.Response{Kind: message.Alltoall, DType: tensor.Bool}, message.Direct, message.Direct},
		{message.Response{Kind: message.Barrier}, none, none},
		{message.Response{Kind: message.Join}, none, none},
		{message.Response{Kind: message.Error}, none, none},
	} {
		for deterministic, want := range map[bool]message.Algorithm{false: test.usual,
			true: test.wantDeterministic} {
			b := fast
			if deterministic {
				b = same
			}
			for _, numBytes := range []int64{0, 1 << 10, 1 << 40} {
				got, err := b.Plan(topo.UpTo(3), &test.r, numBytes, nil)
				if got != want || (err == nil) != (want != none) {
					t.Errorf("%v %v of %v, deterministic=%v: got %v, %v, want %v", test.r.Kind, test.r.Op,
						test.r.WireType(), deterministic, got, err, want)
				}
				if !test.r.Kind.Reduces() || want != message.Direct || test.r.Kind == message.Reduce {
					continue
				}
				got, err = b.Plan(topo.UpTo(2), &test.r, numBytes, nil)
				if got != message.Ring || err != nil {
					t.Errorf("%v %v of %v over two ranks, deterministic=%v: got %v, %v, want ring", test.r.Kind,
						test.r.Op, test.r.WireType(), deterministic, got, err)
				}
			}
		}
	}
}

// An operation with invalid arguments, such as a malformed frame might cause, fails at once, and so do all
// later operations.
func TestRefused(t *testing.T) {
	for name, call := range map[string]func(context.Context, *opstest.Blocking) error{
		"allreduce by tree": func(ctx context.Context, b *opstest.Blocking) error {
			return b.Allreduce(ctx, message.Tree, tensor.Float32, tensor.Sum, make([]byte, 8))
		},
		"reduce by tree": func(ctx context.Context, b *opstest.Blocking) error {
			return b.Reduce(ctx, message.Tree, tensor.Float32, tensor.Sum, 0, ops.Tensor{})
		},
		"reduce to rank 3": func(ctx context.Context, b *opstest.Blocking) error {
			return b.Reduce(ctx, message.Direct, tensor.Float32, tensor.Sum, 3, ops.Tensor{})
		},
		"average": func(ctx context.Context, b *opstest.Blocking) error {
			return b.Allreduce(ctx, message.Ring, tensor.Float32, tensor.Average, make([]byte, 8))
		},
		"part of an element": func(ctx context.Context, b *opstest.Blocking) error {
			return b.Allreduce(ctx, message.Ring, tensor.Float32, tensor.Sum, make([]byte, 7))
		},
		"no such type": func(ctx context.Context, b *opstest.Blocking) error {
			return b.Allreduce(ctx, message.Ring, 99, tensor.Sum, make([]byte, 8))
		},
		"allgather by tree": func(ctx context.Context, b *opstest.Blocking) error {
			return b.Allgather(ctx, message.Tree, make([]byte, 3), []int64{1, 1, 1})
		},
		"counts too few": func(ctx context.Context, b *opstest.Blocking) error {
			return b.Allgather(ctx, message.Ring, make([]byte, 2), []int64{1, 1})
		},
		"counts too small": func(ctx context.Context, b *opstest.Blocking) error {
			return b.Allgather(ctx, message.Ring, make([]byte, 4), []int64{1, 1, 1})
		},
		"counts too large": func(ctx context.Context, b *opstest.Blocking) error {
			return b.Allgather(ctx, message.Ring, make([]byte, 3), []int64{1, 1, 2})
		},
		"counts that overflow": func(ctx context.Context, b *opstest.Blocking) error {
			return b.Allgather(ctx, message.Ring, make([]byte, 2), []int64{1<<63 - 1, 1<<63 - 1, 4})
		},
		"negative count": func(ctx context.Context, b *opstest.Blocking) error {
			return b.Allgather(ctx, message.Ring, make([]byte, 2), []int64{1, -1, 2})
		},
		"reducescatter by tree": func(ctx context.Context, b *opstest.Blocking) error {
			return b.Reducescatter(ctx, message.Tree, tensor.Float32, tensor.Sum, make([]byte, 12),
				[]int64{4, 4, 4})
		},
		"reducescatter into parts of an element": func(ctx context.Context, b *opstest.Blocking) error {
			return b.Reducescatter(ctx, message.Direct, tensor.Float32, tensor.Sum, make([]byte, 12),
				[]int64{2, 6, 4})
		},
		"reducescatter of other bytes": func(ctx context.Context, b *opstest.Blocking) error {
			return b.Reducescatter(ctx, message.Ring, tensor.Float32, tensor.Sum, make([]byte, 12),
				[]int64{4, 4, 0})
		},
		"sum of bools": func(ctx context.Context, b *opstest.Blocking) error {
			return b.Reducescatter(ctx, message.Ring, tensor.Bool, tensor.Sum, make([]byte, 3),
				[]int64{1, 1, 1})
		},
		"alltoall by ring": func(ctx context.Context, b *opstest.Blocking) error {
			return b.Alltoall(ctx, message.Ring, make([]byte, 3), []int64{1, 1, 1}, nil)
		},
		"alltoall of other bytes": func(ctx context.Context, b *opstest.Blocking) error {
			return b.Alltoall(ctx, message.Direct, make([]byte, 3), []int64{1, 1, 2}, nil)
		},
		"adasum by ring": func(ctx context.Context, b *opstest.Blocking) error {
			return b.Adasum(ctx, message.Ring, tensor.Float32, make([]byte, 8), []int64{8})
		},
		"adasum of integers": func(ctx context.Context, b *opstest.Blocking) error {
			return b.Adasum(ctx, message.HalvingDoubling, tensor.Int32, make([]byte, 8), []int64{8})
		},
		"adasum of no type": func(ctx context.Context, b *opstest.Blocking) error {
			return b.Adasum(ctx, message.HalvingDoubling, 99, make([]byte, 8), []int64{8})
		},
		"adasum of parts of an element": func(ctx context.Context, b *opstest.Blocking) error {
			return b.Adasum(ctx, message.HalvingDoubling, tensor.Float32, make([]byte, 8), []int64{2, 6})
		},
		"adasum of other bytes": func(ctx context.Context, b *opstest.Blocking) error {
			return b.Adasum(ctx, message.HalvingDoubling, tensor.Float32, make([]byte, 8), []int64{4})
		},
		"broadcast by ring": func(ctx context.Context, b *opstest.Blocking) error {
			return b.Broadcast(ctx, message.Ring, 0, make([]byte, 2))
		},
		"root below": func(ctx context.Context, b *opstest.Blocking) error {
			return b.Broadcast(ctx, message.Tree, -1, make([]byte, 2))
		},
		"root beyond": func(ctx context.Context, b *opstest.Blocking) error {
			return b.Broadcast(ctx, message.Tree, 3, make([]byte, 2))
		},
	} {
		t.Run(name, func(t *testing.T) {
			// If a call wrongly accepts the arguments, it waits for the other ranks until this timeout.
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			c := newCluster(memMeshes(3), topo.UpTo(3), tcp.Config{})
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
