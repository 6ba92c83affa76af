package hvd_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/gohvd/gohvd/hvd"
)

// TestHandlesOutliveTheirEntries checks that a handle keeps its result, received rows and error after another
// operation has reused the memory of its entry.
func TestHandlesOutliveTheirEntries(t *testing.T) {
	engines(t, 2, func(ctx context.Context, e *hvd.Engine) {
		ranks(t, 4, func(g int) {
			bad := must(hvd.AllreduceAsync(make([]int32, 1+e.Rank()), hvd.Name(fmt.Sprintf("bad%d", g)),
				hvd.On(e)))
			var oldRows []*hvd.Handle[hvd.Rows[int32]]
			var oldSums []*hvd.Handle[[]int32]
			for round := range 50 {
				rows := must(hvd.AlltoallAsync([]int32{int32(e.Rank()), int32(round), int32(g)},
					[]int{1, 2}, hvd.Name(fmt.Sprintf("rows%d", g)), hvd.On(e)))
				sum := must(hvd.AllreduceAsync([]int32{int32(round)}, hvd.Name(fmt.Sprintf("sum%d", g)),
					hvd.Op(hvd.Sum), hvd.On(e)))
				must(rows.Wait(ctx))
				must(sum.Wait(ctx))
				oldRows, oldSums = append(oldRows, rows), append(oldSums, sum)
			}
			for range 2 {
				var mismatch *hvd.MismatchError
				if _, err := bad.Wait(ctx); !errors.As(err, &mismatch) || mismatch.Tensor != bad.Name() {
					t.Errorf("rank %d: got error %v, want that the ranks disagree about %q", e.Rank(),
						err, bad.Name())
				}
			}
			each := 1 + e.Rank() // rows that each rank sends to this rank
			for round := range 50 {
				rows, _ := oldRows[round].Wait(ctx)
				if got := fmt.Sprint(rows.Received); got != fmt.Sprint([]int{each, each}) {
					t.Errorf("rank %d: round %d: received %s, want %d from each", e.Rank(), round, got,
						each)
				}
				sum := oldSums[round]
				if got, _ := sum.Wait(ctx); got[0] != int32(2*round) || sum.Name() != fmt.Sprintf("sum%d", g) {
					t.Errorf("rank %d: round %d: %q is %v, want %d", e.Rank(), round, sum.Name(), got, 2*round)
				}
			}
		})
		noError(t, e.Shutdown(ctx))
	}, nil)
}
