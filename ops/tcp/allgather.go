package tcp

import (
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/ops"
)

// allgather runs an allgather. For n ranks, Ring takes n-1 steps with channels to 2 other ranks, and Bruck
// takes ceil(log2 n) steps with channels to twice as many ranks. In both a rank receives every block except
// its own once.
func (b *Backend) allgather() error {
	if err := b.by(algorithms[message.Allgather]...); err != nil {
		return err
	}
	if err := b.parts.by(b.op.Counts, len(b.op.Buf), 1); err != nil {
		return err
	}
	if len(b.ranks) == 1 || len(b.op.Buf) == 0 {
		return nil
	}
	if b.op.Algorithm == message.Bruck {
		return b.allgatherBruck(b.op.Buf)
	}
	return b.allgatherRing(b.op.Buf)
}

// turnBytes is the number of bytes that a rank receives in an allgather by Ring before it returns from a step
// that may not wait, even if more data has arrived. So the caller soon serves other operations.
const turnBytes = 4 << 20

// allgatherRing collects the blocks of all ranks in the buffer out. i is this rank's index in the set. In
// step s, from 0 to n-2, the rank receives part i-s-1 (modulo n). It sends the part on unless the step is the
// last. No byte of the buffer is written after it was sent.
func (b *Backend) allgatherRing(out []byte) error {
	right, left, err := b.neighbours()
	if err != nil {
		return err
	}
	n := len(b.ranks)
	if err := send(right, b.parts.part(out, b.me), b.segBytes); err != nil {
		return err
	}
	received := 0 // in this step of the caller
	for s := range n - 1 {
		for rest := b.before(out, s+1); len(rest) > 0; {
			var p []byte
			p, rest = split(rest, b.segBytes)
			if err := receive(left, p); err != nil {
				return err
			}
			if s < n-2 {
				if err := right.Send(p); err != nil {
					return err
				}
			}
			if received += len(p); received >= turnBytes {
				received = 0
				if err := b.await(ops.Moving); err != nil {
					return err
				}
			}
		}
	}
	return right.Flush()
}
