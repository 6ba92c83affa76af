package tcp_test

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/internal/transport/faulty"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/opstest"
	"github.com/gohvd/gohvd/ops/tcp"
)

// randomReduction is an allreduce of lists, chosen at random.
type randomReduction struct {
	reduction
	ops.Scaling
	algorithm    message.Algorithm
	segmentBytes int
	in           [][]byte // the contribution of each rank
	want         []byte
}

// newRandomReduction chooses an operation of n ranks. Its values are random, so that a part in the wrong
// place is noticed. With Ring they are so small that the order of the additions does not matter. With the
// other algorithms, sums and products of floats depend on the order.
func newRandomReduction(t *testing.T, rng *rand.Rand, n int) (r randomReduction) {
	t.Helper()
	r.reduction = everyReduction[rng.IntN(len(everyReduction))]
	r.algorithm = []message.Algorithm{message.Ring, message.Direct, message.Exchange}[rng.IntN(3)]
	r.Scaling = ops.Scaling{Pre: 1, Post: 1}
	if r.op == tensor.Sum {
		r.Pre, r.Post = float64(1+rng.IntN(2)), float64(1+rng.IntN(2))
		if kernel.Divide(r.dt) != nil {
			r.Divisor = int64(rng.IntN(4))
		}
	}
	r.segmentBytes = []int{0, 1, 7, 64, 1000, 4 << 10, 40_000}[rng.IntN(7)]
	most := []int{1, 2 * n, 300, 20_000, 60_000}[rng.IntN(5)]
	if r.segmentBytes == 1 || r.segmentBytes == 7 {
		most = min(most, 300)
	}
	numElems := rng.IntN(most + 1)
	ordered := r.algorithm != message.Ring && r.dt.IsFloat() && (r.op == tensor.Sum || r.op == tensor.Product)
	for range n {
		if ordered {
			r.in = append(r.in, floats(r.dt, numElems, func(int) float64 {
				return rng.NormFloat64() * math.Exp2(float64(rng.IntN(8)))
			}))
			continue
		}
		r.in = append(r.in, elements(r.dt, numElems, func(int) int64 {
			if r.dt == tensor.Bool {
				return rng.Int64N(2)
			}
			return 1 + rng.Int64N(3)
		}))
	}
	scale := func([]byte, float64) {}
	var err error
	if r.dt != tensor.Bool {
		if scale, err = kernel.Scale(r.dt); err != nil {
			t.Fatal(err)
		}
	}
	scaled := copies(r.in)
	for _, x := range scaled {
		scale(x, r.Pre)
	}
	r.want = scaled[0]
	if ordered {
		acc := r.dt
		if acc.IsHalf() {
			acc = tensor.Float32
		}
		r.want = inOrder(r.op, r.dt, acc, scaled)
	} else {
		reduce, err := kernel.Reduce(r.op, r.dt)
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range scaled[1:] {
			reduce(r.want, x)
		}
	}
	if r.Divisor > 1 {
		kernel.Divide(r.dt)(r.want, r.Divisor)
	}
	scale(r.want, r.Post)
	return r
}

// cutAtRandom cuts p into tensors of which some have no elements, and some are exactly as large as those that
// are packed. Some are reduced in place.
func cutAtRandom(rng *rand.Rand, p []byte, size int) (list []ops.Tensor) {
	for len(p) > 0 || rng.IntN(3) == 0 {
		k := []int{0, 1, 10, 1000, 16 << 10 / size, 16<<10/size + 1, 40_000}[rng.IntN(7)]
		if rng.IntN(2) == 0 {
			k = rng.IntN(k + 1)
		}
		k = min(k*size, len(p))
		in := aligned(p[:k])
		x := ops.Tensor{In: in, Out: in}
		if rng.IntN(2) == 0 {
			x.Out = aligned(make([]byte, k))
		}
		list = append(list, x)
		p = p[k:]
	}
	return list
}

// Random operations, one after another on the same channels, with random lists at each rank, have the results
// of a sequential reduction.
func TestListsAtRandom(t *testing.T) {
	key, _ := secret.New()
	slow := func(t *testing.T, n int) []transport.Mesh {
		network, meshes := faulty.New(1, &faulty.Rule{Name: "link", BytesPerSecond: 100 << 20,
			BurstBytes: 200}), memMeshes(n)
		for r, m := range meshes {
			meshes[r] = network.Wrap(topo.Rank(r), m)
			t.Cleanup(func() { _ = meshes[r].Close() })
		}
		return meshes
	}
	const rounds = 15
	for _, network := range []struct {
		name   string
		ranks  int // the largest number of ranks
		meshes func(t *testing.T, n int) []transport.Mesh
	}{
		{"strict", 5, strictMeshes},
		{"slow", 3, slow},
		{"TLS", 3, func(t *testing.T, n int) []transport.Mesh { return socketMeshes(t, n, key.Encrypted()) }},
	} {
		for n := 1; n <= network.ranks; n++ {
			t.Run(fmt.Sprintf("%s/ranks=%d", network.name, n), func(t *testing.T) {
				seed := rand.Uint64()
				rng := rand.New(rand.NewPCG(seed, 0))
				c := newCluster(network.meshes(t, n), upTo(n), tcp.Config{})
				defer c.close()
				for round := range rounds {
					r := newRandomReduction(t, rng, n)
					cuts := rng.Uint64()
					c.must(t, func(me int, b *opstest.Blocking) error {
						own := rand.New(rand.NewPCG(cuts, uint64(me)))
						b.Steps = own.IntN(2) == 0
						list := cutAtRandom(own, r.in[me], r.dt.Size())
						op := ops.Operation{
							Kind: message.Allreduce, Algorithm: r.algorithm, SegmentBytes: r.segmentBytes,
							DType: r.dt, Op: r.op, Tensors: list, Scaling: r.Scaling,
						}
						if err := b.Run(t.Context(), op); err != nil {
							return err
						}
						at := 0
						for i, x := range list {
							given, want := r.in[me][at:][:len(x.In)], r.want[at:][:len(x.In)]
							at += len(x.In)
							if !bytes.Equal(x.Out, want) {
								return fmt.Errorf("seed %d: round %d: rank %d: result %d of a %v of %v by %v is wrong",
									seed, round, me, i, r.op, r.dt, r.algorithm)
							}
							if len(x.In) > 0 && &x.In[0] != &x.Out[0] && !bytes.Equal(x.In, given) {
								return fmt.Errorf("seed %d: round %d: rank %d: input %d has changed", seed,
									round, me, i)
							}
						}
						return nil
					})
				}
				if network.name == "strict" {
					checkReleased(t, c)
				}
			})
		}
	}
}
