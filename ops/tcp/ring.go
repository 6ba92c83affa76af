package tcp

import (
	"github.com/gohvd/gohvd/internal/kernel"
)

// allreduceRing reduces buf over two or more ranks. An element has size bytes, and b.parts must cut buf into
// even parts.
//
// There are 2(n-1) steps, numbered from 0. Rank i starts by sending part i. In step s it receives part i-s-1
// (modulo n), and sends the part on unless the step is the last. In the first n-1 steps the received part is
// the sum over the ranks that it has passed, and the rank adds its own values. After that the received part
// is the sum over all ranks.
func (b *Backend) allreduceRing(size int, reduce kernel.Func, buf []byte) error {
	right, left, err := b.neighbours()
	if err != nil {
		return err
	}
	n, seg := len(b.ranks), b.segment(size)
	start := right.Sent() // no data is queued, because every operation ends with a flush
	if err := send(right, b.parts.part(buf, b.me), seg); err != nil {
		return err
	}
	for s := range n - 1 {
		if err := b.addOwn(left, right, reduce, b.before(buf, s+1), seg); err != nil {
			return err
		}
	}
	// Results arrive in the order in which this rank has sent its own parts: part i, i-1 and so on. So
	// landed, the position in the stream to the right at which the old content of p ends, counts up from
	// start.
	landed := start
	for s := range n - 1 {
		for rest := b.before(buf, s); len(rest) > 0; {
			var p []byte
			p, rest = split(rest, seg)
			landed += uint64(len(p))
			if err := b.replace(left, right, p, landed); err != nil {
				return err
			}
			if s < n-2 {
				if err := right.Send(p); err != nil {
					return err
				}
			}
		}
	}
	return right.Flush()
}

// reducescatterRing reduces buf over two or more ranks. An element has size bytes. Each rank gets the result
// of its own part.
//
// The sum of part i begins at rank i+1, so that it ends at rank i. So rank i starts by sending part i-1.
// There are n-1 steps, numbered from 0. In step s rank i receives part i-s-2 (modulo n), adds its own values,
// and sends the sum on. In the last step the rank receives its own part, and does not send it on.
func (b *Backend) reducescatterRing(size int, reduce kernel.Func, buf []byte) error {
	right, left, err := b.neighbours()
	if err != nil {
		return err
	}
	n, seg := len(b.ranks), b.segment(size)
	if err := send(right, b.before(buf, 1), seg); err != nil {
		return err
	}
	for s := range n - 1 {
		to := right
		if s == n-2 {
			to = nil
		}
		if err := b.addOwn(left, to, reduce, b.before(buf, s+2), seg); err != nil {
			return err
		}
	}
	return right.Flush()
}

// addOwn receives the sum of a part over the ranks that the part has passed, and adds it to p, which holds
// this rank's values. Unless right is nil, addOwn sends the result to right.
func (b *Backend) addOwn(left, right *stream, reduce kernel.Func, p []byte, seg int) error {
	for rest := p; len(rest) > 0; {
		var own []byte
		own, rest = split(rest, seg)
		in := b.in.room(len(own))
		if err := receive(left, in); err != nil {
			return err
		}
		reduce(own, in)
		if right != nil {
			if err := right.Send(own); err != nil {
				return err
			}
		}
	}
	return nil
}

// before returns the part of buf that belongs to the rank k places before this rank in the ring. k is from 0
// to n.
func (b *Backend) before(buf []byte, k int) []byte {
	n := len(b.ranks)
	return b.parts.part(buf, (b.me-k+n)%n)
}
