package tcp

import (
	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/internal/message"
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
// may differ.) Direct keeps two segments in memory: one for input and one for sums. For half-precision types
// the segment of sums has twice the size, and Direct keeps a third segment, of the same size, for the input
// in float32.
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
	op, dt := b.op.Op, b.op.DType
	reduce, err := kernel.Reduce(op, dt)
	if err != nil {
		return err
	}
	if b.op.Algorithm == message.Ring {
		return b.allreduceRing(dt, reduce)
	}
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
	switch b.op.Algorithm {
	case message.Exchange:
		return b.allreduceExchange(op, dt, buf)
	case message.Direct:
		return b.allreduceDirect(op, dt, buf)
	}
	return b.allreduceDoubling(dt.Size(), reduce, buf, b.op.Algorithm == message.HalvingDoubling)
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
	if err := b.checkRoot(); err != nil {
		return err
	}
	buf, err := b.tensor()
	if err != nil {
		return err
	}
	op, dt := b.op.Op, b.op.DType
	if err := b.parts.even(len(buf), dt.Size()); err != nil {
		return err
	}
	switch others := len(b.ranks) - 1; {
	case others == 0 || len(buf) == 0:
		return nil
	case len(buf) <= maxAtRootBytes/others:
		return b.reduceAtRoot(op, dt, buf)
	default:
		return b.reduceDirect(op, dt, buf)
	}
}

// reducescatter runs the first half of an allreduce, by Ring or Direct. If the blocks are equal, each rank
// sends (n-1)/n × len(buf) bytes and reduces the same number of bytes. Ring does this in n-1 steps, Direct in
// one.
func (b *Backend) reducescatter() error {
	if err := b.by(message.Ring, message.Direct); err != nil {
		return err
	}
	op, dt, buf := b.op.Op, b.op.DType, b.op.Buf
	reduce, err := kernel.Reduce(op, dt)
	if err != nil {
		return err
	}
	if err := b.parts.by(b.op.Counts, len(buf), dt.Size()); err != nil {
		return err
	}
	if len(b.ranks) == 1 || len(buf) == 0 {
		return nil
	}
	if b.op.Algorithm == message.Ring {
		return b.reducescatterRing(dt.Size(), reduce, buf)
	}
	return b.reducescatterDirect(op, dt, buf)
}
