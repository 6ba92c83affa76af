package mem

import (
	"bytes"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

// channel connects two ranks on one lane, in both directions.
type channel struct {
	lo, hi   conn
	up, down pipe // up carries bytes from the lower rank to the higher one, down carries them back
}

func newChannel(k key, c *clock) *channel {
	ch := &channel{}
	ch.up.clock, ch.up.changed.L = c, &ch.up.mu
	ch.down.clock, ch.down.changed.L = c, &ch.down.mu
	ch.lo = conn{lane: k.lane, rank: k.lo, peer: k.hi, out: &ch.up, in: &ch.down}
	ch.hi = conn{lane: k.lane, rank: k.hi, peer: k.lo, out: &ch.down, in: &ch.up}
	return ch
}

// end returns the end of the channel that belongs to rank.
func (ch *channel) end(rank topo.Rank) *conn {
	if rank == ch.lo.rank {
		return &ch.lo
	}
	return &ch.hi
}

// conn is one rank's end of a channel. It is the sender of one pipe and the receiver of the other.
type conn struct {
	lane       transport.Lane
	rank, peer topo.Rank
	out, in    *pipe
	released   bool // guarded by the Cluster's mu
}

// Read implements transport.Conn.
func (c *conn) Read(p []byte) (int, error) { return c.in.read(p, true) }

// TryRead implements transport.Conn.
func (c *conn) TryRead(p []byte) (int, error) { return c.in.read(p, false) }

// Send implements transport.Conn.
func (c *conn) Send(p []byte) error { return c.out.send(p) }

// TrySend implements transport.Conn. Like Send it needs no other goroutine.
func (c *conn) TrySend(p []byte) (int, error) { return len(p), c.out.send(p) }

// Sent implements transport.Conn.
func (c *conn) Sent() uint64 { return c.out.sent.Load() }

// Flush implements transport.Conn.
func (c *conn) Flush() error { return c.out.flush() }

// abort makes the calls of this end fail with err. The other end does not notice.
func (c *conn) abort(err error) {
	c.out.closeSender(err, nil)
	c.in.closeReceiver(err, nil)
}

// close makes the calls of this end fail with ErrClosed, and the calls of the other end with a
// *transport.PeerError.
func (c *conn) close() {
	c.out.closeSender(transport.ErrClosed, c.peerError(io.ErrUnexpectedEOF))
	c.in.closeReceiver(transport.ErrClosed, c.peerError(io.ErrClosedPipe))
}

// release makes the calls of this end fail with ErrReleased. At the other end, Read fails after it has read
// all bytes, and bytes that are sent are dropped.
func (c *conn) release() {
	c.released = true
	c.out.closeSender(transport.ErrReleased, c.peerError(io.ErrUnexpectedEOF))
	c.in.closeReceiver(transport.ErrReleased, nil)
	c.in.drop()
}

// peerError returns the error with which the other end reports the failure of this end.
func (c *conn) peerError(err error) error {
	return &transport.PeerError{Peer: c.rank, Lane: c.lane, Err: err}
}

// pipe is one direction of a channel. It refers to the sender's buffers until the receiver has copied them.
type pipe struct {
	clock *clock
	sent  atomic.Uint64

	receiverWaker *transport.Waker // both wakers are nil on lanes other than Control
	senderWaker   *transport.Waker
	notifyDue     atomic.Bool // bytes were sent without waking receiverWaker
	mu            sync.Mutex
	changed       sync.Cond
	queue         []piece // the unread pieces are queue[head:]
	head          int
	drops         bool // bytes that are sent from now on are dropped
	errReturned   bool // a read has already returned the receiver's error
	sender        side
	receiver      side
}

// piece is the unread part of a buffer that was sent. The receiver can read it once the clock has reached
// due.
type piece struct {
	bytes []byte
	due   time.Duration
}

// side holds the errors with which the calls of one end of a pipe fail. own is an error that the rank at this
// end has caused, and peer is an error that the other rank has caused. If both are set, calls fail with own.
type side struct {
	own, peer error
	due       time.Duration // time at which the error peer takes effect
}

// err returns the error with which calls of this end fail at the time now, or nil.
func (s *side) err(now time.Duration) error {
	if s.own == nil && s.due <= now {
		return s.peer
	}
	return s.own
}

// fail sets the field own to err. ErrClosed replaces an error from Abort, and ErrReleased replaces both.
func (s *side) fail(err error) {
	if s.own == nil || err == transport.ErrReleased || err == transport.ErrClosed &&
		s.own != transport.ErrReleased {
		s.own = err
	}
}

// failRemote sets the field peer to err, unless it is already set. The error takes effect at the time due.
func (s *side) failRemote(err error, due time.Duration) {
	if s.peer == nil {
		s.peer, s.due = err, due
	}
}

func (p *pipe) send(b []byte) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.sender.err(p.clock.now()); err != nil || len(b) == 0 {
		return err
	}
	if p.drops {
		p.sent.Add(uint64(len(b)))
		return nil
	}
	if len(p.queue) == cap(p.queue) && p.head > len(p.queue)/2 {
		p.queue, p.head = slices.Delete(p.queue, 0, p.head), 0
	}
	p.queue = append(p.queue, piece{b, p.clock.arrival()})
	if p.senderWaker != nil && p.senderWaker.Notifies() && p.clock.latency == 0 {
		p.notifyDue.Store(true)
		p.changed.Broadcast()
		return nil
	}
	p.announce()
	return nil
}

// notify wakes the receiver if bytes were sent without waking it. If the receiver has read these bytes in the
// meantime, notify does nothing.
func (p *pipe) notify() {
	if !p.notifyDue.Load() {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.notifyDue.Swap(false) && p.head < len(p.queue) {
		p.receiverWaker.Wake()
	}
}

func (p *pipe) flush() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.head < len(p.queue) && p.sender.err(p.clock.now()) == nil {
		p.changed.Wait()
	}
	return p.sender.err(p.clock.now())
}

// read copies the bytes that have arrived into b. It holds mu while it copies. So when another call has
// returned a buffer to its sender, no read uses the buffer any more. If wait is false, read does not wait for
// bytes and may return 0 and no error.
func (p *pipe) read(b []byte, wait bool) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.clock.now()
	for wait && !p.arrived(now) && p.receiver.err(now) == nil && len(b) > 0 {
		p.changed.Wait()
		now = p.clock.now()
	}
	if p.receiver.own != nil || !p.arrived(now) {
		err := p.receiver.err(now)
		p.errReturned = err != nil
		return 0, err
	}
	total := 0
	for total < len(b) && p.arrived(now) {
		first := &p.queue[p.head]
		n := copy(b[total:], first.bytes)
		total += n
		first.bytes = first.bytes[n:]
		if len(first.bytes) == 0 {
			first.bytes = nil
			p.head++
		}
	}
	if p.head == len(p.queue) {
		p.queue, p.head = p.queue[:0], 0
	}
	// This must come last. From here on, a sender that polls sent may reuse its buffers, and it does so
	// without locking mu.
	p.sent.Add(uint64(total))
	p.changed.Broadcast()
	return total, nil
}

// arrived reports whether there are bytes to read at the time now. The caller holds mu.
func (p *pipe) arrived(now time.Duration) bool {
	return p.head < len(p.queue) && p.queue[p.head].due <= now
}

// hasUnread reports whether a read would return bytes, or an error that no read has returned yet.
func (p *pipe) hasUnread() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.clock.now()
	err := p.receiver.err(now)
	return p.receiver.own == nil && p.arrived(now) || err != nil && !p.errReturned
}

// closeSender makes the calls of the sender fail with the error own. If the error other is not nil, reads
// fail with it after all bytes have been read. closeSender copies the unread bytes, because the sender may
// reuse its buffers afterwards.
func (p *pipe) closeSender(own, other error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sender.fail(own)
	if other != nil {
		p.receiver.failRemote(other, p.clock.arrival())
	}
	if p.receiver.own != nil {
		p.empty() // the receiver will never read these bytes
	}
	for i := range p.queue[p.head:] {
		unread := &p.queue[p.head+i]
		unread.bytes = bytes.Clone(unread.bytes)
	}
	p.announce()
}

// closeReceiver makes reads fail with the error own. If the error other is not nil, the calls of the sender
// fail with it. The unread bytes are never read, but Flush of the sender waits for them until the error takes
// effect.
func (p *pipe) closeReceiver(own, other error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.receiver.fail(own)
	if other != nil {
		p.sender.failRemote(other, p.clock.arrival())
	}
	p.announce()
}

// drop drops the unread bytes and all bytes that will be sent. Sent counts them as if they had been read.
func (p *pipe) drop() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.drops = true
	for _, unread := range p.queue[p.head:] {
		p.sent.Add(uint64(len(unread.bytes)))
	}
	p.empty()
	p.changed.Broadcast()
}

// empty drops the unread pieces. The caller holds mu.
func (p *pipe) empty() { p.queue, p.head = nil, 0 }

// announce wakes the goroutines that wait for a change of the pipe. If there is a latency, it wakes them
// again when the change has arrived at the other end. The caller holds mu.
func (p *pipe) announce() {
	p.changed.Broadcast()
	if p.receiverWaker != nil {
		p.receiverWaker.Wake()
	}
	if p.clock.latency > 0 {
		time.AfterFunc(p.clock.latency, p.wake)
	}
}

func (p *pipe) wake() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.changed.Broadcast()
	if p.receiverWaker != nil {
		p.receiverWaker.Wake()
	}
}
