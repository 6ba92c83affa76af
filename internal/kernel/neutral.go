package kernel

import (
	"bytes"
	"fmt"

	"github.com/gohvd/gohvd/internal/tensor"
)

// neutrals has the elements of a type, as bytes, that change nothing: zero in a sum, one in a product, the highest in
// a minimum, the lowest in a maximum. An element is nil where the type has no such operation.
type neutrals struct {
	zero, one, lowest, highest []byte
}

func neutralsOf[T tensor.Element](zero, one, lowest, highest T) neutrals {
	encode := func(e T) []byte { return bytes.Clone(tensor.Bytes([]T{e})) }
	return neutrals{zero: encode(zero), one: encode(one), lowest: encode(lowest), highest: encode(highest)}
}

// Neutral returns the function that fills buf with the element of dt that changes nothing in a reduction with op: x op
// it is x, to the bit (a NaN stays one). The function panics unless len(buf) is a multiple of the element's size, and
// allocates nothing. A rank that has nothing to add to a reduction sends this.
//
// For Min it is the largest number, +Inf for floats, for Max the smallest, for Product 1. For Sum, the averages and
// Adasum it is 0, which for floats is -0: -0 and +0 would be +0.
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

// fill repeats elem in buf.
func fill(buf, elem []byte) {
	wholeElems(buf, len(elem))
	for n := copy(buf, elem); n < len(buf); {
		n += copy(buf[n:], buf[:n])
	}
}
