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
)

// The engine's tests check times exactly, with a simulated clock. The tests in this file check that settings
// and options have an effect and that reports reach the program.

// short is a timeout. Even on a busy machine it is long enough for ranks that start together to submit their
// tensors. Tests that wait for it run in parallel.
const short = 2500 * time.Millisecond

// shortSeconds is short as the value of a setting.
var shortSeconds = fmt.Sprint(short.Seconds())

// gathering returns a function that each of n ranks calls to wait for the other ranks. The function uses no
// collective, because the timeouts of these tests would apply to that collective too.
func gathering(n int32) func(ctx context.Context) {
	var here atomic.Int32
	all := make(chan struct{})
	return func(ctx context.Context) {
		if here.Add(1) == n {
			close(all)
		}
		select {
		case <-all:
		case <-ctx.Done():
		}
	}
}

// TestOnStall checks that rank 0 gets a report on a tensor that waits, and that the report names the missing
// ranks. In the first round the name is new, and in the second it is cached. The third round uses a process
// set without rank 0. In each round the operation must succeed when the missing rank submits it.
func TestOnStall(t *testing.T) {
	stalls := make(chan hvd.Stall, 100)
	seen := make(chan struct{}, 3)
	opts := []hvd.InitOption{
		hvd.WithProcessSets([]int{1, 2}),
		hvd.OnStall(func(s hvd.Stall) { stalls <- s }),
	}
	engines(t, 3, func(ctx context.Context, e *hvd.Engine) {
		for round, over := range []int{0, 0, 1} { // the name is cached in the second round
			set := e.ProcessSets()[over]
			if e.Rank() == 2 {
				select {
				case <-seen:
				case <-ctx.Done():
				}
			}
			var h *hvd.Handle[[]int32]
			if set.Included() {
				var err error
				if h, err = hvd.AllgatherAsync([]int32{1}, hvd.Name("slow"), hvd.Over(set)); err != nil {
					t.Error(err)
					return
				}
			}
			if e.Rank() == 0 {
				awaitStall(ctx, t, stalls, hvd.Stall{Op: "allgather", Tensor: "slow", ProcessSet: over,
					Missing: []int{2}})
				seen <- struct{}{}
			}
			if h == nil {
				continue
			}
			if got, err := h.Wait(ctx); err != nil || len(got) != set.Size() {
				t.Errorf("rank %d: round %d: got %v and error %v", e.Rank(), round, got, err)
			}
		}
		noError(t, hvd.Barrier(ctx, hvd.On(e)))
		noError(t, e.Shutdown(ctx))
	}, opts, "HOROVOD_STALL_CHECK_TIME_SECONDS", "0.1", "HOROVOD_LOG_LEVEL", "fatal")
}

// awaitStall waits for a stall report that matches want. Other reports may precede it.
func awaitStall(ctx context.Context, t *testing.T, stalls <-chan hvd.Stall, want hvd.Stall) {
	t.Helper()
	for {
		select {
		case got := <-stalls:
			if got.Waited <= 0 {
				t.Errorf("%+v has not waited", got)
			}
			if got.Op == want.Op && got.Tensor == want.Tensor && got.ProcessSet == want.ProcessSet &&
				slices.Equal(got.Missing, want.Missing) && got.Executing == want.Executing {
				return
			}
		case <-ctx.Done():
			t.Errorf("no report like %+v", want)
			return
		}
	}
}

// TestStallShutdown checks that, with HOROVOD_STALL_SHUTDOWN_TIME_SECONDS, the stall inspector ends the job
// at all ranks with a StallError.
func TestStallShutdown(t *testing.T) {
	t.Parallel()
	gather := gathering(3)
	engines(t, 3, func(ctx context.Context, e *hvd.Engine) {
		gather(ctx)
		if e.Rank() == 2 {
			<-e.Done()
		}
		_, err := hvd.Allreduce(ctx, []float32{1}, hvd.Name("stuck"), hvd.On(e))
		wantStall(t, e, err)
		e.Shutdown(ctx)
	}, nil, "HOROVOD_STALL_CHECK_TIME_SECONDS", "0.1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
		shortSeconds, "HOROVOD_LOG_LEVEL", "fatal")
}

func wantStall(t *testing.T, e *hvd.Engine, err error) {
	t.Helper()
	const prefix = `hvd: allreduce "stuck": the job was shut down: stalled: allreduce "stuck" of process set 0 has waited `
	var stall *hvd.StallError
	if !errors.As(err, &stall) || !errors.Is(err, hvd.ErrShutDown) ||
		!strings.HasPrefix(err.Error(), prefix) || !strings.HasSuffix(err.Error(), " for rank 2") {
		t.Errorf("rank %d: got error %v, want a StallError, which is an ErrShutDown", e.Rank(), err)
		return
	}
	waited, err := time.ParseDuration(strings.TrimSuffix(strings.TrimPrefix(err.Error(), prefix),
		" for rank 2"))
	if err != nil || waited < short {
		t.Errorf("rank %d: the error says that it has waited %v (%v), want at least %v", e.Rank(), waited,
			err, short)
	}
}

// TestOperationTimeout runs an operation that takes longer than the setting or the option Timeout allows. The
// job must end at all ranks with an error that names the missing rank.
func TestOperationTimeout(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		title    string
		opts     []any
		settings []string
	}{
		{"by setting", nil, []string{"HVD_OPERATION_TIMEOUT_SECONDS", shortSeconds}},
		{"by option", []any{hvd.Timeout(short)}, []string{"HVD_OPERATION_TIMEOUT_SECONDS", "3000"}},
	} {
		t.Run(c.title, func(t *testing.T) {
			modes(t, func(t *testing.T, mode []string) {
				gather := gathering(3)
				engines(t, 3, func(ctx context.Context, e *hvd.Engine) {
					gather(ctx)
					if e.Rank() == 1 {
						<-e.Done()
					}
					_, _, err := hvd.Alltoall(ctx, []int32{1, 2, 3}, nil,
						as[hvd.MoveOption](append(c.opts, hvd.Name("late"),
							hvd.On(e)))...)
					wantTimeout(t, e, err, 1, `alltoall "late"`)
					var peer *hvd.PeerError
					<-e.Done() // closed only after the results of all operations are set
					if err := e.Err(); !errors.As(err, &peer) {
						t.Errorf("rank %d: the job ended with %v, want a PeerError", e.Rank(), err)
					}
					if err := e.Shutdown(ctx); !errors.As(err, &peer) {
						t.Errorf("rank %d: shutdown: got error %v, want a PeerError", e.Rank(), err)
					}
				}, nil, slices.Concat(mode, c.settings, []string{"HOROVOD_LOG_LEVEL", "fatal"})...)
			})
		})
	}
}

func wantTimeout(t *testing.T, e *hvd.Engine, err error, missing int, prefix string) {
	t.Helper()
	var peer *hvd.PeerError
	if !errors.As(err, &peer) || !slices.Equal(peer.Ranks, []int{missing}) ||
		errors.Is(err, hvd.ErrShutDown) ||
		!strings.HasPrefix(err.Error(), fmt.Sprintf("hvd: %s: rank %d failed: ", prefix, missing)) ||
		!strings.Contains(err.Error(), fmt.Sprint("timed out after ", short)) {
		t.Errorf("rank %d: got error %v, want a timeout that names rank %d", e.Rank(), err, missing)
	}
}

// TestJoinHasNoDefaultTimeout checks that HVD_OPERATION_TIMEOUT_SECONDS does not end a join, because a join
// lasts as long as other ranks have tensors. It must not end the first operation after an idle time either,
// if that operation itself is in time.
func TestJoinHasNoDefaultTimeout(t *testing.T) {
	t.Parallel()
	modes(t, func(t *testing.T, mode []string) {
		joined := make(chan struct{})
		gather := gathering(2)
		run(t, 2, func(ctx context.Context, e *hvd.Engine) {
			gather(ctx)
			if e.Rank() == 1 {
				j := must(hvd.JoinAsync(hvd.On(e)))
				// The join must still wait after twice the timeout of operations.
				select {
				case <-j.Done():
					t.Error("the join is over before rank 0 has joined")
				case <-time.After(2 * short):
				}
				close(joined)
				if last, err := j.Wait(ctx); err != nil || last != 0 {
					t.Errorf("got rank %d and error %v, want rank 0", last, err)
				}
				return
			}
			for range 5 {
				must(hvd.Allreduce(ctx, []int32{1}, hvd.Name("x"), hvd.On(e)))
			}
			<-joined
			must(hvd.Join(ctx, hvd.On(e)))
		}, append(mode, "HVD_OPERATION_TIMEOUT_SECONDS", shortSeconds)...)
	})
}

// TestJoinTimeout checks that a join with the option Timeout ends the job when the timeout has passed.
func TestJoinTimeout(t *testing.T) {
	t.Parallel()
	modes(t, func(t *testing.T, mode []string) {
		gather := gathering(3)
		engines(t, 3, func(ctx context.Context, e *hvd.Engine) {
			gather(ctx)
			// If the join does not time out, this context ends the wait.
			ctx, cancel := context.WithTimeout(ctx, deadline/4)
			defer cancel()
			var err error
			if e.Rank() == 1 {
				select {
				case <-e.Done():
				case <-ctx.Done():
				}
			} else if _, err = hvd.Join(ctx, hvd.Timeout(short), hvd.On(e)); err != nil {
				wantTimeout(t, e, err, 1, `join "join.noname"`)
			}
			e.Shutdown(ctx)
		}, nil, append(mode, "HOROVOD_LOG_LEVEL", "fatal")...)
	})
}

// TestAddProcessSetTimeout checks that AddProcessSet with the option Timeout ends the job if one rank does
// not call it in time.
func TestAddProcessSetTimeout(t *testing.T) {
	t.Parallel()
	modes(t, func(t *testing.T, mode []string) {
		gather := gathering(3)
		engines(t, 3, func(ctx context.Context, e *hvd.Engine) {
			gather(ctx)
			if e.Rank() == 2 {
				<-e.Done()
			}
			_, err := hvd.AddProcessSet(ctx, []int{0, 1}, hvd.Timeout(short), hvd.On(e))
			wantTimeout(t, e, err, 2, `add process set "process_set.add"`)
			e.Shutdown(ctx)
		}, nil, append(mode, "HOROVOD_LOG_LEVEL", "fatal")...)
	})
}
