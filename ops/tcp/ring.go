package tcp

import "github.com/gohvd/gohvd/internal/tensor"

// ringRound appends round k of an allreduce of b.list over two or more ranks.
//
// The bytes are cut into chunks, and a chunk into n parts of one segment each. The last chunk may be smaller.
// In a chunk there are 2(n-1) steps, numbered from 0. Rank i starts by sending part i. In step s it receives
// part i-s-1 (modulo n), and sends the part on unless the step is the last. In the first n-1 steps the
// received part is the sum over the ranks that it has passed, and the rank adds its own values. After that
// the received part is the sum over all ranks.
//
// In round k the first n-1 steps of chunk k alternate with the last n-1 steps of the chunk before. So the
// streams carry a part of one chunk while a part of the other one is reduced. Between the first and the last
// step of a chunk, a rank touches only the memory of two chunks, which stays in the cache. All ranks must use
// chunks of the same size, because the chunks decide the order of the parts in the streams.
func (b *Backend) ringRound(k int) error {
	right, left := b.steps.neighbours()
	n := len(b.ranks)
	// sent[s] is the position in the stream to the right at which the part of this chunk ends that is sent in
	// step s. sentBefore has the same of the chunk before.
	sent, sentBefore := b.sent[k%2], b.sent[(k+1)%2]
	own := b.ringPart(k, 0)
	b.load(own)
	b.sendRange(right, own)
	sent[0] = right.end
	b.sendRange(right, b.ringPart(k-1, n-1))
	for s := range n - 1 {
		p := b.ringPart(k, s+1)
		b.addRange(left, p)
		if s < n-2 {
			b.sendRange(right, p)
			sent[s+1] = right.end
		} else {
			b.scaleResult(p)
		}
		// Results arrive in the order in which this rank has sent its own values: part i, i-1 and so on.
		p = b.ringPart(k-1, s)
		b.replaceRange(left, right, p, sentBefore[s])
		if s < n-2 {
			b.sendRange(right, p)
		}
	}
	return nil
}

// ringChunk returns the number of bytes of a chunk of an allreduce by Ring.
func (b *Backend) ringChunk() int { return len(b.ranks) * b.steps.segment(b.op.DType.Size()) }

// ringPart returns the part of a chunk that belongs to the rank k places before this rank in the ring. It is
// empty if there is no such chunk.
func (b *Backend) ringPart(chunk, k int) byteRange {
	n, total, size := len(b.ranks), b.list.numBytes(), b.op.DType.Size()
	begin := max(chunk, 0) * b.ringChunk()
	end := max(min((chunk+1)*b.ringChunk(), total), begin)
	from, count := tensor.Rows(int64((end-begin)/size), n, (b.me+n-k)%n)
	first := begin + int(from)*size
	return byteRange{first, first + int(count)*size}
}

// load appends an action that loads a range of b.list.
func (b *Backend) load(r byteRange) {
	b.steps.compute(func(b *Backend, a *action) { b.list.load(a.r) }, action{r: r})
}

// scaleResult appends an action that scales a range of b.list as after a reduction.
func (b *Backend) scaleResult(r byteRange) {
	b.steps.compute(func(b *Backend, a *action) { b.list.scaleResult(a.r) }, action{r: r})
}

// sendRange sends a range of b.list.
func (b *Backend) sendRange(c *stream, r byteRange) {
	for r.numBytes() > 0 {
		p := b.list.piece(r).Out
		b.steps.send(c, p)
		r.from += len(p)
	}
}

// addRange receives the sum of a part over the ranks that the part has passed, and adds it to this rank's
// values.
func (b *Backend) addRange(left *stream, r byteRange) {
	in := b.in.room(r.numBytes())
	b.steps.receive(left, in)
	b.steps.compute((*Backend).addReceived, action{r: r, in: in})
}

// addReceived adds a.in to range a.r of b.list.
func (b *Backend) addReceived(a *action) {
	b.list.load(a.r)
	for r, in := a.r, a.in; r.numBytes() > 0; {
		p := b.list.piece(r).Out
		b.reduce(p, in[:len(p)])
		in = in[len(p):]
		r.from += len(p)
	}
}

// replaceRange receives the result of a part. The old content of the part was sent by sendRange on the stream
// out, and ends there at the position given by the parameter sent. The result of a tensor may arrive before
// the peer at the other end of out reads the next tensor. So replaceRange waits only until the old content of
// the same tensor has left.
func (b *Backend) replaceRange(c, out *stream, r byteRange, sent uint64) {
	for r.numBytes() > 0 {
		p := b.list.piece(r).Out
		b.replace(c, out, p, sent-uint64(r.numBytes()-len(p)))
		r.from += len(p)
	}
}

// replace receives the new content of p, which is not empty. The old content of p was sent on the stream out,
// and ends there at the position given by the parameter sent.
//
// The new content is a sum that includes the old content as the peer at the other end of out received it. So
// when the new content arrives here, the old content has arrived at that peer. But the transport may report
// this later, and until then the transport owns p. So if the transport has not reported it yet, p is received
// into other memory, and copied after a short wait. A flush in place of this wait could deadlock, because all
// ranks would wait for each other to receive. A wait before the new content arrives could be long.
func (b *Backend) replace(c, out *stream, p []byte, sent uint64) {
	b.steps.compute((*Backend).divert, action{c: out, position: sent, in: b.in.room(len(p))})
	b.steps.receive(c, p)
	b.steps.await(out, sent)
	b.steps.compute(func(_ *Backend, a *action) { copy(a.buf, a.in) }, action{buf: p})
}

// divert lets the next action of replace receive into a.in, and the last one copy from there, unless the old
// content has left.
func (b *Backend) divert(a *action) {
	if a.c.left() < a.position {
		b.steps.actions[b.steps.next+1].buf, b.steps.actions[b.steps.next+3].in = a.in, a.in
	}
}

// reducescatterRing appends round s of a reducescatter over two or more ranks. Each rank gets the result of
// its own part.
//
// The sum of part i begins at rank i+1, so that it ends at rank i. So rank i starts by sending part i-1.
// There are n-1 rounds. In round s rank i receives part i-s-2 (modulo n), adds its own values, and sends the
// sum on. In the last round the rank receives its own part, and does not send it on.
func (b *Backend) reducescatterRing(s int) error {
	right, left := b.steps.neighbours()
	if s == 0 {
		b.steps.send(right, b.before(b.op.Buf, 1))
	}
	if s == b.steps.rounds-1 {
		right = nil
	}
	b.addOwn(left, right, b.before(b.op.Buf, s+2))
	return nil
}

// addOwn receives the sum of a part over the ranks that the part has passed, and adds it to p, which holds
// this rank's values. Unless right is nil, addOwn sends the result to right.
func (b *Backend) addOwn(left, right *stream, p []byte) {
	seg := b.steps.segment(b.op.DType.Size())
	for rest := p; len(rest) > 0; {
		var own []byte
		own, rest = split(rest, seg)
		in := b.in.room(len(own))
		b.steps.receive(left, in)
		b.steps.compute(func(b *Backend, a *action) { b.reduce(a.buf, a.in) }, action{buf: own, in: in})
		if right != nil {
			b.steps.send(right, own)
		}
	}
}

// before returns the part of buf that belongs to the rank k places before this rank in the ring. k is from 0
// to n.
func (b *Backend) before(buf []byte, k int) []byte {
	n := len(b.ranks)
	return b.parts.part(buf, (b.me-k+n)%n)
}
