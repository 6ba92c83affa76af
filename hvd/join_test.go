package hvd_test

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
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

// join makes e join and checks that Join returns want as the rank that joined last.
func join(ctx context.Context, t *testing.T, e *hvd.Engine, want int, opts ...hvd.Option) {
	t.Helper()
	if last, err := hvd.Join(ctx, append(opts, hvd.On(e))...); err != nil || last != want {
		t.Errorf("rank %d: join: got last rank %d and error %v, want %d", e.Rank(), last, err, want)
	}
}

// checkReductionsBesideAJoin checks the results of allreduces at ranks 0 and 1 while rank 2 has joined. Rank
// 0 contributes 3 and rank 1 contributes 5.
func checkReductionsBesideAJoin[T number](ctx context.Context, t *testing.T, e *hvd.Engine, tag string) {
	t.Helper()
	mine, other := T(3+2*e.Rank()), T(5-2*e.Rank()) // 3 and 5
	for _, c := range []struct {
		op   hvd.ReduceOp
		want T
	}{
		{hvd.Sum, mine + other},
		{hvd.Product, mine * other},
		{hvd.Min, 3},
		{hvd.Max, 5},
		{hvd.Average, (mine + other) / 3}, // truncated for integers
		{hvd.AverageActive, 4},
	} {
		for _, more := range [][]hvd.Option{nil, {hvd.InPlace()}} {
			got, err := hvd.Allreduce(ctx, []T{mine, mine},
				append(more, hvd.Op(c.op), hvd.Name(fmt.Sprint(c.op, tag)), hvd.On(e))...)
			if err != nil || len(got) != 2 || math.Abs(float64(got[0])-float64(c.want)) > 1e-6 ||
				got[1] != got[0] {
				t.Errorf("rank %d: %v of 3 and 5 of %T beside a joined rank: got %v and error %v, want %v",
					e.Rank(), c.op, c.want, got, err, c.want)
			}
		}
	}
}

// TestJoin checks that a joined rank contributes neutral elements to reductions: to sums and, unlike in
// Horovod, also to minima, maxima and products.
func TestJoin(t *testing.T) {
	runJoin(t, func(ctx context.Context, t *testing.T, e *hvd.Engine) {
		for range 2 { // the first round negotiates the names, the second finds them in the cache
			if e.Rank() == 2 {
				join(ctx, t, e, 0)
				continue
			}
			checkReductionsBesideAJoin[float32](ctx, t, e, " float32")
			checkReductionsBesideAJoin[float64](ctx, t, e, " float64")
			checkReductionsBesideAJoin[int8](ctx, t, e, " int8")
			checkReductionsBesideAJoin[uint8](ctx, t, e, " uint8")
			checkReductionsBesideAJoin[int16](ctx, t, e, " int16")
			checkReductionsBesideAJoin[uint16](ctx, t, e, " uint16")
			checkReductionsBesideAJoin[int32](ctx, t, e, " int32")
			checkReductionsBesideAJoin[int64](ctx, t, e, " int64")
			checkGroupsBesideAJoin(ctx, t, e)
			checkHalvesBesideAJoin(ctx, t, e)
			if err := hvd.Barrier(ctx, hvd.Name("beside"), hvd.On(e)); err != nil {
				t.Error(err)
			}
			if e.Rank() == 1 {
				join(ctx, t, e, 0)
				continue
			}
			// Now all other ranks have joined.
			if got, err := hvd.Allreduce(ctx, []int32{-7}, hvd.Op(hvd.Min), hvd.Name("alone"),
				hvd.On(e)); err != nil || got[0] != -7 {
				t.Errorf("alone: got %v and error %v", got, err)
			}
			if got, err := hvd.Allreduce(ctx, []int32{-7}, hvd.Op(hvd.AverageActive), hvd.Name("alone too"),
				hvd.On(e)); err != nil || got[0] != -7 {
				t.Errorf("alone: got %v and error %v", got, err)
			}
			join(ctx, t, e, 0)
		}
		checkUsable(ctx, t, e.ProcessSets()[0], "alone")
	})
}

func checkGroupsBesideAJoin(ctx context.Context, t *testing.T, e *hvd.Engine) {
	t.Helper()
	xs := [][]int32{{1, 2}, {}, {3}}
	got, err := hvd.GroupedAllreduce(ctx, xs, hvd.Op(hvd.Sum), hvd.Name("group"), hvd.On(e))
	if err != nil || !slices.EqualFunc(got, [][]int32{{2, 4}, {}, {6}}, slices.Equal[[]int32]) {
		t.Errorf("rank %d: group beside a joined rank: got %v and error %v", e.Rank(), got, err)
	}
}

func checkHalvesBesideAJoin(ctx context.Context, t *testing.T, e *hvd.Engine) {
	t.Helper()
	for _, c := range []struct {
		op   hvd.ReduceOp
		want float32
	}{{hvd.Sum, -4}, {hvd.Product, 4}, {hvd.Min, -2}, {hvd.Max, -2}} {
		f, err := hvd.Allreduce(ctx, []hvd.Float16{hvd.Float16FromFloat32(-2)}, hvd.Op(c.op),
			name("float16 %v", c.op), hvd.On(e))
		if err != nil || f[0].Float32() != c.want {
			t.Errorf("rank %d: %v of float16: got %v and error %v, want %v", e.Rank(), c.op, f, err, c.want)
		}
		b, err := hvd.Allreduce(ctx, []hvd.BFloat16{hvd.BFloat16FromFloat32(-2)}, hvd.Op(c.op),
			name("bfloat16 %v", c.op), hvd.On(e))
		if err != nil || b[0].Float32() != c.want {
			t.Errorf("rank %d: %v of bfloat16: got %v and error %v, want %v", e.Rank(), c.op, b, err, c.want)
		}
	}
	for _, op := range []hvd.ReduceOp{hvd.Min, hvd.Max} {
		b, err := hvd.Allreduce(ctx, []bool{true, false}, hvd.Op(op), name("bool %v", op), hvd.On(e))
		if err != nil || !slices.Equal(b, []bool{true, false}) {
			t.Errorf("rank %d: %v of bools: got %v and error %v", e.Rank(), op, b, err)
		}
	}
	c, err := hvd.Allreduce(ctx, []float32{1, 2}, hvd.Op(hvd.Sum), hvd.CompressFP16(), hvd.Name("compressed"),
		hvd.On(e))
	if err != nil || !slices.Equal(c, []float32{2, 4}) {
		t.Errorf("rank %d: compressed sum: got %v and error %v", e.Rank(), c, err)
	}
	// Rank 2 contributes nothing, and the adaptive sum of two equal vectors is that vector.
	a, err := hvd.Allreduce(ctx, []float64{3, 4}, hvd.Op(hvd.Adasum), hvd.Name("adasum"), hvd.On(e))
	if err != nil || !slices.Equal(a, []float64{3, 4}) {
		t.Errorf("rank %d: adasum: got %v and error %v", e.Rank(), a, err)
	}
}

// TestJoinEmpty runs operations with the option Empty while a rank has joined. The joined rank must
// contribute no rows and receive none.
func TestJoinEmpty(t *testing.T) {
	runJoin(t, func(ctx context.Context, t *testing.T, e *hvd.Engine) {
		for range 2 {
			me := e.Rank()
			if me == 1 {
				join(ctx, t, e, 2, hvd.Empty())
				continue
			}
			x := []int32{int32(me), int32(me + 10), int32(me + 20)}
			on := func(n string, more ...hvd.Option) []hvd.Option {
				return append(more, hvd.Name(n), hvd.On(e))
			}
			if got, err := hvd.Allgather(ctx, x, on("allgather")...); err != nil ||
				!slices.Equal(got, []int32{0, 10, 20, 2, 12, 22}) {
				t.Errorf("rank %d: allgather: got %v and error %v", me, got, err)
			}
			group, err := hvd.GroupedAllgather(ctx, [][]int32{x, x[:1]}, on("group")...)
			if err != nil || !slices.Equal(group[0], []int32{0, 10, 20, 2, 12, 22}) ||
				!slices.Equal(group[1], []int32{0, 2}) {
				t.Errorf("rank %d: grouped allgather: got %v and error %v", me, group, err)
			}
			if got, err := hvd.Broadcast(ctx, x, 2, on("broadcast")...); err != nil ||
				!slices.Equal(got, []int32{2, 12, 22}) {
				t.Errorf("rank %d: broadcast: got %v and error %v", me, got, err)
			}
			// Rows that are sent to the joined rank are discarded.
			want := map[int][]int32{0: {0, 2}, 2: {20, 22}}[me]
			if got, received, err := hvd.Alltoall(ctx, x, nil, on("alltoall")...); err != nil ||
				!slices.Equal(got, want) || !slices.Equal(received, []int{1, 0, 1}) {
				t.Errorf("rank %d: alltoall: got %v, %v rows and error %v, want %v", me, got, received, err,
					want)
			}
			wide, received, err := hvd.Alltoall(ctx, []int32{}, []int{1, 1, 1},
				on("rows without elements", hvd.Shape(3, 0))...)
			if err != nil || len(wide) != 0 || !slices.Equal(received, []int{1, 0, 1}) {
				t.Errorf("rank %d: alltoall of empty rows: got %v, %v rows and error %v", me, wide, received,
					err)
			}
			// The rows of the result that belong to the joined rank are discarded.
			if got, err := hvd.Reducescatter(ctx, x, on("reducescatter", hvd.Op(hvd.Sum))...); err != nil ||
				len(got) != 1 || got[0] != int32(2+20*me) {
				t.Errorf("rank %d: reducescatter: got %v and error %v", me, got, err)
			}
			if got, err := hvd.Reducescatter(ctx, x,
				on("reducescatter active", hvd.Op(hvd.AverageActive))...); err != nil || len(got) != 1 ||
				got[0] != int32(1+10*me) {
				t.Errorf("rank %d: reducescatter: got %v and error %v", me, got, err)
			}
			if got, err := hvd.Allreduce(ctx, x, on("allreduce", hvd.Op(hvd.Sum))...); err != nil ||
				!slices.Equal(got, []int32{2, 22, 42}) {
				t.Errorf("rank %d: allreduce: got %v and error %v", me, got, err)
			}
			// Rank 2 must join last, so it makes another allreduce, which runs only when rank 0 has joined.
			if me == 2 {
				if _, err := hvd.Allreduce(ctx, x, on("rank 0 has joined", hvd.Op(hvd.Sum))...); err != nil {
					t.Error(err)
				}
			}
			join(ctx, t, e, 2)
		}
	})
}

// TestUnevenInputs trains for several passes over the data. Each rank has a different number of batches, and
// several tensors of a batch are in flight at the same time. Every sum must include exactly the ranks that
// still have a batch.
func TestUnevenInputs(t *testing.T) {
	for _, settings := range [][]string{{}, {"HOROVOD_CACHE_CAPACITY", "3"},
		{"HOROVOD_FUSION_THRESHOLD", "100"}} {
		t.Run(fmt.Sprint(settings), func(t *testing.T) {
			modes(t, func(t *testing.T, mode []string) {
				seed := rand.Uint64()
				t.Logf("seed %d", seed)
				run(t, 4, func(ctx context.Context, e *hvd.Engine) {
					rng := rand.New(rand.NewPCG(seed, uint64(e.Rank())))
					for epoch := range 4 {
						batches := func(rank int) int { return (rank*3 + epoch*2) % 7 }
						for batch := range batches(e.Rank()) {
							var left int32
							for r := range e.Size() {
								if batches(r) > batch {
									left++
								}
							}
							trainBatch(ctx, t, e, rng, left)
						}
						if _, err := hvd.Join(ctx, hvd.On(e)); err != nil {
							t.Errorf("rank %d: %v", e.Rank(), err)
						}
					}
				}, slices.Concat(settings, mode)...)
			})
		})
	}
}

// trainBatch sums several tensors that consist of ones and are in flight at the same time. It checks that
// every element of each sum equals want.
func trainBatch(ctx context.Context, t *testing.T, e *hvd.Engine, rng *rand.Rand, want int32) {
	const tensors = 6
	handles := make([]*hvd.Handle[int32], tensors)
	for _, i := range rng.Perm(tensors) {
		var err error
		if handles[i], err = hvd.AllreduceAsync(slices.Repeat([]int32{1}, 10*i+1), hvd.Op(hvd.Sum),
			name("gradient %d", i), hvd.On(e)); err != nil {
			t.Error(err)
			return
		}
	}
	group, err := hvd.GroupedAllreduce(ctx, [][]int32{{1}, {1}}, hvd.Op(hvd.Sum), hvd.Name("group"),
		hvd.On(e))
	if err != nil || group[0][0] != want || group[1][0] != want {
		t.Errorf("rank %d: group: got %v and error %v, want %d", e.Rank(), group, err, want)
	}
	for i, h := range handles {
		if got, err := h.Wait(ctx); err != nil || !slices.Equal(got, slices.Repeat([]int32{want}, 10*i+1)) {
			t.Errorf("rank %d: gradient %d: got %v and error %v, want %d", e.Rank(), i, got, err, want)
		}
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
				if _, err := hvd.Join(ctx, hvd.On(e)); err != nil {
					t.Error(err)
				}
				continue
			}
			sum, err := hvd.AllreduceAsync([]int32{1}, hvd.Op(hvd.Sum), hvd.Name("before"), hvd.On(e))
			if err != nil {
				t.Error(err)
				return
			}
			rows, err := hvd.AllgatherAsync([]int32{0}, hvd.Name("rows"), hvd.On(e))
			if err != nil {
				t.Error(err)
				return
			}
			if _, err := hvd.Join(ctx, hvd.On(e)); err != nil {
				t.Error(err)
			}
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
			j, err := hvd.JoinAsync(hvd.On(e))
			if err != nil {
				t.Error(err)
				return
			}
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
			_, err = hvd.GroupedAllreduceAsync([][]float32{{1}}, hvd.On(e))
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
			if _, err := hvd.Join(ctx, hvd.On(e)); err != nil {
				t.Error(err)
			}
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
					j, err := hvd.JoinAsync(hvd.Over(sets[1]))
					if err != nil {
						t.Error(err)
						return
					}
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
			if _, err := hvd.Allreduce(ctx, []int32{1}, hvd.On(e)); err != nil {
				t.Error(err)
			}
		}
		if _, err := hvd.Join(ctx, hvd.On(e)); err != nil {
			t.Error(err)
		}
		h, err := hvd.AllreduceAsync([]int32{1}, hvd.Op(hvd.Sum), hvd.On(e))
		if err != nil {
			t.Error(err)
			return
		}
		names, err := hvd.Allgather(ctx, []byte(h.Name()+";"), hvd.Name("names"), hvd.On(e))
		if err != nil {
			t.Error(err)
			return
		}
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
				if err := hvd.Barrier(ctx, hvd.On(e)); err != nil {
					t.Error(err)
				}
			} else {
				if err := hvd.Barrier(ctx, hvd.On(e)); err != nil {
					t.Error(err)
				}
				if _, err := hvd.Join(ctx, hvd.On(e)); !isShutDown(err, 1) {
					t.Errorf("rank %d: got error %v, want that rank 1 has shut down", e.Rank(), err)
				}
				if _, err := hvd.Join(ctx, hvd.On(e)); !isShutDown(err, 1) {
					t.Errorf("rank %d: a second join: got error %v, want that rank 1 has shut down", e.Rank(),
						err)
				}
			}
			if err := e.Shutdown(ctx); err != nil && !isShutDown(err, 1) {
				t.Errorf("rank %d: %v", e.Rank(), err)
			}
		}, nil, mode...)
	})
}
