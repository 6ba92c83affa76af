package hvd_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/gohvd/gohvd/hvd"
)

// TestLeave shuts down each of three ranks in turn, including rank 0. The operations of a process set without
// that rank must go on, and an operation that the rank submitted before Shutdown must still run.
func TestLeave(t *testing.T) {
	for leaver := range 3 {
		var pair []int
		for r := range 3 {
			if r != leaver {
				pair = append(pair, r)
			}
		}
		var last [3]*hvd.Handle[[]int32]
		engines(t, 3, func(ctx context.Context, e *hvd.Engine) {
			var err error
			submit := func() {
				if last[e.Rank()], err = hvd.AllreduceAsync([]int32{1}, hvd.Name("last"), hvd.Op(hvd.Sum),
					hvd.On(e)); err != nil {
					t.Error(err)
				}
			}
			if e.Rank() == leaver {
				submit()
			} else {
				set := e.ProcessSets()[1]
				for range 50 {
					if got, err := hvd.Allreduce(ctx, []int32{1}, hvd.Name("x"), hvd.Op(hvd.Sum),
						hvd.Over(set)); err != nil || got[0] != 2 {
						t.Errorf("rank %d: got %v and error %v, want 2", e.Rank(), got, err)
					}
				}
				submit()
				for range 50 {
					must(hvd.Allreduce(ctx, []int32{1}, hvd.Name("x"), hvd.Over(set)))
				}
			}
			noError(t, e.Shutdown(ctx))
			if got, err := last[e.Rank()].Wait(ctx); err != nil || got[0] != 3 {
				t.Errorf("rank %d: what all had submitted: got %v and error %v, want 3", e.Rank(), got, err)
			}
		}, []hvd.InitOption{hvd.WithProcessSets(pair)})
	}
}

// TestRankZeroDoesNotWait cancels the context of rank 0's Shutdown at once, while the other ranks still run.
// The other ranks must get a PeerError that names rank 0 and says that its Shutdown did not wait.
func TestRankZeroDoesNotWait(t *testing.T) {
	var idle sync.WaitGroup
	idle.Add(3)
	engines(t, 3, func(ctx context.Context, e *hvd.Engine) {
		noError(t, hvd.Barrier(ctx, hvd.On(e)))
		idle.Done()
		if e.Rank() == 0 {
			idle.Wait()
			short, cancel := context.WithCancel(ctx)
			cancel()
			if err := e.Shutdown(short); !errors.Is(err, context.Canceled) {
				t.Errorf("got error %v, want the context's", err)
			}
			return
		}
		<-e.Done()
		var peer *hvd.PeerError
		if err := e.Err(); !errors.As(err, &peer) || !slices.Equal(peer.Ranks, []int{0}) || peer.ShutDown ||
			peer.Reason != "its Shutdown was canceled: ranks 1 and 2 have not called Shutdown" {
			t.Errorf("rank %d: got error %v, want rank 0 that does not wait", e.Rank(), err)
		}
		if err := e.Shutdown(ctx); !errors.As(err, &peer) {
			t.Errorf("rank %d: shutdown: %v", e.Rank(), err)
		}
		// The failure is not that of a later engine, for which the program may take the error of a call.
		set := e.ProcessSets()[0]
		for _, err := range []error{hvd.Barrier(ctx, hvd.Over(set)), hvd.RemoveProcessSet(ctx, set)} {
			var misuse *hvd.UsageError
			if errors.As(err, &peer) || !errors.As(err, &misuse) || !strings.Contains(err.Error(), "has left") {
				t.Errorf("rank %d: a call with a process set of the failed job: %v", e.Rank(), err)
			}
		}
	}, nil)
}

// TestPanicPastShutdown checks that a deferred Shutdown reports a panic to the other ranks and lets the panic
// continue.
func TestPanicPastShutdown(t *testing.T) {
	modes(t, func(t *testing.T, mode []string) {
		engines(t, 3, func(ctx context.Context, e *hvd.Engine) {
			if e.Rank() == 1 {
				defer func() {
					if p := recover(); p != "no such layer" {
						t.Errorf("recovered %v", p)
					}
				}()
				defer e.Shutdown(ctx)
				panic("no such layer")
			}
			_, err := hvd.Allreduce(ctx, []int32{1}, hvd.On(e))
			var peer *hvd.PeerError
			if !errors.As(err, &peer) || !slices.Equal(peer.Ranks, []int{1}) ||
				peer.Reason != "the program panicked: no such layer" {
				t.Errorf("rank %d: got error %v, want the panic of rank 1", e.Rank(), err)
			}
			if err := e.Shutdown(ctx); !errors.As(err, &peer) {
				t.Errorf("rank %d: shutdown: %v", e.Rank(), err)
			}
		}, nil, mode...)
	})
}
