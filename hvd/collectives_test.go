package hvd_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/gohvd/gohvd/hvd"
)

// kind describes how a test makes elements of type T, and which reduction combines them.
type kind[T hvd.Element] struct {
	of      func(v int) T // converts v to T; the conversion is exact if v is small
	op      hvd.ReduceOp
	combine func(a, b int) int
}

func add2(a, b int) int { return a + b }

func numbers[T number]() kind[T] { return kind[T]{func(v int) T { return T(v) }, hvd.Sum, add2} }

// element returns a small value for element i of the tensor of a rank.
func element(rank, i int) int { return (rank*5 + i*3 + 1) % 7 }

func (k kind[T]) fill(n, rank int) []T {
	x := make([]T, n)
	for i := range x {
		x[i] = k.of(element(rank, i))
	}
	return x
}

// reduced returns the expected reduction of the tensors of the given ranks. The tensor of a rank is the one
// that fill returns for n and that rank.
func (k kind[T]) reduced(n int, ranks []int) []T {
	want := make([]T, n)
	for i := range want {
		v := element(ranks[0], i)
		for _, r := range ranks[1:] {
			v = k.combine(v, element(r, i))
		}
		want[i] = k.of(v)
	}
	return want
}

// checkAll runs every operation on set and checks that the results are right, bit by bit. Every tensor's name
// ends in tag.
func checkAll[T hvd.Element](ctx context.Context, t *testing.T, set *hvd.ProcessSet, k kind[T], tag string) {
	t.Helper()
	ranks, me := set.Ranks(), set.Rank()
	n, self := len(ranks), ranks[me]
	check := func(op string, got []T, err error, want []T) {
		t.Helper()
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%s of %T over %v at rank %d: got %v and error %v, want %v", op, want, set, self, got,
				err, want)
		}
	}
	opts := func(op string, more ...hvd.Option) []hvd.Option {
		return append(more, hvd.Over(set), hvd.Name(op+tag))
	}

	const count = 13
	x := k.fill(count, self)
	got, err := hvd.Allreduce(ctx, x, opts("allreduce", hvd.Op(k.op))...)
	check("allreduce", got, err, k.reduced(count, ranks))
	check("argument of an allreduce", x, nil, k.fill(count, self))
	_, err = hvd.Allreduce(ctx, x, opts("allreduce in place", hvd.Op(k.op), hvd.InPlace())...)
	check("allreduce in place", x, err, k.reduced(count, ranks))

	var all []T
	for i, r := range ranks {
		all = append(all, k.fill(2*i, r)...)
	}
	got, err = hvd.Allgather(ctx, k.fill(2*me, self), opts("allgather", hvd.Shape(me, 2))...)
	check("allgather", got, err, all)
	x, all = make([]T, 3*n), nil
	copy(x[3*me:], k.fill(3, self))
	for _, r := range ranks {
		all = append(all, k.fill(3, r)...)
	}
	_, err = hvd.Allgather(ctx, x, opts("allgather in place", hvd.InPlace())...)
	check("allgather in place", x, err, all)

	for _, root := range ranks {
		x := k.fill(count, self)
		got, err := hvd.Broadcast(ctx, x, root, opts(fmt.Sprint("broadcast from ", root))...)
		check("broadcast", got, err, k.fill(count, root))
		check("argument of a broadcast", x, nil, k.fill(count, self))
		_, err = hvd.Broadcast(ctx, x, root, opts(fmt.Sprint("broadcast in place from ", root),
			hvd.InPlace())...)
		check("broadcast in place", x, err, k.fill(count, root))
	}

	// The tensor of each rank has one row for each member: row j goes to member j.
	x, all = k.fill(2*n, self), nil
	for _, r := range ranks {
		all = append(all, k.fill(2*n, r)[2*me:2*me+2]...)
	}
	got, received, err := hvd.Alltoall(ctx, x, nil, opts("alltoall", hvd.Shape(n, 2))...)
	check("alltoall", got, err, all)
	if !slices.Equal(received, slices.Repeat([]int{1}, n)) {
		t.Errorf("alltoall over %v at rank %d: received %v", set, self, received)
	}
	_, _, err = hvd.Alltoall(ctx, x, nil, opts("alltoall in place", hvd.Shape(n, 2), hvd.InPlace())...)
	check("alltoall in place", x, err, all)

	rows := n + 1 // one row more than there are ranks, so the first rank gets two rows
	from, to := me+1, me+2
	if me == 0 {
		from = 0
	}
	want := k.reduced(3*rows, ranks)[3*from : 3*to]
	x = k.fill(3*rows, self)
	got, err = hvd.Reducescatter(ctx, x, opts("reducescatter", hvd.Shape(rows, 3), hvd.Op(k.op))...)
	check("reducescatter", got, err, want)
	check("argument of a reducescatter", x, nil, k.fill(3*rows, self))
	got, err = hvd.Reducescatter(ctx, x, opts("reducescatter in place", hvd.Shape(rows, 3), hvd.Op(k.op),
		hvd.InPlace())...)
	check("reducescatter in place", got, err, want)
	if len(got) > 0 && &got[0] != &x[3*from] {
		t.Errorf("reducescatter in place over %v at rank %d: the result is not in the argument", set, self)
	}

	checkGroups(ctx, t, set, k, tag)
	if err := hvd.Barrier(ctx, opts("barrier")...); err != nil {
		t.Errorf("barrier over %v at rank %d: %v", set, self, err)
	}
}

// checkGroups is like checkAll, but runs the operations on groups of three tensors. The second tensor of each
// group is empty.
func checkGroups[T hvd.Element](ctx context.Context, t *testing.T, set *hvd.ProcessSet, k kind[T],
	tag string) {
	t.Helper()
	ranks, me := set.Ranks(), set.Rank()
	n, self := len(ranks), ranks[me]
	check := func(op string, got [][]T, err error, want [][]T) {
		t.Helper()
		if err != nil || !slices.EqualFunc(got, want, slices.Equal[[]T]) {
			t.Errorf("grouped %s of %T over %v at rank %d: got %v and error %v, want %v", op, want, set, self,
				got, err, want)
		}
	}
	opts := func(op string, more ...hvd.Option) []hvd.Option {
		return append(more, hvd.Over(set), hvd.Name("grouped "+op+tag))
	}
	xs := [][]T{k.fill(2*n, self), {}, k.fill(n, self)}
	want := [][]T{k.reduced(2*n, ranks), {}, k.reduced(n, ranks)}
	got, err := hvd.GroupedAllreduce(ctx, xs,
		opts("allreduce", hvd.Op(k.op), hvd.Shapes([]int{n, 2}, []int{0}, []int{n, 1}))...)
	check("allreduce", got, err, want)

	parts := [][]T{want[0][2*me : 2*me+2], {}, want[2][me : me+1]}
	got, err = hvd.GroupedReducescatter(ctx, xs, opts("reducescatter", hvd.Op(k.op),
		hvd.Shapes([]int{n, 2}, []int{0, 4}, []int{n, 1}))...)
	check("reducescatter", got, err, parts)

	all := [][]T{nil, {}, nil}
	for _, r := range ranks {
		all[0] = append(all[0], k.fill(2*n, r)...)
		all[2] = append(all[2], k.fill(n, r)...)
	}
	got, err = hvd.GroupedAllgather(ctx, xs,
		opts("allgather", hvd.Shapes([]int{n, 2}, []int{0, 3}, []int{n}))...)
	check("allgather", got, err, all)

	_, err = hvd.GroupedAllreduce(ctx, xs, opts("allreduce in place", hvd.Op(k.op), hvd.InPlace())...)
	check("allreduce in place", xs, err, want)
}

type (
	temperature float32
	identity    int64
)

// TestEveryType runs every operation with every element type and with types derived from them. Each operation
// runs on single tensors and on groups, with and without InPlace. All results must be right, bit by bit.
func TestEveryType(t *testing.T) {
	modes(t, func(t *testing.T, mode []string) {
		for _, size := range []int{1, 2, 3} {
			run(t, size, func(ctx context.Context, e *hvd.Engine) {
				all := e.ProcessSets()[0]
				checkAll(ctx, t, all, numbers[uint8](), "")
				checkAll(ctx, t, all, numbers[int8](), "")
				checkAll(ctx, t, all, numbers[uint16](), "")
				checkAll(ctx, t, all, numbers[int16](), "")
				checkAll(ctx, t, all, numbers[int32](), "")
				checkAll(ctx, t, all, numbers[int64](), "")
				checkAll(ctx, t, all, numbers[float32](), "")
				checkAll(ctx, t, all, numbers[float64](), "")
				checkAll(ctx, t, all, numbers[temperature](), "")
				checkAll(ctx, t, all, numbers[identity](), "")
				checkAll(ctx, t, all, kind[hvd.Float16]{func(v int) hvd.Float16 {
					return hvd.Float16FromFloat32(float32(v))
				}, hvd.Sum, add2}, "")
				checkAll(ctx, t, all, kind[hvd.BFloat16]{func(v int) hvd.BFloat16 {
					return hvd.BFloat16FromFloat32(float32(v))
				}, hvd.Sum, add2}, "")
				odd := func(v int) bool { return v%2 == 1 }
				checkAll(ctx, t, all, kind[bool]{odd, hvd.Min, func(a, b int) int { return a * b }}, "")
				checkAll(ctx, t, all, kind[bool]{odd, hvd.Max, func(a, b int) int { return a%2 | b%2 }}, "")
				checkAll(ctx, t, all, kind[hvd.Float16]{func(v int) hvd.Float16 {
					return hvd.Float16FromFloat32(float32(v))
				}, hvd.Max, func(a, b int) int { return max(a, b) }}, "")
				checkAll(ctx, t, all, kind[int16]{func(v int) int16 { return int16(v) }, hvd.Product,
					func(a, b int) int { return a * b }}, "")
			}, mode...)
		}
	})
}

// exchange says what ranks send in an alltoall: rank i sends exchange[i][j] rows to rank j.
type exchange [][]int

func newExchange(size int, rows func(i, j int) int) exchange {
	x := make(exchange, size)
	for i := range x {
		for j := range size {
			x[i] = append(x[i], rows(i, j))
		}
	}
	return x
}

// rowsFrom returns all rows that rank i sends. Each row has the given number of elements. The value of an
// element depends on the sender and on the position.
func (x exchange) rowsFrom(i, width int) (rows []int32) {
	sent := 0
	for _, n := range x[i] {
		sent += n
	}
	for k := range sent * width {
		rows = append(rows, int32(1000*i+k))
	}
	return rows
}

// rowsTo returns the rows that rank j receives, and how many it receives from each rank.
func (x exchange) rowsTo(j, width int) (rows []int32, received []int) {
	for i := range x {
		from := 0
		for _, n := range x[i][:j] {
			from += n
		}
		rows = append(rows, x.rowsFrom(i, width)[from*width:(from+x[i][j])*width]...)
		received = append(received, x[i][j])
	}
	return rows, received
}

// TestAlltoall checks that any rank can send any number of rows, including 0, to any other rank, and that
// rows may have no elements.
func TestAlltoall(t *testing.T) {
	modes(t, func(t *testing.T, mode []string) {
		for _, size := range sizes {
			rng := rand.New(rand.NewPCG(1, uint64(size)))
			tables := []exchange{
				newExchange(size, func(_, _ int) int { return 0 }),
				newExchange(size, func(_, _ int) int { return rng.IntN(4) }),
				// no rank sends to itself or to a higher rank
				newExchange(size, func(i, j int) int { return max(0, i-j) }),
			}
			run(t, size, func(ctx context.Context, e *hvd.Engine) {
				for n, table := range tables {
					for _, width := range []int{0, 1, 3, 1000} {
						checkAlltoall(ctx, t, e, table, width, fmt.Sprintf("table %d", n))
						// the first use of the name is negotiated in full, the second is found in the cache
						checkAlltoall(ctx, t, e, table, width, fmt.Sprintf("table %d width %d", n, width))
						checkAlltoall(ctx, t, e, table, width, fmt.Sprintf("table %d width %d", n, width))
					}
				}
			}, mode...)
		}
	})
}

func checkAlltoall(ctx context.Context, t *testing.T, e *hvd.Engine, table exchange, width int,
	tensor string) {
	t.Helper()
	me := e.Rank()
	want, received := table.rowsTo(me, width)
	x := table.rowsFrom(me, width)
	rows := 0
	for _, n := range table[me] {
		rows += n
	}
	const idle = 2 // number of rows at the end of the tensor that are sent to no rank
	x = append(x, make([]int32, idle*width)...)
	h, err := hvd.AlltoallAsync(x, table[me], hvd.Shape(rows+idle, width), hvd.Name(tensor), hvd.On(e))
	if err != nil {
		t.Errorf("rank %d: %s: %v", me, tensor, err)
		return
	}
	got, err := h.Wait(ctx)
	if err != nil || !slices.Equal(got, want) || !slices.Equal(h.Received(), received) {
		t.Errorf("rank %d: %s of rows of %d: got %d elements, %v rows and error %v, want %d and %v",
			me, tensor, width, len(got), h.Received(), err, len(want), received)
	}
}

// TestAlltoallInPlace checks that an alltoall in place succeeds if every rank receives as many rows as it
// sends. A rank that receives more or fewer rows than it sends must get an error. The process set must stay
// usable.
func TestAlltoallInPlace(t *testing.T) {
	runModes(t, func(ctx context.Context, t *testing.T, e *hvd.Engine) {
		n, me := e.Size(), e.Rank()
		// Each rank sends all its rows to the next rank.
		splits := make([]int, n)
		splits[(me+1)%n] = 2
		x := []int32{int32(me), 1, int32(me), 2}
		before := int32((me + n - 1) % n)
		got, received, err := hvd.Alltoall(ctx, x, splits, hvd.Shape(2, 2), hvd.InPlace(), hvd.On(e))
		if err != nil || &got[0] != &x[0] || !slices.Equal(x, []int32{before, 1, before, 2}) ||
			received[before] != 2 {
			t.Errorf("rank %d: got %v, %v rows and error %v", me, x, received, err)
		}
		// Every rank sends all its rows to rank 0. Rank 0 receives more rows than it sends, and the other
		// ranks receive none, so every rank gets an error.
		splits = make([]int, n)
		splits[0] = 2
		_, _, err = hvd.Alltoall(ctx, x, splits, hvd.Shape(2, 2), hvd.InPlace(), hvd.Name("all to one"),
			hvd.On(e))
		bytes, rows := 0, slices.Repeat([]int{0}, n)
		if me == 0 {
			bytes, rows = 16*n, slices.Repeat([]int{2}, n)
		}
		want := fmt.Sprintf(
			`hvd: alltoall "all to one": the result has %d bytes, but the output, which is also the input, has 16 bytes: not all ranks contributed as many rows as this rank: rows received by sender %v`,
			bytes, rows)
		if err == nil || err.Error() != want {
			t.Errorf("rank %d: got error %v\nwant %s", me, err, want)
		}
		checkUsable(ctx, t, e.ProcessSets()[0], "all to one")
	})
}

// TestAllgatherInPlaceWithoutRoom runs an allgather in which rank 0 contributes three rows, without InPlace.
// Every other rank contributes one row, with InPlace, and has room for only one row of each rank. So every
// rank except rank 0 must get an error, and rank 0 must get the result.
func TestAllgatherInPlaceWithoutRoom(t *testing.T) {
	runModes(t, func(ctx context.Context, t *testing.T, e *hvd.Engine) {
		n, first := e.Size(), e.Rank() == 0
		var err error
		if first {
			_, err = hvd.Allgather(ctx, make([]int32, 3), hvd.Name("rows"), hvd.On(e))
		} else {
			_, err = hvd.Allgather(ctx, make([]int32, n), hvd.InPlace(), hvd.Name("rows"), hvd.On(e))
		}
		want := fmt.Sprintf(
			`hvd: allgather "rows": the result has %d bytes, but the output, which is also the input, has %d bytes: not all ranks contributed as many rows as this rank: rows by rank %v`,
			4*(n+2), 4*n, append([]int{3}, slices.Repeat([]int{1}, n-1)...))
		if first != (err == nil) || !first && err.Error() != want {
			t.Errorf("rank %d: got error %v\nwant %s at all ranks but 0", e.Rank(), err, want)
		}
		checkUsable(ctx, t, e.ProcessSets()[0], "rows")
	})
}

// TestReducescatter checks that a reducescatter divides the rows as evenly as possible. If there is a
// remainder, each of the first ranks must get one row more. Some of the tensors have no rows, or fewer rows
// than there are ranks.
func TestReducescatter(t *testing.T) {
	modes(t, func(t *testing.T, mode []string) {
		for _, size := range sizes {
			run(t, size, func(ctx context.Context, e *hvd.Engine) {
				for _, rows := range []int{0, 1, size - 1, size, size + 1, 2*size + 1, 10_000} {
					for _, width := range []int{0, 1, 3} {
						checkReducescatter(ctx, t, e, rows, width)
					}
				}
			}, mode...)
		}
	})
}

// checkReducescatter runs reducescatters with Sum and Average, scaled by prescale and postscale, and checks
// the rows of this rank. Each of them runs first without and then with InPlace.
func checkReducescatter(ctx context.Context, t *testing.T, e *hvd.Engine, rows, width int) {
	size, me := e.Size(), e.Rank()
	from := me*(rows/size) + min(me, rows%size)
	to := (me+1)*(rows/size) + min(me+1, rows%size)
	all := fill[int64](rows*width, 0)
	for r := 1; r < size; r++ {
		for i, v := range fill[int64](rows*width, r) {
			all[i] += v
		}
	}
	for _, c := range []struct {
		op     hvd.ReduceOp
		post   float64
		expect func(sum int64) int64
	}{
		{hvd.Sum, 3, func(sum int64) int64 { return 2 * sum * 3 }},
		{hvd.Average, 1, func(sum int64) int64 { return 2 * sum / int64(size) }},
	} {
		want := slices.Clone(all[from*width : to*width])
		for i := range want {
			want[i] = c.expect(want[i])
		}
		opts := []hvd.Option{hvd.Shape(rows, width), hvd.Op(c.op), hvd.Prescale(2), hvd.Postscale(c.post),
			hvd.On(e)}
		label := fmt.Sprintf("%v of %d rows of %d on %d ranks: rank %d", c.op, rows, width, size, me)
		x := fill[int64](rows*width, me)
		got, err := hvd.Reducescatter(ctx, x, opts...)
		if err != nil || !slices.Equal(got, want) || !slices.Equal(x, fill[int64](rows*width, me)) {
			t.Errorf("%s: wrong, error %v", label, err)
		}
		got, err = hvd.Reducescatter(ctx, x, append(opts, hvd.InPlace())...)
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: in place: wrong, error %v", label, err)
		}
	}
}

// TestScalars checks that allreduce and broadcast work on scalars, which have one element and no dimension.
func TestScalars(t *testing.T) {
	runModes(t, func(ctx context.Context, t *testing.T, e *hvd.Engine) {
		x := []float64{float64(e.Rank() + 1)}
		if got, err := hvd.Allreduce(ctx, x, hvd.Shape(), hvd.Op(hvd.Max), hvd.On(e)); err != nil ||
			got[0] != float64(e.Size()) {
			t.Errorf("allreduce: got %v and error %v", got, err)
		}
		if got, err := hvd.Broadcast(ctx, x, 1, hvd.Shape(), hvd.On(e)); err != nil || got[0] != 2 {
			t.Errorf("broadcast: got %v and error %v", got, err)
		}
	})
}

// TestGroups checks that an empty group completes and that a group of one tensor works. It also checks the
// names and results of groups that the ranks submit in different orders. It runs with several settings. One
// of them disables the fusion of groups with other tensors.
func TestGroups(t *testing.T) {
	for _, settings := range [][]string{{}, {"HOROVOD_DISABLE_GROUP_FUSION", "1"},
		{"HOROVOD_CACHE_CAPACITY", "4"}, {"HOROVOD_FUSION_THRESHOLD", "40"}} {
		t.Run(fmt.Sprint(settings), func(t *testing.T) {
			runModes(t, func(ctx context.Context, t *testing.T, e *hvd.Engine) {
				// An empty group completes even if no other rank submits it. It must not increase the count
				// of unnamed calls, because then the next unnamed calls of the ranks would not match.
				if e.Rank() == 0 {
					g, err := hvd.GroupedAllreduceAsync([][]float32{}, hvd.On(e))
					if err != nil || !g.Poll() {
						t.Errorf("a group of none: error %v, or it is not done", err)
					} else if outs, err := g.Wait(ctx); err != nil || len(outs) != 0 {
						t.Errorf("a group of none: got %v and error %v", outs, err)
					}
				}
				one, err := hvd.GroupedAllgather(ctx, [][]int32{{7}}, hvd.On(e))
				if err != nil || len(one) != 1 || len(one[0]) != e.Size() {
					t.Errorf("a group of one: got %v and error %v", one, err)
				}
				rng := rand.New(rand.NewPCG(2, uint64(e.Rank())))
				for range 4 {
					checkSomeGroups(ctx, t, e, rng.Perm(6))
				}
			}, settings...)
		})
	}
}

// checkSomeGroups submits a group and a single tensor for each number in the slice order. It waits for all of
// them and checks their names and results.
func checkSomeGroups(ctx context.Context, t *testing.T, e *hvd.Engine, order []int) {
	groups := make([]*hvd.GroupHandle[int32], len(order))
	singles := make([]*hvd.Handle[int32], len(order))
	for _, g := range order {
		xs := make([][]int32, g+1)
		for i := range xs {
			xs[i] = fill[int32](g+i, e.Rank())
		}
		var err error
		if groups[g], err = hvd.GroupedAllreduceAsync(xs, hvd.Op(hvd.Sum), name("group %d", g),
			hvd.On(e)); err != nil {
			t.Error(err)
			return
		}
		if want := fmt.Sprint("group ", g); groups[g].Name() != want {
			t.Errorf("the group is called %q, want %q", groups[g].Name(), want)
		}
		if singles[g], err = hvd.AllreduceAsync(fill[int32](g, e.Rank()), hvd.Op(hvd.Sum),
			name("single %d", g), hvd.On(e)); err != nil {
			t.Error(err)
			return
		}
	}
	for g := range order {
		outs, err := groups[g].Wait(ctx)
		if err != nil || len(outs) != g+1 {
			t.Errorf("group %d: got %d tensors and error %v", g, len(outs), err)
			return
		}
		for i, got := range outs {
			if !slices.Equal(got, reduced[int32](g+i, e.Size(), hvd.Sum)) {
				t.Errorf("group %d tensor %d at rank %d: wrong", g, i, e.Rank())
			}
		}
		if got, err := singles[g].Wait(ctx); err != nil ||
			!slices.Equal(got, reduced[int32](g, e.Size(), hvd.Sum)) {
			t.Errorf("single %d at rank %d: wrong, error %v", g, e.Rank(), err)
		}
	}
}

// A waiter waits for an operation in flight and returns an error if the operation fails or its result is
// wrong.
type waiter func(ctx context.Context) error

// expect returns a waiter that waits for h and returns an error if the result differs from the slice want.
func expect[T comparable](h *hvd.Handle[T], err error, want []T) waiter {
	return func(ctx context.Context) error {
		if err != nil {
			return err
		}
		got, err := h.Wait(ctx)
		if err == nil && !slices.Equal(got, want) {
			err = fmt.Errorf("%q gave %v, want %v", h.Name(), got, want)
		}
		return err
	}
}

// inFlight starts one operation of each kind on set. The number of elements of most operations depends on i.
// Operations of one kind can be fused even if they were started with different values of i.
func inFlight[T number](set *hvd.ProcessSet, i int, inPlace bool) []waiter {
	var none T
	ranks, me := set.Ranks(), set.Rank()
	n, self, k := len(ranks), ranks[me], numbers[T]()
	on := func(op string, more ...hvd.Option) []hvd.Option {
		if inPlace {
			more = append(more, hvd.InPlace())
		}
		return append(more, hvd.Over(set), name("%s of %T %d", op, none, i))
	}
	root := ranks[i%n]
	allreduce, err1 := hvd.AllreduceAsync(k.fill(i, self), on("allreduce", hvd.Op(k.op))...)
	reducescatter, err2 := hvd.ReducescatterAsync(k.fill(2*i*n, self), on("reducescatter", hvd.Op(k.op),
		hvd.Shape(n, 2*i))...)
	broadcast, err3 := hvd.BroadcastAsync(k.fill(i, self), root, on("broadcast")...)
	alltoall, err4 := hvd.AlltoallAsync(k.fill(n, self), nil, on("alltoall")...)
	mine := k.fill(i, self)
	if inPlace {
		mine = make([]T, n*i)
		copy(mine[me*i:], k.fill(i, self))
	}
	allgather, err5 := hvd.AllgatherAsync(mine, on("allgather")...)
	var gathered, exchanged []T
	for _, r := range ranks {
		gathered = append(gathered, k.fill(i, r)...)
		exchanged = append(exchanged, k.fill(n, r)[me])
	}
	return []waiter{
		expect(allreduce, err1, k.reduced(i, ranks)),
		expect(reducescatter, err2, k.reduced(2*i*n, ranks)[2*i*me:2*i*(me+1)]),
		expect(broadcast, err3, k.fill(i, root)),
		expect(alltoall, err4, exchanged),
		expect(allgather, err5, gathered),
	}
}

// TestManyInFlight starts operations of all kinds with three element types on three process sets, in a
// different order at each rank, and checks all results. It runs with fusion, with a threshold that prevents
// most fusion, and with a cache of three entries.
func TestManyInFlight(t *testing.T) {
	for _, settings := range [][]string{{"HOROVOD_CYCLE_TIME", "3"}, {"HOROVOD_FUSION_THRESHOLD", "100"},
		{"HOROVOD_CACHE_CAPACITY", "3"}} {
		t.Run(fmt.Sprint(settings), func(t *testing.T) {
			modes(t, func(t *testing.T, mode []string) {
				seed := rand.Uint64()
				t.Logf("seed %d", seed)
				runSets(t, 4, [][]int{{1, 3}, {0, 1, 2}}, func(ctx context.Context, e *hvd.Engine) {
					rng := rand.New(rand.NewPCG(seed, uint64(e.Rank())))
					for round := range 3 {
						var waiters []waiter
						for _, i := range rng.Perm(24) {
							set, size, inPlace := e.ProcessSets()[i%3], i/3, (i+round)%2 == 0
							if !set.Included() {
								continue
							}
							waiters = append(waiters, inFlight[int32](set, size, inPlace)...)
							waiters = append(waiters, inFlight[float64](set, size, inPlace)...)
							waiters = append(waiters, inFlight[uint8](set, size, inPlace)...)
						}
						for _, wait := range waiters {
							if err := wait(ctx); err != nil {
								t.Errorf("rank %d: round %d: %v", e.Rank(), round, err)
							}
						}
					}
				}, slices.Concat(settings, mode)...)
			})
		})
	}
}
