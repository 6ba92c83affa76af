package tcp

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/gohvd/gohvd/internal/message"
)

// countBytes is the size of the count before every block of an alltoall: a little-endian uint64.
const countBytes = 8

// alltoall runs an alltoall with the algorithm Direct: every rank sends each other rank the length of its
// block, in 8 bytes, and then the block. When the lengths from all ranks have arrived and the output is
// allocated, the blocks are read straight into it. Each rank sends len(in) less its own block, in one step,
// and has channels to all n-1 other ranks.
//
// If a rank claims to send so much that the total exceeds an int64, the operation fails before allocate is
// called. allocate decides whether there is memory for the total.
func (b *Backend) alltoall() error {
	if err := b.by(message.Direct); err != nil {
		return err
	}
	if err := b.parts.by(b.op.Counts, len(b.op.Buf), 1); err != nil {
		return err
	}
	return b.alltoallDirect(b.op.Buf, b.op.Allocate)
}

// blocks holds the lengths of the blocks of an alltoall.
type blocks struct {
	headers []byte  // lengths of the blocks to the ranks, encoded
	counts  []int64 // lengths of the blocks from the ranks
	cut     cut     // the blocks in the output
}

func newBlocks(n int) blocks {
	return blocks{headers: make([]byte, n*countBytes), counts: make([]int64, n), cut: make(cut, n+1)}
}

// alltoallDirect sends the parts of in and receives the blocks for this rank. It cannot deadlock: every rank
// queues all its data before it reads anything.
func (b *Backend) alltoallDirect(in []byte, allocate func([]int64) ([]byte, error)) error {
	if err := b.connectAll(); err != nil {
		return err
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
		return fmt.Errorf("got %d bytes for the output, want %d", len(out), total)
	}
	copy(b.blocks.cut.part(out, b.me), own)
	n := len(b.ranks)
	for k := 1; k < n; k++ {
		from := (b.me + n - k) % n
		if err := receive(b.conns[from], b.blocks.cut.part(out, from)); err != nil {
			return err
		}
	}
	return b.flush()
}

// sendBlocks queues for each other rank the length of its part of in and then the part. It begins with the
// next rank, so that not all ranks begin with the same peer.
func (b *Backend) sendBlocks(in []byte) error {
	n := len(b.ranks)
	for k := 1; k < n; k++ {
		to := (b.me + k) % n
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

// receiveCounts receives the lengths of the blocks from all other ranks and returns the sum of all lengths.
// own is the length of this rank's own block.
func (b *Backend) receiveCounts(own int64) (int64, error) {
	total := int64(0)
	for i, c := range b.conns {
		k := uint64(own)
		if i != b.me {
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
