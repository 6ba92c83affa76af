package kernel

import (
	"fmt"
	"math"

	"github.com/gohvd/gohvd/internal/tensor"
)

// ConvertFunc converts the elements of src to the element type of dst and stores them in dst.
//
// It panics unless dst and src have room for the same number of elements. Both must be aligned for their
// elements, and they must not overlap. It allocates nothing.
type ConvertFunc func(dst, src []byte)

// DotFunc returns the dot products a·b, a·a and b·b. It computes them in float64 and has the same result on
// every machine. The order in which the products are added depends only on the length. So splitting an array
// may change the last bits. For float64 elements, the squares may overflow.
//
// It panics unless a and b have the same length, a multiple of the element's size. Both must be aligned for
// the element, and may be the same. It allocates nothing.
type DotFunc func(a, b []byte) (ab, aa, bb float64)

// CombineFunc sets dst to ca·a + cb·b, element by element. It computes the two products and the sum in
// float64 and rounds the sum once to the element's type. It has the same result on every machine.
//
// It panics unless all three have the same length, a multiple of the element's size. They must be aligned for
// the element and must not overlap, except that dst may be a or b. It allocates nothing.
type CombineFunc func(dst, a, b []byte, ca, cb float64)

// Convert returns the function that converts elements of the second type to the first type. Both must be
// floating-point types. The function rounds once, to nearest even: a float64 is converted to a half-precision
// type without rounding to float32 in between. Values beyond the largest number become infinity, and a NaN
// stays a NaN.
func Convert(to, from tensor.DType) (ConvertFunc, error) {
	if !to.IsFloat() || !from.IsFloat() {
		return nil, fmt.Errorf("kernel: convert: got a conversion from %v to %v, want floating-point types", from, to)
	}
	return rowOf(to).from[from], nil
}

// Dot returns the function that computes the dot products of two arrays of type dt. If dt is not a
// floating-point type, it returns an error.
func Dot(dt tensor.DType) (DotFunc, error) {
	f := rowOf(dt).dot
	if f == nil {
		return nil, fmt.Errorf("kernel: dot product: got %v, want a floating-point type", dt)
	}
	return f, nil
}

// Combine returns the function that adds multiples of two arrays of type dt. If dt is not a floating-point
// type, it returns an error.
func Combine(dt tensor.DType) (CombineFunc, error) {
	f := rowOf(dt).combine
	if f == nil {
		return nil, fmt.Errorf("kernel: combine: got %v, want a floating-point type", dt)
	}
	return f, nil
}

// floats returns the row of T.
func floats[T float]() row {
	r := arithmetic[T]()
	r.scale = func(buf []byte, factor float64) { scale(elems[T](buf), T(factor)) }
	r.dot = func(a, b []byte) (ab, aa, bb float64) {
		sameLength(a, b)
		return dot(elems[T](a), elems[T](b))
	}
	r.combine = func(dst, a, b []byte, ca, cb float64) {
		sameLength(dst, a)
		sameLength(dst, b)
		combine(elems[T](dst), elems[T](a), elems[T](b), ca, cb)
	}
	inf := T(math.Inf(1))
	r.neutral = neutralsOf(T(math.Copysign(0, -1)), 1, -inf, inf)
	return r
}

func scale[T float](v []T, factor T) {
	for i := range v {
		v[i] *= factor
	}
}

func dot[T float](a, b []T) (ab, aa, bb float64) {
	b = b[:len(a)]
	for i := range a {
		x, y := float64(a[i]), float64(b[i])
		ab += float64(x * y)
		aa += float64(x * x)
		bb += float64(y * y)
	}
	return ab, aa, bb
}

func combine[T float](dst, a, b []T, ca, cb float64) {
	a, b = a[:len(dst)], b[:len(dst)]
	for i := range dst {
		dst[i] = T(mix(float64(a[i]), float64(b[i]), ca, cb))
	}
}

// conversions returns the functions that convert floating-point types to the given one. The result is indexed
// by the source type.
func conversions(to tensor.DType) (from [numTypes]ConvertFunc) {
	for dt := range tensor.DType(numTypes) {
		switch {
		case !to.IsFloat() || !dt.IsFloat():
		case to == dt:
			from[dt] = copyElems(to.Size())
		// convertBlocks would be wrong here, because load would round to odd.
		case to == tensor.Float32 && dt == tensor.Float64:
			from[dt] = roundElems
		default:
			from[dt] = convertBlocks(to, dt)
		}
	}
	return from
}

// mix returns ca·x + cb·y. Here and in dot, the conversions to float64 prevent the compiler from fusing a
// product with the sum. Only some processors can fuse them, so results would differ.
func mix(x, y, ca, cb float64) float64 { return float64(ca*x) + float64(cb*y) }

func copyElems(size int) ConvertFunc {
	return func(dst, src []byte) {
		sameLength(dst, src)
		wholeElems(dst, size)
		copy(dst, src)
	}
}

// roundElems converts float64s to float32s.
func roundElems(dst, src []byte) {
	d, s := elems[float32](dst), elems[float64](src)
	sameCount(len(d), len(s))
	for i, f := range s {
		d[i] = float32(f)
	}
}

// convertBlocks returns the function that converts elements of one type to another, block by block. It must
// not be used for float64 to float32, because load rounds a float64 to odd.
func convertBlocks(to, from tensor.DType) ConvertFunc {
	toSize, fromSize := to.Size(), from.Size()
	return func(dst, src []byte) {
		wholeElems(dst, toSize)
		wholeElems(src, fromSize)
		sameCount(len(dst)/toSize, len(src)/fromSize)
		var b block
		for len(src) > 0 {
			n := min(len(src)/fromSize, len(b))
			load(b[:n], from, src[:n*fromSize])
			store(dst[:n*toSize], to, b[:n])
			dst, src = dst[n*toSize:], src[n*fromSize:]
		}
	}
}

// sameCount panics unless the destination and the source have the same number of elements.
func sameCount(dst, src int) {
	if dst != src {
		panic(fmt.Sprintf("kernel: destination of %d elements, want %d as in the source", dst, src))
	}
}
