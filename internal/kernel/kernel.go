// Package kernel has the arithmetic of collective operations: loops over arrays of elements.
//
// A table has one function per operation and element type. Those here are plain Go, run anywhere, and define the
// results; a function for one processor takes the place of one of them and must give the same bits (of a NaN
// only that it is one).
package kernel

import (
	"fmt"
	"math"
	"unsafe"

	"github.com/gohvd/gohvd/tensor"
)

// Func combines src into dst element by element: dst[i] = dst[i] op src[i].
//
// dst and src have the same length, a multiple of the element's size, or it panics. Both are aligned for the
// element and do not overlap. It allocates nothing and reads 2 and writes 1 × len(dst) bytes.
type Func func(dst, src []byte)

// ScaleFunc multiplies the elements of buf by factor, in place.
//
// len(buf) is a multiple of the element's size, or it panics; buf is aligned for the element. It allocates nothing.
type ScaleFunc func(buf []byte, factor float64)

// DivideFunc divides the integer elements of buf by n, in place, truncating toward zero. Other than that it is as
// ScaleFunc.
type DivideFunc func(buf []byte, n int64)

// row has the functions of one element type, nil where the type has no such operation.
type row struct {
	sum, min, max, product Func
	scale                  ScaleFunc
	divide                 DivideFunc
	dot                    DotFunc
	combine                CombineFunc
	neutral                neutrals
}

// rows is indexed by tensor.DType. A type without a row is refused.
var rows = [...]row{
	tensor.Uint8:    integer[uint8](0, math.MaxUint8),
	tensor.Int8:     integer[int8](math.MinInt8, math.MaxInt8),
	tensor.Uint16:   integer[uint16](0, math.MaxUint16),
	tensor.Int16:    integer[int16](math.MinInt16, math.MaxInt16),
	tensor.Int32:    integer[int32](math.MinInt32, math.MaxInt32),
	tensor.Int64:    integer[int64](math.MinInt64, math.MaxInt64),
	tensor.Float16:  halves(tensor.Float16, 0x3c00, 0x7c00),
	tensor.BFloat16: bfloat16s(),
	tensor.Float32:  floats[float32](),
	tensor.Float64:  floats[float64](),
	tensor.Bool:     bools(),
}

// rowOf is the row of dt, empty if it has none. dt may come from the wire.
func rowOf(dt tensor.DType) row {
	if int(dt) >= len(rows) {
		return row{}
	}
	return rows[dt]
}

// Reduce returns the function that combines elements of dt with op: Sum, Min, Max or Product; bools have Min (all)
// and Max (any) alone. Average is refused, being a Sum and a Scale, and Adasum, which does not go element by element.
//
// Integers wrap around. Floating-point results are rounded once, to nearest even. Halves are widened to float32,
// combined there, and rounded once more, which makes no difference to the result except in a product of bfloat16
// below 2^-126. If either element is a NaN, so is the result, for Min and Max too; they order -0 before +0 (minimum
// and maximum of IEEE 754-2019). For bools every byte other than 0 is true, and true is written as 1.
func Reduce(op tensor.ReduceOp, dt tensor.DType) (Func, error) {
	r := rowOf(dt)
	var f Func
	switch op {
	case tensor.Sum:
		f = r.sum
	case tensor.Min:
		f = r.min
	case tensor.Max:
		f = r.max
	case tensor.Product:
		f = r.product
	}
	if f == nil {
		return nil, fmt.Errorf("kernel: reduce: got %v of %v, want sum, min, max or product of a type that has it", op, dt)
	}
	return f, nil
}

// Scale returns the function that multiplies elements of dt by a factor, with Horovod's arithmetic
// (ScaleBufferCPUImpl in ops/collective_operations.h): for float32 and the halves the factor is rounded to float32
// first and the product is a float32, which for the halves is rounded once more; for float64 and integers both are
// float64. Bools are refused.
//
// Integer results are truncated toward zero. Where Horovod's are undefined, ours are not: out of range they saturate,
// a NaN becomes 0. An int64 beyond ±2^53 is rounded to a float64 before it is multiplied, except that a factor of 1
// leaves every integer as it is.
func Scale(dt tensor.DType) (ScaleFunc, error) {
	f := rowOf(dt).scale
	if f == nil {
		return nil, fmt.Errorf("kernel: scale: got %v, want a type of numbers", dt)
	}
	return f, nil
}

// Divide returns the function that divides elements of dt by a whole number, or nil for a type that is scaled
// instead. An average of integers is a division: to multiply by 1/n in floating point, as Horovod does, makes the
// average of 49 ones 0.
func Divide(dt tensor.DType) DivideFunc { return rowOf(dt).divide }

// elems is b as elements.
func elems[T tensor.Element](b []byte) []T {
	var z T
	wholeElems(b, int(unsafe.Sizeof(z)))
	return tensor.View[T](b)
}

// wholeElems panics unless b is elements of size bytes.
func wholeElems(b []byte, size int) {
	if len(b)%size != 0 {
		panic(fmt.Sprintf("kernel: buffer of %d bytes, want a multiple of %d", len(b), size))
	}
}

// sameLength panics unless a and b have the same number of bytes.
func sameLength(a, b []byte) {
	if len(a) != len(b) {
		panic(fmt.Sprintf("kernel: buffers of %d and %d bytes, want the same length", len(a), len(b)))
	}
}

// pairs is f on the memory of its elements.
func pairs[T tensor.Element](f func(dst, src []T)) Func {
	return func(dst, src []byte) {
		sameLength(dst, src)
		f(elems[T](dst), elems[T](src))
	}
}
