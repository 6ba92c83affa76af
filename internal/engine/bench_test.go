package engine_test

import (
	"fmt"
	"testing"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/testcluster"
	"github.com/gohvd/gohvd/internal/transport/mem"
)

// overTCP returns a function that changes the configuration of a rank so that the ranks are connected by TCP
// on loopback.
func overTCP(b testing.TB, n int) func(*engine.Config) {
	meshes := testcluster.TCPMeshes(b, n)
	return func(cfg *engine.Config) { cfg.Mesh = meshes[cfg.Rank] }
}

// rounds makes every rank sum a buffer b.N times under the same name, as the steps of a training run do.
func rounds(b *testing.B, c *cluster, numBytes int) {
	bufs := make([][]byte, len(c.engines))
	for r := range bufs {
		bufs[r] = make([]byte, numBytes)
	}
	once := func(r int) {
		if err := c.wait(c.allreduce(r, "gradient", bufs[r])); err != nil {
			b.Error(err)
		}
	}
	c.each(once) // the first operation makes the connections and fills the cache
	b.ReportAllocs()
	b.ResetTimer()
	c.each(func(r int) {
		for range b.N {
			once(r)
		}
	})
	b.StopTimer()
	c.shutdown()
}

// BenchmarkCycle measures the latency of one small cached allreduce, from submission to completion at all
// ranks.
func BenchmarkCycle(b *testing.B) {
	for _, ranks := range []int{2, 4, 8} {
		for _, over := range []string{"mem", "tcp"} {
			for _, mode := range []string{"event", "lockstep"} {
				b.Run(fmt.Sprintf("ranks=%d/%s/%s", ranks, over, mode), func(b *testing.B) {
					change := func(*engine.Config) {}
					if over == "tcp" {
						change = overTCP(b, ranks)
					}
					c := startOn(b, mem.New(ranks), ranks, func(cfg *engine.Config) {
						change(cfg)
						cfg.Lockstep = mode == "lockstep"
					})
					rounds(b, c, 8)
				})
			}
		}
	}
}

// BenchmarkAllreduce measures the bus bandwidth (as nccl-tests define it) of negotiated allreduces over TCP
// on loopback.
func BenchmarkAllreduce(b *testing.B) {
	for _, ranks := range []int{2, 4, 8} {
		for _, kib := range []int{1, 16, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10} {
			b.Run(fmt.Sprintf("ranks=%d/bytes=%dKiB", ranks, kib), func(b *testing.B) {
				c := start(b, ranks, overTCP(b, ranks))
				numBytes := kib << 10
				b.SetBytes(int64(numBytes))
				rounds(b, c, numBytes)
				seconds := b.Elapsed().Seconds() / float64(b.N)
				busbw := float64(numBytes) / seconds * 2 * float64(ranks-1) / float64(ranks)
				b.ReportMetric(busbw/1e9, "busbw-GB/s")
			})
		}
	}
}

// BenchmarkStart measures the time that the ranks of a job need to connect and to shut down, without
// rendezvous.
func BenchmarkStart(b *testing.B) {
	for _, ranks := range []int{4, 64} {
		b.Run(fmt.Sprintf("ranks=%d", ranks), func(b *testing.B) {
			for b.Loop() {
				start(b, ranks, overTCP(b, ranks)).shutdown()
			}
		})
	}
}
