package hvd_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/hvd"
)

// startedOp is an operation in flight, with a function that waits for it.
type startedOp struct {
	hvd.Pending
	wait func(ctx context.Context) error
}

// starters holds one function for each sort of operation that a program can name. The function starts such an
// operation.
var starters = []struct {
	sort  string
	start func(opts ...any) (startedOp, error)
}{
	{"tensor", func(opts ...any) (startedOp, error) {
		h, err := hvd.AllreduceAsync([]int32{1, 2, 3}, as[hvd.AllreduceOption](opts)...)
		return startedOp{h, func(ctx context.Context) error { _, err := h.Wait(ctx); return err }}, err
	}},
	{"reduced group", func(opts ...any) (startedOp, error) {
		h, err := hvd.GroupedAllreduceAsync([][]int32{{1, 2}, {3}}, as[hvd.GroupedAllreduceOption](opts)...)
		return startedOp{h, func(ctx context.Context) error { _, err := h.Wait(ctx); return err }}, err
	}},
	{"gathered group", func(opts ...any) (startedOp, error) {
		h, err := hvd.GroupedAllgatherAsync([][]int32{{1, 2}, {3}, {4}}, as[hvd.GroupedMoveOption](opts)...)
		return startedOp{h, func(ctx context.Context) error { _, err := h.Wait(ctx); return err }}, err
	}},
	{"barrier", func(opts ...any) (startedOp, error) {
		h, err := hvd.BarrierAsync(as[hvd.BarrierOption](opts)...)
		return startedOp{h, func(ctx context.Context) error { _, err := h.Wait(ctx); return err }}, err
	}},
}

// ways holds the ways in which a program can observe that an operation is done.
var ways = []struct {
	way string
	see func(ctx context.Context, b startedOp) error
}{
	{"Wait", func(ctx context.Context, b startedOp) error { return b.wait(ctx) }},
	{"Poll", func(_ context.Context, b startedOp) error {
		for !b.Poll() {
			runtime.Gosched()
		}
		return nil
	}},
	{"Done", func(ctx context.Context, b startedOp) error {
		select {
		case <-b.Done():
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}},
}

// TestNameIsInUseUntilSeen checks how long a name stays in use: until the program has observed that the
// operation is done, not only until the operation is done.
func TestNameIsInUseUntilSeen(t *testing.T) {
	run(t, 2, func(ctx context.Context, e *hvd.Engine) {
		for _, s := range starters {
			for _, w := range ways {
				sort, start, way, see := s.sort, s.start, w.way, w.see
				opts := []any{hvd.Name(sort + way), hvd.On(e)}
				first := must(start(opts...))
				// An operation that all ranks started before a barrier is done after the barrier.
				noError(t, hvd.Barrier(ctx, hvd.On(e)))
				var dup *hvd.DuplicateNameError
				if _, err := start(opts...); !errors.As(err, &dup) {
					t.Errorf("%s: again before %s: got error %v, want a DuplicateNameError", sort, way, err)
				}
				noError(t, see(ctx, first))
				second, err := start(opts...)
				if err != nil {
					t.Errorf("%s: again after %s: %v", sort, way, err)
					return
				}
				if err := first.wait(ctx); err != nil || !first.Poll() { // Poll must not free the name again
					t.Error(err)
				}
				if _, err := start(opts...); !errors.As(err, &dup) {
					t.Errorf("%s: a third after %s: got error %v, want a DuplicateNameError", sort, way, err)
				}
				noError(t, second.wait(ctx))
			}
		}
	})
}

// TestSameNameTwice submits two tensors with the same name at each rank. Every rank must refuse the second
// tensor, even if the first operation is already done there.
func TestSameNameTwice(t *testing.T) {
	const rounds = 300
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	run(t, 3, func(ctx context.Context, e *hvd.Engine) {
		random := rand.New(rand.NewPCG(seed, uint64(e.Rank())))
		pause := func() {
			for range random.IntN(200) {
				runtime.Gosched()
			}
		}
		for round := range rounds {
			pause()
			h, err := hvd.AllreduceAsync([]int32{int32(round)}, hvd.Op(hvd.Sum), hvd.Name("x"), hvd.On(e))
			if err != nil {
				t.Errorf("rank %d, round %d: %v", e.Rank(), round, err)
				return
			}
			pause()
			_, err = hvd.AllreduceAsync([]int32{1}, hvd.Name("x"), hvd.On(e))
			wantDuplicate(t, err, `hvd: allreduce "x": `, "x")
			if err == nil {
				return
			}
			if got, err := h.Wait(ctx); err != nil || !slices.Equal(got, []int32{3 * int32(round)}) {
				t.Errorf("rank %d, round %d: got %v and error %v", e.Rank(), round, got, err)
				return
			}
		}
	})
}

// TestJoinUntilSeen checks that operations are refused until the program has observed the end of its join,
// even if the join is already done. So whether an operation is refused does not depend on timing.
func TestJoinUntilSeen(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	run(t, 2, func(ctx context.Context, e *hvd.Engine) {
		random := rand.New(rand.NewPCG(seed, uint64(e.Rank())))
		for range 100 {
			j := must(hvd.JoinAsync(hvd.On(e)))
			for range random.IntN(200) {
				runtime.Gosched()
			}
			_, err := hvd.AllreduceAsync([]int32{1}, hvd.On(e))
			wantMisuse(t, err, "allreduce", "wait for the join to end")
			if _, joined := j.Wait(ctx); joined != nil || err == nil {
				t.Error(joined)
				return
			}
		}
		checkUsable(ctx, t, e.ProcessSets()[0], "x")
	})
}

// TestFireAndForget starts operations and never waits for them. If an operation has a name and the program
// has called Done on its handle, the name must become free. An operation without a name must keep no name in
// use.
func TestFireAndForget(t *testing.T) {
	run(t, 2, func(ctx context.Context, e *hvd.Engine) {
		for range 100 {
			must(hvd.AllreduceAsync([]int32{1}, hvd.On(e)))
			h := must(hvd.AllreduceAsync([]int32{1}, hvd.Name("done asked"), hvd.On(e)))
			done := h.Done() // from here on the program may drop the handle
			noError(t, hvd.Barrier(ctx, hvd.On(e)))
			<-done
		}
	})
}

// TestPendingError ends the context of a wait before the operation is done. The PendingError must hold a
// handle with which the program can wait for the operation, and the name must be free after that.
func TestPendingError(t *testing.T) {
	runModes(t, func(ctx context.Context, t *testing.T, e *hvd.Engine) {
		gone, cancel := context.WithCancelCause(ctx)
		over := errors.New("no more time")
		cancel(over)
		on := hvd.On(e)
		x, sum := []int32{1, int32(e.Rank())}, []int32{int32(e.Size()), int32(e.Size() * (e.Size() - 1) / 2)}
		for _, c := range []struct {
			name, op string
			call     func(ctx context.Context) error
			result   func(hvd.Pending) error
		}{
			{
				"x", "allreduce", func(ctx context.Context) error {
					_, err := hvd.Allreduce(ctx, x, hvd.Op(hvd.Sum), hvd.Name("x"), on)
					return err
				}, func(p hvd.Pending) error {
					got, err := p.(*hvd.Handle[[]int32]).Wait(ctx)
					if err == nil && !slices.Equal(got, sum) {
						t.Errorf("got %v, want %v", got, sum)
					}
					return err
				},
			},
			{
				"g", "reducescatter", func(ctx context.Context) error {
					_, err := hvd.GroupedReducescatter(ctx, [][]int32{x, x}, hvd.Name("g"), on)
					return err
				}, func(p hvd.Pending) error {
					_, err := p.(*hvd.Handle[[][]int32]).Wait(ctx)
					return err
				},
			},
			{
				"process_set.add", "add process set", func(ctx context.Context) error {
					_, err := hvd.AddProcessSet(ctx, []int{1}, on)
					return err
				},
				func(p hvd.Pending) error {
					set, err := p.(*hvd.Handle[*hvd.ProcessSet]).Wait(ctx)
					if err == nil && (set.ID() != 1 || !slices.Contains(e.ProcessSets(), set)) {
						t.Errorf("got %v, want process set 1 of %v", set, e.ProcessSets())
					}
					return err
				},
			},
		} {
			name := c.name
			var late *hvd.PendingError
			err := c.call(gone)
			if !errors.As(err, &late) || late.Op != c.op || late.Tensor != name ||
				late.Handle.Name() != name ||
				!errors.Is(err, context.Canceled) || !errors.Is(err, over) {
				t.Errorf("%s: got error %v, want a PendingError", name, err)
				return
			}
			noError(t, hvd.Barrier(ctx, on))
			var dup *hvd.DuplicateNameError
			if err := c.call(ctx); !errors.As(err, &dup) {
				t.Errorf("%s: again before the first was seen done: got error %v, want a DuplicateNameError",
					name, err)
			}
			if err := c.result(late.Handle); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			if name == "process_set.add" {
				if sets := e.ProcessSets(); len(sets) != 2 {
					t.Errorf("process sets %v, want two", sets)
				}
			} else if err := c.call(ctx); err != nil {
				t.Errorf("%s: again: %v", name, err)
			}
		}
	})
}

// TestJobEndsAfterAnOwnTimeout ends the job after several waits at rank 1 have timed out. The errors at rank
// 1 must name the operation that never completed. They must not name the operations that completed before the
// job ended.
func TestJobEndsAfterAnOwnTimeout(t *testing.T) {
	modes(t, func(t *testing.T, mode []string) {
		engines(t, 2, func(ctx context.Context, e *hvd.Engine) {
			on := hvd.On(e)
			gone, cancel := context.WithCancel(ctx)
			cancel()
			const own = `; before that, this rank gave up waiting for barrier "late" (context canceled)`
			if e.Rank() == 1 {
				var early, late *hvd.PendingError
				err := hvd.Barrier(gone, hvd.Name("early"), on)
				if !errors.As(err, &early) {
					t.Errorf("got error %v, want a PendingError", err)
				}
				<-early.Handle.Done()
				if _, err = hvd.Allreduce(gone, []int32{1, 2}, hvd.Name("bad"), on); !errors.As(err, &early) {
					t.Errorf("got error %v, want a PendingError", err)
				}
				<-early.Handle.Done()
				x := must(hvd.AllreduceAsync([]int32{1}, hvd.Name("x"), on))
				xs := must(hvd.GroupedAllgatherAsync([][]int32{{1}, {2}}, hvd.Name("xs"), on))
				if err := hvd.Barrier(gone, hvd.Name("late"), on); !errors.As(err, &late) {
					t.Errorf("got error %v, want a PendingError", err)
				}
				noError(t, hvd.Barrier(ctx, hvd.Name("given up"), on))
				_, err = x.Wait(ctx)
				_, group := xs.Wait(ctx)
				next := hvd.Barrier(ctx, on)
				_, given := late.Handle.(*hvd.Handle[struct{}]).Wait(ctx)
				for _, err := range []error{err, group, next, given} {
					if err == nil || strings.Count(err.Error(), own) != 1 ||
						strings.Contains(err.Error(), "other operation") {
						t.Errorf("got error %v, want one that says %q once", err, own)
					}
				}
			} else {
				noError(t, hvd.Barrier(ctx, hvd.Name("early"), on))
				var mismatch *hvd.MismatchError
				if _, err := hvd.Allreduce(ctx, []int32{1}, hvd.Name("bad"), on); !errors.As(err, &mismatch) {
					t.Errorf("got error %v, want a MismatchError", err)
				}
				noError(t, hvd.Barrier(ctx, hvd.Name("given up"), on))
			}
			// In event mode the job fails if a rank shuts down while rank 1 still waits for it.
			if err := e.Shutdown(ctx); err != nil && strings.Contains(err.Error(), own) != (e.Rank() == 1) {
				t.Errorf("rank %d: got error %v", e.Rank(), err)
			}
		}, nil, mode...)
	})
}

// TestShutdownAfterAnOwnTimeout shuts down rank 1 after one of its waits has timed out. The error at rank 0,
// which waits for rank 1, must name rank 1 and that wait.
func TestShutdownAfterAnOwnTimeout(t *testing.T) {
	engines(t, 2, func(ctx context.Context, e *hvd.Engine) {
		on := hvd.On(e)
		if e.Rank() == 1 {
			gone, cancel := context.WithCancel(ctx)
			cancel()
			if err := hvd.Barrier(gone, hvd.Name("late"), on); !errors.As(err, new(*hvd.PendingError)) {
				t.Errorf("got error %v, want a PendingError", err)
			}
		} else {
			const want = `rank 1 failed: shut down (gave up waiting for barrier "late" (context canceled))`
			if err := hvd.Barrier(ctx, hvd.Name("other"), on); err == nil ||
				!strings.Contains(err.Error(), want) {
				t.Errorf("got error %v, want one that says %q", err, want)
			}
		}
		if err := e.Shutdown(ctx); err != nil && !errors.As(err, new(*hvd.PeerError)) {
			t.Error(err)
		}
	}, nil)
}
