package tcp

import (
	"context"
	"errors"
	"fmt"
	"runtime"

	"github.com/gohvd/gohvd/ops"
)

// schedule holds what this rank does in an operation: a list of actions, which run one after another
// (Hoefler, Lumsdaine and Rehm, Implementation and performance analysis of non-blocking collective operations
// for MPI, 2007). An action that has to wait for another rank is tried again in the next step. So any
// goroutine can run any step.
//
// An algorithm appends actions with the methods conn, send, receive, flush, await and compute of Backend. A
// comment that says what a function of an algorithm sends or receives describes the actions that it appends.
// A short algorithm appends all actions when the operation starts. A long one has a function that appends the
// actions of one round. It is called when all actions of the round before are done, so it can use what they
// have received.
type schedule struct {
	actions []action
	next    int                       // the index of the action that runs
	plan    func(*Backend, int) error // appends the actions of a round
	rounds  int                       // the number of rounds
	round   int                       // the number of the next round
	polled  int                       // the number of polls since the action that runs has made progress
	// received is the number of bytes that have arrived since a step last returned Moving because of them.
	received int
}

// action is an entry of a schedule. Its fields have these meanings if its kind uses them.
type action struct {
	kind     actionKind
	c        *stream
	position uint64
	compute  func(*Backend, *action) // the fields below are its arguments
	buf      []byte                  // this rank's data
	in       []byte                  // data of another rank
	r        byteRange
	d        int // the distance between this rank and its partner
}

type actionKind uint8

const (
	// connects makes the channel of c.
	connects actionKind = iota
	// sends passes buf to c. It does not wait.
	sends
	// receives reads from c until buf is full. buf is the part that is not filled yet.
	receives
	// awaits waits until the bytes before position in the stream c have left.
	awaits
	// computes calls compute.
	computes
)

// polls is the number of times that a rank polls its channels before it blocks. With a yield after each poll,
// this takes about 50 us if no other thread needs the processor. If there are more ranks than cores, a yield
// runs the rank that sends the data. A rank that blocks takes more processor time: the network poller, the
// wake-up of a thread, and the runtime's monitor, which wakes up every 20 us after the process was idle.
const polls = 64

const (
	// movingBytes is the number of received bytes after which a step that may not wait returns Moving where
	// it would return Waiting. A caller hands an operation over to the lane if it has been Waiting for a
	// while, so it keeps a large operation as long as data arrives. Smaller operations end before that, and a
	// turn after each of their steps would cost more.
	movingBytes = 64 << 10
	// turnBytes is the number of received bytes after which a step that may not wait returns Moving even if
	// more data has arrived. So the caller soon serves other operations.
	turnBytes = 2 << 20
)

// repeat sets the number of rounds, and the function that appends the actions of a round.
func (b *Backend) repeat(rounds int, plan func(*Backend, int) error) { b.rounds, b.plan = rounds, plan }

// conn returns the stream to rank i of the set. If its channel does not exist yet, conn appends an action
// that makes it.
func (b *Backend) conn(i int) *stream {
	if b.conns[i] == nil {
		b.conns[i] = &stream{b: b, rank: i}
		b.actions = append(b.actions, action{kind: connects, c: b.conns[i]})
	}
	return b.conns[i]
}

// send appends an action that sends p. The buffer must not change until it has left.
func (b *Backend) send(c *stream, p []byte) {
	if len(p) > 0 {
		c.end += uint64(len(p))
		b.actions = append(b.actions, action{kind: sends, c: c, buf: p})
	}
}

// receive appends an action that fills p with data from c.
func (b *Backend) receive(c *stream, p []byte) {
	if len(p) > 0 {
		b.actions = append(b.actions, action{kind: receives, c: c, buf: p})
	}
}

// flush appends an action that waits until all that was sent to c before has left.
func (b *Backend) flush(c *stream) { b.await(c, c.end) }

// await appends an action that waits until the bytes before the given position in the stream c have left. If
// other bytes are sent to c after the position and before the action, the wait must be short, because it
// polls.
func (b *Backend) await(c *stream, position uint64) {
	b.actions = append(b.actions, action{kind: awaits, c: c, position: position})
}

// compute appends a call of f. The other fields of a are its arguments.
func (b *Backend) compute(f func(*Backend, *action), a action) {
	a.kind, a.compute = computes, f
	b.actions = append(b.actions, a)
}

// advance runs actions until the operation has ended or has to wait. If the step may wait, advance waits.
func (b *Backend) advance() (ops.Progress, error) {
	for b.polled = 0; ; {
		if b.next == len(b.actions) {
			if more, err := b.nextRound(); err != nil || !more {
				return ops.Finished, err
			}
			continue
		}
		a := &b.actions[b.next]
		p, err := b.try(a)
		switch {
		case err != nil:
			return ops.Waiting, err
		case p == ops.Finished:
			b.next++
			b.polled = 0
			continue
		case p != ops.Waiting:
			return p, nil
		}
		switch moved, err := b.push(); {
		case err != nil:
			return ops.Waiting, err
		case moved:
			b.polled = 0
		case b.ctx == nil && b.received >= movingBytes:
			b.received = 0
			return ops.Moving, nil
		case b.ctx == nil:
			return ops.Waiting, nil
		case b.polled < polls:
			b.polled++
			b.yielder.Yield()
		default:
			if err := b.block(a); err != nil {
				return ops.Waiting, err
			}
		}
	}
}

// nextRound replaces the actions, which are done, by those of the next round. After the last round, all that
// was sent must leave, because the buffers then belong to the caller again. nextRound reports whether the
// operation goes on.
func (b *Backend) nextRound() (more bool, err error) {
	b.dropActions()
	switch {
	case b.round < b.rounds:
		err = b.plan(b, b.round)
	case b.round == b.rounds:
		for _, c := range b.conns {
			if c != nil && c.left() < c.end {
				b.flush(c)
			}
		}
	default:
		return false, nil
	}
	b.round++
	return true, err
}

// dropActions removes all actions, which refer to the buffers of the operation.
func (b *Backend) dropActions() {
	clear(b.actions)
	b.actions, b.next = b.actions[:0], 0
}

// try does as much of a as it can without waiting. It returns Finished if a is done, and otherwise what the
// step returns if it may not wait.
func (b *Backend) try(a *action) (ops.Progress, error) {
	switch c := a.c; a.kind {
	case connects:
		if b.ctx == nil {
			return ops.Blocked, nil
		}
		return ops.Finished, b.connect(c)
	case sends:
		return ops.Finished, c.send(a.buf)
	case receives:
		return b.tryReceive(a)
	case awaits:
		return b.tryAwait(a)
	default:
		a.compute(b, a)
		return ops.Finished, nil
	}
}

// tryReceive receives what has arrived.
func (b *Backend) tryReceive(a *action) (ops.Progress, error) {
	for len(a.buf) > 0 {
		if b.ctx == nil && b.received >= turnBytes {
			b.received = 0
			return ops.Moving, nil
		}
		n, err := a.c.TryRead(a.buf)
		if n == 0 || err != nil {
			return ops.Waiting, err
		}
		b.received += n
		b.polled = 0
		a.buf = a.buf[n:]
	}
	return ops.Finished, nil
}

// tryAwait looks whether the bytes before a.position have left. If the step may wait, and the transport has
// got all bytes, tryAwait waits for the transport.
func (b *Backend) tryAwait(a *action) (ops.Progress, error) {
	switch c := a.c; {
	case c.left() >= a.position:
		return ops.Finished, nil
	case b.ctx != nil && a.position == c.given && c.head == len(c.pending):
		return ops.Finished, c.Flush()
	default:
		_, err := c.TrySend(nil) // returns an error if the lane was aborted
		return ops.Waiting, err
	}
}

// block waits for what a needs, after a was tried often. The transport sends pending bytes meanwhile.
func (b *Backend) block(a *action) error {
	if err := b.handOver(); err != nil {
		return err
	}
	if a.kind != receives {
		runtime.Gosched()
		return nil
	}
	n, err := a.c.Read(a.buf)
	b.polled = 0
	a.buf = a.buf[n:]
	return err
}

// connect makes the channel of c.
func (b *Backend) connect(c *stream) error {
	// The peer may dial only when it has received bytes that are pending here.
	if err := b.handOver(); err != nil {
		return err
	}
	conn, err := b.mesh.Conn(b.ctx, b.lane, b.ranks[c.rank])
	if err != nil {
		if cause := context.Cause(b.ctx); cause != nil && !errors.Is(err, cause) {
			err = fmt.Errorf("%w: %w", err, cause)
		}
		return err
	}
	c.Conn, c.base = conn, conn.Sent()
	return nil
}
