package shm_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/shm"
)

// Random operations follow each other on the same memory. Their tensors are in arenas at all ranks, at no
// rank, or at some, so an operation with large steps follows one with small steps and the other way round.
func TestStepsAtRandom(t *testing.T) {
	const dt = tensor.Int32
	for n := 1; n <= 5; n++ {
		t.Run(fmt.Sprintf("ranks=%d", n), func(t *testing.T) {
			seed := rand.Uint64()
			run(t, n, shm.Config{StageBytes: 4 << 10}, func(r *rank) error {
				common := rand.New(rand.NewPCG(seed, 0))
				own := rand.New(rand.NewPCG(seed, uint64(r.me)+1))
				add, err := kernel.Reduce(tensor.Sum, dt)
				if err != nil {
					return err
				}
				for round := range 60 {
					each := common.IntN([]int{50, 1000, 12_000}[round%3]) + 1
					in := make([][]byte, n)
					for i := range in {
						in[i] = aligned(n * each * 4)
						for k := range tensor.View[int32](in[i]) {
							tensor.View[int32](in[i])[k] = int32(common.Uint32())
						}
					}
					sum := bytes.Clone(in[0])
					for _, x := range in[1:] {
						add(sum, x)
					}
					arenas := common.IntN(3) // at no rank, at some, at all
					place := func(p []byte) []byte {
						buf := aligned(len(p))
						if len(p) > 0 && (arenas == 2 || arenas == 1 && own.IntN(2) == 0) {
							buf = r.mem.alloc(len(p))
						}
						copy(buf, p)
						return buf
					}
					counts := make([]int64, n)
					for i := range counts {
						counts[i] = int64(each * 4)
					}
					mine := func(p []byte) []byte { return p[r.me*each*4:][:each*4] }
					kind := common.IntN(4)
					root := common.IntN(n)
					var got, want []byte
					switch kind {
					case 0, 1:
						var list []ops.Tensor
						for p := in[r.me]; len(p) > 0; {
							k := min(4*(1+own.IntN(each*n)), len(p))
							x := place(p[:k])
							o := x
							if own.IntN(2) == 0 {
								o = place(make([]byte, k))
							}
							list = append(list, ops.Tensor{In: x, Out: o})
							p = p[k:]
						}
						if kind == 0 {
							err = r.AllreduceFused(t.Context(), message.Direct, dt, tensor.Sum, one, list)
						} else {
							err = r.Reduce(t.Context(), message.Direct, dt, tensor.Sum, root, list...)
						}
						if kind == 0 || r.me == root {
							want = sum
							for _, x := range list {
								got = append(got, x.Out...)
							}
						}
					case 2:
						op := ops.Operation{Kind: message.Reducescatter, Algorithm: message.Direct, DType: dt,
							Op: tensor.Sum, Buf: place(in[r.me]), Counts: counts, Scaling: one}
						if common.IntN(2) == 0 {
							op.Scaling.Divisor = int64(n)
							kernel.Divide(dt)(sum, int64(n))
						}
						got, want = mine(op.Buf), mine(sum)
						apart := own.IntN(2) == 0
						if apart {
							op.Result = place(make([]byte, each*4))
							got = op.Result
						}
						err = r.Run(t.Context(), op)
						if apart && !bytes.Equal(op.Buf, in[r.me]) {
							return fmt.Errorf("seed %d: round %d: the input has changed: %s", seed, round,
								difference(op.Buf, in[r.me]))
						}
					case 3:
						got = place(make([]byte, len(sum)))
						for i := range in {
							want = append(want, in[i][:each*4]...)
						}
						copy(mine(got), in[r.me])
						err = r.Allgather(t.Context(), message.Direct, got, counts)
					}
					if err != nil {
						return err
					}
					if !bytes.Equal(got, want) {
						return fmt.Errorf("seed %d: round %d: kind %d of %d elements for each rank: %s", seed,
							round, kind, each, difference(got, want))
					}
				}
				return nil
			})
		})
	}
}
