package hvd_test

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/gohvd/gohvd/hvd"
)

// runJoin calls run with three ranks, in both modes of negotiation, with and without a cache.
func runJoin(t *testing.T, f func(ctx context.Context, t *testing.T, e *hvd.Engine)) {
	for _, capacity := range []string{"1024", "0"} {
		t.Run("cache="+capacity, func(t *testing.T) {
			modes(t, func(t *testing.T, mode []string) {
				run(t, 3, func(ctx context.Context, e *hvd.Engine) { f(ctx, t, e) },
					append(mode, "HOROVOD_CACHE_CAPACITY", capacity)...)
			})
		})
	}
}

// TestSubmittedBeforeTheJoin checks that the tensors that a rank submitted before its join count with their
// data. The other ranks may submit them before or after that join.
func TestSubmittedBeforeTheJoin(t *testing.T) {
	runJoin(t, func(ctx context.Context, t *testing.T, e *hvd.Engine) {
		for range 3 {
			if e.Rank() != 0 {
				// Rank 0 has joined before the first of these operations. Rank 2 may have joined before later
				// ones.
				if got, err := hvd.Allreduce(ctx, []int32{1}, hvd.Op(hvd.Sum), hvd.Name("before"),
					hvd.On(e)); err != nil || got[0] != 3 {
					t.Errorf("rank %d: got %v and error %v, want 3", e.Rank(), got, err)
				}
				if got, err := hvd.Allgather(ctx, []int32{int32(e.Rank())}, hvd.Name("rows"),
					hvd.On(e)); err != nil || !slices.Equal(got, []int32{0, 1, 2}) {
					t.Errorf("rank %d: got %v and error %v, want a row of each", e.Rank(), got, err)
				}
				if got, err := hvd.Allreduce(ctx, []int32{1}, hvd.Op(hvd.Sum), hvd.Name("after"),
					hvd.On(e)); err != nil || got[0] != 2 {
					t.Errorf("rank %d: got %v and error %v, want 2", e.Rank(), got, err)
				}
				must(hvd.Join(ctx, hvd.On(e)))
				continue
			}
			sum := must(hvd.AllreduceAsync([]int32{1}, hvd.Op(hvd.Sum), hvd.Name("before"), hvd.On(e)))
			rows := must(hvd.AllgatherAsync([]int32{0}, hvd.Name("rows"), hvd.On(e)))
			must(hvd.Join(ctx, hvd.On(e)))
			// The join completes after all operations that this rank submitted before it.
			if !sum.Poll() || !rows.Poll() {
				t.Error("the join is done before the operations that were submitted before it")
			}
			if got, err := sum.Wait(ctx); err != nil || got[0] != 3 {
				t.Errorf("got %v and error %v, want 3", got, err)
			}
			if got, err := rows.Wait(ctx); err != nil || !slices.Equal(got, []int32{0, 1, 2}) {
				t.Errorf("got %v and error %v, want a row of each", got, err)
			}
		}
	})
}

// TestNothingAfterTheJoin checks that a rank that has joined cannot submit any operation, nor join again,
// until the join is done. Each call must fail with a UsageError.
func TestNothingAfterTheJoin(t *testing.T) {
	checked := make(chan struct{}, 2) // receives once for each other rank, before that rank joins
	runJoin(t, func(ctx context.Context, t *testing.T, e *hvd.Engine) {
		if e.Rank() == 0 {
			j := must(hvd.JoinAsync(hvd.On(e)))
			if j.Name() != "join.noname" || j.Poll() {
				t.Errorf("the join %q is done: %v", j.Name(), j.Poll())
			}
			for op, do := range everyOperation(ctx, hvd.On(e)) {
				if op == "join" {
					wantMisuse(t, do(), op, fmt.Sprintf("this rank has joined %v already",
						e.ProcessSets()[0]))
				} else {
					wantMisuse(t, do(), op, fmt.Sprintf("this rank has joined %v: wait for the join to end",
						e.ProcessSets()[0]))
				}
			}
			_, err := hvd.GroupedAllreduceAsync([][]float32{{1}}, hvd.On(e))
			wantMisuse(t, err, "allreduce", "this rank has joined")
			checked <- struct{}{}
			checked <- struct{}{}
			if _, err := j.Wait(ctx); err != nil || !j.Poll() {
				t.Error(err)
			}
			select {
			case <-j.Done():
			default:
				t.Error("the join is not done after Wait")
			}
		} else {
			<-checked
			must(hvd.Join(ctx, hvd.On(e)))
		}
		checkUsable(ctx, t, e.ProcessSets()[0], "x")
	})
}

// TestJoinOnAProcessSet checks that a join on one process set does not affect operations on other process
// sets.
func TestJoinOnAProcessSet(t *testing.T) {
	modes(t, func(t *testing.T, mode []string) {
		runSets(t, 3, [][]int{{1, 2}, {0, 1}}, func(ctx context.Context, e *hvd.Engine) {
			sets := e.ProcessSets()
			for range 2 {
				switch e.Rank() {
				case 0:
					checkUsable(ctx, t, sets[2], "x")
				case 1:
					j := must(hvd.JoinAsync(hvd.Over(sets[1])))
					checkUsable(ctx, t, sets[2], "x")
					if last, err := j.Wait(ctx); err != nil || last != 2 {
						t.Errorf("got last rank %d and error %v, want 2", last, err)
					}
					checkUsable(ctx, t, sets[1], "x")
				case 2:
					if got, err := hvd.Allreduce(ctx, []int32{4}, hvd.Name("alone"),
						hvd.Over(sets[1])); err != nil || got[0] != 2 {
						t.Errorf("average of 4 and nothing: got %v and error %v", got, err)
					}
					if last, err := hvd.Join(ctx, hvd.Over(sets[1])); err != nil || last != 2 {
						t.Errorf("got last rank %d and error %v, want 2", last, err)
					}
					checkUsable(ctx, t, sets[1], "x")
				}
				checkUsable(ctx, t, sets[0], "x")
			}
		}, mode...)
	})
}

// TestUnnamedAfterAJoin makes a different number of unnamed calls at each rank before a join. Unnamed calls
// after the join must match.
func TestUnnamedAfterAJoin(t *testing.T) {
	runJoin(t, func(ctx context.Context, t *testing.T, e *hvd.Engine) {
		for range 3 * e.Rank() {
			must(hvd.Allreduce(ctx, []int32{1}, hvd.On(e)))
		}
		must(hvd.Join(ctx, hvd.On(e)))
		h := must(hvd.AllreduceAsync([]int32{1}, hvd.Op(hvd.Sum), hvd.On(e)))
		names := must(hvd.Allgather(ctx, []byte(h.Name()+";"), hvd.Name("names"), hvd.On(e)))
		if want := slices.Repeat([]byte(h.Name()+";"), e.Size()); !slices.Equal(names, want) {
			t.Errorf("rank %d: after the join the ranks call an unnamed tensor %s", e.Rank(), names)
			return // a wait for the join would never end, because the other ranks do not join
		}
		if got, err := h.Wait(ctx); err != nil || got[0] != int32(e.Size()) {
			t.Errorf("rank %d: got %v and error %v", e.Rank(), got, err)
		}
	})
}

// TestShutdownDuringAJoin shuts down rank 1 while the other ranks wait in a join. Their joins must fail with
// an error that says that rank 1 has shut down. The same holds for joins that they submit later.
func TestShutdownDuringAJoin(t *testing.T) {
	modes(t, func(t *testing.T, mode []string) {
		engines(t, 3, func(ctx context.Context, e *hvd.Engine) {
			if e.Rank() == 1 {
				// Rank 1 never joins.
				noError(t, hvd.Barrier(ctx, hvd.On(e)))
			} else {
				noError(t, hvd.Barrier(ctx, hvd.On(e)))
				if _, err := hvd.Join(ctx, hvd.On(e)); !isShutDown(err, 1) {
					t.Errorf("rank %d: got error %v, want that rank 1 has shut down", e.Rank(), err)
				}
				if _, err := hvd.Join(ctx, hvd.On(e)); !isShutDown(err, 1) {
					t.Errorf("rank %d: a second join: got error %v, want that rank 1 has shut down", e.Rank(),
						err)
				}
			}
			if err := e.Shutdown(ctx); err != nil && (e.Rank() == 1 || !isShutDown(err, 1)) {
				t.Errorf("rank %d: %v", e.Rank(), err)
			}
		}, nil, mode...)
	})
}
