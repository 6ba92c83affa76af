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

// channel has both directions between two ranks on one lane.
type channel struct {
	lo, hi   conn
	up, down pipe // up runs from the lower rank to the higher
}

func newChannel(k key, c *clock) *channel {
	ch := &channel{}
	ch.up.clock, ch.up.changed.L = c, &ch.up.mu
	ch.down.clock, ch.down.changed.L = c, &ch.down.mu
	ch.lo = conn{lane: k.lane, rank: k.lo, peer: k.hi, out: &ch.up, in: &ch.down}
	ch.hi = conn{lane: k.lane, rank: k.hi, peer: k.lo, out: &ch.down, in: &ch.up}
	return ch
}

// end returns rank's end.
func (ch *channel) end(rank topo.Rank) *conn {
	if rank == ch.lo.rank {
		return &ch.lo
	}
	return &ch.hi
}

// conn is one rank's end of a channel: the sender of one pipe and the receiver of the other.
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

// Sent implements transport.Conn.
func (c *conn) Sent() uint64 { return c.out.sent.Load() }

// Flush implements transport.Conn.
func (c *conn) Flush() error { return c.out.flush() }

// abort fails the calls of this end with err. The other end does not notice.
func (c *conn) abort(err error) {
	c.out.closeSender(err, nil)
	c.in.closeReceiver(err, nil)
}

// close fails the calls of this end with ErrClosed and the calls of the other end with a
// *transport.PeerError.
func (c *conn) close() {
	c.out.closeSender(transport.ErrClosed, c.peerError(io.ErrUnexpectedEOF))
	c.in.closeReceiver(transport.ErrClosed, c.peerError(io.ErrClosedPipe))
}

// release fails the calls of this end with ErrReleased, and the other end's Read after it has read all bytes.
// Bytes that the other end sends are lost.
func (c *conn) release() {
	c.released = true
	c.out.closeSender(transport.ErrReleased, c.peerError(io.ErrUnexpectedEOF))
	c.in.closeReceiver(transport.ErrReleased, nil)
	c.in.drop()
}

// peerError returns the error with which the other end reports that this one failed.
func (c *conn) peerError(err error) error {
	return &transport.PeerError{Peer: c.rank, Lane: c.lane, Err: err}
}

// pipe is one direction of a channel. It holds references to the sender's buffers until the receiver has
// copied them.
type pipe struct {
	clock *clock
	sent  atomic.Uint64

	receiverWaker *waker // both wakers are nil on lanes other than Control
	senderWaker   *waker
	notifyDue     atomic.Bool // bytes were sent, and receiverWaker was not called
	mu            sync.Mutex
	changed       sync.Cond
	queue         []piece // pieces; those from head on are not read yet
	head          int
	drops         bool // bytes that are sent from now on are dropped
	errReturned   bool // a read has returned the receiver's error
	sender        side
	receiver      side
}

// piece is the unread part of a buffer in flight.
type piece struct {
	bytes []byte
	due   time.Duration
}

// side holds the reasons why an end of a pipe fails. An action of its own rank has precedence over an action
// of the other rank.
type side struct {
	own, peer error
	due       time.Duration // the time from which peer takes effect
}

// err returns the error of the side at time now, or nil.
func (s *side) err(now time.Duration) error {
	if s.own == nil && s.due <= now {
		return s.peer
	}
	return s.own
}

// fail records err as the reason why the side fails because of its own rank. Close replaces an earlier abort,
// and release replaces both.
func (s *side) fail(err error) {
	if s.own == nil || err == transport.ErrReleased || err == transport.ErrClosed &&
		s.own != transport.ErrReleased {
		s.own = err
	}
}

// failRemote records err as the reason why the side fails because of the other rank. It takes effect at due.
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
	if p.senderWaker != nil && p.senderWaker.notify.Load() != nil && p.clock.latency == 0 {
		p.notifyDue.Store(true)
		p.changed.Broadcast()
		return nil
	}
	p.announce()
	return nil
}

// notify notifies the receiver of a send that did not, unless the receiver has read the bytes since.
func (p *pipe) notify() {
	if !p.notifyDue.Load() {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.notifyDue.Swap(false) && p.head < len(p.queue) {
		p.receiverWaker.wake()
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

// read copies while it holds mu, so that no goroutine reads the buffers after a call that returns them to the
// sender has held mu. If wait is not set, read may return 0 and no error.
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
		if first.bytes = first.bytes[n:]; len(first.bytes) == 0 {
			first.bytes = nil
			p.head++
		}
	}
	if p.head == len(p.queue) {
		p.queue, p.head = p.queue[:0], 0
	}
	// This comes last, because a sender that polls sent may reuse its buffers from here on without holding
	// mu.
	p.sent.Add(uint64(total))
	p.changed.Broadcast()
	return total, nil
}

// arrived reports whether there are bytes to read at time now. The caller holds mu.
func (p *pipe) arrived(now time.Duration) bool {
	return p.head < len(p.queue) && p.queue[p.head].due <= now
}

// hasUnread reports whether a read would return bytes, or an error for the first time.
func (p *pipe) hasUnread() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.clock.now()
	err := p.receiver.err(now)
	return p.receiver.own == nil && p.arrived(now) || err != nil && !p.errReturned
}

// closeSender fails the sender with own and, unless other is nil, the receiver with other after it has read
// all bytes. closeSender copies the unread bytes, because the sender may reuse its buffers afterwards.
func (p *pipe) closeSender(own, other error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sender.fail(own)
	if other != nil {
		p.receiver.failRemote(other, p.clock.arrival())
	}
	if p.receiver.own != nil {
		p.empty() // the receiver will not read the bytes
	}
	for i := range p.queue[p.head:] {
		unread := &p.queue[p.head+i]
		unread.bytes = bytes.Clone(unread.bytes)
	}
	p.announce()
}

// closeReceiver fails the receiver with own and, unless other is nil, the sender with other. The unread bytes
// are never read, but the sender's Flush waits for them until other arrives.
func (p *pipe) closeReceiver(own, other error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.receiver.fail(own)
	if other != nil {
		p.sender.failRemote(other, p.clock.arrival())
	}
	p.announce()
}

// drop drops the unread bytes and all bytes that are sent later. The sender does not notice.
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

// announce wakes the goroutines that wait now and, if there is a latency, again when the news has arrived at
// the other end. The caller holds mu.
func (p *pipe) announce() {
	p.changed.Broadcast()
	if p.receiverWaker != nil {
		p.receiverWaker.wake()
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
		p.receiverWaker.wake()
	}
}
