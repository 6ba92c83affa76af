package tcp

import "github.com/gohvd/gohvd/internal/transport"

// stream is the channel to a peer. Positions in the stream count the bytes that this backend sends.
//
// A stream keeps the bytes that the transport does not take at once, and the backend sends them while it
// waits for something else. So one thread sends, receives and reduces. Only if a rank has waited for a while,
// it hands these bytes to the transport, which sends them in a goroutine of its own.
type stream struct {
	transport.Conn // nil until connected
	b              *Backend
	rank           int    // the index of the peer in the set
	base           uint64 // Conn.Sent() when the channel was made
	end            uint64 // the position after the last send in the schedule
	given          uint64 // the position after the last send that was done
	// pending[head:] are the buffers that the transport has not taken yet.
	pending [][]byte
	head    int
}

// left returns the position up to which bytes have left the buffers.
func (s *stream) left() uint64 { return s.Sent() - s.base }

// send queues p. It does not wait.
func (s *stream) send(p []byte) (err error) {
	s.given += uint64(len(p))
	if s.head < len(s.pending) {
		s.pending = append(s.pending, p)
		return nil
	}
	s.pending, s.head = append(s.pending[:0], p), 0
	for n := s.b.segBytes; n == s.b.segBytes && s.head < len(s.pending) && err == nil; {
		n, err = s.push() // if n is less than a segment, the transport has no room
	}
	if s.head < len(s.pending) {
		s.b.unsent = append(s.b.unsent, s)
	}
	return err
}

// push passes bytes of the first pending buffer to the transport, at most a segment, without waiting. It
// returns the number of bytes that the transport has taken.
func (s *stream) push() (int, error) {
	p := s.pending[s.head]
	n, err := s.TrySend(p[:min(len(p), s.b.segBytes)])
	if n < len(p) {
		s.pending[s.head] = p[n:]
		return n, err
	}
	s.pending[s.head] = nil
	s.head++
	return n, err
}

// push passes pending bytes of all streams to the transport, at most a segment of each stream, so that the
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

// neighbours returns the streams of the ring. This rank sends to the next rank through right, and receives
// from the previous rank through left.
func (b *Backend) neighbours() (right, left *stream) {
	n := len(b.ranks)
	return b.conn((b.me + 1) % n), b.conn((b.me + n - 1) % n)
}

// connectAll makes the missing channels to other ranks.
func (b *Backend) connectAll() {
	for i := range b.ranks {
		if i != b.me {
			b.conn(i)
		}
	}
}

// segment returns the size of a segment in bytes: a whole number of elements, which have size bytes each.
func (b *Backend) segment(size int) int { return max(b.segBytes/size, 1) * size }

// split cuts the first seg bytes off p. If p is shorter, split returns all of p as the first part.
func split(p []byte, seg int) (first, rest []byte) {
	k := min(seg, len(p))
	return p[:k], p[k:]
}
