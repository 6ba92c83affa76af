package tcp

import (
	"github.com/gohvd/gohvd/internal/tensor"
)

// exchangeBytes is the size of a segment in allreduceExchange. All ranks must use the same size, so it does
// not depend on Config.SegmentBytes. It is a multiple of the size of every element type.
const exchangeBytes = 256 << 10

// allreduceExchange reduces buf over two or more ranks in one step: every rank sends its whole contribution
// to every other rank, and each rank reduces all contributions in the order of the ranks. So the result has
// the same bits as with allreduceDirect, and half-precision values are rounded once too.
//
// The ranks work segment by segment. A rank overwrites a segment, and queues the next one, when its values
// have left. This cannot deadlock. Of the ranks that wait, consider those that work on the earliest segment.
// If one of them waits for a contribution, that contribution is queued at its sender. If all of them wait
// until their own values have left, the receivers work on the same segment or on a later one, so they have
// received these values.
func (b *Backend) allreduceExchange(op tensor.ReduceOp, dt tensor.DType, buf []byte) error {
	if err := b.ordered.prepare(op, dt); err != nil {
		return err
	}
	if err := b.connectAll(); err != nil {
		return err
	}
	for len(buf) > 0 {
		var p []byte
		p, buf = split(buf, exchangeBytes)
		if err := b.sendToAll(p); err != nil {
			return err
		}
		if err := b.accumulate(p); err != nil {
			return err
		}
		if err := b.flush(); err != nil {
			return err
		}
		b.ordered.end(p)
	}
	return nil
}

// sendToAll queues p for each other rank. It begins with the next rank, so that not all ranks begin with the
// same peer.
func (b *Backend) sendToAll(p []byte) error {
	n := len(b.ranks)
	for k := 1; k < n; k++ {
		if err := b.conns[(b.me+k)%n].Send(p); err != nil {
			return err
		}
	}
	return nil
}
