package client_test

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/gohvd/gohvd/hvd"
)

// Every operation gives over sidecars what it gives in process, in memory of the program's and of the arena, in place and not.
func TestOperations(t *testing.T) {
	for _, w := range ways {
		for _, n := range []int{1, 2, 3} {
			t.Run(fmt.Sprintf("%s/ranks=%d", w.name, n), func(t *testing.T) {
				w.run(t, n, func(ctx context.Context, t *testing.T, e *hvd.Engine) {
					if !e.IsHomogeneous() {
						t.Error("one host is not homogeneous")
					}
					for _, elems := range []int{0, 1, 7, 1000, 100_000} {
						for _, arena := range []bool{false, true} {
							operations(ctx, t, e, elems, arena)
						}
					}
				})
			})
		}
	}
}

func operations(ctx context.Context, t *testing.T, e *hvd.Engine, elems int, arena bool) {
	n, me := e.Size(), e.Rank()
	vector := func(elems int, of func(i int) int32) []int32 {
		x := make([]int32, elems)
		if arena {
			var err error
			if x, err = hvd.Alloc[int32](elems); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := hvd.Free(x); err != nil {
					t.Error(err)
				}
			})
		}
		for i := range x {
			x[i] = of(i)
		}
		return x
	}
	check := func(op string, got []int32, err error, elems int, of func(i int) int32) {
		t.Helper()
		want := make([]int32, elems)
		for i := range want {
			want[i] = of(i)
		}
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("rank %d: %s of %d elements, arena %v: got %.20v... of %d and error %v, want %.20v... of %d",
				me, op, elems, arena, got, len(got), err, want, len(want))
		}
	}
	mine := func(i int) int32 { return int32(1000*me + i) }
	sum := func(i int) int32 { return int32(1000*(n*(n-1)/2) + n*i) }
	for _, inPlace := range [][]hvd.Option{nil, {hvd.InPlace()}} {
		on := func(opts ...hvd.Option) []hvd.Option { return append(append(opts, hvd.On(e)), inPlace...) }
		form := fmt.Sprint(len(inPlace) > 0)

		got, err := hvd.Allreduce(ctx, vector(elems, mine), on(hvd.Op(hvd.Sum))...)
		check("allreduce in place: "+form, got, err, elems, sum)

		for _, zero := range []hvd.Option{hvd.Prescale(0), hvd.Postscale(0)} {
			got, err = hvd.Allreduce(ctx, vector(elems, mine), on(hvd.Op(hvd.Sum), zero)...)
			check("allreduce scaled to 0 in place: "+form, got, err, elems, func(int) int32 { return 0 })
		}

		got, err = hvd.Broadcast(ctx, vector(elems, mine), n-1, on()...)
		check("broadcast in place: "+form, got, err, elems, func(i int) int32 { return int32(1000*(n-1) + i) })

		from := vector(elems, mine)
		if len(inPlace) > 0 {
			from = vector(n*elems, func(i int) int32 { return mine(i - me*elems) })
		}
		got, err = hvd.Allgather(ctx, from, on()...)
		check("allgather in place: "+form, got, err, n*elems, func(i int) int32 { return int32(1000*(i/elems) + i%elems) })

		got, err = hvd.Reducescatter(ctx, vector(n*elems, mine), on(hvd.Op(hvd.Sum))...)
		check("reducescatter in place: "+form, got, err, elems, func(i int) int32 { return sum(me*elems + i) })

		got, received, err := hvd.Alltoall(ctx, vector(n*elems, mine), nil, on()...)
		check("alltoall in place: "+form, got, err, n*elems, func(i int) int32 { return int32(1000*(i/elems) + me*elems + i%elems) })
		if want := slices.Repeat([]int{elems}, n); !slices.Equal(received, want) {
			t.Errorf("rank %d: alltoall received %v, want %v", me, received, want)
		}

		group, err := hvd.GroupedAllreduce(ctx, [][]int32{vector(elems, mine), vector(3, mine)}, on(hvd.Op(hvd.Sum), hvd.Name("group"+form))...)
		if err != nil || len(group) != 2 {
			t.Errorf("rank %d: grouped allreduce: got %d tensors and error %v", me, len(group), err)
		} else {
			check("first of a group", group[0], nil, elems, sum)
			check("second of a group", group[1], nil, 3, sum)
		}
	}
	// Rows that only their senders know of before.
	got, err := hvd.Allgather(ctx, vector((me+1)*2, mine), hvd.Shape(me+1, 2), hvd.On(e))
	var want []int32
	for r := range n {
		for i := range (r + 1) * 2 {
			want = append(want, int32(1000*r+i))
		}
	}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("rank %d: allgather of other sizes: got %v and error %v, want %v", me, got, err, want)
	}
	if err := hvd.Barrier(ctx, hvd.On(e)); err != nil {
		t.Errorf("rank %d: %v", me, err)
	}
	if last, err := hvd.Join(ctx, hvd.On(e)); err != nil || last < 0 || last >= n {
		t.Errorf("rank %d: join: got %d and error %v", me, last, err)
	}
}
