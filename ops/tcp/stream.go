package tcp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"

	"github.com/gohvd/gohvd/ops"
)

// conn returns the channel to rank i of the set. If the channel does not exist yet, conn makes it.
func (b *Backend) conn(i int) (*stream, error) {
	for b.conns[i] == nil {
		if err := b.await(ops.Blocked); err != nil {
			return nil, err
		}
		if b.ctx == nil {
			continue
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
	for out.Sent() < sent {
		// An empty Send returns an error if the lane was aborted.
		if err := out.Send(nil); err != nil {
			return err
		}
		if err := b.await(ops.Waiting); err != nil {
			return err
		}
		runtime.Gosched()
	}
	copy(p, in)
	return nil
}
