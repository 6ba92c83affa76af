package tcp_test

import (
	"bytes"
	"fmt"
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

// randomRing is an allreduce by Ring, chosen at random.
type randomRing struct {
	reduction
	ops.Scaling
	segmentBytes int
	in           [][]byte // the contribution of each rank
	want         []byte
}

// newRandomRing chooses an operation of n ranks. Its values are random, so that a part in the wrong place is
// noticed, and so small that the order of the additions does not matter.
func newRandomRing(t *testing.T, rng *rand.Rand, n int) (r randomRing) {
	t.Helper()
	r.reduction = everyReduction[rng.IntN(len(everyReduction))]
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
	for range n {
		r.in = append(r.in, elements(r.dt, numElems, func(int) int64 {
			if r.dt == tensor.Bool {
				return rng.Int64N(2)
			}
			return 1 + rng.Int64N(3)
		}))
	}
	r.want = bytes.Clone(r.in[0])
	reduce, err := kernel.Reduce(r.op, r.dt)
	if err != nil {
		t.Fatal(err)
	}
	scale := func([]byte, float64) {}
	if r.dt != tensor.Bool {
		if scale, err = kernel.Scale(r.dt); err != nil {
			t.Fatal(err)
		}
	}
	scale(r.want, r.Pre)
	for _, in := range r.in[1:] {
		x := bytes.Clone(in)
		scale(x, r.Pre)
		reduce(r.want, x)
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

// Random operations by Ring, one after another on the same channels, with random lists at each rank, have the
// results of a sequential reduction.
func TestRingAtRandom(t *testing.T) {
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
	rounds := 40
	if testing.Short() {
		rounds = 10
	}
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
					r := newRandomRing(t, rng, n)
					cuts := rng.Uint64()
					c.must(t, func(me int, b *opstest.Blocking) error {
						own := rand.New(rand.NewPCG(cuts, uint64(me)))
						b.Steps = own.IntN(2) == 0
						list := cutAtRandom(own, r.in[me], r.dt.Size())
						op := ops.Operation{
							Kind: message.Allreduce, Algorithm: message.Ring, SegmentBytes: r.segmentBytes,
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
								return fmt.Errorf("seed %d: round %d: rank %d: result %d of a %v of %v is wrong",
									seed, round, me, i, r.op, r.dt)
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
