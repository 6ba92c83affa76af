package tcp

import (
	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/internal/message"
)

// allreduce runs an allreduce in which one rank computes the result of an element and all ranks receive it.
//
// Ring: each rank's share of the buffer is reduced on its way round the ring, then goes round once more
// (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009). Each rank
// sends 2(n-1)/n × len(buf) bytes in 2(n-1) steps and reduces (n-1)/n × len(buf) bytes. The rank with which
// the sum of an element begins depends on the position of the element in buf, and half-precision values are
// rounded at every rank.
//
// Direct: every rank sends each share to the rank that reduces it, which sends the result to all other ranks.
// Each rank sends and reduces as many bytes as in the ring, in 2 steps, but has channels to all n-1 other
// ranks. Elements are combined in the order of the ranks, half-precision values in float32, and rounded once:
// the result of an element depends only on the ranks' values (for a NaN only the fact that it is one).
// Besides a segment of input, direct keeps a segment of sums. For half-precision types that segment has twice
// the size, and direct keeps another of this size for the widened input.
func (b *Backend) allreduce() error {
	if err := b.by(message.Ring, message.Direct); err != nil {
		return err
	}
	op, dt := b.op.Op, b.op.DType
	reduce, err := kernel.Reduce(op, dt)
	if err != nil {
		return err
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
	if b.op.Algorithm == message.Ring {
		return b.allreduceRing(dt.Size(), reduce, buf)
	}
	return b.allreduceDirect(op, dt, buf)
}

// reducescatter runs the first half of an allreduce, by Ring or Direct. If the blocks are equal, each rank
// sends (n-1)/n × len(buf) bytes and reduces as many: by Ring in n-1 steps, by Direct in one.
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
