// Package kernel combines and scales arrays of elements: the arithmetic of allreduce.
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

// row has the functions of one element type. Floats have no divide.
type row struct {
	sum, min, max, product Func
	scale                  ScaleFunc
	divide                 DivideFunc
}

// rows is indexed by tensor.DType. A type without a row is refused.
var rows = [...]row{
	tensor.Uint8:   portable[uint8](scaleInteger[uint8](0, math.MaxUint8), divide[uint8]),
	tensor.Int32:   portable[int32](scaleInteger[int32](math.MinInt32, math.MaxInt32), divide[int32]),
	tensor.Int64:   portable[int64](scaleInteger[int64](math.MinInt64, math.MaxInt64), divide[int64]),
	tensor.Float32: portable[float32](scaleFloat[float32], nil),
	tensor.Float64: portable[float64](scaleFloat[float64], nil),
}

func portable[T tensor.Element](scale ScaleFunc, divide DivideFunc) row {
	return row{sum: sum[T], min: minimum[T], max: maximum[T], product: product[T], scale: scale, divide: divide}
}

// Reduce returns the function that combines elements of dt with op: Sum, Min, Max or Product. Average is refused,
// being a Sum and a Scale.
//
// Integers wrap around. Floating-point results are rounded once, to nearest even. If either element is a NaN, so
// is the result, for Min and Max too; they order -0 before +0 (minimum and maximum of IEEE 754-2019).
func Reduce(op tensor.ReduceOp, dt tensor.DType) (Func, error) {
	var r row
	if int(dt) < len(rows) {
		r = rows[dt]
	}
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
		return nil, fmt.Errorf("kernel: reduce: got %v of %v, want sum, min, max or product of a valid type", op, dt)
	}
	return f, nil
}

// Scale returns the function that multiplies elements of dt by a factor, with Horovod's arithmetic
// (ScaleBufferCPUImpl in ops/collective_operations.h): for float32 the factor is rounded to float32 first and the
// product is a float32; for float64 and integers both are float64.
//
// Integer results are truncated toward zero. Where Horovod's are undefined, ours are not: out of range they saturate,
// a NaN becomes 0. An int64 beyond ±2^53 is rounded to a float64 before it is multiplied, except that a factor of 1
// leaves every integer as it is.
func Scale(dt tensor.DType) (ScaleFunc, error) {
	if int(dt) >= len(rows) || rows[dt].scale == nil {
		return nil, fmt.Errorf("kernel: scale: got %v, want a valid type", dt)
	}
	return rows[dt].scale, nil
}

// Divide returns the function that divides elements of dt by a whole number, or nil for a type that is scaled
// instead. An average of integers is a division: to multiply by 1/n in floating point, as Horovod does, makes the
// average of 49 ones 0.
func Divide(dt tensor.DType) DivideFunc {
	if int(dt) >= len(rows) {
		return nil
	}
	return rows[dt].divide
}

// elems is b as elements.
func elems[T tensor.Element](b []byte) []T {
	var z T
	if size := int(unsafe.Sizeof(z)); len(b)%size != 0 {
		panic(fmt.Sprintf("kernel: buffer of %d bytes, want a multiple of %d", len(b), size))
	}
	return tensor.View[T](b)
}

// pair is dst and src as elements, equally many.
func pair[T tensor.Element](dst, src []byte) (d, s []T) {
	if len(dst) != len(src) {
		panic(fmt.Sprintf("kernel: source of %d bytes, want %d as in the destination", len(src), len(dst)))
	}
	d = elems[T](dst)
	return d, elems[T](src)[:len(d)]
}

// The compiler neither unrolls loops nor inlines a function argument into one. So the loops below are written out
// for each operation, four elements a turn: slices of constant length cost one bounds check a turn, and none an
// element.

func sum[T tensor.Element](dst, src []byte) {
	d, s := pair[T](dst, src)
	i := 0
	for ; i <= len(d)-4; i += 4 {
		a, b := d[i:i+4:i+4], s[i:i+4:i+4]
		a[0] += b[0]
		a[1] += b[1]
		a[2] += b[2]
		a[3] += b[3]
	}
	for ; i < len(d); i++ {
		d[i] += s[i]
	}
}

func product[T tensor.Element](dst, src []byte) {
	d, s := pair[T](dst, src)
	i := 0
	for ; i <= len(d)-4; i += 4 {
		a, b := d[i:i+4:i+4], s[i:i+4:i+4]
		a[0] *= b[0]
		a[1] *= b[1]
		a[2] *= b[2]
		a[3] *= b[3]
	}
	for ; i < len(d); i++ {
		d[i] *= s[i]
	}
}

func minimum[T tensor.Element](dst, src []byte) {
	d, s := pair[T](dst, src)
	i := 0
	for ; i <= len(d)-4; i += 4 {
		a, b := d[i:i+4:i+4], s[i:i+4:i+4]
		a[0] = min(a[0], b[0])
		a[1] = min(a[1], b[1])
		a[2] = min(a[2], b[2])
		a[3] = min(a[3], b[3])
	}
	for ; i < len(d); i++ {
		d[i] = min(d[i], s[i])
	}
}

func maximum[T tensor.Element](dst, src []byte) {
	d, s := pair[T](dst, src)
	i := 0
	for ; i <= len(d)-4; i += 4 {
		a, b := d[i:i+4:i+4], s[i:i+4:i+4]
		a[0] = max(a[0], b[0])
		a[1] = max(a[1], b[1])
		a[2] = max(a[2], b[2])
		a[3] = max(a[3], b[3])
	}
	for ; i < len(d); i++ {
		d[i] = max(d[i], s[i])
	}
}

func scaleFloat[T float32 | float64](buf []byte, factor float64) {
	v, f := elems[T](buf), T(factor)
	for i := range v {
		v[i] *= f
	}
}

// scaleInteger makes the function for T, whose values are lowest to highest.
func scaleInteger[T uint8 | int32 | int64](lowest, highest T) ScaleFunc {
	// A float64 cannot be math.MaxInt64, but the first number beyond it: so highest is compared one higher, where
	// truncation begins to go out of range.
	low, beyond := float64(lowest), float64(highest)+1
	return func(buf []byte, factor float64) {
		v := elems[T](buf)
		if factor == 1 {
			return
		}
		for i, x := range v {
			switch f := float64(x) * factor; {
			case f > low && f < beyond:
				v[i] = T(f)
			case f >= beyond:
				v[i] = highest
			case f <= low:
				v[i] = lowest
			default: // a NaN
				v[i] = 0
			}
		}
	}
}

func divide[T uint8 | int32 | int64](buf []byte, n int64) {
	v := elems[T](buf)
	for i, x := range v {
		v[i] = T(int64(x) / n)
	}
}
