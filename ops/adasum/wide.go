package adasum

import (
	"math"

	"github.com/gohvd/gohvd/internal/tensor"
)

// A dot product of float64 vectors is a sum over bins: bin i counts 2^(binExp·(i-2)) times. Parts of vectors
// whose dot products are in the range of float64 add to the middle bin. For other parts, the elements of a
// vector are multiplied by 2^binExp or 2^-binExp first, so that neither the squares of the largest elements
// nor their sums leave the range, and the dot product goes to another bin.
const (
	numBins = 5
	binExp  = 600
)

// safe reports whether a dot product of a vector with itself is so far from the ends of the range of float64
// that the squares that were lost do not matter, and that sums of such numbers are in the range.
func safe(square float64) bool { return square >= 0x1p-900 && square <= 0x1p900 }

// addToBins adds three dot products to the bins of. The elements of a and b were multiplied by
// 2^(-binExp·ka) and 2^(-binExp·kb).
func addToBins(of []float64, ka, kb int, ab, aa, bb float64) {
	of[2+ka+kb] += ab
	of[numBins+2+2*ka] += aa
	of[2*numBins+2+2*kb] += bb
}

// addScaledDots adds the dot products of a and b to the bins of. It scales the elements if necessary.
func addScaledDots(of, a, b []float64) {
	ka, kb := scale(a), scale(b)
	fa, fb := math.Ldexp(1, -binExp*ka), math.Ldexp(1, -binExp*kb)
	var ab, aa, bb float64
	for i := range a {
		x, y := a[i]*fa, b[i]*fb
		ab += x * y
		aa += x * x
		bb += y * y
	}
	addToBins(of, ka, kb, ab, aa, bb)
}

// scale returns k if the elements of a vector are to be multiplied by 2^(-binExp·k): 1 if they are large, -1
// if they are small.
func scale(v []float64) int {
	largest := 0.0
	for _, x := range v {
		largest = max(largest, math.Abs(x))
	}
	switch {
	case largest >= 0x1p400:
		return 1
	case largest < 0x1p-400 && largest > 0:
		return -1
	}
	return 0
}

// wide is the number frac·2^exp.
type wide struct {
	frac float64
	exp  int
}

// sum returns the sum of bins. If it is not zero and finite, its frac is normalized as by math.Frexp.
func sum(bins []float64) wide {
	var total wide
	for i, v := range bins {
		if v == 0 {
			continue
		}
		frac, exp := math.Frexp(v)
		exp += binExp * (i - 2)
		if total.frac == 0 || exp > total.exp {
			total = wide{frac + math.Ldexp(total.frac, total.exp-exp), exp}
		} else {
			total.frac += math.Ldexp(frac, exp-total.exp)
		}
	}
	frac, exp := math.Frexp(total.frac)
	return wide{frac, total.exp + exp}
}

// wideFactor returns the same as factor. Its exp is 0 unless the factor is outside of the range of float64.
func wideFactor(dot, square wide) wide {
	if square.frac == 0 {
		return wide{1, 0}
	}
	q, exp := dot.frac/square.frac/2, dot.exp-square.exp
	if f := 1 - math.Ldexp(q, exp); !math.IsInf(f, 0) || math.IsInf(q, 0) {
		return wide{f, 0}
	}
	return wide{-q, exp} // 1 is less than half of a unit of the last place
}

// headroom returns the power of two by which the terms of a combination must be divided, because they may be
// outside of the range of float64, or may not have all digits there, although their sum is or has.
func headroom(aa, bb wide) int {
	switch {
	case aa.exp > 2*1000 || bb.exp > 2*1000:
		return 4
	case aa.exp < -2*900 && bb.exp < -2*900:
		return -64
	}
	return 0
}

// combineScaled sets dst to fa·a + fb·b. It divides the terms by 2^shift before it adds them.
func combineScaled(dst, a, b []byte, fa, fb wide, shift int) {
	out, va, vb := tensor.View[float64](dst), tensor.View[float64](a), tensor.View[float64](b)
	for i := range out {
		x := math.Ldexp(va[i], fa.exp-shift) * fa.frac
		y := math.Ldexp(vb[i], fb.exp-shift) * fb.frac
		out[i] = math.Ldexp(x+y, shift)
	}
}
