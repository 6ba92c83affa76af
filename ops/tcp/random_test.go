package tcp_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/internal/transport/faulty"
	"github.com/gohvd/gohvd/ops/opstest"
	"github.com/gohvd/gohvd/ops/tcp"
)

// randomly runs random operations of all kinds on the ranks of c. The given sizes are added.
func randomly(t *testing.T, c *cluster, seed uint64, rounds int, sizes ...int) {
	t.Helper()
	x := opstest.Random{
		Seed: seed, Rounds: rounds,
		Kinds: []message.Kind{message.Allreduce, message.Allreduce, message.Allreduce, message.Reduce,
			message.Reducescatter, message.Allgather, message.Broadcast, message.Alltoall, message.Gather,
			message.Scatter},
		Reductions: append(opstest.Reductions(), slices.Repeat(opstest.Adasums(), 5)...),
		Algorithms: func(k message.Kind, op tensor.ReduceOp) []message.Algorithm {
			if op == tensor.Adasum {
				return []message.Algorithm{message.HalvingDoubling}
			}
			return tcp.Algorithms(k)
		},
		InOrder:  func(a message.Algorithm) bool { return a == message.Direct || a == message.Exchange },
		Lists:    tcp.Register(c.meshes[0], tcp.Config{}).Lists,
		Segments: []int{0, 1, 7, 61, 64, 1000, 4 << 10, 40_000},
		Sizes:    append(sizes, 1, 7, 16, 300, 8192, 16384, 60_000),
	}
	c.must(t, x.RunAll(t.Context(), len(c.backends)))
}

// largeBlocks runs operations of all kinds with blocks, by all algorithms. Sockets do not accept a block at
// once.
func largeBlocks(t *testing.T, c *cluster, seed uint64) {
	t.Helper()
	n := len(c.backends)
	for _, k := range []message.Kind{message.Allgather, message.Alltoall, message.Gather, message.Scatter} {
		for _, a := range tcp.Algorithms(k) {
			x := opstest.Random{
				Seed: seed, Rounds: 1, Kinds: []message.Kind{k}, Sizes: []int{1}, Blocks: []int{8<<20/n + 1},
				Algorithms: func(message.Kind, tensor.ReduceOp) []message.Algorithm {
					return []message.Algorithm{a}
				},
			}
			c.must(t, x.RunAll(t.Context(), n))
		}
	}
}

// Random operations, one after another on the same channels, have the results of a sequential reference: with
// channels that release buffers late, over slow links, over sockets that accept fewer bytes at once than the
// ranks send, with TLS, and in a process set whose order is not that of the ranks. No operation may change a
// buffer that a channel still holds, or end while a channel holds one.
func TestAtRandom(t *testing.T) {
	for n := 1; n <= 9; n++ {
		t.Run(fmt.Sprintf("strict/ranks=%d", n), func(t *testing.T) {
			c := newCluster(strictMeshes(t, n), topo.UpTo(n), tcp.Config{})
			defer c.close()
			seed := opstest.PickSeed(t)
			for i := range uint64(20) {
				randomly(t, c, seed+i, 3)
				checkReleased(t, c)
			}
		})
	}
	t.Run("set", func(t *testing.T) {
		c := newCluster(memMeshes(6), []topo.Rank{5, 1, 4}, tcp.Config{SegmentBytes: 61})
		defer c.close()
		randomly(t, c, opstest.PickSeed(t), 60)
	})
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
	for name, network := range map[string]struct {
		meshes func(t *testing.T, n int) []transport.Mesh
		large  bool
	}{
		"slow":    {slow, false},
		"sockets": {func(t *testing.T, n int) []transport.Mesh { return tcpMeshes(t, n) }, true},
		"TLS": {func(t *testing.T, n int) []transport.Mesh { return socketMeshes(t, n, key.Encrypted()) },
			true},
	} {
		for n := 2; n <= 3; n++ {
			t.Run(fmt.Sprintf("%s/ranks=%d", name, n), func(t *testing.T) {
				c := newCluster(network.meshes(t, n), topo.UpTo(n), tcp.Config{})
				defer c.close()
				seed := opstest.PickSeed(t)
				if !network.large {
					randomly(t, c, seed, 40)
					return
				}
				randomly(t, c, seed, 40, 1<<20)
				largeBlocks(t, c, seed)
			})
		}
	}
}
