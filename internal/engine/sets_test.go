package engine_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/tcp"
	"github.com/gohvd/gohvd/tensorqueue"
)

// withSet returns a function that configures a rank so that a process set of ranks 0 and 1 exists from the
// start.
func withSet(lockstep bool) func(*engine.Config) {
	return func(cfg *engine.Config) {
		cfg.Lockstep = lockstep
		cfg.Sets = []controller.Set{{ID: 1, Ranks: []topo.Rank{0, 1}}}
	}
}

func over(set topo.ProcessSetID, e *tensorqueue.Entry) *tensorqueue.Entry {
	e.Set = set
	return e
}

func removal(set topo.ProcessSetID) *tensorqueue.Entry {
	return &tensorqueue.Entry{Request: message.Request{Kind: message.RemoveProcessSet, Name: "remove",
		Set: set}}
}

func addition(ranks ...topo.Rank) *tensorqueue.Entry {
	return &tensorqueue.Entry{Request: message.Request{Kind: message.AddProcessSet, Name: "add",
		Ranks: ranks}}
}

// isDone reports whether an operation has ended. The operation sends its result to the channel done.
func isDone(done chan error) bool { return len(done) > 0 }

// If a set is removed while its members execute an operation on it, the removal completes at the members only
// after the operation. Operations on the set that were not granted fail with ErrNoProcessSet, and so do later
// operations. Meanwhile, operations on other sets run.
func TestRemovalWaitsForWhatIsGranted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := start(t, 3, withSet(false))
		release := make(chan struct{})
		slow := func(n int) []byte {
			<-release
			return allocate(n)
		}
		granted := []chan error{
			c.submit(0, over(1, gather("granted", slow))),
			c.submit(1, over(1, gather("granted", slow))),
		}
		synctest.Wait()
		waits := c.submit(0, over(1, gather("waits", allocate)))
		synctest.Wait()
		var removals []chan error
		for r := range 3 {
			removals = append(removals, c.submit(r, removal(1)))
		}
		synctest.Wait()
		if isDone(granted[0]) || isDone(granted[1]) || isDone(removals[0]) || isDone(removals[1]) {
			t.Error("an operation was done before the granted operation was released")
		}
		if !isDone(removals[2]) {
			t.Error("the removal at rank 2, which is not a member, waits for the members")
		} else if err := <-removals[2]; err != nil {
			t.Errorf("the removal at rank 2: %v", err)
		}
		if !isDone(waits) {
			t.Error("an operation that was not granted did not end with the removal of its set")
		} else if err := <-waits; !errors.Is(err, engine.ErrNoProcessSet) {
			t.Errorf("an operation that was not granted: got error %v, want ErrNoProcessSet", err)
		}
		if err := c.wait(c.submit(1, over(1, gather("later", allocate)))); !errors.Is(err,
			engine.ErrNoProcessSet) {
			t.Errorf("a later operation: got error %v, want ErrNoProcessSet", err)
		}
		// An operation on the global set runs while the removal waits.
		c.each(func(r int) {
			c.succeeds(c.allreduce(r, "x", make([]byte, 8)))
		})
		close(release)
		for r := range 2 {
			if err := c.wait(granted[r]); err != nil {
				t.Errorf("rank %d: the granted operation: %v", r, err)
			}
			if err := c.wait(removals[r]); err != nil {
				t.Errorf("rank %d: the removal: %v", r, err)
			}
		}
		c.shutdown()
	})
}

// If an operation is queued in a set while the set is being removed, the operation ends exactly once, even if
// the loop has not taken it from the queue. After the end of the operation, the engine does not use its
// entry, because the caller may use the entry for another operation.
func TestRemovalWhileQueueing(t *testing.T) {
	c := start(t, 3, nil)
	for id := topo.ProcessSetID(1); id <= 20; id++ {
		release := make(chan struct{})
		removals := make([]chan error, 3)
		c.each(func(r int) {
			c.succeeds(c.submit(r, addition(0, 1)))
			if r == 2 {
				return // rank 2 is not a member
			}
			// Keep the lane busy, so that it still exists in the turn after the removal.
			busy := over(id, sum("busy", make([]byte, 8)))
			begun := make(chan struct{})
			busy.Done = func(error) {
				close(begun)
				<-release
			}
			if err := c.engines[r].Submit(busy); err != nil {
				t.Errorf("rank %d: %v", r, err)
				return
			}
			<-begun
		})
		var queueing sync.WaitGroup
		queueing.Go(func() {
			for i := 0; c.ctx.Err() == nil; i++ {
				e := over(id, sum(fmt.Sprint(i), make([]byte, 8)))
				e.Done = func(error) { *e = tensorqueue.Entry{Done: e.Done} }
				if err := c.engines[1].Queue(e); err != nil {
					return
				}
			}
		})
		for r := range removals {
			removals[r] = c.submit(r, removal(id))
		}
		queueing.Wait()
		for range 3 { // each operation causes turns of the loop
			c.each(func(r int) {
				if err := c.wait(c.allreduce(r, "x", make([]byte, 8))); err != nil {
					t.Errorf("rank %d: set %d: an operation of the global set: %v", r, id, err)
				}
			})
		}
		close(release)
		for r, done := range removals {
			if err := c.wait(done); err != nil {
				t.Errorf("rank %d: removal of set %d: %v", r, id, err)
			}
		}
		if t.Failed() {
			break
		}
	}
	for _, e := range c.engines {
		e.Close()
	}
}

// If a rank cannot make the backends of an added set, the verdict names this rank and no other.
func TestAdditionFails(t *testing.T) {
	both(t, func(t *testing.T, lockstep bool) {
		c := start(t, 3, func(cfg *engine.Config) {
			cfg.Lockstep = lockstep
			if cfg.Rank == 2 {
				r := tcp.Register(cfg.Mesh, tcp.Config{})
				newBackend := r.New
				r.New = func(set topo.ProcessSetID, ranks []topo.Rank, me int) (ops.Backend, error) {
					if set != topo.Global {
						return nil, errors.New("no shared memory left")
					}
					return newBackend(set, ranks, me)
				}
				cfg.Backends = ops.Registry{r}
			}
		})
		for r, e := range c.engines {
			c.submit(r, addition(0, 2))
			defer e.Close()
		}
		for r, e := range c.engines {
			<-e.Ended()
			if err, want := e.Err(), "rank 2 failed: no shared memory left"; !strings.Contains(err.Error(), want) {
				t.Errorf("rank %d: got error %v, want %q", r, err, want)
			}
		}
	})
}

// If a set is removed and a set with the same members is added, the new set has another ID, and operations
// that waited in the removed set do not affect it.
func TestSetsComeAndGo(t *testing.T) {
	both(t, func(t *testing.T, lockstep bool) {
		c := start(t, 3, withSet(lockstep))
		for id := topo.ProcessSetID(1); id < 30; id++ {
			c.each(func(r int) {
				var left, x chan error
				if r == 0 {
					left = c.submit(0, over(id, sum("left", make([]byte, 8))))
				}
				if r < 2 {
					buf := []byte{byte(r + 1), 0, 0, 0, 0, 0, 0, 0}
					x = c.submit(r, over(id, sum("x", buf)))
					if err := c.wait(x); err != nil || buf[0] != 3 {
						t.Errorf("rank %d: set %d: got %v and error %v", r, id, buf, err)
					}
				} else if err := c.wait(c.submit(r, over(id, sum("x", make([]byte, 8))))); !errors.Is(
					err, engine.ErrNoProcessSet) {
					t.Errorf("rank 2: set %d: got error %v, want ErrNoProcessSet", id, err)
				}
				if err := c.wait(c.submit(r, removal(id))); err != nil {
					t.Errorf("rank %d: removal of set %d: %v", r, id, err)
				}
				if left != nil {
					if err := c.wait(left); !errors.Is(err, engine.ErrNoProcessSet) {
						t.Errorf("set %d: waiting operation: got error %v, want ErrNoProcessSet", id, err)
					}
				}
				e := addition(0, 1)
				if err := c.wait(c.submit(r, e)); err != nil {
					t.Errorf("rank %d: %v", r, err)
				} else if q := e.Response; q.Set != id+1 || !slices.Equal(q.Ranks, []topo.Rank{0, 1}) {
					t.Errorf("rank %d: got set %d of ranks %v, want set %d of ranks 0 and 1", r, q.Set,
						q.Ranks, id+1)
				}
			})
			if t.Failed() {
				break
			}
		}
		c.shutdown()
	})
}

// A rank that shuts down agrees to the removal of process sets, whether it is a member or not and even if it
// still waits for an operation in the set, which then fails. The other ranks remove the set and go on.
func TestRemovalWithoutLeavers(t *testing.T) {
	both(t, func(t *testing.T, lockstep bool) {
		for leaver := range 3 {
			c := start(t, 3, withSet(lockstep))
			var waits chan error
			if leaver < 2 {
				waits = c.submit(leaver, over(1, sum("waits", make([]byte, 8))))
			}
			c.each(func(r int) {
				if r != leaver {
					if err := c.wait(c.submit(r, removal(1))); err != nil {
						t.Errorf("without rank %d: rank %d: %v", leaver, r, err)
					}
				}
				if err := c.engines[r].Shutdown(c.ctx, engine.Departure{}); err != nil {
					t.Errorf("without rank %d: rank %d: shutdown: %v", leaver, r, err)
				}
			})
			if waits != nil {
				if err := c.wait(waits); !errors.Is(err, engine.ErrNoProcessSet) {
					t.Errorf("without rank %d: waiting operation: got error %v, want ErrNoProcessSet", leaver, err)
				}
			}
		}
	})
}

// If a rank dies while an operation on a removed set still runs, every operation ends, and the verdict names
// the dead rank.
func TestDeathDuringARemoval(t *testing.T) {
	both(t, func(t *testing.T, lockstep bool) {
		c := start(t, 3, withSet(lockstep))
		executing := make(chan struct{})
		one := c.submit(1, over(1, gather("granted", func(n int) []byte {
			close(executing)
			<-c.engines[0].Ended() // the operation runs until rank 0 has the verdict
			return allocate(n)
		})))
		zero := c.submit(0, over(1, gather("granted", allocate)))
		<-executing
		removals := []chan error{c.submit(0, removal(1)), c.submit(1, removal(1)), nil}
		c.net.Kill(2)
		c.engines[2].Close()
		for _, done := range []chan error{zero, removals[0], one, removals[1]} {
			err := c.wait(done)
			var peer *engine.PeerError
			if err != nil && (!errors.As(err, &peer) || !slices.Equal(peer.Ranks, []int{2})) {
				t.Errorf("got error %v, want nothing or one that names rank 2", err)
			}
		}
		for _, e := range c.engines[:2] {
			if err := e.Shutdown(c.ctx, engine.Departure{}); err == nil {
				t.Error("shutdown after the death gave no error")
			}
		}
	})
}

// No tensor of a group completes before all ranks have submitted all tensors of the group, whether the
// tensors are cached or not.
func TestGroupWaitsForItsLast(t *testing.T) {
	both(t, func(t *testing.T, lockstep bool) {
		c := start(t, 2, func(cfg *engine.Config) { cfg.Lockstep = lockstep })
		part := func(name string) *tensorqueue.Entry {
			e := sum(name, make([]byte, 8))
			e.Request.Group, e.Request.GroupSize = "g", 2
			return e
		}
		pass := func(name string) {
			c.each(func(r int) {
				c.succeeds(c.allreduce(r, name, make([]byte, 8)))
			})
		}
		for range 3 {
			var dones []chan error
			dones = append(dones, c.submit(0, part("a")), c.submit(0, part("b")), c.submit(1, part("a")))
			// If the coordinator granted the group too early, the group would run before or together with
			// these two operations.
			pass("x")
			pass("x")
			for _, done := range dones {
				if isDone(done) {
					t.Errorf("part of the group is done: %v", <-done)
				}
			}
			dones = append(dones, c.submit(1, part("b")))
			c.succeeds(dones...)
		}
		c.shutdown()
	})
}

// If no backend can execute one tensor of a group, all tensors of the group end with a MismatchError, and
// their names can be used again.
func TestGroupThatCannotRun(t *testing.T) {
	both(t, func(t *testing.T, lockstep bool) {
		c := start(t, 2, func(cfg *engine.Config) {
			cfg.Lockstep, cfg.MaxResultBytes, cfg.FusionThresholdBytes = lockstep, 1000, 0
		})
		part := func(name string, rows int64) *tensorqueue.Entry {
			return &tensorqueue.Entry{
				Request: message.Request{Kind: message.Allgather, Name: name, DType: tensor.Uint8,
					Shape: tensor.Shape{rows}, Group: "g", GroupSize: 3},
				Input:    make([]byte, rows),
				Allocate: allocate,
			}
		}
		c.each(func(r int) {
			for _, round := range []struct {
				rows int64
				fits bool
			}{{600, false}, {100, true}, {600, false}} {
				done := c.submit(r, part("a", 10), part("b", round.rows), part("c", 10))
				for range 3 {
					err := c.wait(done)
					var refused *engine.MismatchError
					if round.fits && err != nil || !round.fits && (!errors.As(err, &refused) ||
						!strings.Contains(err.Error(), "1200 bytes, want at most 1000")) {
						t.Errorf("rank %d: %d rows: got error %v", r, round.rows, err)
					}
				}
			}
		})
		c.shutdown()
	})
}

// Submit queues all given entries or none of them. If two entries have the same name, or if the process set
// does not exist, Submit returns an error, and the names are free afterwards.
func TestSubmitManyOrNone(t *testing.T) {
	c := start(t, 1, nil)
	entries := []*tensorqueue.Entry{sum("a", make([]byte, 8)), sum("a", make([]byte, 8))}
	for _, e := range entries {
		e.Done = func(err error) { t.Errorf("Done was called with %v", err) }
	}
	var (
		dup *tensorqueue.DuplicateNameError
		op  *engine.OpError
	)
	if err := c.engines[0].Submit(entries...); !errors.As(err, &op) || !errors.As(err, &dup) ||
		dup.Name != "a" {
		t.Errorf("got error %v, want a DuplicateNameError for a", err)
	}
	if err := c.engines[0].Submit(over(7, entries[0])); !errors.As(err, &op) ||
		!errors.Is(err, engine.ErrNoProcessSet) || op.Tensor != "a" {
		t.Errorf("got error %v, want ErrNoProcessSet", err)
	}
	if err := c.wait(c.allreduce(0, "a", make([]byte, 8))); err != nil {
		t.Errorf("the name is not free: %v", err)
	}
	c.shutdown()
}
