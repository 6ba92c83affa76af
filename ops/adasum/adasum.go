// Package adasum combines vectors by adaptive summation, for backends that execute Adasum.
//
// The adaptive sum of two vectors a and b (Maleki et al., "Scaling Distributed Training with Adaptive
// Summation", 2020) is
//
//	(1 - a·b/(2 a·a)) a + (1 - a·b/(2 b·b)) b
//
// It adds orthogonal components and averages parallel ones. If a is zero, its factor is 1. The same holds for
// b. The dot products and the combination are computed in float64, and the result is rounded once to the
// element type. If dot products of float64 vectors are outside of the range of float64, they are computed
// from scaled elements (wide.go).
//
// The adaptive sum is commutative but not associative, so the tree is part of the definition. Let x[i] be the
// vector of rank i of n, and p the largest power of two up to n. Written with + for the adaptive sum, the
// result is c[p, 0] in
//
//	c[1, i]  = x[i] + x[p+i]             for i < n-p
//	c[1, i]  = x[i]                      for n-p <= i < p
//	c[2d, i] = c[d, 2i] + c[d, 2i+1]     for d = 1, 2, 4 ... p/2 and i < p/2d
//
// For six ranks this is ((x[0]+x[4]) + (x[1]+x[5])) + (x[2]+x[3]). Every tensor of a fused buffer is combined
// separately.
package adasum

import (
	"fmt"
	"iter"
	"slices"

	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/internal/tensor"
)

// Combiner combines parts of the vectors of a list of tensors, which lie one after another in a buffer. It is
// not safe for concurrent use. The zero value must be prepared.
type Combiner struct {
	size    int // the size of an element in bytes
	dot     kernel.DotFunc
	combine kernel.CombineFunc
	ends    []int64 // where the tensors end in the buffer
	// bins is how many numbers stand for one dot product: 1, or numBins if the elements are float64.
	bins int
}

// numDots is the number of dot products for each tensor and pair of vectors a and b: a·b, a·a and b·b.
const numDots = 3

// Prepare sets up c for tensors with elements of type dt. counts are the sizes of the tensors in bytes, and
// numBytes must be the sum of counts. It allocates only if there are more tensors than ever before.
func (c *Combiner) Prepare(dt tensor.DType, numBytes int, counts []int64) (err error) {
	if c.dot, err = kernel.Dot(dt); err != nil {
		return err
	}
	if c.combine, err = kernel.Combine(dt); err != nil {
		return err
	}
	c.size, c.bins = dt.Size(), 1
	if dt == tensor.Float64 {
		c.bins = numBins
	}
	c.ends = slices.Grow(c.ends[:0], len(counts))
	var end int64
	for i, n := range counts {
		if rest := int64(numBytes) - end; n < 0 || n > rest || n%int64(c.size) != 0 {
			return fmt.Errorf("got %d bytes for tensor %d, want a multiple of the element size, %d, and at most %d, the rest of %d bytes",
				n, i, c.size, rest, numBytes)
		}
		end += n
		c.ends = append(c.ends, end)
	}
	if end != int64(numBytes) {
		return fmt.Errorf("got tensors of %d bytes in total, want %d", end, numBytes)
	}
	return nil
}

// Dots returns how many numbers stand for the dot products of a pair of vectors. The numbers for two parts of
// the vectors are added one by one.
func (c *Combiner) Dots() int { return numDots * c.bins * len(c.ends) }

// AddDots adds to dots the dot products of a part of the vectors a and b. The part begins at byte from of the
// buffer.
func (c *Combiner) AddDots(dots []float64, a, b []byte, from int) {
	for t, p := range c.pieces(from, len(a)) {
		a, b := a[p.from:p.to], b[p.from:p.to]
		ab, aa, bb := c.dot(a, b)
		switch of := dots[numDots*c.bins*t:][:numDots*c.bins]; {
		case c.bins == 1:
			of[0] += ab
			of[1] += aa
			of[2] += bb
		case safe(aa) && safe(bb):
			addToBins(of, 0, 0, ab, aa, bb)
		default:
			addScaledDots(of, tensor.View[float64](a), tensor.View[float64](b))
		}
	}
}

// Combine stores in dst the adaptive sum of a part of the vectors a and b. The part begins at byte from of
// the buffer. dots are the dot products of the whole vectors. dst may be the same memory as a or b.
func (c *Combiner) Combine(dst, a, b []byte, from int, dots []float64) {
	for t, p := range c.pieces(from, len(a)) {
		dst, a, b := dst[p.from:p.to], a[p.from:p.to], b[p.from:p.to]
		of := dots[numDots*c.bins*t:][:numDots*c.bins]
		if c.bins == 1 {
			c.combine(dst, a, b, factor(of[0], of[1]), factor(of[0], of[2]))
			continue
		}
		ab, aa, bb := sum(of[:numBins]), sum(of[numBins:2*numBins]), sum(of[2*numBins:])
		fa, fb := wideFactor(ab, aa), wideFactor(ab, bb)
		if shift := headroom(aa, bb); shift != 0 || fa.exp != 0 || fb.exp != 0 {
			combineScaled(dst, a, b, fa, fb, shift)
		} else {
			c.combine(dst, a, b, fa.frac, fb.frac)
		}
	}
}

// factor returns the factor by which a vector is multiplied. dot is its dot product with the other vector,
// and square is its dot product with itself.
func factor(dot, square float64) float64 {
	if square == 0 {
		return 1
	}
	return 1 - dot/square/2
}

// piece is the part of a tensor that lies in a part of the buffer, as offsets in that part.
type piece struct{ from, to int }

// pieces yields the index of each tensor that overlaps numBytes bytes of the buffer from the byte from on,
// and the piece of the tensor.
func (c *Combiner) pieces(from, numBytes int) iter.Seq2[int, piece] {
	return func(yield func(int, piece) bool) {
		// t is the first tensor that does not end before the part. If t ends exactly where the part begins,
		// its piece is empty. The piece of an empty tensor is empty too.
		t, _ := slices.BinarySearch(c.ends, int64(from))
		for at := 0; at < numBytes; t++ {
			end := min(int(c.ends[t])-from, numBytes)
			if !yield(t, piece{at, end}) {
				return
			}
			at = end
		}
	}
}
