package hvd_test

import (
	"context"
	"fmt"
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
	opts := func(op string, more ...any) []any {
		return append(more, hvd.Over(set), hvd.Name(op+tag))
	}

	const count = 13
	x := k.fill(count, self)
	got, err := hvd.Allreduce(ctx, x, as[hvd.AllreduceOption](opts("allreduce", hvd.Op(k.op)))...)
	check("allreduce", got, err, k.reduced(count, ranks))
	check("argument of an allreduce", x, nil, k.fill(count, self))
	got, err = hvd.Allreduce(ctx, x, as[hvd.AllreduceOption](opts("allreduce in place", hvd.Op(k.op), hvd.InPlace()))...)
	check("allreduce in place", x, err, k.reduced(count, ranks))
	if len(got) > 0 && &got[0] != &x[0] {
		t.Errorf("allreduce in place over %v at rank %d: the result is not the argument", set, self)
	}

	var all []T
	for i, r := range ranks {
		all = append(all, k.fill(2*i, r)...)
	}
	got, err = hvd.Allgather(ctx, k.fill(2*me, self), as[hvd.MoveOption](opts("allgather", hvd.Shape(me, 2)))...)
	check("allgather", got, err, all)
	x, all = make([]T, 3*n), nil
	copy(x[3*me:], k.fill(3, self))
	for _, r := range ranks {
		all = append(all, k.fill(3, r)...)
	}
	_, err = hvd.Allgather(ctx, x, as[hvd.MoveOption](opts("allgather in place", hvd.InPlace()))...)
	check("allgather in place", x, err, all)

	for _, root := range ranks {
		x := k.fill(count, self)
		got, err := hvd.Broadcast(ctx, x, root, as[hvd.MoveOption](opts(fmt.Sprint("broadcast from ", root)))...)
		check("broadcast", got, err, k.fill(count, root))
		check("argument of a broadcast", x, nil, k.fill(count, self))
		_, err = hvd.Broadcast(ctx, x, root, as[hvd.MoveOption](opts(fmt.Sprint("broadcast in place from ", root),
			hvd.InPlace()))...)
		check("broadcast in place", x, err, k.fill(count, root))
	}

	// The tensor of each rank has one row for each member: row j goes to member j.
	x, all = k.fill(2*n, self), nil
	for _, r := range ranks {
		all = append(all, k.fill(2*n, r)[2*me:2*me+2]...)
	}
	got, received, err := hvd.Alltoall(ctx, x, nil, as[hvd.MoveOption](opts("alltoall", hvd.Shape(n, 2)))...)
	check("alltoall", got, err, all)
	if !slices.Equal(received, slices.Repeat([]int{1}, n)) {
		t.Errorf("alltoall over %v at rank %d: received %v", set, self, received)
	}
	_, _, err = hvd.Alltoall(ctx, x, nil, as[hvd.MoveOption](opts("alltoall in place", hvd.Shape(n, 2), hvd.InPlace()))...)
	check("alltoall in place", x, err, all)

	rows := n + 1 // one row more than there are ranks, so the first rank gets two rows
	from, to := me+1, me+2
	if me == 0 {
		from = 0
	}
	want := k.reduced(3*rows, ranks)[3*from : 3*to]
	x = k.fill(3*rows, self)
	got, err = hvd.Reducescatter(ctx, x, as[hvd.ReduceOption](opts("reducescatter", hvd.Shape(rows, 3), hvd.Op(k.op)))...)
	check("reducescatter", got, err, want)
	check("argument of a reducescatter", x, nil, k.fill(3*rows, self))
	got, err = hvd.Reducescatter(ctx, x, as[hvd.ReduceOption](opts("reducescatter in place", hvd.Shape(rows, 3), hvd.Op(k.op),
		hvd.InPlace()))...)
	check("reducescatter in place", got, err, want)
	if len(got) > 0 && &got[0] != &x[3*from] {
		t.Errorf("reducescatter in place over %v at rank %d: the result is not in the argument", set, self)
	}

	checkGroups(ctx, t, set, k, tag)
	if err := hvd.Barrier(ctx, as[hvd.BarrierOption](opts("barrier"))...); err != nil {
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
	opts := func(op string, more ...any) []any {
		return append(more, hvd.Over(set), hvd.Name("grouped "+op+tag))
	}
	xs := [][]T{k.fill(2*n, self), {}, k.fill(n, self)}
	want := [][]T{k.reduced(2*n, ranks), {}, k.reduced(n, ranks)}
	got, err := hvd.GroupedAllreduce(ctx, xs,
		as[hvd.GroupedAllreduceOption](opts("allreduce", hvd.Op(k.op), hvd.Shapes([]int{n, 2}, []int{0},
			[]int{n, 1})))...)
	check("allreduce", got, err, want)

	parts := [][]T{want[0][2*me : 2*me+2], {}, want[2][me : me+1]}
	got, err = hvd.GroupedReducescatter(ctx, xs, as[hvd.GroupedReduceOption](opts("reducescatter", hvd.Op(k.op),
		hvd.Shapes([]int{n, 2}, []int{0, 4}, []int{n, 1})))...)
	check("reducescatter", got, err, parts)

	all := [][]T{nil, {}, nil}
	for _, r := range ranks {
		all[0] = append(all[0], k.fill(2*n, r)...)
		all[2] = append(all[2], k.fill(n, r)...)
	}
	got, err = hvd.GroupedAllgather(ctx, xs,
		as[hvd.GroupedMoveOption](opts("allgather", hvd.Shapes([]int{n, 2}, []int{0, 3}, []int{n})))...)
	check("allgather", got, err, all)

	_, err = hvd.GroupedAllreduce(ctx, xs, as[hvd.GroupedAllreduceOption](opts("allreduce in place",
		hvd.Op(k.op), hvd.InPlace()))...)
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

// TestAlltoallInPlace checks that an alltoall in place succeeds if every rank receives as many rows as it
// sends. A rank that receives more or fewer rows than it sends must get an error. The process set must stay
// usable.
func TestAlltoallInPlace(t *testing.T) {
	runModes(t, func(ctx context.Context, t *testing.T, e *hvd.Engine) {
		n, me := e.Size(), e.Rank()
		// Every rank sends all its rows to rank 0. Rank 0 receives more rows than it sends, and the other
		// ranks receive none, so every rank gets an error. This comes first, while the ranks have no fusion
		// buffer.
		splits := make([]int, n)
		splits[0] = 2
		x := []int32{int32(me), 1, int32(me), 2}
		_, _, err := hvd.Alltoall(ctx, x, splits, hvd.Shape(2, 2), hvd.InPlace(), hvd.Name("all to one"),
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
		// Each rank sends all its rows to the next rank.
		splits = make([]int, n)
		splits[(me+1)%n] = 2
		before := int32((me + n - 1) % n)
		got, received, err := hvd.Alltoall(ctx, x, splits, hvd.Shape(2, 2), hvd.InPlace(), hvd.On(e))
		if err != nil || &got[0] != &x[0] || !slices.Equal(x, []int32{before, 1, before, 2}) ||
			received[before] != 2 {
			t.Errorf("rank %d: got %v, %v rows and error %v", me, x, received, err)
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

// TestSmallGroups checks that a group without tensors completes even if no other rank submits it, and that a
// group of one tensor works. The first one must not count as an unnamed call, because then the next unnamed
// calls of the ranks would not match.
func TestSmallGroups(t *testing.T) {
	runModes(t, func(ctx context.Context, t *testing.T, e *hvd.Engine) {
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
		g, err := hvd.GroupedAllreduceAsync([][]int32{{7}}, hvd.Name("group"), hvd.On(e))
		if err != nil || g.Name() != "group" {
			t.Errorf("a group with a name: got %v and error %v", g, err)
		} else if _, err := g.Wait(ctx); err != nil {
			t.Error(err)
		}
	})
}
