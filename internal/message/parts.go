package message

import (
	"fmt"
	"iter"
	"math"
	"slices"

	"github.com/gohvd/gohvd/internal/tensor"
)

// Parts are the tensors of a group that is requested and granted as one. For each tensor, the slice has the
// element type, the number of dimensions and then the dimensions. Most groups are submitted repeatedly, and a
// single slice can be compared quickly.
type Parts []int64

// Append appends a tensor to p and returns the result.
func (p Parts) Append(dt tensor.DType, shape tensor.Shape) Parts {
	return append(append(p, int64(dt), int64(len(shape))), shape...)
}

// All returns an iterator over the tensors. The method check must have accepted p.
func (p Parts) All() iter.Seq2[tensor.DType, tensor.Shape] {
	return func(yield func(tensor.DType, tensor.Shape) bool) {
		for len(p) > 0 {
			dims := 2 + p[1]
			if !yield(tensor.DType(p[0]), tensor.Shape(p[2:dims])) {
				return
			}
			p = p[dims:]
		}
	}
}

// Len returns the number of tensors.
func (p Parts) Len() (n int) {
	for range p.All() {
		n++
	}
	return n
}

// Types returns an iterator over the element types. It returns each type once, in the order of first use.
func (p Parts) Types() iter.Seq[tensor.DType] {
	return func(yield func(tensor.DType) bool) {
		var seen uint64 // one bit for each type
		for dt := range p.All() {
			if seen&(1<<dt) == 0 && !yield(dt) {
				return
			}
			seen |= 1 << dt
		}
	}
}

// DType returns the common element type of all tensors, or Invalid if there are several types.
func (p Parts) DType() tensor.DType {
	common := tensor.Invalid
	for dt := range p.Types() {
		if common != tensor.Invalid {
			return tensor.Invalid
		}
		common = dt
	}
	return common
}

// Equal reports whether p and q have the same tensors.
func (p Parts) Equal(q Parts) bool { return slices.Equal(p, q) }

// At returns tensor i. If there is no tensor i, At returns the type Invalid.
func (p Parts) At(i int) (tensor.DType, tensor.Shape) {
	for dt, shape := range p.All() {
		if i == 0 {
			return dt, shape
		}
		i--
	}
	return tensor.Invalid, nil
}

// Difference returns the index of the first tensor that differs between p and q. If p and q are equal, it
// returns -1.
func (p Parts) Difference(q Parts) int {
	for i := 0; ; i++ {
		switch {
		case len(p) == 0 && len(q) == 0:
			return -1
		case len(p) == 0 || len(q) == 0:
			return i
		}
		dims := 2 + p[1]
		if p[0] != q[0] || p[1] != q[1] || !slices.Equal(p[2:dims], q[2:dims]) {
			return i
		}
		p, q = p[dims:], q[dims:]
	}
}

// numBytes returns the total number of bytes of all tensors. If wire is a valid type, every element counts
// with the size of wire.
func (p Parts) numBytes(wire tensor.DType) (total int64) {
	for dt, shape := range p.All() {
		if wire.Valid() {
			dt = wire
		}
		n, _ := shape.NumElems() // cannot fail, because check has accepted the shape
		total += n * int64(dt.Size())
	}
	return total
}

// check returns an error if p is malformed, if dt is not the common element type of the tensors, or if
// numElems is not their total number of elements.
func (p Parts) check(dt tensor.DType, numElems int64) error {
	var elems, bytes int64
	for rest, i := p, 1; len(rest) > 0; i++ {
		if len(rest) < 2 || rest[1] < 0 || rest[1] > int64(len(rest))-2 {
			return fmt.Errorf("the description of tensor %d of the group is truncated", i)
		}
		dims := 2 + rest[1]
		each, shape := tensor.DType(min(uint64(rest[0]), math.MaxUint8)), tensor.Shape(rest[2:dims])
		n, err := checkTensor(each, shape)
		if err != nil {
			return fmt.Errorf("tensor %d of the group: %w", i, err)
		}
		size := n * int64(each.Size())
		if size > math.MaxInt64-bytes {
			return fmt.Errorf("the group has more than 2^63-1 bytes")
		}
		elems, bytes = elems+n, bytes+size
		rest = rest[dims:]
	}
	if elems != numElems {
		return fmt.Errorf("the group has %d elements, want %d", elems, numElems)
	}
	if common := p.DType(); common != dt {
		return fmt.Errorf("the group has element type %v, want %v", common, dt)
	}
	return nil
}
