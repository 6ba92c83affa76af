package engine_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/internal/transport/faulty"
	"github.com/gohvd/gohvd/tensorqueue"
)

// testTimeout is not a multiple of the heartbeat period, because the turn of a heartbeat would hide a missed
// deadline.
const testTimeout = 2300 * time.Millisecond

// reports collects the stall reports of rank 0 with their times.
type reports struct {
	began time.Time
	list  []string
}

// attach makes the engine with configuration cfg report its stalls to r.
func (r *reports) attach(cfg *engine.Config) {
	cfg.OnStall = func(s *controller.Stall) {
		// In lock-step, the times of reports are only as precise as the time between cycles.
		const precision = 100 * time.Millisecond
		r.list = append(r.list, fmt.Sprintf("%v: %v after %v", time.Since(r.began).Truncate(precision), s,
			s.Waited.Truncate(precision)))
	}
}

// take waits until the engines are idle and returns the reports that have come since take was called last.
func (r *reports) take() []string {
	synctest.Wait()
	list := r.list
	r.list = nil
	return list
}

// If a tensor waits for a rank, OnStall is called after each further StallWarning until the rank submits the
// tensor. This also holds for cached tensors and for process sets without rank 0.
func TestStallReports(t *testing.T) {
	inBubbles(t, func(t *testing.T, lockstep bool) {
		var r reports
		c := start(t, 3, func(cfg *engine.Config) {
			cfg.Lockstep, cfg.StallWarning = lockstep, testTimeout
			cfg.Sets = []controller.Set{{ID: 1, Ranks: []topo.Rank{1, 2}}}
			r.attach(cfg)
		})
		// In the second round with each set, the tensor is in the cache.
		for round, set := range []topo.ProcessSetID{0, 0, 1, 1} {
			r.began = time.Now()
			c.each(func(rank int) {
				if set == 1 && rank == 0 {
					return
				}
				if rank == 2 {
					time.Sleep(2*testTimeout + time.Second)
				}
				e := sum("x", make([]byte, 8))
				e.Set = set
				c.succeeds(c.submit(rank, e))
			})
			want := []string{
				fmt.Sprintf(`2.3s: allreduce "x" of process set %d has waited 2.3s for rank 2 after 2.3s`,
					set),
				fmt.Sprintf(`4.6s: allreduce "x" of process set %d has waited 4.6s for rank 2 after 4.6s`,
					set),
			}
			if got := r.take(); !slices.Equal(got, want) {
				t.Errorf("round %d: got %q\nwant %q", round, got, want)
			}
		}
		// Neither operations that end in time nor idle ranks cause reports.
		time.Sleep(10 * testTimeout)
		c.shutdown()
		if got := r.take(); len(got) != 0 {
			t.Errorf("in time: got %q", got)
		}
	})
}

// If a rank is late for 40 tensors, the log has lines for the first ten stalls. If the launcher explains
// stalls, the log has a line only for the first stall. One more line contains the number of the stalls
// without a line. It is logged after a second, or when the job ends if that is earlier. OnStall receives
// every stall.
func TestManyStallsAreFewLines(t *testing.T) {
	for _, q := range []struct {
		absent    time.Duration
		explained bool
		lines     int
	}{{1500 * time.Millisecond, false, 10}, {500 * time.Millisecond, false, 10}, {1500 * time.Millisecond,
		true, 1}} {
		absent := q.absent
		synctest.Test(t, func(t *testing.T) {
			var r reports
			core, logged := observer.New(zapcore.WarnLevel)
			c := start(t, 2, func(cfg *engine.Config) {
				cfg.StallWarning, cfg.Log = testTimeout, zap.New(core)
				cfg.StallsExplained = func() bool { return q.explained }
				r.attach(cfg)
			})
			r.began = time.Now()
			c.each(func(rank int) {
				if rank == 1 {
					time.Sleep(testTimeout + absent)
				}
				var entries []*tensorqueue.Entry
				for i := range 40 {
					entries = append(entries, sum(fmt.Sprint(i), make([]byte, 8)))
				}
				early := c.submit(rank, entries[:27]...)
				time.Sleep(4 * time.Millisecond)
				late := c.submit(rank, entries[27:]...)
				for i := range entries {
					done := early
					if i >= 27 {
						done = late
					}
					c.succeeds(done)
				}
			})
			c.shutdown()
			if received := r.take(); len(received) != 40 {
				t.Errorf("the program received %d stalls, want 40: %q", len(received), received)
			}
			var got []string
			for _, entry := range logged.All() {
				got = append(got, fmt.Sprintf("%v: %.8s, more: %v", entry.Time.Sub(r.began), entry.Message,
					entry.ContextMap()["tensors"]))
			}
			want := slices.Repeat([]string{"2.3s: stalled:, more: <nil>"}, q.lines)
			// The number of stalls without a line is logged at the end of the window, or of the job if that
			// is earlier.
			want = append(want, fmt.Sprintf("%v: stalled:, more: %d",
				min(testTimeout+time.Second, testTimeout+absent+4*time.Millisecond), 40-q.lines))
			if !slices.Equal(got, want) {
				t.Errorf("rank 1 submits %v after the stall: got %q\nwant %q", absent, got, want)
			}
		})
	}
}

// If a rank executes an operation for longer than StallWarning, the operation is reported.
func TestStallReportsOfExecution(t *testing.T) {
	inBubbles(t, func(t *testing.T, lockstep bool) {
		var r reports
		c := start(t, 2, func(cfg *engine.Config) {
			cfg.Lockstep, cfg.StallWarning = lockstep, testTimeout
			r.attach(cfg)
		})
		r.began = time.Now()
		zero := c.gather(0, allocate)
		one := c.gather(1, func(n int) []byte {
			time.Sleep(2 * testTimeout) // this takes no real time in the bubble
			return allocate(n)
		})
		c.succeeds(zero, one)
		got := r.take()
		if len(got) == 0 || !strings.Contains(got[0], `tensor "gather" of process set 0 has waited `) ||
			!strings.Contains(got[0], "to finish it") {
			t.Errorf("got %q, want that the gather is not finished", got)
		}
		c.shutdown()
	})
}

// When a tensor has waited for StallShutdown, the job is shut down at all ranks. The error names the tensor
// and the missing rank.
func TestStallShutdown(t *testing.T) {
	inBubbles(t, func(t *testing.T, lockstep bool) {
		c := start(t, 3, func(cfg *engine.Config) {
			cfg.Lockstep, cfg.StallWarning, cfg.StallShutdown = lockstep, time.Second, testTimeout
		})
		began := time.Now()
		c.each(func(r int) {
			var err error
			if r == 1 {
				<-c.engines[r].Ended()
			}
			err = c.wait(c.allreduce(r, "x", make([]byte, 8)))
			var stall *engine.StallError
			const want = `hvd: allreduce "x": the job was shut down: stalled: allreduce "x" of process set 0 has waited 2.3s for rank 1`
			if !errors.As(err, &stall) || !errors.Is(err, engine.ErrShutDown) || err.Error() != want {
				t.Errorf("rank %d: got error %v\nwant %s", r, err, want)
			}
			if took := time.Since(began); took < testTimeout || took > testTimeout+grace(lockstep) {
				t.Errorf("rank %d: took %v, want %v", r, took, testTimeout)
			}
			<-c.engines[r].Ended()
			if err := c.engines[r].Shutdown(c.ctx, engine.Departure{}); !errors.As(err, &stall) ||
				err != c.engines[r].Err() {
				t.Errorf("rank %d: the epoch ended with %v and the shutdown with %v, want the stall", r,
					c.engines[r].Err(), err)
			}
		})
	})
}

// late submits a sum at rank r. The timeout of the sum is testTimeout.
func (c *cluster) late(r int, name string) chan error {
	e := sum(name, make([]byte, 8))
	e.Timeout = testTimeout
	return c.submit(r, e)
}

// wantTimeout checks err, which rank r has returned. The error must say that an operation timed out at the
// rank with the number by, and that the rank with the number missing has failed.
func wantTimeout(t *testing.T, r int, err error, by, missing int) {
	t.Helper()
	var peer *engine.PeerError
	if !errors.As(err, &peer) || !slices.Equal(peer.Ranks, []int{missing}) ||
		!strings.Contains(peer.Reason, "timed out after 2.3s at rank "+fmt.Sprint(by)) {
		t.Errorf("rank %d: got error %v, want a timeout at rank %d that names rank %d", r, err, by, missing)
	}
}

// grace returns how long after the deadline a verdict may come. In lock-step that takes longer, because rank
// 0 learns of a rank's requests only after two cycles.
func grace(lockstep bool) time.Duration {
	if lockstep {
		return 20 * time.Millisecond
	}
	return 0
}

// If an operation is not done within its timeout, the job fails at all ranks, and the error names the rank
// that has not submitted the operation.
func TestOperationTimeout(t *testing.T) {
	both(t, func(t *testing.T, lockstep bool) {
		for by := range 2 { // the operation times out at rank 0 or at another rank
			synctest.Test(t, func(t *testing.T) {
				c := start(t, 3, func(cfg *engine.Config) { cfg.Lockstep = lockstep })
				began := time.Now()
				c.each(func(r int) {
					var done chan error
					switch r {
					case by:
						done = c.late(r, "x")
					case 2:
						done = c.allreduce(r, "y", make([]byte, 8)) // rank 2 never submits x
					default:
						done = c.allreduce(r, "x", make([]byte, 8))
					}
					wantTimeout(t, r, c.wait(done), by, 2)
					if took := time.Since(began); took < testTimeout || took > testTimeout+grace(lockstep) {
						t.Errorf("rank %d: took %v, want %v", r, took, testTimeout)
					}
					wantTimeout(t, r, c.wait(c.allreduce(r, "later", make([]byte, 8))), by, 2)
				})
				c.each(func(r int) {
					wantTimeout(t, r, c.engines[r].Shutdown(c.ctx, engine.Departure{}), by, 2)
				})
			})
		}
	})
}

// In lock-step, an operation waits for the end of the cycle in which it was submitted. If it times out there
// because a rank has stopped, the error names the stopped rank.
func TestOperationTimeoutBeforeACycle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		stopped := func(ctx context.Context, _ func([]byte) error) error {
			<-ctx.Done()
			return nil
		}
		err := againstFrames(t, stopped, func(e *engine.Engine) {
			synctest.Wait() // the first cycle has begun
			x := sum("x", make([]byte, 8))
			x.Timeout = testTimeout
			began := time.Now()
			x.Done = func(error) {
				if took := time.Since(began); took < testTimeout || took > testTimeout+time.Second {
					t.Errorf("took %v, want %v", took, testTimeout)
				}
			}
			if err := e.Submit(x); err != nil {
				t.Error(err)
			}
		})
		wantTimeout(t, 0, err, 0, 1)
	})
}

// In lock-step, an operation that waits for a cycle that is not due yet may time out before the cycle. The
// rank that waits is not at fault.
func TestOperationTimeoutInALongCycle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := start(t, 2, func(cfg *engine.Config) { cfg.Lockstep, cfg.CycleTime = true, 2*time.Second })
		one := c.allreduce(1, "x", make([]byte, 8))
		time.Sleep(2500 * time.Millisecond) // the second cycle shows rank 0 that rank 1 has submitted x
		x := sum("x", make([]byte, 8))
		x.Timeout = time.Second
		c.succeeds(c.submit(0, x), one)
		c.shutdown()
	})
}

// If an operation on a cached tensor times out, the error names the missing rank too.
func TestOperationTimeoutOfACachedTensor(t *testing.T) {
	inBubbles(t, func(t *testing.T, lockstep bool) {
		c := start(t, 3, func(cfg *engine.Config) { cfg.Lockstep = lockstep })
		for range 2 {
			c.each(func(r int) {
				c.succeeds(c.late(r, "x"))
			})
		}
		began := time.Now()
		c.each(func(r int) {
			if r == 1 {
				<-c.engines[r].Ended()
			}
			wantTimeout(t, r, c.wait(c.late(r, "x")), 0, 1)
			if took := time.Since(began); took < testTimeout || took > testTimeout+grace(lockstep) {
				t.Errorf("rank %d: took %v, want %v", r, took, testTimeout)
			}
		})
		c.each(func(r int) { wantTimeout(t, r, c.engines[r].Shutdown(c.ctx, engine.Departure{}), 0, 1) })
	})
}

// If an operation was granted but is not done within its timeout, the error names the rank that does not
// finish it.
func TestOperationTimeoutWhileExecuting(t *testing.T) {
	inBubbles(t, func(t *testing.T, lockstep bool) {
		c := start(t, 3, func(cfg *engine.Config) { cfg.Lockstep = lockstep })
		release := make(chan struct{})
		c.each(func(r int) {
			e := gather("gather", allocate)
			switch r {
			case 0:
				e.Timeout = testTimeout
			case 2:
				e.Allocate = func(n int) []byte {
					<-release
					return allocate(n)
				}
			}
			done := c.submit(r, e)
			if r != 2 {
				err := c.wait(done)
				var peer *engine.PeerError
				if !errors.As(err, &peer) || !slices.Contains(peer.Ranks, 2) ||
					!strings.Contains(err.Error(), `tensor "gather" timed out after 2.3s at rank 0`) {
					t.Errorf("rank %d: got error %v, want a timeout that names rank 2", r, err)
				}
				return
			}
			time.Sleep(2 * testTimeout)
			close(release)
			if err := c.wait(done); err == nil {
				t.Error("rank 2: the operation that was cut off gave no error")
			}
		})
		c.each(func(r int) {
			if err := c.engines[r].Shutdown(c.ctx, engine.Departure{}); err == nil {
				t.Errorf("rank %d: shutdown after the timeout gave no error", r)
			}
		})
	})
}

// If operations end within their timeouts, in any order, the job does not fail later because of these
// timeouts.
func TestOperationsInTime(t *testing.T) {
	inBubbles(t, func(t *testing.T, lockstep bool) {
		c := start(t, 2, func(cfg *engine.Config) { cfg.Lockstep = lockstep })
		c.each(func(r int) {
			for range 3 {
				x, y := c.late(r, "x"), c.late(r, "y")
				if r == 1 {
					time.Sleep(testTimeout / 2)
				}
				c.succeeds(c.late(r, "z"), y, x)
			}
		})
		time.Sleep(3 * testTimeout)
		c.shutdown()
	})
}

// With the maximum timeout, an operation never times out.
func TestOperationWithoutDeadline(t *testing.T) {
	inBubbles(t, func(t *testing.T, lockstep bool) {
		c := start(t, 2, func(cfg *engine.Config) { cfg.Lockstep = lockstep })
		c.each(func(r int) {
			e := sum("x", make([]byte, 8))
			e.Timeout = math.MaxInt64
			if r == 1 {
				time.Sleep(testTimeout)
			}
			c.succeeds(c.submit(r, e))
		})
		c.shutdown()
	})
}

// If the timeout of an operation ends while its grant is in flight to the rank, and the operation does not
// finish after the grant, it still times out.
func TestOperationTimeoutCrossesTheGrant(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const delay = 10 * time.Millisecond
		net := faulty.New(1, &faulty.Rule{Name: "distance", Pairs: faulty.Pair(0, 1), Delay: delay,
			Lanes: faulty.Lane(transport.Control)})
		c := start(t, 3, func(cfg *engine.Config) { cfg.Mesh = net.Wrap(cfg.Rank, cfg.Mesh) })
		release := make(chan struct{})
		c.each(func(r int) {
			e := gather("gather", allocate)
			switch r {
			case 1:
				e.Timeout = testTimeout
			case 2:
				time.Sleep(testTimeout - delay/2) // request before the deadline, grant after it
				e.Allocate = func(n int) []byte {
					<-release
					return allocate(n)
				}
			}
			done := c.submit(r, e)
			if r == 1 {
				err := c.wait(done)
				var peer *engine.PeerError
				if !errors.As(err, &peer) ||
					!strings.Contains(err.Error(), "timed out after 2.3s at rank 1") {
					t.Errorf("rank 1: got error %v, want a timeout", err)
				}
				close(release)
				return
			}
			_ = c.wait(done) // the error is the timeout, or a consequence of the closed engine of rank 1
		})
		for _, e := range c.engines {
			e.Close()
		}
	})
}

// Steps use the same tensor name again and again and take a little less than the heartbeat period. They are
// not reported as one long operation, even if every heartbeat names this tensor.
func TestRepeatedNameIsNoStall(t *testing.T) {
	inBubbles(t, func(t *testing.T, lockstep bool) {
		var reported reports
		c := start(t, 2, func(cfg *engine.Config) {
			reported.attach(cfg)
			cfg.Lockstep, cfg.StallWarning, cfg.StallShutdown = lockstep, 30*time.Second, 30*time.Second
		})
		c.each(func(r int) {
			for step := range 50 {
				e := gather("x", func(n int) []byte {
					long := 990 * time.Millisecond
					if step == 0 {
						long = 2500 * time.Millisecond // from now on heartbeats report the name
					}
					<-time.After(long)
					return allocate(n)
				})
				if err := c.wait(c.submit(r, e)); err != nil {
					t.Errorf("rank %d: step %d: %v", r, step, err)
					return
				}
			}
		})
		if got := reported.take(); len(got) > 0 {
			t.Errorf("got reports %v, want none", got)
		}
		c.shutdown()
	})
}
