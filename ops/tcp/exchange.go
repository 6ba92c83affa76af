package tcp

// exchangeBytes is the size of a segment in allreduceExchange. All ranks must use the same size, so it does
// not depend on Config.SegmentBytes. It is a multiple of the size of every element type.
const exchangeBytes = 256 << 10

// allreduceExchange reduces b.list over two or more ranks in one step: every rank sends its whole
// contribution to every other rank, and each rank reduces all contributions in the order of the ranks. So the
// result has the same bits as with Direct, and half-precision values are rounded once too.
//
// The ranks work segment by segment. A rank overwrites a segment, and queues the next one, when its values
// have left. This cannot deadlock. Of the ranks that wait, consider those that work on the earliest segment.
// If one of them waits for a contribution, that contribution is queued at its sender. If all of them wait
// until their own values have left, the receivers work on the same segment or on a later one, so they have
// received these values.
func (b *Backend) allreduceExchange() error {
	if err := b.connectAll(); err != nil {
		return err
	}
	n := len(b.ranks)
	for rest := (byteRange{0, b.list.numBytes()}); rest.numBytes() > 0; {
		r := byteRange{rest.from, min(rest.from+exchangeBytes, rest.to)}
		rest.from = r.to
		b.list.load(r)
		for k := 1; k < n; k++ {
			if err := b.sendRange(b.conns[(b.me+k)%n], r); err != nil { // every rank begins with another peer
				return err
			}
		}
		if err := b.gather(r); err != nil {
			return err
		}
		if err := b.flush(); err != nil {
			return err
		}
		b.combine(r)
	}
	return nil
}
