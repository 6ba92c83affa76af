package kernel

import (
	"bytes"
	"fmt"

	"github.com/gohvd/gohvd/internal/tensor"
)

// neutrals has the neutral elements of a type, as bytes. zero is for a sum, one for a product, highest for a
// minimum, and lowest for a maximum. An element is nil if the type does not support the operation.
type neutrals struct {
	zero, one, lowest, highest []byte
}

func neutralsOf[T tensor.Element](zero, one, lowest, highest T) neutrals {
	encode := func(e T) []byte { return bytes.Clone(tensor.Bytes([]T{e})) }
	return neutrals{zero: encode(zero), one: encode(one), lowest: encode(lowest), highest: encode(highest)}
}

// Neutral returns the function that fills buf with the neutral element of dt for a reduction with op.
// Reducing x with this element returns the bits of x (a NaN stays a NaN). A rank that has nothing to
// contribute to a reduction sends neutral elements. The function panics unless len(buf) is a multiple of the
// element's size. It allocates nothing.
//
// For Min the neutral element is the largest number, +Inf for floats. For Max it is the smallest number. For
// Product it is 1. For Sum, the averages and Adasum it is 0; for floats this is -0, because -0 plus +0 would
// be +0.
func Neutral(op tensor.ReduceOp, dt tensor.DType) (func(buf []byte), error) {
	if err := tensor.CheckReduce(op, dt); err != nil {
		return nil, fmt.Errorf("kernel: neutral element: %w", err)
	}
	var elem []byte
	switch n := rowOf(dt).neutral; op {
	case tensor.Min:
		elem = n.highest
	case tensor.Max:
		elem = n.lowest
	case tensor.Product:
		elem = n.one
	default:
		elem = n.zero
	}
	return func(buf []byte) { fill(buf, elem) }, nil
}

// fill fills buf with copies of elem.
func fill(buf, elem []byte) {
	wholeElems(buf, len(elem))
	for n := copy(buf, elem); n < len(buf); {
		n += copy(buf[n:], buf[:n])
	}
}
