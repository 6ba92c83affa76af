package tcp

import (
	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/internal/tensor"
)

// The reductions in this file cannot deadlock, although each rank reads from the other ranks in its own
// order:
//
//   1. A rank first queues the input that the other ranks need, and Send does not wait. So the data for the
//      first step is in flight whatever the ranks do, and every rank completes the first step.
//   2. In the first step a rank queues its results. So the data for the second step is in flight too.
//   3. A flush ends because the peer completes its steps.

// allreduceDirect reduces buf over two or more ranks. b.parts must cut buf into even parts. Each rank reduces
// its own part, and sends each segment of the result to all other ranks as soon as the segment is complete.
func (b *Backend) allreduceDirect(op tensor.ReduceOp, dt tensor.DType, buf []byte) error {
	if err := b.reducePart(op, dt, buf, everyone); err != nil {
		return err
	}
	if err := b.receiveParts(buf, b.segment(dt.Size())); err != nil {
		return err
	}
	return b.flush()
}

// receiveParts receives the results of the other ranks' parts of buf.
func (b *Backend) receiveParts(buf []byte, seg int) error {
	n := len(b.ranks)
	for k := 1; k < n; k++ {
		from := (b.me + n - k) % n
		// This rank has sent its values of the part to the rank that reduces the part, and now receives the
		// result from the same rank. landed is the position in the stream to that rank at which the old
		// content of p ends.
		c, landed := b.conns[from], b.starts[from]
		for rest := b.parts.part(buf, from); len(rest) > 0; {
			var p []byte
			p, rest = split(rest, seg)
			landed += uint64(len(p))
			if err := b.replace(c, c, p, landed); err != nil {
				return err
			}
		}
	}
	return nil
}

// reduceDirect reduces buf over two or more ranks to the root, in two steps: each rank reduces its own part,
// and sends each segment of the result to the root as soon as the segment is complete. b.parts must cut buf
// into even parts.
func (b *Backend) reduceDirect(op tensor.ReduceOp, dt tensor.DType, buf []byte) error {
	if err := b.reducePart(op, dt, buf, b.op.Root); err != nil {
		return err
	}
	if b.me == b.op.Root {
		if err := b.receiveParts(buf, b.segment(dt.Size())); err != nil {
			return err
		}
	}
	return b.flush()
}

// reduceAtRoot reduces buf over two or more ranks in one step: all other ranks send their buffers to the
// root, which reduces them.
func (b *Backend) reduceAtRoot(op tensor.ReduceOp, dt tensor.DType, buf []byte) error {
	seg := b.segment(dt.Size())
	if b.me != b.op.Root {
		c, err := b.conn(b.op.Root)
		if err != nil {
			return err
		}
		if err := send(c, buf, seg); err != nil {
			return err
		}
		return c.Flush()
	}
	if err := b.ordered.prepare(op, dt); err != nil {
		return err
	}
	if err := b.connectAll(); err != nil {
		return err
	}
	return b.reduceSegments(buf, seg, nobody)
}

// reducescatterDirect reduces buf over two or more ranks. Each rank gets the reduction of its own part.
func (b *Backend) reducescatterDirect(op tensor.ReduceOp, dt tensor.DType, buf []byte) error {
	if err := b.reducePart(op, dt, buf, nobody); err != nil {
		return err
	}
	return b.flush()
}

// These numbers, and the ranks of the set, say to which other ranks a rank sends the result of its part.
const (
	nobody   = -1
	everyone = -2
)

// reducePart sends the other ranks their parts of buf and reduces this rank's part. For each other rank, it
// stores in b.starts the stream position at which that rank's part begins. It sends the result to the ranks
// that the parameter share names. It sends to the next rank first, so that not all ranks begin with the same
// peer.
func (b *Backend) reducePart(op tensor.ReduceOp, dt tensor.DType, buf []byte, share int) error {
	if err := b.ordered.prepare(op, dt); err != nil {
		return err
	}
	if err := b.connectAll(); err != nil {
		return err
	}
	n, seg := len(b.ranks), b.segment(dt.Size())
	for k := 1; k < n; k++ {
		to := (b.me + k) % n
		b.starts[to] = b.conns[to].Sent() // no data is queued, because every operation ends with a flush
		if err := send(b.conns[to], b.parts.part(buf, to), seg); err != nil {
			return err
		}
	}
	return b.reduceSegments(b.parts.part(buf, b.me), seg, share)
}

// reduceSegments replaces part with its reduction over all ranks, segment by segment. It sends each segment
// to the ranks that the parameter share names.
func (b *Backend) reduceSegments(part []byte, seg, share int) error {
	n := len(b.ranks)
	for rest := part; len(rest) > 0; {
		var p []byte
		p, rest = split(rest, seg)
		if err := b.accumulate(p); err != nil {
			return err
		}
		b.ordered.end(p)
		for k := 1; k < n; k++ {
			to := (b.me + k) % n
			if share != everyone && share != to {
				continue
			}
			if err := b.conns[to].Send(p); err != nil {
				return err
			}
		}
	}
	return nil
}

// accumulate receives the contributions of the other ranks to a segment, and combines them with p, which is
// this rank's contribution, in the order of the ranks. The result is in b.ordered.
func (b *Backend) accumulate(p []byte) error {
	for i, c := range b.conns {
		x := p // x is the contribution of rank i
		if i != b.me {
			x = b.in.room(len(p))
			if err := receive(c, x); err != nil {
				return err
			}
		}
		if i == 0 {
			b.ordered.begin(x)
		} else {
			b.ordered.add(x)
		}
	}
	return nil
}

// inOrder reduces segments. It combines the contributions of the ranks to a segment in the order of the
// ranks.
type inOrder struct {
	dt     tensor.DType
	reduce kernel.Func // reduces elements of the accumulator's type
	acc    scratch

	// widen and narrow convert between a half-precision type and float32, which is the accumulator's type for
	// half-precision types. They are nil for other types.
	widen, narrow kernel.ConvertFunc
	wide          scratch
}

// prepare configures o for elements of type dt and the reduction op.
func (o *inOrder) prepare(op tensor.ReduceOp, dt tensor.DType) (err error) {
	acc := dt
	if dt.IsHalf() {
		acc = tensor.Float32
	}
	if o.dt != dt { // skipped if the type is unchanged, because kernel.Convert allocates
		o.widen, o.narrow, o.dt = nil, nil, tensor.Invalid
		if acc != dt {
			if o.widen, err = kernel.Convert(acc, dt); err != nil {
				return err
			}
			if o.narrow, err = kernel.Convert(dt, acc); err != nil {
				return err
			}
		}
		o.dt = dt
	}
	o.reduce, err = kernel.Reduce(op, acc)
	return err
}

// begin starts a new segment: it sets the accumulator to x.
func (o *inOrder) begin(x []byte) {
	if o.widen != nil {
		o.widen(o.acc.room(2*len(x)), x)
		return
	}
	copy(o.acc.room(len(x)), x)
}

// add combines the accumulator with x, which has as many elements as the accumulator.
func (o *inOrder) add(x []byte) {
	if o.widen != nil {
		w := o.wide.room(2 * len(x))
		o.widen(w, x)
		x = w
	}
	o.reduce(o.acc.room(len(x)), x)
}

// end stores the accumulator in p, converted to o.dt.
func (o *inOrder) end(p []byte) {
	if o.narrow != nil {
		o.narrow(p, o.acc.room(2*len(p)))
		return
	}
	copy(p, o.acc.room(len(p)))
}
