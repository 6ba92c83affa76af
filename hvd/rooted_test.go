package hvd_test

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/gohvd/gohvd/hvd"
)

// TestReduce checks the result at the root. The other ranks must get nil and keep their arguments, also in
// place.
func TestReduce(t *testing.T) {
	modes(t, func(t *testing.T, mode []string) {
		for _, size := range sizes {
			run(t, size, func(ctx context.Context, e *hvd.Engine) {
				for root := range size {
					for _, n := range []int{0, 1, 7, large(70_000)} {
						checkReduce(ctx, t, e, root, n)
						checkReduce(ctx, t, e, root, n, hvd.InPlace())
					}
				}
			}, mode...)
		}
	})
}

func checkReduce(ctx context.Context, t *testing.T, e *hvd.Engine, root, n int, opts ...hvd.Option) {
	x := fill[float32](n, e.Rank())
	got, err := hvd.Reduce(ctx, x, root, append(opts, hvd.Op(hvd.Max), hvd.On(e))...)
	if err != nil {
		t.Errorf("rank %d: reduce of %d elements to rank %d: %v", e.Rank(), n, root, err)
		return
	}
	if e.Rank() != root {
		if got != nil || !slices.Equal(x, fill[float32](n, e.Rank())) {
			t.Errorf("rank %d: reduce of %d elements to rank %d: got %d elements, or the argument was changed",
				e.Rank(), n, root, len(got))
		}
		return
	}
	if !slices.Equal(got, reduced[float32](n, e.Size(), hvd.Max)) ||
		len(opts) > 0 && n > 0 && &got[0] != &x[0] {
		t.Errorf("root %d: reduce of %d elements: wrong result", root, n)
	}
}

// TestReduceScaled checks averages and factors, which are those of an allreduce, and a name that is repeated.
func TestReduceScaled(t *testing.T) {
	run(t, 3, func(ctx context.Context, e *hvd.Engine) {
		for round := range 3 {
			x := []int32{int32(-e.Rank()), 7 * int32(round)}
			got, err := hvd.Reduce(ctx, x, 1, hvd.Name("x"), hvd.On(e))
			if err != nil || e.Rank() == 1 && !slices.Equal(got, []int32{-1, 7 * int32(round)}) {
				t.Errorf("rank %d: average: got %v and error %v", e.Rank(), got, err)
			}
			half, err := hvd.Reduce(ctx, []hvd.BFloat16{hvd.BFloat16FromFloat32(1)}, 1, hvd.Prescale(256),
				hvd.Postscale(0.5), hvd.Op(hvd.Sum), hvd.On(e))
			if err != nil || e.Rank() == 1 && half[0].Float32() != 384 {
				t.Errorf("rank %d: scaled sum: got %v and error %v", e.Rank(), half, err)
			}
		}
	})
}

// TestReduceBesideAJoin checks that joined ranks contribute neutral elements, unless the root has joined. The
// names are repeated, so that they are in the cache.
func TestReduceBesideAJoin(t *testing.T) {
	runJoin(t, func(ctx context.Context, t *testing.T, e *hvd.Engine) {
		for _, root := range []int{0, 2} {
			if _, err := hvd.Reduce(ctx, []int32{1}, root, hvd.Op(hvd.Sum), name("to %d", root),
				hvd.On(e)); err != nil {
				t.Error(err)
			}
		}
		if e.Rank() != 2 {
			for root, want := range []int32{2, 2} {
				got, err := hvd.Reduce(ctx, []int32{1}, root, hvd.Op(hvd.Sum), name("to %d", root), hvd.On(e))
				if err != nil || e.Rank() == root && !slices.Equal(got, []int32{want}) {
					t.Errorf("rank %d: beside a joined rank: got %v and error %v", e.Rank(), got, err)
				}
			}
			_, err := hvd.Reduce(ctx, []int32{1}, 2, hvd.Op(hvd.Sum), hvd.Name("to 2"), hvd.On(e))
			var mismatch *hvd.MismatchError
			const want = `hvd: reduce "to 2": root rank 2 has joined`
			if !errors.As(err, &mismatch) || err.Error() != want {
				t.Errorf("rank %d: got error %v, want %s", e.Rank(), err, want)
			}
		}
		if _, err := hvd.Join(ctx, hvd.On(e)); err != nil {
			t.Error(err)
		}
		checkUsable(ctx, t, e.ProcessSets()[0], "to 2")
	})
}

// TestGather gathers different numbers of rows. Only the root gets them.
func TestGather(t *testing.T) {
	modes(t, func(t *testing.T, mode []string) {
		for _, size := range sizes {
			run(t, size, func(ctx context.Context, e *hvd.Engine) {
				for round := range 3 * size { // repeated names are in the cache
					root, most := round%size, []int{0, 3, large(40_000)}[round/size]
					var want []float64
					var wantRows []int
					for r := range size {
						if e.Rank() == root {
							want = append(want, fill[float64](2*r*most, r)...)
							wantRows = append(wantRows, r*most)
						}
					}
					x := fill[float64](2*e.Rank()*most, e.Rank())
					got, rows, err := hvd.Gather(ctx, x, root, hvd.Shape(e.Rank()*most, 2),
						name("to %d", root), hvd.On(e))
					if err != nil || !slices.Equal(got, want) || !slices.Equal(rows, wantRows) {
						t.Errorf("size %d root %d rank %d: got %d elements, rows %v and error %v, want rows %v",
							size, root, e.Rank(), len(got), rows, err, wantRows)
					}
				}
			}, mode...)
		}
	})
}

// TestScatter scatters different numbers of rows. The other ranks pass no tensor.
func TestScatter(t *testing.T) {
	modes(t, func(t *testing.T, mode []string) {
		for _, size := range sizes {
			run(t, size, func(ctx context.Context, e *hvd.Engine) {
				for round := range 3 * size {
					root, most := round%size, []int{0, 3, large(40_000)}[round/size]
					var splits []int
					rows, first := 1, 0 // the last row is sent to no rank
					for r := range size {
						splits = append(splits, r*most)
						if rows += r * most; r < e.Rank() {
							first += r * most
						}
					}
					whole := fill[int16](2*rows, root)
					want := whole[2*first:][:2*splits[e.Rank()]]
					x, opts := whole, []hvd.Option{name("from %d", root), hvd.On(e), hvd.Shape(rows, 2)}
					if e.Rank() != root {
						x, splits, opts = nil, nil, opts[:2]
					}
					got, err := hvd.Scatter(ctx, x, splits, root, opts...)
					if err != nil || !slices.Equal(got, want) {
						t.Errorf("size %d root %d rank %d: got %d elements and error %v, want %d", size, root,
							e.Rank(), len(got), err, len(want))
					}
				}
				got, err := hvd.Scatter(ctx, fill[int8](size, e.Rank()), nil, 0, hvd.On(e))
				if want := int8(value(e.Rank(), 0)); err != nil || len(got) != 1 || got[0] != want {
					t.Errorf("rank %d: even scatter: got %v and error %v, want [%d]", e.Rank(), got, err, want)
				}
			}, mode...)
		}
	})
}

// TestRootedRefused checks the errors of contradictory and of wrong calls.
func TestRootedRefused(t *testing.T) {
	run(t, 3, func(ctx context.Context, e *hvd.Engine) {
		_, _, err := hvd.Gather(ctx, []int32{1}, e.Rank()/2, hvd.Name("roots"), hvd.On(e))
		const roots = `hvd: gather "roots": mismatched root ranks: ranks 0 and 1 named root 0, rank 2 named root 1`
		if err == nil || err.Error() != roots {
			t.Errorf("got error %v, want %s", err, roots)
		}
		x := []float32{1, 2, 3}
		if e.Rank() == 0 {
			_, err = hvd.Scatter(ctx, x, nil, 1, hvd.Name("types"), hvd.On(e))
		} else {
			_, err = hvd.Scatter(ctx, []int32{1, 2, 3}, nil, 1, hvd.Name("types"), hvd.On(e))
		}
		const types = `hvd: scatter "types": mismatched data types: rank 0 sent float32, ranks 1 and 2 sent int32`
		if err == nil || err.Error() != types {
			t.Errorf("got error %v, want %s", err, types)
		}
		var usage *hvd.UsageError
		if _, err := hvd.Scatter(ctx, x, []int{1}, e.Rank(), hvd.On(e)); !errors.As(err, &usage) {
			t.Errorf("too few splits: got error %v, want a UsageError", err)
		}
		if _, err := hvd.Scatter(ctx, x[:1], nil, e.Rank(), hvd.Shape(), hvd.On(e)); !errors.As(err, &usage) {
			t.Errorf("scatter of a scalar: got error %v, want a UsageError", err)
		}
		if _, _, err := hvd.Gather(ctx, x, 0, hvd.InPlace(), hvd.On(e)); !errors.As(err, &usage) {
			t.Errorf("gather in place: got error %v, want a UsageError", err)
		}
		checkUsable(ctx, t, e.ProcessSets()[0], "types")
	})
}
