package mem

import (
	"bytes"
	"io"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/gohvd/gohvd/topo"
	"github.com/gohvd/gohvd/transport"
)

// channel is both directions between two ranks on one lane.
type channel struct {
	lo, hi   conn
	up, down pipe // up runs from the lower rank to the higher
}

func newChannel(k key) *channel {
	ch := &channel{}
	ch.up.changed.L = &ch.up.mu
	ch.down.changed.L = &ch.down.mu
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
}

// Read implements transport.Conn.
func (c *conn) Read(p []byte) (int, error) { return c.in.read(p) }

// Send implements transport.Conn.
func (c *conn) Send(p []byte) error { return c.out.send(p) }

// Sent implements transport.Conn.
func (c *conn) Sent() uint64 { return c.out.sent.Load() }

// Flush implements transport.Conn.
func (c *conn) Flush() error { return c.out.flush() }

// abort fails this end's calls with err; the other end is not told.
func (c *conn) abort(err error) {
	c.out.leave(err, nil)
	c.in.refuse(err, nil)
}

// close fails this end's calls with ErrClosed and the other's with a *transport.PeerError.
func (c *conn) close() {
	c.out.leave(transport.ErrClosed, &transport.PeerError{Peer: c.rank, Lane: c.lane, Err: io.ErrUnexpectedEOF})
	c.in.refuse(transport.ErrClosed, &transport.PeerError{Peer: c.rank, Lane: c.lane, Err: io.ErrClosedPipe})
}

// pipe is one direction of a channel. Buffers wait in it by reference until the receiver has copied them.
type pipe struct {
	sent atomic.Uint64

	mu       sync.Mutex
	changed  sync.Cond
	queue    [][]byte // from head on unread
	head     int
	sender   side
	receiver side
}

// side is why an end of a pipe fails: what its own rank did comes before what the other did.
type side struct{ own, peer error }

func (s side) err() error {
	if s.own != nil {
		return s.own
	}
	return s.peer
}

// fail notes why a side fails. Closing replaces an earlier abort.
func (s *side) fail(err error) {
	if s.own == nil || err == transport.ErrClosed {
		s.own = err
	}
}

func (p *pipe) send(b []byte) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.sender.err(); err != nil || len(b) == 0 {
		return err
	}
	if len(p.queue) == cap(p.queue) && p.head > len(p.queue)/2 {
		p.queue, p.head = slices.Delete(p.queue, 0, p.head), 0
	}
	p.queue = append(p.queue, b)
	p.changed.Broadcast()
	return nil
}

func (p *pipe) flush() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.head < len(p.queue) && p.sender.err() == nil {
		p.changed.Wait()
	}
	return p.sender.err()
}

// read copies under mu: once a call that gives the sender its buffers back has held mu, nobody reads them.
func (p *pipe) read(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.head == len(p.queue) && p.receiver.err() == nil && len(b) > 0 {
		p.changed.Wait()
	}
	if p.receiver.own != nil {
		return 0, p.receiver.own
	}
	if p.head == len(p.queue) {
		return 0, p.receiver.peer
	}
	total := 0
	for total < len(b) && p.head < len(p.queue) {
		n := copy(b[total:], p.queue[p.head])
		total += n
		if p.queue[p.head] = p.queue[p.head][n:]; len(p.queue[p.head]) == 0 {
			p.queue[p.head] = nil
			p.head++
		}
	}
	if p.head == len(p.queue) {
		p.queue, p.head = p.queue[:0], 0
	}
	// Last: a sender that watches sent may reuse its buffers from here on, without holding mu.
	p.sent.Add(uint64(total))
	p.changed.Broadcast()
	return total, nil
}

// leave fails the sender with own and, unless other is nil, the receiver with other once it has read all.
// What is unread is copied, because the sender gets its buffers back.
func (p *pipe) leave(own, other error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sender.fail(own)
	if other != nil {
		p.receiver.peer = other
	}
	for i, b := range p.queue[p.head:] {
		p.queue[p.head+i] = bytes.Clone(b)
	}
	p.changed.Broadcast()
}

// refuse fails the receiver with own and, unless other is nil, the sender with other, and drops what is
// unread then.
func (p *pipe) refuse(own, other error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.receiver.fail(own)
	if other != nil {
		p.sender.peer = other
		clear(p.queue)
		p.queue, p.head = nil, 0
	}
	p.changed.Broadcast()
}
