package hvd_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/hvd"
)

// compressions holds the options for compression. ulp is the distance from 1 to the next larger number of the
// 16-bit type.
var compressions = []struct {
	title  string
	option hvd.Option
	ulp    float64
}{
	{"fp16", hvd.CompressFP16(), 1.0 / 1024},
	{"bf16", hvd.CompressBF16(), 1.0 / 128},
}

// TestCompression checks that numbers that a 16-bit float can represent are sent unchanged. Any other number
// must be rounded once before the reduction, and the result must be rounded once after it.
func TestCompression(t *testing.T) {
	runModes(t, func(ctx context.Context, t *testing.T, e *hvd.Engine) {
		for _, c := range compressions {
			compressed[float32](ctx, t, e, c.title, c.option, c.ulp)
			compressed[float64](ctx, t, e, c.title, c.option, c.ulp)
		}
	})
}

func compressed[T float32 | float64](ctx context.Context, t *testing.T, e *hvd.Engine, title string,
	option hvd.Option, ulp float64) {
	n := T(e.Size())
	for _, c := range []struct {
		label string
		x     []T
		opts  []hvd.Option
		want  []T
	}{
		{"exact", []T{1, -2, 0.5, 0}, nil, []T{n, -2 * n, n / 2, 0}},
		{"empty", []T{}, nil, []T{}},
		// The argument differs from a 16-bit float by less than half of the distance to the next one, so
		// rounding removes the difference.
		{"rounded", []T{1 + T(ulp)/4}, nil, []T{n}},
		{"rounded up", []T{1 + T(ulp)*3/4}, []hvd.Option{hvd.Op(hvd.Max)}, []T{1 + T(ulp)}},
		// The argument is rounded after it is multiplied by the prescale factor. The result is rounded before
		// it is multiplied by the postscale factor.
		{"prescale", []T{1 + T(ulp)/4}, []hvd.Option{hvd.Op(hvd.Max), hvd.Prescale(4)}, []T{4}},
		{"postscale", []T{1}, []hvd.Option{hvd.Op(hvd.Max), hvd.Postscale(1 + ulp/4)}, []T{1 + T(ulp)/4}},
		{"average", []T{1 + T(e.Rank())}, []hvd.Option{hvd.Op(hvd.Average)}, []T{(n + 1) / 2}},
		{"product", []T{2}, []hvd.Option{hvd.Op(hvd.Product)}, []T{T(math.Pow(2, float64(n)))}},
		{"adasum", []T{3, 4}, []hvd.Option{hvd.Op(hvd.Adasum)}, []T{3, 4}},
	} {
		for _, inPlace := range []bool{false, true} {
			x := slices.Clone(c.x)
			opts := slices.Concat([]hvd.Option{hvd.Op(hvd.Sum), option, hvd.On(e)}, c.opts)
			if inPlace {
				opts = append(opts, hvd.InPlace())
			}
			got, err := hvd.Allreduce(ctx, x, opts...)
			if err != nil || !slices.Equal(got, c.want) || !inPlace && !slices.Equal(x, c.x) {
				t.Errorf("rank %d: %s %s of %T, in place %v: got %v and error %v, want %v", e.Rank(), title,
					c.label, x, inPlace, got, err, c.want)
			}
		}
	}
	xs := [][]T{{1, 1 + T(ulp)/4}, {}, {3}}
	group, err := hvd.GroupedAllreduce(ctx, xs, hvd.Op(hvd.Sum), option, hvd.On(e))
	if err != nil || !slices.EqualFunc(group, [][]T{{n, n}, {}, {3 * n}}, slices.Equal[[]T]) {
		t.Errorf("rank %d: %s group of %T: got %v and error %v", e.Rank(), title, xs, group, err)
	}
}

// TestCompressionBesideOthers checks the results of tensors that are in flight together, without compression
// and with different compressions.
func TestCompressionBesideOthers(t *testing.T) {
	run(t, 2, func(ctx context.Context, e *hvd.Engine) {
		const x = 1 + 1.0/16384
		for range 3 {
			var handles []*hvd.Handle[float32]
			for i := range 30 {
				opts := []hvd.Option{hvd.Op(hvd.Max), name("x%d", i), hvd.On(e)}
				if i%3 > 0 {
					opts = append(opts, compressions[i%3-1].option)
				}
				h, err := hvd.AllreduceAsync([]float32{x, float32(i)}, opts...)
				if err != nil {
					t.Error(err)
					return
				}
				handles = append(handles, h)
			}
			for i, h := range handles {
				want := []float32{1, float32(i)}
				if i%3 == 0 {
					want[0] = x
				}
				if got, err := h.Wait(ctx); err != nil || !slices.Equal(got, want) {
					t.Errorf("x%d: got %v and error %v, want %v", i, got, err, want)
				}
			}
		}
	})
}

// TestErrorFeedback averages the results of 256 reductions of the same tensor. With error feedback the error
// of the mean must be small, in proportion to 1/256. Without it the mean must keep the error of the first
// result.
func TestErrorFeedback(t *testing.T) {
	for _, c := range compressions {
		t.Run(c.title, func(t *testing.T) {
			run(t, 2, func(ctx context.Context, e *hvd.Engine) {
				const rounds = 256
				// Both ranks have the same numbers, so that their average is not rounded again.
				rng := rand.New(rand.NewPCG(3, 4))
				x := make([]float64, 50)
				for i := range x {
					x[i] = 1 + rng.Float64()
				}
				plain, fed := make([]float64, len(x)), make([]float64, len(x))
				for range rounds {
					accumulate(ctx, t, e, plain, x, hvd.Name("plain"), c.option)
					accumulate(ctx, t, e, fed, x, hvd.Name("fed"), c.option, hvd.ErrorFeedback())
				}
				var farPlain, farFed float64
				for i := range x {
					farPlain = max(farPlain, math.Abs(plain[i]/rounds-x[i]))
					farFed = max(farFed, math.Abs(fed[i]/rounds-x[i]))
				}
				if bound := 2 * c.ulp / rounds; farFed > bound {
					t.Errorf("rank %d: with error feedback the mean of %d is off by %v, want at most %v",
						e.Rank(), rounds, farFed, bound)
				}
				if least := c.ulp / 4; farPlain < least {
					t.Errorf("rank %d: without it is off by only %v, want at least %v", e.Rank(), farPlain,
						least)
				}
			})
		})
	}
}

func accumulate(ctx context.Context, t *testing.T, e *hvd.Engine, sum, x []float64, opts ...hvd.Option) {
	got, err := hvd.Allreduce(ctx, x, append(opts, hvd.On(e))...)
	if err != nil {
		t.Error(err)
		return
	}
	for i, v := range got {
		sum[i] += v
	}
}

// TestErrorFeedbackForgets checks that a rounding error is fed back only to a tensor with the same name and
// length, and that an infinite or NaN error is dropped.
func TestErrorFeedbackForgets(t *testing.T) {
	run(t, 2, func(ctx context.Context, e *hvd.Engine) {
		const ulp = 1.0 / 1024
		feed := func(tensor string, x ...float32) []float32 {
			got, err := hvd.Allreduce(ctx, x, hvd.Name(tensor), hvd.CompressFP16(), hvd.ErrorFeedback(),
				hvd.On(e))
			if err != nil {
				t.Error(err)
			}
			return got
		}
		third := float32(1 + ulp/3)
		for i, step := range []struct {
			tensor  string
			x, want []float32
		}{
			{"x", []float32{third}, []float32{1}},
			{"y", []float32{third}, []float32{1}},             // another name: nothing is fed back
			{"x", []float32{third}, []float32{1 + ulp}},       // with the error of the step before, rounds up
			{"x", []float32{third, 1}, []float32{1, 1}},       // another length: nothing is fed back
			{"x", []float32{third, 1}, []float32{1 + ulp, 1}}, // with the error of the step before, rounds up
			{"z", []float32{1e6}, []float32{float32(math.Inf(1))}},
			{"z", []float32{2}, []float32{2}}, // the error was infinite, so it was dropped
			{"z", []float32{float32(math.NaN())}, nil},
			{"z", []float32{2}, []float32{2}},
		} {
			got := feed(step.tensor, step.x...)
			if step.want != nil && !slices.Equal(got, step.want) {
				t.Errorf("rank %d: step %d: %s %v gave %v, want %v", e.Rank(), i, step.tensor, step.x, got,
					step.want)
			}
		}
	})
}

// plus returns the adaptive sum of two vectors, computed by the formula in the paper.
func plus(a, b []float64) []float64 {
	var ab, aa, bb float64
	for i := range a {
		ab, aa, bb = ab+a[i]*b[i], aa+a[i]*a[i], bb+b[i]*b[i]
	}
	ca, cb := 1.0, 1.0
	if aa > 0 {
		ca = 1 - ab/(2*aa)
	}
	if bb > 0 {
		cb = 1 - ab/(2*bb)
	}
	sum := make([]float64, len(a))
	for i := range a {
		sum[i] = ca*a[i] + cb*b[i]
	}
	return sum
}

// TestAdasum checks that Adasum reduces each tensor separately, even if tensors are fused, and that all ranks
// get the same bits. With three ranks, rank 2 first sends its vector to rank 0. So the vectors of ranks 0 and
// 2 are combined first.
func TestAdasum(t *testing.T) {
	for _, settings := range [][]string{{}, {"HVD_DETERMINISTIC", "1"}, {"HVD_NEGOTIATION", "lockstep"}} {
		t.Run(fmt.Sprint(settings), func(t *testing.T) {
			run(t, 3, func(ctx context.Context, e *hvd.Engine) {
				vector := func(r, tensor int) []float64 {
					rng := rand.New(rand.NewPCG(uint64(r), uint64(tensor)))
					x := make([]float64, 37*tensor)
					for i := range x {
						x[i] = rng.NormFloat64() * float64(1+r)
					}
					return x
				}
				var handles []*hvd.Handle[float64]
				for tensor := range 8 {
					h, err := hvd.AllreduceAsync(vector(e.Rank(), tensor), hvd.Op(hvd.Adasum),
						name("x%d", tensor), hvd.On(e))
					if err != nil {
						t.Error(err)
						return
					}
					handles = append(handles, h)
				}
				for tensor, h := range handles {
					got, err := h.Wait(ctx)
					if err != nil {
						t.Error(err)
						return
					}
					want := plus(plus(vector(0, tensor), vector(2, tensor)), vector(1, tensor))
					for i := range want {
						if math.Abs(got[i]-want[i]) > 1e-12*(1+math.Abs(want[i])) {
							t.Errorf("rank %d: x%d[%d] is %v, want %v", e.Rank(), tensor, i, got[i], want[i])
							break
						}
					}
					checkSameBits(ctx, t, e, got, fmt.Sprint("x", tensor))
				}
				// Adasum adds orthogonal vectors and averages parallel vectors.
				x := make([]float32, 3)
				x[e.Rank()] = float32(e.Rank() + 1)
				if got, err := hvd.Allreduce(ctx, x, hvd.Op(hvd.Adasum), hvd.On(e)); err != nil ||
					!slices.Equal(got, []float32{1, 2, 3}) {
					t.Errorf("orthogonal: got %v and error %v", got, err)
				}
				half := []hvd.Float16{hvd.Float16FromFloat32(3)}
				if got, err := hvd.Allreduce(ctx, half, hvd.Op(hvd.Adasum), hvd.On(e)); err != nil ||
					got[0].Float32() != 3 {
					t.Errorf("parallel: got %v and error %v", got, err)
				}
			}, settings...)
		})
	}
}

// checkSameBits checks that x has the same bits at all ranks.
func checkSameBits(ctx context.Context, t *testing.T, e *hvd.Engine, x []float64, label string) {
	t.Helper()
	all, err := hvd.Allgather(ctx, x, hvd.Name("bits of "+label), hvd.On(e))
	if err != nil {
		t.Error(err)
		return
	}
	for i, v := range all {
		if math.Float64bits(v) != math.Float64bits(x[i%len(x)]) {
			t.Errorf("rank %d: %s: the ranks have different bits", e.Rank(), label)
			return
		}
	}
}

// TestDeterministic checks that with HVD_DETERMINISTIC sums are formed in the order of the ranks. The result
// must not depend on what is fused, how buffers are divided, or which rank submits first.
func TestDeterministic(t *testing.T) {
	for _, settings := range [][]string{{}, {"HOROVOD_FUSION_THRESHOLD", "0"},
		{"HOROVOD_FUSION_THRESHOLD", "3000"}, {"HVD_NEGOTIATION", "lockstep"}} {
		t.Run(fmt.Sprint(settings), func(t *testing.T) {
			seed := rand.Uint64()
			t.Logf("seed %d", seed)
			run(t, 3, func(ctx context.Context, e *hvd.Engine) {
				const tensors = 12
				rng := rand.New(rand.NewPCG(seed, uint64(e.Rank())))
				for range 3 {
					handles := make([]*hvd.Handle[float32], tensors)
					for _, i := range rng.Perm(tensors) {
						var err error
						handles[i], err = hvd.AllreduceAsync(rough(e.Rank(), i), hvd.Op(hvd.Sum),
							name("x%d", i), hvd.On(e))
						if err != nil {
							t.Error(err)
							return
						}
					}
					for i, h := range handles {
						a, b, c := rough(0, i), rough(1, i), rough(2, i)
						for j := range a {
							a[j] = (a[j] + b[j]) + c[j]
						}
						if got, err := h.Wait(ctx); err != nil || !slices.Equal(got, a) {
							t.Errorf("rank %d: x%d: not the sum in the order of the ranks, error %v",
								e.Rank(), i, err)
						}
					}
				}
			}, append(settings, "HVD_DETERMINISTIC", "1")...)
		})
	}
}

// rough returns numbers whose floating-point sum depends on the order of the additions.
func rough(rank, tensor int) []float32 {
	rng := rand.New(rand.NewPCG(uint64(rank), uint64(tensor)))
	x := make([]float32, 100*tensor+1)
	for i := range x {
		x[i] = float32(rng.NormFloat64() * math.Pow(2, float64(rng.IntN(20))))
	}
	return x
}

// TestErrorFeedbackFollowsTheTensor checks that the rounding error is kept in the unit of the unscaled
// tensor, and separately for each type.
func TestErrorFeedbackFollowsTheTensor(t *testing.T) {
	run(t, 2, func(ctx context.Context, e *hvd.Engine) {
		feed := []hvd.Option{hvd.CompressBF16(), hvd.ErrorFeedback(), hvd.On(e)}
		// The nearest bfloat16 to 4104 is 4096, and the next larger one is 4128, so each rounding loses 8.
		total := float32(0)
		for _, scale := range []float64{1, 1, 1024, 1.0 / 1024, 1} {
			got, err := hvd.Allreduce(ctx, []float32{4104}, append(feed, hvd.Name("scaled"),
				hvd.Prescale(scale), hvd.Postscale(1/scale))...)
			if err != nil {
				t.Error(err)
				return
			}
			total += got[0]
		}
		if want := float32(5 * 4104); total < want-16 || total > want+16 {
			t.Errorf("rank %d: five times 4104 is %v, want %v with an error of at most 16", e.Rank(),
				total, want)
		}
		if _, err := hvd.Allreduce(ctx, []float32{4104, 4104},
			append(feed, hvd.Name("typed"))...); err != nil {
			t.Error(err)
		}
		if got, err := hvd.Allreduce(ctx, []float64{1}, append(feed, hvd.Name("typed"))...); err != nil ||
			got[0] != 1 {
			t.Errorf("rank %d: after two float32, one float64 of as many bytes: got %v and error %v, want 1",
				e.Rank(), got, err)
		}
		for _, c := range []struct {
			want string
			opts []hvd.Option
		}{
			{"option ErrorFeedback needs option Name", nil},
			{"option ErrorFeedback: got reduction max", []hvd.Option{hvd.Name("most"), hvd.Op(hvd.Max)}},
		} {
			var usage *hvd.UsageError
			if _, err := hvd.Allreduce(ctx, []float32{1}, append(c.opts, feed...)...); !errors.As(err,
				&usage) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("rank %d: got error %v, want a UsageError: %s", e.Rank(), err, c.want)
			}
		}
	})
}
