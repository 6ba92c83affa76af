package tcp

import (
	"errors"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

const (
	// maxWrite bounds one write: some systems refuse 2 GiB and more.
	maxWrite = 1 << 30
	// maxBatch and maxBatchBytes bound what the writer puts into one system call. Small messages queued behind
	// a slow reader drain many times faster so (BenchmarkDrain); what is larger goes alone, because then Sent
	// rises while it is written.
	maxBatch      = 64
	maxBatchBytes = 256 << 10
	// recordBytes is the most that TLS puts into one record (RFC 8446, section 5.1).
	recordBytes = 16 << 10
)

// conn is the channel to one peer on one lane. The sender writes what the socket takes at once; the rest
// waits in queue for a goroutine, started when there is a rest for the first time, that writes it as the
// socket drains. While that goroutine has work, the sender only queues: one of them writes at a time. An encrypted
// connection is written by that goroutine alone.
//
// Deadlines, and the end, are those of the socket in both cases. TLS has words of its own for the end of a stream, which
// would have to wait for room; they are not needed, because a stream that ends is an error at the peer however it ends.
type conn struct {
	lane transport.Lane
	peer topo.Rank
	sock *socket
	over net.Conn        // sock, or TLS over it: then only out writes to sock
	out  *gather         // nil if over is sock
	wg   *sync.WaitGroup // of the Endpoint, whose Close waits for the writer
	poll *poller         // nil on other lanes than Control

	// cause is why this side gave up the connection. It is set before the socket is touched, so that whoever
	// is thrown out of a system call finds it.
	cause atomic.Pointer[error]
	sent  atomic.Uint64

	reading sync.Mutex  // held by Read and TryRead
	rerr    error       // of the receiving half
	unread  atomic.Bool // TLS may have decrypted more than it was asked for

	// These belong to whoever writes, and are kept because Send must not allocate.
	small    [maxBatch][]byte
	batch    [][]byte // a part of small
	gathered []byte   // batch in one piece
	record   []byte   // what goes into the next record, if over is TLS
	unsent   int      // bytes that out has and sent has not

	mu      sync.Mutex
	changed sync.Cond // queue ran empty or got its first buffer, or cause was set
	queue   [][]byte  // from head on unwritten; the writer leaves buffers in place until they are written
	head    int
	writer  bool  // has been started
	serr    error // of the sending half
}

// newConn makes a channel of the socket, when the handshake is over. over is sock or *sealed over it.
func newConn(wg *sync.WaitGroup, lane transport.Lane, peer topo.Rank, sock *socket, over net.Conn) *conn {
	c := &conn{lane: lane, peer: peer, sock: sock, over: over, wg: wg}
	c.changed.L = &c.mu
	if s, ok := over.(*sealed); ok {
		c.out, c.record = s.out, make([]byte, 0, recordBytes)
		c.out.begin()
	}
	return c
}

// Read implements transport.Conn.
func (c *conn) Read(p []byte) (int, error) {
	c.reading.Lock()
	defer c.reading.Unlock()
	n, err := c.read(c.over.Read, p)
	c.unread.Store(c.out != nil && n > 0)
	return n, err
}

// TryRead implements transport.Conn.
func (c *conn) TryRead(p []byte) (n int, err error) {
	c.reading.Lock()
	defer c.reading.Unlock()
	if c.sock.isWaitedFor() {
		c.leaveRuntimePoller()
	}
	switch {
	case c.out == nil:
		n, err = c.read(c.sock.TryRead, p)
	case c.unread.Load() || c.out.fill(c.sock) || c.cause.Load() != nil || c.rerr != nil:
		c.out.trying = true
		n, err = c.read(c.over.Read, p)
		c.out.trying = false
		c.unread.Store(n > 0)
	}
	if err != nil && c.poll != nil {
		c.poll.remove(c)
	}
	return n, err
}

// leaveRuntimePoller is called by who polls. The socket changes its descriptor then, which the poller knows it by.
func (c *conn) leaveRuntimePoller() {
	if c.poll != nil {
		c.poll.remove(c)
	}
	err := c.sock.leave()
	if c.poll != nil {
		err = errors.Join(err, c.poll.add(c))
	}
	if err != nil && c.rerr == nil {
		c.rerr = c.explain(err)
	}
}

// read reads by r and notes a failure. It gives 0 and no error for errWouldBlock. The caller holds reading.
func (c *conn) read(r func([]byte) (int, error), p []byte) (int, error) {
	if cause := c.cause.Load(); cause != nil {
		return 0, *cause
	}
	if c.rerr != nil {
		return 0, c.rerr
	}
	n, err := r(p)
	if err == nil || err == errWouldBlock {
		return n, nil
	}
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	c.rerr = c.explain(err)
	return n, c.rerr
}

// hasUnread reports whether TryRead may have something to give that the socket does not show.
func (c *conn) hasUnread() bool { return c.unread.Load() || c.cause.Load() != nil }

// Send implements transport.Conn.
func (c *conn) Send(p []byte) error {
	c.mu.Lock()
	err, busy := c.sendErr(), c.head < len(c.queue)
	c.mu.Unlock()
	if err != nil {
		return err
	}
	if !busy && c.out == nil {
		// The writer has nothing to do, and only this goroutine could give it something.
		p, err = c.write(p, c.sock.TryWrite)
	}
	if err == nil && len(p) == 0 {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		c.serr = err
	}
	if err := c.sendErr(); err != nil {
		return err
	}
	c.push(p)
	if !c.writer {
		c.writer = true
		c.wg.Go(c.drain)
	}
	return nil
}

// Sent implements transport.Conn.
func (c *conn) Sent() uint64 { return c.sent.Load() }

// Flush implements transport.Conn. An abort or a failure empties the queue too, as soon as the writer is out
// of the kernel.
func (c *conn) Flush() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.head < len(c.queue) {
		c.changed.Wait()
	}
	return c.sendErr()
}

// drain is the writer goroutine. It ends when the sending half has failed, at the latest with close.
func (c *conn) drain() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		for c.head == len(c.queue) && c.sendErr() == nil {
			c.changed.Wait()
		}
		if c.sendErr() != nil {
			c.queue, c.head = nil, 0
			c.changed.Broadcast()
			return
		}
		n := c.fillBatch()
		c.mu.Unlock()
		var err error
		switch {
		case c.out != nil:
			err = c.writeRecords()
		case n > 1:
			err = c.writeBatch()
		default:
			_, err = c.write(c.small[0], c.sock.WriteSome)
		}
		clear(c.small[:n])
		c.mu.Lock()
		if err != nil {
			c.serr = err
			continue
		}
		c.pop(n)
	}
}

// fillBatch puts the first buffer of queue into batch, and those behind it as far as they are small together, and
// returns how many. The caller holds mu.
func (c *conn) fillBatch() int {
	n, numBytes := 0, 0
	for _, p := range c.queue[c.head:min(c.head+maxBatch, len(c.queue))] {
		if numBytes += len(p); numBytes > maxBatchBytes && n > 0 {
			break
		}
		c.small[n] = p
		n++
	}
	c.batch = c.small[:n]
	return n
}

// writeBatch writes batch in one piece: a copy costs less than a system call.
func (c *conn) writeBatch() error {
	c.gathered = c.gathered[:0]
	for _, p := range c.batch {
		c.gathered = append(c.gathered, p...)
	}
	_, err := c.write(c.gathered, c.sock.WriteSome)
	return err
}

// writeRecords writes batch in as few records as it takes: a copy costs less than a system call.
func (c *conn) writeRecords() error {
	for _, p := range c.batch {
		for len(p) > 0 {
			n := min(len(p), recordBytes-len(c.record))
			next := p[:n]
			if n < recordBytes {
				c.record = append(c.record, next...)
				next = c.record
			}
			p = p[n:]
			if len(next) < recordBytes {
				continue
			}
			if err := c.writeRecord(next); err != nil {
				return err
			}
		}
	}
	if err := c.writeRecord(c.record); err != nil {
		return err
	}
	return c.flushRecords()
}

// writeRecord has TLS make a record of b, which is or takes the place of record.
func (c *conn) writeRecord(b []byte) error {
	n, err := c.over.Write(b)
	c.unsent += n
	c.record = c.record[:0]
	switch {
	case err != nil:
		return c.explain(err)
	case c.out.full():
		return c.flushRecords()
	}
	return nil
}

// flushRecords writes the records that are made.
func (c *conn) flushRecords() error {
	if err := c.out.flush(); err != nil {
		return c.explain(err)
	}
	c.sent.Add(uint64(c.unsent))
	c.unsent = 0
	return nil
}

// push appends p to queue. A queue that never runs empty moves to the front now and then, or it would grow
// for ever. The caller holds mu.
func (c *conn) push(p []byte) {
	if len(c.queue) == cap(c.queue) && c.head > len(c.queue)/2 {
		c.queue, c.head = slices.Delete(c.queue, 0, c.head), 0
	}
	c.queue = append(c.queue, p)
	c.changed.Broadcast()
}

// pop removes the first n buffers of queue. The caller holds mu.
func (c *conn) pop(n int) {
	clear(c.queue[c.head : c.head+n])
	if c.head += n; c.head == len(c.queue) {
		c.queue, c.head = c.queue[:0], 0
		c.changed.Broadcast()
	}
}

// sendErr is why the sending half has failed, if it has. The caller holds mu.
func (c *conn) sendErr() error {
	if cause := c.cause.Load(); cause != nil {
		return *cause
	}
	return c.serr
}

// explain is the error to report when a system call failed with err.
func (c *conn) explain(err error) error {
	if cause := c.cause.Load(); cause != nil {
		return *cause
	}
	return &transport.PeerError{Peer: c.peer, Lane: c.lane, Err: err}
}

// abort fails all calls with err and leaves the socket open. It is not called after close.
func (c *conn) abort(err error) {
	c.cause.Store(&err)
	// A deadline in the past throws out whoever waits for the socket, and lets nobody in. It fails only on a
	// closed socket, which does the same.
	_ = c.sock.SetDeadline(time.Unix(1, 0))
	c.wake()
}

// close fails all calls with ErrClosed.
func (c *conn) close() {
	err := transport.ErrClosed
	c.cause.Store(&err)
	hangUp(c.sock)
	c.wake()
}

// linger is the graceful end of a connection that was aborted. The peer gets what the socket has taken, then the
// end of the stream. What the peer sends is read and dropped, until its stream ends or d has passed: the kernel
// answers bytes that find the socket closed, or are unread when it closes, with a reset, which can cost the peer
// what it has not read yet.
func (c *conn) linger(d time.Duration) {
	defer hangUp(c.sock)
	if err := c.endStream(d); err != nil {
		return // the connection has ended by itself
	}
	// However this ends, there is nothing left to wait for.
	_, _ = io.Copy(io.Discard, c.sock)
}

// endStream tells the peer that no more will come, and allows reading for d.
func (c *conn) endStream(d time.Duration) error {
	// Whoever was in Read is out, or the new deadline would keep it there; who comes later finds cause.
	c.reading.Lock()
	defer c.reading.Unlock()
	if err := c.sock.CloseWrite(); err != nil {
		return err
	}
	return c.sock.SetReadDeadline(time.Now().Add(d))
}

// wake makes those who wait for changed see cause.
func (c *conn) wake() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.changed.Broadcast()
}

// write writes p by one of the socket's methods, and returns what it left because it must not wait. It watches cause itself
// because the deadline throws out only who waits, and a fast peer never makes it wait.
func (c *conn) write(p []byte, by func([]byte) (int, error)) ([]byte, error) {
	for len(p) > 0 {
		if c.cause.Load() != nil {
			return nil, c.explain(nil)
		}
		n, err := by(p)
		if err == errWouldBlock {
			break
		}
		if err != nil {
			return nil, c.explain(err)
		}
		p = p[n:]
		c.sent.Add(uint64(n))
	}
	return p, nil
}
