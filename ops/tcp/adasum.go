package tcp

import (
	"math/bits"
	"slices"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ops/adasum"
)

// runAdasum combines tensors with the algorithm HalvingDoubling, in the tree that package ops/adasum
// defines. Let n be the number of ranks, and p the largest power of two that is at most n. First, every rank
// i >= p sends its vector to rank i-p. The ranks below p then work at distances d = 1, 2, 4 ... p/2. Two
// ranks at distance d hold the same part of two different vectors. Each sends one half of its part to the
// other and combines the other half. The factors of the combination depend on the dot products of the whole
// vectors. So the 2d ranks that hold parts of these two vectors add up the dot products of their parts. At
// the end the ranks below p exchange the halves again in the opposite order. Then every rank i >= p receives
// the result from rank i-p.
//
// With L = log2 p, a rank sends 2(p-1)/p × len(buf) bytes in L(L+5)/2 steps. L(L+1)/2 of these steps are for
// dot products: 24 bytes for each tensor. If n is not a power of two, n-p pairs of ranks send another
// len(buf) bytes each way in 2 more steps. The backend keeps memory for len(buf)/2 bytes of received data. A
// rank that receives the vector of another rank at the start keeps memory for len(buf) bytes.
//
// The halves are cut from the whole buffer, and their dot products are added segment by segment. So the other
// tensors in buf and the segment size may change the last bits of the products, and so of the results. All
// ranks still have the same bits. A NaN or an infinity in a vector makes the tensor NaN or infinite, by the
// rules of IEEE 754 arithmetic.
func (b *Backend) runAdasum() error {
	if err := b.by(message.HalvingDoubling); err != nil {
		return err
	}
	buf, err := b.tensor()
	if err != nil {
		return err
	}
	if err := b.adasum.prepare(b.op.DType, len(buf), b.op.Counts); err != nil {
		return err
	}
	if len(b.ranks) == 1 || len(buf) == 0 {
		return nil
	}
	return b.adasumHalvingDoubling(b.segment(b.op.DType.Size()), buf)
}

// adasumHalvingDoubling combines the tensors in buf over two or more ranks. The caller has prepared b.adasum
// for these tensors.
func (b *Backend) adasumHalvingDoubling(seg int, buf []byte) error {
	n := len(b.ranks)
	p := 1 << (bits.Len(uint(n)) - 1)
	if b.me >= p {
		return b.delegate(b.me-p, seg, buf)
	}
	sender := b.me + p // the rank that sends its vector to this rank; no such rank exists if sender >= n
	if sender < n {
		if err := b.combineFrom(sender, seg, buf); err != nil {
			return err
		}
	}
	for d := 1; d < p; d *= 2 {
		if err := b.halve(d, seg, buf); err != nil {
			return err
		}
	}
	for d := p / 2; d > 0; d /= 2 {
		if err := b.unite(d, b.op.DType.Size(), buf); err != nil {
			return err
		}
	}
	if sender < n {
		return exchange(b.conns[sender], buf, nil, seg)
	}
	return nil
}

// combineFrom receives the vector that another rank sends with delegate, and combines buf with it. The
// parameter sender is the index of that rank in the set. buf is vector a in the formula of package
// ops/adasum.
func (b *Backend) combineFrom(sender, seg int, buf []byte) error {
	c, err := b.conn(sender)
	if err != nil {
		return err
	}
	whole := byteRange{0, len(buf)}
	if err := b.adasum.receiveDots(c, buf, whole, seg, true); err != nil {
		return err
	}
	b.adasum.combineRange(buf, whole, true)
	return nil
}

// halve combines the vectors of two neighbouring blocks of d ranks. This rank and its partner in the other
// block hold the same part of the two vectors. Each of them combines one half of that part.
func (b *Backend) halve(d, seg int, buf []byte) error {
	a, lower := &b.adasum, b.me&d == 0
	c, err := b.conn(b.me ^ d)
	if err != nil {
		return err
	}
	size := b.op.DType.Size()
	mine, theirs := halved(b.me, d, len(buf), size), halved(b.me^d, d, len(buf), size)
	if err := send(c, theirs.of(buf), seg); err != nil {
		return err
	}
	if err := a.receiveDots(c, buf, mine, seg, lower); err != nil {
		return err
	}
	// At each distance both ranks of a pair add the same two numbers, so in the end all 2d ranks have the
	// same bits. The last exchange is again with the partner in the other block. The flush in that exchange
	// also ensures that the half for the partner has been sent, so that combineRange may overwrite it.
	for e := 1; e <= d; e *= 2 {
		if c, err = b.conn(b.me ^ e); err != nil {
			return err
		}
		if err := a.addDots(c, seg); err != nil {
			return err
		}
	}
	a.combineRange(buf, mine, lower)
	return nil
}

// adasumState is the state of one rank during an Adasum.
type adasumState struct {
	combiner adasum.Combiner
	other    scratch // the part of the other vector that this rank combines

	// dots has the dot products of each tensor for the two vectors. At first they are the dot products over
	// the half that this rank combines. Then they become the sums over more and more ranks. otherDots
	// receives the numbers of another rank, which are added to dots.
	dots, otherDots []float64
}

// prepare sets up the state for tensors with elements of type dt. counts are the sizes of the tensors in
// bytes, and numBytes must be the sum of counts.
func (a *adasumState) prepare(dt tensor.DType, numBytes int, counts []int64) error {
	if err := a.combiner.Prepare(dt, numBytes, counts); err != nil {
		return err
	}
	n := a.combiner.Dots()
	a.dots = slices.Grow(a.dots[:0], n)[:n]
	a.otherDots = slices.Grow(a.otherDots[:0], n)[:n]
	return nil
}

// receiveDots receives range s of the other vector into a.other, segment by segment, and computes the dot
// products of each segment when it has arrived. If the parameter lower is set, buf holds vector a. If it is
// not set, buf holds vector b.
func (a *adasumState) receiveDots(c *stream, buf []byte, s byteRange, seg int, lower bool) error {
	clear(a.dots)
	in := a.other.room(s.to - s.from)
	for at := s.from; at < s.to; at += seg {
		end := min(at+seg, s.to)
		got := in[at-s.from : end-s.from]
		if err := receive(c, got); err != nil {
			return err
		}
		x, y := sides(buf[at:end], got, lower)
		a.combiner.AddDots(a.dots, x, y, at)
	}
	return nil
}

// addDots exchanges dot products with the rank at the other end of c, and adds the received dot products to
// a.dots. The other rank does the same.
func (a *adasumState) addDots(c *stream, seg int) error {
	if err := exchange(c, tensor.Bytes(a.dots), tensor.Bytes(a.otherDots), seg); err != nil {
		return err
	}
	for i, v := range a.otherDots {
		a.dots[i] += v
	}
	return nil
}

// combineRange combines range s of buf with a.other, with the factors that follow from a.dots. The parameter
// lower has the same meaning as in receiveDots.
func (a *adasumState) combineRange(buf []byte, s byteRange, lower bool) {
	own := s.of(buf)
	x, y := sides(own, a.other.room(len(own)), lower)
	a.combiner.Combine(own, x, y, s.from, a.dots)
}

// sides returns this rank's vector and the other vector in the order of their blocks: a is the vector of the
// lower block.
func sides(own, other []byte, lower bool) (a, b []byte) {
	if lower {
		return own, other
	}
	return other, own
}
