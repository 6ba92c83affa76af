package hvd_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/internal/testnet"
)

// number is the constraint for element types that have arithmetic in Go.
type number interface {
	~uint8 | ~int8 | ~uint16 | ~int16 | ~int32 | ~int64 | ~float32 | ~float64
}

// value returns element i of the tensor of rank r. It is small, so that sums and products are exact in every
// type.
func value(i, r int) int { return (7*i + 13*r) % 3 }

// fill returns the tensor of rank r, which has n elements.
func fill[T number](n, r int) []T {
	return cycled(n, func(i int) T { return T(value(i, r)) })
}

// reduced returns the expected result of an allreduce of the tensors that fill returns for all ranks.
func reduced[T number](n, ranks int, op hvd.ReduceOp) []T {
	return cycled(n, func(i int) T {
		acc := value(i, 0)
		for r := 1; r < ranks; r++ {
			v := value(i, r)
			switch op {
			case hvd.Sum, hvd.Average:
				acc += v
			case hvd.Product:
				acc *= v
			case hvd.Min:
				acc = min(acc, v)
			case hvd.Max:
				acc = max(acc, v)
			}
		}
		return T(acc)
	})
}

func TestBarrierHoldsEveryoneBack(t *testing.T) {
	modes(t, func(t *testing.T, mode []string) {
		arrived := make(chan int, 4)
		var last atomic.Bool
		run(t, 4, func(ctx context.Context, e *hvd.Engine) {
			if e.Rank() == 3 {
				// Rank 3 enters the barrier only when the other ranks are known to be in it.
				for range 3 {
					<-arrived
				}
				last.Store(true)
			}
			h := must(hvd.BarrierAsync(hvd.Name("b"), hvd.On(e)))
			if e.Rank() != 3 {
				arrived <- e.Rank()
			}
			must(h.Wait(ctx))
			if !last.Load() {
				t.Errorf("rank %d passed before rank 3 came", e.Rank())
			}
		}, mode...)
	})
}

// TestWaitGivesUp checks that an operation continues after the context of a Wait for it has ended.
func TestWaitGivesUp(t *testing.T) {
	gaveUp := make(chan struct{})
	run(t, 2, func(ctx context.Context, e *hvd.Engine) {
		if e.Rank() == 1 {
			<-gaveUp
		}
		h := must(hvd.AllreduceAsync([]int32{int32(e.Rank())}, hvd.Op(hvd.Max), hvd.Name("late"), hvd.On(e)))
		if e.Rank() == 0 {
			short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
			defer cancel()
			if _, err := h.Wait(short); !errors.Is(err, context.DeadlineExceeded) ||
				!strings.Contains(err.Error(), `allreduce "late"`) {
				t.Errorf("got error %v, want the deadline", err)
			}
			why := errors.New("why")
			cancelled, cancel2 := context.WithCancelCause(ctx)
			cancel2(why)
			if _, err := h.Wait(cancelled); !errors.Is(err, context.Canceled) || !errors.Is(err, why) {
				t.Errorf("got error %v, want the cancellation and its cause", err)
			}
			if h.Poll() {
				t.Error("done before rank 1 came")
			}
			close(gaveUp)
		}
		if got, err := h.Wait(ctx); err != nil || got[0] != 1 || !h.Poll() {
			t.Errorf("rank %d: got %v and error %v", e.Rank(), got, err)
		}
	})
}

// TestOneRankWithoutEnvironment checks the package-level functions of a program without a launcher: it is
// rank 0 of 1, and Init, operations and Shutdown work repeatedly.
func TestOneRankWithoutEnvironment(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	if _, err := hvd.Allreduce(ctx, []int32{1}); !errors.Is(err, hvd.ErrNotInitialized) {
		t.Errorf("before Init: got error %v", err)
	}
	if err := hvd.Shutdown(ctx); err != nil {
		t.Errorf("shutdown before Init: %v", err)
	}
	for range 3 {
		if err := hvd.Init(ctx); err != nil {
			t.Fatal(err)
		}
		if err := hvd.Init(ctx); err != nil {
			t.Fatalf("second Init: %v", err)
		}
		if hvd.Rank() != 0 || hvd.Size() != 1 || hvd.LocalRank() != 0 || hvd.LocalSize() != 1 ||
			hvd.CrossRank() != 0 || hvd.CrossSize() != 1 || !hvd.IsHomogeneous() || !hvd.IsInitialized() {
			t.Error("not rank 0 of 1")
		}
		if got, err := hvd.Allreduce(ctx, []float32{3}); err != nil || got[0] != 3 {
			t.Errorf("allreduce: got %v and error %v", got, err)
		}
		if got, err := hvd.Allgather(ctx, []uint8{3, 4}); err != nil || len(got) != 2 {
			t.Errorf("allgather: got %v and error %v", got, err)
		}
		if got, err := hvd.Broadcast(ctx, []uint8{}, 0); err != nil || len(got) != 0 {
			t.Errorf("broadcast: got %v and error %v", got, err)
		}
		if err := hvd.Barrier(ctx); err != nil {
			t.Errorf("barrier: %v", err)
		}
		if err := hvd.Shutdown(ctx); err != nil {
			t.Fatal(err)
		}
	}
	defer func() {
		if p := recover(); p == nil || !strings.Contains(fmt.Sprint(p), "Rank called before Init") {
			t.Errorf("Rank after Shutdown: recovered %v, want a panic that says so", p)
		}
	}()
	hvd.Rank()
}

// TestConcurrentShutdown calls Shutdown three times concurrently. None of the calls may return before the
// engine has ended.
func TestConcurrentShutdown(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	for range 20 {
		if err := hvd.Init(ctx); err != nil {
			t.Fatal(err)
		}
		h, err := hvd.AllreduceAsync(make([]float32, 1<<20))
		if err != nil {
			t.Fatal(err)
		}
		ranks(t, 3, func(int) {
			noError(t, hvd.Shutdown(ctx))
			if !h.Poll() {
				t.Error("Shutdown returned before the engine had ended")
			}
		})
		if hvd.IsInitialized() {
			t.Error("initialized after Shutdown")
		}
	}
}

// TestDone checks that Done and Err show the end of the job to a program that has no operation in flight.
func TestDone(t *testing.T) {
	ctx, kv := meeting(t)
	looked := make(chan struct{})
	ranks(t, 2, func(r int) {
		e := must(hvd.New(ctx, place(kv, r, 2)...))
		if e.Err() != nil {
			t.Errorf("rank %d: %v before the end", r, e.Err())
		}
		if r == 1 {
			close(looked)
		} else {
			select {
			case <-looked:
			case <-ctx.Done():
			}
			gone, cancel := context.WithCancel(ctx)
			cancel()
			if err := e.Shutdown(gone); !errors.Is(err, context.Canceled) {
				t.Errorf("a shutdown cut short: got error %v", err)
			}
			return
		}
		<-e.Done()
		var peer *hvd.PeerError
		if err := e.Err(); err != nil && !errors.As(err, &peer) {
			t.Errorf("got error %v, want rank 0 or nothing", err)
		}
		if err := e.Shutdown(ctx); err != nil && !errors.As(err, &peer) {
			t.Error(err)
		}
	})
}

// TestShutdownWithPendingRequests shuts down rank 0 while the other ranks wait for an operation that rank 0
// has not submitted. That operation and every later one must fail with an error that names rank 0.
func TestShutdownWithPendingRequests(t *testing.T) {
	modes(t, func(t *testing.T, mode []string) {
		ctx, kv := meeting(t)
		ranks(t, 3, func(r int) {
			e := must(hvd.New(ctx, place(kv, r, 3, mode...)...))
			noError(t, hvd.Barrier(ctx, hvd.On(e)))
			if r == 0 {
				if err := e.Shutdown(ctx); err != nil && !isShutDown(err, 0) {
					t.Errorf("shutdown: %v", err)
				}
				return
			}
			pending, err := hvd.AllreduceAsync([]int32{1}, hvd.Name("never"), hvd.On(e))
			if err == nil {
				_, err = pending.Wait(ctx)
			}
			if !isShutDown(err, 0) || !strings.Contains(err.Error(), `allreduce "never"`) {
				t.Errorf("rank %d: pending: got error %v, want that rank 0 has shut down", r, err)
			}
			if _, err := hvd.Allreduce(ctx, []int32{1}, hvd.On(e)); !isShutDown(err, 0) {
				t.Errorf("rank %d: after: got error %v, want that rank 0 has shut down", r, err)
			}
			if err := e.Shutdown(ctx); err != nil && !isShutDown(err, 0) {
				t.Errorf("rank %d: %v", r, err)
			}
		})
	})
}

// isShutDown reports whether err says that exactly the given ranks have shut down while other ranks waited
// for them.
func isShutDown(err error, ranks ...int) bool {
	var peer *hvd.PeerError
	return errors.As(err, &peer) && peer.ShutDown && slices.Equal(peer.Ranks, ranks) &&
		errors.Is(err, hvd.ErrShutDown)
}

// TestInitAgainAndAgain forms ten epochs with the same three ranks. All ranks must see the same number for an
// epoch, and it must be greater than the number of the previous epoch.
func TestInitAgainAndAgain(t *testing.T) {
	ctx, kv := meeting(t)
	ranks(t, 3, func(r int) {
		var last uint64
		opts := place(kv, r, 3)
		for round := range 10 {
			e := must(hvd.New(ctx, opts...))
			if e.Epoch() <= last {
				t.Errorf("rank %d: epoch %d after %d", r, e.Epoch(), last)
			}
			last = e.Epoch()
			got, err := hvd.Allreduce(ctx, []int64{int64(e.Epoch())}, hvd.Op(hvd.Max), hvd.On(e))
			if err != nil || got[0] != int64(last) {
				t.Errorf("rank %d round %d: got %v and error %v, want epoch %d", r, round, got, err, last)
			}
			noError(t, e.Shutdown(ctx))
			opts = append(place(kv, r, 3), hvd.After(e))
		}
	})
}

// TestPlace checks that gohvd derives local and cross ranks from the host names unless settings give them.
func TestPlace(t *testing.T) {
	ctx, kv := meeting(t)
	hosts := []string{"a", "a", "b"} // two ranks on one host, one on the other
	want := [][6]int{{0, 3, 0, 2, 0, 2}, {1, 3, 1, 2, 0, 1}, {2, 3, 7, 8, 5, 6}}
	ranks(t, 3, func(r int) {
		opts := append(place(kv, r, 3), hvd.WithSetting("HOROVOD_HOSTNAME", hosts[r]))
		if r == 2 {
			opts = append(opts, hvd.WithSetting("HOROVOD_LOCAL_RANK", "7"),
				hvd.WithSetting("HOROVOD_LOCAL_SIZE", "8"),
				hvd.WithSetting("HOROVOD_CROSS_RANK", "5"), hvd.WithSetting("HOROVOD_CROSS_SIZE", "6"))
		}
		e := must(hvd.New(ctx, opts...))
		if got := [6]int{e.Rank(), e.Size(), e.LocalRank(), e.LocalSize(), e.CrossRank(),
			e.CrossSize()}; got != want[r] {
			t.Errorf("rank %d is at %v, want %v", r, got, want[r])
		}
		if e.IsHomogeneous() {
			t.Errorf("rank %d: hosts %q are homogeneous", r, hosts)
		}
		noError(t, e.Shutdown(ctx))
	})
}

// TestInitFailsOnBothSides starts two ranks that are given different sizes of the job. Both must get an
// error.
func TestInitFailsOnBothSides(t *testing.T) {
	ctx, kv := meeting(t)
	errs := make([]error, 2)
	ranks(t, 2, func(r int) {
		_, errs[r] = hvd.New(ctx, place(kv, r, 2+r)...)
	})
	for _, err := range errs {
		testnet.WantError(t, err, "size")
	}
}
