package tcp

import (
	"errors"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

const (
	// In one system call the writer writes at most maxBatch buffers, which have at most maxBatchBytes bytes
	// in total. With batches, a queue of small messages for a slow reader is emptied many times faster
	// (BenchmarkDrain). A larger buffer is written by itself, so that the count of Sent can rise while it is
	// written.
	maxBatch      = 64
	maxBatchBytes = 256 << 10
	// recordBytes is the maximum number of bytes in one TLS record (RFC 8446, section 5.1).
	recordBytes = 16 << 10
)

// conn is the channel to one peer on one lane. Send writes as many bytes as the socket has room for and
// appends the rest to queue. The writer, a goroutine that is started when it is first needed, writes the
// queue as the socket gets room. While the queue is not empty, Send only appends to it. So Send and the
// writer never write at the same time. On an encrypted connection only the writer writes.
//
// With TLS, deadlines and the end of the stream work as without TLS, because both belong to the socket. The
// close message of TLS is not sent, because it would have to wait for room in the socket. It is not needed,
// because every end of a stream is an error at the peer.
type conn struct {
	lane transport.Lane
	peer topo.Rank
	sock *socket
	over net.Conn        // sock, or the TLS connection over sock, which writes to sock only through out
	out  *recordBuffer   // nil if over is sock
	wg   *sync.WaitGroup // wait group of the Endpoint, whose Close waits for the writer
	poll *poller         // nil on all lanes except Control
	// The fields of this block belong to poll and are guarded by poll.mu.
	ready bool   // whether poller.find has found data that maybe has not reported yet
	round uint64 // the round in which maybe was called last
	fd    int32  // the descriptor that poll contains
	// silence notices that the network drops the packets of the connection. It is nil on the Control lane,
	// and if there is no limit.
	silence *dial.Silence

	// cause is the reason why this side has given up the connection, or nil. It is set before a change of the
	// socket that interrupts system calls, so that the interrupted calls find the cause.
	cause atomic.Pointer[error]
	sent  atomic.Uint64

	reading sync.Mutex  // held by Read and TryRead
	rerr    error       // error of the receiving half
	unread  atomic.Bool // TLS may hold decrypted bytes that were not read yet

	// The fields of this block belong to the writer. They live longer than a batch, because the writer should
	// not allocate.
	batch    [][]byte // the buffers to write
	gathered []byte   // a copy of the bytes of batch
	record   []byte   // the bytes of the next TLS record
	unsent   int      // number of bytes that were passed to out and are not counted in sent yet

	mu      sync.Mutex
	changed sync.Cond // signals that queue has become empty or has got a buffer, or that cause was set
	// The unwritten buffers are queue[head:]. The writer removes a buffer after it has written it.
	queue  [][]byte
	head   int
	writer bool  // the writer has been started
	serr   error // error of the sending half
}

// newConn makes a channel from the socket sock, whose handshake is complete. The parameter over is sock, or
// the *sealed that wraps sock.
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
	if c.sock.canLeave() {
		c.leaveRuntimePoller()
	}
	if c.poll != nil && !c.hasUnread() && c.rerr == nil && !c.poll.maybe(c) {
		return 0, nil
	}
	switch {
	case c.out == nil:
		n, err = c.read(c.sock.TryRead, p)
	case c.unread.Load() || c.out.fill(c.sock) || c.cause.Load() != nil || c.rerr != nil:
		n, err = c.readRecords(p)
	}
	if err != nil && c.poll != nil {
		c.poll.remove(c)
	}
	return n, err
}

// readRecords reads from an encrypted connection, without waiting, until p is full or nothing more has
// arrived. So a short read means the same as without TLS, although a read from TLS returns at most one
// record.
func (c *conn) readRecords(p []byte) (n int, err error) {
	c.out.trying = true
	for n < len(p) && err == nil {
		var more int
		more, err = c.read(c.over.Read, p[n:])
		n += more
		if more == 0 && !c.out.fill(c.sock) {
			break
		}
	}
	c.out.trying = false
	c.unread.Store(n == len(p) || n > 0 && err != nil)
	if n > 0 {
		return n, nil // the next call returns the error
	}
	return 0, err
}

// leaveRuntimePoller takes the socket out of the runtime's poller, because a goroutine polls it now. This
// changes the descriptor of the socket. So leaveRuntimePoller first removes the channel from c.poll, and adds
// it again afterwards. If this process has no free descriptor, it changes nothing, because the socket works
// in the runtime's poller too: arriving data only wakes a thread.
func (c *conn) leaveRuntimePoller() {
	fd, err := c.sock.now(func(fd int, _ []byte) (int, error) { return duplicate(fd) }, nil)
	if err != nil {
		return
	}
	if c.poll != nil {
		c.poll.remove(c)
	}
	err = c.sock.leave(fd)
	if c.poll != nil {
		err = errors.Join(err, c.poll.add(c))
	}
	if err != nil && c.rerr == nil {
		c.rerr = c.explain(err)
	}
}

// read calls r with p. If r fails, read records the error. If r returns errWouldBlock, read returns 0 and no
// error. The caller holds reading.
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

// hasUnread reports whether TryRead may return bytes or an error that epoll does not report.
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
		// The writer is idle and only this goroutine could give it work, so this goroutine may write itself.
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

// TrySend implements transport.Conn. On an encrypted connection it queues all of p, because only the writer
// makes records.
func (c *conn) TrySend(p []byte) (int, error) {
	if c.out != nil {
		return len(p), c.Send(p)
	}
	c.mu.Lock()
	err, busy := c.sendErr(), c.head < len(c.queue)
	c.mu.Unlock()
	if err != nil || busy {
		return 0, err
	}
	rest, err := c.write(p, c.sock.TryWrite)
	if err != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.serr = err
		return 0, err
	}
	return len(p) - len(rest), nil
}

// Sent implements transport.Conn.
func (c *conn) Sent() uint64 { return c.sent.Load() }

// Flush implements transport.Conn. After an abort or a failure, Flush returns as soon as the writer has
// returned from its system call and has emptied the queue.
func (c *conn) Flush() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.head < len(c.queue) {
		c.changed.Wait()
	}
	return c.sendErr()
}

// drain writes the buffers in queue. It is the function of the writer goroutine. It returns when the sending
// half has failed. This happens at the latest when the channel is closed.
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
			_, err = c.write(c.batch[0], c.sock.WriteSome)
		}
		clear(c.batch)
		c.mu.Lock()
		if err != nil {
			c.serr = err
			continue
		}
		c.pop(n)
	}
}

// fillBatch puts the first buffer of queue into batch. It then adds the next buffers as long as the batch has
// at most maxBatchBytes. It returns the number of buffers in the batch. The caller holds mu.
func (c *conn) fillBatch() int {
	c.batch = c.batch[:0]
	numBytes := 0
	for _, p := range c.queue[c.head:min(c.head+maxBatch, len(c.queue))] {
		if numBytes += len(p); numBytes > maxBatchBytes && len(c.batch) > 0 {
			break
		}
		c.batch = append(c.batch, p)
	}
	return len(c.batch)
}

// writeBatch copies batch into one buffer and writes that buffer. A copy costs less than a system call for
// each buffer.
func (c *conn) writeBatch() error {
	c.gathered = c.gathered[:0]
	for _, p := range c.batch {
		c.gathered = append(c.gathered, p...)
	}
	_, err := c.write(c.gathered, c.sock.WriteSome)
	return err
}

// writeRecords writes batch in as few TLS records as possible. It copies small buffers into one record,
// because a copy costs less than a system call.
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

// writeRecord makes a TLS record from b and empties the field record. b is either that field, or a part of a
// buffer that fills a record and was not copied.
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

// flushRecords writes the finished records to the socket.
func (c *conn) flushRecords() error {
	if err := c.out.flush(); err != nil {
		return c.explain(err)
	}
	c.sent.Add(uint64(c.unsent))
	c.unsent = 0
	return nil
}

// push appends p to queue. Before the array of the queue would grow, push moves the buffers to its front if
// there is enough free space. Otherwise the array would grow without limit while the queue is never empty.
// The caller holds mu.
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
	c.head += n
	if c.head == len(c.queue) {
		c.queue, c.head = c.queue[:0], 0
		c.changed.Broadcast()
	}
}

// sendErr returns the error that makes sending fail, or nil if sending is possible. The caller holds mu.
func (c *conn) sendErr() error {
	if cause := c.cause.Load(); cause != nil {
		return *cause
	}
	return c.serr
}

// explain returns the error to report if a system call has failed with err.
func (c *conn) explain(err error) error {
	if cause := c.cause.Load(); cause != nil {
		return *cause
	}
	return &transport.PeerError{Peer: c.peer, Lane: c.lane, Err: err}
}

// abort makes all calls fail with err and leaves the socket open. It must not be called after close.
func (c *conn) abort(err error) {
	c.cause.Store(&err)
	c.interrupt()
}

// interrupt makes calls that wait find cause.
func (c *conn) interrupt() {
	// A deadline in the past interrupts calls that wait for the socket and makes later calls fail.
	// SetDeadline itself fails only on a closed socket, on which calls fail anyway.
	_ = c.sock.SetDeadline(time.Unix(1, 0))
	c.wake()
}

// check makes all calls fail if the network drops the packets of the connection. It leaves the socket open.
func (c *conn) check(now time.Time) {
	_, err := c.sock.now(func(fd int, _ []byte) (int, error) { return 0, c.silence.Check(fd, now) }, nil)
	// All other errors of the socket are also those of the calls that use it.
	if _, silent := errors.AsType[*dial.SilenceError](err); !silent {
		return
	}
	var lost error = &transport.PeerError{Peer: c.peer, Lane: c.lane, Err: err}
	if c.cause.CompareAndSwap(nil, &lost) {
		c.interrupt()
	}
}

// close closes the socket and makes all calls fail with ErrClosed.
func (c *conn) close() {
	err := transport.ErrClosed
	c.cause.Store(&err)
	hangUp(c.sock)
	c.wake()
}

// linger ends an aborted connection in such a way that the peer receives the bytes that are already in the
// socket, and then the end of the stream. Until the peer ends its stream or d has passed, linger reads and
// drops the bytes that the peer sends. If bytes arrived at a closed socket, or were unread when it is closed,
// the kernel would send a reset, and the peer could lose bytes that it has not read yet.
func (c *conn) linger(d time.Duration) {
	defer hangUp(c.sock)
	if err := c.endStream(d); err != nil {
		return // the connection has already ended
	}
	// The result is ignored, because the connection is closed next in any case.
	_, _ = io.Copy(io.Discard, c.sock)
}

// endStream ends the outgoing stream and sets the deadline for reading to the time d from now.
func (c *conn) endStream(d time.Duration) error {
	// A pending Read would get the new deadline and wait again. So endStream first waits until Read has
	// returned. Later calls of Read find cause.
	c.reading.Lock()
	defer c.reading.Unlock()
	if err := c.sock.CloseWrite(); err != nil {
		return err
	}
	return c.sock.SetReadDeadline(time.Now().Add(d))
}

// wake wakes the goroutines that wait for changed, so that they see cause.
func (c *conn) wake() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.changed.Broadcast()
}

// write writes p with the function by, a method of the socket. It returns the part of p that the function
// could not write without waiting. It checks cause before each call of the function. The deadline that abort
// sets is not enough, because a deadline interrupts only a call that waits, and with a fast peer no call
// waits.
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
