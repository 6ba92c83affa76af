package tcp

// The algorithms in this file reduce b.list. Every rank sends its contributions to the ranks that reduce
// them, and those combine them in the order of the ranks.

// These numbers, and the ranks of the set, say which other ranks get the result of a part.
const (
	nobody   = -1
	everyone = -2
)

// beginDirect reduces b.list over two or more ranks. b.parts cuts the list into parts. Each rank reduces its
// own part, and sends the result to the ranks that the parameter share names.
//
// A part is cut into segments. In round s a rank sends segment s of each other part to the rank that reduces
// the part. Then it receives the results of the segments before, and reduces segment s of its own part. So
// the streams carry the contributions to one segment while the segment before is reduced, and a rank touches
// only the memory of two rounds, which stays in the cache. All ranks must use segments of the same size,
// because the segments decide the order of the data in the streams.
//
// This cannot deadlock, although each rank reads from the other ranks in its own order. Sending does not
// wait. Order the work of all ranks by rounds, and in a round first by sending, then by receiving results,
// then by reducing. The ranks that are behind all others wait only for data that was sent by earlier work.
func (b *Backend) beginDirect(share int) {
	b.steps.connectAll()
	b.makeSent()
	b.share = share
	seg := b.steps.segment(b.op.DType.Size())
	b.steps.repeat((b.parts.longest()+seg-1)/seg+1, (*Backend).directRound)
}

// makeSent makes b.sent if no operation has used it before.
func (b *Backend) makeSent() {
	if n := len(b.ranks); b.sent[0] == nil {
		b.sent = [2][]uint64{make([]uint64, n), make([]uint64, n)}
	}
}

func (b *Backend) directRound(s int) error {
	n, seg := len(b.ranks), b.steps.segment(b.op.DType.Size())
	sent := b.sent[s%2]
	for k := 1; k < n; k++ {
		to := (b.me + k) % n // every rank begins with another peer
		c, r := b.steps.conn(to), b.parts.segment(to, s, seg)
		b.load(r)
		b.sendRange(c, r)
		sent[to] = c.end
	}
	if s > 0 && (b.share == everyone || b.share == b.me) {
		b.receiveResults(s-1, seg)
	}
	b.reduceRange(b.parts.segment(b.me, s, seg), b.share)
	return nil
}

// receiveResults receives the results of segment s of the other ranks' parts.
func (b *Backend) receiveResults(s, seg int) {
	n := len(b.ranks)
	for k := 1; k < n; k++ {
		from := (b.me + n - k) % n
		// This rank has sent its contribution to the rank from which it now receives the result.
		c := b.steps.conn(from)
		b.replaceRange(c, c, b.parts.segment(from, s, seg), b.sent[s%2][from])
	}
}

// reduceAtRoot reduces b.list over two or more ranks in one step: all other ranks send their contributions to
// the root, which reduces them.
func (b *Backend) reduceAtRoot() {
	all := byteRange{0, b.list.numBytes()}
	if b.me != b.op.Root {
		b.sendRange(b.steps.conn(b.op.Root), all)
		return
	}
	b.steps.connectAll()
	b.reduceRange(all, nobody)
}

// The contributions that a rank reduces at a time have at most gatheredBytes bytes together, so that they
// stay in the cache. But each contribution has at least minGatheredBytes bytes.
const (
	gatheredBytes    = 512 << 10
	minGatheredBytes = 16 << 10
)

// reduceRange receives the contributions of the other ranks to r and reduces them. It sends the result to the
// ranks that the parameter share names.
func (b *Backend) reduceRange(r byteRange, share int) {
	n := len(b.ranks)
	most := max(gatheredBytes/(n-1)&^7, minGatheredBytes)
	for r.numBytes() > 0 {
		p := byteRange{r.from, min(r.from+most, r.to)}
		r.from = p.to
		b.load(p)
		b.combine(p, b.gather(p))
		for k := 1; k < n; k++ {
			if to := (b.me + k) % n; share == everyone || share == to {
				b.sendRange(b.steps.conn(to), p)
			}
		}
	}
}

// gather receives the contributions of the other ranks to r, and returns the buffer that they fill.
func (b *Backend) gather(r byteRange) []byte {
	size := r.numBytes()
	in := b.in.room(size * (len(b.ranks) - 1))
	rest := in
	for i := range b.ranks {
		if i != b.me {
			b.steps.receive(b.steps.conn(i), rest[:size])
			rest = rest[size:]
		}
	}
	return in
}

// combine reduces the contributions to r, of which gather has filled the buffer in, and scales the result.
func (b *Backend) combine(r byteRange, in []byte) {
	if b.sources == nil {
		b.sources = make([][]byte, len(b.ranks))
	}
	b.steps.compute((*Backend).combineGathered, action{r: r, in: in})
}

// combineGathered reduces the contributions a.in of the other ranks and range a.r of b.list.
func (b *Backend) combineGathered(a *action) {
	r, in := a.r, a.in
	for i := range b.sources {
		if i != b.me {
			b.sources[i], in = in[:r.numBytes()], in[r.numBytes():]
		}
	}
	for r.numBytes() > 0 {
		p := b.list.piece(r).Out
		b.sources[b.me] = p
		b.reducer.Reduce(p, b.sources)
		for i := range b.sources {
			b.sources[i] = b.sources[i][len(p):]
		}
		r.from += len(p)
	}
}
