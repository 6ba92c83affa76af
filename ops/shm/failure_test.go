package shm_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/shm"
)

// TestDeadPeer lets a rank wait, in every kind of operation, for a rank that has not started the operation.
// When the mesh reports that the process of that rank has ended, the operation must fail, and all later
// operations must fail with the same error.
func TestDeadPeer(t *testing.T) {
	for name, op := range operations(t) {
		t.Run(name, func(t *testing.T) {
			h := newHost()
			death := &transport.PeerError{Peer: 2, Lane: 1, Err: errors.New("the process ended")}
			var begun atomic.Int32
			err := try(h, 3, shm.Config{}, func(r *rank) error {
				if err := r.Allreduce(t.Context(), message.Direct, tensor.Float32, tensor.Sum,
					aligned(64)); err != nil {
					return err
				}
				if begun.Add(1) == 3 {
					time.AfterFunc(50*time.Millisecond, func() { h.kill(2, death) })
				}
				if r.me == 2 {
					return nil
				}
				err := op(t.Context(), r)
				var p *transport.PeerError
				switch again := op(t.Context(), r); {
				case !errors.As(err, &p):
					t.Errorf("rank %d: got %v, want a PeerError", r.me, err)
				case p.Peer != 2 && !strings.Contains(err.Error(), "abandoned the operation"):
					t.Errorf("rank %d: got %v, want a *PeerError for rank 2", r.me, err)
				case again == nil || !errors.Is(again, err):
					t.Errorf("rank %d: got %v after a failure, want that failure", r.me, again)
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
}

// If the context of a waiting operation ends, the operation fails with the cause of the context.
func TestContextEnds(t *testing.T) {
	for name, op := range operations(t) {
		t.Run(name, func(t *testing.T) {
			why := errors.New("the verdict")
			ctx, cancel := context.WithCancelCause(t.Context())
			timer := time.AfterFunc(50*time.Millisecond, func() { cancel(why) })
			defer timer.Stop()
			run(t, 2, shm.Config{Oversubscribed: true}, func(r *rank) error {
				if err := r.Allreduce(t.Context(), message.Direct, tensor.Float32, tensor.Sum,
					aligned(64)); err != nil || r.me == 1 {
					return err
				}
				began := time.Now()
				if err := op(ctx, r); !errors.Is(err, why) {
					t.Errorf("got %v, want %v", err, why)
				}
				if took := time.Since(began); took > 20*time.Second {
					t.Errorf("noticing the end of the context took %v", took)
				}
				return nil
			})
		})
	}
}

func operations(t *testing.T) map[string]func(ctx context.Context, r *rank) error {
	return map[string]func(ctx context.Context, r *rank) error{
		"small": func(ctx context.Context, r *rank) error {
			return r.Allreduce(ctx, message.Direct, tensor.Float32, tensor.Sum, aligned(64))
		},
		"large": func(ctx context.Context, r *rank) error {
			return r.Allreduce(ctx, message.Direct, tensor.Float32, tensor.Sum, aligned(1<<20))
		},
		"arena": func(ctx context.Context, r *rank) error {
			return r.Allreduce(ctx, message.Direct, tensor.Float32, tensor.Sum, r.mem.alloc(1<<20))
		},
		"broadcast": func(ctx context.Context, r *rank) error {
			return r.Broadcast(ctx, message.Direct, 2%r.n, aligned(100))
		},
		"allgather": func(ctx context.Context, r *rank) error {
			return r.Allgather(ctx, message.Direct, aligned(100*r.n), []int64{100, 100, 100}[:r.n])
		},
		"reducescatter": func(ctx context.Context, r *rank) error {
			return r.Reducescatter(ctx, message.Direct, tensor.Float32, tensor.Sum, aligned(100*r.n),
				[]int64{100, 100, 100}[:r.n])
		},
		"alltoall": func(ctx context.Context, r *rank) error {
			return r.Alltoall(ctx, message.Direct, aligned(100*r.n), []int64{100, 100, 100}[:r.n],
				func([]int64) ([]byte, error) { return aligned(100 * r.n), nil })
		},
		"adasum": func(ctx context.Context, r *rank) error {
			return r.Adasum(ctx, message.Direct, tensor.Float32, aligned(1000), []int64{400, 600})
		},
	}
}

// A rank that gives up an operation sets its abort word, because other ranks may still be reading its buffer.
// An operation that has read the buffer fails if the abort word is set, and succeeds if it is not.
func TestAbandonedBuffer(t *testing.T) {
	const size = 8 << 10
	for _, gaveUp := range []bool{false, true} {
		err := try(newHost(), 2, shm.Config{}, func(r *rank) error {
			buf := r.mem.alloc(size)
			if r.me == 1 {
				seg, err := r.mem.Share(1, shm.New(r.mem, 1, r.mem.both(), 1, shm.Config{}).SegmentBytes(),
					nil)
				if err != nil {
					return err
				}
				shm.PretendToHaveDone(seg, size, r.chunkOf(buf), gaveUp)
				return nil
			}
			switch err := r.Allreduce(t.Context(), message.Direct, tensor.Float32, tensor.Sum, buf); {
			case gaveUp && (err == nil || !strings.Contains(err.Error(), "abandoned the operation")):
				t.Errorf("got %v, want the error that rank 1 abandoned the operation", err)
			case !gaveUp && err != nil:
				t.Error(err)
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	}
}

// An operation fails if the table of a peer is malformed or refers to memory outside of the peer's arenas.
func TestPeersTables(t *testing.T) {
	for name, change := range map[string]func(table []byte){
		"too many extents":     func(table []byte) { table[3] = 0xff },
		"end beyond the total": func(table []byte) { table[8+7] = 0x7f },
		"end of nothing":       func(table []byte) { clear(table[8:16]) },
		"end within an element": func(table []byte) {
			table[0] = 2
			copy(table[8+32:], table[8:8+32])
			binary.LittleEndian.PutUint64(table[8:], 1027)
		},
		"unknown arena":            func(table []byte) { table[8+8] = 200 },
		"negative offset":          func(table []byte) { table[8+16+7] = 0x80 },
		"beyond the arena":         func(table []byte) { table[8+16+2] = 1 },
		"across the arena's end":   func(table []byte) { binary.LittleEndian.PutUint64(table[8+16:], pretended+64) },
		"input within an element":  func(table []byte) { table[8+16] = 2 },
		"output within an element": func(table []byte) { table[8+24] = 2 },
	} {
		t.Run(name, func(t *testing.T) {
			besidePretender(t, change, func(ctx context.Context, r *rank) error {
				return r.Allreduce(ctx, message.Direct, tensor.Float32, tensor.Sum, aligned(pretended))
			})
		})
	}
}

func sum(counts []int64) (total int64) {
	for _, c := range counts {
		total += c
	}
	return total
}

// An alltoall fails if the table of a peer does not have exactly one extent, or if the counts in the table
// are invalid. The alltoall then does not call Allocate.
func TestPeersCounts(t *testing.T) {
	put := func(table []byte, words ...uint64) {
		for i, w := range words {
			binary.LittleEndian.PutUint64(table[8*i:], w)
		}
	}
	const own = 32
	for name, change := range map[string]func(table []byte){
		"two extents": func(table []byte) {
			put(table, 2)
			put(table[8:], 16)
			put(table[8+16:], 2*pretended-16)
			// The second extent takes the place of the counts, so the counts are written after it.
			put(table[8+32:], pretended, 0)
		},
		"none for some bytes": func(table []byte) { put(table, 0); put(table[8+32:], pretended, 0) },
		"negative":            func(table []byte) { put(table[8+32:], math.MaxUint64-7, pretended+8) },
		"a sum that wraps":    func(table []byte) { put(table[8+32:], math.MaxInt64, pretended) },
		"a sum that wraps with this rank's own": func(table []byte) {
			put(table[8:], math.MaxInt64-own+1, 0)
			put(table[8+32:], math.MaxInt64-own+1, 0)
		},
	} {
		t.Run(name, func(t *testing.T) {
			besidePretender(t, change, func(ctx context.Context, r *rank) error {
				return r.Alltoall(ctx, message.Direct, aligned(2*own), []int64{own, own},
					func(counts []int64) ([]byte, error) {
						t.Errorf("allocate was called with %d bytes, want no call", counts)
						return aligned(int(sum(counts))), nil
					})
			})
		})
	}
}

// An Adasum fails if the table of a peer has counts for a buffer of another size.
func TestPeersVectors(t *testing.T) {
	besidePretender(t, func(table []byte) {
		binary.LittleEndian.PutUint64(table[8+32:], pretended-64)
		binary.LittleEndian.PutUint64(table[8+32+8:], pretended+64)
	}, func(ctx context.Context, r *rank) error {
		return r.Adasum(ctx, message.Direct, tensor.Float32, aligned(2*pretended), []int64{2 * pretended})
	})
}

// pretended is the size in bytes of the tensor of rank 1 in besidePretender. The arena chunk of rank 1 has
// twice this size.
const pretended = 8 << 10

// besidePretender runs op at rank 0. Rank 1 does not run op: its segment only looks as if it had started op,
// with a table that the function change has modified. The test fails if op does not return a *PeerError for
// rank 1.
func besidePretender(t *testing.T, change func(table []byte), op func(ctx context.Context, r *rank) error) {
	t.Helper()
	err := try(newHost(), 2, shm.Config{Oversubscribed: true}, func(r *rank) error {
		if r.me == 1 {
			seg, err := r.mem.Share(1, shm.New(r.mem, 1, r.mem.both(), 1, shm.Config{}).SegmentBytes(), nil)
			if err != nil {
				return err
			}
			shm.PretendToCome(seg, pretended, r.chunkOf(r.mem.alloc(2*pretended)), change)
			return nil
		}
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		err := op(ctx, r)
		var p *transport.PeerError
		if !errors.As(err, &p) || p.Peer != 1 {
			t.Errorf("got %v, want a PeerError of rank 1", err)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// An alltoall fails if Allocate returns a buffer that is one byte too short or too long.
func TestAlltoallOutput(t *testing.T) {
	for n := 1; n <= 2; n++ {
		for _, wrong := range []int{-1, 1} {
			run(t, n, shm.Config{}, func(r *rank) error {
				counts := []int64{64, 64}[:n]
				err := r.Alltoall(t.Context(), message.Direct, aligned(64*n), counts,
					func(counts []int64) ([]byte, error) {
						return aligned(int(sum(counts)) + wrong), nil
					})
				if want := fmt.Sprintf("got an output buffer of %d bytes, want %d", 64*n+wrong,
					64*n); err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("got %v, want %s", err, want)
				}
				return nil
			})
		}
	}
}

// An operation with wrong arguments fails before the peers can see that it was started. The backend then
// fails all later operations, because the other ranks may run the operation and this rank does not.
func TestRefused(t *testing.T) {
	for name, op := range map[string]func(r *rank) error{
		"algorithm": func(r *rank) error {
			return r.Allreduce(t.Context(), message.Ring, tensor.Float32, tensor.Sum, aligned(64))
		},
		"adasum without counts": func(r *rank) error {
			return r.Allreduce(t.Context(), message.Direct, tensor.Float32, tensor.Adasum, aligned(64))
		},
		"adasum of integers": func(r *rank) error {
			return r.Adasum(t.Context(), message.Direct, tensor.Int32, aligned(64), []int64{64})
		},
		"root": func(r *rank) error { return r.Broadcast(t.Context(), message.Direct, 2, aligned(64)) },
		"counts": func(r *rank) error {
			return r.Allgather(t.Context(), message.Direct, aligned(64), []int64{64})
		},
		"blocks": func(r *rank) error {
			return r.Alltoall(t.Context(), message.Direct, aligned(64), []int64{64, 8},
				func([]int64) ([]byte, error) { return nil, nil })
		},
		"result of another length": func(r *rank) error {
			return r.AllreduceFused(t.Context(), message.Direct, tensor.Float32, tensor.Sum, one,
				[]ops.Tensor{{In: aligned(8), Out: aligned(4)}})
		},
		"division": func(r *rank) error {
			s := ops.Scaling{Pre: 1, Post: 1, Divisor: 2}
			return r.AllreduceFused(t.Context(), message.Direct, tensor.Float32, tensor.Sum, s,
				[]ops.Tensor{{In: aligned(8), Out: aligned(8)}})
		},
	} {
		run(t, 2, shm.Config{}, func(r *rank) error {
			if err := op(r); err == nil {
				t.Errorf("%s: got no error, want one", name)
			}
			return nil
		})
	}
}

func TestPlan(t *testing.T) {
	b := shm.Register(nil, shm.Config{})
	for _, c := range []struct {
		response message.Response
		ok       bool
	}{
		{message.Response{Kind: message.Allreduce, DType: tensor.Float32, Op: tensor.Sum}, true},
		{message.Response{Kind: message.Allreduce, DType: tensor.Float32, Op: tensor.Average}, true},
		{message.Response{Kind: message.Allreduce, DType: tensor.Float32, Op: tensor.Adasum}, true},
		{message.Response{Kind: message.Allreduce, DType: tensor.Int32, Op: tensor.Adasum}, false},
		{message.Response{Kind: message.Reducescatter, DType: tensor.Float32, Op: tensor.Adasum}, false},
		{message.Response{Kind: message.Reducescatter, DType: tensor.Bool, Op: tensor.Sum}, false},
		{message.Response{Kind: message.Alltoall}, true},
		{message.Response{Kind: message.Barrier}, false},
	} {
		alg, err := b.Plan(nil, &c.response, 4, nil)
		if (err == nil) != c.ok || c.ok && alg != message.Direct {
			t.Errorf("%v by %v: got %v, %v", c.response.Kind, c.response.Op, alg, err)
		}
	}
	b = shm.Register(nil, shm.Config{Deterministic: true})
	for _, op := range []tensor.ReduceOp{tensor.Sum, tensor.Average, tensor.Adasum} {
		r := &message.Response{Kind: message.Allreduce, DType: tensor.Float32, Op: op}
		if _, err := b.Plan(nil, r, 4, nil); (err != nil) != (op == tensor.Adasum) {
			t.Errorf("%v in deterministic mode: got %v", op, err)
		}
	}
}

// Plan refuses a process set whose members do not all share memory, and allocates nothing.
func TestPlanOfMembers(t *testing.T) {
	b := shm.Register(nil, shm.Config{Groups: []topo.Rank{0, 0, 2, 0}})
	for members, ok := range map[[2]topo.Rank]bool{{0, 1}: true, {1, 3}: true, {0, 2}: false, {2, 2}: true} {
		r := &message.Response{Kind: message.Allgather}
		if _, err := b.Plan(members[:], r, 4, nil); (err == nil) != ok {
			t.Errorf("ranks %v: got %v", members, err)
		}
		if n := testing.AllocsPerRun(10, func() { _, _ = b.Plan(members[:], r, 4, nil) }); n > 0 {
			t.Errorf("ranks %v: Plan made %v allocations", members, n)
		}
	}
}

// After an operation has failed, nothing writes to its buffers, even if the rank that it has waited for
// starts the operation later.
func TestBuffersAreLetGo(t *testing.T) {
	failed, over := make(chan struct{}), make(chan struct{})
	run(t, 2, shm.Config{StageBytes: 4 << 10}, func(r *rank) error {
		if r.me == 1 {
			defer close(over)
			<-failed
			late, stop := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer stop()
			_ = r.Allreduce(late, message.Direct, tensor.Float32, tensor.Sum, aligned(64<<10))
			return nil
		}
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
		defer cancel()
		buf := r.mem.alloc(64 << 10)
		if err := r.Allreduce(ctx, message.Direct, tensor.Float32, tensor.Sum, buf); err == nil {
			t.Error("rank 0 succeeded without rank 1")
		}
		want := bytes.Repeat([]byte{7}, len(buf))
		copy(buf, want)
		close(failed)
		<-over
		if !bytes.Equal(buf, want) {
			t.Error("a buffer was written after its operation had failed")
		}
		return nil
	})
}
