package tcp

import (
	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/ops"
)

// beginAllreduce begins an allreduce.
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
// RecursiveDoubling and HalvingDoubling: see beginDoubling.
func (b *Backend) beginAllreduce() error {
	if err := b.by(algorithms[message.Allreduce]...); err != nil {
		return err
	}
	dt := b.op.DType
	var err error
	if b.reduce, err = kernel.Reduce(b.op.Op, dt); err != nil {
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
		if len(b.ranks) > 1 && len(buf) > 0 {
			b.beginDoubling(buf, b.op.Algorithm == message.HalvingDoubling)
		}
		return nil
	}
	if err := b.beginList(); err != nil {
		return err
	}
	all := byteRange{0, b.list.numBytes()}
	if err := b.parts.even(all.to, dt.Size()); err != nil {
		return err
	}
	switch {
	case all.numBytes() == 0:
	case len(b.ranks) == 1:
		b.load(all)
		b.scaleResult(all)
	case b.op.Algorithm == message.Direct:
		b.beginDirect(everyone)
	case b.op.Algorithm == message.Exchange:
		b.steps.connectAll()
		b.steps.repeat((all.to+exchangeBytes-1)/exchangeBytes, (*Backend).exchangeRound)
	default:
		b.makeSent()
		b.steps.repeat((all.to+b.ringChunk()-1)/b.ringChunk()+1, (*Backend).ringRound)
	}
	return nil
}

// takesLists implements ops.Registration.Lists.
func takesLists(k message.Kind, alg message.Algorithm) bool {
	return k != message.Reducescatter && alg == message.Ring || k == message.Allreduce && keepsOrder(alg)
}

// beginList sets b.list and b.reducer for the tensors of the operation.
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

// beginReduce begins a reduce, by Direct. Elements are combined as in a direct allreduce, so the root gets
// the same bits. There is no tree: it would need log2 n steps in place of one or two, and would add in
// another order.
func (b *Backend) beginReduce() error {
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
	if err := b.parts.even(len(buf), b.op.DType.Size()); err != nil {
		return err
	}
	others := len(b.ranks) - 1
	if others == 0 || len(buf) == 0 {
		return nil
	}
	if err := b.beginList(); err != nil {
		return err
	}
	if len(buf) <= maxAtRootBytes/others {
		b.reduceAtRoot()
	} else {
		b.beginDirect(b.op.Root)
	}
	return nil
}

// beginReducescatter begins the first half of an allreduce, by Ring or Direct. If the blocks are equal, each
// rank sends (n-1)/n × len(buf) bytes and reduces the same number of bytes. Ring does this in n-1 steps,
// Direct in one.
func (b *Backend) beginReducescatter() error {
	if err := b.by(message.Ring, message.Direct); err != nil {
		return err
	}
	buf := b.op.Buf
	var err error
	if b.reduce, err = kernel.Reduce(b.op.Op, b.op.DType); err != nil {
		return err
	}
	if err := b.parts.by(b.op.Counts, len(buf), b.op.DType.Size()); err != nil {
		return err
	}
	if len(b.ranks) == 1 || len(buf) == 0 {
		return nil
	}
	if b.op.Algorithm == message.Ring {
		b.steps.repeat(len(b.ranks)-1, (*Backend).reducescatterRing)
		return nil
	}
	b.buf[0] = ops.Tensor{In: buf, Out: buf}
	b.op.Tensors = b.buf[:]
	if err := b.beginList(); err != nil {
		return err
	}
	b.beginDirect(nobody)
	return nil
}
