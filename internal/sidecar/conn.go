package sidecar

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/internal/sidecar/wire"
)

const (
	// maxPlanBytes is the maximum size of the plans of a connection: those of all slots, and those of
	// operations in flight whose slot has another plan meanwhile.
	maxPlanBytes = 64 << 20
	// looksPerRead is how many times the reader polls the ring between two reads of the socket while it
	// drives the engine. It reads the socket less often than the ring, because reading the socket is a system
	// call.
	looksPerRead = 32
	// If the client has submitted an operation and does not wait for it, the reader polls the ring extraPolls
	// more times before it sleeps. Before each poll it pauses for pollInterval. So a client that submits one
	// operation after the other needs no doorbells. During the pauses the client can use the processor, and
	// the operations accumulate, so that the engine receives several at once.
	extraPolls   = 5
	pollInterval = 1 // ms
)

// errBye means that the connection has ended because the client has sent Bye.
var errBye = errors.New("the client sent Bye before Shutdown")

// conn is a connection to a client. It has one goroutine, the reader, which reads requests and starts
// operations. While operations of the connection are in flight, the reader also drives the engine. The
// goroutine that finishes an operation sends the answer.
type conn struct {
	server *Server
	pid    int
	in     inbox
	out    *outbox
	memory memory
	gone   chan struct{} // closed when the Server has no client any more

	// Only the reader uses the fields ring to looks.
	ring      *ring
	until     uint64           // the reader starts only submissions whose index is less than this
	pollsLeft int              // how many more times the reader polls the ring before it sleeps
	plans     map[uint32]*plan // the plan that is prepared in each slot
	noRoom    *plan            // the plan of slots for whose plan there was no room; nil if there is none
	// looks counts how many times drive has polled the ring.
	looks int
	// planBytes is the size of all plans.
	planBytes atomic.Int64

	// node is nil until the client sends the first request to it. The reader sets it.
	node *node

	inFlight atomic.Int64 // number of operations in flight
	messages atomic.Int64 // number of those that are messages, which need no turns of the engine

	mu        sync.Mutex
	busy      map[uint64]struct{} // numbers of requests and operations that are not answered yet
	left      bool                // the connection has ended, so the client receives no more results
	places    map[origin][]byte   // results that the client has received and not freed
	announced map[uint32]bool     // arenas of the sidecar that were sent to the client
	why       error               // why the connection was closed
}

// origin is the position of a result in an arena of the sidecar.
type origin struct {
	arena  uint32
	offset uint64
}

// newConn returns a connection over the socket fd to the client with the process ID pid.
func newConn(s *Server, fd, pid int) *conn {
	return &conn{
		server: s, pid: pid, in: inbox{FD: fd}, out: newOutbox(fd), gone: make(chan struct{}),
		memory: memory{all: make(map[uint32]*clientArena)},
		plans:  make(map[uint32]*plan), busy: make(map[uint64]struct{}),
		places: make(map[origin][]byte), announced: make(map[uint32]bool),
	}
}

// serve serves the client until the connection ends. Then it frees the resources of the connection and
// returns the reason for the end as an error. The error is never nil.
func (c *conn) serve() error {
	var sending sync.WaitGroup
	sending.Go(c.out.Run)
	err := c.read()
	c.mu.Lock()
	c.left = true
	if c.why != nil && !errors.Is(err, errBye) {
		err = c.why
	}
	places := c.places
	c.places = nil
	c.mu.Unlock()
	for _, b := range places {
		c.server.check(arena.Free(b))
	}
	c.out.Close()
	// The goroutine that runs c.out.Run may be waiting for the client to read. Shutting down the socket ends
	// this wait.
	_ = unix.Shutdown(c.in.FD, unix.SHUT_RDWR)
	sending.Wait()
	c.in.Close()
	if c.ring != nil {
		c.server.check(c.ring.close())
	}
	c.server.check(c.memory.leave())
	return err
}

// disconnect closes the connection and records the reason, which is in why. The reader still handles data
// that the client has sent before.
func (c *conn) disconnect(why error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.why == nil && !c.left {
		c.why = why
		// An error means that the connection has ended already.
		_ = unix.Shutdown(c.in.FD, unix.SHUT_RDWR)
	}
}

// hungUp reports whether the connection has ended at the other end, although the reader may not know it yet.
func (c *conn) hungUp() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	fds := [1]unix.PollFd{{Fd: int32(c.in.FD), Events: unix.POLLRDHUP}}
	n, err := unix.Poll(fds[:], 0)
	return c.why != nil || c.left || err == nil && n > 0
}

// watch closes the connection when the client's process ends. Without it, the connection would stay open if
// other processes have inherited the socket.
func (c *conn) watch(pidfd *os.File) {
	raw, err := pidfd.SyscallConn()
	if err == nil {
		err = raw.Read(func(fd uintptr) bool {
			fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			n, err := unix.Poll(fds, 0)
			return err == nil && n > 0
		})
	}
	// If err is not nil, the pidfd was closed, because the connection has ended.
	if err == nil {
		c.disconnect(errors.New("the client's process exited"))
	}
}

// read handles requests and submissions until the connection ends. It returns the reason for the end, which
// is never nil.
func (c *conn) read() error {
	for {
		if err := c.park(); err != nil {
			return err
		}
		for again := true; again; {
			var err error
			if again, err = c.turn(); err != nil {
				return err
			}
			again = again && (c.ring == nil || c.ring.awaited())
		}
	}
}

// park blocks until there may be frames or submissions to handle. It returns an error if the connection has
// ended.
func (c *conn) park() error {
	if c.ring != nil {
		for ; c.pollsLeft > 0; c.pollsLeft-- {
			if !c.ring.park(wire.Polling) && c.ring.awaited() || c.in.Wait(pollInterval) ||
				c.ring.pending() != c.ring.read {
				return nil
			}
		}
		if !c.ring.park(wire.Asleep) {
			return nil
		}
	}
	_, err := c.in.Fill(true)
	return err
}

// turn handles the frames and submissions that have arrived, and drives the engine. It reports whether there
// may be more frames or submissions to handle.
func (c *conn) turn() (again bool, err error) {
	if c.ring != nil {
		// startLooking is called in each turn, because the client may have sent the ring in the previous
		// turn.
		c.ring.startLooking()
		c.until = c.ring.pending()
	}
	// The client first sends the frames that a submission refers to, and then writes the submission. So turn
	// handles frames first.
	came := true
	for came {
		if err := c.frames(); err != nil {
			return false, err
		}
		if came, err = c.in.Fill(false); err != nil {
			return false, err
		}
		again = again || came
	}
	took, err := c.submissions()
	if err != nil {
		return false, err
	}
	if c.needsTurns() {
		came, err = c.drive()
	}
	return again || took || came, err
}

// frames handles the complete frames in the inbox.
func (c *conn) frames() error {
	for {
		body, ok, err := c.in.Next()
		if err != nil {
			return err
		}
		if !ok {
			return c.in.Spare()
		}
		if len(body) == 0 {
			// The frame is a doorbell. It needs no handling here, because turn looks at the ring after it has
			// handled the frames.
			continue
		}
		if c.out.Unsent() > maxUnsentBytes {
			c.out.Room()
		}
		q, err := readRequest(body)
		if err != nil {
			return err
		}
		if err := c.request(q); err != nil {
			return err
		}
	}
}

// submissions starts the operations that the client has submitted in the ring, up to but not including the
// submission with the index c.until. It reports whether it has started any operation.
func (c *conn) submissions() (some bool, err error) {
	if c.ring == nil {
		return false, nil
	}
	for {
		s, ok, err := c.ring.next(c.until)
		if err != nil || !ok {
			if some && !c.ring.awaited() {
				c.pollsLeft = extraPolls
			}
			return some, err
		}
		some = true
		p := c.plans[s.slot]
		if p == nil {
			p = &plan{wrong: usage("submit", "", fmt.Errorf("slot %d has no prepared operation", s.slot))}
		}
		if err := c.submit(p, s); err != nil {
			return false, err
		}
	}
}

// enter records that a request or an operation uses the number id, and adds weight to the number of
// operations in flight. If the number is already in use, or if a limit of the connection is exceeded, enter
// returns an error.
func (c *conn) enter(id uint64, weight int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, ok := c.busy[id]; ok {
		return fmt.Errorf("%w: got number %d, which a request or an operation in flight already has", wire.ErrFrame, id)
	}
	most := c.server.cfg.MaxInFlight
	if n := c.inFlight.Load() + int64(weight); n > int64(most) || len(c.busy) >= most {
		return fmt.Errorf("%w: got %d operations and %d requests in flight, want at most %d of each", wire.ErrFrame, n,
			len(c.busy)+1, most)
	}
	c.busy[id] = struct{}{}
	c.inFlight.Add(int64(weight))
	return nil
}

// leave reverses enter.
func (c *conn) leave(id uint64, weight int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.busy, id)
	c.inFlight.Add(-int64(weight))
}

// submit executes the plan p once, for the submission s. If the client has broken the protocol, submit
// returns an error, and the caller closes the connection. Any other error is sent to the client as the answer
// to the operation.
func (c *conn) submit(p *plan, s submission) error {
	if err := c.enter(s.id, p.Weight()); err != nil {
		return err
	}
	if p.Kind.IsMessage() {
		c.messages.Add(1)
	}
	p.holders.Add(1)
	o, err := c.newOperation(p, s)
	if err == nil {
		err = c.server.begin(o)
	}
	if err != nil {
		o.answer(err)
	}
	return nil
}

// needsTurns reports whether operations are in flight that turns of the engine execute.
func (c *conn) needsTurns() bool { return c.inFlight.Load() > c.messages.Load() }

// drive drives the engine while operations are in flight. It returns when no operation is in flight any more,
// when a frame or a submission arrives from the client, when the client does not wait for completions, or
// when nothing has happened for a while. came reports whether a frame or a submission has arrived.
func (c *conn) drive() (came bool, err error) {
	run := c.server.running.Load()
	if run == nil {
		return false, nil
	}
	if c.ring != nil && !c.ring.awaited() {
		(*run).Notify()
		return false, nil
	}
	(*run).Drive(context.Background(), func() bool {
		if !c.needsTurns() || c.ring != nil && (c.ring.pending() != c.ring.read || !c.ring.awaited()) {
			return true
		}
		if c.looks++; c.looks%looksPerRead != 0 {
			return false
		}
		came, err = c.in.Fill(false)
		return came || err != nil
	})
	return came || c.ring != nil && c.ring.pending() != c.ring.read, err
}

// reply sends an answer to the client. If the answer cannot be encoded, reply disconnects the client, which
// would wait for the answer without a limit. The caller must not hold mu.
func (c *conn) reply(r *sidecarpb.Reply) {
	if err := c.out.Send(r, -1); err != nil {
		c.disconnect(fmt.Errorf("cannot encode the answer to request %d: %w", r.Id, err))
	}
}

// answer sends the answer to the request with the number id. The answer is r or, if err is not nil, an error.
func (c *conn) answer(id uint64, r *sidecarpb.Reply, err error) {
	c.leave(id, 0)
	if r == nil || err != nil {
		r = new(sidecarpb.Reply)
	}
	r.Id = id
	if err != nil {
		r.Error = wire.Describe(err)
	}
	c.reply(r)
}

// request handles one request. If it returns an error, the caller closes the connection.
func (c *conn) request(q *sidecarpb.Request) error {
	switch what := q.What.(type) {
	case *sidecarpb.Request_Free:
		c.free(origin{what.Free.GetArena(), what.Free.GetOffset()})
		return nil
	case *sidecarpb.Request_Bye:
		return errBye
	case *sidecarpb.Request_Arena:
		fd, err := c.in.Descriptor()
		if err == nil {
			err = c.memory.add(what.Arena.GetArena(), what.Arena.GetBytes(), fd)
		}
		return c.now(q.Id, asUsage("arena", err))
	case *sidecarpb.Request_DropArena:
		return c.now(q.Id, asUsage("drop arena", c.memory.drop(what.DropArena.GetArena())))
	case *sidecarpb.Request_Ring:
		return c.now(q.Id, asUsage("ring", c.takeRing(what.Ring.GetBytes())))
	case *sidecarpb.Request_Prepare:
		slot := what.Prepare.GetSlot()
		if slot >= wire.MaxSlots {
			return fmt.Errorf("%w: got slot %d, want less than %d", wire.ErrFrame, slot, wire.MaxSlots)
		}
		c.prepare(slot, newPlan(what.Prepare.GetOperation()))
		return nil
	}
	if err := c.enter(q.Id, 0); err != nil {
		return err
	}
	if isNodeRequest(q) {
		if c.node == nil {
			c.node = newNode(c)
		}
		c.node.take(q)
		return nil
	}
	if _, is := q.What.(*sidecarpb.Request_Shutdown); is && c.ring != nil {
		// Submissions that the client made before this request are still executed. Later submissions are not.
		c.until = c.ring.pending()
		if _, err := c.submissions(); err != nil {
			return err
		}
	}
	c.server.request(c, q)
	return nil
}

// prepare makes p the plan of a slot. If the plans of the connection are too large, the slot gets a plan that
// cannot be executed, because a client gets no answer when it prepares a slot.
func (c *conn) prepare(slot uint32, p *plan) {
	c.drop(c.plans[slot])
	p.bytes = p.size()
	if n := c.planBytes.Load(); n+p.bytes > maxPlanBytes {
		if c.noRoom == nil {
			c.noRoom = &plan{wrong: usage("submit", "", fmt.Errorf("the operation was not prepared, because the "+
				"prepared operations of this client would take more than %d bytes", maxPlanBytes))}
		}
		p = c.noRoom
	}
	c.planBytes.Add(p.bytes)
	p.holders.Add(1)
	c.plans[slot] = p
}

// drop records that a slot or an operation does not have the plan p any longer. p may be nil.
func (c *conn) drop(p *plan) {
	if p != nil && p.holders.Add(-1) == 0 {
		c.planBytes.Add(-p.bytes)
	}
}

// now answers the request with the number id, which the reader has handled itself. If err is nil, the answer
// means success.
func (c *conn) now(id uint64, err error) error {
	if entered := c.enter(id, 0); entered != nil {
		return entered
	}
	c.answer(id, nil, err)
	return nil
}

// usage returns err as an error that the client has caused. It has the same type as errors of this kind in
// package hvd.
func usage(op, tensor string, err error) error {
	return &engine.UsageError{Op: op, Tensor: tensor, Err: err}
}

// asUsage returns err as a usage error of the operation op. If err is nil, asUsage returns nil.
func asUsage(op string, err error) error {
	if err == nil {
		return nil
	}
	return usage(op, "", err)
}

// takeRing maps the ring of the client. The descriptor of the ring has arrived with the request.
func (c *conn) takeRing(numBytes uint64) error {
	fd, err := c.in.Descriptor()
	if err != nil {
		return err
	}
	if c.ring != nil {
		discard(fd)
		return errors.New("the connection already has a ring")
	}
	s, err := shmem.Adopt(fd)
	if err != nil {
		return err
	}
	if got := uint64(len(s.Bytes())); got != numBytes {
		return errors.Join(fmt.Errorf("the ring's file has %d bytes, want %d as in the request", got,
			numBytes), s.Close())
	}
	r, err := newRing(s)
	if err != nil {
		return errors.Join(err, s.Close())
	}
	c.ring = r
	return nil
}

// free frees the result whose position is at, because the client does not need it any more. If the client
// holds no result there, free only logs that.
func (c *conn) free(at origin) {
	c.mu.Lock()
	b := c.places[at]
	delete(c.places, at)
	c.mu.Unlock()
	if b == nil {
		c.server.log.Warn("a client has freed a result that it does not hold", zap.Int("pid", c.pid),
			zap.Uint32("arena", at.arena), zap.Uint64("offset", at.offset))
		return
	}
	c.server.check(arena.Free(b))
}
