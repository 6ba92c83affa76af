package tcp

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/ops"
)

// countBytes is the size of the header that precedes each block of an alltoall. The header is the length of
// the block, as a little-endian uint64.
const countBytes = 8

// alltoall runs the operations in which each rank sends a block to each other rank: an alltoall, and a gather
// and a scatter, in which only the blocks to or from the root exist and need only the channels to the root.
//
// With Direct, every rank sends each other rank the length of its block, in 8 bytes, and then the block. When
// the lengths from all ranks have arrived, the output is allocated, and the blocks are read directly into the
// output. Each rank sends all blocks except its own, in one step, and needs channels to all n-1 other ranks.
//
// With Bruck, the lengths pass through other ranks, in ceil(log2 n) steps, and so do the blocks if none of
// them has more than maxPassedBytes. Larger blocks are sent directly.
//
// If the announced lengths add up to more than an int64 can hold, the operation fails before allocate is
// called. The backend does not check whether there is enough memory for the total, because allocate does.
type alltoall struct {
	op     *ops.Operation
	steps  *schedule
	input  cut // the boundaries of the blocks in op.Buf
	blocks blocks
	// slots and in are the state and the memory of an alltoall by Bruck.
	slots slots
	in    scratch
}

// begin begins an operation whose algorithm has been checked.
func (t *alltoall) begin() error {
	if err := t.op.CheckRoot(len(t.steps.ranks)); err != nil {
		return err
	}
	if n := len(t.steps.ranks); t.input == nil {
		t.input, t.blocks = make(cut, n+1), newBlocks(n)
	}
	if err := t.input.by(t.op.Counts, len(t.op.Buf), 1); err != nil {
		return err
	}
	round := func(b *Backend, round int) error { return b.alltoall.direct(round) }
	if t.op.Algorithm == message.Bruck {
		round = func(b *Backend, round int) error { return b.alltoall.bruck(round) }
	}
	t.steps.repeat(2, round)
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

// direct appends a round of an alltoall. In the first round, this rank sends each part of the input buffer to
// its rank, and receives the lengths of the blocks for this rank. In the second round, it receives these
// blocks. This cannot deadlock, because every rank queues all its data before it reads anything.
func (t *alltoall) direct(round int) error {
	headers := t.blocks.arrived
	if round == 0 {
		t.connectForBlocks()
		t.sendBlocks(true)
		for i := range t.steps.ranks {
			if i != t.steps.me && t.op.Sends(i, t.steps.me) {
				t.steps.receive(t.steps.conn(i), headers[i*countBytes:][:countBytes])
			}
		}
		return nil
	}
	for i := range t.steps.ranks {
		var k uint64
		switch {
		case i == t.steps.me:
			k = uint64(t.op.Counts[i])
		case t.op.Sends(i, t.steps.me):
			k = binary.LittleEndian.Uint64(headers[i*countBytes:])
		}
		if err := t.blocks.add(i, k, t.steps.ranks); err != nil {
			return err
		}
	}
	if err := t.allocate(); err != nil {
		return err
	}
	t.receiveBlocks()
	return nil
}

// connectForBlocks makes the missing channels over which blocks are sent.
func (t *alltoall) connectForBlocks() {
	for i := range t.steps.ranks {
		if i != t.steps.me && (t.op.Sends(i, t.steps.me) || t.op.Sends(t.steps.me, i)) {
			t.steps.conn(i)
		}
	}
}

// allocate sets the output buffer of an alltoall, for the received lengths.
func (t *alltoall) allocate() (err error) {
	t.blocks.out, err = t.op.Allocate(t.blocks.counts)
	if total, got := t.blocks.cut[len(t.steps.ranks)], len(t.blocks.out); err == nil && int64(got) != total {
		err = fmt.Errorf("got an output buffer of %d bytes, want %d", got, total)
	}
	return err
}

// sendBlocks sends a block to each other rank: that rank's part of the input buffer. If headers is set, a
// header with the length of the block precedes it. sendBlocks begins with the next rank, so that not all
// ranks begin with the same peer.
func (t *alltoall) sendBlocks(headers bool) {
	n := len(t.steps.ranks)
	for k := 1; k < n; k++ {
		to := (t.steps.me + k) % n
		if !t.op.Sends(t.steps.me, to) {
			continue
		}
		c, p := t.steps.conn(to), t.input.part(t.op.Buf, to)
		if headers {
			header := t.blocks.headers[to*countBytes:][:countBytes]
			binary.LittleEndian.PutUint64(header, uint64(len(p)))
			t.steps.send(c, header)
		}
		t.steps.send(c, p)
	}
}

// receiveBlocks receives the blocks from all other ranks, and copies this rank's block for itself.
func (t *alltoall) receiveBlocks() {
	out := t.blocks.out
	copy(t.blocks.cut.part(out, t.steps.me), t.input.part(t.op.Buf, t.steps.me))
	n := len(t.steps.ranks)
	for k := 1; k < n; k++ {
		if from := (t.steps.me + n - k) % n; t.op.Sends(from, t.steps.me) {
			t.steps.receive(t.steps.conn(from), t.blocks.cut.part(out, from))
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
