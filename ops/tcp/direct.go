package tcp

import "github.com/gohvd/gohvd/ops"

// The algorithms in this file reduce b.list. Every rank sends its contributions to the ranks that reduce
// them, and those combine them in the order of the ranks.

// These numbers, and the ranks of the set, say which other ranks get the result of a part.
const (
	nobody   = -1
	everyone = -2
)

// direct reduces b.list over two or more ranks. b.parts cuts the list into parts. Each rank reduces its own
// part, and sends the result to the ranks that the parameter share names. An element has size bytes.
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
func (b *Backend) direct(size, share int) error {
	if err := b.connectAll(); err != nil {
		return err
	}
	n, seg := len(b.ranks), b.segment(size)
	rounds := (b.parts.longest() + seg - 1) / seg
	for s := range rounds + 1 {
		if s > 0 && s < rounds { // between rounds, the caller serves other operations
			if err := b.await(ops.Moving); err != nil {
				return err
			}
		}
		sent := b.sent[s%2]
		for k := 1; k < n; k++ {
			to := (b.me + k) % n // every rank begins with another peer
			r := b.parts.segment(to, s, seg)
			b.list.load(r)
			if err := b.sendRange(b.conns[to], r); err != nil {
				return err
			}
			sent[to] = b.conns[to].queued
		}
		if s > 0 && (share == everyone || share == b.me) {
			if err := b.receiveResults(s-1, seg); err != nil {
				return err
			}
		}
		if err := b.reduceRange(b.parts.segment(b.me, s, seg), share); err != nil {
			return err
		}
	}
	return b.flush()
}

// receiveResults receives the results of segment s of the other ranks' parts.
func (b *Backend) receiveResults(s, seg int) error {
	n := len(b.ranks)
	for k := 1; k < n; k++ {
		from := (b.me + n - k) % n
		// This rank has sent its contribution to the rank from which it now receives the result.
		c := b.conns[from]
		if err := b.replaceRange(c, c, b.parts.segment(from, s, seg), b.sent[s%2][from]); err != nil {
			return err
		}
	}
	return nil
}

// reduceAtRoot reduces b.list over two or more ranks in one step: all other ranks send their contributions to
// the root, which reduces them.
func (b *Backend) reduceAtRoot() error {
	all := byteRange{0, b.list.numBytes()}
	if b.me != b.op.Root {
		c, err := b.conn(b.op.Root)
		if err != nil {
			return err
		}
		if err := b.sendRange(c, all); err != nil {
			return err
		}
		return c.Flush()
	}
	if err := b.connectAll(); err != nil {
		return err
	}
	return b.reduceRange(all, nobody)
}

// The contributions that a rank reduces at a time have at most gatheredBytes bytes together, so that they
// stay in the cache. But each contribution has at least minGatheredBytes bytes.
const (
	gatheredBytes    = 512 << 10
	minGatheredBytes = 16 << 10
)

// reduceRange receives the contributions of the other ranks to r and reduces them. It sends the result to the
// ranks that the parameter share names.
func (b *Backend) reduceRange(r byteRange, share int) error {
	n := len(b.ranks)
	most := max(gatheredBytes/(n-1)&^7, minGatheredBytes)
	for r.numBytes() > 0 {
		p := byteRange{r.from, min(r.from+most, r.to)}
		r.from = p.to
		b.list.load(p)
		if err := b.gather(p); err != nil {
			return err
		}
		b.combine(p)
		for k := 1; k < n; k++ {
			to := (b.me + k) % n
			if share != everyone && share != to {
				continue
			}
			if err := b.sendRange(b.conns[to], p); err != nil {
				return err
			}
		}
	}
	return nil
}

// gather receives the contributions of the other ranks to r. They are then in b.sources.
func (b *Backend) gather(r byteRange) error {
	size := r.numBytes()
	in := b.in.room(size * (len(b.ranks) - 1))
	for i, c := range b.conns {
		if i == b.me {
			continue
		}
		if err := receive(c, in[:size]); err != nil {
			return err
		}
		b.sources[i], in = in[:size], in[size:]
	}
	return nil
}

// combine reduces the contributions to r, which gather has received, and scales the result.
func (b *Backend) combine(r byteRange) {
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
