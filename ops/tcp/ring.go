package tcp

import (
	"github.com/gohvd/gohvd/internal/kernel"
)

// allreduceRing reduces buf, with elements of size bytes, over two or more ranks, in the even parts of
// b.parts.
//
// Rank i starts by sending part i. In step s of 2(n-1) it receives part i-s-1 (modulo n), and sends it on
// unless the step is the last. In the first n-1 steps the received part is the sum over the ranks that it has
// passed, to which the rank adds its own values; after that it is the sum over all ranks.
func (b *Backend) allreduceRing(size int, reduce kernel.Func, buf []byte) error {
	right, left, err := b.neighbours()
	if err != nil {
		return err
	}
	n, seg := len(b.ranks), b.segment(size)
	start := right.Sent() // every operation flushes, so nothing is queued
	if err := send(right, b.parts.part(buf, b.me), seg); err != nil {
		return err
	}
	for s := range n - 1 {
		if err := b.addOwn(left, right, reduce, b.before(buf, s+1), seg); err != nil {
			return err
		}
	}
	// Results arrive in the order in which this rank has sent its own parts: part i, i-1 and so on. So the
	// position in the stream to the right at which the old content of p ends counts up from start.
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

// reducescatterRing reduces buf, with elements of size bytes, over two or more ranks, so that each rank has
// the result of its own part.
//
// The sum of part i ends at rank i if it begins at the next rank, so rank i starts by sending part i-1. In
// step s of n-1 rank i receives part i-s-2 (modulo n), adds its own values, and sends the sum on. In the last
// step the part is its own, and is not sent on.
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

// addOwn receives the sum of a part over the ranks that it has passed, and adds it to p, which holds this
// rank's values. It sends the result to right unless right is nil.
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

// before returns the part of buf that belongs to the rank k places before this one in the ring, 0 <= k <= n.
func (b *Backend) before(buf []byte, k int) []byte {
	n := len(b.ranks)
	return b.parts.part(buf, (b.me-k+n)%n)
}
