// Package tensor describes arrays: element types, shapes, and the ways to combine elements.
package tensor

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"unsafe"
)

// DType is an element type. The zero value is no type.
type DType uint8

// The element types. Values are ours; they travel on the wire.
const (
	Invalid DType = iota
	Uint8
	Int32
	Int64
	Float32
	Float64
	numDTypes
)

var dtypes = [numDTypes]struct {
	name string
	size int
}{
	Invalid: {"invalid", 0},
	Uint8:   {"uint8", 1},
	Int32:   {"int32", 4},
	Int64:   {"int64", 8},
	Float32: {"float32", 4},
	Float64: {"float64", 8},
}

// Valid reports whether d is an element type that this version knows.
func (d DType) Valid() bool { return d > Invalid && d < numDTypes }

// Size is the number of bytes of one element, 0 for an invalid type.
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

// DTypes lists the valid element types in the order of their values.
func DTypes() []DType {
	all := make([]DType, 0, numDTypes-1)
	for d := Invalid + 1; d < numDTypes; d++ {
		all = append(all, d)
	}
	return all
}

// Element is the constraint on Go types that map to a DType.
type Element interface {
	~uint8 | ~int32 | ~int64 | ~float32 | ~float64
}

// Of is the DType of the Go type T.
func Of[T Element]() DType {
	var z T
	isFloat := T(1)/T(2) != 0
	switch unsafe.Sizeof(z) {
	case 1:
		return Uint8
	case 4:
		if isFloat {
			return Float32
		}
		return Int32
	default:
		if isFloat {
			return Float64
		}
		return Int64
	}
}

// Bytes is the memory of s, without a copy, in the machine's byte order.
func Bytes[T Element](s []T) []byte {
	if len(s) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), len(s)*int(unsafe.Sizeof(s[0])))
}

// View is b as elements of T, without a copy. b must be aligned for T; a remainder that is shorter than
// one element is left out.
func View[T Element](b []byte) []T {
	var z T
	n := len(b) / int(unsafe.Sizeof(z))
	if n == 0 {
		return nil
	}
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), n)
}

// Shape is the extent of each dimension, outermost first. A nil Shape is a scalar: zero dimensions, one
// element.
type Shape []int64

// NumElems is the product of the dimensions. It fails for a negative dimension and for a product that
// does not fit in 63 bits.
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

// String prints the shape as [64 3 7 7].
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

// ReduceOp says how the elements of several ranks become one.
type ReduceOp uint8

// The reductions. Average is a sum, then a division by the number of ranks (integers: truncated toward
// zero). The zero value is none: broadcast, allgather.
const (
	NoReduce ReduceOp = iota
	Average
	Sum
	Min
	Max
	Product
	numReduceOps
)

var reduceOps = [numReduceOps]string{"none", "average", "sum", "min", "max", "product"}

// Valid reports whether op is a reduction that this version knows.
func (op ReduceOp) Valid() bool { return op > NoReduce && op < numReduceOps }

func (op ReduceOp) String() string {
	if op >= numReduceOps {
		return fmt.Sprintf("ReduceOp(%d)", uint8(op))
	}
	return reduceOps[op]
}
