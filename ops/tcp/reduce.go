package tcp

import (
	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/ops"
)

// allreduce runs an allreduce.
//
// Ring: each rank's share of the buffer travels round the ring and is reduced on its way. Then the result
// travels round once more (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of
// workstations, 2009). Each rank sends 2(n-1)/n × len(buf) bytes in 2(n-1) steps and reduces (n-1)/n ×
// len(buf) bytes. The position of an element in buf decides with which rank its sum begins. Half-precision
// values are rounded at every rank.
//
// Direct: every rank sends each share to the rank that reduces it. That rank sends the result to all other
// ranks. Each rank sends and reduces as many bytes as in the ring, in 2 steps, but needs channels to all n-1
// other ranks. Elements are combined in the order of the ranks. Half-precision values are combined in float32
// and rounded once. So the result of an element depends only on the ranks' values. (If it is a NaN, its bits
// may differ.)
//
// Exchange: every rank sends its whole contribution to all other ranks and reduces all contributions, in the
// same order and with the same result as Direct. Each rank sends and reduces (n-1) × len(buf) bytes in one
// step.
//
// RecursiveDoubling and HalvingDoubling: see allreduceDoubling.
func (b *Backend) allreduce() error {
	if err := b.by(algorithms[message.Allreduce]...); err != nil {
		return err
	}
	dt := b.op.DType
	reduce, err := kernel.Reduce(b.op.Op, dt)
	if err != nil {
		return err
	}
	if !takesLists(b.op.Kind, b.op.Algorithm) {
		buf, err := b.tensor()
		if err != nil {
			return err
		}
		if err := b.parts.even(len(buf), dt.Size()); err != nil {
			return err
		}
		if len(b.ranks) == 1 || len(buf) == 0 {
			return nil
		}
		return b.allreduceDoubling(dt.Size(), reduce, buf, b.op.Algorithm == message.HalvingDoubling)
	}
	if err := b.beginList(); err != nil {
		return err
	}
	defer b.list.end()
	if err := b.parts.even(b.list.numBytes(), dt.Size()); err != nil {
		return err
	}
	switch all := (byteRange{0, b.list.numBytes()}); {
	case len(b.ranks) == 1:
		b.list.load(all)
		b.list.scaleResult(all)
		return nil
	case all.numBytes() == 0:
		return nil
	}
	switch b.op.Algorithm {
	case message.Direct:
		return b.direct(dt.Size(), everyone)
	case message.Exchange:
		return b.allreduceExchange()
	}
	return b.allreduceRing(dt.Size(), reduce)
}

// takesLists implements ops.Registration.Lists.
func takesLists(k message.Kind, alg message.Algorithm) bool {
	return alg == message.Ring || k == message.Allreduce && keepsOrder(alg)
}

// beginList sets b.list and b.reducer for the tensors of the operation. The caller must end b.list.
func (b *Backend) beginList() error {
	tensors, s, op, dt := b.op.Tensors, b.op.Scaling, b.op.Op, b.op.DType
	if !takesLists(b.op.Kind, b.op.Algorithm) {
		s = ops.Scaling{Pre: 1, Post: 1}
	}
	result := ops.Scaling{Pre: 1, Post: s.Post, Divisor: s.Divisor}
	if err := b.reducer.Prepare(op, dt, result, len(b.ranks)); err != nil {
		return err
	}
	return b.list.begin(tensors, dt, s)
}

// maxAtRootBytes is the largest number of bytes that the root of a reduce receives from the other ranks
// together and reduces alone. If there are more, every rank reduces a part.
const maxAtRootBytes = 64 << 10

// reduceToRoot runs a reduce, by Direct. Elements are combined as in a direct allreduce, so the root gets the
// same bits. There is no tree: it would need log2 n steps in place of one or two, and would add in another
// order.
func (b *Backend) reduceToRoot() error {
	if err := b.by(algorithms[message.Reduce]...); err != nil {
		return err
	}
	if err := b.op.CheckRoot(len(b.ranks)); err != nil {
		return err
	}
	buf, err := b.tensor()
	if err != nil {
		return err
	}
	size := b.op.DType.Size()
	if err := b.parts.even(len(buf), size); err != nil {
		return err
	}
	others := len(b.ranks) - 1
	if others == 0 || len(buf) == 0 {
		return nil
	}
	if err := b.beginList(); err != nil {
		return err
	}
	defer b.list.end()
	if len(buf) <= maxAtRootBytes/others {
		return b.reduceAtRoot()
	}
	return b.direct(size, b.op.Root)
}

// reducescatter runs the first half of an allreduce, by Ring or Direct. If the blocks are equal, each rank
// sends (n-1)/n × len(buf) bytes and reduces the same number of bytes. Ring does this in n-1 steps, Direct in
// one.
func (b *Backend) reducescatter() error {
	if err := b.by(message.Ring, message.Direct); err != nil {
		return err
	}
	size, buf := b.op.DType.Size(), b.op.Buf
	reduce, err := kernel.Reduce(b.op.Op, b.op.DType)
	if err != nil {
		return err
	}
	if err := b.parts.by(b.op.Counts, len(buf), size); err != nil {
		return err
	}
	if len(b.ranks) == 1 || len(buf) == 0 {
		return nil
	}
	if b.op.Algorithm == message.Ring {
		return b.reducescatterRing(size, reduce, buf)
	}
	b.buf[0] = ops.Tensor{In: buf, Out: buf}
	b.op.Tensors = b.buf[:]
	if err := b.beginList(); err != nil {
		return err
	}
	defer b.list.end()
	return b.direct(size, nobody)
}
