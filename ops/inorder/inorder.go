// Package inorder reduces the contributions of ranks in the order of the ranks, for backends that have the
// contributions of all ranks in memory.
package inorder

import (
	"fmt"

	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ops"
)

// BlockBytes is the number of bytes that are reduced at a time. All buffers that are needed for a block fit
// in the first-level cache.
const BlockBytes = 8 << 10

// Reducer combines the ranks' contributions. It always combines them in the order of the ranks. So the bits
// of the result depend neither on the rank that computes it nor on the other tensors of the operation. Sums
// and products of 16-bit floats are computed in float32 and rounded once. A Reducer is not safe for
// concurrent use. The zero value must be prepared.
type Reducer struct {
	op    tensor.ReduceOp
	dt    tensor.DType
	s     ops.Scaling
	into  kernel.IntoFunc
	scale kernel.ScaleFunc
	// wide is set for a sum or a product of 16-bit floats over more than two ranks. The elements are then
	// converted to float32, reduced, and rounded once at the end. Over two ranks, into does the same.
	wide    bool
	widen   kernel.ConvertFunc
	narrow  kernel.ConvertFunc
	combine kernel.Func // reduces float32 elements if wide is set

	*blocks // nil before the first operation
}

// blocks has the memory of a Reducer for blocks.
type blocks struct {
	// the reduction of the sources so far; large enough for a block of float32 elements
	sum     [2 * BlockBytes]byte
	scaled  [2][BlockBytes]byte
	widened [2 * BlockBytes]byte
}

// Prepare configures r for an operation with n ranks.
func (r *Reducer) Prepare(op tensor.ReduceOp, dt tensor.DType, s ops.Scaling, n int) (err error) {
	if r.blocks == nil {
		r.blocks = new(blocks)
	}
	r.wide = dt.IsHalf() && n > 2 && (op == tensor.Sum || op == tensor.Product)
	if s.Divisor > 1 && kernel.Divide(dt) == nil {
		return fmt.Errorf("got a divisor for element type %v, want an integer type", dt)
	}
	if r.op == op && r.dt == dt && r.into != nil {
		r.s = s
		return nil
	}
	r.op, r.dt, r.s = op, dt, s
	if r.into, err = kernel.ReduceInto(op, dt); err != nil {
		return err
	}
	r.scale = nil
	if dt != tensor.Bool {
		if r.scale, err = kernel.Scale(dt); err != nil {
			return err
		}
	}
	if !dt.IsHalf() {
		return nil
	}
	if r.widen, err = kernel.Convert(tensor.Float32, dt); err != nil {
		return err
	}
	if r.narrow, err = kernel.Convert(dt, tensor.Float32); err != nil {
		return err
	}
	if r.op == tensor.Sum || r.op == tensor.Product {
		r.combine, err = kernel.Reduce(op, tensor.Float32)
	}
	return err
}

// Reduce stores the reduction of srcs in dst. There are at least two sources, which have at least the length
// of dst. dst may be the beginning of one of the sources.
func (r *Reducer) Reduce(dst []byte, srcs [][]byte) {
	for at := 0; at < len(dst); at += BlockBytes {
		end := min(at+BlockBytes, len(dst))
		r.Block(dst[at:end], srcs, at)
	}
}

// Block reduces one block: the len(dst) bytes at the given offset of each source. dst has at most BlockBytes
// bytes. As in Reduce, there are at least two sources, and dst may be a part of one of them.
func (r *Reducer) Block(dst []byte, srcs [][]byte, at int) {
	n := len(dst)
	if r.wide {
		sum, widened := r.sum[:2*n], r.widened[:2*n]
		r.widen(sum, r.source(srcs[0], at, n, 0))
		for _, s := range srcs[1:] {
			r.widen(widened, r.source(s, at, n, 0))
			r.combine(sum, widened)
		}
		r.narrow(dst, sum)
	} else {
		// dst may be one of the sources, so only the last reduction writes to dst.
		sum := r.source(srcs[0], at, n, 0)
		for i, s := range srcs[1:] {
			to := r.sum[:n]
			if i == len(srcs)-2 {
				to = dst
			}
			r.into(to, sum, r.source(s, at, n, 1))
			sum = to
		}
	}
	r.finish(dst)
}

// source returns the n bytes of a contribution that begin at the given offset. If they have to be scaled,
// source copies them to r.scaled[buffer] and scales them there.
func (r *Reducer) source(src []byte, at, n, buffer int) []byte {
	part := src[at : at+n]
	if r.s.Pre == 1 || r.scale == nil {
		return part
	}
	scaled := r.scaled[buffer][:n]
	copy(scaled, part)
	r.scale(scaled, r.s.Pre)
	return scaled
}

// finish divides the result of a reduction by Divisor and multiplies it by Post.
func (r *Reducer) finish(dst []byte) {
	if r.s.Divisor > 1 {
		kernel.Divide(r.dt)(dst, r.s.Divisor)
	}
	if r.s.Post != 1 && r.scale != nil {
		r.scale(dst, r.s.Post)
	}
}

// ReduceOne does the reduction for a single rank: it only scales buf.
func (r *Reducer) ReduceOne(buf []byte) {
	if r.s.Pre != 1 && r.scale != nil {
		r.scale(buf, r.s.Pre)
	}
	r.finish(buf)
}
