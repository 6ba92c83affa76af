package shm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

// At any time, a peer may have shared at most maxChunks arena chunks, and at most maxShares segments for
// lanes. Each chunk or segment may have at most maxSegmentBytes bytes.
const (
	maxChunks       = 1 << 16
	maxShares       = 1 << 12
	maxSegmentBytes = 1 << 44
	// maxStaleBytes limits the address space that is kept for chunks that the peer has withdrawn. These
	// chunks use address space, but no memory.
	maxStaleBytes = 1 << 37
	// inFlightWait is the time after which a message is sent again that the kernel has refused because the
	// user has too many descriptors in flight (RLIMIT_NOFILE, see unix(7)).
	inFlightWait = time.Millisecond
	// inFlightWarning is the time after which a warning says that messages are not sent for this reason.
	inFlightWarning = time.Second
	maxErrno        = 4095
)

// peer is another rank of the group.
type peer struct {
	rank  topo.Rank
	index int // index of the peer in the group
	// link is the connection to the peer. It is nil if neither the peer nor this rank is the leader.
	*link

	gone atomic.Pointer[loss] // why the peer is lost; nil while it is connected
	// arenas holds the arena chunks of the peer by their IDs. Nothing changes a map in place: a changed copy
	// replaces it.
	arenas atomic.Pointer[map[uint32]chunk]
	// stale holds the chunks that the peer has withdrawn, oldest first. staleBytes is their total size. An
	// operation that has failed may still read them, so their addresses stay readable. Only the receiving
	// goroutine uses these fields, and Close uses them after that goroutine has ended.
	stale      []*shmem.Segment
	staleBytes int64
	// shares is the number of segments that the peer has shared for lanes, except lanes that this rank has
	// released. It is guarded by the Mesh's mu.
	shares int
}

// link is the connection between the leader and another rank of the group.
type link struct {
	uc *net.UnixConn
	// control is the mapping of the peer's control segment.
	control *shmem.Segment
	waker   peerWaker
	conn    *conn
	outbox  outbox
}

// chunk is the mapping of a peer's segment. If the segment could not be mapped, chunk holds the reason.
type chunk struct {
	seg *shmem.Segment
	err error
}

// outbox is a queue of messages to a peer. Adding a message never blocks.
type outbox struct {
	mu     sync.Mutex
	filled sync.Cond
	queue  []message
	closed bool
}

// put queues m, or closes m if the outbox is closed.
func (o *outbox) put(m message) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed {
		m.close()
		return
	}
	o.queue = append(o.queue, m)
	o.filled.Signal()
}

// next waits for messages and removes those from the queue that fit into a packet. It returns none when the
// outbox is closed.
func (o *outbox) next() []message {
	o.mu.Lock()
	defer o.mu.Unlock()
	for len(o.queue) == 0 && !o.closed {
		o.filled.Wait()
	}
	if o.closed {
		return nil
	}
	n, fds := 0, 0
	for ; n < min(len(o.queue), maxBatch); n++ {
		m := &o.queue[n]
		fds += len(m.files)
		if n > 0 && (fds > maxFDs || !bytes.Equal(m.to, o.queue[0].to)) {
			break
		}
	}
	messages := slices.Clone(o.queue[:n])
	clear(o.queue[:n])
	o.queue = o.queue[n:]
	if len(o.queue) == 0 {
		o.queue = nil
	}
	return messages
}

// close closes the outbox and drops the queued messages.
func (o *outbox) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closed = true
	closeAll(o.queue)
	o.queue = nil
	o.filled.Broadcast()
}

// send sends the messages of the outbox to the peer. It returns when the outbox is closed or the peer has
// gone.
func (p *peer) send(m *Mesh) {
	defer p.outbox.close()
	for {
		messages := p.outbox.next()
		if messages == nil {
			return
		}
		err := m.write(p, messages)
		closeAll(messages)
		if err != nil {
			// If the peer has gone, send does not report that. receive does, after it has handled all
			// messages that the peer had sent.
			if !errors.Is(err, unix.EPIPE) && !errors.Is(err, unix.ECONNRESET) {
				m.lose(p, fmt.Errorf("shm: send a descriptor: %w", err))
			}
			return
		}
	}
}

// write sends messages to p. While the user has too many descriptors in flight in Unix connections, write
// waits until receivers have taken some.
func (m *Mesh) write(p *peer, messages []message) error {
	return m.retry(p.rank, func() error { return writePacket(p.uc, messages) })
}

// retry calls send until it returns an error other than ETOOMANYREFS, or until the mesh is closed. If that
// takes inFlightWarning, retry warns once.
func (m *Mesh) retry(to topo.Rank, send func() error) error {
	warning := time.NewTimer(inFlightWarning)
	defer warning.Stop()
	for {
		err := send()
		if !errors.Is(err, unix.ETOOMANYREFS) {
			return err
		}
		select {
		case <-time.After(inFlightWait):
		case <-warning.C:
			m.log.Warn(fmt.Sprintf("shm: cannot send descriptors to rank %d for %v, because the programs of this "+
				"user have too many descriptors in flight (at most %d): raise RLIMIT_NOFILE, as with ulimit -n", to,
				inFlightWarning, dial.Descriptors()))
		case <-m.closing:
			return err
		}
	}
}

// receive handles the messages of the peer. It returns when the peer has gone or has violated the protocol,
// or when the mesh is closed. If this rank lacks a resource to receive a message, it drops all that follow,
// and reads on only to see the end of the peer.
func (p *peer) receive(m *Mesh) {
	in := newReader(p.uc, len(m.group))
	for dropping := false; ; {
		messages, err := in.read()
		for i := range messages {
			if err == nil && !dropping {
				err = m.handle(p, &messages[i])
			}
		}
		closeAll(messages) // safe, because a mapping stays valid when its descriptor is closed
		if err == nil {
			continue
		}
		m.lose(p, err)
		if dropping = dial.LacksResource(err); !dropping {
			return
		}
	}
}

// handle processes a message from the peer at the other end of a connection. It returns an error if the
// message violates the protocol.
func (m *Mesh) handle(p *peer, msg *message) error {
	if !m.leads {
		origin := m.byIndex(int(msg.from))
		if origin == nil || msg.to != nil {
			return fmt.Errorf("%w: got a message of rank %d of the host, for %d ranks", errBreach, msg.from,
				len(msg.to))
		}
		if msg.kind == goneMessage {
			return m.told(p, origin, msg.size)
		}
		if origin.gone.Load() != nil {
			return nil
		}
		err := origin.handle(m, msg)
		if err == nil || origin == p {
			return err
		}
		m.lose(origin, err) // the leader has only passed on the message
		return nil
	}
	if int(msg.from) != p.index {
		return fmt.Errorf("%w: got a message of rank %d of the host, want %d", errBreach, msg.from, p.index)
	}
	if msg.kind == goneMessage {
		return fmt.Errorf("%w: got a message of kind %d, which only the leader may send", errBreach, msg.kind)
	}
	if msg.to.has(m.index) {
		if err := p.handle(m, msg); err != nil {
			return err
		}
	}
	m.pass(msg)
	return nil
}

// pass puts a message of a rank of the group into the outboxes of its recipients, except that of the rank
// itself.
func (m *Mesh) pass(msg *message) {
	for _, p := range m.linked {
		if uint32(p.index) != msg.from && msg.to.has(p.index) {
			copied := msg.share()
			copied.to = nil
			p.outbox.put(copied)
		}
	}
}

// post sends a message of this rank to the peers in to, or to all peers if to is nil. It takes over the use
// of the descriptors.
func (m *Mesh) post(msg message) {
	msg.from = uint32(m.index)
	if !m.leads {
		m.linked[0].outbox.put(msg)
		return
	}
	m.pass(&msg)
	msg.close()
}

// told handles a goneMessage of the leader p about the rank origin.
func (m *Mesh) told(p, origin *peer, errno uint64) error {
	switch {
	case origin == p || errno > maxErrno:
		return fmt.Errorf("%w: got a message that rank %d has gone, with the error number %d", errBreach,
			origin.rank, errno)
	case errno != 0:
		// The error does not wrap the Errno, because it is not this rank that lacks the resource.
		m.record(origin, &loss{p.rank, fmt.Errorf("it cannot share memory with rank %d: %v", origin.rank,
			unix.Errno(errno))})
		m.wakePoller()
	default:
		m.lose(origin, io.ErrUnexpectedEOF)
	}
	return nil
}

// handle processes a message of this peer, which may have come through the leader.
func (p *peer) handle(m *Mesh, msg *message) error {
	switch msg.kind {
	case shareMessage:
		return m.shared(p, transport.Lane(msg.id), msg)
	case arenaMessage:
		seg, err := mapSegment(msg.files[0].fd, msg.size)
		if errors.Is(err, errBreach) {
			return err
		}
		return p.addArena(m, msg.id, chunk{seg, err})
	case dropMessage:
		return p.dropArena(m, msg.id)
	default:
		return fmt.Errorf("%w: got a message of kind %d after the handshake, but this kind is allowed only in the handshake",
			errBreach, msg.kind)
	}
}

var errBreach = errors.New("shm: the peer violated the protocol")

// mapSegment maps the segment fd. According to the peer it has size bytes. If the peer has
// violated the protocol, the error wraps errBreach. Any other error means that this process lacks a resource.
func mapSegment(fd int, size uint64) (*shmem.Segment, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	if size == 0 || size > maxSegmentBytes || st.Size != int64(size) {
		return nil, fmt.Errorf(
			"%w: got a segment of %d bytes that was announced with %d bytes, want the announced size, from 1 to %d bytes", errBreach,
			st.Size, size, int64(maxSegmentBytes))
	}
	seg, err := shmem.Map(fd)
	var denied unix.Errno
	if err != nil && (!errors.As(err, &denied) || denied == unix.EINVAL) {
		return nil, fmt.Errorf("%w: %w", errBreach, err) // the file is not sealed or is not a memfd
	}
	return seg, err
}

func (p *peer) addArena(m *Mesh, id uint32, c chunk) error {
	old := *p.arenas.Load()
	var err error
	switch _, twice := old[id]; {
	case id == 0:
		err = fmt.Errorf("%w: got an arena chunk with number 0, want at least 1", errBreach)
	case twice:
		err = fmt.Errorf("%w: got arena chunk %d twice", errBreach, id)
	case len(old) >= maxChunks:
		err = fmt.Errorf("%w: got arena chunk %d after %d other chunks, want at most %d chunks", errBreach, id,
			len(old), maxChunks)
	}
	if err != nil {
		if c.seg != nil {
			_ = c.seg.Close() // the error is ignored, because the violation of the protocol is reported
		}
		return err
	}
	arenas := maps.Clone(old)
	arenas[id] = c
	p.arenas.Store(&arenas)
	m.announce()
	return nil
}

func (p *peer) dropArena(m *Mesh, id uint32) error {
	old := *p.arenas.Load()
	c, ok := old[id]
	if !ok {
		return fmt.Errorf("%w: it withdrew arena chunk %d, which it had not shared", errBreach, id)
	}
	arenas := maps.Clone(old)
	delete(arenas, id)
	p.arenas.Store(&arenas)
	if c.seg == nil {
		return nil
	}
	if err := c.seg.Blank(); err != nil {
		m.log.Warn(err.Error()) // the memory stays mapped until Close
	}
	p.stale = append(p.stale, c.seg)
	p.staleBytes += int64(len(c.seg.Bytes()))
	for p.staleBytes > maxStaleBytes {
		first := p.stale[0]
		p.staleBytes -= int64(len(first.Bytes()))
		p.stale = p.stale[1:]
		if err := first.Close(); err != nil {
			m.log.Warn(err.Error())
		}
	}
	return nil
}

// Arena implements Sharer.
func (m *Mesh) Arena(ctx context.Context, rank topo.Rank, id uint32) ([]byte, error) {
	p := m.peer(rank)
	if p == nil {
		return nil, fmt.Errorf("shm: get arena chunk %d of rank %d: %w", id, rank, errNoPeer)
	}
	if c, ok := (*p.arenas.Load())[id]; ok && c.err == nil && !m.isClosed.Load() {
		return c.seg.Bytes(), nil
	}
	var c chunk
	err := m.await(ctx, func() (bool, error) {
		if m.closed {
			return false, transport.ErrClosed
		}
		found, ok := (*p.arenas.Load())[id]
		if ok {
			c = found
			return true, c.err
		}
		if gone := p.gone.Load(); gone != nil {
			return false, gone.peerError(transport.Control)
		}
		return false, m.leaderGone(transport.Control)
	})
	if err != nil {
		return nil, fmt.Errorf("shm: get arena chunk %d of rank %d: %w", id, rank, err)
	}
	return c.seg.Bytes(), nil
}
