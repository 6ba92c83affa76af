package hvd_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/store"
)

// contradiction is a call that the last rank makes differently from all other ranks. The last rank is called
// the odd rank. The field want is the expected error. In it, %q stands for the name of the tensor, ODD for
// the odd rank, MOST for the other ranks, ALL for all ranks, and LAST for the number of the odd rank.
type contradiction struct {
	title string
	do    func(p *part) error
	want  string
}

// part holds what one rank needs to make the call of a contradiction.
type part struct {
	ctx  context.Context
	e    *hvd.Engine
	name string
	odd  bool // this rank is the last rank
}

// pick returns odd at the odd rank, and most at every other rank.
func pick[T any](p *part, most, odd T) T {
	if p.odd {
		return odd
	}
	return most
}

func (p *part) opts(more ...any) []any {
	return append(more, hvd.Name(p.name), hvd.On(p.e))
}

func (p *part) allreduce(n int, more ...any) error {
	_, err := hvd.Allreduce(p.ctx, make([]float32, n), as[hvd.AllreduceOption](p.opts(more...))...)
	return err
}

func (p *part) reducescatter(n int, more ...any) error {
	_, err := hvd.Reducescatter(p.ctx, make([]float32, n), as[hvd.ReduceOption](p.opts(more...))...)
	return err
}

func (p *part) broadcast(n, root int, more ...any) error {
	_, err := hvd.Broadcast(p.ctx, make([]float32, n), root, as[hvd.MoveOption](p.opts(more...))...)
	return err
}

func (p *part) allgather(n int, more ...any) error {
	_, err := hvd.Allgather(p.ctx, make([]float32, n), as[hvd.MoveOption](p.opts(more...))...)
	return err
}

func (p *part) alltoall(n int, more ...any) error {
	splits := make([]int, p.e.Size()) // all 0, which is valid for any number of rows
	_, _, err := hvd.Alltoall(p.ctx, make([]float32, n), splits, as[hvd.MoveOption](p.opts(more...))...)
	return err
}

// typed returns a call whose tensor has type int64 at the odd rank and float32 at the other ranks.
func typed(do func(p *part, odd []int64, most []float32) error) func(p *part) error {
	return func(p *part) error {
		if p.odd {
			return do(p, make([]int64, 6), nil)
		}
		return do(p, nil, make([]float32, 6))
	}
}

// contradictions has calls that pass the tensors, options and roots of each operation to the coordinator. Its
// own checks, and their texts, are tested in package controller.
var contradictions = []contradiction{
	{"types of an allreduce", typed(func(p *part, odd []int64, most []float32) (err error) {
		if p.odd {
			_, err = hvd.Allreduce(p.ctx, odd, as[hvd.AllreduceOption](p.opts())...)
		} else {
			_, err = hvd.Allreduce(p.ctx, most, as[hvd.AllreduceOption](p.opts())...)
		}
		return err
	}), `hvd: allreduce %q: mismatched data types: MOST sent float32[6], ODD sent int64[6]`},
	{"operations: reducescatter and barrier", func(p *part) error {
		if p.odd {
			return hvd.Barrier(p.ctx, as[hvd.BarrierOption](p.opts())...)
		}
		return p.reducescatter(4)
	}, `hvd: tensor %q: mismatched operations: MOST called reducescatter, ODD called barrier`},
	{"shapes of an allreduce, as many elements", func(p *part) error {
		return p.allreduce(6, hvd.Shape(pick(p, []int{2, 3}, []int{3, 2})...))
	}, `hvd: allreduce %q: mismatched shapes: MOST sent float32[2 3], ODD sent float32[3 2]`},
	{"prescale of an allreduce", func(p *part) error { return p.allreduce(1, hvd.Prescale(pick(p, 1, 0.5))) },
		`hvd: allreduce %q: mismatched scale factors: MOST asked for prescale 1 and postscale 1, ODD asked for prescale 0.5 and postscale 1`},
	{"reductions of an allreduce: averages", func(p *part) error {
		return p.allreduce(1, hvd.Op(pick(p, hvd.AverageActive, hvd.Average)))
	},
		`hvd: allreduce %q: mismatched reductions: MOST asked for average-active, ODD asked for average`},
	{"scalar alltoall", func(p *part) error { return p.alltoall(1, hvd.Shape(pick(p, []int{1}, nil)...)) },
		`hvd: alltoall %q: a scalar has no first dimension: MOST sent float32[*], ODD sent float32[]`},
	{"rows of an alltoall", func(p *part) error {
		return p.alltoall(pick(p, 6, 0), hvd.Shape(2, pick(p, 3, 0)))
	},
		`hvd: alltoall %q: mismatched shapes beyond the first dimension: MOST sent float32[* 3], ODD sent float32[* 0]`},
	{"roots", func(p *part) error { return p.broadcast(1, pick(p, 0, 1)) },
		`hvd: broadcast %q: mismatched root ranks: MOST named root 0, ODD named root 1`},
	{"compressions", func(p *part) error {
		if p.odd {
			return p.allreduce(1, hvd.CompressFP16())
		}
		return p.allreduce(1)
	}, `hvd: allreduce %q: mismatched compressions: MOST asked for none, ODD asked for float16`},
	{"one tensor in a long name", func(p *part) error {
		p.name += strings.Repeat("世", 1300)
		return p.allreduce(pick(p, 1, 2))
	}, ``},
	{"allgather under a join", func(p *part) error {
		return p.joined(func() error { return p.allgather(1) })
	},
		`hvd: allgather %q: ODD has joined, but this operation needs data from every rank, unless ranks join with empty contributions`},
	{"broadcast from a rank that joined with Empty", func(p *part) error {
		return p.joined(func() error { return p.broadcast(1, p.e.Size()-1) }, hvd.Empty())
	}, `hvd: broadcast %q: root rank LAST has joined`},
}

// errJoined is what the method joined returns at the odd rank. That rank has joined and not submitted the
// operation, so it gets no error for it.
var errJoined = errors.New("this rank has joined")

// joined makes the odd rank join at once. Every other rank first calls the function do and then joins too.
func (p *part) joined(do func() error, opts ...any) error {
	err := errJoined
	if !p.odd {
		err = do()
	}
	if _, e := hvd.Join(p.ctx, as[hvd.JoinOption](append(opts, hvd.On(p.e)))...); e != nil {
		return e
	}
	return err
}

func (p *part) expand(want string) string {
	last := p.e.Size() - 1
	most, all := "ranks 0 and 1", "ranks 0-2"
	if last == 1 {
		most, all = "rank 0", "ranks 0 and 1"
	}
	want = strings.ReplaceAll(want, "%q", fmt.Sprintf("%q", p.name))
	return strings.NewReplacer("MOST", most, "ALL", all, "ODD", fmt.Sprintf("rank %d", last), "LAST",
		fmt.Sprint(last)).Replace(want)
}

// TestMismatch checks that requests that contradict each other fail at all ranks with the same error text.
// The text must say which rank sent what. The job must go on and the name must stay usable, whether the name
// was cached or not.
func TestMismatch(t *testing.T) {
	runModes(t, func(ctx context.Context, t *testing.T, e *hvd.Engine) {
		global := e.ProcessSets()[0]
		for i, c := range contradictions {
			p := &part{ctx: ctx, e: e, name: fmt.Sprint("tensor ", i), odd: e.Rank() == e.Size()-1}
			for range 2 { // checkUsable caches the name, so it is cached in the second round
				p.name = fmt.Sprint("tensor ", i)
				err := c.do(p)
				var mismatch *hvd.MismatchError
				if err == errJoined {
					// A joined rank gets no error for tensors that it did not submit.
				} else if !errors.As(err, &mismatch) || mismatch.Tensor != p.name ||
					c.want != "" && err.Error() != p.expand(c.want) {
					t.Errorf("%s: rank %d: got error %v\nwant %s", c.title, e.Rank(), err, p.expand(c.want))
				}
				checkUsable(ctx, t, global, p.name)
			}
		}
	})
}

// TestMismatchInAnAllreduceOfAGroup submits groups that differ between the ranks. An allreduce of a group is
// one request. The error must name the tensor that differs, or say how the groups differ.
func TestMismatchInAnAllreduceOfAGroup(t *testing.T) {
	runModes(t, func(ctx context.Context, t *testing.T, e *hvd.Engine) {
		p := &part{ctx: ctx, e: e, odd: e.Rank() == e.Size()-1, name: "g"}
		tensors := func(numElems ...int) [][]int32 {
			var xs [][]int32
			for _, n := range numElems {
				xs = append(xs, make([]int32, n))
			}
			return xs
		}
		group := func(xs [][]int32, opts ...any) error {
			_, err := hvd.GroupedAllreduce(ctx, xs, as[hvd.GroupedAllreduceOption](p.opts(opts...))...)
			return err
		}
		for _, c := range []struct {
			most, odd func() error
			want      string
		}{
			{
				func() error { return group(tensors(1, 2, 3)) },
				func() error { return group(tensors(1, 3, 2)) },
				`mismatched shapes of tensor 2 of 3: MOST sent int32[2], ODD sent int32[3]`,
			}, {
				func() error { return group(tensors(2, 6), hvd.Shapes([]int{2}, []int{2, 3})) },
				func() error { return group(tensors(2, 6), hvd.Shapes([]int{2}, []int{3, 2})) },
				`mismatched shapes of tensor 2 of 2: MOST sent int32[2 3], ODD sent int32[3 2]`,
			}, {
				func() error { return group(tensors(1, 2)) },
				func() error { return p.allreduce(3) },
				`mismatched groups: MOST sent a group of 2, ODD sent a tensor outside a group`,
			},
		} {
			for range 2 { // in the second round the name of the group may be in the cache
				do := c.most
				if p.odd {
					do = c.odd
				}
				var mismatch *hvd.MismatchError
				err, want := do(), p.expand("hvd: allreduce %q: "+c.want)
				if !errors.As(err, &mismatch) || err.Error() != want {
					t.Errorf("rank %d: got error %v\nwant %s", e.Rank(), err, want)
				}
				xs := [][]int32{{1}, {int32(e.Rank()), 3}}
				if sums, err := hvd.GroupedAllreduce(ctx, xs,
					as[hvd.GroupedAllreduceOption](p.opts(hvd.Op(hvd.Sum)))...); err != nil ||
					sums[0][0] != int32(e.Size()) {
					t.Errorf("rank %d: afterwards: got %v and error %v", e.Rank(), sums, err)
				}
			}
		}
	})
}

// TestMismatchInAGroup submits groups in which one tensor differs between the ranks. All tensors of the group
// must fail.
func TestMismatchInAGroup(t *testing.T) {
	runModes(t, func(ctx context.Context, t *testing.T, e *hvd.Engine) {
		p := &part{e: e, odd: e.Rank() == e.Size()-1}
		for range 2 {
			xs := [][]int32{{1}, make([]int32, pick(p, 2, 3)), {1, 2, 3}}
			g := must(hvd.GroupedReducescatterAsync(xs, hvd.Op(hvd.Sum), hvd.Name("g"), hvd.On(e)))
			_, err := g.Wait(ctx)
			want := p.expand(`hvd: reducescatter "g_1of3": its group "g" failed: reducescatter "g_2of3": mismatched shapes: MOST sent int32[2], ODD sent int32[3]`)
			var mismatch *hvd.MismatchError
			if !errors.As(err, &mismatch) || err.Error() != want {
				t.Errorf("rank %d: got error %v\nwant %s", e.Rank(), err, want)
			}
			for i := range xs {
				checkUsable(ctx, t, e.ProcessSets()[0], fmt.Sprintf("g_%dof3", i+1))
			}
		}
		// Single tensors with the names of a group's tensors do not match the group. The odd rank submits the
		// second of them only after the first has failed. So it would hang if the coordinator reported the
		// error only after it had received both.
		if p.odd {
			for _, tensor := range []string{"h_1of2", "h_2of2"} {
				_, err := hvd.Reducescatter(ctx, []int32{1}, hvd.Name(tensor), hvd.On(e))
				wantGroups(t, p, err, tensor)
			}
			return
		}
		_, err := hvd.GroupedReducescatter(ctx, [][]int32{{1}, {1}}, hvd.Name("h"), hvd.On(e))
		wantGroups(t, p, err, "h_1of2")
	})
}

// TestGroupThatRankZeroDoesNotKnow submits the tensors of a group as single tensors at rank 0 and as a group
// at the other ranks. All ranks must get an error.
func TestGroupThatRankZeroDoesNotKnow(t *testing.T) {
	runModes(t, func(ctx context.Context, t *testing.T, e *hvd.Engine) {
		var err error
		if e.Rank() == 0 {
			if _, err = hvd.Allgather(ctx, []int32{1}, hvd.Name("h_1of2"), hvd.On(e)); err == nil {
				t.Error("a tensor that others have in a group was gathered")
			}
			_, err = hvd.Allgather(ctx, []int32{1}, hvd.Name("h_2of2"), hvd.On(e))
		} else {
			_, err = hvd.GroupedAllgather(ctx, [][]int32{{1}, {1}}, hvd.Name("h"), hvd.On(e))
		}
		var mismatch *hvd.MismatchError
		if !errors.As(err, &mismatch) ||
			!strings.Contains(err.Error(), "mismatched groups: rank 0 named none") {
			t.Errorf("rank %d: got error %v, want that rank 0 named no group", e.Rank(), err)
		}
		// The failed group leaves no state at the coordinator, so a group with the same name works.
		all, err := hvd.GroupedAllgather(ctx, [][]int32{{1}, {1}}, hvd.Name("h"), hvd.On(e))
		if err != nil || len(all[1]) != e.Size() {
			t.Errorf("rank %d: afterwards: got %v and error %v", e.Rank(), all, err)
		}
	})
}

func wantGroups(t *testing.T, p *part, err error, tensor string) {
	t.Helper()
	p.name = tensor
	want := p.expand(`hvd: reducescatter %q: mismatched groups: MOST named "h" of 2 tensors, ODD named none`)
	var mismatch *hvd.MismatchError
	if !errors.As(err, &mismatch) || err.Error() != want {
		t.Errorf("rank %d: got error %v\nwant %s", p.e.Rank(), err, want)
	}
}

// TestMismatchedProcessSets checks that adding or removing a process set fails if the ranks ask for different
// changes, if the change is impossible, or if a rank has joined. The process sets must stay usable.
func TestMismatchedProcessSets(t *testing.T) {
	runModes(t, func(ctx context.Context, t *testing.T, e *hvd.Engine) {
		p := &part{ctx: ctx, e: e, odd: e.Rank() == e.Size()-1}
		zero, one := add(ctx, t, e, 0), add(ctx, t, e, 1)
		addAgain := func(ranks ...int) error {
			_, err := hvd.AddProcessSet(ctx, ranks, hvd.On(e))
			return err
		}
		remove := func(set *hvd.ProcessSet) error { return hvd.RemoveProcessSet(ctx, set) }
		for _, c := range []struct {
			do   func() error
			want string
		}{
			{func() error { return addAgain(0) },
				`hvd: add process set "process_set.add": duplicate process set: process set 1 already consists of rank 0`},
			{func() error { return addAgain(e.ProcessSets()[0].Ranks()...) },
				`hvd: add process set "process_set.add": duplicate process set: process set 0 already consists of ALL`},
			{func() error { return addAgain(pick(p, []int{0, 1}, []int{1})...) },
				`hvd: add process set "process_set.add": mismatched members: MOST named ranks 0 and 1, ODD named rank 1`},
			{func() error { return remove(pick(p, zero, one)) },
				`hvd: remove process set "process_set.remove": mismatched process sets: MOST named process set 1, ODD named process set 2`},
			{func() error { return p.joined(func() error { return addAgain(0, 1) }) },
				`hvd: add process set "process_set.add": ODD has joined, but every rank has to call this operation`},
			{func() error { return p.joined(func() error { return remove(zero) }, hvd.Empty()) },
				`hvd: remove process set "process_set.remove": ODD has joined, but every rank has to call this operation`},
		} {
			err := c.do()
			var mismatch *hvd.MismatchError
			if err != errJoined && (!errors.As(err, &mismatch) || err.Error() != p.expand(c.want)) {
				t.Errorf("rank %d: got error %v\nwant %s", e.Rank(), err, p.expand(c.want))
			}
			if sets := e.ProcessSets(); len(sets) != 3 {
				t.Errorf("rank %d: process sets %v afterwards, want three", e.Rank(), sets)
			}
			for _, set := range []*hvd.ProcessSet{e.ProcessSets()[0], zero, one} {
				if set.Included() {
					checkUsable(ctx, t, set, "process sets")
				}
			}
		}
		noError(t, remove(one))
		var usage *hvd.UsageError
		if err := remove(one); !errors.As(err, &usage) || !errors.Is(err, hvd.ErrNoProcessSet) {
			t.Errorf("rank %d: a second removal: got error %v, want a UsageError with ErrNoProcessSet",
				e.Rank(), err)
		}
		checkUsable(ctx, t, e.ProcessSets()[0], "the end")
	})
}

// TestMismatchedStaticProcessSets checks that Init fails at all ranks if the ranks pass different process
// sets.
func TestMismatchedStaticProcessSets(t *testing.T) {
	ctx, kv := meeting(t)
	sets := [][][]int{{{0}, {1, 2}}, {{0}, {2, 1}}, {{1, 2}, {0}}}
	ranks(t, 3, func(r int) {
		e, err := hvd.New(ctx, append(place(kv, r, 3), hvd.WithProcessSets(sets[r]...))...)
		if err == nil {
			e.Shutdown(ctx)
		}
		const want = "the list of process sets is [0][1 2] at ranks 0 and 1, [1 2][0] at rank 2"
		testnet.WantError(t, err, want)
	})
}

// TestMismatchedListOfManyProcessSets checks that Init compares long lists of process sets by a hash. Ten
// ranks pass about a thousand sets each, but the last rank passes one set fewer. All ranks must get an error.
func TestMismatchedListOfManyProcessSets(t *testing.T) {
	ctx, kv := meeting(t)
	const size = 10
	var sets [][]int
	for mask := 1; mask < 1<<size-1; mask++ {
		var members []int
		for r := range size {
			if mask>>r&1 == 1 {
				members = append(members, r)
			}
		}
		sets = append(sets, members)
	}
	ranks(t, size, func(r int) {
		given := sets
		if r == size-1 {
			given = sets[:len(sets)-1]
		}
		e, err := hvd.New(ctx, append(place(kv, r, size), hvd.WithProcessSets(given...))...)
		if err == nil {
			e.Shutdown(ctx)
		}
		const want = ", 1021 sets with hash "
		testnet.WantError(t, err, want)
	})
}

// TestImpossibleProcessSets checks that Init and AddProcessSet refuse invalid process sets. AddProcessSet
// must fail only at the rank that calls it.
func TestImpossibleProcessSets(t *testing.T) {
	ctx := t.Context()
	for _, c := range []struct {
		sets [][]int
		want string
	}{
		{[][]int{{}}, "process set 1: got a process set without ranks"},
		{[][]int{{0}}, "process set 1 is a duplicate of process set 0: both have the ranks [0]"},
		{[][]int{{1}}, "process set 1: got rank 1, want 0 to 0"},
		{[][]int{{-1}}, "process set 1: got rank -1, want 0 to 0"},
		{[][]int{{0, 0}}, "process set 1: got rank 0 twice in [0 0]"},
	} {
		if _, err := hvd.New(ctx, hvd.WithProcessSets(c.sets...)); err == nil ||
			!strings.Contains(err.Error(), c.want) {
			t.Errorf("%v: got error %v, want %s", c.sets, err, c.want)
		}
	}
	run(t, 2, func(ctx context.Context, e *hvd.Engine) {
		if e.Rank() == 0 {
			for _, c := range []struct {
				ranks []int
				opts  []any
				want  string
			}{
				{nil, nil, "got a process set without ranks"},
				{[]int{0, 2}, nil, "got rank 2, want 0 to 1"},
				{[]int{-1}, nil, "got rank -1, want 0 to 1"},
				{[]int{1, 0, 1}, nil, "got rank 1 twice in [1 0 1]"},
				{[]int{1}, []any{hvd.MembersOnly()}, "rank 0 is not among the ranks [1]"},
			} {
				_, err := hvd.AddProcessSet(ctx, c.ranks, as[hvd.AddProcessSetOption](append(c.opts,
					hvd.On(e)))...)
				wantMisuse(t, err, "add process set", c.want)
			}
			wantMisuse(t, hvd.RemoveProcessSet(ctx, nil), "remove process set", "process set is nil")
			wantMisuse(t, hvd.RemoveProcessSet(ctx, e.ProcessSets()[0]), "remove process set",
				"the global process set cannot be removed")
			wantMisuse(t, hvd.RemoveProcessSet(ctx, new(hvd.ProcessSet)), "remove process set",
				"process set is nil or a zero ProcessSet")
			alone := must(hvd.New(ctx))
			defer alone.Shutdown(ctx)
			theirs := alone.ProcessSets()[0]
			wantMisuse(t, hvd.RemoveProcessSet(ctx, theirs, hvd.On(e)), "remove process set",
				theirs.String()+" belongs to another engine")
		}
		checkUsable(ctx, t, e.ProcessSets()[0], "x")
	})
}

func wantMisuse(t *testing.T, err error, op, want string) {
	t.Helper()
	var misuse *hvd.UsageError
	if !errors.As(err, &misuse) || misuse.Op != op || !strings.Contains(err.Error(), want) {
		t.Errorf("got error %v, want a UsageError of %s: %s", err, op, want)
	}
}

// TestNoDynamicProcessSets checks that AddProcessSet and RemoveProcessSet fail if
// HOROVOD_DYNAMIC_PROCESS_SETS is 0, and that operations still work.
func TestNoDynamicProcessSets(t *testing.T) {
	run(t, 1, func(ctx context.Context, e *hvd.Engine) {
		const want = "process sets cannot be changed after Init: HOROVOD_DYNAMIC_PROCESS_SETS is 0"
		_, err := hvd.AddProcessSet(ctx, []int{0}, hvd.On(e))
		wantMisuse(t, err, "add process set", want)
		wantMisuse(t, hvd.RemoveProcessSet(ctx, e.ProcessSets()[0]), "remove process set", want)
		checkUsable(ctx, t, e.ProcessSets()[0], "x")
	}, "HOROVOD_DYNAMIC_PROCESS_SETS", "0")
}

// TestThreadAffinityRefused gives the ranks of a host a list with too few cores, or one with a core that does
// not exist. Init must fail at each rank.
func TestThreadAffinityRefused(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	for list, want := range map[string]string{
		"0":         "HOROVOD_THREAD_AFFINITY: got core 0 for 2 ranks on this host, want a core for each of them",
		"9999,9999": "got core 9999 for local rank ",
	} {
		kv := store.NewHashStore(store.Limits{})
		defer kv.Close()
		ranks(t, 2, func(r int) {
			e, err := hvd.New(ctx, place(kv, r, 2, "HOROVOD_THREAD_AFFINITY", list)...)
			if err == nil {
				e.Shutdown(ctx)
			}
			testnet.WantError(t, err, want)
		})
	}
}
