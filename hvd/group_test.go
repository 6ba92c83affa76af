package hvd_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/tensorqueue"
)

// backends holds settings under which groups are reduced in different ways: in place in shared memory, in a
// buffer over TCP, in small pieces, and without fusion with other tensors.
var backends = [][]string{
	{},
	{"HOROVOD_CPU_OPERATIONS", "tcp"},
	{"HOROVOD_FUSION_THRESHOLD", "64"},
	{"HOROVOD_CPU_OPERATIONS", "tcp", "HOROVOD_DISABLE_GROUP_FUSION", "1"},
}

// mixed runs an allreduce of a group of tensors with the given types and lengths. Tensor i of a rank consists
// of the bytes that the function whole returns for that rank and i. The results are in new memory unless
// inPlace is true.
func mixed(ctx context.Context, e *hvd.Engine, group string, op tensor.ReduceOp, inPlace bool,
	types []tensor.DType, lengths []int) ([][]byte, error) {
	c := rank.NewCall(message.Allreduce, tensor.Invalid)
	c.Rank, c.Name, c.Op = e.Inside(), group, op
	if err := c.Check(); err != nil {
		return nil, err
	}
	done := make(chan error, 1)
	entry := &tensorqueue.Entry{Done: func(err error) { done <- err }}
	c.Fill(entry)
	q, numElems := &entry.Request, int64(0)
	outs := make([][]byte, len(types))
	for i, dt := range types {
		in := whole(dt, lengths[i], e.Rank(), i)
		outs[i] = in
		if !inPlace {
			outs[i] = make([]byte, len(in))
		}
		entry.Parts = append(entry.Parts, tensorqueue.Part{Input: in, Output: outs[i]})
		q.Parts = q.Parts.Append(dt, tensor.Shape{int64(lengths[i])})
		numElems += int64(lengths[i])
	}
	q.Shape, q.DType = tensor.Shape{numElems}, q.Parts.DType()
	if err := c.Submit(entry); err != nil {
		return nil, err
	}
	c.Rank.Engine.Drive(ctx, func() bool { return len(done) > 0 })
	select {
	case err := <-done:
		return outs, err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// whole returns the bytes of tensor i of a rank. The tensor has n elements, which are small integers
// proportional to rank+1.
func whole(dt tensor.DType, n, rank, i int) []byte {
	b := make([]byte, 0, n*dt.Size())
	for k := range n {
		b = append(b, one(dt, (rank+1)*(1+(i+k)%5))...)
	}
	return b
}

// one returns the number v encoded as an element of type dt.
func one(dt tensor.DType, v int) []byte {
	switch dt {
	case tensor.Float32:
		return tensor.Bytes([]float32{float32(v)})
	case tensor.Float64:
		return tensor.Bytes([]float64{float64(v)})
	case tensor.Int64:
		return tensor.Bytes([]int64{int64(v)})
	case tensor.Int8:
		return []byte{byte(v)}
	}
	return tensor.Bytes([]hvd.Float16{hvd.Float16FromFloat32(float32(v))})
}

// TestGroupOfSeveralTypes checks the results of groups whose tensors have random types. Each group runs three
// times, so that it is first negotiated in full and later found in the cache. The next group has the same
// name but other tensors.
func TestGroupOfSeveralTypes(t *testing.T) {
	types := []tensor.DType{tensor.Float32, tensor.Int64, tensor.Int8, tensor.Float16, tensor.Float64}
	for _, settings := range backends {
		t.Run(fmt.Sprint(settings), func(t *testing.T) {
			runModes(t, func(ctx context.Context, t *testing.T, e *hvd.Engine) {
				rng := rand.New(rand.NewPCG(5, 6)) // the same seed at all ranks
				for range 6 {
					some, lengths := make([]tensor.DType, 1+rng.IntN(7)), make([]int, 7)
					for i := range some {
						some[i], lengths[i] = types[rng.IntN(len(types))], rng.IntN(40)
					}
					for round := range 3 {
						single := must(hvd.AllreduceAsync([]float32{1}, hvd.Op(hvd.Sum), hvd.Name("beside"),
							hvd.On(e)))
						got, err := mixed(ctx, e, "mixed", tensor.Sum, round == 1, some, lengths)
						if err != nil {
							t.Errorf("%v: %v", some, err)
							return
						}
						factor := e.Size() * (e.Size() + 1) / 2 // ratio of the sum to the element of rank 0
						for i, dt := range some {
							want := make([]byte, 0, len(got[i]))
							for k := range lengths[i] {
								want = append(want, one(dt, factor*(1+(i+k)%5))...)
							}
							if !slices.Equal(got[i], want) {
								t.Errorf("rank %d: tensor %d of %v is %v, want %v", e.Rank(), i, some, got[i],
									want)
							}
						}
						if x, err := single.Wait(ctx); err != nil || x[0] != float32(e.Size()) {
							t.Errorf("beside the group: got %v and error %v", x, err)
						}
					}
				}
			}, settings...)
		})
	}
}

// TestAverageOfSeveralTypes checks that Average divides each tensor of a group by the rules of its type. The
// divisor is the number of all ranks even if one has joined.
func TestAverageOfSeveralTypes(t *testing.T) {
	for _, settings := range backends {
		t.Run(fmt.Sprint(settings), func(t *testing.T) {
			run(t, 3, func(ctx context.Context, e *hvd.Engine) {
				types, lengths := []tensor.DType{tensor.Float32, tensor.Int64}, []int{2, 3}
				if e.Rank() < 2 {
					// In the first tensor, rank 0 has 1 and 2, and rank 1 has 2 and 4. In the second, rank 0
					// has 2, 3 and 4, and rank 1 has twice as much.
					got := must(mixed(ctx, e, "average", tensor.Average, false, types, lengths))
					if f, want := tensor.View[float32](got[0]), []float32{1, 2}; !slices.Equal(f, want) {
						t.Errorf("rank %d: average of float32 is %v, want %v", e.Rank(), f, want)
					}
					if n, want := tensor.View[int64](got[1]), []int64{2, 3, 4}; !slices.Equal(n, want) {
						t.Errorf("rank %d: average of int64 is %v, want %v", e.Rank(), n, want)
					}
				}
				must(hvd.Join(ctx, hvd.On(e)))
			}, settings...)
		})
	}
}

// TestGroupOfSeveralTypesRefused submits at one rank a group in which one type does not support the
// reduction. The call must fail. An unnamed call after it must still match the unnamed call of the other
// rank.
func TestGroupOfSeveralTypesRefused(t *testing.T) {
	run(t, 2, func(ctx context.Context, e *hvd.Engine) {
		if e.Rank() == 0 {
			_, err := mixed(ctx, e, "", tensor.Adasum, false, []tensor.DType{tensor.Float32, tensor.Int64},
				[]int{1, 1})
			var misuse *engine.UsageError
			if !errors.As(err, &misuse) || !strings.Contains(err.Error(), "reduce with adasum: got element type int64") {
				t.Errorf("got %v, want the misuse", err)
			}
		}
		must(hvd.GroupedAllreduce(ctx, [][]int32{{1}}, hvd.On(e)))
	})
}

// TestMismatchedTypesInAGroup submits a group whose second tensor has a different type at rank 1 than at the
// other ranks. The error must name that tensor by its number in the group.
func TestMismatchedTypesInAGroup(t *testing.T) {
	runModes(t, func(ctx context.Context, t *testing.T, e *hvd.Engine) {
		types := []tensor.DType{tensor.Float32, tensor.Int64}
		if e.Rank() == 1 {
			types[1] = tensor.Float64
		}
		_, err := mixed(ctx, e, "g", tensor.Sum, false, types, []int{1, 1})
		const want = `allreduce "g": mismatched data types of tensor 2 of 2`
		testnet.WantError(t, err, want)
		checkUsable(ctx, t, e.ProcessSets()[0], "g")
	})
}

// TestAdasumOfAGroup checks that Adasum reduces each tensor of a group separately.
func TestAdasumOfAGroup(t *testing.T) {
	for _, settings := range backends {
		t.Run(fmt.Sprint(settings), func(t *testing.T) {
			run(t, 3, func(ctx context.Context, e *hvd.Engine) {
				rng := rand.New(rand.NewPCG(uint64(e.Rank()), 1))
				xs := make([][]float32, 5)
				for i := range xs {
					for range 7 * i {
						xs[i] = append(xs[i], float32(rng.NormFloat64()))
					}
				}
				group := must(hvd.GroupedAllreduce(ctx, xs, hvd.Op(hvd.Adasum), hvd.On(e)))
				for i, x := range xs {
					want, err := hvd.Allreduce(ctx, x, hvd.Op(hvd.Adasum), name("single %d", i), hvd.On(e))
					if err != nil || !slices.Equal(group[i], want) {
						t.Errorf("rank %d: tensor %d of the group is %v, alone %v with error %v", e.Rank(), i,
							group[i], want, err)
					}
				}
			}, settings...)
		})
	}
}

// TestErrorFeedbackInAGroup checks that the rounding error of each tensor of a group is fed back only to that
// tensor. If the next group with the same name has a different number of tensors, no error must be fed back
// to it.
func TestErrorFeedbackInAGroup(t *testing.T) {
	const ulp = 1.0 / 1024
	third := float32(1 + ulp/3)
	run(t, 2, func(ctx context.Context, e *hvd.Engine) {
		for i, step := range []struct{ xs, want [][]float32 }{
			{[][]float32{{third}, {1}, {third, third}}, [][]float32{{1}, {1}, {1, 1}}},
			{[][]float32{{third}, {1}, {third, 1}}, [][]float32{{1 + ulp}, {1}, {1 + ulp, 1}}},
			{[][]float32{{third}, {third}}, [][]float32{{1}, {1}}}, // a different number of tensors
			{[][]float32{{third}, {1}}, [][]float32{{1 + ulp}, {1}}},
		} {
			got, err := hvd.GroupedAllreduce(ctx, step.xs, hvd.Name("g"), hvd.CompressFP16(),
				hvd.ErrorFeedback(), hvd.On(e))
			if err != nil || !slices.EqualFunc(got, step.want, slices.Equal[[]float32]) {
				t.Errorf("rank %d: step %d: %v gave %v and error %v, want %v", e.Rank(), i, step.xs, got, err,
					step.want)
			}
		}
	})
}

// manyTensors returns a number of tensors that makes a group too large for the fusion buffer. A tensor has 20
// MiB, or 10 MiB if it is compressed.
func manyTensors(compressed bool) int {
	if compressed {
		return 7
	}
	return 4
}

// cycled returns n elements: the first 21 come from f, and each later element equals the element 21 places
// before it. So a function f with period 3 or 7 has its own values everywhere. Calling f for each element
// would take seconds with the race detector.
func cycled[T hvd.Element](n int, f func(k int) T) []T {
	x := make([]T, n)
	const period = 3 * 7
	for k := range min(n, period) {
		x[k] = f(k)
	}
	for have := period; have < n; have *= 2 {
		copy(x[have:], x[:have])
	}
	return x
}

// TestLargeGroup checks the results of a group that does not fit in the fusion buffer at once, so that it is
// reduced in several parts. The rounding error of a tensor in the first part must not be fed back to a tensor
// in the second.
func TestLargeGroup(t *testing.T) {
	if testing.Short() {
		t.Skip("much data; the goroutines are those of other groups")
	}
	for _, c := range []struct {
		title   string
		options []any
	}{
		{"adasum", []any{hvd.Op(hvd.Adasum)}},
		{"fed back", []any{hvd.CompressFP16(), hvd.ErrorFeedback(), hvd.InPlace()}},
	} {
		t.Run(c.title, func(t *testing.T) {
			run(t, 2, func(ctx context.Context, e *hvd.Engine) {
				xs := make([][]float32, manyTensors(c.title == "fed back"))
				for i := range xs {
					// 20 MiB, or 10 MiB if compressed
					xs[i] = cycled(5<<20, func(k int) float32 { return float32(1 + (i+k)%7) })
					if c.title == "fed back" {
						xs[i][0] = 1
					}
				}
				// The average of equal tensors equals each of them, and so does their adaptive sum.
				want := make([][]float32, len(xs))
				for i := range xs {
					want[i] = slices.Clone(xs[i])
				}
				const third = 1.0 / 1024 / 3 // a third of the distance from 1 to the next greater float16
				for step := range 2 {
					if c.title == "fed back" {
						xs[0][0], want[0][0] = 1+third, 1+float32(step)/1024
					}
					got := must(hvd.GroupedAllreduce(ctx, xs,
						as[hvd.GroupedAllreduceOption](append(c.options, hvd.Name("g"), hvd.On(e)))...))
					for i := range xs {
						if !bytes.Equal(tensor.Bytes(got[i]), tensor.Bytes(want[i])) {
							t.Errorf("rank %d: tensor %d is another in step %d", e.Rank(), i, step)
						}
					}
				}
			}, "HOROVOD_CPU_OPERATIONS", "tcp")
		})
	}
}

// TestLargeGroupBesideAJoin checks that a large group, which is reduced in several parts, gets the right
// result if one of two ranks has joined. The joined rank has to divide the group into the same parts as the
// other rank.
func TestLargeGroupBesideAJoin(t *testing.T) {
	if testing.Short() {
		t.Skip("much data; the goroutines are those of other groups")
	}
	for _, settings := range backends[:2] {
		t.Run(fmt.Sprint(settings), func(t *testing.T) {
			run(t, 2, func(ctx context.Context, e *hvd.Engine) {
				if e.Rank() == 0 {
					xs := make([][]int32, manyTensors(false))
					for i := range xs {
						xs[i] = cycled(5<<20, func(k int) int32 { return int32(i - k) }) // 20 MiB each
					}
					same := func(a, b []int32) bool { return bytes.Equal(tensor.Bytes(a), tensor.Bytes(b)) }
					for range 3 {
						got, err := hvd.GroupedAllreduce(ctx, xs, hvd.Op(hvd.Min), hvd.On(e))
						if err != nil || !slices.EqualFunc(got, xs, same) {
							t.Errorf("the least of a group and of nothing is not the group: error %v", err)
							break
						}
					}
				}
				must(hvd.Join(ctx, hvd.On(e)))
			}, settings...)
		})
	}
}

// TestResultsOfAGroupAreApart appends to one result of a group. The next result must not change, although
// both are slices of one allocation. The test also changes the caller's list of tensors after the call, which
// must have no effect.
func TestResultsOfAGroupAreApart(t *testing.T) {
	run(t, 2, func(ctx context.Context, e *hvd.Engine) {
		a, b := []int32{1}, []int32{2}
		xs := [][]int32{a, b}
		g := must(hvd.GroupedAllreduceAsync(xs, hvd.Op(hvd.Sum), hvd.On(e)))
		xs[0], xs[1] = nil, nil
		got, err := g.Wait(ctx)
		if err != nil || len(got) != 2 || len(got[0]) != 1 {
			t.Errorf("got %v and error %v", got, err)
			return
		}
		got[0] = append(got[0], 99)
		if got[0][0] != 2 || got[1][0] != 4 || a[0] != 1 || b[0] != 2 {
			t.Errorf("rank %d: got %v of %v and %v", e.Rank(), got, a, b)
		}
		xs[0], xs[1] = a, b
		if got, err = hvd.GroupedAllreduce(ctx, xs, hvd.InPlace(), hvd.Op(hvd.Sum), hvd.On(e)); err != nil ||
			&got[0][0] != &a[0] || a[0] != 2 || b[0] != 4 {
			t.Errorf("rank %d: in place: got %v and error %v, and %v, %v", e.Rank(), got, err, a, b)
		}
	})
}

// TestRepeatedGroupAllocatesLittle checks that a repeated group of 500 tensors makes at most 20 allocations:
// its handle, its list of results and the memory of the results, but nothing for each tensor.
func TestRepeatedGroupAllocatesLittle(t *testing.T) {
	run(t, 1, func(ctx context.Context, e *hvd.Engine) {
		xs := make([][]float32, 500)
		for i := range xs {
			xs[i] = make([]float32, 3)
		}
		for _, more := range [][]any{nil, {hvd.CompressFP16(), hvd.ErrorFeedback()}} {
			opts := append(more, hvd.Op(hvd.Sum), hvd.Name("g"), hvd.On(e))
			once := func() {
				must(hvd.GroupedAllreduce(ctx, xs,
					as[hvd.GroupedAllreduceOption](opts)...))
			}
			for range 100 {
				once()
			}
			// A repeated group makes fewer allocations than this limit. But a sync.Pool drops some entries (a
			// quarter of them with -race), and a dropped entry costs an allocation.
			const most = 20
			if got := testing.AllocsPerRun(300, once); got > most {
				t.Errorf("%v allocations, want at most %d", got, most)
			}
		}
	})
}
