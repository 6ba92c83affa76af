package hvd_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/internal/testnet"
)

// TestStaticProcessSets makes process sets at Init. Some of them overlap, and some do not contain rank 0. All
// operations run on all sets at the same time, with the same names, and must give the right results.
func TestStaticProcessSets(t *testing.T) {
	modes(t, func(t *testing.T, mode []string) {
		given := [][]int{{3, 1}, {0, 2}, {3, 2, 1}, {2}}
		runSets(t, 4, given, func(ctx context.Context, e *hvd.Engine) {
			sets := e.ProcessSets()
			if len(sets) != 5 {
				t.Errorf("rank %d: process sets %v, want five", e.Rank(), sets)
				return
			}
			checkSet(t, e, sets[0], 0, []int{0, 1, 2, 3})
			for i, members := range given {
				checkSet(t, e, sets[i+1], i+1, slices.Sorted(slices.Values(members)))
			}
			ranks(t, len(sets), func(i int) {
				if sets[i].Included() {
					checkAll(ctx, t, sets[i], numbers[int32](), "")
					checkAll(ctx, t, sets[i], numbers[int32](), "") // now cached
				}
			})
		}, mode...)
	})
}

func checkSet(t *testing.T, e *hvd.Engine, set *hvd.ProcessSet, id int, members []int) {
	t.Helper()
	at := slices.Index(members, e.Rank())
	if set.ID() != id || !slices.Equal(set.Ranks(), members) || set.Size() != len(members) ||
		set.Rank() != at || set.Included() != (at >= 0) {
		t.Errorf("rank %d: %v with ID %d, size %d, position %d, included %v; want ID %d, ranks %v and position %d",
			e.Rank(), set, set.ID(), set.Size(), set.Rank(), set.Included(), id, members, at)
	}
	if want := fmt.Sprintf("process set %d of ranks %v", id, members); set.String() != want {
		t.Errorf("the set is printed as %q, want %q", set, want)
	}
}

// TestDynamicProcessSets adds and removes process sets while the job runs. Their IDs must never be reused,
// and must be the same at all ranks, including ranks that are not members.
func TestDynamicProcessSets(t *testing.T) {
	modes(t, func(t *testing.T, mode []string) {
		runSets(t, 4, [][]int{{1, 2}}, func(ctx context.Context, e *hvd.Engine) {
			id := 2
			for _, members := range [][]int{{3, 0}, {1, 2, 3}, {0}, {1, 3}, {0, 3}} {
				set := add(ctx, t, e, members...)
				if set == nil {
					return
				}
				checkSet(t, e, set, id, slices.Sorted(slices.Values(members)))
				if all := e.ProcessSets(); len(all) != 3 || all[2] != set || all[1].ID() != 1 ||
					all[0].ID() != 0 {
					t.Errorf("rank %d: process sets %v", e.Rank(), all)
				}
				if set.Included() {
					checkAll(ctx, t, set, numbers[int32](), "")
				}
				noError(t, hvd.RemoveProcessSet(ctx, set))
				if all := e.ProcessSets(); len(all) != 2 {
					t.Errorf("rank %d: process sets %v after the removal", e.Rank(), all)
				}
				id++
			}
			// A process set that Init has made can be removed. If it is added again, it gets a new ID.
			static := e.ProcessSets()[1]
			noError(t, hvd.RemoveProcessSet(ctx, static))
			again := add(ctx, t, e, 1, 2)
			checkSet(t, e, again, id, []int{1, 2})
			if again.Included() {
				checkUsable(ctx, t, again, "x")
			}
		}, mode...)
	})
}

// TestRemovalAnswersWhatWaits removes a process set in which operations wait for a member. These operations
// and later ones must fail with ErrNoProcessSet. The same ranks can then form a new set.
func TestRemovalAnswersWhatWaits(t *testing.T) {
	modes(t, func(t *testing.T, mode []string) {
		run(t, 3, func(ctx context.Context, e *hvd.Engine) {
			set := add(ctx, t, e, 0, 1)
			if set == nil {
				return
			}
			first := e.Rank() == 0
			var waits []func() error
			if first {
				x := must(hvd.AllreduceAsync([]int32{1}, hvd.Name("x"), hvd.Over(set)))
				g := must(hvd.GroupedAllgatherAsync([][]int32{{1}, {2}}, hvd.Name("g"), hvd.Over(set)))
				j := must(hvd.JoinAsync(hvd.Over(set)))
				waits = append(waits,
					func() error { _, err := x.Wait(ctx); return err },
					func() error { _, err := g.Wait(ctx); return err },
					func() error { _, err := j.Wait(ctx); return err })
			}
			noError(t, hvd.RemoveProcessSet(ctx, set))
			for i, wait := range waits {
				var misuse *hvd.UsageError
				if err := wait(); !errors.Is(err, hvd.ErrNoProcessSet) || errors.As(err, &misuse) {
					t.Errorf("pending operation %d: got error %v, want ErrNoProcessSet, which is no misuse",
						i, err)
				}
			}
			if set.Included() {
				_, err := hvd.Allreduce(ctx, []int32{1}, hvd.Name("x"), hvd.Over(set))
				var misuse *hvd.UsageError
				if !errors.As(err, &misuse) || !errors.Is(err, hvd.ErrNoProcessSet) {
					t.Errorf("rank %d: later: got error %v, want a UsageError that is ErrNoProcessSet",
						e.Rank(), err)
				}
			}
			checkUsable(ctx, t, e.ProcessSets()[0], "x")
			again := add(ctx, t, e, 1, 0)
			if again.Included() {
				checkUsable(ctx, t, again, "x")
			}
		}, mode...)
	})
}

// TestRemovalCrossesWork submits operations just before the removal of their process set. Each operation must
// succeed at all members, or fail at all members with ErrNoProcessSet.
func TestRemovalCrossesWork(t *testing.T) {
	modes(t, func(t *testing.T, mode []string) {
		const rounds, tensors = 20, 10
		var outcomes [3][rounds][tensors]error
		run(t, 3, func(ctx context.Context, e *hvd.Engine) {
			for round := range rounds {
				set := add(ctx, t, e, 0, 2)
				if set == nil {
					return
				}
				var handles []*hvd.Handle[[]int32]
				for i := range tensors {
					if !set.Included() {
						break
					}
					h := must(hvd.AllreduceAsync(make([]int32, 10_000*(1+i%3)), name("x%d", i), hvd.Over(set)))
					handles = append(handles, h)
				}
				noError(t, hvd.RemoveProcessSet(ctx, set))
				for i, h := range handles {
					if !h.Poll() {
						t.Errorf("round %d: x%d is not answered though the set is removed", round, i)
					}
					_, outcomes[e.Rank()][round][i] = h.Wait(ctx)
				}
			}
		}, mode...)
		for round := range rounds {
			for i := range tensors {
				a, b := outcomes[0][round][i], outcomes[2][round][i]
				if (a == nil) != (b == nil) || a != nil && !errors.Is(a, hvd.ErrNoProcessSet) {
					t.Errorf("round %d: x%d: rank 0 got %v, rank 2 got %v", round, i, a, b)
				}
			}
		}
	})
}

// TestManyProcessSets adds and removes 60 process sets. The removed process sets must leave no files open.
func TestManyProcessSets(t *testing.T) {
	modes(t, func(t *testing.T, mode []string) {
		const rounds = 60
		run(t, 3, func(ctx context.Context, e *hvd.Engine) {
			var before int
			for round := range rounds {
				members := [][]int{{0, 1}, {1, 2}, {0, 2}, {1}}[round%4]
				set := add(ctx, t, e, members...)
				if set == nil {
					return
				}
				if set.ID() != round+1 {
					t.Errorf("rank %d: round %d has %v", e.Rank(), round, set)
				}
				if set.Included() {
					checkUsable(ctx, t, set, "x")
					must(hvd.Allgather(ctx, make([]int64, round), hvd.Over(set)))
				}
				noError(t, hvd.RemoveProcessSet(ctx, set))
				if round == 20 {
					before = testnet.OpenFiles(t)
				}
			}
			noError(t, hvd.Barrier(ctx, hvd.On(e)))
			if len(e.ProcessSets()) != 1 {
				t.Errorf("rank %d: %v are left", e.Rank(), e.ProcessSets())
			}
			// A peer may close its end of a connection later, so the check is repeated. The slack of 12 files
			// allows for connections that were being established when round 20 was counted.
			eventually(ctx, t, func() error {
				if now := testnet.OpenFiles(t); now > before+12 {
					return fmt.Errorf("%d files are open after %d sets, %d after the first 20", now, rounds,
						before)
				}
				return nil
			})
		}, mode...)
	})
}

// eventually calls the function wrong until it returns nil. The test fails if it still returns an error after
// a quarter of the deadline.
func eventually(ctx context.Context, t *testing.T, wrong func() error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(ctx, deadline/4)
	defer cancel()
	ticker := time.NewTicker(time.Millisecond)
	defer ticker.Stop()
	for {
		err := wrong()
		if err == nil {
			return
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			t.Error(err)
			return
		}
	}
}

// TestAddProcessSetGivesUp ends the context of AddProcessSet at rank 0 before rank 1 has called
// AddProcessSet. The request must not be withdrawn: both ranks must have the process set after the call of
// rank 1.
func TestAddProcessSetGivesUp(t *testing.T) {
	modes(t, func(t *testing.T, mode []string) {
		run(t, 2, func(ctx context.Context, e *hvd.Engine) {
			if e.Rank() == 0 {
				gone, cancel := context.WithCancel(ctx)
				cancel()
				if _, err := hvd.AddProcessSet(gone, []int{0}, hvd.On(e)); !errors.Is(err, context.Canceled) {
					t.Errorf("got error %v, want the context's", err)
				}
			} else {
				add(ctx, t, e, 0)
			}
			checkUsable(ctx, t, e.ProcessSets()[0], "x")
			sets := e.ProcessSets()
			if len(sets) != 2 || !slices.Equal(sets[1].Ranks(), []int{0}) {
				t.Errorf("rank %d: process sets %v, want one of rank 0", e.Rank(), sets)
			}
		}, mode...)
	})
}

// TestTooManyStaticProcessSets checks that Init refuses more process sets than a job can have.
func TestTooManyStaticProcessSets(t *testing.T) {
	var sets [][]int
	for i := range 1024 {
		sets = append(sets, []int{i})
	}
	if _, err := hvd.New(t.Context(), hvd.WithProcessSets(sets...)); err == nil ||
		!strings.Contains(err.Error(), "1024 process sets, want fewer than 1024") {
		t.Errorf("got error %v, want that there are too many sets", err)
	}
}

// TestLockstepWithALargeCache checks that lock-step works with a cache of 2^20 entries. In lock-step, the
// ranks exchange the bit vectors of all process sets in one message, which is large with such a cache.
func TestLockstepWithALargeCache(t *testing.T) {
	runSets(t, 2, [][]int{{0}}, func(ctx context.Context, e *hvd.Engine) {
		if _, err := hvd.Allreduce(ctx, []float32{1}, hvd.Name("a"), hvd.On(e)); err != nil {
			t.Errorf("rank %d: %v", e.Rank(), err)
		}
	}, "HVD_NEGOTIATION", "lockstep", "HOROVOD_CACHE_CAPACITY", "1048576")
}
