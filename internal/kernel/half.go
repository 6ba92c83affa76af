package kernel

import (
	"fmt"
	"math"

	"github.com/gohvd/gohvd/half"
	"github.com/gohvd/gohvd/internal/tensor"
)

// block is a buffer for computing with half-precision elements: they are widened to float32, combined as
// float32, and rounded back, one block at a time. A block is small enough for the stack and the first-level
// cache. It stays on the stack because it is only passed to functions that are known at compile time. For
// that reason load and store take the half-precision type as a value and branch on it. A type parameter or a
// function value would move the block to the heap.
type block [128]float32

const halfSize = 2 // size of an element in bytes

// halves returns the row of dt, Float16 or BFloat16. one and inf are the bits of 1 and +Inf in that type.
func halves(dt tensor.DType, one, inf uint16) row {
	const sign = 0x8000
	nans := sign - 1 - inf // the number of positive NaNs, and also of negative NaNs
	return row{
		reductions: reductions[IntoFunc]{
			sum:     reduceHalf(dt, tensor.Sum),
			product: reduceHalf(dt, tensor.Product),
			min:     pairs(firstHalf(0, nans)),
			max:     pairs(firstHalf(0xffff, nans)),
		},
		scale:   scaleHalf(dt),
		dot:     dotHalf(dt),
		combine: combineHalf(dt),
		neutral: neutralsOf(sign, one, sign|inf, inf),
	}
}

// bfloat16s returns the row of BFloat16. Its sum, which is the most frequent operation, does not use a block:
// to widen a bfloat16 is only a shift, so a block would cost more than it saves.
func bfloat16s() row {
	r := halves(tensor.BFloat16, 0x3f80, 0x7f80)
	r.sum = pairs(addBFloat16)
	return r
}

func addBFloat16(d, a, b []half.BFloat16) {
	a, b = a[:len(d)], b[:len(d)]
	for i, x := range a {
		d[i] = half.BFloat16FromFloat32(x.Float32() + b[i].Float32())
	}
}

// load widens the first len(v) elements of src, of type dt, to v. It rounds a float64 to odd, so that store
// can round it correctly to a half-precision type.
func load(v []float32, dt tensor.DType, src []byte) {
	switch dt {
	case tensor.Float16:
		for i, h := range elems[half.Float16](src)[:len(v)] {
			v[i] = h.Float32()
		}
	case tensor.BFloat16:
		for i, h := range elems[half.BFloat16](src)[:len(v)] {
			v[i] = h.Float32()
		}
	case tensor.Float32:
		copy(v, elems[float32](src)[:len(v)])
	case tensor.Float64:
		for i, f := range elems[float64](src)[:len(v)] {
			v[i] = roundToOdd(f)
		}
	default:
		panic(fmt.Sprintf("kernel: load: got %v, want a floating-point type", dt))
	}
}

// store rounds the elements of v to type dt and stores them in dst.
func store(dst []byte, dt tensor.DType, v []float32) {
	switch dt {
	case tensor.Float16:
		d := elems[half.Float16](dst)[:len(v)]
		for i, f := range v {
			d[i] = half.Float16FromFloat32(f)
		}
	case tensor.BFloat16:
		d := elems[half.BFloat16](dst)[:len(v)]
		for i, f := range v {
			d[i] = half.BFloat16FromFloat32(f)
		}
	case tensor.Float32:
		copy(elems[float32](dst)[:len(v)], v)
	case tensor.Float64:
		d := elems[float64](dst)[:len(v)]
		for i, f := range v {
			d[i] = float64(f)
		}
	default:
		panic(fmt.Sprintf("kernel: store: got %v, want a floating-point type", dt))
	}
}

// roundToOdd returns f if a float32 can represent f. Otherwise f lies between two neighbouring float32s, and
// roundToOdd returns the one whose last bit is 1. That bit records that f was inexact. So if the result is
// rounded again, to at least two bits fewer, the value is the same as if f were rounded once (Boldo and
// Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
func roundToOdd(f float64) float32 {
	near := float32(f)
	wide := float64(near)
	if wide == f || f != f {
		return near
	}
	b := math.Float32bits(near)
	if b&1 == 0 {
		if math.Abs(wide) < math.Abs(f) {
			b++
		} else {
			b--
		}
	}
	return math.Float32frombits(b)
}

// reduceHalf returns the function that reduces elements of dt with op, Sum or Product.
func reduceHalf(dt tensor.DType, op tensor.ReduceOp) IntoFunc {
	return func(dst, a, b []byte) {
		sameLength(dst, a)
		sameLength(dst, b)
		wholeElems(dst, halfSize)
		var u, v block
		for len(dst) > 0 {
			n := min(len(dst), len(u)*halfSize)
			x, y := u[:n/halfSize], v[:n/halfSize]
			load(x, dt, a[:n])
			load(y, dt, b[:n])
			if op == tensor.Product {
				multiply(x, x, y)
			} else {
				add(x, x, y)
			}
			store(dst[:n], dt, x)
			dst, a, b = dst[n:], a[n:], b[n:]
		}
	}
}

// firstHalf returns the function that stores in d the element of a or b that comes first in an order. If flip
// is 0, smaller elements come first. If flip is all ones, greater elements come first. In both cases NaNs
// come before all numbers. The function compares bits, which have the same order in both half-precision
// types.
func firstHalf(flip, nans uint16) func(d, a, b []uint16) {
	return func(d, a, b []uint16) {
		a, b = a[:len(d)], b[:len(d)]
		for i, x := range a {
			// The store is unconditional, because the processor could not predict a branch here.
			if y := b[i]; place(y, flip, nans) < place(x, flip, nans) {
				x = y
			}
			d[i] = x
		}
	}
}

// place maps bits to a number in the order of firstHalf. The bits of negative numbers descend, so they are
// inverted. The order is then -NaN, -Inf … -0, +0 … +Inf, +NaN, or the reverse with flip. Adding nans wraps
// the NaNs at the end around to the beginning.
func place(bits, flip, nans uint16) uint16 {
	negative := uint16(int16(bits) >> 15)
	return (bits ^ (negative | 0x8000) ^ flip) + nans
}

func scaleHalf(dt tensor.DType) ScaleFunc {
	return func(buf []byte, factor float64) {
		wholeElems(buf, halfSize)
		var b block
		for f := float32(factor); len(buf) > 0; {
			n := min(len(buf), len(b)*halfSize)
			x := b[:n/halfSize]
			load(x, dt, buf[:n])
			scale(x, f)
			store(buf[:n], dt, x)
			buf = buf[n:]
		}
	}
}

func dotHalf(dt tensor.DType) DotFunc {
	return func(a, b []byte) (ab, aa, bb float64) {
		sameLength(a, b)
		wholeElems(a, halfSize)
		var u, v block
		for len(a) > 0 {
			n := min(len(a), len(u)*halfSize)
			x, y := u[:n/halfSize], v[:n/halfSize]
			load(x, dt, a[:n])
			load(y, dt, b[:n])
			xy, xx, yy := dot(x, y)
			ab, aa, bb = ab+xy, aa+xx, bb+yy
			a, b = a[n:], b[n:]
		}
		return ab, aa, bb
	}
}

func combineHalf(dt tensor.DType) CombineFunc {
	return func(dst, a, b []byte, ca, cb float64) {
		sameLength(dst, a)
		sameLength(dst, b)
		wholeElems(dst, halfSize)
		var u, v block
		for len(dst) > 0 {
			n := min(len(dst), len(u)*halfSize)
			x, y := u[:n/halfSize], v[:n/halfSize]
			load(x, dt, a[:n])
			load(y, dt, b[:n])
			for i := range x {
				x[i] = roundToOdd(mix(float64(x[i]), float64(y[i]), ca, cb))
			}
			store(dst[:n], dt, x)
			dst, a, b = dst[n:], a[n:], b[n:]
		}
	}
}
