package engine_test

import (
	"context"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport/mem"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/tensorqueue"
)

// do submits an entry at rank r and waits for it, as a blocking call does. It reports whether the operation
// was already done when Drive returned.
func (c *cluster) do(r int, entry *tensorqueue.Entry) (driven bool) {
	done := make(chan struct{})
	var failed error
	entry.Done = func(err error) {
		failed = err
		close(done)
	}
	if err := c.engines[r].Queue(entry); err != nil {
		c.t.Errorf("rank %d: %q: %v", r, entry.Request.Name, err)
		return false
	}
	c.engines[r].Drive(c.ctx, isClosed(done))
	select {
	case <-done:
		driven = true
	default:
	}
	select {
	case <-done:
	case <-c.ctx.Done():
		failed = c.ctx.Err()
	}
	if failed != nil {
		c.t.Errorf("rank %d: %q: %v", r, entry.Request.Name, failed)
	}
	return driven
}

// isClosed returns a function that reports whether the channel c is closed.
func isClosed(c <-chan struct{}) func() bool {
	return func() bool {
		select {
		case <-c:
			return true
		default:
			return false
		}
	}
}

func never() bool { return false }

func barrier(name string) *tensorqueue.Entry {
	return &tensorqueue.Entry{Request: message.Request{Kind: message.Barrier, Name: name}}
}

// A caller that waits for its operation drives the loop. Most of its barriers are done when Drive returns.
func TestDrive(t *testing.T) {
	c := startOn(t, mem.New(3), 3, func(cfg *engine.Config) { cfg.Spin = time.Second })
	driven := make([]int, 3)
	c.each(func(r int) {
		for range 100 {
			if c.do(r, barrier("b")) {
				driven[r]++
			}
			c.do(r, sum("s", make([]byte, 8)))
		}
	})
	for r, n := range driven {
		if n < 50 { // BackgroundThreadLoop completes the rest, which is more on a busy machine
			t.Errorf("rank %d: %d of 100 barriers were done when Drive returned, want at least 50", r, n)
		}
	}
	c.shutdown()
}

// Several goroutines drive the loop at the same time, and other goroutines wait without driving it, so that
// they need BackgroundThreadLoop. All operations complete.
func TestManyDrive(t *testing.T) {
	const n, goroutines, rounds = 2, 4, 200
	c := startOn(t, mem.New(n), n, nil)
	c.each(func(r int) {
		var wg sync.WaitGroup
		for g := range goroutines {
			wg.Go(func() {
				name := string(rune('a' + g))
				for i := range rounds {
					switch (i + g) % 3 {
					case 0:
						c.do(r, sum(name, make([]byte, 8*(1+i))))
					case 1:
						c.do(r, barrier(name))
					case 2:
						c.succeeds(c.allreduce(r, name, make([]byte, 8)))
					}
				}
			})
		}
		wg.Wait()
	})
	c.shutdown()
}

// Drive returns if its context ends, DriveUntil at its deadline, and both if nothing happens for the poll
// budget. In all cases the operation of the caller completes later without the caller's help.
func TestDriveEnds(t *testing.T) {
	c := startOn(t, mem.New(4), 4, func(cfg *engine.Config) {
		cfg.Spin = time.Hour
		if cfg.Rank == 2 {
			cfg.Spin = 10 * time.Millisecond
		}
	})
	canceled, cancel := context.WithCancel(c.ctx)
	cancel()
	var late [4]chan error
	for r, drive := range [4]func(*engine.Engine){
		1: func(e *engine.Engine) { e.Drive(canceled, never) },
		2: func(e *engine.Engine) { e.Drive(c.ctx, never) },
		3: func(e *engine.Engine) { e.DriveUntil(time.Now().Add(10*time.Millisecond), never) },
	} {
		if drive == nil {
			continue
		}
		entry := sum("late", make([]byte, 8))
		late[r] = make(chan error, 1)
		entry.Done = func(err error) { late[r] <- err }
		if err := c.engines[r].Queue(entry); err != nil {
			t.Fatal(err)
		}
		drive(c.engines[r])
		if len(late[r]) > 0 {
			t.Fatalf("rank %d is done without rank 0", r)
		}
	}
	c.do(0, sum("late", make([]byte, 8)))
	for r := 1; r < 4; r++ {
		c.succeeds(late[r])
	}
	c.shutdown()
	c.engines[1].Drive(c.ctx, never) // after the shutdown, Drive returns at once
}

// oftenEnough is a number of operations. If each of them waited for a heartbeat, which takes half a second on
// average, together they would take longer than a test may run.
const oftenEnough = 200

// Even if a rank polls for a very long time, it notifies parked peers of the frames that it has sent. So
// operations with a parked peer complete promptly.
func TestDriverNotifiesPeers(t *testing.T) {
	c := startOn(t, mem.New(2), 2, func(cfg *engine.Config) {
		cfg.Spin = time.Microsecond
		if cfg.Rank == 1 {
			cfg.Spin = time.Hour
		}
	})
	for range oftenEnough {
		early := c.allreduce(0, "x", make([]byte, 8))
		<-time.After(2 * time.Millisecond) // rank 0 parks in this time
		c.do(1, sum("x", make([]byte, 8)))
		if err := c.wait(early); err != nil {
			t.Fatal(err)
		}
	}
	c.shutdown()
}

// A driver submits an operation with a timeout of 2 ms, and Drive returns before the timeout ends. The
// operation still times out promptly, because the deadline wakes the parked BackgroundThreadLoop.
func TestDriveKeepsDeadlines(t *testing.T) {
	end := time.Now().Add(deadline)
	for range oftenEnough {
		c := startOn(t, mem.New(2), 2, func(cfg *engine.Config) { cfg.Spin = time.Microsecond })
		entry := sum("never", make([]byte, 8))
		entry.Timeout = 2 * time.Millisecond
		<-time.After(2 * time.Millisecond) // the loops park in this time
		done := make(chan error, 1)
		entry.Done = func(err error) { done <- err }
		if err := c.engines[1].Queue(entry); err != nil {
			t.Fatal(err)
		}
		c.engines[1].Drive(c.ctx, never)
		if err := c.wait(done); err == nil {
			t.Fatal("got no error")
		}
		c.each(func(r int) { c.engines[r].Close() })
		if time.Now().After(end) {
			t.Fatal("the operations timed out only at heartbeats")
		}
	}
}

// Drive returns when the engine is closed, even if the poll budget is an hour.
func TestCloseWhileDriving(t *testing.T) {
	c := startOn(t, mem.New(2), 2, func(cfg *engine.Config) { cfg.Spin = time.Hour })
	left := make(chan struct{})
	entry := sum("x", make([]byte, 8))
	answered := make(chan struct{})
	entry.Done = func(error) { close(answered) }
	if err := c.engines[1].Queue(entry); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(left)
		c.engines[1].Drive(context.Background(), isClosed(answered))
	}()
	for before := c.engines[1].Polls(); c.engines[1].Polls() < before+100; {
	}
	c.engines[1].Close()
	<-left
	<-answered
	c.engines[0].Close()
}

// gated is a backend whose operations end when the channel is closed.
type gated struct {
	ops.Backend
	open    <-chan struct{}
	started chan struct{}
}

func (g gated) Start(ops.Operation) error {
	close(g.started)
	return nil
}

func (g gated) Step(context.Context, bool) (ops.Progress, error) {
	if isClosed(g.open)() {
		return ops.Finished, nil
	}
	return ops.Waiting, nil
}

func (gated) Close() {}

// An operation ends between two turns of a driver while its rank waits to leave. A turn follows at once, so
// that Shutdown does not wait for the next heartbeat, which is minutes away.
func TestTurnFollowsLastOperation(t *testing.T) {
	open := make(chan struct{})
	b := gated{open: open, started: make(chan struct{})}
	c := startOn(t, mem.New(1), 1, func(cfg *engine.Config) {
		cfg.Spin, cfg.LivenessTimeout = time.Hour, time.Hour
		create := func(topo.ProcessSetID, []topo.Rank, int) (ops.Backend, error) { return b, nil }
		plan := func([]topo.Rank, *message.Response, int64, *message.Tuning) (message.Algorithm, error) {
			return message.Ring, nil
		}
		cfg.Backends = ops.Registry{{ID: message.SHM, Plan: plan, New: create}}
	})
	e := c.engines[0]
	entry := sum("x", make([]byte, 8))
	entry.Done = func(error) {}
	if err := e.Queue(entry); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	left := make(chan struct{})
	wg.Go(func() { e.Drive(c.ctx, isClosed(left)) })
	<-b.started
	wg.Go(func() {
		defer close(left)
		c.shutdown()
	})
	// The loop takes the shutdown in this time.
	for before := e.Polls(); c.ctx.Err() == nil && e.Polls() < before+10000; {
		runtime.Gosched()
	}
	close(open)
	<-left
}
