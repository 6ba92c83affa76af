package tcp

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
