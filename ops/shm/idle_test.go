package shm_test

import (
	"context"
	"fmt"
	"runtime"
	"testing"
	"weak"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/opstest"
	"github.com/gohvd/gohvd/ops/shm"
)

// A job may have dozens of process sets that never run an operation on this backend, such as sets of
// thousands of ranks of many hosts, so a backend must be small before its first operation.
func TestUnusedBackendIsSmall(t *testing.T) {
	opstest.UnusedIsSmall(t, func(ranks []topo.Rank) ops.Backend {
		return shm.New(new(rankMemory), 0, ranks, 0, shm.Config{})
	})
}

// When an operation has ended, the backend does not keep its tensors from being garbage collected, because a
// process set may be idle for long.
func TestForgetsTensors(t *testing.T) {
	ctx := context.Background()
	for name, do := range map[string]func(r *rank, in, out []byte) error{
		"allreduce": func(r *rank, in, out []byte) error {
			return r.AllreduceFused(ctx, message.Direct, tensor.Float32, tensor.Sum, one,
				[]ops.Tensor{{In: in, Out: out}})
		},
		"broadcast": func(r *rank, in, _ []byte) error { return r.Broadcast(ctx, message.Direct, 0, in) },
	} {
		for _, numBytes := range []int{64, 1 << 20} {
			run(t, 2, shm.Config{}, func(r *rank) error {
				in, out := make([]byte, numBytes), make([]byte, numBytes)
				kept := []weak.Pointer[byte]{weak.Make(&in[0]), weak.Make(&out[0])}
				if err := do(r, in, out); err != nil {
					return err
				}
				runtime.GC()
				for i, p := range kept {
					if p.Value() != nil {
						return fmt.Errorf("%s of %d bytes: buffer %d is still referred to", name, numBytes, i)
					}
				}
				runtime.KeepAlive(r)
				return nil
			})
		}
	}
}

// Once the first operations have run, an allreduce and an Adasum allocate nothing.
func TestAllreduceAllocatesNothing(t *testing.T) {
	run(t, 2, shm.Config{}, func(r *rank) error {
		small, large := aligned(64), aligned(1<<20)
		tensors := []ops.Tensor{{In: small, Out: small}, {In: large, Out: large}}
		counts := []int64{1 << 19, 0, 1 << 19}
		op := func() {
			for range 2 { // both ranks must run the same number of operations
				if err := r.Adasum(t.Context(), message.Direct, tensor.Float32, large, counts); err != nil {
					t.Error(err)
				}
				for _, buf := range [][]byte{small, large} {
					if err := r.Allreduce(t.Context(), message.Direct, tensor.Float32, tensor.Sum,
						buf); err != nil {
						t.Error(err)
					}
				}
				if err := r.AllreduceFused(t.Context(), message.Direct, tensor.Float32, tensor.Sum, one,
					tensors); err != nil {
					t.Error(err)
				}
			}
		}
		if r.me == 1 {
			for range 11 {
				op()
			}
			return nil
		}
		if allocs := testing.AllocsPerRun(10, op); allocs > 0 {
			return fmt.Errorf("%v allocations in 8 operations, want none", allocs)
		}
		return nil
	})
}
