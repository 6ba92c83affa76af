package hvd_test

import (
	"context"
	"testing"

	"github.com/gohvd/gohvd/hvd"
)

// TestRepeatedOperationAllocatesLittle checks that a repeated operation makes at most 5 small allocations.
// Among them are its handle and, at rank 0, the lists with which the coordinator fuses tensors. The number
// must not grow with the number of operations.
func TestRepeatedOperationAllocatesLittle(t *testing.T) {
	run(t, 1, func(ctx context.Context, e *hvd.Engine) {
		x := []float32{1, 2}
		opts := []hvd.AllreduceOption{hvd.InPlace(), hvd.Op(hvd.Sum), hvd.Name("x"), hvd.On(e)}
		once := func() {
			must(hvd.Allreduce(ctx, x, opts...))
		}
		for range 100 {
			once()
		}
		const most = 5
		if got := testing.AllocsPerRun(500, once); got > most {
			t.Errorf("%v allocations, want at most %d", got, most)
		}
	})
}
