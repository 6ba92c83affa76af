package shm

import "github.com/gohvd/gohvd/ops"

// A small operation takes one step: each rank publishes its whole contribution, and every rank reduces all of
// them. The number of the operation is beside the contribution, so that a few bytes cost one cache line.

// isSmall reports whether an operation of total bytes is run as a small operation.
func (b *Backend) isSmall(total int64) bool {
	return total*int64(len(b.ranks)-1) <= b.smallBytes
}

// startSmall publishes this rank's contribution to the others.
func (b *Backend) startSmall(total int64) {
	b.smallTotal = total
	b.smallCount++
	mine := slotOf(b.segment, b.smallSlot())
	b.advance(total)
	gather(b.smallBuffer(b.segment, total), b.own.tensors)
	b.post(word(mine, 0), b.smallCount)
}

// smallSlot returns which slot the running small operation uses. A rank begins the operation after the next
// only when all ranks have begun the next one, and so have finished this one.
func (b *Backend) smallSlot() int { return int(b.smallCount & 1) }

// awaitSmall waits for the contributions of the others.
func (b *Backend) awaitSmall() error {
	for i := range b.peers {
		if i == b.me {
			continue
		}
		if err := b.await(i, word(slotOf(b.peers[i].segment, b.smallSlot()), 0), b.smallCount); err != nil {
			return err
		}
	}
	return nil
}

// smallArrived reports whether the contributions of the others have arrived.
func (b *Backend) smallArrived() bool {
	for i := range b.peers {
		if i != b.me && !reached(word(slotOf(b.peers[i].segment, b.smallSlot()), 0), b.smallCount) {
			return false
		}
	}
	return true
}

// finishSmall reduces the contributions, which have arrived.
func (b *Backend) finishSmall() {
	total := b.smallTotal
	for i := range b.peers {
		b.sources[i] = b.smallBuffer(b.peers[i].segment, total)
	}
	if len(b.own.tensors) == 1 {
		// Reading it from the segment would be slower, because other processors hold its cache lines.
		b.sources[b.me] = b.own.tensors[0].In
	}
	out := b.own.tensors[0].Out
	if len(b.own.tensors) > 1 {
		out = b.scratch[:total]
	}
	b.reducer.reduce(out, b.sources)
	if len(b.own.tensors) > 1 {
		for _, t := range b.own.tensors {
			out = out[copy(t.Out, out):]
		}
	}
}

// flagBytes is the size of the number before the contribution in a slot.
const flagBytes = 8

func slotOf(segment []byte, turn int) []byte {
	return segment[slotsAt+turn*slotBytes:][:slotBytes]
}

// smallBuffer returns the contribution of total bytes to the running small operation in a segment.
func (b *Backend) smallBuffer(segment []byte, total int64) []byte {
	if total <= slotBytes-flagBytes {
		return slotOf(segment, b.smallSlot())[flagBytes:][:total]
	}
	return segment[ringAt+b.ringPos:][:total]
}

// advance reserves total bytes in the ring. The position is the same at all ranks.
func (b *Backend) advance(total int64) {
	if total <= slotBytes-flagBytes {
		return
	}
	b.ringPos = b.ringEnd
	if b.ringPos+total > ringBytes {
		b.ringPos = 0
	}
	b.ringEnd = b.ringPos + (total+lineBytes-1)/lineBytes*lineBytes
}

// gather concatenates the tensors.
func gather(dst []byte, tensors []ops.Tensor) {
	for _, t := range tensors {
		dst = dst[copy(dst, t.In):]
	}
}
