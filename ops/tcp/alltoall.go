package tcp

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/gohvd/gohvd/internal/message"
)

// countBytes is the size of the header that precedes each block of an alltoall. The header is the length of
// the block, as a little-endian uint64.
const countBytes = 8

// alltoall runs an alltoall with the algorithm Direct: every rank sends each other rank the length of its
// block, in 8 bytes, and then the block. When the lengths from all ranks have arrived, the output is
// allocated, and the blocks are read directly into the output. Each rank sends all blocks except its own, in
// one step, and needs channels to all n-1 other ranks.
//
// A gather and a scatter are alltoalls in which only the blocks to or from the root exist, and need only the
// channels to the root.
//
// If the announced lengths add up to more than an int64 can hold, the operation fails before allocate is
// called. The backend does not check whether there is enough memory for the total, because allocate does.
func (b *Backend) alltoall() error {
	if err := b.by(algorithms[b.op.Kind]...); err != nil {
		return err
	}
	if err := b.checkRoot(); err != nil {
		return err
	}
	if err := b.parts.by(b.op.Counts, len(b.op.Buf), 1); err != nil {
		return err
	}
	return b.alltoallDirect(b.op.Buf, b.op.Allocate)
}

// sends reports whether rank from sends a block to the other rank to in the operation.
func (b *Backend) sends(from, to int) bool {
	return (b.op.Kind != message.Gather || to == b.op.Root) &&
		(b.op.Kind != message.Scatter || from == b.op.Root)
}

// blocks has the lengths of the blocks of an alltoall.
type blocks struct {
	headers []byte  // encoded lengths of the blocks that this rank sends, indexed by receiver
	counts  []int64 // lengths of the blocks that this rank receives, indexed by sender
	cut     cut     // the boundaries of the received blocks in the output
}

func newBlocks(n int) blocks {
	return blocks{headers: make([]byte, n*countBytes), counts: make([]int64, n), cut: make(cut, n+1)}
}

// alltoallDirect sends each part of the input buffer to its rank and receives the blocks for this rank. It
// cannot deadlock, because every rank queues all its data before it reads anything.
func (b *Backend) alltoallDirect(in []byte, allocate func([]int64) ([]byte, error)) error {
	for i := range b.ranks {
		if i == b.me || !b.sends(i, b.me) && !b.sends(b.me, i) {
			continue
		}
		if _, err := b.conn(i); err != nil {
			return err
		}
	}
	if err := b.sendBlocks(in); err != nil {
		return err
	}
	own := b.parts.part(in, b.me)
	total, err := b.receiveCounts(int64(len(own)))
	if err != nil {
		return err
	}
	out, err := allocate(b.blocks.counts)
	if err != nil {
		return err
	}
	if int64(len(out)) != total {
		return fmt.Errorf("got an output buffer of %d bytes, want %d", len(out), total)
	}
	copy(b.blocks.cut.part(out, b.me), own)
	n := len(b.ranks)
	for k := 1; k < n; k++ {
		from := (b.me + n - k) % n
		if !b.sends(from, b.me) {
			continue
		}
		if err := receive(b.conns[from], b.blocks.cut.part(out, from)); err != nil {
			return err
		}
	}
	return b.flush()
}

// sendBlocks queues a header and a block for each other rank. The block is that rank's part of the input
// buffer, and the header is the length of the block. sendBlocks begins with the next rank, so that not all
// ranks begin with the same peer.
func (b *Backend) sendBlocks(in []byte) error {
	n := len(b.ranks)
	for k := 1; k < n; k++ {
		to := (b.me + k) % n
		if !b.sends(b.me, to) {
			continue
		}
		c, p := b.conns[to], b.parts.part(in, to)
		header := b.blocks.headers[to*countBytes:][:countBytes]
		binary.LittleEndian.PutUint64(header, uint64(len(p)))
		if err := c.Send(header); err != nil {
			return err
		}
		if err := c.Send(p); err != nil {
			return err
		}
	}
	return nil
}

// receiveCounts receives the lengths of the blocks from all other ranks. It returns the sum of these lengths
// and of own, which is the length of this rank's block for itself.
func (b *Backend) receiveCounts(own int64) (int64, error) {
	total := int64(0)
	for i, c := range b.conns {
		k := uint64(own)
		if i != b.me && !b.sends(i, b.me) {
			k = 0
		} else if i != b.me {
			header := b.in.room(countBytes)
			if err := receive(c, header); err != nil {
				return 0, err
			}
			k = binary.LittleEndian.Uint64(header)
		}
		if rest := uint64(math.MaxInt64 - total); k > rest {
			return 0, fmt.Errorf("got a block of %d bytes from rank %d, want at most %d", k, b.ranks[i], rest)
		}
		total += int64(k)
		b.blocks.counts[i], b.blocks.cut[i+1] = int64(k), total
	}
	return total, nil
}
