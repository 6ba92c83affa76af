package tcp

import (
	"fmt"
	"slices"

	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ops"
)

// packedBytes is the size of the largest tensor of a list that is packed. For a smaller tensor, system calls
// of its own would cost more than copies.
const packedBytes = 16 << 10

// tensorList holds the tensors of an allreduce, which are reduced in their outputs as if the outputs were
// concatenated. Neighbouring tensors of at most packedBytes bytes are packed: they are reduced together in
// memory of the list. In the zero value there are no tensors.
type tensorList struct {
	given   []ops.Tensor // the tensors of the operation
	tensors []ops.Tensor // the same, but with packed tensors as one
	ends    []int        // ends[i] is the number of bytes of tensors up to the one with the index i
	packed  scratch
	small   []byte // the packed tensors, in packed

	scaling ops.Scaling
	scale   kernel.ScaleFunc  // nil if the type cannot be scaled
	divide  kernel.DivideFunc // nil if the type is not an integer type
}

// begin sets the tensors, and packs small ones. The type of their elements is dt.
func (l *tensorList) begin(tensors []ops.Tensor, dt tensor.DType, s ops.Scaling) (err error) {
	l.scaling, l.scale, l.divide = s, nil, kernel.Divide(dt)
	if s.Divisor > 1 && l.divide == nil {
		return fmt.Errorf("got a divisor for element type %v, want an integer type", dt)
	}
	if dt != tensor.Bool {
		if l.scale, err = kernel.Scale(dt); err != nil {
			return err
		}
	}
	small := 0
	for _, t := range tensors {
		if isPacked(t) {
			small += len(t.In)
		}
	}
	l.given = tensors
	room := l.packed.room(small)
	l.small = room
	for i := 0; i < len(tensors); {
		t := tensors[i]
		i++
		if isPacked(t) {
			n := copy(room, t.In)
			for ; i < len(tensors) && isPacked(tensors[i]); i++ {
				n += copy(room[n:], tensors[i].In)
			}
			t = ops.Tensor{In: room[:n], Out: room[:n]}
			room = room[n:]
		}
		if len(t.In) > 0 {
			l.ends = append(l.ends, l.numBytes()+len(t.In))
			l.tensors = append(l.tensors, t)
		}
	}
	return nil
}

func isPacked(t ops.Tensor) bool { return len(t.In) <= packedBytes }

// end copies packed results to their outputs, and drops the tensors.
func (l *tensorList) end() {
	for _, t := range l.given {
		if isPacked(t) {
			l.small = l.small[copy(t.Out, l.small):]
		}
	}
	clear(l.tensors)
	l.given, l.tensors, l.ends, l.small = nil, l.tensors[:0], l.ends[:0], nil
}

// numBytes returns the number of bytes of all tensors together.
func (l *tensorList) numBytes() int {
	if len(l.ends) == 0 {
		return 0
	}
	return l.ends[len(l.ends)-1]
}

// piece returns the first bytes of r, up to the end of r or of a tensor. r is not empty.
func (l *tensorList) piece(r byteRange) ops.Tensor {
	i, _ := slices.BinarySearch(l.ends, r.from+1) // the first tensor that ends after r.from
	t := l.tensors[i]
	first := l.ends[i] - len(t.In)
	from, to := r.from-first, min(r.to, l.ends[i])-first
	return ops.Tensor{In: t.In[from:to], Out: t.Out[from:to]}
}

// load copies the inputs of r to the outputs and scales them as before a reduction.
func (l *tensorList) load(r byteRange) {
	for r.numBytes() > 0 {
		t := l.piece(r)
		if &t.In[0] != &t.Out[0] {
			copy(t.Out, t.In)
		}
		if l.scaling.Pre != 1 && l.scale != nil {
			l.scale(t.Out, l.scaling.Pre)
		}
		r.from += len(t.Out)
	}
}

// scaleResult scales r as after a reduction.
func (l *tensorList) scaleResult(r byteRange) {
	for r.numBytes() > 0 {
		t := l.piece(r)
		if l.scaling.Divisor > 1 {
			l.divide(t.Out, l.scaling.Divisor)
		}
		if l.scaling.Post != 1 && l.scale != nil {
			l.scale(t.Out, l.scaling.Post)
		}
		r.from += len(t.Out)
	}
}
