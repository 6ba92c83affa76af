package tcp

import (
	"context"
	"runtime"

	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/tensor"
	"github.com/gohvd/gohvd/transport"
)

// allreduceRing reduces buf, elements of size bytes, over two ranks or more.
//
// The buffer is cut into n chunks. Rank i starts by sending chunk i. In step s of 2(n-1) it receives chunk i-s-1
// (modulo n), and sends it on unless the step is the last. In the first n-1 steps what it receives is the sum over
// the ranks passed so far, to which it adds its own; from then on it is the sum over all.
func (b *Backend) allreduceRing(ctx context.Context, size int, reduce kernel.Func, buf []byte) error {
	right, left, err := b.neighbours(ctx)
	if err != nil {
		return err
	}
	n := len(b.ranks)
	seg := max(b.segBytes/size, 1) * size
	if len(b.scratch) < seg {
		// By words, so that it is aligned for every element.
		b.scratch = tensor.Bytes(make([]int64, (seg+7)/8))
	}
	start := right.Sent() // as every operation flushes, nothing is queued
	if err := send(right, chunk(buf, size, n, b.me), seg); err != nil {
		return err
	}
	landed := uint64(0)
	for s := range 2 * (n - 1) {
		rest := chunk(buf, size, n, (b.me-s-1+2*n)%n)
		for len(rest) > 0 {
			p := rest[:min(seg, len(rest))]
			rest = rest[len(p):]
			if s < n-1 {
				in := b.scratch[:len(p)]
				if err := receive(left, in); err != nil {
					return err
				}
				reduce(p, in)
			} else {
				// Results come in the order in which this rank has sent its own parts: chunk i, i-1 and so on. So
				// they overwrite its stream to the right from the start on.
				landed += uint64(len(p))
				if err := b.replace(left, right, p, start+landed); err != nil {
					return err
				}
			}
			if s < 2*(n-1)-1 {
				if err := right.Send(p); err != nil {
					return err
				}
			}
		}
	}
	return right.Flush()
}

// replace receives p from left. What p holds until then was sent to the right and ends at position sent there.
//
// It never waits long for the old content to leave: the new one is a sum that the right neighbour's copy of the old
// has gone into, so once it is here, the old one is there. But the transport may be late to say so, and only what it
// says settles who owns p. To flush instead could hang: all ranks would wait for each other to receive.
func (b *Backend) replace(left, right transport.Conn, p []byte, sent uint64) error {
	if right.Sent() >= sent {
		return receive(left, p)
	}
	in := b.scratch[:len(p)]
	if err := receive(left, in); err != nil {
		return err
	}
	for right.Sent() < sent {
		// Sending nothing tells whether the lane was aborted.
		if err := right.Send(nil); err != nil {
			return err
		}
		runtime.Gosched()
	}
	copy(p, in)
	return nil
}

// chunk is part i of n of buf, elements of size bytes. The parts differ by one element at most.
func chunk(buf []byte, size, n, i int) []byte {
	each, more := len(buf)/size/n, len(buf)/size%n
	from := i*each + min(i, more)
	to := (i+1)*each + min(i+1, more)
	return buf[from*size : to*size]
}

// allgatherRing fills out, where rank i's block has counts[i] bytes. In step s of n-1 a rank receives block i-s-1
// (modulo n), and sends it on unless the step is the last. Each place of out is written before it is sent or never.
func (b *Backend) allgatherRing(ctx context.Context, out []byte, counts []int64) error {
	right, left, err := b.neighbours(ctx)
	if err != nil {
		return err
	}
	n := len(b.ranks)
	from := int64(0) // where block i begins
	for _, c := range counts[:b.me] {
		from += c
	}
	if err := send(right, out[from:from+counts[b.me]], b.segBytes); err != nil {
		return err
	}
	for s := range n - 1 {
		i := (b.me - s - 1 + n) % n
		if i == n-1 {
			from = int64(len(out))
		}
		from -= counts[i]
		rest := out[from : from+counts[i]]
		for len(rest) > 0 {
			p := rest[:min(b.segBytes, len(rest))]
			rest = rest[len(p):]
			if err := receive(left, p); err != nil {
				return err
			}
			if s < n-2 {
				if err := right.Send(p); err != nil {
					return err
				}
			}
		}
	}
	return right.Flush()
}
