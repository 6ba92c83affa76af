package shm_test

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ops/shm"
)

// vectors returns the contributions of n ranks, of numElems elements each. They are similar to each other, so
// that their combination differs a lot from their sum and depends on the order.
func vectors(dt tensor.DType, n, numElems int) [][]byte {
	random := rand.New(rand.NewPCG(5, 6))
	common := make([]float64, numElems)
	for i := range common {
		common[i] = random.NormFloat64()
	}
	all := make([][]byte, n)
	for r := range all {
		v := make([]float64, numElems)
		for i := range v {
			v[i] = float64(r+1) * (common[i] + random.NormFloat64())
		}
		all[r] = aligned(numElems * dt.Size())
		encode(dt, all[r], v)
	}
	return all
}

// Other operations follow an Adasum, and Adasums of other sizes.
func TestAdasumAmongOthers(t *testing.T) {
	const n = 3
	run(t, n, shm.Config{StageBytes: 16 << 10}, func(r *rank) error {
		for round := range 20 {
			same, numElems := vectors(tensor.Float32, 1, 100*round)[0], 100*round
			if err := r.Adasum(t.Context(), message.Direct, tensor.Float32, same,
				[]int64{int64(len(same))}); err != nil {
				return err
			}
			if !bytes.Equal(same, vectors(tensor.Float32, 1, numElems)[0]) {
				return fmt.Errorf("round %d: the combination of equal vectors is another vector", round)
			}
			buf := input(tensor.Float32, r.me, 0, numElems)
			if err := r.Allreduce(t.Context(), message.Direct, tensor.Float32, tensor.Sum, buf); err != nil {
				return err
			}
			if want := reduced(tensor.Float32, tensor.Sum, n, 0, numElems); !bytes.Equal(buf, want) {
				return fmt.Errorf("round %d: %s", round, difference(buf, want))
			}
		}
		return nil
	})
}

func BenchmarkAdasum(b *testing.B) {
	for _, size := range []int{4 << 10, 1 << 20, 16 << 20} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			b.SetBytes(int64(size))
			run(b, 2, shm.Config{SmallBytes: 64 << 10}, func(r *rank) error {
				buf := aligned(size)
				for range b.N {
					if err := r.Adasum(context.Background(), message.Direct, tensor.Float32, buf,
						[]int64{int64(size)}); err != nil {
						return err
					}
				}
				return nil
			})
		})
	}
}
