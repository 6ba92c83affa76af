package shm

import (
	"github.com/gohvd/gohvd/ops"
)

// reduceSmall reduces a few bytes in one step: each rank gives all to all others, and everybody reduces everything. The
// number of the operation stands beside the contribution, so that few bytes cost one cache line.
func (b *Backend) reduceSmall(total int64) error {
	b.smalls++
	turn := int(b.smalls & 1)
	mine := slotOf(b.segment, turn)
	gather(mine[flagBytes:], b.own.tensors)
	b.post(word(mine, 0), b.smalls)
	for i := range b.peers {
		slot := slotOf(b.peers[i].segment, turn)
		if i != b.me {
			if err := b.await(i, word(slot, 0), b.smalls); err != nil {
				return err
			}
		}
		b.sources[i] = slot[flagBytes:][:total]
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
	return nil
}

// flagBytes stand before the contribution in a slot.
const flagBytes = 8

func slotOf(segment []byte, turn int) []byte {
	return segment[slotsAt+turn*slotBytes:][:slotBytes]
}

// gather puts the tensors one behind the other.
func gather(dst []byte, tensors []ops.Tensor) {
	for _, t := range tensors {
		dst = dst[copy(dst, t.In):]
	}
}
