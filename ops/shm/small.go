package shm

// A small operation has one step: each rank publishes its whole contribution, and every rank reduces the
// contributions of all ranks. The number of the operation is stored beside the contribution, so that a
// contribution of a few bytes takes one cache line.

// isSmall reports whether a reduction runs as a small operation. The parameter total is the size of its
// buffer in bytes.
func (b *Backend) isSmall(total int64) bool {
	return total*int64(len(b.ranks)-1) <= b.smallBytes
}

// startSmall publishes this rank's contribution to the other ranks. The parameter total is the size of the
// contribution in bytes.
func (b *Backend) startSmall(total int64) {
	b.smallTotal = total
	b.smallCount++
	mine := slotOf(b.segment, b.smallSlot())
	b.advance(total)
	b.gather(b.smallBuffer(b.segment, total))
	b.post(word(mine, 0), b.smallCount)
}

// smallSlot returns the index of the slot that the running small operation uses. Small operations k and k+2
// use the same slot. This is safe: a rank begins operation k+2 only when all ranks have begun operation k+1,
// and so have finished operation k.
func (b *Backend) smallSlot() int { return int(b.smallCount & 1) }

// awaitSmall waits for the contributions of all other ranks.
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

// smallArrived reports whether the contributions of all other ranks have arrived.
func (b *Backend) smallArrived() bool {
	for i := range b.peers {
		if i != b.me && !reached(word(slotOf(b.peers[i].segment, b.smallSlot()), 0), b.smallCount) {
			return false
		}
	}
	return true
}

// finishSmall reduces the contributions, unless this rank gets no result. All contributions must have
// arrived.
func (b *Backend) finishSmall() {
	total := b.smallTotal
	if b.discards {
		return
	}
	for i := range b.peers {
		b.sources[i] = b.smallBuffer(b.peers[i].segment, total)
	}
	if len(b.own.tensors) == 1 {
		// This rank reads its own contribution from its input. Reading it from the segment is slower, because
		// other processors hold those cache lines.
		b.sources[b.me] = b.own.tensors[0].In
	}
	out := b.own.tensors[0].Out
	if len(b.own.tensors) > 1 {
		if b.scratch == nil {
			b.scratch = make([]byte, smallBytes)
		}
		out = b.scratch[:total]
	}
	b.reducer.Reduce(out, b.sources)
	if len(b.own.tensors) > 1 {
		for _, t := range b.own.tensors {
			out = out[copy(t.Out, out):]
		}
	}
}

// flagBytes is the size of the operation's number, which precedes the contribution in a slot.
const flagBytes = 8

func slotOf(segment []byte, turn int) []byte {
	return segment[slotsAt+turn*slotBytes:][:slotBytes]
}

// smallBuffer returns the part of a segment in which its owner stores its contribution to the running small
// operation. The parameter total is the size of the contribution in bytes.
func (b *Backend) smallBuffer(segment []byte, total int64) []byte {
	if total <= slotBytes-flagBytes {
		return slotOf(segment, b.smallSlot())[flagBytes:][:total]
	}
	return segment[ringAt+b.ringPos:][:total]
}

// advance reserves room in the ring for one contribution. The parameter total is the size of the contribution
// in bytes. All ranks call advance with the same sizes, so they all reserve the same part of the ring.
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

// gather concatenates the inputs of this rank's tensors in dst, which peers read.
func (b *Backend) gather(dst []byte) {
	for _, t := range b.own.tensors {
		b.stager.copy(dst[:len(t.In)], t.In)
		dst = dst[len(t.In):]
	}
}
