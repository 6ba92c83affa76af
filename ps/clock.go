package ps

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/config"
)

// errEnded is the error of a push or pull after a call of Clock that has not returned nil.
var errEnded = errors.New("the worker has ended its iteration: call Clock until it returns nil")

// maxUntold is the maximum number of failed pushes of a worker that are logged when it leaves.
const maxUntold = 16

// workerClock counts the iterations that a worker of this process has ended, and its pushes and pulls in the
// current one.
type workerClock struct {
	mu      sync.Mutex
	now     int64
	ended   bool          // the current iteration has ended, but the next one has not begun
	calling bool          // a call of Clock is in progress
	pending int           // pushes and pulls that have not completed
	idle    chan struct{} // closed when pending is 0; nil if no call waits
	failed  error         // the first error of a push in this iteration
	untold  []*Request    // pushes that have failed, unless Clock has returned an error since (reportPushes)
}

// beginRequest counts a push or pull, and returns the number of the current iteration.
func (c *workerClock) beginRequest() (int64, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return 0, errEnded
	}
	c.pending++
	return c.now, nil
}

// endRequest records that a push or pull has completed.
func (c *workerClock) endRequest(r *Request, push bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pending--
	if push && c.failed == nil {
		c.failed = err
	}
	if push && err != nil && r.callback == nil && !r.told.Load() {
		if len(c.untold) >= maxUntold {
			c.untold = slices.DeleteFunc(c.untold, func(r *Request) bool { return r.told.Load() })
		}
		if len(c.untold) < maxUntold || errors.Is(err, ErrFinalized) {
			c.untold = append(c.untold, r)
		}
	}
	if c.pending == 0 && c.idle != nil {
		close(c.idle)
		c.idle = nil
	}
}

// beginCall begins a call of Clock.
func (c *workerClock) beginCall() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.calling {
		return errors.New("another call has not returned")
	}
	c.calling = true
	return nil
}

// endCall ends a call of Clock. If it is successful, the next iteration begins.
func (c *workerClock) endCall(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calling = false
	if err == nil {
		c.now++
		c.ended = false
	}
}

// endIteration ends the current iteration, and waits until its pushes and pulls have completed. If a push has
// failed, the iteration goes on, and endIteration returns the error.
func (c *workerClock) endIteration(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended = true
	if err := c.awaitIdle(ctx, nil); err != nil {
		return err
	}
	return c.takeFailure()
}

// awaitIdle waits until the pushes and pulls have completed, ctx ends, or the channel done is closed. The
// caller holds mu.
func (c *workerClock) awaitIdle(ctx context.Context, done <-chan struct{}) error {
	for c.pending > 0 {
		if c.idle == nil {
			c.idle = make(chan struct{})
		}
		idle, n := c.idle, c.pending
		c.mu.Unlock()
		select {
		case <-idle:
			c.mu.Lock()
		case <-ctx.Done():
			c.mu.Lock()
			return fmt.Errorf("%d pushes and pulls have not completed: %w", n, context.Cause(ctx))
		case <-done:
			c.mu.Lock()
			return fmt.Errorf("%d pushes and pulls have not completed", n)
		}
	}
	return nil
}

// takeFailure returns the error of a push of this iteration, once. The iteration then goes on. The caller
// holds mu.
func (c *workerClock) takeFailure() error {
	err := c.failed
	c.failed = nil
	if err != nil {
		c.ended, c.untold = false, nil
	}
	return err
}

// synchronous reports whether workers wait for slower ones.
func (p *postoffice) synchronous() bool { return p.set.PS.Staleness != config.Unset }

// Clock ends the current iteration of a worker. The mode of the job (HVD_STALENESS) decides what it waits
// for.
//
// - Asynchronous: it does not wait. - Stale-synchronous with the bound s: it waits until all pushes and pulls
// of the worker have completed, and until no worker has ended more than s iterations less than this one. -
// Bulk-synchronous: the same with s = 0.
//
// If a push of the iteration has failed, Clock returns its error, and the iteration goes on. Clock fails if a
// worker that it waits for dies, if ctx ends, or after HVD_OPERATION_TIMEOUT_SECONDS. The next iteration has
// then not begun, and pushes and pulls fail until a further call of Clock returns nil. The other workers do
// not wait for a worker that leaves the job.
func (n *Node) Clock(ctx context.Context) error {
	if n.Role() != Worker {
		return &UsageError{fmt.Errorf("ps: clock: this process is a %s", n.Role())}
	}
	c := &n.clocks[n.customer]
	err := c.beginCall()
	if err == nil {
		err = n.endIteration(ctx, n.customer, c)
		c.endCall(err)
	}
	if err != nil {
		return fmt.Errorf("ps: clock: %w", public(err))
	}
	return nil
}

// endIteration does what Clock does, except for the count.
func (p *postoffice) endIteration(ctx context.Context, customer int, c *workerClock) error {
	if !p.synchronous() {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.takeFailure()
	}
	if limit := p.set.OperationTimeout; limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, limit, errTimeout)
		defer cancel()
	}
	p.van.Flush()
	if err := c.endIteration(ctx); err != nil {
		return err
	}
	return p.van.Clock(ctx, customer, c.now+1)
}

// settle waits until the pushes and pulls of this process have completed, in the synchronous modes: when the
// scheduler knows that a worker ends no more iterations, servers may refuse them.
func (p *postoffice) settle(ctx context.Context) {
	if p.Role() != Worker || !p.synchronous() {
		return
	}
	p.van.Flush()
	for i := range p.clocks {
		c := &p.clocks[i]
		c.mu.Lock()
		_ = c.awaitIdle(ctx, p.van.Done()) // those that remain fail
		c.mu.Unlock()
	}
}

// reportPushes logs the pushes of this process that have failed, if no Wait, Done, callback, Clock or
// returned error has told the program. All requests have completed.
func (p *postoffice) reportPushes() {
	unanswered := 0
	for i := range p.clocks {
		c := &p.clocks[i]
		c.mu.Lock()
		untold := c.untold
		c.untold = nil
		c.mu.Unlock()
		for _, r := range untold {
			switch {
			case r.told.Load():
			case errors.Is(r.err, ErrFinalized):
				unanswered++
			default:
				p.log.Warn("ps: a push failed and the program did not wait for it", zap.Error(r.err))
			}
		}
	}
	if unanswered > 0 {
		p.log.Warn("ps: this node has left before pushes were answered, and the program did not wait for them",
			zap.Int("pushes", unanswered))
	}
}

// endClocks tells the scheduler that the workers of this process end no more iterations.
func (p *postoffice) endClocks() {
	if p.Role() != Worker || !p.synchronous() {
		return
	}
	for customer := range p.clocks {
		_ = p.van.EndClock(customer) // an error means that the scheduler has gone
	}
}

// heldPush is a push of the current iteration of a bulk-synchronous job.
type heldPush struct {
	order  [4]int64 // the places of the worker, the app and the request in the order
	places *resolved
	vals   []byte
	init   bool
}

// iteration has the pushes of the current iteration of a bulk-synchronous job. They are applied when the
// first request of the next iteration arrives, because until then workers pull the values of the current one.
type iteration struct {
	number int64
	pushes []heldPush
}

// hold adds a push. It copies its values.
func (it *iteration) hold(app int, meta *KVMeta, p heldPush) {
	p.order = [4]int64{int64(meta.Sender), int64(meta.Customer), int64(app), meta.Timestamp}
	vals := zeros(len(p.vals))
	copy(vals, p.vals)
	p.vals = vals
	it.pushes = append(it.pushes, p)
}

// begin is called for a request of the given iteration. It applies the pushes of the one before, in the order
// of the workers.
func (it *iteration) begin(s *store, number int64) error {
	if number < it.number {
		return fmt.Errorf("the request is of iteration %d, but iteration %d has begun", number, it.number)
	}
	if number == it.number {
		return nil
	}
	slices.SortFunc(it.pushes, func(a, b heldPush) int { return slices.Compare(a.order[:], b.order[:]) })
	for _, p := range it.pushes {
		s.push(p.places, p.vals, p.init)
	}
	clear(it.pushes)
	it.number, it.pushes = number, it.pushes[:0]
	return nil
}
