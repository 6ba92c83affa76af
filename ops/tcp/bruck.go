package tcp

import (
	"encoding/binary"
	"fmt"
)

// allgatherBruck fills out with the blocks of all ranks in ceil(log2 n) steps (Bruck et al., "Efficient
// algorithms for all-to-all communications in multiport message-passing systems", 1997). At distance d, this
// rank holds the d blocks that begin with its own, counted modulo n. It sends them to the rank d places
// before it, and receives the next d blocks from the rank d places after it. In the last step there may be
// fewer than d blocks left to send. Each rank sends as many bytes as in the ring. No byte of out is written
// after it was sent.
func (b *Backend) allgatherBruck(out []byte) error {
	n := len(b.ranks)
	for d := 1; d < n; d *= 2 {
		to, err := b.conn((b.me + n - d) % n)
		if err != nil {
			return err
		}
		from, err := b.conn((b.me + d) % n)
		if err != nil {
			return err
		}
		blocks := min(d, n-d)
		for _, p := range b.consecutive(out, b.me, blocks) {
			if err := send(to, p, b.segBytes); err != nil {
				return err
			}
		}
		for _, p := range b.consecutive(out, (b.me+d)%n, blocks) {
			if err := receive(from, p); err != nil {
				return err
			}
		}
	}
	return b.flush()
}

// consecutive returns the bytes of the given number of parts of buf that begin with part first. The part
// after the last one is part 0. So the parts are in two pieces at most, and the second piece may be empty.
func (b *Backend) consecutive(buf []byte, first, parts int) [2][]byte {
	n := len(b.ranks)
	end := first + parts
	if end <= n {
		return [2][]byte{buf[b.parts[first]:b.parts[end]]}
	}
	return [2][]byte{buf[b.parts[first]:b.parts[n]], buf[:b.parts[end-n]]}
}

// maxPassedBytes is the maximum size of the blocks of an alltoall that pass through other ranks. They cross
// log2 n / 2 connections on average, but each rank sends 2 log2 n messages instead of n-1.
const maxPassedBytes = 2 << 10

// alltoallBruck runs an alltoall in which lengths and small blocks pass through other ranks (see alltoall).
func (b *Backend) alltoallBruck(in []byte) error {
	n := len(b.ranks)
	largest, err := b.passCounts()
	if err != nil {
		return err
	}
	out, err := b.allocate()
	if err != nil {
		return err
	}
	if largest > maxPassedBytes {
		if err := b.connectForBlocks(); err != nil {
			return err
		}
		if err := b.sendBlocks(in, false); err != nil {
			return err
		}
		return b.receiveBlocks(in, out)
	}
	width := int(largest)
	work := b.in.room(passRoom(n, width))
	for j := range n {
		copy(work[j*width:][:width], b.parts.part(in, (b.me+j)%n))
	}
	if _, err := b.passSlots(work, width, largest); err != nil {
		return err
	}
	for j := range n {
		copy(b.blocks.cut.part(out, (b.me+n-j)%n), work[j*width:][:width])
	}
	return nil
}

// passCounts tells all ranks the lengths of their blocks, and stores those of this rank in b.blocks. It
// returns the length of the largest block of all ranks.
func (b *Backend) passCounts() (largest uint64, err error) {
	n := len(b.ranks)
	work := b.in.room(passRoom(n, countBytes))
	for j := range n {
		k := uint64(b.op.Counts[(b.me+j)%n])
		largest = max(largest, k)
		binary.LittleEndian.PutUint64(work[j*countBytes:], k)
	}
	if largest, err = b.passSlots(work, countBytes, largest); err != nil {
		return 0, err
	}
	for i := range n {
		k := binary.LittleEndian.Uint64(work[(b.me+n-i)%n*countBytes:])
		if err := b.blocks.add(i, k, b.ranks); err != nil {
			return 0, err
		}
		if k > largest {
			return 0, fmt.Errorf("got a block of %d bytes from rank %d, want at most %d, the largest of all", k,
				b.ranks[i], largest)
		}
	}
	return largest, nil
}

// passRoom returns the size of the buffer work of passSlots.
func passRoom(n, width int) int { return n*width + 2*(countBytes+n/2*width) }

// passSlots exchanges n slots of width bytes, which are at the beginning of work. Before, slot j has the data
// for the rank j places after this one. Afterwards, it has the data from the rank j places before this one.
// Places are counted modulo n. At the distances 1, 2, 4 and so on, this rank sends the slots whose number has
// the distance as a binary digit to the rank at this distance after it (Bruck et al., 1997). The ranks also
// combine their values of most: passSlots returns the largest.
func (b *Backend) passSlots(work []byte, width int, most uint64) (uint64, error) {
	n := len(b.ranks)
	slots, messages := work[:n*width], work[n*width:]
	out, in := messages[:len(messages)/2], messages[len(messages)/2:]
	for d := 1; d < n; d *= 2 {
		to, err := b.conn((b.me + d) % n)
		if err != nil {
			return 0, err
		}
		from, err := b.conn((b.me + n - d) % n)
		if err != nil {
			return 0, err
		}
		binary.LittleEndian.PutUint64(out, most)
		end := countBytes
		for j := d; j < n; j = nextWith(j, d) {
			end += copy(out[end:], slots[j*width:][:width])
		}
		if err := send(to, out[:end], b.segBytes); err != nil {
			return 0, err
		}
		if err := receive(from, in[:end]); err != nil {
			return 0, err
		}
		most = max(most, binary.LittleEndian.Uint64(in))
		at := countBytes
		for j := d; j < n; j = nextWith(j, d) {
			at += copy(slots[j*width:][:width], in[at:])
		}
		if err := to.Flush(); err != nil {
			return 0, err
		}
	}
	return most, nil
}

// nextWith returns the next number after j whose binary digit d, a power of two, is set.
func nextWith(j, d int) int { return (j + 1) | d }
