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

// beginAlltoall begins an alltoall.
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
func (b *Backend) beginAlltoall() error {
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
		b.repeat(2, (*Backend).alltoallBruck)
		return nil
	}
	b.repeat(2, (*Backend).alltoallDirect)
	return nil
}

// blocks has the lengths of the blocks of an alltoall.
type blocks struct {
	headers []byte  // encoded lengths of the blocks that this rank sends, indexed by receiver
	arrived []byte  // encoded lengths of the blocks that this rank receives, indexed by sender
	counts  []int64 // the same, decoded
	cut     cut     // the boundaries of the received blocks in the output
	out     []byte  // the output, which receives the blocks
}

func newBlocks(n int) blocks {
	headers := make([]byte, 2*n*countBytes)
	return blocks{headers: headers[:n*countBytes], arrived: headers[n*countBytes:], counts: make([]int64, n),
		cut: make(cut, n+1)}
}

// alltoallDirect appends a round of an alltoall. In the first round, this rank sends each part of the input
// buffer to its rank, and receives the lengths of the blocks for this rank. In the second round, it receives
// these blocks. This cannot deadlock, because every rank queues all its data before it reads anything.
func (b *Backend) alltoallDirect(round int) error {
	headers := b.blocks.arrived
	if round == 0 {
		b.connectForBlocks()
		b.sendBlocks(true)
		for i := range b.ranks {
			if i != b.me && b.op.Sends(i, b.me) {
				b.receive(b.conn(i), headers[i*countBytes:][:countBytes])
			}
		}
		return nil
	}
	for i := range b.ranks {
		var k uint64
		switch {
		case i == b.me:
			k = uint64(b.op.Counts[i])
		case b.op.Sends(i, b.me):
			k = binary.LittleEndian.Uint64(headers[i*countBytes:])
		}
		if err := b.blocks.add(i, k, b.ranks); err != nil {
			return err
		}
	}
	if err := b.allocate(); err != nil {
		return err
	}
	b.receiveBlocks()
	return nil
}

// connectForBlocks makes the missing channels over which blocks are sent.
func (b *Backend) connectForBlocks() {
	for i := range b.ranks {
		if i != b.me && (b.op.Sends(i, b.me) || b.op.Sends(b.me, i)) {
			b.conn(i)
		}
	}
}

// allocate sets the output buffer of an alltoall, for the received lengths.
func (b *Backend) allocate() (err error) {
	b.blocks.out, err = b.op.Allocate(b.blocks.counts)
	if total, got := b.blocks.cut[len(b.ranks)], len(b.blocks.out); err == nil && int64(got) != total {
		err = fmt.Errorf("got an output buffer of %d bytes, want %d", got, total)
	}
	return err
}

// sendBlocks sends a block to each other rank: that rank's part of the input buffer. If headers is set, a
// header with the length of the block precedes it. sendBlocks begins with the next rank, so that not all
// ranks begin with the same peer.
func (b *Backend) sendBlocks(headers bool) {
	n := len(b.ranks)
	for k := 1; k < n; k++ {
		to := (b.me + k) % n
		if !b.op.Sends(b.me, to) {
			continue
		}
		c, p := b.conn(to), b.parts.part(b.op.Buf, to)
		if headers {
			header := b.blocks.headers[to*countBytes:][:countBytes]
			binary.LittleEndian.PutUint64(header, uint64(len(p)))
			b.send(c, header)
		}
		b.send(c, p)
	}
}

// receiveBlocks receives the blocks from all other ranks, and copies this rank's block for itself.
func (b *Backend) receiveBlocks() {
	out := b.blocks.out
	copy(b.blocks.cut.part(out, b.me), b.parts.part(b.op.Buf, b.me))
	n := len(b.ranks)
	for k := 1; k < n; k++ {
		if from := (b.me + n - k) % n; b.op.Sends(from, b.me) {
			b.receive(b.conn(from), b.blocks.cut.part(out, from))
		}
	}
}

// add stores the length of the block from member i. The lengths must be added in the order of the members.
func (s *blocks) add(i int, numBytes uint64, ranks []topo.Rank) error {
	if rest := uint64(math.MaxInt64 - s.cut[i]); numBytes > rest {
		return fmt.Errorf("got a block of %d bytes from rank %d, want at most %d", numBytes, ranks[i], rest)
	}
	s.counts[i], s.cut[i+1] = int64(numBytes), s.cut[i]+int64(numBytes)
	return nil
}
