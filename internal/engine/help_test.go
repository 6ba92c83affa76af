package engine_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/tensorqueue"
	"github.com/gohvd/gohvd/transport/mem"
)

// do submits an entry as a caller does that waits at once, and reports whether it was done when Help returned.
func (c *cluster) do(r int, entry *tensorqueue.Entry) (helped bool) {
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
	c.engines[r].Help(c.ctx, done)
	select {
	case <-done:
		helped = true
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
	return helped
}

func barrier(name string) *tensorqueue.Entry {
	return &tensorqueue.Entry{Request: message.Request{Kind: message.Barrier, Name: name}}
}

// Who waits does the work.
func TestHelp(t *testing.T) {
	c := startOn(t, mem.NewPolled(3), 3, func(cfg *engine.Config) { cfg.Spin = time.Second })
	helped := make([]int, 3)
	c.each(func(r int) {
		for range 100 {
			if c.do(r, barrier("b")) {
				helped[r]++
			}
			c.do(r, sum("s", make([]byte, 8)))
		}
	})
	for r, n := range helped {
		if n < 90 { // else the background loop has, because it had begun before
			t.Errorf("rank %d: 100 barriers, %d of them done by who waited", r, n)
		}
	}
	c.shutdown()
}

// Goroutines that wait, and the loop that serves those who do not, take the wheel from each other.
func TestManyHelp(t *testing.T) {
	const n, goroutines, rounds = 2, 4, 200
	c := startOn(t, mem.NewPolled(n), n, nil)
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
						if err := c.wait(c.allreduce(r, name, make([]byte, 8))); err != nil {
							t.Error(err)
						}
					}
				}
			})
		}
		wg.Wait()
	})
	c.shutdown()
}

// Who helps stops when its context ends, and when nothing happens for a while; what it waits for goes on without it.
func TestHelpEnds(t *testing.T) {
	c := startOn(t, mem.NewPolled(2), 2, func(cfg *engine.Config) { cfg.Spin = 10 * time.Millisecond })
	done := make(chan struct{})
	entry := sum("late", make([]byte, 8))
	entry.Done = func(err error) {
		if err != nil {
			t.Error(err)
		}
		close(done)
	}
	if err := c.engines[1].Queue(entry); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(c.ctx)
	cancel()
	for _, ctx := range []context.Context{ctx, c.ctx} {
		c.engines[1].Help(ctx, done)
		select {
		case <-done:
			t.Fatal("done without rank 0")
		default:
		}
	}
	c.do(0, sum("late", make([]byte, 8)))
	select {
	case <-done:
	case <-c.ctx.Done():
		t.Error("not done")
	}
	c.shutdown()
	c.engines[1].Help(c.ctx, nil) // there is nothing to help with any more
}

// The end of an engine reaches a goroutine that helps.
func TestCloseWhileHelping(t *testing.T) {
	c := startOn(t, mem.NewPolled(2), 2, func(cfg *engine.Config) { cfg.Spin = time.Hour })
	left := make(chan struct{})
	entry := sum("x", make([]byte, 8))
	answered := make(chan struct{})
	entry.Done = func(error) { close(answered) }
	if err := c.engines[1].Queue(entry); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(left)
		c.engines[1].Help(context.Background(), answered)
	}()
	for before := c.engines[1].Looks(); c.engines[1].Looks() < before+100; {
	}
	c.engines[1].Close()
	<-left
	<-answered
	c.engines[0].Close()
}
