package tcp

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
)

// countBytes is the size of the header that precedes each block of an alltoall. The header is the length of
// the block, as a little-endian uint64.
const countBytes = 8

// alltoall runs an alltoall.
//
// With Direct, every rank sends each other rank the length of its block, in 8 bytes, and then the block. When
// the lengths from all ranks have arrived, the output is allocated, and the blocks are read directly into the
// output. Each rank sends all blocks except its own, in one step, and needs channels to all n-1 other ranks.
//
// With Bruck, the lengths pass through other ranks, in ceil(log2 n) steps, and so do the blocks if none of
// them has more than maxPassedBytes. Larger blocks are sent directly.
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
	if err := b.op.CheckRoot(len(b.ranks)); err != nil {
		return err
	}
	if err := b.parts.by(b.op.Counts, len(b.op.Buf), 1); err != nil {
		return err
	}
	if b.op.Algorithm == message.Bruck {
		return b.alltoallBruck(b.op.Buf)
	}
	return b.alltoallDirect(b.op.Buf)
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
func (b *Backend) alltoallDirect(in []byte) error {
	if err := b.connectForBlocks(); err != nil {
		return err
	}
	if err := b.sendBlocks(in, true); err != nil {
		return err
	}
	if err := b.receiveCounts(int64(len(b.parts.part(in, b.me)))); err != nil {
		return err
	}
	out, err := b.allocate()
	if err != nil {
		return err
	}
	return b.receiveBlocks(in, out)
}

// connectForBlocks makes the missing channels over which blocks are sent.
func (b *Backend) connectForBlocks() error {
	for i := range b.ranks {
		if i == b.me || !b.op.Sends(i, b.me) && !b.op.Sends(b.me, i) {
			continue
		}
		if _, err := b.conn(i); err != nil {
			return err
		}
	}
	return nil
}

// allocate returns the output buffer of an alltoall, for the received lengths.
func (b *Backend) allocate() ([]byte, error) {
	out, err := b.op.Allocate(b.blocks.counts)
	if total := b.blocks.cut[len(b.ranks)]; err == nil && int64(len(out)) != total {
		err = fmt.Errorf("got an output buffer of %d bytes, want %d", len(out), total)
	}
	return out, err
}

// sendBlocks queues a block for each other rank: that rank's part of the input buffer. If headers is set, a
// header with the length of the block precedes it. sendBlocks begins with the next rank, so that not all
// ranks begin with the same peer.
func (b *Backend) sendBlocks(in []byte, headers bool) error {
	n := len(b.ranks)
	for k := 1; k < n; k++ {
		to := (b.me + k) % n
		if !b.op.Sends(b.me, to) {
			continue
		}
		c, p := b.conns[to], b.parts.part(in, to)
		if headers {
			header := b.blocks.headers[to*countBytes:][:countBytes]
			binary.LittleEndian.PutUint64(header, uint64(len(p)))
			if err := c.Send(header); err != nil {
				return err
			}
		}
		if err := c.Send(p); err != nil {
			return err
		}
	}
	return nil
}

// receiveBlocks receives the blocks from all other ranks, and copies this rank's block for itself.
func (b *Backend) receiveBlocks(in, out []byte) error {
	copy(b.blocks.cut.part(out, b.me), b.parts.part(in, b.me))
	n := len(b.ranks)
	for k := 1; k < n; k++ {
		from := (b.me + n - k) % n
		if !b.op.Sends(from, b.me) {
			continue
		}
		if err := receive(b.conns[from], b.blocks.cut.part(out, from)); err != nil {
			return err
		}
	}
	return b.flush()
}

// receiveCounts receives the lengths of the blocks from all other ranks. own is the length of this rank's
// block for itself.
func (b *Backend) receiveCounts(own int64) error {
	for i, c := range b.conns {
		k := uint64(own)
		if i != b.me && !b.op.Sends(i, b.me) {
			k = 0
		} else if i != b.me {
			header := b.in.room(countBytes)
			if err := receive(c, header); err != nil {
				return err
			}
			k = binary.LittleEndian.Uint64(header)
		}
		if err := b.blocks.add(i, k, b.ranks); err != nil {
			return err
		}
	}
	return nil
}

// add stores the length of the block from member i. The lengths must be added in the order of the members.
func (s *blocks) add(i int, numBytes uint64, ranks []topo.Rank) error {
	if rest := uint64(math.MaxInt64 - s.cut[i]); numBytes > rest {
		return fmt.Errorf("got a block of %d bytes from rank %d, want at most %d", numBytes, ranks[i], rest)
	}
	s.counts[i], s.cut[i+1] = int64(numBytes), s.cut[i]+int64(numBytes)
	return nil
}
