package tcp

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/gohvd/gohvd/topo"
	"github.com/gohvd/gohvd/transport"
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
	tc   *net.TCPConn
	raw  syscall.RawConn
	over net.Conn        // tc, or TLS over it: then only out writes to tc
	out  *gather         // nil if over is tc
	wg   *sync.WaitGroup // of the Endpoint, whose Close waits for the writer

	// cause is why this side gave up the connection. It is set before the socket is touched, so that whoever
	// is thrown out of a system call finds it.
	cause atomic.Pointer[error]
	sent  atomic.Uint64

	reading sync.Mutex // held by Read
	rerr    error      // of the receiving half

	// These belong to whoever writes. They are kept, and the closures made once, because Send must not allocate.
	rest      []byte
	writeErr  error
	tryWrite  func(fd uintptr) bool
	waitWrite func(fd uintptr) bool
	small     [maxBatch][]byte
	batch     net.Buffers // a part of small
	record    []byte      // what goes into the next record, if over is TLS
	unsent    int         // bytes that out has and sent has not

	mu      sync.Mutex
	changed sync.Cond // queue ran empty or got its first buffer, or cause was set
	queue   [][]byte  // from head on unwritten; the writer leaves buffers in place until they are written
	head    int
	writer  bool  // has been started
	serr    error // of the sending half
}

// newConn makes a channel of the socket nc, when the handshake is over. over is nc or *sealed over it.
func newConn(wg *sync.WaitGroup, lane transport.Lane, peer topo.Rank, nc, over net.Conn) (*conn, error) {
	tc, ok := nc.(*net.TCPConn)
	if !ok {
		return nil, fmt.Errorf("tcp: connection is a %T, want a *net.TCPConn", nc)
	}
	raw, err := tc.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("tcp: connection: %w", err)
	}
	c := &conn{lane: lane, peer: peer, tc: tc, raw: raw, over: over, wg: wg}
	c.changed.L = &c.mu
	if s, ok := over.(*sealed); ok {
		c.out, c.record = s.out, make([]byte, 0, recordBytes)
		c.out.begin()
		return c, nil
	}
	c.tryWrite = func(fd uintptr) bool {
		c.writeSome(int(fd))
		return true
	}
	c.waitWrite = func(fd uintptr) bool { return c.writeSome(int(fd)) }
	return c, nil
}

// Read implements transport.Conn.
func (c *conn) Read(p []byte) (int, error) {
	c.reading.Lock()
	defer c.reading.Unlock()
	if cause := c.cause.Load(); cause != nil {
		return 0, *cause
	}
	if c.rerr != nil {
		return 0, c.rerr
	}
	n, err := c.over.Read(p)
	if err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		c.rerr = c.explain(err)
		return n, c.rerr
	}
	return n, nil
}

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
		p, err = c.write(p, c.tryWrite)
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
			_, err = c.write(c.small[0], c.waitWrite)
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

// writeBatch writes batch, by writev.
func (c *conn) writeBatch() error {
	n, err := c.batch.WriteTo(c.tc)
	c.sent.Add(uint64(n))
	if err != nil {
		return c.explain(err)
	}
	return nil
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
	_ = c.tc.SetDeadline(time.Unix(1, 0))
	c.wake()
}

// close fails all calls with ErrClosed.
func (c *conn) close() {
	err := transport.ErrClosed
	c.cause.Store(&err)
	hangUp(c.tc)
	c.wake()
}

// linger is the graceful end of a connection that was aborted. The peer gets what the socket has taken, then the
// end of the stream. What the peer sends is read and dropped, until its stream ends or d has passed: the kernel
// answers bytes that find the socket closed, or are unread when it closes, with a reset, which can cost the peer
// what it has not read yet.
func (c *conn) linger(d time.Duration) {
	defer hangUp(c.tc)
	if err := c.endStream(d); err != nil {
		return // the connection has ended by itself
	}
	// However this ends, there is nothing left to wait for.
	_, _ = io.Copy(io.Discard, c.tc)
}

// endStream tells the peer that no more will come, and allows reading for d.
func (c *conn) endStream(d time.Duration) error {
	// Whoever was in Read is out, or the new deadline would keep it there; who comes later finds cause.
	c.reading.Lock()
	defer c.reading.Unlock()
	if err := c.tc.CloseWrite(); err != nil {
		return err
	}
	return c.tc.SetReadDeadline(time.Now().Add(d))
}

// wake makes those who wait for changed see cause.
func (c *conn) wake() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.changed.Broadcast()
}

// write writes p by one of the closures and returns what it left.
func (c *conn) write(p []byte, by func(uintptr) bool) ([]byte, error) {
	c.rest, c.writeErr = p, nil
	err := c.raw.Write(by)
	p, c.rest = c.rest, nil
	if err == nil {
		err = c.writeErr
	}
	if err != nil || c.cause.Load() != nil {
		return nil, c.explain(err)
	}
	return p, nil
}

// writeSome writes rest until it is empty, an error, or the socket is full, when it returns false. It
// watches cause itself because the deadline throws out only who waits, and a fast peer never makes it wait.
func (c *conn) writeSome(fd int) bool {
	for len(c.rest) > 0 && c.cause.Load() == nil {
		n, err := syscall.Write(fd, c.rest[:min(len(c.rest), maxWrite)])
		if n > 0 {
			c.rest = c.rest[n:]
			c.sent.Add(uint64(n))
			continue
		}
		switch err {
		case syscall.EINTR:
		case syscall.EAGAIN:
			return false
		default:
			c.writeErr = os.NewSyscallError("write", err)
			return true
		}
	}
	return true
}
