package shm

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/ops"
)

// blocks has, for each member, the block for this rank in an alltoall: its size, and its offset in the buffer
// of the member.
type blocks struct{ received, offsets []int64 }

// startAlltoall starts an exchange in which every rank has a block for every other rank. At first only the
// sender of a block knows the size of the block. In step t, a rank stages part t of each of its blocks.
func (b *Backend) startAlltoall() error {
	in, counts := b.op.Buf, b.op.Counts
	if err := b.op.CheckRoot(len(b.ranks)); err != nil {
		return err
	}
	if err := b.plan.cut(counts); err != nil {
		return err
	}
	n := len(counts)
	if n > maxMembers {
		return fmt.Errorf("got %d ranks, want at most %d", n, maxMembers)
	}
	if total := b.plan.ends[n-1]; total != int64(len(in)) {
		return fmt.Errorf("got blocks of %d bytes in total, want %d, the size of the input", total, len(in))
	}
	if b.blocks.received == nil {
		b.blocks = blocks{make([]int64, n), make([]int64, n)}
	}
	b.blocks.received[b.me], b.blocks.offsets[b.me] = counts[b.me], b.plan.ends[b.me]-counts[b.me]
	if n == 1 {
		b.state = done
		return b.allocate()
	}
	if _, err := b.own.set([]ops.Tensor{{In: in, Out: in}}); err != nil {
		return err
	}
	l := &b.layouts[b.me]
	l.describe(b.own.tensors, b.find)
	table := b.table()
	l.write(table)
	for i, c := range counts {
		binary.LittleEndian.PutUint64(countsOf(table)[8*i:], uint64(c))
	}
	if b.plan.columns(); b.op.Kind == message.Gather {
		b.plan.pullOnly() // each rank has a block for one rank only, so that block gets the whole stage
	}
	b.running = running{base: b.rounds}
	b.stageBlocks(0)
	b.post(b.progress, b.rounds+1)
	b.state = alltoall
	return nil
}

// alltoallStep runs the next step. If other ranks are not ready for the step, alltoallStep waits for them if
// the parameter wait is set, and returns Waiting if it is not.
func (b *Backend) alltoallStep(wait bool) (ops.Progress, error) {
	x := &b.running
	if x.awaitsReaders {
		if ok, err := b.awaitReaders(wait); !ok || err != nil {
			return ops.Waiting, err
		}
		return ops.Finished, nil
	}
	t := x.next
	if ok, err := b.arrived(x.base+uint64(t)+1, wait); !ok {
		return ops.Waiting, err
	}
	if t == 0 {
		if err := b.readCounts(); err != nil {
			if !wait && errors.Is(err, context.Canceled) {
				// A step that does not wait uses endedContext, so the error context.Canceled only means that
				// mapping a chunk would have to wait: a peer has a tensor in a new arena chunk, and the
				// descriptor of the chunk has not arrived yet.
				return ops.Waiting, nil
			}
			return ops.Waiting, err
		}
		if err := b.allocate(); err != nil {
			return ops.Waiting, err
		}
	}
	if t+1 < x.steps {
		b.stageBlocks(t + 1)
		b.post(b.progress, x.base+uint64(t)+2)
	}
	b.pullBlocks(t)
	if x.next++; x.next < x.steps {
		return ops.Moving, nil
	}
	x.awaitsReaders = b.finishRounds(x.base+uint64(max(x.steps, 1)), x.steps)
	if x.awaitsReaders {
		return ops.Moving, nil
	}
	return ops.Finished, nil
}

// countsOf returns the part of a table that has the counts of an alltoall: the number of bytes for each
// member of the set.
func countsOf(table []byte) []byte { return table[tableHeader+extentBytes:] }

// maxMembers is the largest number of members whose counts fit in a table.
const maxMembers = (tableBytes - tableHeader - extentBytes) / 8

// readCounts reads from the peers' tables how many bytes every rank sends to every other rank, keeps those
// for this rank, and computes the number of steps.
func (b *Backend) readCounts() error {
	var largest int64 // the size of the largest block of all that a rank has for another one
	for i := range b.peers {
		if i == b.me {
			for k, c := range b.op.Counts {
				if k != i {
					largest = max(largest, c)
				}
			}
			continue
		}
		table := tableOf(b.peers[i].segment, b.turn)
		var total int64
		for k := range b.peers {
			c := int64(binary.LittleEndian.Uint64(countsOf(table)[8*k:]))
			if c < 0 || c > math.MaxInt64-total {
				return b.peerError(i,
					fmt.Errorf("got a block of %d bytes, want at least 0, and at most %d bytes in all blocks", c,
						int64(math.MaxInt64)))
			}
			if k == b.me {
				b.blocks.received[i], b.blocks.offsets[i] = c, total
			}
			if k != i {
				largest = max(largest, c)
			}
			total += c
		}
		b.chunkOwner = i
		if err := b.layouts[i].read(table, total, 1, b.chunk); err != nil {
			return b.peerError(i, err)
		}
		// pullBlocks reads only the first extent, so this extent must cover the whole buffer.
		if n := len(b.layouts[i].extents); n > 1 {
			return b.peerError(i, fmt.Errorf("the peer violated the protocol: it described its alltoall input as %d memory ranges, want 1", n))
		}
	}
	b.running.steps = 0
	if largest > 0 {
		b.running.steps = int((largest-1)/b.plan.column) + 1
	}
	return nil
}

// allocate computes how many bytes this rank gets from each rank, and calls Allocate for the output buffer.
// Then it copies this rank's block for itself to the output buffer.
func (b *Backend) allocate() error {
	// This rank's own block is counted first, so that an overflow is always caused by a peer.
	total := b.blocks.received[b.me]
	for i, c := range b.blocks.received {
		if i == b.me {
			continue
		}
		if rest := math.MaxInt64 - total; c > rest {
			return b.peerError(i, fmt.Errorf("got a block of %d bytes for this rank, want at most %d bytes, so that the output has less than 2^63",
				c, rest))
		}
		total += c
	}
	out, err := b.op.Allocate(b.blocks.received)
	if err == nil && int64(len(out)) != total {
		err = fmt.Errorf("got an output buffer of %d bytes, want %d", len(out), total)
	}
	if err != nil {
		return err
	}
	b.running.out = out
	copy(out[b.blocks.outputOffset(b.me):][:b.blocks.received[b.me]], b.op.Buf[b.blocks.offsets[b.me]:])
	return nil
}

// stageBlocks copies the blocks for other ranks to the staging area. It copies only the part of each block
// that step t handles. It does nothing if the other ranks can read the blocks in place.
func (b *Backend) stageBlocks(t int) {
	in, column := b.op.Buf, b.plan.column
	l := &b.layouts[b.me]
	if len(l.extents) == 0 || !l.extents[0].in.staged() {
		return
	}
	stage := stagingAt + int64((b.stage+t)%stages)*b.plan.stageBytes
	var begin int64
	for k, c := range b.op.Counts {
		if from := int64(t) * column; k != b.me && from < c {
			part := in[begin+from : begin+min(from+column, c)]
			b.stager.copy(b.segment[stage+int64(k)*b.plan.stride:][:len(part)], part)
		}
		begin += c
	}
}

// pullBlocks copies to the output the blocks that the other ranks send to this rank. It copies only the part
// of each block that step t handles.
func (b *Backend) pullBlocks(t int) {
	out, column := b.running.out, b.plan.column
	n := len(b.ranks)
	for k := 1; k < n; k++ {
		i := (b.me + k) % n
		c := b.blocks.received[i]
		from := int64(t) * column
		if from >= c {
			continue
		}
		size := min(column, c-from)
		at := stagingAt + int64((b.stage+t)%stages)*b.plan.stageBytes + int64(b.me)*b.plan.stride
		src := b.peers[i].segment[at:]
		if e := &b.layouts[i].extents[0]; !e.in.staged() {
			src = e.in.mem[e.in.offset+b.blocks.offsets[i]+from:]
		}
		copy(out[b.blocks.outputOffset(i)+from:][:size], src)
	}
}

// outputOffset returns the offset in this rank's output at which the block from member i begins.
func (s *blocks) outputOffset(i int) (begin int64) {
	for _, c := range s.received[:i] {
		begin += c
	}
	return begin
}
