package tcp

// exchangeBytes is the size of a segment in allreduceExchange. All ranks must use the same size, so it does
// not depend on Config.SegmentBytes. It is a multiple of the size of every element type.
const exchangeBytes = 256 << 10

// exchangeRound appends round s of an allreduce of b.list over two or more ranks in one step: every rank
// sends its whole contribution to every other rank, and each rank reduces all contributions in the order of
// the ranks. So the result has the same bits as with Direct, and half-precision values are rounded once too.
//
// A round handles a segment. A rank overwrites a segment, and queues the next one, when its values have left.
// This cannot deadlock. Of the ranks that wait, consider those that work on the earliest segment. If one of
// them waits for a contribution, that contribution is queued at its sender. If all of them wait until their
// own values have left, the receivers work on the same segment or on a later one, so they have received these
// values.
func (b *Backend) exchangeRound(s int) error {
	r := byteRange{s * exchangeBytes, min((s+1)*exchangeBytes, b.list.numBytes())}
	b.load(r)
	n := len(b.ranks)
	for k := 1; k < n; k++ {
		b.sendRange(b.steps.conn((b.me+k)%n), r) // every rank begins with another peer
	}
	in := b.gather(r)
	for i, c := range b.steps.conns {
		if i != b.me {
			b.steps.flush(c)
		}
	}
	b.combine(r, in)
	return nil
}
