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
					for _, n := range []int{0, 1, 7, 70_000} {
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
