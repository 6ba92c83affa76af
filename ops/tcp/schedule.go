package tcp

import (
	"context"
	"errors"
	"fmt"
	"runtime"

	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/ops"
)

// schedule holds what this rank does in an operation: a list of actions, which run one after another
// (Hoefler, Lumsdaine and Rehm, Implementation and performance analysis of non-blocking collective operations
// for MPI, 2007). An action that has to wait for another rank is tried again in the next step. So any
// goroutine can run any step.
//
// An algorithm appends actions with the methods conn, send, receive, flush, await and compute. A comment that
// says what a function of an algorithm sends or receives describes the actions that it appends. A short
// algorithm appends all actions when the operation starts. A long one has a function that appends the actions
// of one round. It is called when all actions of the round before are done, so it can use what they have
// received.
type schedule struct {
	owner *Backend // the first argument of the functions
	mesh  transport.Mesh
	lane  transport.Lane
	ranks []topo.Rank
	me    int

	segBytes int       // the segment size of the operation in progress
	conns    []*stream // indexed by rank of the set; nil until the channel is needed
	unsent   []*stream // the streams with pending bytes
	yielder  shmem.Yielder
	ctx      context.Context // the context of the step if the step may wait, else nil

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
func (s *schedule) repeat(rounds int, plan func(*Backend, int) error) {
	s.rounds, s.plan = rounds, plan
}

// conn returns the stream to rank i of the set. If its channel does not exist yet, conn appends an action
// that makes it.
func (s *schedule) conn(i int) *stream {
	if s.conns[i] == nil {
		s.conns[i] = &stream{schedule: s, rank: i}
		s.actions = append(s.actions, action{kind: connects, c: s.conns[i]})
	}
	return s.conns[i]
}

// send appends an action that sends p. The buffer must not change until it has left.
func (s *schedule) send(c *stream, p []byte) {
	if len(p) > 0 {
		c.end += uint64(len(p))
		s.actions = append(s.actions, action{kind: sends, c: c, buf: p})
	}
}

// receive appends an action that fills p with data from c.
func (s *schedule) receive(c *stream, p []byte) {
	if len(p) > 0 {
		s.actions = append(s.actions, action{kind: receives, c: c, buf: p})
	}
}

// flush appends an action that waits until all that was sent to c before has left.
func (s *schedule) flush(c *stream) { s.await(c, c.end) }

// await appends an action that waits until the bytes before the given position in the stream c have left. If
// other bytes are sent to c after the position and before the action, the wait must be short, because it
// polls.
func (s *schedule) await(c *stream, position uint64) {
	s.actions = append(s.actions, action{kind: awaits, c: c, position: position})
}

// compute appends a call of f. The other fields of a are its arguments.
func (s *schedule) compute(f func(*Backend, *action), a action) {
	a.kind, a.compute = computes, f
	s.actions = append(s.actions, a)
}

// begin begins an operation with segments of segBytes bytes.
func (s *schedule) begin(segBytes int) {
	s.segBytes, s.rounds, s.round, s.received = segBytes, 0, 0, 0
}

// advance runs actions until the operation has ended or has to wait. If the step may wait, which s.ctx says,
// advance waits.
func (s *schedule) advance() (ops.Progress, error) {
	for s.polled = 0; ; {
		if s.next == len(s.actions) {
			if more, err := s.nextRound(); err != nil || !more {
				return ops.Finished, err
			}
			continue
		}
		a := &s.actions[s.next]
		p, err := s.try(a)
		switch {
		case err != nil:
			return ops.Waiting, err
		case p == ops.Finished:
			s.next++
			s.polled = 0
			continue
		case p != ops.Waiting:
			return p, nil
		}
		switch moved, err := s.push(); {
		case err != nil:
			return ops.Waiting, err
		case moved:
			s.polled = 0
		case s.ctx == nil && s.received >= movingBytes:
			s.received = 0
			return ops.Moving, nil
		case s.ctx == nil:
			return ops.Waiting, nil
		case s.polled < polls:
			s.polled++
			s.yielder.Yield()
		default:
			if err := s.block(a); err != nil {
				return ops.Waiting, err
			}
		}
	}
}

// nextRound replaces the actions, which are done, by those of the next round. After the last round, all that
// was sent must leave, because the buffers then belong to the caller again. nextRound reports whether the
// operation goes on.
func (s *schedule) nextRound() (more bool, err error) {
	s.dropActions()
	switch {
	case s.round < s.rounds:
		err = s.plan(s.owner, s.round)
	case s.round == s.rounds:
		for _, c := range s.conns {
			if c != nil && c.left() < c.end {
				s.flush(c)
			}
		}
	default:
		return false, nil
	}
	s.round++
	return true, err
}

// dropActions removes all actions, which refer to the buffers of the operation.
func (s *schedule) dropActions() {
	clear(s.actions)
	s.actions, s.next = s.actions[:0], 0
}

// try does as much of a as it can without waiting. It returns Finished if a is done, and otherwise what the
// step returns if it may not wait.
func (s *schedule) try(a *action) (ops.Progress, error) {
	switch c := a.c; a.kind {
	case connects:
		if s.ctx == nil {
			return ops.Blocked, nil
		}
		return ops.Finished, s.connect(c)
	case sends:
		return ops.Finished, c.send(a.buf)
	case receives:
		return s.tryReceive(a)
	case awaits:
		return s.tryAwait(a)
	default:
		a.compute(s.owner, a)
		return ops.Finished, nil
	}
}

// tryReceive receives what has arrived.
func (s *schedule) tryReceive(a *action) (ops.Progress, error) {
	for len(a.buf) > 0 {
		if s.ctx == nil && s.received >= turnBytes {
			s.received = 0
			return ops.Moving, nil
		}
		n, err := a.c.TryRead(a.buf)
		if n == 0 || err != nil {
			return ops.Waiting, err
		}
		s.received += n
		s.polled = 0
		a.buf = a.buf[n:]
	}
	return ops.Finished, nil
}

// tryAwait looks whether the bytes before a.position have left. If the step may wait, and the transport has
// got all bytes, tryAwait waits for the transport.
func (s *schedule) tryAwait(a *action) (ops.Progress, error) {
	switch c := a.c; {
	case c.left() >= a.position:
		return ops.Finished, nil
	case s.ctx != nil && a.position == c.given && c.head == len(c.pending):
		return ops.Finished, c.Flush()
	default:
		_, err := c.TrySend(nil) // returns an error if the lane was aborted
		return ops.Waiting, err
	}
}

// block waits for what a needs, after a was tried often. The transport sends pending bytes meanwhile.
func (s *schedule) block(a *action) error {
	if err := s.handOver(); err != nil {
		return err
	}
	if a.kind != receives {
		runtime.Gosched()
		return nil
	}
	n, err := a.c.Read(a.buf)
	s.polled = 0
	a.buf = a.buf[n:]
	return err
}

// connect makes the channel of c.
func (s *schedule) connect(c *stream) error {
	// The peer may dial only when it has received bytes that are pending here.
	if err := s.handOver(); err != nil {
		return err
	}
	conn, err := s.mesh.Conn(s.ctx, s.lane, s.ranks[c.rank])
	if err != nil {
		if cause := context.Cause(s.ctx); cause != nil && !errors.Is(err, cause) {
			err = fmt.Errorf("%w: %w", err, cause)
		}
		return err
	}
	c.Conn, c.base = conn, conn.Sent()
	return nil
}
