package sidecar

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
)

const (
	// maxSlots is one more than the last slot. A client can have as many operations in flight as there may be, and as many again
	// kept for their next use.
	maxSlots = 2 * maxInFlight
	// helpsPerRead is how often who helps the engine looks at the ring for each look at the socket, which is a system call.
	helpsPerRead = 32
	// dozes is how often the reader looks at the ring once more, after dozeTime each, when the client has submitted something and does
	// not wait for it. A client that submits one operation after another so needs no doorbell for any of them, and keeps the
	// processor, which it needs more than the engine does, while that gets many operations at once.
	dozes    = 5
	dozeTime = 1 // ms
)

var (
	// errEnd is the end of a connection whose client has not said Bye.
	errEnd = errors.New("the connection has ended without a farewell")
	// errBye is the end of one whose client has.
	errBye = errors.New("the client has left")
)

// conn is a connection to a client. One goroutine reads, begins what is asked for, and works for the engine while operations
// of the connection are in flight; who finishes an operation answers it.
type conn struct {
	server *Server
	pid    int
	in     inbox
	out    *outbox

	// The reader's.
	ring  *ring
	until uint64           // the submissions of the ring that a turn begins
	dozes int              // how often the reader looks at the ring once more before it sleeps
	plans map[uint32]*plan // by slot
	looks int

	// attending says that the reader works for the engine, and rings the bell for who finishes operations; owed, that it has to.
	attending, owed atomic.Bool
	flying          atomic.Int64 // operations in flight

	mu     sync.Mutex
	busy   map[uint64]struct{} // numbers of requests that are not answered
	left   bool                // nobody takes results any more
	places map[origin][]byte   // results that the client has
	told   map[uint32]bool     // chunks that the client knows
	why    error               // why the connection was cut
}

// origin is a place in an arena of the sidecar's.
type origin struct {
	arena  uint32
	offset uint64
}

func newConn(s *Server, fd, pid int) *conn {
	return &conn{
		server: s, pid: pid, in: inbox{FD: fd}, out: newOutbox(fd),
		plans: make(map[uint32]*plan), busy: make(map[uint64]struct{}),
		places: make(map[origin][]byte), told: make(map[uint32]bool),
	}
}

// serve serves the client until it goes, and says why.
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
	// For run, which may wait for room.
	_ = unix.Shutdown(c.in.FD, unix.SHUT_RDWR)
	sending.Wait()
	c.in.Close()
	if c.ring != nil {
		c.server.check(c.ring.close())
	}
	c.server.check(c.server.memory.leave(c))
	return err
}

// cut ends the connection, because of why. What the client has said is read first.
func (c *conn) cut(why error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.why == nil && !c.left {
		c.why = why
		_ = unix.Shutdown(c.in.FD, unix.SHUT_RDWR) // one that has ended already
	}
}

// read is nil never.
func (c *conn) read() error {
	for {
		if err := c.rest(); err != nil {
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

// rest waits for something to do.
func (c *conn) rest() error {
	if c.ring != nil {
		for ; c.dozes > 0; c.dozes-- {
			if !c.ring.rest(dozing) && c.ring.awaited() || c.in.Wait(dozeTime) || c.ring.pending() != c.ring.read {
				return nil
			}
		}
		if !c.ring.rest(asleep) {
			return nil
		}
	}
	_, err := c.in.Fill(true)
	return err
}

// turn does what has come, and works for the engine. It reports whether there may be more.
func (c *conn) turn() (again bool, err error) {
	if c.ring != nil {
		c.ring.watch() // in each turn, for the ring may have come in the last one
		c.until = c.ring.pending()
	}
	// What a submission refers to was sent before it was written: so the frames that are there come first.
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
	if c.flying.Load() > 0 {
		came, err = c.help()
	}
	return again || took || came, err
}

// frames does what came in frames.
func (c *conn) frames() error {
	for {
		body, ok, err := c.in.Next()
		if err != nil {
			return err
		}
		if !ok {
			c.ringOverdue() // a client does not send a doorbell where there is no room for it: it has sent frames
			return c.in.Spare()
		}
		if len(body) == 0 {
			c.ringOverdue() // the ring is looked at in any case
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

// submissions begins those of the ring that this turn does.
func (c *conn) submissions() (some bool, err error) {
	if c.ring == nil {
		return false, nil
	}
	for {
		id, slot, ok, err := c.ring.next(c.until)
		if err != nil || !ok {
			if some && !c.ring.awaited() {
				c.dozes = dozes
			}
			return some, err
		}
		some = true
		p := c.plans[slot]
		if p == nil {
			p = &plan{wrong: usage("submit", "", fmt.Errorf("slot %d is not prepared", slot))}
		}
		if err := c.submit(p, id); err != nil {
			return false, err
		}
	}
}

// enter takes a number into use, for so many operations.
func (c *conn) enter(id uint64, weight int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, ok := c.busy[id]; ok {
		return fmt.Errorf("%w: number %d is in use", errFrame, id)
	}
	most := c.server.cfg.MaxInFlight
	if n := c.flying.Load() + int64(weight); n > int64(most) || len(c.busy) >= most {
		return fmt.Errorf("%w: %d operations and %d requests in flight, want at most %d", errFrame, n, len(c.busy)+1, most)
	}
	c.busy[id] = struct{}{}
	c.flying.Add(int64(weight))
	return nil
}

// leave is the opposite of enter.
func (c *conn) leave(id uint64, weight int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.busy, id)
	c.flying.Add(-int64(weight))
}

// submit begins an operation. The error ends the connection; others are answers.
func (c *conn) submit(p *plan, id uint64) error {
	if err := c.enter(id, p.weight()); err != nil {
		return err
	}
	o, err := c.newOperation(p, id)
	if err == nil {
		err = c.server.begin(o)
	}
	if err != nil {
		o.answer(err)
	}
	return nil
}

// done is called when o, which was begun, is done.
func (o *operation) done(err error) {
	o.conn.server.operations.Add(1)
	o.answer(err)
}

// answer lets go of the memory that o uses and tells the client what has come of it.
func (o *operation) answer(err error) {
	c := o.conn
	c.server.check(c.server.memory.unuse(o.uses))
	if err != nil {
		o.forget()
	}
	status := uint32(statusDone)
	if err != nil || !o.plain() {
		status = statusReply
		r := &sidecarpb.Reply{Id: o.id}
		if err == nil {
			a := o.completion()
			err = c.give(o, a)
			r.What = &sidecarpb.Reply_Completion{Completion: a}
		}
		if err != nil {
			r.What, r.Error = nil, describe(err)
		}
		c.reply(r, -1)
	}
	c.leave(o.id, o.plan.weight())
	if c.ring.complete(o.id, status) {
		c.ringLater()
	}
}

// give makes the results of o, which a tells of, the client's. Without the client, or if it cannot be told, they are freed.
func (c *conn) give(o *operation, a *sidecarpb.Completion) error {
	if o.made == nil {
		return nil
	}
	given, err := c.tell(o, a)
	if !given { // without the lock, for the arena may have news of it
		o.forget()
	}
	return err
}

// tell has the client know the arenas of its results, and keeps those for it. It reports whether there is a client.
func (c *conn) tell(o *operation, a *sidecarpb.Completion) (given bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.left {
		return false, nil
	}
	for _, r := range a.Results {
		number := r.Memory.Arena
		if number < ownArenas || c.told[number] {
			continue
		}
		news, fd, err := c.server.chunks.news(number - ownArenas)
		if err != nil {
			return false, err
		}
		c.told[number] = true
		c.reply(news, fd)
	}
	for i, r := range a.Results {
		if b := o.made[i]; b != nil {
			c.places[origin{r.Memory.Arena, r.Memory.Offset}] = b
		}
	}
	return true, nil
}

// gone tells the client of an arena that it knows and that has gone.
func (c *conn) gone(number uint32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.told[number] {
		delete(c.told, number)
		c.reply(&sidecarpb.Reply{What: &sidecarpb.Reply_DropArena{DropArena: &sidecarpb.DropArena{Arena: number}}}, -1)
	}
}

// ringLater rings the doorbell, or has the reader do it, which may do it once for many.
func (c *conn) ringLater() {
	if c.attending.Load() {
		c.owed.Store(true)
		if c.attending.Load() || !c.owed.Swap(false) {
			return // it looks once more after it has stopped attending
		}
	}
	c.out.Bell()
}

// ringOverdue rings for a client that now waits for completions of which it did not want to hear.
func (c *conn) ringOverdue() {
	if c.ring != nil && c.ring.overdue() {
		c.out.Bell()
	}
}

// help works for the engine while operations are in flight, until something comes from the client or nothing happens for a
// while. It reports whether something has come.
func (c *conn) help() (came bool, err error) {
	inside := c.server.inside.Load()
	if inside == nil {
		return false, nil
	}
	if c.ring != nil && !c.ring.awaited() {
		(*inside).Notify()
		return false, nil
	}
	c.attending.Store(true)
	(*inside).Drive(context.Background(), func() bool {
		if c.owed.Load() && c.owed.Swap(false) {
			c.out.Bell()
		}
		if c.flying.Load() == 0 || c.ring != nil && (c.ring.pending() != c.ring.read || !c.ring.awaited()) {
			return true
		}
		if c.looks++; c.looks%helpsPerRead != 0 {
			return false
		}
		came, err = c.in.Fill(false)
		return came || err != nil
	})
	c.attending.Store(false)
	if c.owed.Swap(false) {
		c.out.Bell()
	}
	return came || c.ring != nil && c.ring.pending() != c.ring.read, err
}

// reply sends an answer or news.
func (c *conn) reply(r *sidecarpb.Reply, fd int) {
	if err := c.out.Send(r, fd); err != nil {
		c.server.log.Error("a reply cannot be sent", zap.Uint64("request", r.Id), zap.Error(err))
	}
}

// answer sends what a request is answered with.
func (c *conn) answer(id uint64, r *sidecarpb.Reply, err error) {
	c.leave(id, 0)
	if r == nil || err != nil {
		r = new(sidecarpb.Reply)
	}
	r.Id = id
	if err != nil {
		r.Error = describe(err)
	}
	c.reply(r, -1)
}

// request does what a frame asks for. The error ends the connection.
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
			err = c.server.memory.add(what.Arena.GetArena(), what.Arena.GetBytes(), fd, c)
		}
		return c.now(q.Id, asUsage("arena", err))
	case *sidecarpb.Request_DropArena:
		return c.now(q.Id, asUsage("drop arena", c.server.memory.drop(c, what.DropArena.GetArena())))
	case *sidecarpb.Request_Ring:
		return c.now(q.Id, asUsage("ring", c.takeRing(what.Ring.GetBytes())))
	case *sidecarpb.Request_Prepare:
		slot := what.Prepare.GetSlot()
		if slot >= maxSlots {
			return fmt.Errorf("%w: slot %d, want less than %d", errFrame, slot, maxSlots)
		}
		c.plans[slot] = newPlan(what.Prepare.GetOperation())
		return nil
	}
	if err := c.enter(q.Id, 0); err != nil {
		return err
	}
	if _, is := q.What.(*sidecarpb.Request_Shutdown); is && c.ring != nil {
		// Submissions that the client made before the shutdown still run.
		c.until = c.ring.pending()
		if _, err := c.submissions(); err != nil {
			return err
		}
	}
	c.server.request(c, q)
	return nil
}

// now answers a request at once.
func (c *conn) now(id uint64, err error) error {
	if entered := c.enter(id, 0); entered != nil {
		return entered
	}
	c.answer(id, nil, err)
	return nil
}

func asUsage(op string, err error) error {
	if err == nil {
		return nil
	}
	return usage(op, "", err)
}

// takeRing takes the ring that came with a request.
func (c *conn) takeRing(numBytes uint64) error {
	fd, err := c.in.Descriptor()
	if err != nil {
		return err
	}
	if c.ring != nil {
		discard(fd)
		return errors.New("the connection has a ring already")
	}
	s, err := shmem.Adopt(fd)
	if err != nil {
		return err
	}
	if got := uint64(len(s.Bytes())); got != numBytes {
		return errors.Join(fmt.Errorf("the ring is a file of %d bytes, want the %d that the request says", got, numBytes), s.Close())
	}
	r, err := newRing(s)
	if err != nil {
		return errors.Join(err, s.Close())
	}
	c.ring = r
	return nil
}

// free takes a result back. One that is not the client's is none of its business, and left alone.
func (c *conn) free(at origin) {
	c.mu.Lock()
	b := c.places[at]
	delete(c.places, at)
	c.mu.Unlock()
	if b == nil {
		c.server.log.Warn("a client gives back what it does not have", zap.Int("pid", c.pid), zap.Uint32("arena", at.arena), zap.Uint64("offset", at.offset))
		return
	}
	c.server.check(arena.Free(b))
}
