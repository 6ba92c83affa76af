package shm

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/gohvd/gohvd/ops"
)

// checkAlltoall checks the operation, and cuts its buffer.
func (b *Backend) checkAlltoall() error {
	if err := b.cut(b.op.Counts); err != nil {
		return err
	}
	n := len(b.op.Counts)
	if n > maxMembers {
		return fmt.Errorf("got %d ranks, want at most %d", n, maxMembers)
	}
	if total := b.plan.ends[n-1]; total != int64(len(b.op.Buf)) {
		return fmt.Errorf("got blocks of %d bytes in all, want %d", total, len(b.op.Buf))
	}
	return nil
}

// alltoall is an exchange whose blocks every rank has for every other, of sizes that only their owners know at first. In
// step t a rank stages the t-th part of each block that is for another.
func (b *Backend) alltoall(in []byte, counts []int64, allocate func(counts []int64) ([]byte, error)) error {
	if len(b.ranks) == 1 {
		out, err := allocateOutput(allocate, counts, int64(len(in)))
		if err == nil {
			copy(out, in)
		}
		return err
	}
	column := b.column(len(b.ranks))
	if _, err := b.own.set([]ops.Tensor{{In: in, Out: in}}); err != nil {
		return err
	}
	l := &b.layouts[b.me]
	l.describe(b.own.tensors, b.find)
	table := b.table()
	l.write(table)
	for i, c := range counts {
		b.counts[b.me][i] = c
		binary.LittleEndian.PutUint64(countsOf(table)[8*i:], uint64(c))
	}
	base := b.rounds
	b.stageBlocks(in, 0, column)
	b.post(b.progress, base+1)
	if err := b.awaitAll(base + 1); err != nil {
		return err
	}
	steps, err := b.readCounts(column)
	if err != nil {
		return err
	}
	total, err := b.receive()
	if err != nil {
		return err
	}
	out, err := allocateOutput(allocate, b.received, total)
	if err != nil {
		return err
	}
	b.copyOwn(in, out)
	for t := range steps {
		if t > 0 {
			if err := b.awaitAll(base + uint64(t) + 1); err != nil {
				return err
			}
		}
		if t+1 < steps {
			b.stageBlocks(in, t+1, column)
			b.post(b.progress, base+uint64(t)+2)
		}
		b.pullBlocks(out, t, column)
	}
	if !b.leave(base+uint64(max(steps, 1)), steps) {
		return nil
	}
	_, err = b.letGo(true)
	return err
}

// countsOf is where in a table the bytes for each member are.
func countsOf(table []byte) []byte { return table[tableHeader+extentBytes:] }

// maxMembers is how many members there may be for their counts to fit in a table.
const maxMembers = (tableBytes - tableHeader - extentBytes) / 8

// readCounts learns what every rank gives to every other, and returns the number of steps.
func (b *Backend) readCounts(column int64) (steps int, err error) {
	for i := range b.peers {
		if i != b.me {
			table := tableOf(b.peers[i].segment, b.turn)
			var total int64
			for k := range b.counts[i] {
				c := int64(binary.LittleEndian.Uint64(countsOf(table)[8*k:]))
				if c < 0 || c > math.MaxInt64-total {
					return 0, b.blame(i, fmt.Errorf("a block of %d bytes", c))
				}
				total += c
				b.counts[i][k] = c
			}
			b.asked = i
			if err := b.layouts[i].read(table, total, 1, b.chunk); err != nil {
				return 0, b.blame(i, err)
			}
			if n := len(b.layouts[i].extents); n > 1 { // the first would be taken for all of the buffer
				return 0, b.blame(i, fmt.Errorf("a table of %d extents, want 1 for an alltoall", n))
			}
		}
		for k, c := range b.counts[i] {
			if k != i && c > 0 {
				steps = max(steps, int((c-1)/column)+1)
			}
		}
	}
	return steps, nil
}

// receive learns from the counts what this rank gets from each, and returns the sum.
func (b *Backend) receive() (total int64, err error) {
	b.received = b.received[:0]
	total = b.counts[b.me][b.me] // first: it is not to blame
	for i := range b.counts {
		c := b.counts[i][b.me]
		b.received = append(b.received, c)
		if i == b.me {
			continue
		}
		if rest := math.MaxInt64 - total; c > rest {
			return 0, b.blame(i, fmt.Errorf("a block of %d bytes for this rank, want at most %d", c, rest))
		}
		total += c
	}
	return total, nil
}

// allocateOutput asks the caller for the output, of total bytes.
func allocateOutput(allocate func(counts []int64) ([]byte, error), counts []int64, total int64) ([]byte, error) {
	out, err := allocate(counts)
	if err == nil && int64(len(out)) != total {
		err = fmt.Errorf("got %d bytes for the output, want %d", len(out), total)
	}
	return out, err
}

// blockOf is where the block of member i for member k begins in i's buffer.
func (b *Backend) blockOf(i, k int) (begin int64) {
	for _, c := range b.counts[i][:k] {
		begin += c
	}
	return begin
}

// stageBlocks stages step t for all others, unless they can read it where it lies.
func (b *Backend) stageBlocks(in []byte, t int, column int64) {
	l := &b.layouts[b.me]
	if len(l.extents) == 0 || !l.extents[0].in.staged() {
		return
	}
	stage := stagingAt + int64((b.stage+t)%stages)*b.stageBytes
	var begin int64
	for k, c := range b.counts[b.me] {
		if from := int64(t) * column; k != b.me && from < c {
			copy(b.segment[stage+int64(k)*column:], in[begin+from:begin+min(from+column, c)])
		}
		begin += c
	}
}

// pullBlocks copies step t of what the others have for this rank.
func (b *Backend) pullBlocks(out []byte, t int, column int64) {
	n := len(b.ranks)
	for k := 1; k < n; k++ {
		i := (b.me + k) % n
		c := b.counts[i][b.me]
		from := int64(t) * column
		if from >= c {
			continue
		}
		size := min(column, c-from)
		src := b.peers[i].segment[stagingAt+int64((b.stage+t)%stages)*b.stageBytes+int64(b.me)*column:]
		if e := &b.layouts[i].extents[0]; !e.in.staged() {
			src = e.in.mem[e.in.offset+b.blockOf(i, b.me)+from:]
		}
		copy(out[b.landing(i)+from:][:size], src)
	}
}

// landing is where the block of member i begins in this rank's result.
func (b *Backend) landing(i int) (begin int64) {
	for _, c := range b.received[:i] {
		begin += c
	}
	return begin
}

func (b *Backend) copyOwn(in, out []byte) {
	c := b.counts[b.me][b.me]
	copy(out[b.landing(b.me):][:c], in[b.blockOf(b.me, b.me):])
}
