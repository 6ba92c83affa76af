package hvd_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gohvd/gohvd/hvd"
)

// refusal is a call that a rank must refuse. The text of the error is `hvd: <op> "<tensor>": <want>`.
type refusal struct {
	title string
	op    string
	do    func(name hvd.NameOption) error
	is    error // an error that errors.Is must find in the error of the call, or nil
	want  string
}

// world holds the engine and the process sets that the calls of one rank use.
type world struct {
	ctx     context.Context
	e       *hvd.Engine
	own     *hvd.ProcessSet // contains only this rank
	foreign *hvd.ProcessSet // does not contain this rank
	removed *hvd.ProcessSet // was removed by all ranks
	others  *hvd.ProcessSet // belongs to another engine
}

func (w *world) allreduce(opts ...any) error {
	_, err := hvd.Allreduce(w.ctx, []float32{1}, as[hvd.AllreduceOption](append(opts, hvd.On(w.e)))...)
	return err
}

func (w *world) alltoall(rows int, splits []int, opts ...any) error {
	_, _, err := hvd.Alltoall(w.ctx, make([]float32, rows), splits, as[hvd.MoveOption](append(opts,
		hvd.On(w.e)))...)
	return err
}

// over returns calls on set, one for each operation. Each call must be refused. Its error must contain the
// text want, and errors.Is must find the argument is in it unless that is nil.
func (w *world) over(set *hvd.ProcessSet, title, want string, is error) []refusal {
	f := func(op string, do func(opts ...any) error) refusal {
		return refusal{title + ": " + op, op, func(name hvd.NameOption) error {
			return do(name,
				hvd.Over(set))
		},
			is, want}
	}
	return []refusal{
		f("allreduce", func(o ...any) error {
			_, err := hvd.Allreduce(w.ctx, []int32{1}, as[hvd.AllreduceOption](o)...)
			return err
		}),
		f("allgather", func(o ...any) error {
			_, err := hvd.Allgather(w.ctx, []int32{1}, as[hvd.MoveOption](o)...)
			return err
		}),
		f("broadcast", func(o ...any) error {
			_, err := hvd.Broadcast(w.ctx, []int32{1}, set.Ranks()[0], as[hvd.MoveOption](o)...)
			return err
		}),
		f("alltoall", func(o ...any) error {
			_, _, err := hvd.Alltoall(w.ctx, []int32{}, nil, as[hvd.MoveOption](o)...)
			return err
		}),
		f("reducescatter", func(o ...any) error {
			_, err := hvd.Reducescatter(w.ctx, []int32{1}, as[hvd.ReduceOption](o)...)
			return err
		}),
		f("barrier", func(o ...any) error { return hvd.Barrier(w.ctx, as[hvd.BarrierOption](o)...) }),
	}
}

// beforeEnqueue returns calls that must be refused. Horovod also makes these checks before it queues a
// tensor.
func (w *world) beforeEnqueue() []refusal {
	e, ctx, size := w.e, w.ctx, w.e.Size()
	broadcast := func(root int, opts ...any) func(hvd.NameOption) error {
		return func(name hvd.NameOption) error {
			_, err := hvd.Broadcast(ctx, []int32{1}, root, as[hvd.MoveOption](append(opts, name,
				hvd.On(e)))...)
			return err
		}
	}
	alltoall := func(rows int, splits ...int) func(hvd.NameOption) error {
		return func(name hvd.NameOption) error { return w.alltoall(rows, splits, name) }
	}
	cut := func(s ...int) []int { return s[:size] }
	cases := []refusal{
		{"root: too large", "broadcast", broadcast(size), nil,
			fmt.Sprintf("got root rank %d, want a rank of %v", size, e.ProcessSets()[0])},
		{"root: negative", "broadcast", broadcast(-1), nil, fmt.Sprintf("got root rank -1, want a rank of %v",
			e.ProcessSets()[0])},
		{"root: not in the set", "broadcast", func(name hvd.NameOption) error {
			_, err := hvd.Broadcast(ctx, []int32{1}, 0, name, hvd.Over(w.own))
			return err
		}, nil, fmt.Sprintf("got root rank 0, want a rank of %v", w.own)},
		{"splits: too many for the set", "alltoall", func(name hvd.NameOption) error {
			_, _, err := hvd.Alltoall(ctx, []int32{1}, cut(1, 0, 0), name, hvd.Over(w.own))
			return err
		}, nil, fmt.Sprintf("got %d splits, want one for each of 1 ranks", size)},
		{"splits: too few", "alltoall", alltoall(size, cut(1, 1, 1)[1:]...), nil,
			fmt.Sprintf("got %d splits, want one for each of %d ranks", size-1, size)},
		{"splits: too many", "alltoall", alltoall(size, append(cut(1, 1, 1), 0)...), nil,
			fmt.Sprintf("got %d splits, want one for each of %d ranks", size+1, size)},
		{"splits: none, not nil", "alltoall", func(name hvd.NameOption) error {
			return w.alltoall(size, []int{}, name)
		}, nil, fmt.Sprintf("got 0 splits, want one for each of %d ranks", size)},
		{"splits: negative", "alltoall", alltoall(5, cut(6, -1, 0)...), nil,
			fmt.Sprintf("got splits %v, want non-negative numbers with a sum of at most 5, the number of rows", cut(6, -1, 0))},
		{"splits: negative, small", "alltoall", alltoall(5, cut(-1, 1, 0)...), nil,
			fmt.Sprintf("got splits %v, want non-negative numbers with a sum of at most 5, the number of rows", cut(-1, 1, 0))},
		{"splits: sum", "alltoall", alltoall(5, cut(3, 3, 0)...), nil,
			fmt.Sprintf("got splits %v, want non-negative numbers with a sum of at most 5, the number of rows", cut(3, 3, 0))},
		{"splits: sum overflows", "alltoall", alltoall(5, cut(math.MaxInt, math.MaxInt, 2)...), nil,
			"want non-negative numbers with a sum of at most 5, the number of rows"},
		{"splits: not divisible", "alltoall", func(name hvd.NameOption) error {
			return w.alltoall(size+1, nil, name)
		}, nil, fmt.Sprintf("got %d rows, which cannot be split evenly between %d ranks: pass splits", size+1,
			size)},
		{"reducescatter: adasum", "reducescatter", func(name hvd.NameOption) error {
			_, err := hvd.Reducescatter(ctx, []float32{1}, hvd.Op(hvd.Adasum), name, hvd.On(e))
			return err
		}, nil, "got reduction adasum, which only allreduce supports"},
	}
	cases = append(cases, w.over(w.removed, "removed set", hvd.ErrNoProcessSet.Error(),
		hvd.ErrNoProcessSet)...)
	cases = append(cases, w.over(w.foreign, "not a member", fmt.Sprintf("rank %d is not a member of %v",
		e.Rank(), w.foreign), nil)...)
	return cases
}

// ofOptions returns calls whose options contradict the operation, the tensor or each other.
func (w *world) ofOptions() []refusal {
	e, ctx := w.e, w.ctx
	allreduce := func(title, want string, opts ...any) refusal {
		return refusal{title, "allreduce", func(name hvd.NameOption) error {
			return w.allreduce(append(opts, name)...)
		}, nil, want}
	}
	integers := func(opts ...any) func(hvd.NameOption) error {
		return func(name hvd.NameOption) error {
			_, err := hvd.Allreduce(ctx, []int32{1}, as[hvd.AllreduceOption](append(opts, name,
				hvd.On(e)))...)
			return err
		}
	}
	bools := func(opts ...any) func(hvd.NameOption) error {
		return func(name hvd.NameOption) error {
			_, err := hvd.Allreduce(ctx, []bool{true}, as[hvd.AllreduceOption](append(opts, name,
				hvd.On(e)))...)
			return err
		}
	}
	group := func(xs [][]float32, opts ...any) func(hvd.NameOption) error {
		return func(name hvd.NameOption) error {
			_, err := hvd.GroupedAllreduce(ctx, xs, as[hvd.GroupedAllreduceOption](append(opts, name,
				hvd.On(e)))...)
			return err
		}
	}
	return []refusal{
		allreduce("set: nil", "process set is nil", hvd.Over(nil)),
		{"engine: nil", "allreduce", func(name hvd.NameOption) error {
			_, err := hvd.Allreduce(ctx, []float32{1}, name, hvd.On(nil))
			return err
		}, nil, "engine is nil"},
		allreduce("set: empty", "process set is nil or a zero ProcessSet", hvd.Over(new(hvd.ProcessSet))),
		{"engine: empty", "allreduce", func(name hvd.NameOption) error {
			_, err := hvd.Allreduce(ctx, []float32{1}, name, hvd.On(new(hvd.Engine)))
			return err
		}, nil, "engine is nil or a zero Engine"},
		allreduce("set: of another engine", fmt.Sprintf("%v belongs to another engine", w.others),
			hvd.Over(w.others)),
		allreduce("shape", "shape [2] does not match the tensor, which has 1 elements", hvd.Shape(2)),
		allreduce("shape: negative", "shape [-1 -1] does not match the tensor, which has 1 elements",
			hvd.Shape(-1, -1)),
		allreduce("shape: overflows", "does not match the tensor, which has 1 elements",
			hvd.Shape(math.MaxInt, 2)),
		allreduce("reduction: unknown", "ReduceOp(99)", hvd.Op(99)),
		allreduce("reduction: none", "none", hvd.Op(0)),
		{"reduction: adasum of integers", "allreduce", integers(hvd.Op(hvd.Adasum)), nil, "adasum"},
		{"reduction: sum of bools", "allreduce", bools(hvd.Op(hvd.Sum)), nil, "bool"},
		{"reduction: default of bools", "allreduce", bools(), nil, "bool"},
		{"scale: bools", "allreduce", bools(hvd.Op(hvd.Max), hvd.Prescale(2)), nil, "bool"},
		allreduce("scale: NaN before", "prescale factor NaN and postscale factor 1", hvd.Prescale(math.NaN())),
		allreduce("scale: NaN after", "prescale factor 1 and postscale factor NaN", hvd.Postscale(math.NaN())),
		{"compression: integers", "allreduce", integers(hvd.CompressFP16()), nil,
			"compression of int32 to float16"},
		allreduce("error feedback without compression",
			"option ErrorFeedback needs option CompressFP16 or CompressBF16", hvd.ErrorFeedback()),
		allreduce("timeout: 0", "got timeout 0s, want more than 0", hvd.Timeout(0)),
		allreduce("timeout: negative", "got timeout -1s, want more than 0", hvd.Timeout(-time.Second)),
		{"option: number of shapes", "allreduce", group([][]float32{{1}, {2}}, hvd.Shapes([]int{1})), nil,
			"got 1 shapes, want one for each of 2 tensors"},
		{"option: no shapes", "allreduce", group([][]float32{{1}, {2}}, hvd.Shapes()), nil,
			"got 0 shapes, want one for each of 2 tensors"},
		{"group: one shape is wrong", "allreduce",
			group([][]float32{{1}, {2}}, hvd.Shapes([]int{1}, []int{3})), nil,
			"shape [3] does not match the tensor, which has 1 elements"},
		{"in place: no room for all ranks", "allgather", func(name hvd.NameOption) error {
			_, err := hvd.Allgather(ctx, make([]int32, e.Size()+1), hvd.InPlace(), name, hvd.On(e))
			return err
		}, nil, fmt.Sprintf("got %d elements in place, want a multiple of the number of ranks, %d",
			e.Size()+1, e.Size())},
	}
}

// TestRefused makes wrong calls at one rank. Each call must fail at once, and only at that rank. The name in
// the call must stay free, and the job must go on.
func TestRefused(t *testing.T) {
	runModes(t, func(ctx context.Context, t *testing.T, e *hvd.Engine) {
		last := e.Size() - 1
		foreign := add(ctx, t, e, 0)
		removed := add(ctx, t, e, last)
		noError(t, hvd.RemoveProcessSet(ctx, removed))
		own := add(ctx, t, e, last)
		var cases []refusal
		if w := (world{ctx: ctx, e: e, own: own, foreign: foreign, removed: removed}); e.Rank() == last {
			alone := must(hvd.New(ctx))
			defer func() {
				noError(t, alone.Shutdown(ctx))
			}()
			w.others = alone.ProcessSets()[0]
			cases = append(w.beforeEnqueue(), w.ofOptions()...)
			for i, c := range cases {
				checkRefusal(t, c, fmt.Sprint("refused ", i))
			}
		}
		n := must(hvd.Broadcast(ctx, []int32{int32(len(cases))}, last, hvd.On(e)))
		for i := range int(n[0]) {
			checkUsable(ctx, t, e.ProcessSets()[0], fmt.Sprint("refused ", i))
		}
		// A refused call does not count as an unnamed call, so the next unnamed calls still match.
		if got, err := hvd.Allreduce(ctx, []int32{1}, hvd.Op(hvd.Sum), hvd.On(e)); err != nil ||
			got[0] != int32(e.Size()) {
			t.Errorf("unnamed: got %v and error %v", got, err)
		}
	})
}

func checkRefusal(t *testing.T, c refusal, tensor string) {
	t.Helper()
	err := c.do(hvd.Name(tensor))
	var misuse *hvd.UsageError
	if !errors.As(err, &misuse) || misuse.Op != c.op || misuse.Tensor != tensor {
		t.Errorf("%s: got error %v, want a UsageError of %s %q", c.title, err, c.op, tensor)
		return
	}
	if prefix := fmt.Sprintf("hvd: %s %q: ", c.op, tensor); !strings.HasPrefix(err.Error(), prefix) ||
		!strings.Contains(err.Error(), c.want) {
		t.Errorf("%s: got error %v\nwant %s%s", c.title, err, prefix, c.want)
	}
	if c.is != nil && !errors.Is(err, c.is) {
		t.Errorf("%s: got error %v, want %v among the causes", c.title, err, c.is)
	}
}

// TestRefusedNames checks that invalid names are refused. If a call has no name, its error must not show one.
func TestRefusedNames(t *testing.T) {
	run(t, 1, func(ctx context.Context, e *hvd.Engine) {
		for _, c := range []struct {
			opts []any
			want string
		}{
			{[]any{hvd.Name(strings.Repeat("n", 5000))}, "5000 bytes"},
			{[]any{hvd.Name("bad\xff")}, "not UTF-8"},
			{[]any{hvd.Op(99)}, "hvd: allreduce: "},
			{[]any{hvd.Op(99), hvd.Name("later")}, `hvd: allreduce "later": `},
		} {
			_, err := hvd.Allreduce(ctx, []int32{1}, as[hvd.AllreduceOption](append(c.opts, hvd.On(e)))...)
			var misuse *hvd.UsageError
			if !errors.As(err, &misuse) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got error %v, want a UsageError with %q", err, c.want)
			}
		}
		// The name of a tensor in a group is the name of the group with a suffix of up to len("_10of10")
		// bytes.
		const group = 4096 - len("_10of10") + 1
		for _, more := range []int{0, 1} {
			opts := []any{hvd.Name(strings.Repeat("n", group-1+more)), hvd.On(e)}
			_, gather := hvd.GroupedAllgather(ctx, slices.Repeat([][]int32{{1}}, 10),
				as[hvd.GroupedMoveOption](opts)...)
			_, scatter := hvd.GroupedReducescatter(ctx, slices.Repeat([][]int32{{1}}, 10),
				as[hvd.GroupedReduceOption](opts)...)
			for _, err := range []error{gather, scatter} {
				var misuse *hvd.UsageError
				if errors.As(err, &misuse) != (more > 0) ||
					more > 0 && !strings.Contains(err.Error(), "4097 bytes") {
					t.Errorf("%d bytes more than there is room for: got error %v", more, err)
				}
			}
		}
	})
}

// TestDuplicateName checks that a second operation with the same name is refused while the first is in
// flight, and that the name works again afterwards.
func TestDuplicateName(t *testing.T) {
	runModes(t, func(ctx context.Context, t *testing.T, e *hvd.Engine) {
		global := e.ProcessSets()[0]
		if e.Rank() == 0 {
			h := must(hvd.AllreduceAsync([]int32{1}, hvd.Op(hvd.Sum), hvd.Name("x"), hvd.On(e)))
			_, err := hvd.BroadcastAsync([]int32{1}, 0, hvd.Name("x"), hvd.On(e))
			wantDuplicate(t, err, `hvd: broadcast "x": `, "x")
			noError(t, hvd.Barrier(ctx, hvd.Name("refused"), hvd.On(e)))
			if got, err := h.Wait(ctx); err != nil || got[0] != int32(e.Size()) {
				t.Errorf("the first x: got %v and error %v", got, err)
			}
		} else {
			noError(t, hvd.Barrier(ctx, hvd.Name("refused"), hvd.On(e)))
			must(hvd.Allreduce(ctx, []int32{1}, hvd.Op(hvd.Sum), hvd.Name("x"),
				hvd.On(e)))
		}
		checkUsable(ctx, t, global, "x")
	})
}

func wantDuplicate(t *testing.T, err error, prefix, tensor string) {
	t.Helper()
	var (
		misuse *hvd.UsageError
		dup    *hvd.DuplicateNameError
	)
	if !errors.As(err, &misuse) || !errors.As(err, &dup) || dup.Name != tensor ||
		!strings.HasPrefix(err.Error(), prefix) ||
		!strings.Contains(err.Error(), fmt.Sprintf("%q: a tensor of this name is in flight", tensor)) {
		t.Errorf("got error %v, want %s and a DuplicateNameError for %q", err, prefix, tensor)
	}
}

// TestDuplicateNameInAGroup submits a group while the name of one of its tensors is in use. Unlike in
// Horovod, the whole group must be refused, and the other names must stay free.
func TestDuplicateNameInAGroup(t *testing.T) {
	runModes(t, func(ctx context.Context, t *testing.T, e *hvd.Engine) {
		global := e.ProcessSets()[0]
		xs := [][]int32{{1}, {2}, {3}}
		for _, taken := range []int{1, 2, 3} {
			tensor := fmt.Sprintf("g_%dof3", taken)
			if e.Rank() == 0 {
				h := must(hvd.AllreduceAsync([]int32{1}, hvd.Op(hvd.Sum), hvd.Name(tensor), hvd.On(e)))
				_, err := hvd.GroupedAllgatherAsync(xs, hvd.Name("g"), hvd.On(e))
				wantDuplicate(t, err, "hvd: allgather ", tensor)
				// The refused group has not submitted its other tensors, so their names are free.
				for i := range xs {
					if i+1 != taken {
						checkUsable(ctx, t, global, fmt.Sprintf("g_%dof3", i+1))
					}
				}
				if got, err := h.Wait(ctx); err != nil || got[0] != int32(e.Size()) {
					t.Errorf("%s: got %v and error %v", tensor, got, err)
				}
			} else {
				for i := range xs {
					if i+1 != taken {
						checkUsable(ctx, t, global, fmt.Sprintf("g_%dof3", i+1))
					}
				}
				must(hvd.Allreduce(ctx, []int32{1}, hvd.Op(hvd.Sum), hvd.Name(tensor),
					hvd.On(e)))
			}
			got, err := hvd.GroupedAllgather(ctx, xs, hvd.Name("g"), hvd.On(e))
			if err != nil || len(got) != len(xs) || len(got[2]) != e.Size() {
				t.Errorf("rank %d: the group afterwards: got %v and error %v", e.Rank(), got, err)
			}
		}
	})
}

// TestDuplicateNameOfAGroup checks that an allreduce of a group uses only the name of the group, not a name
// for each tensor.
func TestDuplicateNameOfAGroup(t *testing.T) {
	runModes(t, func(ctx context.Context, t *testing.T, e *hvd.Engine) {
		xs := [][]int32{{1}, {2, 3}}
		group := func() (*hvd.Handle[[][]int32], error) {
			return hvd.GroupedAllreduceAsync(xs, hvd.Op(hvd.Sum), hvd.Name("g"), hvd.On(e))
		}
		var first *hvd.Handle[[][]int32]
		if e.Rank() == 0 {
			var err error
			if first, err = group(); err != nil {
				t.Error(err)
				return
			}
			_, err = group()
			wantDuplicate(t, err, "hvd: allreduce ", "g")
			_, err = hvd.AllreduceAsync([]int32{1}, hvd.Name("g"), hvd.On(e))
			wantDuplicate(t, err, "hvd: allreduce ", "g")
		}
		checkUsable(ctx, t, e.ProcessSets()[0], "g_1of2") // the group does not use this name
		if e.Rank() != 0 {
			var err error
			if first, err = group(); err != nil {
				t.Error(err)
				return
			}
		}
		n := int32(e.Size())
		if got, err := first.Wait(ctx); err != nil ||
			fmt.Sprint(got) != fmt.Sprint([][]int32{{n}, {2 * n, 3 * n}}) {
			t.Errorf("rank %d: got %v and error %v", e.Rank(), got, err)
		}
	})
}

// add adds a process set and fails the test on an error.
func add(ctx context.Context, t *testing.T, e *hvd.Engine, members ...int) *hvd.ProcessSet {
	t.Helper()
	set, err := hvd.AddProcessSet(ctx, members, hvd.On(e))
	if err != nil {
		t.Errorf("rank %d: %v", e.Rank(), err)
	}
	return set
}

// TestNotInitialized checks that before Init every operation fails with ErrNotInitialized and queries panic.
func TestNotInitialized(t *testing.T) {
	ctx := t.Context()
	for op, do := range everyOperation(ctx) {
		err := do()
		var misuse *hvd.UsageError
		if !errors.As(err, &misuse) || misuse.Op != op || !errors.Is(err, hvd.ErrNotInitialized) {
			t.Errorf("%s: got error %v, want a UsageError that is ErrNotInitialized", op, err)
		}
	}
	for _, query := range []func(){func() { hvd.Rank() }, func() { hvd.ProcessSets() }, func() {
		hvd.GlobalProcessSet()
	}} {
		func() {
			defer func() {
				if p := recover(); p == nil || !strings.Contains(fmt.Sprint(p), "called before Init") {
					t.Errorf("recovered %v, want a panic that says so", p)
				}
			}()
			query()
		}()
	}
}

// everyOperation returns a map from the name of each operation to a function. The function calls the
// operation with opts and returns its error.
func everyOperation(ctx context.Context, opts ...any) map[string]func() error {
	return map[string]func() error{
		"allreduce": func() error {
			_, err := hvd.Allreduce(ctx, []int32{1},
				as[hvd.AllreduceOption](opts)...)
			return err
		},
		"allgather": func() error {
			_, err := hvd.Allgather(ctx, []int32{1},
				as[hvd.MoveOption](opts)...)
			return err
		},
		"broadcast": func() error {
			_, err := hvd.Broadcast(ctx, []int32{1}, 0,
				as[hvd.MoveOption](opts)...)
			return err
		},
		"alltoall": func() error {
			_, _, err := hvd.Alltoall(ctx, []int32{}, nil, as[hvd.MoveOption](opts)...)
			return err
		},
		"reducescatter": func() error {
			_, err := hvd.Reducescatter(ctx, []int32{1},
				as[hvd.ReduceOption](opts)...)
			return err
		},
		"barrier": func() error { return hvd.Barrier(ctx, as[hvd.BarrierOption](opts)...) },
		"join":    func() error { _, err := hvd.Join(ctx, as[hvd.JoinOption](opts)...); return err },
		"add process set": func() error {
			_, err := hvd.AddProcessSet(ctx, []int{0}, as[hvd.AddProcessSetOption](opts)...)
			return err
		},
	}
}

// TestAfterShutdown checks that every operation that a rank submits after its Shutdown fails with
// ErrShutDown.
func TestAfterShutdown(t *testing.T) {
	modes(t, func(t *testing.T, mode []string) {
		ctx, kv := meeting(t)
		ranks(t, 2, func(r int) {
			e := must(hvd.New(ctx, place(kv, r, 2, mode...)...))
			noError(t, e.Shutdown(ctx))
			for op, do := range everyOperation(ctx, hvd.On(e)) {
				err := do()
				var misuse *hvd.UsageError
				if !errors.Is(err, hvd.ErrShutDown) || errors.As(err, &misuse) ||
					!strings.HasPrefix(err.Error(), "hvd: "+op+` "`) {
					t.Errorf("rank %d: %s: got error %v, want ErrShutDown", r, op, err)
				}
			}
			if err := e.Shutdown(ctx); err != nil {
				t.Errorf("rank %d: a second shutdown: %v", r, err)
			}
		})
	})
}

// TestTooMuchAtOnce makes rank 1 submit more requests at once than a frame can hold. The job must fail with
// an error that names rank 1 and this reason.
func TestTooMuchAtOnce(t *testing.T) {
	engines(t, 2, func(ctx context.Context, e *hvd.Engine) {
		if e.Rank() == 1 {
			tensors := make([][]uint8, 17_000)
			if _, err := hvd.GroupedAllgather(ctx, tensors, hvd.Name(strings.Repeat("n", 2000)),
				hvd.On(e)); err == nil {
				t.Error("68 MB of requests were answered")
			}
		}
		<-e.Done()
		var peer *hvd.PeerError
		if err := e.Err(); !errors.As(err, &peer) || !slices.Equal(peer.Ranks, []int{1}) ||
			!strings.Contains(err.Error(), "want at most 67108864: submit fewer tensors at once") {
			t.Errorf("rank %d: got error %v, want that rank 1 sent too much", e.Rank(), err)
		}
		if err := e.Shutdown(ctx); !errors.As(err, &peer) {
			t.Errorf("rank %d: shutdown: got error %v", e.Rank(), err)
		}
	}, nil, "HOROVOD_LOG_LEVEL", "fatal")
}
