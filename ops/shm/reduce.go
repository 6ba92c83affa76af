package shm

import (
	"fmt"

	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ops"
)

// blockBytes is how many bytes are reduced at a time. All buffers of a block fit in the first-level cache.
const blockBytes = 8 << 10

// reducer combines the ranks' contributions, always in the order of the ranks. So the bits of the result
// depend neither on the rank that computes it nor on the other tensors of the operation.
type reducer struct {
	op    tensor.ReduceOp
	dt    tensor.DType
	s     ops.Scaling
	into  kernel.IntoFunc
	scale kernel.ScaleFunc
	// wide says that 16-bit floats of more than two ranks are widened, reduced and rounded once.
	wide    bool
	widen   kernel.ConvertFunc
	narrow  kernel.ConvertFunc
	combine kernel.Func // reduces elements of the wide type

	sum     [2 * blockBytes]byte // the reduction of the first sources; of twice the size if wide is set
	scaled  [2][blockBytes]byte
	widened [2 * blockBytes]byte
}

// prepare configures r for an operation of n ranks.
func (r *reducer) prepare(op tensor.ReduceOp, dt tensor.DType, s ops.Scaling, n int) (err error) {
	r.wide = dt.IsHalf() && n > 2 && (op == tensor.Sum || op == tensor.Product)
	if s.Divisor > 1 && kernel.Divide(dt) == nil {
		return fmt.Errorf("got a division of %v, want an integer type", dt)
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

// reduce sets dst to the reduction of srcs, of which there are at least two, all of the length of dst. dst
// may be one of them.
func (r *reducer) reduce(dst []byte, srcs [][]byte) {
	for at := 0; at < len(dst); at += blockBytes {
		end := min(at+blockBytes, len(dst))
		r.block(dst[at:end], srcs, at)
	}
}

// block reduces one block, which lies at the given offset of each source, as reduce does.
func (r *reducer) block(dst []byte, srcs [][]byte, at int) {
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
		// dst may be one of the sources, so it is written last.
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

// source returns a contribution. If it has to be scaled, the result is in the given buffer.
func (r *reducer) source(src []byte, at, n, buffer int) []byte {
	part := src[at : at+n]
	if r.s.Pre == 1 || r.scale == nil {
		return part
	}
	scaled := r.scaled[buffer][:n]
	copy(scaled, part)
	r.scale(scaled, r.s.Pre)
	return scaled
}

// finish applies Divisor and Post to the result of a reduction.
func (r *reducer) finish(dst []byte) {
	if r.s.Divisor > 1 {
		kernel.Divide(r.dt)(dst, r.s.Divisor)
	}
	if r.s.Post != 1 && r.scale != nil {
		r.scale(dst, r.s.Post)
	}
}

// reduceOne applies to buf what a reduction of one rank does: the scaling.
func (r *reducer) reduceOne(buf []byte) {
	if r.s.Pre != 1 && r.scale != nil {
		r.scale(buf, r.s.Pre)
	}
	r.finish(buf)
}
