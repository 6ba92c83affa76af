package tcp

import (
	"github.com/gohvd/gohvd/internal/kernel"
)

// allreduceRing reduces buf, elements of size bytes, over two ranks or more, in the even parts of b.parts.
//
// Rank i starts by sending part i. In step s of 2(n-1) it receives part i-s-1 (modulo n), and sends it on unless the
// step is the last. In the first n-1 steps what it receives is the sum over the ranks passed so far, to which it adds
// its own; from then on it is the sum over all.
func (b *Backend) allreduceRing(size int, reduce kernel.Func, buf []byte) error {
	right, left, err := b.neighbours()
	if err != nil {
		return err
	}
	n, seg := len(b.ranks), b.segment(size)
	start := right.Sent() // as every operation flushes, nothing is queued
	if err := send(right, b.parts.part(buf, b.me), seg); err != nil {
		return err
	}
	for s := range n - 1 {
		if err := b.addOwn(left, right, reduce, b.before(buf, s+1), seg); err != nil {
			return err
		}
	}
	// Results come in the order in which this rank has sent its own parts: part i, i-1 and so on. So they overwrite its
	// stream to the right from the start on.
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

// reducescatterRing reduces buf, elements of size bytes, over two ranks or more, so that each has the result of its
// part.
//
// The sum of a part ends where it should if it begins at the rank behind: rank i starts by sending part i-1. In step s
// of n-1 it receives part i-s-2 (modulo n), which is its own in the last, adds what it has, and sends the sum on.
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

// addOwn receives the sum over the ranks passed so far of a part, adds it to p, which holds what this rank has, and
// sends it on to right unless that is nil.
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

// before returns the part of buf that is the rank's k places before this one in the ring, 0 <= k <= n.
func (b *Backend) before(buf []byte, k int) []byte {
	n := len(b.ranks)
	return b.parts.part(buf, (b.me-k+n)%n)
}
