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
	// maxWrite is the largest number of bytes of one write, because some systems refuse 2 GiB and more.
	maxWrite = 1 << 30
	// In one system call the writer writes at most maxBatch buffers with at most maxBatchBytes bytes in
	// total. With batches, small messages that are queued for a slow reader drain many times faster
	// (BenchmarkDrain). A larger buffer is written by itself, so that Sent can rise while it is written.
	maxBatch      = 64
	maxBatchBytes = 256 << 10
	// recordBytes is the largest number of bytes of one TLS record (RFC 8446, section 5.1).
	recordBytes = 16 << 10
)

// conn is the channel to one peer on one lane. Send writes as many bytes as the socket takes at once and
// appends the rest to queue. The writer, a goroutine that is started when it is first needed, writes the
// queue as the socket drains. While the queue is not empty, Send only appends to it. So Send and the writer
// never write at the same time. On an encrypted connection only the writer writes.
//
// With TLS, deadlines and the end of the stream work as without TLS, because both belong to the socket. The
// close message of TLS is not sent, because it would have to wait for room in the socket. It is not needed,
// because every end of a stream is an error at the peer.
type conn struct {
	lane transport.Lane
	peer topo.Rank
	sock *socket
	over net.Conn        // sock, or TLS over it; with TLS, only out writes to sock
	out  *recordBuffer   // nil if over is sock
	wg   *sync.WaitGroup // the wait group of the Endpoint, whose Close waits for the writer
	poll *poller         // nil on all lanes except Control

	// cause is the reason why this side gave up the connection. It is set before the socket is changed. The
	// change interrupts system calls, and the interrupted calls then find the cause.
	cause atomic.Pointer[error]
	sent  atomic.Uint64

	reading sync.Mutex  // held by Read and TryRead
	rerr    error       // the error of the receiving half
	unread  atomic.Bool // TLS may hold decrypted bytes that were not read yet

	// The fields of this block belong to the writer. They are kept between batches because the writer should
	// not allocate.
	small    [maxBatch][]byte
	batch    [][]byte // the buffers to write; the first elements of small
	gathered []byte   // a copy of the bytes of batch
	record   []byte   // the bytes of the next record, if over is TLS
	unsent   int      // the number of bytes that were passed to out and are not counted in sent yet

	mu      sync.Mutex
	changed sync.Cond // signals that queue became empty or got a buffer, or that cause was set
	// The unwritten buffers are queue[head:]. The writer removes a buffer after it has written it.
	queue  [][]byte
	head   int
	writer bool  // the writer has been started
	serr   error // the error of the sending half
}

// newConn makes a channel from a socket whose handshake is complete. over is sock, or the *sealed over sock.
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

// leaveRuntimePoller takes the socket out of the runtime's poller, because a goroutine polls it now. This
// changes the descriptor of the socket. So the channel is removed from poll before and added again after.
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

// read calls r and records the error if r fails. If r returns errWouldBlock, read returns 0 and no error. The
// caller holds reading.
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
		// The writer is idle, and only this goroutine could give it work. So this goroutine may write.
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

// Flush implements transport.Conn. After an abort or a failure it returns as soon as the writer has returned
// from its system call and has emptied the queue.
func (c *conn) Flush() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.head < len(c.queue) {
		c.changed.Wait()
	}
	return c.sendErr()
}

// drain writes the buffers in queue. It runs in the writer goroutine. It returns when the sending half has
// failed, which happens at close at the latest.
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

// fillBatch puts the first buffer of queue into batch, and the buffers after it as long as the batch has at
// most maxBatchBytes. It returns the number of buffers. The caller holds mu.
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

// writeBatch copies batch into one buffer and writes that buffer, because a copy costs less than a system
// call.
func (c *conn) writeBatch() error {
	c.gathered = c.gathered[:0]
	for _, p := range c.batch {
		c.gathered = append(c.gathered, p...)
	}
	_, err := c.write(c.gathered, c.sock.WriteSome)
	return err
}

// writeRecords writes batch in as few TLS records as possible. For this it copies small buffers, because a
// copy costs less than a system call.
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

// writeRecord makes a TLS record of b and empties the field record. b is either that field, or the bytes of a
// full record that were not copied to it.
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

// push appends p to queue. If the queue was not empty for a long time, push first moves its buffers to the
// front of the array, which would otherwise grow without limit. The caller holds mu.
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

// sendErr returns the reason why the sending half has failed, or nil. The caller holds mu.
func (c *conn) sendErr() error {
	if cause := c.cause.Load(); cause != nil {
		return *cause
	}
	return c.serr
}

// explain returns the error to report after a system call has failed with err.
func (c *conn) explain(err error) error {
	if cause := c.cause.Load(); cause != nil {
		return *cause
	}
	return &transport.PeerError{Peer: c.peer, Lane: c.lane, Err: err}
}

// abort makes all calls fail with err and leaves the socket open. It must not be called after close.
func (c *conn) abort(err error) {
	c.cause.Store(&err)
	// A deadline in the past interrupts calls that wait for the socket and makes later calls fail.
	// SetDeadline fails only on a closed socket, which has the same effect on calls.
	_ = c.sock.SetDeadline(time.Unix(1, 0))
	c.wake()
}

// close closes the socket and makes all calls fail with ErrClosed.
func (c *conn) close() {
	err := transport.ErrClosed
	c.cause.Store(&err)
	hangUp(c.sock)
	c.wake()
}

// linger ends an aborted connection so that the peer receives the bytes that the socket has taken, and then
// the end of the stream. Until the peer ends its stream or d has passed, linger reads and drops the bytes
// that the peer sends. If bytes arrived at a closed socket, or were unread when it is closed, the kernel
// would send a reset, and the peer could lose bytes that it has not read yet.
func (c *conn) linger(d time.Duration) {
	defer hangUp(c.sock)
	if err := c.endStream(d); err != nil {
		return // the connection has already ended
	}
	// The result does not matter: linger has nothing left to wait for.
	_, _ = io.Copy(io.Discard, c.sock)
}

// endStream ends the outgoing stream and sets the deadline for reading to d from now.
func (c *conn) endStream(d time.Duration) error {
	// A Read that still waited would get the new deadline and wait again. So endStream first waits until Read
	// has returned. Later calls of Read find cause.
	c.reading.Lock()
	defer c.reading.Unlock()
	if err := c.sock.CloseWrite(); err != nil {
		return err
	}
	return c.sock.SetReadDeadline(time.Now().Add(d))
}

// wake wakes the goroutines that wait for changed, so that they notice cause.
func (c *conn) wake() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.changed.Broadcast()
}

// write writes p with the function by, a method of the socket. It returns the rest of p that by could not
// write without waiting. It checks cause before each call of by. A deadline alone would not suffice, because
// it interrupts only a call that waits, and with a fast peer no call waits.
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
