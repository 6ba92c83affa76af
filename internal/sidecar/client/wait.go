package client

import (
	"context"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/sidecar/wire"
)

const (
	// spinTime is how long a thread polls the state of its operation before it sleeps.
	spinTime = 50 * time.Microsecond
	// sleepTime is the longest sleep of a thread that waits. Every change that ends the wait wakes it before.
	sleepTime = time.Hour
)

// NotifyLater implements rank.Remote.
func (c *Client) NotifyLater() {
	c.using.RLock()
	defer c.using.RUnlock()
	c.notify(true)
}

// notify makes the sidecar read the submissions: at once, or within a millisecond if soon is set.
func (c *Client) notify(soon bool) {
	if c.ring.quiet(soon) {
		return
	}
	c.mu.Lock()
	send := c.over == nil && c.ring.doorbell(soon)
	c.mu.Unlock()
	if send {
		_ = c.write([]byte{0}, -1) // after an error, read ends all operations
	}
}

// Flush implements rank.Remote. If of is nil, it ends all operations that are done.
func (c *Client) Flush(of any) {
	c.using.RLock()
	defer c.using.RUnlock()
	if c.Over() != nil {
		return
	}
	c.notify(false)
	if of == nil {
		c.sweep()
	} else if k := c.calls.find(of); k != nil && c.done(k) {
		c.finish(k, nil, nil)
	}
}

// Drive implements rank.Remote.
func (c *Client) Drive(ctx context.Context, of any, done func() bool) {
	if done() {
		return
	}
	c.using.RLock()
	defer c.using.RUnlock()
	if c.Over() != nil {
		<-c.ended
		return
	}
	// While a thread waits, the sidecar drives the engine. So waiting is set before the sidecar is notified.
	c.ring.waiting.Add(1)
	defer c.ring.waiting.Add(^uint64(0))
	c.notify(false)
	if k := c.calls.find(of); k != nil && c.await(ctx, k, done) {
		return
	}
	if !done() {
		c.awaitAny(ctx, done)
	}
}

// await waits until k has finished, done returns true or ctx ends. It reports whether the wait is over, which
// it is not if done returns false although k has finished.
func (c *Client) await(ctx context.Context, k *call, done func() bool) bool {
	if !k.replies() {
		for until := time.Now().Add(spinTime); !c.look(k) && time.Now().Before(until); {
			shmem.Yield()
		}
	}
	if done() {
		return true
	}
	state := c.ring.state(k.index())
	if ctx.Done() != nil {
		stop := context.AfterFunc(ctx, func() {
			c.using.RLock()
			defer c.using.RUnlock()
			if c.Over() == nil && state.CompareAndSwap(wire.StateAwaited, wire.StatePending) {
				shmem.Wake(word(state))
			}
		})
		defer stop()
	}
	for !c.look(k) {
		if done() || ctx.Err() != nil {
			return true
		}
		// If k finishes now, its state may already belong to another operation. So k is checked once more
		// after the state was changed.
		if (state.CompareAndSwap(wire.StatePending, wire.StateAwaited) ||
			state.Load() == wire.StateAwaited) &&
			!k.finished.Load() && ctx.Err() == nil {
			shmem.Wait(word(state), wire.StateAwaited, sleepTime)
		}
	}
	return done()
}

// look reports whether k has finished. If it is done, look finishes it.
func (c *Client) look(k *call) bool {
	if k.finished.Load() || c.done(k) {
		c.finish(k, nil, nil) // if another goroutine finishes k, this waits for it
		return true
	}
	return false
}

// replies reports whether the sidecar answers k in a frame if k succeeds.
func (k *call) replies() bool {
	if k.kind.SendsRows() || k.kind == message.Join ||
		k.message != nil && k.kind == message.Recv && k.message.Peer < 0 {
		return true
	}
	for i := range k.tensors {
		if k.tensors[i].outMode == allocated {
			return true
		}
	}
	return false
}

// awaitAny waits until done returns true or ctx ends. Meanwhile it finishes all operations that are done.
func (c *Client) awaitAny(ctx context.Context, done func() bool) {
	c.ring.watchers.Add(1)
	defer c.ring.watchers.Add(^uint32(0))
	if ctx.Done() != nil {
		defer context.AfterFunc(ctx, func() {
			c.using.RLock()
			defer c.using.RUnlock()
			if c.Over() == nil {
				c.ring.changed()
			}
		})()
	}
	for {
		before := c.ring.changes.Load()
		c.sweep()
		if done() || ctx.Err() != nil {
			return
		}
		if c.Over() != nil {
			<-c.ended
			return
		}
		shmem.Wait(word(c.ring.changes), before, sleepTime)
	}
}
