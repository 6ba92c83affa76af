package tcp

import (
	"math/bits"

	"github.com/gohvd/gohvd/internal/message"
)

// beginBroadcast begins a broadcast from root to the other ranks. A round handles a segment.
//
// Tree is a binomial tree with depth ceil(log2 n). The root sends up to ceil(log2 n) × len(buf) bytes, and
// every other rank sends less.
//
// Chain passes the segments from rank to rank. No rank sends more than len(buf) bytes, but a segment passes
// through n-1 ranks.
func (b *Backend) beginBroadcast() error {
	if err := b.by(algorithms[message.Broadcast]...); err != nil {
		return err
	}
	if err := b.op.CheckRoot(len(b.ranks)); err != nil {
		return err
	}
	if len(b.ranks) > 1 {
		b.steps.repeat((len(b.op.Buf)+b.steps.segBytes-1)/b.steps.segBytes, (*Backend).broadcastRound)
	}
	return nil
}

// broadcastRound receives a segment from this rank's parent, and sends it to its children. The ranks of the
// tree are counted from root.
func (b *Backend) broadcastRound(s int) error {
	root, n := b.op.Root, len(b.ranks)
	var room [bits.UintSize]int // an array, so that the slice children needs no allocation
	parent, children := binomial((b.me-root+n)%n, n, room[:0])
	if b.op.Algorithm == message.Chain {
		parent, children = chain((b.me-root+n)%n, n, room[:0])
	}
	p := b.op.Buf[s*b.steps.segBytes : min((s+1)*b.steps.segBytes, len(b.op.Buf))]
	if parent >= 0 {
		b.steps.receive(b.steps.conn((parent+root)%n), p)
	}
	for _, v := range children {
		b.steps.send(b.steps.conn((v+root)%n), p)
	}
	return nil
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
