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
func (b *Backend) allgatherBruck(out []byte) {
	n := len(b.ranks)
	for d := 1; d < n; d *= 2 {
		to, from := b.steps.conn((b.me+n-d)%n), b.steps.conn((b.me+d)%n)
		blocks := min(d, n-d)
		for _, p := range b.consecutive(out, b.me, blocks) {
			b.steps.send(to, p)
		}
		for _, p := range b.consecutive(out, (b.me+d)%n, blocks) {
			b.steps.receive(from, p)
		}
	}
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

// slots has the data that passes through other ranks in an alltoall: n slots of the same size. At first, slot
// j has the data for the rank j places after this one. At the end, it has the data from the rank j places
// before this one. Places are counted modulo n.
type slots struct {
	width int // the size of a slot
	// memory has the slots, and then the message that is sent and the message that is received.
	memory  []byte
	largest uint64 // the size of the largest block of all ranks that this rank knows
}

// begin makes n slots of the given width in the memory of in. Their content is undefined.
func (s *slots) begin(in *scratch, n, width int) {
	s.width, s.memory = width, in.room(n*width+2*(countBytes+n/2*width))
}

func (s *slots) slot(j int) []byte { return s.memory[j*s.width:][:s.width] }

// message returns the buffer of the messages that are sent (0) or received (1), of numBytes bytes.
func (s *slots) message(n, i, numBytes int) []byte {
	return s.memory[n*s.width+i*(countBytes+n/2*s.width):][:numBytes]
}

// bruck appends a round of an alltoall in which lengths and small blocks pass through other ranks (see
// alltoall). The lengths pass in the first round, the blocks in the second.
func (t *alltoall) bruck(round int) error {
	n, s, in := len(t.steps.ranks), &t.slots, t.op.Buf
	if round == 0 {
		s.begin(&t.in, n, countBytes)
		s.largest = 0
		for j := range n {
			k := uint64(t.op.Counts[(t.steps.me+j)%n])
			s.largest = max(s.largest, k)
			binary.LittleEndian.PutUint64(s.slot(j), k)
		}
		t.passSlots()
		return nil
	}
	for i := range n {
		k := binary.LittleEndian.Uint64(s.slot((t.steps.me + n - i) % n))
		if err := t.blocks.add(i, k, t.steps.ranks); err != nil {
			return err
		}
		if k > s.largest {
			return fmt.Errorf("got a block of %d bytes from rank %d, want at most %d, the largest of all", k,
				t.steps.ranks[i], s.largest)
		}
	}
	if err := t.allocate(); err != nil {
		return err
	}
	if s.largest > maxPassedBytes {
		t.connectForBlocks()
		t.sendBlocks(false)
		t.receiveBlocks()
		return nil
	}
	s.begin(&t.in, n, int(s.largest))
	for j := range n {
		copy(s.slot(j), t.input.part(in, (t.steps.me+j)%n))
	}
	t.passSlots()
	t.steps.compute(func(b *Backend, _ *action) { b.alltoall.takeSlots() }, action{})
	return nil
}

// takeSlots copies the blocks from the slots to the output.
func (t *alltoall) takeSlots() {
	n := len(t.steps.ranks)
	for j := range n {
		copy(t.blocks.cut.part(t.blocks.out, (t.steps.me+n-j)%n), t.slots.slot(j))
	}
}

// passSlots exchanges t.slots. At the distances 1, 2, 4 and so on, this rank sends the slots whose number has
// the distance as a binary digit to the rank at this distance after it (Bruck et al., 1997). The size of the
// largest block precedes them, so that at the end all ranks know the largest of all.
func (t *alltoall) passSlots() {
	n := len(t.steps.ranks)
	for d := 1; d < n; d *= 2 {
		to, from := t.steps.conn((t.steps.me+d)%n), t.steps.conn((t.steps.me+n-d)%n)
		size := countBytes
		for j := d; j < n; j = nextWith(j, d) {
			size += t.slots.width
		}
		out, in := t.slots.message(n, 0, size), t.slots.message(n, 1, size)
		t.steps.compute(func(b *Backend, a *action) { b.alltoall.packSlots(a) }, action{buf: out, d: d})
		t.steps.send(to, out)
		t.steps.receive(from, in)
		t.steps.compute(func(b *Backend, a *action) { b.alltoall.unpackSlots(a) }, action{in: in, d: d})
		t.steps.flush(to)
	}
}

// packSlots stores the message for the rank at distance a.d in a.buf.
func (t *alltoall) packSlots(a *action) {
	binary.LittleEndian.PutUint64(a.buf, t.slots.largest)
	at := countBytes
	for j := a.d; j < len(t.steps.ranks); j = nextWith(j, a.d) {
		at += copy(a.buf[at:], t.slots.slot(j))
	}
}

// unpackSlots takes the slots and the size out of a.in, the message from the rank at distance a.d.
func (t *alltoall) unpackSlots(a *action) {
	t.slots.largest = max(t.slots.largest, binary.LittleEndian.Uint64(a.in))
	at := countBytes
	for j := a.d; j < len(t.steps.ranks); j = nextWith(j, a.d) {
		at += copy(t.slots.slot(j), a.in[at:])
	}
}

// nextWith returns the next number after j whose binary digit d, a power of two, is set.
func nextWith(j, d int) int { return (j + 1) | d }
