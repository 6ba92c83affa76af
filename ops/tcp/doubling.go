package tcp

import (
	"math/bits"

	"github.com/gohvd/gohvd/internal/kernel"
)

// The algorithms in this file pair ranks at the distances 1, 2, 4 and so on. They need a power of two of
// ranks. Let p be the largest power of two that is at most n. First, every rank i >= p sends its contribution
// to rank i-p, which adds it to its own. The ranks below p then reduce, and at the end every rank i >= p
// receives the result from rank i-p. (This is the algorithm of Rabenseifner, Optimization of collective
// reduction operations, 2004, with the first and the last step as in MPICH.)
//
// The sum of an element is computed in the same tree at every position and with both algorithms, so its bits
// depend only on the ranks' values. Half-precision values are rounded at every step.

// allreduceDoubling reduces buf over two or more ranks. If halving is set, pairs of ranks exchange halves of
// the part that they hold, and then the results in the opposite order: 2 log2 p steps, in which a rank sends
// 2(p-1)/p × len(buf) bytes. If halving is not set, they exchange the whole buffer: log2 p steps, in which a
// rank sends log2 p × len(buf) bytes. If n is not a power of two, there are 2 more steps of len(buf) bytes.
func (b *Backend) allreduceDoubling(size int, reduce kernel.Func, buf []byte, halving bool) error {
	n, seg := len(b.ranks), b.segment(size)
	p := 1 << (bits.Len(uint(n)) - 1)
	if b.me >= p {
		return b.delegate(b.me-p, seg, buf)
	}
	sender := b.me + p // the rank that sends its contribution to this rank; there is none if sender >= n
	if sender < n {
		c, err := b.conn(sender)
		if err != nil {
			return err
		}
		if err := b.addOwn(c, nil, reduce, buf, seg); err != nil {
			return err
		}
	}
	if halving {
		if err := b.halveAndUnite(p, size, reduce, buf); err != nil {
			return err
		}
	} else {
		for d := 1; d < p; d *= 2 {
			if err := b.double(d, seg, reduce, buf); err != nil {
				return err
			}
		}
	}
	if sender < n {
		return exchange(b.conns[sender], buf, nil, seg)
	}
	return nil
}

// double exchanges buf with the rank at distance d, and adds the contribution of that rank.
func (b *Backend) double(d, seg int, reduce kernel.Func, buf []byte) error {
	c, err := b.conn(b.me ^ d)
	if err != nil {
		return err
	}
	in := b.in.room(len(buf))
	if err := exchange(c, buf, in, seg); err != nil {
		return err
	}
	// Both ranks put the contribution of the lower rank first, because the bits of a sum of two NaNs may
	// depend on the order.
	if b.me&d == 0 {
		reduce(buf, in)
		return nil
	}
	reduce(in, buf)
	copy(buf, in)
	return nil
}

// halveAndUnite reduces buf over the first p ranks. Two ranks at distance d hold the same part of buf. Each
// sends one half of the part to the other and reduces the other half. When all parts are reduced, the ranks
// exchange them in the opposite order.
func (b *Backend) halveAndUnite(p, size int, reduce kernel.Func, buf []byte) error {
	seg := b.segment(size)
	for d := 1; d < p; d *= 2 {
		c, err := b.conn(b.me ^ d)
		if err != nil {
			return err
		}
		mine, theirs := halved(b.me, d, len(buf), size), halved(b.me^d, d, len(buf), size)
		if err := send(c, theirs.of(buf), seg); err != nil {
			return err
		}
		if err := b.addOwn(c, nil, reduce, mine.of(buf), seg); err != nil {
			return err
		}
		// The half for the partner is overwritten by results later, so it must have left. The partner
		// receives it before it sends anything else.
		if err := c.Flush(); err != nil {
			return err
		}
	}
	for d := p / 2; d > 0; d /= 2 {
		if err := b.unite(d, size, buf); err != nil {
			return err
		}
	}
	return nil
}

// unite reverses a halving at distance d: this rank and its partner send each other the parts that they hold.
// An element has size bytes.
func (b *Backend) unite(d, size int, buf []byte) error {
	c, err := b.conn(b.me ^ d)
	if err != nil {
		return err
	}
	mine, theirs := halved(b.me, d, len(buf), size), halved(b.me^d, d, len(buf), size)
	return exchange(c, mine.of(buf), theirs.of(buf), b.segment(size))
}

// delegate lets the rank of the set with index host take part in this rank's place: it sends buf to that
// rank, and receives the result from it.
func (b *Backend) delegate(host, seg int, buf []byte) error {
	c, err := b.conn(host)
	if err != nil {
		return err
	}
	if err := exchange(c, buf, nil, seg); err != nil {
		return err
	}
	return exchange(c, nil, buf, seg)
}

// exchange sends the content of one buffer (out) to the peer, and fills another buffer (in) with data from
// the peer. The peer makes the matching call. exchange cannot deadlock: send does not wait, so both sides
// reach receive, and so both flushes end.
func exchange(c *stream, out, in []byte, seg int) error {
	if err := send(c, out, seg); err != nil {
		return err
	}
	if err := receive(c, in); err != nil {
		return err
	}
	return c.Flush()
}

// byteRange is a range of bytes of a buffer. The field from is the offset of the first byte, and the field to
// is the offset after the last byte.
type byteRange struct{ from, to int }

func (s byteRange) numBytes() int { return s.to - s.from }

func (s byteRange) of(buf []byte) []byte { return buf[s.from:s.to] }

// halved returns the part that rank r of the set holds after a buffer of numBytes bytes was halved at all
// distances up to d. An element has size bytes. The lower of two ranks gets the lower half. If the halves
// differ in size, the lower half is the smaller one.
func halved(r, d, numBytes, size int) byteRange {
	s := byteRange{0, numBytes / size}
	for e := 1; e <= d; e *= 2 {
		if mid := s.from + (s.to-s.from)/2; r&e == 0 {
			s.to = mid
		} else {
			s.from = mid
		}
	}
	return byteRange{s.from * size, s.to * size}
}
