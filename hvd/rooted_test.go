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
	run(t, 3, func(ctx context.Context, e *hvd.Engine) {
		for _, n := range []int{0, 7, large(70_000)} {
			checkReduce(ctx, t, e, 1, n)
			checkReduce(ctx, t, e, 1, n, hvd.InPlace())
		}
	})
}

func checkReduce(ctx context.Context, t *testing.T, e *hvd.Engine, root, n int, opts ...any) {
	x := fill[float32](n, e.Rank())
	got, err := hvd.Reduce(ctx, x, root, as[hvd.ReduceOption](append(opts, hvd.Op(hvd.Max), hvd.On(e)))...)
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

// TestGather gathers different numbers of rows. Only the root gets them.
func TestGather(t *testing.T) {
	run(t, 3, func(ctx context.Context, e *hvd.Engine) {
		got, rows, err := hvd.Gather(ctx, fill[float64](2*e.Rank(), e.Rank()), 1, hvd.Shape(e.Rank(), 2),
			hvd.On(e))
		var want []float64
		var wantRows []int
		if e.Rank() == 1 {
			want, wantRows = append(fill[float64](2, 1), fill[float64](4, 2)...), []int{0, 1, 2}
		}
		if err != nil || (got == nil) != (want == nil) || !slices.Equal(got, want) ||
			!slices.Equal(rows, wantRows) {
			t.Errorf("rank %d: got %v, rows %v and error %v, want %v and rows %v", e.Rank(), got, rows, err, want,
				wantRows)
		}
	})
}

// TestScatter scatters different numbers of rows. The last row is sent to no rank. The other ranks pass no
// tensor, or values that are ignored.
func TestScatter(t *testing.T) {
	run(t, 3, func(ctx context.Context, e *hvd.Engine) {
		whole := fill[int16](8, 1)
		var x []int16
		var splits []int
		opts := []any{hvd.On(e)}
		switch e.Rank() {
		case 1:
			x, splits, opts = whole, []int{0, 1, 2}, append(opts, hvd.Shape(4, 2))
		case 2:
			x, splits, opts = []int16{1}, []int{9}, append(opts, hvd.Shape(5, 5))
		}
		got, err := hvd.Scatter(ctx, x, splits, 1, as[hvd.GatherOption](opts)...)
		if want := whole[[]int{0, 0, 2}[e.Rank()]:][:2*e.Rank()]; err != nil || !slices.Equal(got, want) {
			t.Errorf("rank %d: got %v and error %v, want %v", e.Rank(), got, err, want)
		}
		got, err = hvd.Scatter(ctx, fill[int16](3, e.Rank()), nil, 0, hvd.On(e))
		if want := int16(value(e.Rank(), 0)); err != nil || len(got) != 1 || got[0] != want {
			t.Errorf("rank %d: even scatter: got %v and error %v, want [%d]", e.Rank(), got, err, want)
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
		checkUsable(ctx, t, e.ProcessSets()[0], "types")
	})
}
