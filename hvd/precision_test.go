package hvd_test

import (
	"context"
	"errors"
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
	option hvd.CompressionOption
	ulp    float64
}{
	{"fp16", hvd.CompressFP16(), 1.0 / 1024},
	{"bf16", hvd.CompressBF16(), 1.0 / 128},
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

func accumulate(ctx context.Context, t *testing.T, e *hvd.Engine, sum, x []float64, opts ...any) {
	got := must(hvd.Allreduce(ctx, x, as[hvd.AllreduceOption](append(opts, hvd.On(e)))...))
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
			got := must(hvd.Allreduce(ctx, x, hvd.Name(tensor), hvd.CompressFP16(), hvd.ErrorFeedback(),
				hvd.On(e)))
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

// TestErrorFeedbackFollowsTheTensor checks that the rounding error is kept in the unit of the unscaled
// tensor, and separately for each type.
func TestErrorFeedbackFollowsTheTensor(t *testing.T) {
	run(t, 2, func(ctx context.Context, e *hvd.Engine) {
		feed := []any{hvd.CompressBF16(), hvd.ErrorFeedback(), hvd.On(e)}
		// The nearest bfloat16 to 4104 is 4096, and the next larger one is 4128, so each rounding loses 8.
		total := float32(0)
		for _, scale := range []float64{1, 1, 1024, 1.0 / 1024, 1} {
			got := must(hvd.Allreduce(ctx, []float32{4104}, as[hvd.AllreduceOption](append(feed, hvd.Name("scaled"),
				hvd.Prescale(scale), hvd.Postscale(1/scale)))...))
			total += got[0]
		}
		if want := float32(5 * 4104); total < want-16 || total > want+16 {
			t.Errorf("rank %d: five times 4104 is %v, want %v with an error of at most 16", e.Rank(),
				total, want)
		}
		must(hvd.Allreduce(ctx, []float32{4104, 4104},
			as[hvd.AllreduceOption](append(feed, hvd.Name("typed")))...))
		if got, err := hvd.Allreduce(ctx, []float64{1}, as[hvd.AllreduceOption](append(feed,
			hvd.Name("typed")))...); err != nil ||
			got[0] != 1 {
			t.Errorf("rank %d: after two float32, one float64 of as many bytes: got %v and error %v, want 1",
				e.Rank(), got, err)
		}
		for _, c := range []struct {
			want string
			opts []any
		}{
			{"option ErrorFeedback needs option Name", nil},
			{"option ErrorFeedback: got reduction max", []any{hvd.Name("most"), hvd.Op(hvd.Max)}},
		} {
			var usage *hvd.UsageError
			if _, err := hvd.Allreduce(ctx, []float32{1}, as[hvd.AllreduceOption](append(c.opts,
				feed...))...); !errors.As(err,
				&usage) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("rank %d: got error %v, want a UsageError: %s", e.Rank(), err, c.want)
			}
		}
	})
}
