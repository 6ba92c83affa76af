// Package kernel implements the arithmetic of collective operations: loops over arrays of elements.
//
// A table has one function per operation and element type. The functions in plain Go run anywhere and define
// the results. When the program starts, functions in assembly replace those that take most of the time in
// training, if the processor can run them: sum, min and max of uint8, int32, int64 and the floating-point
// types, scaling of floating-point types, and conversions between half-precision types and float32. They
// compute the same bits, except that a NaN may have other bits. On amd64 they use AVX-512 (F, BW, DQ, VL) or
// AVX2, F16C and FMA, and on arm64 NEON. A build with the tag noasm has only plain Go.
//
// All functions read and write only the bytes that they are given.
package kernel

//go:generate go run ./asm

import (
	"fmt"
	"math"
	"unsafe"

	"github.com/gohvd/gohvd/internal/tensor"
)

// Func combines src into dst element by element: dst[i] = dst[i] op src[i].
//
// It panics unless dst and src have the same length, a multiple of the element's size. Both must be aligned
// for the element and must not overlap. It allocates nothing. It reads 2 × len(dst) bytes and writes len(dst)
// bytes.
type Func func(dst, src []byte)

// IntoFunc sets dst[i] = a[i] op b[i], element by element.
//
// It panics unless all three have the same length, a multiple of the element's size. They must be aligned for
// the element and must not overlap, except that dst may be a or b. It allocates nothing. It reads 2 ×
// len(dst) bytes and writes len(dst) bytes.
type IntoFunc func(dst, a, b []byte)

// ScaleFunc multiplies the elements of buf by factor, in place.
//
// It panics unless len(buf) is a multiple of the element's size. buf must be aligned for the element. It
// allocates nothing.
type ScaleFunc func(buf []byte, factor float64)

// DivideFunc divides the integer elements of buf by n, in place, truncating toward zero. buf must obey the
// rules of ScaleFunc.
type DivideFunc func(buf []byte, n int64)

// row has the functions of one element type. A function is nil if the type does not support the operation.
type row struct {
	reductions[IntoFunc]
	// inPlace has the reductions in which dst is also the first operand.
	inPlace reductions[Func]
	scale   ScaleFunc
	divide  DivideFunc
	dot     DotFunc
	combine CombineFunc
	// from has the conversions to this type, indexed by the source type.
	from    [numTypes]ConvertFunc
	neutral neutrals
}

// reductions has an F for each reduction.
type reductions[F any] struct{ sum, min, max, product F }

// of returns the element of r for the reduction op. If r has no such element, it returns the zero value.
func (r reductions[F]) of(op tensor.ReduceOp) (f F) {
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
	return f
}

// numTypes is one more than the greatest tensor.DType that has a row.
const numTypes = tensor.Bool + 1

// table has the functions of each element type, indexed by tensor.DType. A type without a row has no
// operations.
type table [numTypes]row

// plainTable returns the table of the functions in plain Go.
func plainTable() *table {
	t := &table{
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
	for dt := range t {
		t[dt].from = conversions(tensor.DType(dt))
	}
	return t
}

// level is the set of functions for processors that have certain instructions.
type level struct {
	name string
	// vectorize replaces functions of a plain table with the faster functions of the level.
	vectorize func(t *table)
	stream    func(dst, src []byte)
}

// plainLevel is the level for any processor.
var plainLevel = level{name: "none", vectorize: func(*table) {}, stream: func(dst, src []byte) {
	copy(dst, src)
}}

// table returns the functions of l. If l has no function for an operation, the table has the function in
// plain Go.
func (l level) table() *table {
	t := plainTable()
	l.vectorize(t)
	for dt := range t {
		r := &t[dt]
		r.inPlace = reductions[Func]{
			sum: r.sum.inPlace(), min: r.min.inPlace(), max: r.max.inPlace(), product: r.product.inPlace(),
		}
	}
	return t
}

// inPlace returns the Func that calls f with dst as both destination and first operand, or nil if f is nil.
func (f IntoFunc) inPlace() Func {
	if f == nil {
		return nil
	}
	return func(dst, src []byte) { f(dst, dst, src) }
}

// best is the fastest level that this processor supports, and rows has its functions.
var (
	best = append(levels(), plainLevel)[0]
	rows = best.table()
)

// Level returns the name of the instruction set that the functions use: "avx512", "avx2" or "neon". It
// returns "none" if the functions are plain Go: on all other processors, and if the build has the tag noasm.
func Level() string { return best.name }

// rowOf returns the row of dt. If dt has none, it returns an empty row. dt may be any value that a peer has
// sent.
func rowOf(dt tensor.DType) row {
	if int(dt) >= len(rows) {
		return row{}
	}
	return rows[dt]
}

// Reduce returns the function that combines elements of type dt with op: Sum, Min, Max or Product. Bools
// support only Min (all) and Max (any). Reduce returns an error for the averages, because an average is a Sum
// and a division, and for Adasum, because Adasum does not work element by element.
//
// Integers wrap around. Floating-point results are rounded once, to nearest even. Half-precision elements are
// widened to float32, combined as float32, and rounded again. The second rounding makes no difference to the
// result, except in a product of bfloat16 below 2^-126. If either element is a NaN, the result is a NaN, for
// Min and Max too. Min and Max order -0 before +0 (minimum and maximum of IEEE 754-2019). For bools every
// byte other than 0 is true, and the result true is the byte 1.
func Reduce(op tensor.ReduceOp, dt tensor.DType) (Func, error) {
	f := rowOf(dt).inPlace.of(op)
	if f == nil {
		return nil, notReduced(op, dt)
	}
	return f, nil
}

// ReduceInto is like Reduce, but its function has a separate destination. The results have the same bits.
func ReduceInto(op tensor.ReduceOp, dt tensor.DType) (IntoFunc, error) {
	f := rowOf(dt).of(op)
	if f == nil {
		return nil, notReduced(op, dt)
	}
	return f, nil
}

func notReduced(op tensor.ReduceOp, dt tensor.DType) error {
	return fmt.Errorf("kernel: reduce: operation %v is not supported for type %v", op, dt)
}

// Scale returns the function that multiplies elements of type dt by a factor, with Horovod's arithmetic
// (ScaleBufferCPUImpl in ops/collective_operations.h). For float32 and half-precision types, the factor is
// first rounded to float32 and the product is a float32. For half-precision types, the product is then
// rounded again. For float64 and integers, factor and product are float64s. For bools Scale returns an error.
//
// Integer results are truncated toward zero. Results that are undefined in Horovod are defined here: results
// out of range saturate, and a NaN becomes 0. An int64 beyond ±2^53 is rounded to a float64 before it is
// multiplied, except that a factor of 1 leaves every integer unchanged.
func Scale(dt tensor.DType) (ScaleFunc, error) {
	f := rowOf(dt).scale
	if f == nil {
		return nil, fmt.Errorf("kernel: scale: got element type %v, want a numeric type", dt)
	}
	return f, nil
}

// Divide returns the function that divides elements of type dt by an integer. If dt is not an integer type,
// it returns nil, because such elements are scaled instead. An average of integers is a division: if the sum
// were multiplied by 1/n in floating point, as in Horovod, the average of 49 ones would be 0.
func Divide(dt tensor.DType) DivideFunc { return rowOf(dt).divide }

// elems returns b as a slice of elements. It panics if b has a part of an element at its end.
func elems[T tensor.Element](b []byte) []T {
	var z T
	wholeElems(b, int(unsafe.Sizeof(z)))
	return tensor.View[T](b)
}

// wholeElems panics unless len(b) is a multiple of size.
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

// pairs returns an IntoFunc that calls f with its arguments as slices of elements.
func pairs[T tensor.Element](f func(dst, a, b []T)) IntoFunc {
	return func(dst, a, b []byte) {
		sameLength(dst, a)
		sameLength(dst, b)
		f(elems[T](dst), elems[T](a), elems[T](b))
	}
}
