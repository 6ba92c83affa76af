package tcp

import "math/bits"

// The algorithms in this file pair ranks at the distances 1, 2, 4 and so on. They need a power of two of
// ranks. Let p be the largest power of two that is at most n. First, every rank i >= p sends its contribution
// to rank i-p, which adds it to its own. The ranks below p then reduce, and at the end every rank i >= p
// receives the result from rank i-p. (This is the algorithm of Rabenseifner, Optimization of collective
// reduction operations, 2004, with the first and the last step as in MPICH.)
//
// The sum of an element is computed in the same tree at every position and with both algorithms, so its bits
// depend only on the ranks' values. Half-precision values are rounded at every step.

// beginDoubling reduces buf over two or more ranks. If halving is set, pairs of ranks exchange halves of the
// part that they hold, and then the results in the opposite order: 2 log2 p steps, in which a rank sends
// 2(p-1)/p × len(buf) bytes. If halving is not set, they exchange the whole buffer: log2 p steps, in which a
// rank sends log2 p × len(buf) bytes. If n is not a power of two, there are 2 more steps of len(buf) bytes.
func (b *Backend) beginDoubling(buf []byte, halving bool) {
	n := len(b.ranks)
	p := 1 << (bits.Len(uint(n)) - 1)
	if b.me >= p {
		b.delegate(b.me-p, buf)
		return
	}
	sender := b.me + p // the rank that sends its contribution to this rank; there is none if sender >= n
	if sender < n {
		b.addOwn(b.steps.conn(sender), nil, buf)
	}
	if halving {
		b.halveAndUnite(p, buf)
	} else {
		for d := 1; d < p; d *= 2 {
			b.double(d, buf)
		}
	}
	if sender < n {
		b.steps.send(b.steps.conn(sender), buf)
	}
}

// double exchanges buf with the rank at distance d, and adds the contribution of that rank.
func (b *Backend) double(d int, buf []byte) {
	in := b.in.room(len(buf))
	b.exchange(b.steps.conn(b.me^d), buf, in)
	b.steps.compute((*Backend).addDoubled, action{buf: buf, in: in, d: d})
}

// addDoubled adds a.in, the contribution of the rank at distance a.d, to a.buf.
func (b *Backend) addDoubled(a *action) {
	// Both ranks put the contribution of the lower rank first, because the bits of a sum of two NaNs may
	// depend on the order.
	if b.me&a.d == 0 {
		b.reduce(a.buf, a.in)
		return
	}
	b.reduce(a.in, a.buf)
	copy(a.buf, a.in)
}

// halveAndUnite reduces buf over the first p ranks. Two ranks at distance d hold the same part of buf. Each
// sends one half of the part to the other and reduces the other half. When all parts are reduced, the ranks
// exchange them in the opposite order.
func (b *Backend) halveAndUnite(p int, buf []byte) {
	for d := 1; d < p; d *= 2 {
		c, mine, theirs := b.halves(d, len(buf))
		b.steps.send(c, theirs.of(buf))
		b.addOwn(c, nil, mine.of(buf))
		// The half for the partner is overwritten by results later, so it must have left. The partner
		// receives it before it sends anything else.
		b.steps.flush(c)
	}
	for d := p / 2; d > 0; d /= 2 {
		b.unite(d, buf)
	}
}

// halves returns the stream to the partner at distance d, and the parts that this rank and the partner hold
// after a buffer of numBytes bytes was halved at all distances up to d.
func (b *Backend) halves(d, numBytes int) (c *stream, mine, theirs byteRange) {
	size := b.op.DType.Size()
	return b.steps.conn(b.me ^ d), halved(b.me, d, numBytes, size), halved(b.me^d, d, numBytes, size)
}

// unite reverses a halving at distance d: this rank and its partner send each other the parts that they hold.
func (b *Backend) unite(d int, buf []byte) {
	c, mine, theirs := b.halves(d, len(buf))
	b.exchange(c, mine.of(buf), theirs.of(buf))
}

// delegate lets the rank of the set with index host take part in this rank's place: it sends buf to that
// rank, and receives the result from it.
func (b *Backend) delegate(host int, buf []byte) {
	c := b.steps.conn(host)
	b.steps.send(c, buf)
	b.steps.flush(c)
	b.steps.receive(c, buf)
}

// exchange sends the content of one buffer (out) to the peer, and fills another buffer (in) with data from
// the peer. The peer makes the matching call. exchange cannot deadlock: sending does not wait, so both sides
// receive, and so all that was sent leaves.
func (b *Backend) exchange(c *stream, out, in []byte) {
	b.steps.send(c, out)
	b.steps.receive(c, in)
	b.steps.flush(c)
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
