package tcp_test

import (
	"fmt"
	"runtime"
	"slices"
	"testing"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/opstest"
	"github.com/gohvd/gohvd/ops/tcp"
)

// BenchmarkAllreduce reports the metrics of nccl-tests. The metric busbw is bytes/time × 2(n-1)/n. This is
// the rate at which the links are used, and it does not depend on n.
func BenchmarkAllreduce(b *testing.B) {
	for _, net := range networks {
		for _, n := range []int{2, 4} {
			for _, alg := range tcp.Algorithms(message.Allreduce) {
				for numBytes := 1 << 10; numBytes <= 64<<20; numBytes <<= 2 {
					b.Run(fmt.Sprintf("%s/%v/ranks=%d/bytes=%d", net.name, alg, n, numBytes),
						func(b *testing.B) {
							c := newCluster(net.meshes(b, n), topo.UpTo(n), tcp.Config{})
							benchmarkAllreduce(b, c, alg, tensor.Float32, numBytes)
						})
				}
			}
		}
	}
}

// BenchmarkAlltoall compares the algorithms for small blocks. The limits in DefaultTable and the maximum size
// of blocks that pass through other ranks were chosen by its results.
func BenchmarkAlltoall(b *testing.B) {
	for _, n := range []int{4, 8, 16, 32, 64} {
		for _, block := range []int64{16, 512, 2048} {
			for _, alg := range tcp.Algorithms(message.Alltoall) {
				b.Run(fmt.Sprintf("ranks=%d/block=%d/%v", n, block, alg), func(b *testing.B) {
					counts := slices.Repeat([]int64{block}, n)
					in, outs := make([]byte, int64(n)*block), make([][]byte, n)
					for r := range outs {
						outs[r] = make([]byte, len(in))
					}
					repeat(b, newCluster(tcpMeshes(b, n), topo.UpTo(n), tcp.Config{}),
						func(r int, be *opstest.Blocking) error {
							return be.Alltoall(b.Context(), alg, in, counts,
								func([]int64) ([]byte, error) { return outs[r], nil })
						})
				})
			}
		}
	}
}

// BenchmarkTypes compares the time of an allreduce for each floating-point type and algorithm. For
// half-precision types, the algorithm message.Direct also converts the elements to float32 and back.
func BenchmarkTypes(b *testing.B) {
	for dt := tensor.Float16; dt <= tensor.Float64; dt++ {
		for _, alg := range tcp.Algorithms(message.Allreduce) {
			b.Run(fmt.Sprintf("%v/%v", dt, alg), func(b *testing.B) {
				c := newCluster(tcpMeshes(b, 2), topo.UpTo(2), tcp.Config{})
				benchmarkAllreduce(b, c, alg, dt, 16<<20)
			})
		}
	}
}

// BenchmarkSegment compares segment sizes. DefaultSegmentBytes was chosen by its results.
func BenchmarkSegment(b *testing.B) {
	for seg := 16 << 10; seg <= 4<<20; seg <<= 1 {
		for _, n := range []int{2, 4} {
			b.Run(fmt.Sprintf("segment=%d/ranks=%d", seg, n), func(b *testing.B) {
				c := newCluster(tcpMeshes(b, n), topo.UpTo(n), tcp.Config{SegmentBytes: seg})
				benchmarkAllreduce(b, c, message.Ring, tensor.Float32, 16<<20)
			})
		}
	}
}

// BenchmarkLockedThreads compares the latency of an allreduce whose steps run in goroutines that are locked
// to their threads, like goroutines that were called from C, with that in other goroutines.
func BenchmarkLockedThreads(b *testing.B) {
	for _, locked := range []bool{false, true} {
		b.Run(fmt.Sprintf("locked=%v", locked), func(b *testing.B) {
			c := newCluster(tcpMeshes(b, 2), topo.UpTo(2), tcp.Config{})
			x := make([]float32, 2)
			sum := func(r, calls int, wait bool) error {
				buf := tensor.Bytes(x[r:][:1])
				op := ops.Operation{Kind: message.Allreduce, Algorithm: message.RecursiveDoubling,
					DType: tensor.Float32, Op: tensor.Sum, Tensors: []ops.Tensor{{In: buf, Out: buf}}}
				for range calls {
					if err := c.backends[r].Start(op); err != nil {
						return err
					}
					for p := ops.Waiting; p != ops.Finished; shmem.Yield() {
						var err error
						if p, err = c.backends[r].Step(b.Context(), wait); err != nil {
							return err
						}
					}
				}
				return nil
			}
			c.must(b, func(r int, _ *opstest.Blocking) error { return sum(r, 1, true) }) // makes the channels
			b.ReportAllocs()
			b.ResetTimer()
			c.must(b, func(r int, _ *opstest.Blocking) error {
				if locked {
					runtime.LockOSThread()
					defer runtime.UnlockOSThread()
				}
				return sum(r, b.N, false)
			})
		})
	}
}

// repeat runs an operation b.N times at all ranks.
func repeat(b *testing.B, c *cluster, op func(r int, be *opstest.Blocking) error) {
	c.must(b, op) // the first operation makes the channels
	b.ResetTimer()
	// Each rank runs its own loop, because the operations themselves synchronize the ranks.
	c.must(b, func(r int, be *opstest.Blocking) error {
		for range b.N {
			if err := op(r, be); err != nil {
				return err
			}
		}
		return nil
	})
}

func benchmarkAllreduce(b *testing.B, c *cluster, alg message.Algorithm, dt tensor.DType, numBytes int) {
	n := len(c.backends)
	bufs := make([][]byte, n)
	for r := range bufs {
		bufs[r] = tensor.Bytes(make([]float64, numBytes/8))
	}
	sum := func(r int, be *opstest.Blocking) error {
		return be.Allreduce(b.Context(), alg, dt, tensor.Sum, bufs[r])
	}
	b.SetBytes(int64(numBytes))
	b.ReportAllocs()
	repeat(b, c, sum)
	algbw := float64(numBytes) * float64(b.N) / b.Elapsed().Seconds() / 1e9
	b.ReportMetric(algbw*2*float64(n-1)/float64(n), "busbw-GB/s")
}
