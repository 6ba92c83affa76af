package shm

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

// These constants define the layout of a control segment, in bytes. Words that different ranks access are in
// different cache lines. lineBytes is the size of two cache lines, because processors fetch lines in pairs.
const (
	lineBytes = 128
	// parkedAt is the offset of a u32 that is 1 while a goroutine of the owner is parked. A peer that sends
	// something must then write to the eventfd of the owner.
	parkedAt = 0
	// slotsAt is the offset of the slots. At the leader there is one slot for each other rank of the group,
	// in the order of the group. At any other rank there is one slot, for the leader.
	slotsAt = lineBytes
	// These are the offsets of words in a slot. At headAt is a u64, the number of bytes that the owner has
	// written for the rank of the slot. At fullAt is a u32, which is not 0 while the owner has more bytes for
	// that rank than the ring has room for. At openAt is a u32, which is not 0 if the owner has asked for the
	// Conn to that rank.
	headAt, fullAt, openAt = 0, 8, 12
	// tailAt is the offset in a slot of a u64: the number of bytes that the owner has read from the rank of
	// the slot.
	tailAt    = lineBytes
	slotBytes = 2 * lineBytes
	// pageBytes is the alignment of the first ring, which follows the slots. So if the size of a ring is a
	// multiple of pageBytes, the ring shares no page with another ring.
	pageBytes = 4096
)

// controlLayout computes the offsets in a control segment. size is the number of slots.
type controlLayout struct{ size, ringBytes int }

func (l controlLayout) slot(index int) int { return slotsAt + index*slotBytes }

func (l controlLayout) ringOffset(index int) int {
	return (slotsAt+l.size*slotBytes+pageBytes-1)/pageBytes*pageBytes + index*l.ringBytes
}

// slot is a slot of a control segment, and the ring of the same rank.
type slot struct{ words, ring []byte }

func (l controlLayout) slotOf(segment []byte, index int) slot {
	return slot{segment[l.slot(index):][:slotBytes], segment[l.ringOffset(index):][:l.ringBytes]}
}

func (l controlLayout) bytes() int { return l.ringOffset(l.size) }

// word32 returns a pointer to the u32 in b whose byte offset is at. b is a segment, which is aligned to a
// page, or a slot of one, so the pointer is aligned.
func word32(b []byte, at int) *uint32 { return (*uint32)(unsafe.Pointer(&b[at : at+4][0])) }
func word64(b []byte, at int) *uint64 { return (*uint64)(unsafe.Pointer(&b[at : at+8][0])) }

// conn is the Control channel to a peer of the group. It consists of two rings and of words that each rank
// writes. A ring is in the segment of the rank that writes to it.
//
// The words are accessed only with sync/atomic, whose operations are sequentially consistent. Before a rank
// parks, it sets its parked word and then loads the head. A sender stores the head and then loads the peer's
// parked word. So at least one of the two sees what the other has stored (Dekker's algorithm).
type conn struct {
	peer      topo.Rank
	waker     *waker     // wakes goroutines of this rank
	peerWaker *peerWaker // wakes the peer
	lane      transport.Lane

	// cause is the reason why this rank has given up the Conn. gone is the reason why the peer has. Each of
	// them is nil as long as the rank has not given up the Conn.
	cause, gone atomic.Pointer[error]
	sent        atomic.Uint64
	taken       atomic.Bool  // Mesh.Conn has returned this channel
	deferNotify *atomic.Bool // shared with the Mesh; if set, Send does not notify the peer
	notifyDue   atomic.Bool  // bytes were written since the peer was last notified

	reading      sync.Mutex
	arrived      sync.Cond // signals that bytes or an error may have arrived
	in           []byte    // ring in the peer's segment, from which this rank reads
	inHead       *uint64   // word in the peer's segment
	inFull       *uint32   // word in the peer's segment
	inOpen       *uint32   // word in the peer's segment
	inTail       *uint64   // word in this rank's segment
	tail         uint64
	seen         uint64 // last value that was read from inHead
	notifiedTail uint64 // value of tail when the peer was last notified of room
	rerr         error
	errReturned  bool // a call has already returned the error cause or rerr

	writing sync.Mutex
	emptied sync.Cond // signals that queue is empty
	out     []byte    // ring in this rank's segment, to which this rank writes
	outHead *uint64   // word in this rank's segment
	outFull *uint32   // word in this rank's segment
	outOpen *uint32   // word in this rank's segment
	outTail *uint64   // word in the peer's segment
	head    uint64
	freed   uint64   // last value that was read from outTail
	queue   [][]byte // the unwritten buffers are queue[first:]
	first   int
	full    bool // last value that was written to outFull
	werr    error
}

// newConn returns the channel to p. own is the slot for p in this rank's segment, and theirs is the slot for
// this rank in the segment of p.
func newConn(w *waker, deferNotify *atomic.Bool, p *peer, own, theirs slot) *conn {
	c := &conn{
		peer: p.rank, waker: w, peerWaker: &p.waker, lane: transport.Control, deferNotify: deferNotify,
		in:     theirs.ring,
		inHead: word64(theirs.words, headAt), inFull: word32(theirs.words, fullAt),
		inOpen:  word32(theirs.words, openAt),
		inTail:  word64(own.words, tailAt),
		out:     own.ring,
		outHead: word64(own.words, headAt), outFull: word32(own.words, fullAt),
		outOpen: word32(own.words, openAt),
		outTail: word64(theirs.words, tailAt),
	}
	c.arrived.L, c.emptied.L = &c.reading, &c.writing
	return c
}

// Read implements transport.Conn.
func (c *conn) Read(p []byte) (int, error) {
	c.reading.Lock()
	defer c.reading.Unlock()
	n, err := c.take(p)
	if n > 0 || err != nil || len(p) == 0 {
		return n, err
	}
	c.waker.park()
	defer c.waker.unpark()
	for {
		if n, err = c.take(p); n > 0 || err != nil {
			return n, err
		}
		c.arrived.Wait()
	}
}

// TryRead implements transport.Conn.
func (c *conn) TryRead(p []byte) (int, error) {
	c.reading.Lock()
	defer c.reading.Unlock()
	return c.take(p)
}

// take copies bytes that have arrived into p. The caller holds reading.
func (c *conn) take(p []byte) (int, error) {
	if cause := c.cause.Load(); cause != nil {
		c.errReturned = true
		return 0, *cause
	}
	if c.rerr != nil || len(p) == 0 {
		return 0, c.rerr
	}
	// gone is loaded before head. So if gone is set, head includes all bytes that the peer wrote before it
	// died.
	gone := c.gone.Load()
	head := atomic.LoadUint64(c.inHead)
	used := head - c.tail
	if head < c.seen || used > uint64(len(c.in)) {
		c.rerr, c.errReturned = c.breach("ring head", head, c.seen, c.tail+uint64(len(c.in))), true
		return 0, c.rerr
	}
	c.seen = head
	if used == 0 {
		if gone != nil {
			c.rerr, c.errReturned = *gone, true
		}
		return 0, c.rerr
	}
	p = p[:min(uint64(len(p)), used)]
	at := c.tail & uint64(len(c.in)-1)
	if n := copy(p, c.in[at:]); n < len(p) {
		copy(p[n:], c.in)
	}
	c.tail += uint64(len(p))
	shmem.Store64(c.inTail, c.tail)
	if atomic.LoadUint32(c.inFull) != 0 {
		c.notifyRoom()
	}
	return len(p), nil
}

// notifyRoom wakes the peer if half of the ring is free. It is called while the peer waits for room to write.
// The peer then fills all free room before it waits again. So a quarter of the ring must be read before
// notifyRoom wakes the peer again.
func (c *conn) notifyRoom() {
	size := uint64(len(c.in))
	if atomic.LoadUint64(c.inHead)-c.tail <= size/2 && c.tail-c.notifiedTail >= size/4 {
		c.notifiedTail = c.tail
		c.peerWaker.wake()
	}
}

// Send implements transport.Conn.
func (c *conn) Send(p []byte) error {
	c.writing.Lock()
	defer c.writing.Unlock()
	if err := c.sendErr(); err != nil {
		return err
	}
	if !c.deferNotify.Load() {
		defer c.notifyLocked()
	}
	if c.first == len(c.queue) {
		p = p[c.put(p):]
	}
	if len(p) == 0 || c.werr != nil {
		return c.werr
	}
	if len(c.queue) == cap(c.queue) && c.first > len(c.queue)/2 {
		c.queue, c.first = slices.Delete(c.queue, 0, c.first), 0
	}
	c.queue = append(c.queue, p)
	c.pump()
	return c.werr
}

// TrySend implements transport.Conn. It queues all of p, because Send needs no other goroutine either.
func (c *conn) TrySend(p []byte) (int, error) { return len(p), c.Send(p) }

// notify wakes the peer if it is parked, unless it has already read all bytes that were written since it was
// last notified.
func (c *conn) notify() {
	if !c.notifyDue.Load() {
		return
	}
	c.writing.Lock()
	defer c.writing.Unlock()
	if c.cause.Load() == nil {
		c.notifyLocked()
	}
}

// notifyLocked does the same as notify. The caller holds writing.
func (c *conn) notifyLocked() {
	if c.notifyDue.Swap(false) && atomic.LoadUint64(c.outTail) != c.head {
		c.peerWaker.wakeIfParked()
	}
}

// Sent implements transport.Conn.
func (c *conn) Sent() uint64 { return c.sent.Load() }

// Flush implements transport.Conn.
func (c *conn) Flush() error {
	c.writing.Lock()
	defer c.writing.Unlock()
	for c.first < len(c.queue) {
		c.emptied.Wait()
	}
	return c.sendErr()
}

// put writes as much of p as fits into the ring, and returns the number of bytes that it has written. If the
// peer's tail is impossible, put sets werr. The caller holds writing.
func (c *conn) put(p []byte) int {
	size := uint64(len(c.out))
	room := size - (c.head - c.freed)
	if room < uint64(len(p)) {
		tail := atomic.LoadUint64(c.outTail)
		if tail < c.freed || tail > c.head {
			c.werr = c.breach("ring tail", tail, c.freed, c.head)
			c.dropQueue()
			return 0
		}
		c.freed = tail
		room = size - (c.head - tail)
	}
	p = p[:min(uint64(len(p)), room)]
	if len(p) == 0 {
		return 0
	}
	at := c.head & (size - 1)
	if n := copy(c.out[at:], p); n < len(p) {
		copy(c.out, p[n:])
	}
	c.head += uint64(len(p))
	shmem.Store64(c.outHead, c.head)
	c.sent.Add(uint64(len(p)))
	c.notifyDue.Store(true)
	return len(p)
}

// pump writes from the queue until the queue is empty or the ring is full. If the ring is full, pump tells
// the peer that this rank waits for room. The caller holds writing.
func (c *conn) pump() {
	for c.first < len(c.queue) {
		p := c.queue[c.first]
		n := c.put(p)
		switch {
		case c.werr != nil:
			return
		case n == len(p):
			c.queue[c.first] = nil
			c.first++
		case n > 0:
			c.queue[c.first] = p[n:]
		case c.full:
			return
		default:
			// The next iteration checks for room again, because the peer may have read before it could see
			// that this rank waits for room.
			c.setFull(1)
		}
	}
	c.dropQueue()
	if c.full {
		c.setFull(0)
	}
}

func (c *conn) setFull(v uint32) {
	c.full = v != 0
	shmem.Store32(c.outFull, v)
}

// dropQueue empties the queue and wakes the callers of Flush. The caller holds writing.
func (c *conn) dropQueue() {
	clear(c.queue)
	c.queue, c.first = c.queue[:0], 0
	c.emptied.Broadcast()
}

// sendErr returns the error that makes sending fail, or nil if sending is possible. The caller holds writing.
func (c *conn) sendErr() error {
	if cause := c.cause.Load(); cause != nil {
		return *cause
	}
	if c.werr == nil {
		if gone := c.gone.Load(); gone != nil {
			c.werr = *gone
		}
	}
	return c.werr
}

// breach returns the error for a word in shared memory whose value violates the protocol. The value must be
// between least and most.
func (c *conn) breach(word string, got, least, most uint64) error {
	return &transport.PeerError{Peer: c.peer, Lane: c.lane,
		Err: fmt.Errorf("shm: the peer set the %[2]s to %[1]d, want %[3]d to %[4]d", got, word, least, most)}
}

// waiting reports whether a read would return bytes, or an error that no read has returned yet.
func (c *conn) waiting() bool {
	c.reading.Lock()
	defer c.reading.Unlock()
	if c.errReturned {
		return false
	}
	return c.cause.Load() != nil || c.gone.Load() != nil || atomic.LoadUint64(c.inHead) != c.tail
}

// wake wakes the reader. If there is room, it also writes from the queue.
func (c *conn) wake() {
	c.reading.Lock()
	c.arrived.Broadcast()
	c.reading.Unlock()
	c.writing.Lock()
	defer c.writing.Unlock()
	if c.sendErr() != nil {
		c.dropQueue()
	} else {
		c.pump()
		c.notifyLocked() // pump itself does not notify the peer
	}
}

// fail makes the Conn fail with err. When fail returns, no goroutine uses the queue any more. If err is
// transport.ErrClosed, no goroutine uses the shared memory any more either.
func (c *conn) fail(err error) {
	for {
		old := c.cause.Load()
		if old != nil && (err != transport.ErrClosed || *old == transport.ErrClosed) {
			return
		}
		if c.cause.CompareAndSwap(old, &err) {
			break
		}
	}
	c.reading.Lock()
	c.errReturned = false
	c.reading.Unlock()
	c.wake()
}

// lose makes the Conn fail because the peer has gone. err is the reason.
func (c *conn) lose(err error) {
	err = &transport.PeerError{Peer: c.peer, Lane: c.lane, Err: err}
	c.gone.CompareAndSwap(nil, &err)
	c.wake()
}

// open tells the peer that this rank has asked for the Conn. The lower of the two ranks calls it. It may be
// called after the peer has gone.
func (c *conn) open() {
	c.writing.Lock()
	defer c.writing.Unlock()
	if c.cause.Load() == nil {
		shmem.Store32(c.outOpen, 1)
		c.peerWaker.wake()
	}
}

// isOpen reports whether the peer has asked for the Conn. The higher of the two ranks calls it.
func (c *conn) isOpen() bool {
	c.reading.Lock()
	defer c.reading.Unlock()
	return c.cause.Load() == nil && atomic.LoadUint32(c.inOpen) != 0
}
