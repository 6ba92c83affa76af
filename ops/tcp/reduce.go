package tcp

import (
	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/internal/message"
)

// allreduce runs an allreduce in which one rank computes the result of an element and all get it.
//
// Ring: each rank's share of the buffer is reduced on its way round the ring, then goes round once more (Patarasuk and
// Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009). Each rank sends 2(n-1)/n × len(buf)
// bytes in 2(n-1) steps and computes (n-1)/n × len(buf). Which ranks an element's sum begins with depends on its place
// in buf, and halves are rounded at every rank.
//
// Direct: every rank sends each share to the rank that reduces it, which sends the result to all. Each rank sends as
// much as in the ring and computes as much, in 2 steps, but has channels to all n-1 others. Elements are combined in the
// order of the ranks, halves in float32, rounded once: the result of an element depends on the ranks' values alone (of
// a NaN only that it is one). Besides a segment of input it keeps one of sums, for halves one of twice the size and
// another for what is added.
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

// reducescatter runs a reducescatter by the first half of either way of allreduce. Each rank sends (n-1)/n × len(buf)
// bytes, if the blocks are equal, and computes as much: by Ring in n-1 steps, by Direct in one.
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
