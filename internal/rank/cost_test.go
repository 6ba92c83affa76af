package rank_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/metrics"
	"github.com/gohvd/gohvd/internal/recorder"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/testcluster"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/trace"
	"github.com/gohvd/gohvd/timeline"
)

// switched is a flight recorder that the benchmark can switch on and off during a job. In a real job
// HVD_FLIGHT_RECORDER switches it off for the whole job.
type switched struct {
	*recorder.Recorder
	on atomic.Bool
}

func (s *switched) Record(op *trace.Operation) {
	if s.on.Load() {
		s.Recorder.Record(op)
	}
}

// gradients returns a function that makes the operations of one training step. They are an allreduce for each
// gradient of ResNet-50, as in hvdbench.
func gradients(b *testing.B) (step func() []*testcluster.Op) {
	type gradient struct {
		name string
		n    int64
		buf  []byte
	}
	text := testnet.ReadFile(b, filepath.Join("..", "bench", "shapes", "resnet50.txt"))
	var all []gradient
	for line := range strings.Lines(string(text)) {
		var name string
		var n int64
		if _, err := fmt.Sscan(line, &name, &n); err != nil {
			b.Fatal(err)
		}
		all = append(all, gradient{name, n, make([]byte, 4*n)})
	}
	return func() (ops []*testcluster.Op) {
		for _, g := range all {
			ops = append(ops, testcluster.Allreduce(g.name, tensor.Float32, tensor.Shape{g.n}, tensor.Sum,
				g.buf))
		}
		return ops
	}
}

// BenchmarkCost measures the cost of observation: by how many per cent a timeline, metrics or the flight
// recorder lengthen training steps. A step sums the gradients of ResNet-50 between two ranks over shared
// memory.
//
// Steps with and without observation run in the same process, so that nothing else differs. A pair of
// measurements consists of 40 parts of 5 steps (about 100 ms) with observation and of 40 parts without, in
// random order. Its result is the ratio of the lower quartiles of the two sets of times. The lower quartile
// is used because other load on the machine can only make a part longer. The benchmark reports the median of
// all pairs and its 95 % confidence interval (order statistics), in per cent.
//
// With a timeline, each rank writes its records at the end of the part, one rank after the other. The reason
// is that on a machine whose ranks use all processors, each rank waits while the other one writes. The ranks
// scrape the metrics in the same way, but only in every tenth part with observation. These parts have a
// quartile of their own, which has the weight of one tenth.
func BenchmarkCost(b *testing.B) {
	const ranks, parts, steps, partsPerScrape = 2, 40, 5, 10
	for _, way := range []string{"nothing", "timeline", "metrics", "recorder"} {
		b.Run(way, func(b *testing.B) {
			dir := b.TempDir()
			recorders := make([]switched, ranks)
			var ratios []float64
			testcluster.Run(b, testcluster.Options{
				Ranks: ranks, Transport: testcluster.SHM, Deadline: time.Duration(max(b.N, 2)) * time.Minute,
				Config: func(cfg *engine.Config) {
					r := &recorders[cfg.Rank]
					r.Recorder = recorder.New(recorder.DefaultOperations)
					cfg.Recorder = r
				},
			}, func(r *testcluster.Rank) {
				step := gradients(b)
				var t *timeline.Timeline
				if way == "timeline" {
					var err error
					if t, err = timeline.Start(timeline.Config{
						Path: filepath.Join(dir, fmt.Sprintf("t%d.json", r.Rank)), Rank: int(r.Rank),
						Size:  ranks,
						Clock: r.Engine.Clock(), MaxBytes: 512 << 20,
					}); err != nil {
						b.Error(err)
						return
					}
				}
				watch := func(on bool) {
					switch {
					case way == "timeline" && on:
						r.Engine.Observer().Watch(t)
					case way == "timeline":
						r.Engine.Observer().Unwatch(t)
					case way == "recorder":
						recorders[r.Rank].on.Store(on)
					}
				}
				handler := metrics.Handler(func() trace.Stats { return r.Engine.Stats() })
				// part executes some steps and returns their running time in seconds.
				part := func(on, scrape bool) float64 {
					watch(on)
					r.Do(testcluster.Barrier("begin"))
					begun := time.Now()
					for range steps {
						r.Do(step()...)
					}
					for turn := range ranks {
						switch {
						case turn != int(r.Rank):
						case way == "timeline" && on:
							if err := t.Write(); err != nil {
								b.Error(err)
							}
						case way == "metrics" && scrape:
							handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("GET", "/metrics",
								nil))
						}
						r.Do(testcluster.Barrier("turn"))
					}
					took := time.Since(begun).Seconds()
					watch(false)
					return took
				}
				part(false, false)
				order := rand.New(rand.NewPCG(1, 2)) // all ranks use the same order
				for range max(b.N, 2) {
					var without, with, scraped []float64
					for _, i := range order.Perm(2 * parts) {
						switch on, scrape := i < parts, i < parts/partsPerScrape; {
						case scrape:
							scraped = append(scraped, part(on, scrape))
						case on:
							with = append(with, part(on, scrape))
						default:
							without = append(without, part(on, scrape))
						}
					}
					if r.Rank == 0 {
						const weight = 1.0 / partsPerScrape
						took := weight*lowerQuartile(scraped) + (1-weight)*lowerQuartile(with)
						ratios = append(ratios, math.Log(took/lowerQuartile(without)))
					}
				}
				if t != nil {
					if err := t.Close(); err != nil {
						b.Error(err)
					}
				}
			})
			slices.Sort(ratios)
			// outside is the number of results below the confidence interval. The same number of results is
			// above it.
			n := float64(len(ratios))
			outside := int(max(n/2-0.98*math.Sqrt(n), 0))
			percent := func(i int) float64 { return 100 * (math.Exp(ratios[i]) - 1) }
			b.ReportMetric(percent(len(ratios)/2), "median-%")
			b.ReportMetric(percent(outside), "low-%")
			b.ReportMetric(percent(len(ratios)-1-outside), "high-%")
		})
	}
}

func lowerQuartile(x []float64) float64 {
	slices.Sort(x)
	return x[len(x)/4]
}
