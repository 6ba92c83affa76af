package shm_test

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport/mem"
	"github.com/gohvd/gohvd/ops/opstest"
	"github.com/gohvd/gohvd/ops/shm"
	"github.com/gohvd/gohvd/ops/tcp"
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

// overTCP returns the Adasum of the vectors that the backend of ops/tcp computes.
func overTCP(t *testing.T, dt tensor.DType, in [][]byte, counts []int64) (result []byte) {
	t.Helper()
	world := mem.New(len(in))
	var ranks []topo.Rank
	for r := range in {
		ranks = append(ranks, topo.Rank(r))
	}
	var wg sync.WaitGroup
	for r := range in {
		buf := aligned(len(in[r]))
		if copy(buf, in[r]); r == 0 {
			result = buf
		}
		b := opstest.Blocking{Backend: tcp.New(world.Mesh(topo.Rank(r)), 1, ranks, r, tcp.Config{})}
		wg.Go(func() {
			if err := b.Adasum(t.Context(), message.HalvingDoubling, dt, buf, counts); err != nil {
				t.Error(err)
			}
			b.Close()
		})
	}
	wg.Wait()
	return result
}

// wantAlike fails the test if got and want differ by more than the order of additions explains.
func wantAlike(t *testing.T, what string, dt tensor.DType, got, want []byte) {
	t.Helper()
	limit := map[tensor.DType]float64{tensor.Float16: 0x1p-8, tensor.BFloat16: 0x1p-5,
		tensor.Float32: 0x1p-20, tensor.Float64: 0x1p-45}[dt]
	widen, err := kernel.Convert(tensor.Float64, dt)
	if err != nil {
		t.Fatal(err)
	}
	g, w := make([]float64, len(got)/dt.Size()), make([]float64, len(want)/dt.Size())
	widen(tensor.Bytes(g), got)
	widen(tensor.Bytes(w), want)
	largest := 0.0
	for _, x := range w {
		largest = max(largest, math.Abs(x))
	}
	for i := range w {
		if !(math.Abs(g[i]-w[i]) <= limit*largest) {
			t.Fatalf("%s: element %d is %v, want %v", what, i, g[i], w[i])
		}
	}
}

// Adasum gives the same result as over TCP, up to rounding, and all ranks get the same bits.
func TestAdasum(t *testing.T) {
	shapes := [][]int{nil, {0}, {1}, {7}, {1000}, {0, 0}, {1, 1, 1}, {3, 0, 5, 0, 0, 11, 1}, {13, 700, 0},
		{40000, 1, 25536}}
	for _, n := range []int{1, 2, 3, 4, 5, 6, 8} {
		for _, dt := range []tensor.DType{tensor.Float16, tensor.BFloat16, tensor.Float32, tensor.Float64} {
			for k, shape := range shapes {
				if testing.Short() && k == len(shapes)-1 {
					continue
				}
				what := fmt.Sprintf("%d ranks, %v × %v", n, shape, dt)
				numElems, counts := 0, []int64(nil)
				for _, elems := range shape {
					numElems += elems
					counts = append(counts, int64(elems*dt.Size()))
				}
				in := vectors(dt, n, numElems)
				out := make([][]byte, n)
				run(t, n, shm.Config{StageBytes: 16 << 10}, func(r *rank) error {
					out[r.me] = aligned(len(in[r.me]))
					if (k+r.me)%2 == 1 && numElems > 0 {
						out[r.me] = r.mem.alloc(len(in[r.me]))
					}
					r.Steps = r.me%2 == 1
					copy(out[r.me], in[r.me])
					return r.Adasum(t.Context(), message.Direct, dt, out[r.me], counts)
				})
				for r := range out {
					if !bytes.Equal(out[r], out[0]) {
						t.Fatalf("%s: ranks 0 and %d have different bits", what, r)
					}
				}
				wantAlike(t, what, dt, out[0], overTCP(t, dt, in, counts))
			}
		}
	}
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
