package tcp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"

	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/ops"
)

// stream is the channel to a peer. Its calls block only in steps that may wait.
//
// A stream keeps the bytes that the transport does not take at once, and the backend sends them while it
// waits for something else. So one thread sends, receives and reduces. Only if a rank has waited for a while,
// it hands these bytes to the transport, which sends them in a goroutine of its own.
type stream struct {
	transport.Conn
	b      *Backend
	queued uint64 // the number of bytes that were given to Send
	// pending[head:] are the buffers that the transport has not taken yet.
	pending [][]byte
	head    int
}

// polls is the number of times that a rank polls its channels before it blocks. With a yield after each poll,
// this takes about 50 us if no other thread needs the processor. If there are more ranks than cores, a yield
// runs the rank that sends the data. A rank that blocks takes more processor time: the network poller, the
// wake-up of a thread, and the runtime's monitor, which wakes up every 20 us after the process was idle.
const polls = 64

// movingBytes is the number of received bytes after which a step that may not wait returns Moving where it
// would return Waiting. A caller hands an operation over to the lane if it has been Waiting for a while,
// so it keeps a large operation as long as data arrives. Smaller operations end before that, and a turn
// after each of their steps would cost more.
const movingBytes = 64 << 10

// Send queues p. It does not wait.
func (s *stream) Send(p []byte) error {
	s.queued += uint64(len(p))
	if s.head == len(s.pending) {
		n, err := s.TrySend(p)
		if p = p[n:]; err != nil || len(p) == 0 {
			return err
		}
		s.pending, s.head = s.pending[:0], 0
		s.b.unsent = append(s.b.unsent, s)
	}
	s.pending = append(s.pending, p)
	return nil
}

// push passes bytes of the first pending buffer to the transport, without waiting. It returns the number of
// bytes that the transport has taken.
func (s *stream) push() (int, error) {
	p := s.pending[s.head]
	n, err := s.TrySend(p)
	if n < len(p) {
		s.pending[s.head] = p[n:]
		return n, err
	}
	s.pending[s.head] = nil
	s.head++
	return n, err
}

// push passes pending bytes of all streams to the transport, at most one buffer of each stream, so that the
// caller soon receives again. It reports whether the transport has taken any bytes.
func (b *Backend) push() (moved bool, err error) {
	left := b.unsent[:0]
	for i, s := range b.unsent {
		n, err := s.push()
		if err != nil {
			return false, err
		}
		moved = moved || n > 0
		if s.head < len(s.pending) {
			left = append(left, b.unsent[i])
		}
	}
	clear(b.unsent[len(left):])
	b.unsent = left
	return moved, nil
}

// handOver passes all pending bytes to the transport. If the transport does not take them at once, it sends
// them in a goroutine of its own.
func (b *Backend) handOver() error {
	for _, s := range b.unsent {
		for ; s.head < len(s.pending); s.head++ {
			if err := s.Conn.Send(s.pending[s.head]); err != nil {
				return err
			}
			s.pending[s.head] = nil
		}
	}
	clear(b.unsent)
	b.unsent = b.unsent[:0]
	return nil
}

// dropPending forgets the pending bytes, because the operation has failed.
func (b *Backend) dropPending() {
	for _, s := range b.unsent {
		clear(s.pending)
		s.head = len(s.pending)
	}
	clear(b.unsent)
	b.unsent = b.unsent[:0]
}

// progress sends pending bytes. If the transport takes none, and the step may not wait, progress suspends the
// operation until the next step. If the step may wait, progress counts the poll and yields the processor. It
// returns true if the rank has polled often enough and should block.
func (b *Backend) progress(polled *int) (block bool, err error) {
	switch moved, err := b.push(); {
	case err != nil:
		return false, err
	case moved:
		*polled = 0
	case b.ctx == nil:
		p := ops.Waiting
		if b.received >= movingBytes {
			p, b.received = ops.Moving, 0
		}
		return false, b.await(p)
	default:
		if *polled++; *polled >= polls {
			return true, b.handOver()
		}
		b.yielder.Yield()
	}
	return false, nil
}

// Read implements io.Reader.
func (s *stream) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for polled := 0; ; {
		if n, err := s.TryRead(p); n > 0 || err != nil {
			s.b.received += n
			return n, err
		}
		block, err := s.b.progress(&polled)
		if err != nil {
			return 0, err
		}
		if block {
			break
		}
	}
	if err := s.b.handOver(); err != nil {
		return 0, err
	}
	return s.Conn.Read(p)
}

// Flush waits until all bytes that were given to Send have left.
func (s *stream) Flush() error {
	for polled := 0; s.head < len(s.pending) || s.b.ctx == nil && s.Sent() < s.queued; {
		// An empty TrySend returns an error if the lane was aborted.
		if _, err := s.TrySend(nil); err != nil {
			return err
		}
		if _, err := s.b.progress(&polled); err != nil {
			return err
		}
	}
	return s.Conn.Flush()
}

// conn returns the channel to rank i of the set. If the channel does not exist yet, conn makes it.
func (b *Backend) conn(i int) (*stream, error) {
	for b.conns[i] == nil {
		if err := b.await(ops.Blocked); err != nil {
			return nil, err
		}
		if b.ctx == nil {
			continue
		}
		// The peer may dial only when it has received bytes that are pending here.
		if err := b.handOver(); err != nil {
			return nil, err
		}
		c, err := b.mesh.Conn(b.ctx, b.lane, b.ranks[i])
		if err != nil {
			if cause := context.Cause(b.ctx); cause != nil && !errors.Is(err, cause) {
				err = fmt.Errorf("%w: %w", err, cause)
			}
			return nil, err
		}
		b.conns[i] = &stream{Conn: c, b: b, queued: c.Sent()}
	}
	return b.conns[i], nil
}

// neighbours returns the channels of the ring. This rank sends to the next rank through right, and receives
// from the previous rank through left.
func (b *Backend) neighbours() (right, left *stream, err error) {
	n := len(b.ranks)
	if right, err = b.conn((b.me + 1) % n); err != nil {
		return nil, nil, err
	}
	if left, err = b.conn((b.me + n - 1) % n); err != nil {
		return nil, nil, err
	}
	return right, left, nil
}

// connectAll makes the missing channels to other ranks.
func (b *Backend) connectAll() error {
	for i := range b.ranks {
		if i == b.me {
			continue
		}
		if _, err := b.conn(i); err != nil {
			return err
		}
	}
	return nil
}

// flush flushes all channels that exist.
func (b *Backend) flush() error {
	for _, c := range b.conns {
		if c == nil {
			continue
		}
		if err := c.Flush(); err != nil {
			return err
		}
	}
	return nil
}

// segment returns the size of a segment in bytes: a whole number of elements, which have size bytes each.
func (b *Backend) segment(size int) int { return max(b.segBytes/size, 1) * size }

// receive reads from c until p is full.
func receive(c *stream, p []byte) error {
	_, err := io.ReadFull(c, p)
	return err
}

// send queues p on c in segments of seg bytes.
func send(c *stream, p []byte, seg int) error {
	for len(p) > 0 {
		var first []byte
		first, p = split(p, seg)
		if err := c.Send(first); err != nil {
			return err
		}
	}
	return nil
}

// split cuts the first seg bytes off p. If p is shorter, split returns all of p as the first part.
func split(p []byte, seg int) (first, rest []byte) {
	k := min(seg, len(p))
	return p[:k], p[k:]
}

// replace receives the new content of p from c. The old content of p was sent to another peer, on the stream
// out, and ends there at the stream position given by the parameter sent.
//
// The wait until the transport no longer needs the old content is short. The new content is a sum that
// includes the old content as the peer at the other end of out received it. So when the new content arrives
// here, the old content has arrived at that peer. But the transport may report this later, and until then the
// transport owns p. A call of Flush in place of this wait could deadlock, because all ranks would wait for
// each other to receive.
func (b *Backend) replace(c, out *stream, p []byte, sent uint64) error {
	if out.Sent() >= sent {
		return receive(c, p)
	}
	in := b.in.room(len(p))
	if err := receive(c, in); err != nil {
		return err
	}
	if err := b.awaitSent(out, sent); err != nil {
		return err
	}
	copy(p, in)
	return nil
}

// awaitSent waits until the bytes before the given position in the stream c have left. It is for short waits,
// because it polls.
func (b *Backend) awaitSent(c *stream, position uint64) error {
	for polled := 0; c.Sent() < position; {
		// An empty TrySend returns an error if the lane was aborted.
		if _, err := c.TrySend(nil); err != nil {
			return err
		}
		if _, err := b.progress(&polled); err != nil {
			return err
		}
		runtime.Gosched()
	}
	return nil
}
