package tcp

import "github.com/gohvd/gohvd/internal/message"

// beginAllgather begins an allgather. For n ranks, Ring takes n-1 steps with channels to 2 other ranks, and
// Bruck takes ceil(log2 n) steps with channels to twice as many ranks. In both a rank receives every block
// except its own once.
func (b *Backend) beginAllgather() error {
	if err := b.by(algorithms[message.Allgather]...); err != nil {
		return err
	}
	if err := b.parts.by(b.op.Counts, len(b.op.Buf), 1); err != nil {
		return err
	}
	switch {
	case len(b.op.Buf) == 0:
	case b.op.Algorithm == message.Bruck:
		b.allgatherBruck(b.op.Buf)
	default:
		b.steps.repeat(len(b.ranks)-1, (*Backend).allgatherRing)
	}
	return nil
}

// allgatherRing appends round s of an allgather, from 0 to n-2. Rank i receives part i-s-1 (modulo n). It
// sends the part on unless the round is the last. No byte of the buffer is written after it was sent.
func (b *Backend) allgatherRing(s int) error {
	right, left := b.steps.neighbours()
	if s == 0 {
		b.steps.send(right, b.parts.part(b.op.Buf, b.me))
	}
	for rest := b.before(b.op.Buf, s+1); len(rest) > 0; {
		var p []byte
		p, rest = split(rest, b.steps.segBytes)
		b.steps.receive(left, p)
		if s < b.steps.rounds-1 {
			b.steps.send(right, p)
		}
	}
	return nil
}
