package engine_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/tensorqueue"
)

// BenchmarkDeterministic measures the cost of deterministic mode. It runs two jobs over TCP on loopback, one
// of them in deterministic mode. The jobs execute steps alternately, and the ratio of the times of two such
// steps is the cost. The benchmark reports the median of these ratios as cost-ratio. A step sums float32
// tensors of the given size that are all in flight at the same time, like the gradients of a training step.
func BenchmarkDeterministic(b *testing.B) {
	for _, ranks := range []int{2, 4} {
		for _, c := range []struct{ tensors, numBytes int }{{1, 4 << 10}, {1, 256 << 10}, {1, 16 << 20},
			{32, 64 << 10}} {
			b.Run(fmt.Sprintf("ranks=%d/tensors=%d/bytes=%d", ranks, c.tensors, c.numBytes),
				func(b *testing.B) {
					plain, deterministic := newStepper(b, ranks, c.tensors, c.numBytes, false),
						newStepper(b, ranks, c.tensors, c.numBytes, true)
					plain.step()
					deterministic.step()
					var ratios []float64
					var plainTime, deterministicTime time.Duration
					b.ResetTimer()
					for i := range b.N {
						first, second := plain, deterministic
						if i%2 == 1 {
							first, second = second, first
						}
						first.took, second.took = first.step(), second.step()
						plainTime += plain.took
						deterministicTime += deterministic.took
						ratios = append(ratios, float64(deterministic.took)/float64(plain.took))
					}
					b.StopTimer()
					slices.Sort(ratios)
					b.ReportMetric(ratios[len(ratios)/2], "cost-ratio")
					b.ReportMetric(float64(plainTime.Microseconds())/float64(b.N), "plain-µs")
					b.ReportMetric(float64(deterministicTime.Microseconds())/float64(b.N), "deterministic-µs")
					plain.c.shutdown()
					deterministic.c.shutdown()
				})
		}
	}
}

// stepper is a job that executes the same step again and again.
type stepper struct {
	b    *testing.B
	c    *cluster
	bufs [][][]byte // indexed by rank, then by tensor
	took time.Duration
}

func newStepper(b *testing.B, ranks, tensors, numBytes int, deterministic bool) *stepper {
	over := overTCP(b, ranks)
	s := &stepper{b: b, c: start(b, ranks, func(cfg *engine.Config) {
		over(cfg)
		cfg.Deterministic = deterministic
	})}
	for range ranks {
		s.bufs = append(s.bufs, make([][]byte, tensors))
		for t := range tensors {
			s.bufs[len(s.bufs)-1][t] = tensor.Bytes(make([]float32, numBytes/4))
		}
	}
	return s
}

// step sums all tensors at all ranks and returns the time that it took.
func (s *stepper) step() time.Duration {
	begin := time.Now()
	s.c.each(func(r int) {
		done := make(chan error, len(s.bufs[r]))
		for t, buf := range s.bufs[r] {
			err := s.c.engines[r].Submit(&tensorqueue.Entry{
				Request: message.Request{
					Kind: message.Allreduce, Name: fmt.Sprint("gradient", t), DType: tensor.Float32,
					Shape: tensor.Shape{int64(len(buf) / 4)},
					Op:    tensor.Sum, Prescale: 1, Postscale: 1,
				},
				Input: buf, Output: buf,
				Done: func(err error) { done <- err },
			})
			if err != nil {
				done <- err
			}
		}
		for range s.bufs[r] {
			if err := s.c.wait(done); err != nil {
				s.b.Error(err)
			}
		}
	})
	return time.Since(begin)
}
