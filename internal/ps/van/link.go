package van

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/ps/pspb"
	"github.com/gohvd/gohvd/internal/trace"
)

const (
	// maxQueuedBytes is the maximum size of the requests in the queue of a link. A single larger request may
	// be in the queue alone.
	maxQueuedBytes = 256 << 20
	// maxReplies is the maximum number of replies in the queue of a link. A peer that obeys the protocol has
	// fewer unanswered requests.
	maxReplies = 1 << 16
	// maxReplyBytes is the maximum size of the replies in the queue of a link. Replies of less than
	// wholeBytes do not count, so that the error of a reply that is too much fits.
	maxReplyBytes = 1 << 30
	// batchBytes is the size from which on queued messages are written without waiting for more of them.
	// Frames of at least wholeBytes are not copied into a batch.
	batchBytes = 64 << 10
	wholeBytes = 16 << 10
	// messageCost is how many bytes the handling of a short message counts as, when replies to several
	// messages are written together. So replies to at most 32 messages are.
	messageCost = 2 << 10
	// maxHeld is the maximum number of requests that wait to be written together.
	maxHeld = 32
	// holdTime is how long a request waits to be written together with others.
	holdTime = time.Millisecond
	// drainTime is how long a link is read after a write has failed.
	drainTime = 5 * time.Second
	// confirmTime is how long the end of a link waits for the scheduler to say that this process is alive.
	confirmTime = time.Second
)

// link is the connection with another process, or of the scheduler with itself. It has a queue with
// priorities, a goroutine that writes and, unless conn is nil, a goroutine that reads.
//
// Requests wait for room: the link has at most WaterMark unanswered requests. Replies do not wait, because
// each belongs to a request of the peer, whose number the peer limits. So the goroutine that reads never
// waits for the goroutine that writes, and no two nodes can wait for each other.
type link struct {
	van     *Van
	process Process
	peer    int      // the first id of the process
	conn    net.Conn // nil for the link of the scheduler with itself
	sock    *socket  // the socket of conn, or nil if it has none
	// polled is the descriptor of conn if it can be polled, otherwise nil.
	polled *descriptor
	// silence notices that the network drops the packets of the connection between a worker and a server. It
	// is nil on other links, which have heartbeats, and if no node dies of silence.
	silence *dial.Silence
	// restored says that an earlier link with the process had ended, although the process had not.
	restored bool

	// held says that messages in the queue wait for the goroutine that reads: replies, which the van's tick
	// also sends, or requests, which Flush and the timer also send.
	held    atomic.Bool
	timer   *time.Timer // calls writeHeld
	lazy    atomic.Bool // a message in the queue waits for another one, or for the van's tick
	writing sync.Mutex  // guards writer
	writer  writer

	wake  chan struct{} // has an element if the writer has something to do
	done  chan struct{} // closed when the link has ended
	over  chan struct{} // closed after done, when the handler has been told of the end
	heard atomic.Int64  // time of the last message, in ns since the van's start
	// excused is the time since then in which this process has read nothing because it was stopped, in ns.
	excused atomic.Int64
	// handling says that a message is being handled, so that this process reads none.
	handling atomic.Bool

	mu          sync.Mutex
	queue       queue
	again       []*flight     // messages that are to be sent again
	requests    int           // number of requests that are queued or not answered
	asked       uint64        // number of requests so far
	together    int           // number of requests since none was in flight
	several     bool          // there was more than one such request the time before
	queued      int           // number of requests in the queue
	queuedBytes int           // size of the requests in the queue
	replies     int           // number of replies in the queue
	replyBytes  int           // size of the long replies in the queue
	room        chan struct{} // closed when there is room for a request; nil if no call waits
	end         error         // reason why the link has ended
	aborted     error         // reason why the goroutine that reads is to end the link
	left        bool          // the peer has sent TERMINATE without a failure
	failure     error         // the failure that the peer has sent with TERMINATE
	beat        bool          // a heartbeat is to be sent
	acks        []uint64      // acknowledgements that are to be sent
	idle        chan struct{} // closed when everything was sent and acknowledged; nil if no call waits
	busy        bool          // the writer writes
	broken      error         // error of a write, after which nothing is written

	own    ownBlocks  // blocks of messages to the peer
	theirs peerBlocks // blocks of messages of the peer

	// reader reads the link if it is polled. It is nil before and after that. Like in and batch, it is used
	// only by the goroutine that reads, which has polled.reading if the link is polled.
	reader *reader
	in     inWindow
	batch  int // cost of the messages since replies were written
	out    outWindow

	counters struct{ sent, received, resent, duplicates atomic.Uint64 }
}

func newLink(v *Van, p Process, conn net.Conn) *link {
	p.Connection = v.made.Add(1)
	l := &link{van: v, process: p, peer: p.ID, conn: conn, wake: make(chan struct{}, 1),
		done: make(chan struct{}), over: make(chan struct{})}
	l.heard.Store(int64(v.timing.now()))
	l.timer = time.AfterFunc(holdTime, l.writeHeld)
	l.timer.Stop()
	if v.timing.beats() && v.sched == nil && p.ID != SchedulerID {
		l.silence = dial.NewSilence(v.cfg.HeartbeatTimeout, v.log)
	}
	return l
}

// request queues a request. It waits for room until ctx ends.
func (l *link) request(ctx context.Context, m *Message) error {
	n := m.Size()
	l.mu.Lock()
	for l.end == nil && (l.requests >= l.van.cfg.WaterMark ||
		l.queuedBytes > 0 && l.queuedBytes+n > maxQueuedBytes) {
		if l.room == nil {
			l.room = make(chan struct{})
		}
		room, waiting := l.room, l.requests
		l.mu.Unlock()
		l.writeHeld()
		select {
		case <-room:
		case <-l.done:
		case <-ctx.Done():
			return fmt.Errorf("the queue to %s has no room, %d requests are not answered: %w", Name(l.peer),
				waiting, context.Cause(ctx))
		}
		l.mu.Lock()
	}
	if err := l.end; err != nil {
		l.mu.Unlock()
		if err == ErrLeft { // otherwise the method fail has blamed the process before it has set end
			l.van.blames.blame(l.process, err)
		}
		return nodeError(l.peer, err)
	}
	if l.requests == 0 {
		l.several, l.together = l.together > 1, 0
	}
	l.together++
	// The responses to earlier requests will make the goroutine that reads send this one with others. If no
	// request is in flight, others will probably follow before the program waits if they did the last time.
	hold := (l.requests > l.queued || l.several && !m.Prompt) && l.queued < maxHeld &&
		l.queuedBytes+n < batchBytes && m.short()
	l.requests++
	l.asked++
	l.queued++
	l.queuedBytes += n
	m.flight = flight{m: m, bytes: n}
	l.queue.push(&m.flight, m.Header.Priority)
	if hold {
		l.held.Store(true)
		l.van.holding.Store(true)
		if l.queued == 1 { // otherwise the timer runs, or a goroutine is writing the queue
			l.timer.Reset(holdTime)
		}
	}
	l.mu.Unlock()
	if !hold {
		l.send()
	}
	return nil
}

// stats returns the counters of the link.
func (l *link) stats() trace.Peer {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := &l.counters
	return trace.Peer{ID: l.peer, Name: Name(l.peer), Requests: l.asked, Waiting: l.requests,
		SentBytes: c.sent.Load(), ReceivedBytes: c.received.Load(),
		Resent: c.resent.Load(), Duplicates: c.duplicates.Load()}
}

// answered makes room for another request, because a request was answered or has failed.
func (l *link) answered() {
	l.mu.Lock()
	l.requests--
	l.hasRoom()
	last := l.queued > 0 && l.requests == l.queued
	l.mu.Unlock()
	if last { // no response will come that sends what is held
		l.writeHeld()
	}
}

// hasRoom wakes the calls that wait for room. The caller holds mu.
func (l *link) hasRoom() {
	if l.room != nil {
		close(l.room)
		l.room = nil
	}
}

// reply queues a message that does not wait for room. If too many wait, it aborts the link. The link of the
// scheduler with itself has no such limit. If those that wait are too large, reply returns a *LimitError.
func (l *link) reply(m *Message) error {
	n := m.Size()
	if n < wholeBytes || m.Header.Replica != nil { // servers limit what they replicate
		n = 0
	}
	l.mu.Lock()
	if n > 0 && l.replyBytes > 0 && l.replyBytes+n > maxReplyBytes && l.end == nil {
		defer l.mu.Unlock()
		return &LimitError{fmt.Sprintf("the queue to %s has %d bytes of responses, and this one has %d, want "+
			"at most %d: wait for earlier requests first", Name(l.peer), l.replyBytes, n, maxReplyBytes)}
	}
	if l.replies >= maxReplies && l.conn != nil {
		l.abortLocked(fmt.Errorf("its replies are not read: %d wait", maxReplies))
	}
	if err := cmp.Or(l.end, l.aborted); err != nil {
		defer l.mu.Unlock()
		return nodeError(l.peer, err)
	}
	l.replies++
	l.replyBytes += n
	lazy, batched := m.lazy, m.Batch
	m.flight = flight{m: m, reply: true, bytes: n}
	l.queue.push(&m.flight, m.Header.Priority)
	l.mu.Unlock()
	if lazy {
		l.lazy.Store(true)
		return nil
	}
	if batched {
		// The goroutine that reads calls writeHeld after handling is false. The tick does not wait for that.
		if l.held.Store(true); l.handling.Load() {
			return nil
		}
	}
	l.send()
	return nil
}

// writeHeld writes the messages that wait for others, and the acknowledgements of what has arrived. The
// goroutine that reads calls it before it waits.
func (l *link) writeHeld() {
	if l.held.Swap(false) || l.unacknowledged() {
		l.send()
	}
}

// unacknowledged reports whether there are acknowledgements to send.
func (l *link) unacknowledged() bool {
	if !l.van.cfg.Resend {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.acks) > 0
}

// abort closes the connection because of err. The goroutine that reads then ends the link with this reason.
// The caller of abort does not wait for that, and may hold locks that the method fail needs.
func (l *link) abort(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.abortLocked(err)
}

// abortLocked is like abort. The caller holds mu.
func (l *link) abortLocked(err error) {
	if l.end == nil && l.aborted == nil {
		l.aborted = err
		l.conn.Close()
	}
}

// checkSilence aborts the link if the network drops the packets of the connection.
func (l *link) checkSilence(now time.Time) {
	if l.silence == nil {
		return
	}
	// All other errors are also those of the goroutine that reads.
	if err, ok := errors.AsType[*dial.SilenceError](l.silence.CheckConn(l.conn, now)); ok {
		l.abort(err)
	}
}

// notify wakes the writer.
func (l *link) notify() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// next returns the next message to write, or nil if there is none. If short is set, it returns nil for a
// message that may take long to write. The method written must be called for the message.
func (l *link) next(short bool) *flight {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.end != nil:
		return nil
	case l.beat:
		l.beat = false
		return &flight{m: controlMessage(&pspb.Control{Command: pspb.Command_HEARTBEAT})}
	case len(l.acks) > 0:
		m := controlMessage(&pspb.Control{Command: pspb.Command_ACK, Acks: l.acks})
		l.acks = nil
		return &flight{m: m}
	}
	f := l.pop(short)
	l.busy = l.busy || f != nil
	return f
}

// settled records that all that next returned was written. If the queue is not empty, it returns false.
func (l *link) settled() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.queue.len() > 0 || len(l.again) > 0 {
		return false
	}
	l.busy = false
	if l.idle != nil && l.out.empty() {
		close(l.idle)
		l.idle = nil
	}
	return true
}

// pop removes the first message that may be sent from the queue: one that is sent again, or else a new one.
// If short is set, it leaves a long message in the queue. The caller holds mu.
func (l *link) pop(short bool) *flight {
	for len(l.again) > 0 {
		f := l.again[0]
		if short && !f.m.short() {
			return nil
		}
		l.again = l.again[1:]
		f.queued = false
		if !f.acked {
			f.writing = true
			return f
		}
		f.m.Drop()
	}
	numbered := l.van.cfg.Resend && l.conn != nil
	if l.queue.len() == 0 || numbered && l.out.full() {
		return nil // an acknowledgement wakes the writer
	}
	if short && !l.queue.items[0].f.m.short() {
		return nil
	}
	f := l.queue.pop()
	if f.reply {
		l.replies--
		l.replyBytes -= f.bytes
	} else {
		l.queued--
		l.queuedBytes -= f.bytes
		l.hasRoom()
	}
	if numbered {
		l.out.addFlight(f)
		f.writing = true
		f.due = time.Now().Add(l.van.cfg.ResendTimeout)
	}
	return f
}

// written records that f was written, and frees its memory unless it may have to be sent again.
func (l *link) written(f *flight) {
	l.mu.Lock()
	keep := f.writing && !f.acked && l.end == nil
	f.writing = false
	l.mu.Unlock()
	if !keep {
		f.m.written()
	}
}

// acked handles an acknowledgement of the peer.
func (l *link) acked(sequences []uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range sequences {
		f := l.out.ack(s)
		if f == nil {
			continue
		}
		f.acked = true
		if !f.queued && !f.writing {
			f.m.Drop()
		}
	}
	l.notify()
}

// resend queues the messages again that are not acknowledged and due.
func (l *link) resend(now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.end != nil {
		return
	}
	l.out.late(now, l.van.cfg.ResendTimeout, func(f *flight) {
		l.counters.resent.Add(1)
		f.queued = true
		l.again = append(l.again, f)
	})
	l.notify()
}

// heartbeat makes the writer send a heartbeat.
func (l *link) heartbeat() {
	l.mu.Lock()
	l.beat = true
	l.mu.Unlock()
	l.notify()
}

// flush waits until all messages were sent and, if the van resends, acknowledged.
func (l *link) flush(ctx context.Context) {
	l.mu.Lock()
	if l.end != nil || l.queue.len() == 0 && l.out.empty() && !l.busy {
		l.mu.Unlock()
		return
	}
	if l.idle == nil {
		l.idle = make(chan struct{})
	}
	idle := l.idle
	l.mu.Unlock()
	l.notify()
	select {
	case <-idle:
	case <-l.done:
	case <-ctx.Done():
	}
}

// write writes messages until the link ends.
func (l *link) write() {
	l.writing.Lock()
	l.writer = writer{l: l, conn: l.conn, sock: l.sock}
	l.writing.Unlock()
	l.notify() // messages may have been queued before
	for {
		select {
		case <-l.wake:
		case <-l.done:
			return
		}
		l.writing.Lock()
		err := l.writer.drain()
		l.writer.err = err
		l.writing.Unlock()
		if err != nil {
			l.breakOff(err)
			return
		}
	}
}

// breakOff records the error of a write. The goroutine that reads ends the link, because the peer may have
// left: TERMINATE may have arrived.
func (l *link) breakOff(err error) {
	l.mu.Lock()
	l.broken = err
	l.mu.Unlock()
	_ = l.conn.SetReadDeadline(time.Now().Add(drainTime)) // an error means that the link has ended
}

// send writes as much of what is queued as is possible without waiting, so that short messages leave in the
// goroutine that sends them. The goroutine that writes does the rest.
func (l *link) send() {
	if !l.writing.TryLock() {
		l.notify()
		return
	}
	done := l.writer.try()
	l.writing.Unlock()
	if !done {
		l.notify()
	}
}

// writer collects small messages and writes them together. It is guarded by the lock writing of its link.
type writer struct {
	l     *link
	conn  net.Conn
	sock  *socket // nil if the connection cannot be written without waiting
	batch []byte
	rest  []byte // the part of batch that could not be written without waiting
	err   error  // error of a write without waiting
}

// drain writes all messages in the queue.
func (w *writer) drain() error {
	if w.err != nil {
		return w.err
	}
	if len(w.rest) > 0 {
		if _, err := w.conn.Write(w.rest); err != nil {
			return err
		}
		w.rest = nil
	}
	for f := w.l.next(false); f != nil; f = w.l.next(false) {
		if err := w.put(f); err != nil {
			return err
		}
	}
	w.l.settled()
	return nil
}

// try writes messages without waiting. It returns false if something is left to write.
func (w *writer) try() bool {
	if w.sock == nil || len(w.rest) > 0 || w.err != nil {
		return false
	}
	w.batch = w.batch[:0]
	for f := w.l.next(true); f != nil; f = w.l.next(true) {
		w.err = w.addToBatch(f)
		if w.err != nil {
			return false
		}
		if len(w.batch) >= batchBytes {
			break
		}
	}
	if len(w.batch) > 0 {
		n, err := w.sock.TryWrite(w.batch)
		w.rest, w.err = w.batch[n:], err
	}
	return len(w.rest) == 0 && w.err == nil && w.l.settled()
}

// short reports whether the message can be written without waiting, because it is copied into the batch.
func (m *Message) short() bool {
	for i, d := range m.Data {
		if m.own != nil && m.own[i] != nil {
			if !m.own[i].known() {
				return false // its descriptor is to be sent
			}
		} else if len(d) >= wholeBytes {
			return false
		}
	}
	return true
}

// put writes f, together with the messages behind it that are small.
func (w *writer) put(f *flight) error {
	if w.conn == nil {
		w.l.van.loop(w.l, f.m)
		return nil
	}
	w.batch = w.batch[:0]
	for {
		if err := w.addToBatch(f); err != nil {
			return err
		}
		if len(w.batch) >= batchBytes {
			break
		}
		if f = w.l.next(false); f == nil {
			break
		}
	}
	_, err := w.conn.Write(w.batch)
	return err
}

// addToBatch appends f to the batch. If f has long frames, addToBatch writes the batch and these frames.
func (w *writer) addToBatch(f *flight) error {
	defer w.l.written(f)
	at := len(w.batch)
	var err error
	if w.batch, err = f.m.encode(w.batch); err != nil {
		return err
	}
	w.l.counters.sent.Add(uint64(len(w.batch) - at + f.m.Bytes()))
	w.l.van.verbose("sent", w.l.peer, f.m)
	if len(f.m.fds) > 0 {
		if err := w.pass(at, f.m.fds); err != nil {
			return err
		}
	}
	for i, d := range f.m.Data {
		if f.m.own != nil && f.m.own[i] != nil {
			continue // the receiver reads the block
		}
		if len(d) < wholeBytes {
			w.batch = append(w.batch, d...)
			continue
		}
		parts := net.Buffers{w.batch, d}
		if _, err := parts.WriteTo(w.conn); err != nil {
			return err
		}
		w.batch = w.batch[:0]
	}
	return nil
}

// pass writes the first bytes of the batch, and then the others together with descriptors. It leaves bytes
// that are not written in the batch.
func (w *writer) pass(first int, fds []int) error {
	b := w.batch
	w.batch = b[:0]
	if _, err := w.conn.Write(b[:first]); err != nil {
		return err
	}
	n, err := w.sock.pass(b[first:], fds)
	w.batch = append(w.batch, b[first+n:]...)
	return err
}

// read reads messages until the connection ends, and returns the reason.
func (l *link) read(r *reader) error {
	defer r.close()
	r.open(l)
	if d := l.polled; d != nil {
		d.reading.Lock()
		defer d.reading.Unlock()
		l.reader = r
		defer func() { l.reader = nil }()
	}
	for draining := false; ; {
		if !draining && l.isBroken() {
			draining = true // a handler may have used up the time that breakOff has set
			_ = l.conn.SetReadDeadline(time.Now().Add(drainTime))
		}
		if l.polled != nil && l.van.cfg.Role == Worker {
			l.polled.await(r)
		}
		m, err := r.next()
		if err != nil {
			l.confirm()
			return err
		}
		if err := l.handle(m); err != nil {
			return err
		}
	}
}

// handle handles a message that was read. The caller may read the link.
func (l *link) handle(m *Message) (err error) {
	if l.ended() { // the bytes were in the buffer of the reader
		m.Release()
		return net.ErrClosed
	}
	l.batch += messageCost + m.Bytes()
	if l.batch > batchBytes {
		l.writeHeld() // the next message may take long
		l.batch = 0
	}
	l.handling.Store(true)
	l.counters.received.Add(uint64(m.size))
	l.van.verbose("received", l.peer, m)
	if l.van.cfg.Faults == nil {
		err = l.arrive(m)
	} else {
		err = l.van.cfg.Faults(l.process, l.van.Process(), m, l.arrive)
	}
	l.heard.Store(int64(l.van.timing.now()))
	l.excused.Store(0)
	l.handling.Store(false)
	return err
}

// confirm is called when the connection has ended, before the peer is blamed. If the scheduler has declared
// this process dead, all its peers close their connections, and it learns that first.
func (l *link) confirm() {
	l.mu.Lock()
	known := l.end != nil || l.aborted != nil || l.left
	l.mu.Unlock()
	if known || l.van.sched != nil || l.peer == SchedulerID {
		return
	}
	ctx, cancel := context.WithTimeout(l.van.ctx, confirmTime)
	defer cancel()
	err := l.van.ask(ctx, "heartbeat", 0, &pspb.Control{Command: pspb.Command_HEARTBEAT})
	scheduler := (*l.van.links.Load())[SchedulerID]
	if err == nil || scheduler == nil {
		return
	}
	// If the connection with the scheduler has ended too, the peer has perhaps ended because of that. So the
	// end of the scheduler is handled first.
	select {
	case <-scheduler.over:
	case <-ctx.Done():
	}
}

// isBroken reports whether a write has failed.
func (l *link) isBroken() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.broken != nil
}

// ended reports whether the link has ended.
func (l *link) ended() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.end != nil || l.aborted != nil
}

// silent returns the time for which no message has come from the peer.
func (l *link) silent() time.Duration {
	if l.handling.Load() {
		return 0
	}
	return l.van.timing.now() - time.Duration(l.heard.Load()) - time.Duration(l.excused.Load())
}

// arrive handles a message. It acknowledges the message if it has a sequence number, and drops duplicates.
func (l *link) arrive(m *Message) error {
	if s := m.Header.Sequence; s != 0 {
		fresh, err := l.in.arrive(s)
		if err != nil {
			return fmt.Errorf("malformed message: %w", err)
		}
		l.mu.Lock()
		if len(l.acks) < windowMessages { // otherwise the peer will send the message again
			l.acks = append(l.acks, s)
		}
		l.mu.Unlock()
		if !fresh {
			l.counters.duplicates.Add(1)
			m.Release()
			return nil
		}
	}
	return l.van.arrive(l, m)
}

// run starts the goroutines of the link.
func (l *link) run(r *reader) {
	l.van.wg.Go(l.write)
	if l.conn != nil {
		l.van.wg.Go(func() { l.fail(l.read(r)) })
	}
}

// fail ends the link because of err. Only the first call has an effect.
func (l *link) fail(err error) {
	l.mu.Lock()
	culprit, reason := l.explain(err)
	waits := l.requests > 0
	l.mu.Unlock()
	if reason != ErrLeft || waits {
		l.van.blames.blame(culprit, reason)
	}
	l.mu.Lock()
	if l.end != nil {
		l.mu.Unlock()
		return
	}
	culprit, reason = l.explain(err) // the peer may have left meanwhile
	l.end = reason
	var dropped []*flight
	for l.queue.len() > 0 {
		dropped = append(dropped, l.queue.pop())
	}
	for s := l.out.base + 1; s <= l.out.next; s++ {
		if f := l.out.ack(s); f != nil && !f.writing {
			dropped = append(dropped, f)
		}
	}
	l.again = nil
	l.hasRoom()
	close(l.done)
	l.mu.Unlock()
	if l.van.sched != nil {
		l.van.sched.dropEntries(l)
	}
	if l.conn != nil {
		l.conn.Close()
	}
	for _, f := range dropped {
		f.m.Drop()
	}
	l.own.endLink() // after Close, so that the peer can see that the link has ended (Message.Intact)
	l.theirs.endLink()
	l.van.linkEnded(l, culprit, reason == ErrLeft, reason)
	close(l.over)
	l.van.members.mu.Lock()
	defer l.van.members.mu.Unlock()
	l.van.members.changed()
	l.van.reconnect(l.process)
}

// explain returns the process that makes a link end with err, and the reason. The caller holds mu.
func (l *link) explain(err error) (culprit Process, reason error) {
	if l.broken != nil && errors.Is(err, os.ErrDeadlineExceeded) {
		err = l.broken
	}
	own := l.van.Process()
	if failed, ok := errors.AsType[*NodeError](err); ok && failed.ID == own.ID {
		return own, failed
	}
	switch {
	case l.aborted != nil:
		return l.process, l.aborted
	case l.left:
		return l.process, ErrLeft
	case l.failure != nil:
		return l.process, l.failure
	case errors.Is(err, io.EOF):
		return l.process, errEnded
	case dial.LacksResource(err):
		return own, fmt.Errorf("%s has no resources for the connection: %w", Name(own.ID), err)
	}
	return l.process, err
}
