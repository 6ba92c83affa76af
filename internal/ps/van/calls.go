package van

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gohvd/gohvd/internal/ps/pspb"
)

// calls are the calls of this process that wait for an answer of the scheduler.
type calls struct {
	mu      sync.Mutex // guards what follows; no other lock is taken while it is held
	last    int64      // number of calls so far
	pending map[int64]chan error
	refused bool // the van leaves the job
}

// add adds a call and returns its number and the channel for its result.
func (c *calls) add() (id int64, done chan error, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.refused {
		return 0, nil, ErrStopped
	}
	if c.pending == nil {
		c.pending = make(map[int64]chan error)
	}
	c.last++
	done = make(chan error, 1)
	c.pending[c.last] = done
	return c.last, done, nil
}

// withdrawTime is how long a call whose time limit has passed waits for the scheduler to say which nodes are
// missing.
const withdrawTime = 5 * time.Second

// ask sends a control message of a node of this process to the scheduler on the link l, and waits for the
// answer until ctx ends. Then the node withdraws. If the time limit of ctx has passed, the error says which
// nodes are missing. If the error wraps ErrLeft, the scheduler has left.
func (c *calls) ask(ctx context.Context, l *link, customer int, question *pspb.Control) error {
	id, done, err := c.add()
	if err != nil {
		return err
	}
	send := func(withdraw bool) error {
		m := controlMessage(proto.CloneOf(question))
		m.Header.Control.Barrier, m.Header.Control.Withdraw = id, withdraw
		m.Header.Request, m.Header.CustomerId = true, int32(customer)
		return l.reply(m)
	}
	if err = send(false); err == nil {
		select {
		case err = <-done:
			return err
		case <-ctx.Done():
			err = context.Cause(ctx)
			gone := send(true) != nil
			if gone || !isLate(ctx) || question.Command == pspb.Command_HEARTBEAT {
				break
			}
			select {
			case answer := <-done:
				if answer == nil { // all have come meanwhile
					return nil
				}
				err = fmt.Errorf("%w: %w", err, answer)
			case <-time.After(withdrawTime):
			}
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.pending, id)
	if c.refused { // then the scheduler has closed the connection because this process leaves
		return ErrStopped
	}
	return err
}

// answer handles an answer of the scheduler.
func (c *calls) answer(h *pspb.Header) {
	var err error
	switch gone := h.Control.Nodes; {
	case len(gone) > 0:
		err = &NodeError{int(gone[0].Id), errors.New(gone[0].Gone)}
	case h.Error != "":
		err = errors.New(h.Error)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if done := c.pending[h.Control.Barrier]; done != nil { // else the context of the call has ended
		delete(c.pending, h.Control.Barrier)
		done <- err
	}
}

// any reports whether a call waits.
func (c *calls) any() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.pending) > 0
}

// fail ends all calls that wait with err.
func (c *calls) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for id, done := range c.pending {
		done <- err
		delete(c.pending, id)
	}
}

// refuse makes all later calls fail with ErrStopped.
func (c *calls) refuse() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.refused = true
}

// Barrier waits until all nodes of the group have called Barrier, or until ctx ends. If a node of the group
// has died or left, the error says so. customer is the number of the node in this process. The node must be
// in the group. A group of one node needs no barrier.
func (v *Van) Barrier(ctx context.Context, customer, group int) error {
	if len(Members(group, v.cfg.NumServers, v.cfg.NumWorkers)) == 1 && slices.Contains(v.IDs(), group) {
		return nil
	}
	return v.ask(ctx, fmt.Sprintf("barrier of group %d", group), customer,
		&pspb.Control{Command: pspb.Command_BARRIER, BarrierGroup: int32(group)})
}

// Clock tells the scheduler that a worker of this process has ended n iterations, and waits until no worker
// has ended fewer than n minus Config.Staleness, or until ctx ends. If a worker that is behind dies, the
// error says so.
func (v *Van) Clock(ctx context.Context, customer int, n int64) error {
	return v.ask(ctx, fmt.Sprintf("clock %d", n), customer,
		&pspb.Control{Command: pspb.Command_CLOCK, Clock: n})
}

// EndClock tells the scheduler that a worker of this process ends no more iterations. It does not wait.
func (v *Van) EndClock(customer int) error {
	l, err := v.link(SchedulerID)
	if err != nil {
		return err
	}
	m := controlMessage(&pspb.Control{Command: pspb.Command_CLOCK, Clock: noMore, Withdraw: true})
	m.Header.Request, m.Header.CustomerId = true, int32(customer)
	return l.reply(m)
}

// ask sends a control message of a node of this process to the scheduler, and waits for the answer until ctx
// ends. Then the node withdraws.
func (v *Van) ask(ctx context.Context, what string, customer int, c *pspb.Control) error {
	l, err := v.link(SchedulerID)
	if err == nil {
		err = v.calls.ask(ctx, l, customer, c)
	}
	if err == nil || err == ErrStopped {
		return err
	}
	if errors.Is(err, ErrLeft) {
		if p, why := v.members.died(); p.ID != 0 {
			err = nodeError(p.ID, why)
		}
	}
	return fmt.Errorf("%s: %w", what, err)
}
