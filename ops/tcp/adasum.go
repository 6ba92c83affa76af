package tcp

import (
	"math/bits"
	"slices"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ops/adasum"
)

// beginAdasum combines tensors with the algorithm HalvingDoubling, in the tree that package ops/adasum
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
func (b *Backend) beginAdasum() error {
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
	if len(b.ranks) > 1 && len(buf) > 0 {
		b.adasumHalvingDoubling(buf)
	}
	return nil
}

// adasumHalvingDoubling combines the tensors in buf over two or more ranks. The caller has prepared b.adasum
// for these tensors.
func (b *Backend) adasumHalvingDoubling(buf []byte) {
	n := len(b.ranks)
	p := 1 << (bits.Len(uint(n)) - 1)
	if b.me >= p {
		b.delegate(b.me-p, buf)
		return
	}
	sender := b.me + p // the rank that sends its vector to this rank; no such rank exists if sender >= n
	if sender < n {
		whole := byteRange{0, len(buf)}
		b.combineParts(buf, whole, b.receiveDots(b.steps.conn(sender), buf, whole, p), p)
	}
	for d := 1; d < p; d *= 2 {
		b.halve(d, buf)
	}
	for d := p / 2; d > 0; d /= 2 {
		b.unite(d, buf)
	}
	if sender < n {
		b.steps.send(b.steps.conn(sender), buf)
	}
}

// halve combines the vectors of two neighbouring blocks of d ranks. This rank and its partner in the other
// block hold the same part of the two vectors. Each of them combines one half of that part.
func (b *Backend) halve(d int, buf []byte) {
	c, mine, theirs := b.halves(d, len(buf))
	b.steps.send(c, theirs.of(buf))
	other := b.receiveDots(c, buf, mine, d)
	// At each distance both ranks of a pair add the same two numbers, so in the end all 2d ranks have the
	// same bits. The last exchange is again with the partner in the other block. The flush in that exchange
	// also ensures that the half for the partner has been sent, so that it may be overwritten.
	for e := 1; e <= d; e *= 2 {
		b.addDots(b.steps.conn(b.me ^ e))
	}
	b.combineParts(buf, mine, other, d)
}

// receiveDots receives range s of the vector of the partner at distance d, segment by segment, and computes
// the dot products of each segment when it has arrived. It returns the memory that has the range of the
// partner.
func (b *Backend) receiveDots(c *stream, buf []byte, s byteRange, d int) (other []byte) {
	b.steps.compute(func(b *Backend, _ *action) { clear(b.adasum.dots) }, action{})
	other = b.adasum.other.room(s.numBytes())
	seg := b.steps.segment(b.op.DType.Size())
	for rest, r := other, s; r.numBytes() > 0; {
		var in []byte
		in, rest = split(rest, seg)
		part := byteRange{r.from, r.from + len(in)}
		b.steps.receive(c, in)
		b.steps.compute((*Backend).addDotsOf, action{r: part, buf: part.of(buf), in: in, d: d})
		r.from = part.to
	}
	return other
}

// addDotsOf adds the dot products of a.buf and a.in, which are range a.r of the two vectors.
func (b *Backend) addDotsOf(a *action) {
	x, y := b.sides(a)
	b.adasum.combiner.AddDots(b.adasum.dots, x, y, a.r.from)
}

// addDots exchanges dot products with the rank at the other end of c, and adds the received dot products to
// b.adasum.dots. The other rank does the same.
func (b *Backend) addDots(c *stream) {
	b.exchange(c, tensor.Bytes(b.adasum.dots), tensor.Bytes(b.adasum.otherDots))
	b.steps.compute(func(b *Backend, _ *action) {
		for i, v := range b.adasum.otherDots {
			b.adasum.dots[i] += v
		}
	}, action{})
}

// combineParts combines range s of buf with the same range of the partner at distance d, with the factors
// that follow from b.adasum.dots.
func (b *Backend) combineParts(buf []byte, s byteRange, other []byte, d int) {
	b.steps.compute(func(b *Backend, a *action) {
		x, y := b.sides(a)
		b.adasum.combiner.Combine(a.buf, x, y, a.r.from, b.adasum.dots)
	}, action{r: s, buf: s.of(buf), in: other, d: d})
}

// sides returns this rank's vector and the other vector in the order of their blocks: x is the vector of the
// lower block, which is vector a in the formula of package ops/adasum.
func (b *Backend) sides(a *action) (x, y []byte) {
	if b.me&a.d == 0 {
		return a.buf, a.in
	}
	return a.in, a.buf
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
