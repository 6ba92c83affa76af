package tcp

import (
	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ops"
)

// allreduceRing reduces b.list over two or more ranks. An element has size bytes.
//
// The bytes are cut into chunks, and a chunk into n parts of one segment each. The last chunk may be smaller.
// In a chunk there are 2(n-1) steps, numbered from 0. Rank i starts by sending part i. In step s it receives
// part i-s-1 (modulo n), and sends the part on unless the step is the last. In the first n-1 steps the
// received part is the sum over the ranks that it has passed, and the rank adds its own values. After that
// the received part is the sum over all ranks.
//
// The first n-1 steps of a chunk alternate with the last n-1 steps of the chunk before. So the streams carry
// a part of one chunk while a part of the other one is reduced. Between the first and the last step of a
// chunk, a rank touches only the memory of two chunks, which stays in the cache. All ranks must use chunks of
// the same size, because the chunks decide the order of the parts in the streams.
func (b *Backend) allreduceRing(size int, reduce kernel.Func) error {
	right, left, err := b.neighbours()
	if err != nil {
		return err
	}
	n, total := len(b.ranks), b.list.numBytes()
	now, before := ringChunk{sent: b.sent[0]}, ringChunk{sent: b.sent[1]}
	for from := 0; from < total || now.numBytes() > 0; {
		if from > 0 && from < total { // between chunks, the caller serves other operations
			if err := b.await(ops.Moving); err != nil {
				return err
			}
		}
		next := byteRange{from, min(from+n*b.segment(size), total)}
		now, before = ringChunk{next, before.sent}, now
		from = next.to
		if err := b.ringRound(left, right, size, reduce, &now, &before); err != nil {
			return err
		}
	}
	return right.Flush()
}

// ringChunk is a chunk of an allreduce by Ring.
type ringChunk struct {
	byteRange
	// sent[s] is the position in the stream to the right at which the part ends that was sent in step s of
	// the first n-1 steps.
	sent []uint64
}

// part returns the part of c that belongs to the rank i of n ranks.
func (c *ringChunk) part(i, n, size int) byteRange {
	from, count := tensor.Rows(int64(c.numBytes()/size), n, i)
	first := c.from + int(from)*size
	return byteRange{first, first + int(count)*size}
}

// ringRound runs the first n-1 steps of the chunk now and the last n-1 steps of the chunk before. One of the
// chunks may be empty.
func (b *Backend) ringRound(left, right *stream, size int, reduce kernel.Func, now, before *ringChunk) error {
	n := len(b.ranks)
	back := func(c *ringChunk, k int) byteRange { return c.part((b.me+n-k)%n, n, size) }
	if now.numBytes() > 0 {
		own := back(now, 0)
		b.list.load(own)
		if err := b.sendRange(right, own); err != nil {
			return err
		}
		now.sent[0] = right.queued
	}
	if err := b.sendRange(right, back(before, n-1)); err != nil {
		return err
	}
	for s := range n - 1 {
		p := back(now, s+1)
		if err := b.addRange(left, p, reduce); err != nil {
			return err
		}
		if s < n-2 {
			if err := b.sendRange(right, p); err != nil {
				return err
			}
			now.sent[s+1] = right.queued
		} else {
			b.list.scaleResult(p)
		}
		// Results arrive in the order in which this rank has sent its own values: part i, i-1 and so on.
		p = back(before, s)
		if err := b.replaceRange(left, right, p, before.sent[s]); err != nil {
			return err
		}
		if s < n-2 {
			if err := b.sendRange(right, p); err != nil {
				return err
			}
		}
	}
	return nil
}

// sendRange queues a range of b.list.
func (b *Backend) sendRange(c *stream, r byteRange) error {
	for r.numBytes() > 0 {
		p := b.list.piece(r).Out
		if err := c.Send(p); err != nil {
			return err
		}
		r.from += len(p)
	}
	return nil
}

// addRange receives the sum of a part over the ranks that the part has passed, and adds it to this rank's
// values.
func (b *Backend) addRange(left *stream, r byteRange, reduce kernel.Func) error {
	in := b.in.room(r.numBytes())
	if err := receive(left, in); err != nil {
		return err
	}
	b.list.load(r)
	for r.numBytes() > 0 {
		p := b.list.piece(r).Out
		reduce(p, in[:len(p)])
		in = in[len(p):]
		r.from += len(p)
	}
	return nil
}

// replaceRange receives the result of a part. The old content of the part was sent by sendRange, and ends at
// the stream position given by the parameter sent. The result of a tensor may arrive before the peer at the
// other end of right reads the next tensor. So replaceRange waits only until the old content of the same
// tensor has left.
func (b *Backend) replaceRange(left, right *stream, r byteRange, sent uint64) error {
	for r.numBytes() > 0 {
		p := b.list.piece(r).Out
		if err := b.replace(left, right, p, sent-uint64(r.numBytes()-len(p))); err != nil {
			return err
		}
		r.from += len(p)
	}
	return nil
}

// reducescatterRing reduces buf over two or more ranks. An element has size bytes. Each rank gets the result
// of its own part.
//
// The sum of part i begins at rank i+1, so that it ends at rank i. So rank i starts by sending part i-1.
// There are n-1 steps, numbered from 0. In step s rank i receives part i-s-2 (modulo n), adds its own values,
// and sends the sum on. In the last step the rank receives its own part, and does not send it on.
func (b *Backend) reducescatterRing(size int, reduce kernel.Func, buf []byte) error {
	right, left, err := b.neighbours()
	if err != nil {
		return err
	}
	n, seg := len(b.ranks), b.segment(size)
	if err := send(right, b.before(buf, 1), seg); err != nil {
		return err
	}
	for s := range n - 1 {
		to := right
		if s == n-2 {
			to = nil
		}
		if err := b.addOwn(left, to, reduce, b.before(buf, s+2), seg); err != nil {
			return err
		}
	}
	return right.Flush()
}

// addOwn receives the sum of a part over the ranks that the part has passed, and adds it to p, which holds
// this rank's values. Unless right is nil, addOwn sends the result to right.
func (b *Backend) addOwn(left, right *stream, reduce kernel.Func, p []byte, seg int) error {
	for rest := p; len(rest) > 0; {
		var own []byte
		own, rest = split(rest, seg)
		in := b.in.room(len(own))
		if err := receive(left, in); err != nil {
			return err
		}
		reduce(own, in)
		if right != nil {
			if err := right.Send(own); err != nil {
				return err
			}
		}
	}
	return nil
}

// before returns the part of buf that belongs to the rank k places before this rank in the ring. k is from 0
// to n.
func (b *Backend) before(buf []byte, k int) []byte {
	n := len(b.ranks)
	return b.parts.part(buf, (b.me-k+n)%n)
}
