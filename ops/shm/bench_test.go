package shm_test

import (
	"context"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ops/shm"
)

// BenchmarkAllreduce measures allreduces between ranks that run as goroutines of one process. Each rank
// writes to its buffer before every operation, as a training step does.
func BenchmarkAllreduce(b *testing.B) {
	for _, n := range []int{2, 4} {
		for _, kind := range []string{"arena", "slice"} {
			for _, size := range []int{4, 1 << 10, 16 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20} {
				b.Run(fmt.Sprintf("%d/%s/%d", n, kind, size), func(b *testing.B) {
					// A waiting rank keeps its processor for a while, so every rank needs a processor of its
					// own.
					defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(n + 1))
					var busy time.Duration
					run(b, n, shm.Config{SmallBytes: 64 << 10, Oversubscribed: n > runtime.NumCPU()},
						func(r *rank) error {
							buf := aligned(size)
							if kind == "arena" {
								buf = r.mem.alloc(size)
							}
							for i := range b.N + 3 {
								if i == 3 && r.me == 0 {
									b.ResetTimer()
								}
								clear(buf)
								began := time.Now()
								if err := r.Allreduce(b.Context(), message.Direct, tensor.Float32, tensor.Sum,
									buf); err != nil {
									return err
								}
								if i >= 3 && r.me == 0 {
									busy += time.Since(began)
								}
							}
							return nil
						})
					perOp := busy.Seconds() / float64(b.N)
					b.ReportMetric(perOp*1e6, "us/allreduce")
					b.ReportMetric(float64(size)*2*float64(n-1)/float64(n)/perOp/1e9, "busbw-GB/s")
				})
			}
		}
	}
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
