package tcp

import (
	"math/bits"

	"github.com/gohvd/gohvd/internal/message"
)

// broadcast runs a broadcast from root to the other ranks, segment by segment.
//
// Tree is a binomial tree with depth ceil(log2 n). The root sends up to ceil(log2 n) × len(buf) bytes, and
// every other rank sends less.
//
// Chain passes the segments from rank to rank. No rank sends more than len(buf) bytes, but a segment passes
// through n-1 ranks.
func (b *Backend) broadcast() error {
	if err := b.by(algorithms[message.Broadcast]...); err != nil {
		return err
	}
	if err := b.op.CheckRoot(len(b.ranks)); err != nil {
		return err
	}
	root, n := b.op.Root, len(b.ranks)
	if n == 1 || len(b.op.Buf) == 0 {
		return nil
	}
	var room [bits.UintSize]int // an array, so that the slice children needs no allocation
	parent, children := binomial((b.me-root+n)%n, n, room[:0])
	if b.op.Algorithm == message.Chain {
		parent, children = chain((b.me-root+n)%n, n, room[:0])
	}
	return b.pass(b.op.Buf, root, parent, children)
}

// binomial returns the parent and the children of rank v in a binomial tree of n ranks. It appends the
// children to room. The parent of v is v with its lowest 1 bit cleared. The children of v are v plus each
// power of two below that bit. The child with the largest subtree comes first, because its data has the
// longest way to go. The parent of rank 0 is -1.
func binomial(v, n int, room []int) (parent int, children []int) {
	low := v & -v
	parent = v - low
	if v == 0 {
		low = 1 << bits.Len(uint(n-1)) // the smallest power of two that is at least n
		parent = -1
	}
	for bit := low >> 1; bit > 0; bit >>= 1 {
		if v+bit < n {
			room = append(room, v+bit)
		}
	}
	return parent, room
}

// chain returns the parent and the child of rank v in a chain of n ranks, as binomial does for a tree.
func chain(v, n int, room []int) (parent int, children []int) {
	if v+1 < n {
		room = append(room, v+1)
	}
	return v - 1, room
}

// pass receives buf from the rank parent and sends it to the ranks in children. These ranks are counted from
// root. If parent is negative, this rank has buf already.
func (b *Backend) pass(buf []byte, root, parent int, children []int) error {
	n := len(b.ranks)
	var from *stream
	var err error
	if parent >= 0 {
		if from, err = b.conn((parent + root) % n); err != nil {
			return err
		}
	}
	var room [bits.UintSize]*stream // an array, so that the slice to needs no allocation
	to := room[:0]
	for _, v := range children {
		c, err := b.conn((v + root) % n)
		if err != nil {
			return err
		}
		to = append(to, c)
	}
	for len(buf) > 0 {
		var p []byte
		p, buf = split(buf, b.segBytes)
		if from != nil {
			if err := receive(from, p); err != nil {
				return err
			}
		}
		for _, c := range to {
			if err := c.Send(p); err != nil {
				return err
			}
		}
	}
	for _, c := range to {
		if err := c.Flush(); err != nil {
			return err
		}
	}
	return nil
}
