// Package tensor describes arrays: element types, shapes, and reductions.
package tensor

import (
	"fmt"
	"math"
	"reflect"
	"strconv"
	"strings"
	"unsafe"

	"github.com/gohvd/gohvd/half"
)

// DType is an element type. The zero value is Invalid.
type DType uint8

// These are the element types. Their values are sent on the wire. They differ from the values in other
// libraries.
const (
	Invalid DType = iota
	Uint8
	Int8
	Uint16
	Int16
	Int32
	Int64
	Float16
	BFloat16
	Float32
	Float64
	Bool
	numDTypes
)

var dtypes = [numDTypes]struct {
	name string
	size int
}{
	Invalid:  {"invalid", 0},
	Uint8:    {"uint8", 1},
	Int8:     {"int8", 1},
	Uint16:   {"uint16", 2},
	Int16:    {"int16", 2},
	Int32:    {"int32", 4},
	Int64:    {"int64", 8},
	Float16:  {"float16", 2},
	BFloat16: {"bfloat16", 2},
	Float32:  {"float32", 4},
	Float64:  {"float64", 8},
	Bool:     {"bool", 1},
}

// NumDTypes is one more than the greatest value of a valid element type.
const NumDTypes = int(numDTypes)

// Valid reports whether d is a known element type.
func (d DType) Valid() bool { return d > Invalid && d < numDTypes }

// Size returns the size of one element in bytes, or 0 for an invalid type.
func (d DType) Size() int {
	if !d.Valid() {
		return 0
	}
	return dtypes[d].size
}

func (d DType) String() string {
	if !d.Valid() {
		return fmt.Sprintf("DType(%d)", uint8(d))
	}
	return dtypes[d].name
}

// MarshalText implements encoding.TextMarshaler.
func (d DType) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (d *DType) UnmarshalText(text []byte) error {
	for _, known := range DTypes() {
		if known.String() == string(text) {
			*d = known
			return nil
		}
	}
	return fmt.Errorf("got the element type %.64q, want one of %v", text, DTypes())
}

// IsInteger reports whether d is an integer type. Bool is not an integer type.
func (d DType) IsInteger() bool { return d >= Uint8 && d <= Int64 }

// IsFloat reports whether d is a floating-point type, of any width.
func (d DType) IsFloat() bool { return d >= Float16 && d <= Float64 }

// IsHalf reports whether d is a floating-point type of 16 bits: Float16 or BFloat16.
func (d DType) IsHalf() bool { return d == Float16 || d == BFloat16 }

// DTypes returns the valid element types in the order of their values.
func DTypes() []DType {
	all := make([]DType, 0, numDTypes-1)
	for d := Invalid + 1; d < numDTypes; d++ {
		all = append(all, d)
	}
	return all
}

// Element is the constraint for the Go types that have a DType.
type Element interface {
	~uint8 | ~int8 | ~uint16 | ~int16 | ~int32 | ~int64 | ~float32 | ~float64 | ~bool |
		half.Float16 | half.BFloat16
}

// Of returns the DType of the Go type T.
func Of[T Element]() DType {
	switch t := reflect.TypeFor[T](); t.Kind() {
	case reflect.Uint8:
		return Uint8
	case reflect.Int8:
		return Int8
	case reflect.Uint16:
		return Uint16
	case reflect.Int16:
		return Int16
	case reflect.Int32:
		return Int32
	case reflect.Int64:
		return Int64
	case reflect.Float32:
		return Float32
	case reflect.Float64:
		return Float64
	case reflect.Bool:
		return Bool
	default: // only the half-precision types are structs
		if t == reflect.TypeFor[half.Float16]() {
			return Float16
		}
		return BFloat16
	}
}

// Bytes returns the memory of s as bytes in the machine's byte order. It does not copy.
func Bytes[T Element](s []T) []byte {
	if len(s) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), len(s)*int(unsafe.Sizeof(s[0])))
}

// View returns b as elements of type T. It does not copy. b must be aligned for T. If b ends with a part of
// an element, that part is left out. If T is a bool, every byte of b must be 0 or 1.
func View[T Element](b []byte) []T {
	var z T
	n := len(b) / int(unsafe.Sizeof(z))
	if n == 0 {
		return nil
	}
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), n)
}

// Shape has the size of each dimension, outermost first. A nil Shape is the shape of a scalar: it has no
// dimensions and one element.
type Shape []int64

// NumElems returns the product of the dimensions. If a dimension is negative or the product exceeds 2^63-1,
// it returns an error.
func (s Shape) NumElems() (int64, error) {
	n, zero := int64(1), false
	for _, d := range s {
		switch {
		case d < 0:
			return 0, fmt.Errorf("tensor: shape %v has a negative dimension", s)
		case d == 0:
			zero = true
		case n > math.MaxInt64/d:
			return 0, fmt.Errorf("tensor: shape %v has more than 2^63-1 elements", s)
		default:
			n *= d
		}
	}
	if zero {
		return 0, nil
	}
	return n, nil
}

// Equal reports whether s and t have the same dimensions.
func (s Shape) Equal(t Shape) bool {
	if len(s) != len(t) {
		return false
	}
	for i := range s {
		if s[i] != t[i] {
			return false
		}
	}
	return true
}

// String formats the shape, for example as [64 3 7 7].
func (s Shape) String() string {
	var b strings.Builder
	b.WriteByte('[')
	for i, d := range s {
		if i > 0 {
			b.WriteByte(' ')
		}
		b.WriteString(strconv.FormatInt(d, 10))
	}
	b.WriteByte(']')
	return b.String()
}

// ReduceOp is a reduction: the way in which the elements of several ranks are combined.
type ReduceOp uint8

// These are the reductions. Average is a sum that is divided by the number of ranks (integers are truncated
// toward zero). AverageActive is a sum that is divided by the number of ranks that have not joined. Adasum is
// the adaptive sum of Maleki et al. ("Scaling Distributed Training with Adaptive Summation", 2020). NoReduce
// is the zero value. It means that the operation does not reduce, as in a broadcast or an allgather.
const (
	NoReduce ReduceOp = iota
	Average
	Sum
	Min
	Max
	Product
	Adasum
	AverageActive
	numReduceOps
)

var reduceOps = [numReduceOps]string{
	"none", "average", "sum", "min", "max", "product", "adasum", "average-active",
}

// Valid reports whether op is a known reduction.
func (op ReduceOp) Valid() bool { return op > NoReduce && op < numReduceOps }

// IsAverage reports whether op is an average: a sum that is divided afterwards.
func (op ReduceOp) IsAverage() bool { return op == Average || op == AverageActive }

// Base returns the reduction that combines the elements for op: Sum for an average, and op itself for other
// reductions.
func (op ReduceOp) Base() ReduceOp {
	if op.IsAverage() {
		return Sum
	}
	return op
}

func (op ReduceOp) String() string {
	if op >= numReduceOps {
		return fmt.Sprintf("ReduceOp(%d)", uint8(op))
	}
	return reduceOps[op]
}

// CheckReduce returns an error if elements of type dt cannot be combined with op. Bools support only Min
// (all) and Max (any). Adasum needs a floating-point type. All number types support all other reductions.
func CheckReduce(op ReduceOp, dt DType) error {
	switch {
	case !op.Valid():
		return fmt.Errorf("tensor: reduce %v: got the unknown reduction %v", dt, op)
	case !dt.Valid():
		return fmt.Errorf("tensor: reduce with %v: got the unknown element type %v", op, dt)
	case dt == Bool && op != Min && op != Max:
		return fmt.Errorf("tensor: reduce bool: got operation %v, want min (logical and) or max (logical or)", op)
	case op == Adasum && !dt.IsFloat():
		return fmt.Errorf("tensor: reduce with adasum: got element type %v, want a floating-point type", dt)
	}
	return nil
}

// CheckScale returns an error if elements of type dt cannot be multiplied by a factor other than 1. This
// holds for Bool.
func CheckScale(dt DType) error {
	if !dt.Valid() || dt == Bool {
		return fmt.Errorf("tensor: prescale or postscale factor: got element type %v, want a numeric type", dt)
	}
	return nil
}
