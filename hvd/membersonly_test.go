package hvd_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/internal/testnet"
)

// addAlone adds a process set that only its members add.
func addAlone(ctx context.Context, t *testing.T, e *hvd.Engine, name string, members ...int) *hvd.ProcessSet {
	t.Helper()
	opts := []any{hvd.MembersOnly(), hvd.On(e)}
	if name != "" {
		opts = append(opts, hvd.Name(name))
	}
	set, err := hvd.AddProcessSet(ctx, members, as[hvd.AddProcessSetOption](opts)...)
	if err != nil {
		t.Errorf("rank %d: adding %q with the ranks %v: %v", e.Rank(), name, members, err)
	}
	return set
}

// TestMembersAddSets adds overlapping process sets, some with equal members, each by its members only. Every
// rank adds its sets in another order and at the same time. All sets then run operations at the same time.
// Their IDs must be the same at all members, and no rank may know sets of others.
func TestMembersAddSets(t *testing.T) {
	groups := []struct {
		name  string
		ranks []int
	}{
		{"", []int{0, 1}}, {"", []int{2, 1}}, {"", []int{2, 3}}, {"", []int{0, 3}}, {"", []int{0, 1, 2}},
		{"tp", []int{0, 1}}, {"dp", []int{0, 1}}, {"alone", []int{3}}, {"", []int{0, 1, 2, 3}},
	}
	modes(t, func(t *testing.T, mode []string) {
		var mu sync.Mutex
		ids := make(map[int]string) // what the set with this ID is
		run(t, 4, func(ctx context.Context, e *hvd.Engine) {
			for round := range 2 {
				sets := make([]*hvd.ProcessSet, len(groups))
				order := rand.Perm(len(groups))
				ranks(t, len(groups), func(i int) {
					g := groups[order[i]]
					if !slices.Contains(g.ranks, e.Rank()) {
						return
					}
					set := addAlone(ctx, t, e, g.name, g.ranks...)
					if set == nil {
						return
					}
					sets[order[i]] = set
					checkSet(t, e, set, set.ID(), slices.Sorted(slices.Values(g.ranks)))
					checkAll(ctx, t, set, numbers[int32](), "")
					passOn(ctx, t, set)
					mu.Lock()
					defer mu.Unlock()
					what := fmt.Sprint(round, g)
					if ids[set.ID()] != "" && ids[set.ID()] != what {
						t.Errorf("set %d is %s and %s", set.ID(), ids[set.ID()], what)
					}
					ids[set.ID()] = what
				})
				mine := slices.DeleteFunc(sets, func(s *hvd.ProcessSet) bool { return s == nil })
				if all := e.ProcessSets(); len(all) != 1+len(mine) {
					t.Errorf("rank %d: process sets %v, want the global one and %v", e.Rank(), all, mine)
				}
				ranks(t, len(mine), func(i int) {
					checkAll(ctx, t, mine[i], numbers[int32](), "")
					if err := hvd.RemoveProcessSet(ctx, mine[i]); err != nil {
						t.Errorf("rank %d: removing: %v", e.Rank(), err)
					}
				})
				if all := e.ProcessSets(); len(all) != 1 {
					t.Errorf("rank %d: process sets %v after the removals", e.Rank(), all)
				}
			}
			// All ranks add a set although the members of an equal set have added it.
			if e.Rank() < 2 {
				addAlone(ctx, t, e, "", 0, 1)
			}
			add(ctx, t, e, 0, 1)
		}, mode...)
		if len(ids) != 2*len(groups) {
			t.Errorf("the sets have the IDs %v, want %d different ones", ids, 2*len(groups))
		}
	})
}

// passOn sends a message to the next member of the set and receives one from the member before. When the set
// is removed, one member closes the channels of these messages before another member gets the removal.
func passOn(ctx context.Context, t *testing.T, set *hvd.ProcessSet) {
	t.Helper()
	all, me := set.Ranks(), set.Rank()
	if len(all) == 1 {
		return
	}
	next, before := all[(me+1)%len(all)], all[(me+len(all)-1)%len(all)]
	h := must(hvd.SendAsync([]int32{int32(set.ID())}, next, 7, hvd.Over(set)))
	got := make([]int32, 1)
	if _, err := hvd.Recv(ctx, got, before, 7, hvd.Over(set)); err != nil || int(got[0]) != set.ID() {
		t.Errorf("%v: got %v and error %v from rank %d", set, got, err, before)
	}
	must(h.Wait(ctx))
	// No member receives this message, which is dropped with the set.
	noError(t, hvd.Send(ctx, []int32{0}, before, 8, hvd.Over(set)))
}

// TestMembersDisagree checks the errors of members that name different ranks, and that names can be used
// again afterwards.
func TestMembersDisagree(t *testing.T) {
	modes(t, func(t *testing.T, mode []string) {
		run(t, 4, func(ctx context.Context, e *hvd.Engine) {
			named := [][]int{{0, 1}, {0, 1, 2}, {2, 1}}
			if e.Rank() < len(named) {
				_, err := hvd.AddProcessSet(ctx, named[e.Rank()], hvd.MembersOnly(), hvd.Name("x"),
					hvd.On(e))
				var mismatch *hvd.MismatchError
				want := `add process set "process_set.add.x": mismatched members: rank 0 named ranks 0 and 1, ` +
					`rank 1 named ranks 0-2, rank 2 named ranks 1 and 2`
				if !errors.As(err, &mismatch) || !strings.Contains(err.Error(), want) {
					t.Errorf("rank %d: got error %v, want %q", e.Rank(), err, want)
				}
				checkUsable(ctx, t, addAlone(ctx, t, e, "x", 0, 1, 2), "a")
			}
			_, err := hvd.AddProcessSet(ctx, []int{(e.Rank() + 1) % 4}, hvd.MembersOnly(), hvd.On(e))
			var misuse *hvd.UsageError
			want := fmt.Sprintf("rank %d is not among the ranks [%d]", e.Rank(), (e.Rank()+1)%4)
			if !errors.As(err, &misuse) || !strings.Contains(err.Error(), want) {
				t.Errorf("rank %d: got error %v, want %q", e.Rank(), err, want)
			}
		}, mode...)
	})
}

// TestUnusedSetsAreCheap adds 50 process sets of 4 ranks. Without operations, a set must cost no goroutine,
// no descriptor and little memory. After their removal, the sets must leave nothing.
func TestUnusedSetsAreCheap(t *testing.T) {
	const size, sets = 4, 50
	type cost struct{ goroutines, descriptors, heapBytes int }
	var before, during, after cost
	measure := func(ctx context.Context, e *hvd.Engine, c *cost) {
		for range 2 { // in between, only rank 0 does something
			noError(t, hvd.Barrier(ctx, hvd.On(e)))
			if e.Rank() == 0 && c.heapBytes == 0 {
				files := testnet.OpenFiles(t)
				runtime.GC()
				var m runtime.MemStats
				runtime.ReadMemStats(&m)
				*c = cost{runtime.NumGoroutine(), files, int(m.HeapAlloc)}
			}
		}
	}
	run(t, size, func(ctx context.Context, e *hvd.Engine) {
		measure(ctx, e, &before)
		var added []*hvd.ProcessSet
		for range sets {
			set := addAlone(ctx, t, e, "", 0, 1, 2, 3)
			if set == nil {
				return
			}
			added = append(added, set)
		}
		measure(ctx, e, &during)
		for _, set := range added {
			noError(t, hvd.RemoveProcessSet(ctx, set))
		}
		measure(ctx, e, &after)
	})
	// A few goroutines and descriptors may differ for other reasons, but not one for each set.
	if n := during.goroutines - before.goroutines; n > sets/2 {
		t.Errorf("%d sets at %d ranks cost %d goroutines, want none", sets, size, n)
	}
	if n := during.descriptors - before.descriptors; n > sets/2 {
		t.Errorf("%d sets at %d ranks cost %d descriptors, want none", sets, size, n)
	}
	perSet := func(c cost) int { return (c.heapBytes - before.heapBytes) / sets / size }
	if n := perSet(during); n > 16<<10 {
		t.Errorf("a set costs each rank %d bytes of memory, want at most 16 KiB", n)
	}
	if n := perSet(after); n > 2<<10 {
		t.Errorf("after its removal a set costs each rank %d bytes of memory, want at most 2 KiB", n)
	}
	t.Logf("before %+v, with %d sets %+v, after their removal %+v", before, sets, during, after)
}
