package tcp

import "github.com/gohvd/gohvd/internal/transport"

// stream is the channel to a peer. Positions in the stream count the bytes that this backend sends.
//
// A stream keeps the bytes that the transport does not take at once, and the backend sends them while it
// waits for something else. So one thread sends, receives and reduces. Only if a rank has waited for a while,
// it hands these bytes to the transport, which sends them in a goroutine of its own.
type stream struct {
	transport.Conn // nil until connected
	schedule       *schedule
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
	for n := s.schedule.segBytes; n == s.schedule.segBytes && s.head < len(s.pending) && err == nil; {
		n, err = s.push() // if n is less than a segment, the transport has no room
	}
	if s.head < len(s.pending) {
		s.schedule.unsent = append(s.schedule.unsent, s)
	}
	return err
}

// push passes bytes of the first pending buffer to the transport, at most a segment, without waiting. It
// returns the number of bytes that the transport has taken.
func (s *stream) push() (int, error) {
	p := s.pending[s.head]
	n, err := s.TrySend(p[:min(len(p), s.schedule.segBytes)])
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
func (s *schedule) push() (moved bool, err error) {
	left := s.unsent[:0]
	for i, c := range s.unsent {
		n, err := c.push()
		if err != nil {
			return false, err
		}
		moved = moved || n > 0
		if c.head < len(c.pending) {
			left = append(left, s.unsent[i])
		}
	}
	clear(s.unsent[len(left):])
	s.unsent = left
	return moved, nil
}

// handOver passes all pending bytes to the transport. If the transport does not take them at once, it sends
// them in a goroutine of its own.
func (s *schedule) handOver() error {
	for _, c := range s.unsent {
		for ; c.head < len(c.pending); c.head++ {
			if err := c.Conn.Send(c.pending[c.head]); err != nil {
				return err
			}
			c.pending[c.head] = nil
		}
	}
	clear(s.unsent)
	s.unsent = s.unsent[:0]
	return nil
}

// abort aborts the lane with err, because the streams have been left in the middle of their data. It forgets
// the pending bytes, and waits until the transport holds no buffer of the operation.
func (s *schedule) abort(err error) {
	s.mesh.Abort(s.lane, err)
	for _, c := range s.unsent {
		clear(c.pending)
		c.head = len(c.pending)
	}
	clear(s.unsent)
	s.unsent = s.unsent[:0]
	for _, c := range s.conns {
		if c != nil && c.Conn != nil {
			_ = c.Flush() // does not wait for peers, and its error adds no information
		}
	}
}

// neighbours returns the streams of the ring. This rank sends to the next rank through right, and receives
// from the previous rank through left.
func (s *schedule) neighbours() (right, left *stream) {
	n := len(s.ranks)
	return s.conn((s.me + 1) % n), s.conn((s.me + n - 1) % n)
}

// connectAll makes the missing channels to other ranks.
func (s *schedule) connectAll() {
	for i := range s.ranks {
		if i != s.me {
			s.conn(i)
		}
	}
}

// segment returns the size of a segment in bytes: a whole number of elements, which have size bytes each.
func (s *schedule) segment(size int) int { return max(s.segBytes/size, 1) * size }

// split cuts the first seg bytes off p. If p is shorter, split returns all of p as the first part.
func split(p []byte, seg int) (first, rest []byte) {
	k := min(seg, len(p))
	return p[:k], p[k:]
}
