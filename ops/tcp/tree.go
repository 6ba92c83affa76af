package tcp

import (
	"fmt"
	"math/bits"

	"github.com/gohvd/gohvd/internal/message"
)

// broadcast runs a broadcast with the algorithm Tree: a binomial tree with depth ceil(log2 n). The root sends
// up to ceil(log2 n) × len(buf) bytes, and every other rank sends less.
func (b *Backend) broadcast() error {
	if err := b.by(message.Tree); err != nil {
		return err
	}
	if root := b.op.Root; root < 0 || root >= len(b.ranks) {
		return fmt.Errorf("got root %d, want 0 to %d", root, len(b.ranks)-1)
	}
	if len(b.ranks) == 1 || len(b.op.Buf) == 0 {
		return nil
	}
	return b.broadcastTree(b.op.Root, b.op.Buf)
}

// broadcastTree copies root's buf to the other ranks in a binomial tree. The set has at least two ranks. In
// the tree, ranks are counted from the root: the parent of rank v is v with its lowest 1 bit cleared. The
// children of v are v plus each power of two below that bit.
func (b *Backend) broadcastTree(root int, buf []byte) error {
	n := len(b.ranks)
	v := (b.me - root + n) % n
	low := v & -v
	var parent *stream
	if v == 0 {
		low = 1 << bits.Len(uint(n-1)) // the smallest power of two that is at least n
	} else {
		c, err := b.conn((v - low + root) % n)
		if err != nil {
			return err
		}
		parent = c
	}
	var room [bits.UintSize]*stream // an array, so that the slice children needs no allocation
	children := room[:0]
	// The child with the largest subtree comes first, because its data has the longest way to go.
	for bit := low >> 1; bit > 0; bit >>= 1 {
		if v+bit < n {
			c, err := b.conn((v + bit + root) % n)
			if err != nil {
				return err
			}
			children = append(children, c)
		}
	}
	for len(buf) > 0 {
		p := buf[:min(b.segBytes, len(buf))]
		buf = buf[len(p):]
		if parent != nil {
			if err := receive(parent, p); err != nil {
				return err
			}
		}
		for _, c := range children {
			if err := c.Send(p); err != nil {
				return err
			}
		}
	}
	for _, c := range children {
		if err := c.Flush(); err != nil {
			return err
		}
	}
	return nil
}
