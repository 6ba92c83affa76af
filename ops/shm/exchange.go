package shm

import (
	"context"
	"errors"
	"sync/atomic"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/ops"
)

// streamBytes is the size from which results of peers are written past the caches, because they do not fit:
// they would evict each other.
const streamBytes = 8 << 20

// plan describes an exchange. The buffer is cut into blocks, one for each rank.
type plan struct {
	// ends are the ends of the ranks' blocks.
	ends []int64
	// stride is the distance of the blocks' columns in a stage, and column their size: in each step a rank
	// handles that much of every block.
	stride, column int64
	// reduce makes the owner of a block reduce what all ranks have in it. Otherwise only what the owner has
	// counts.
	reduce bool
	// pull makes every rank copy the blocks of the others.
	pull bool
}

// block returns the range of block i that step t handles.
func (p *plan) block(i, t int) (from, to int64) {
	begin := int64(0)
	if i > 0 {
		begin = p.ends[i-1]
	}
	from = begin + int64(t)*p.column
	return min(from, p.ends[i]), min(from+p.column, p.ends[i])
}

// steps returns the number of steps.
func (p *plan) steps() int {
	var longest, begin int64
	for _, end := range p.ends {
		longest = max(longest, end-begin)
		begin = end
	}
	return int((longest + p.column - 1) / p.column)
}

// findNone finds nothing in arenas.
func findNone([]byte) (arena.Ref, bool) { return arena.Ref{}, false }

// running is an exchange in progress.
type running struct {
	plan          *plan // nil if no exchange is in progress
	total         int64
	steps, rounds int
	lag           int // rounds from staging a step to copying its results
	next          int // the next round
	base          uint64
	awaitsReaders bool   // all rounds are done, and the others may still read this rank's buffers
	out           []byte // the output of an alltoall
}

// An exchange runs in rounds over this rank's tensors, which b.own has. A rank begins round r when all others
// have finished round r-1. In round r it stages step r, reduces step r-1, posts its progress, and copies the
// results of step r-2, or of step r-1 if there is nothing to reduce. So the data that a rank reads is in the
// caches, and a rank may be late by one round without delaying the others. The stages of three steps are in
// use. A rank that has posted its round and still copies may read a fourth.

// start begins an exchange and does the first round, which does not wait for other ranks.
func (b *Backend) start(p *plan) {
	x := &b.running
	*x = running{total: p.ends[len(p.ends)-1], steps: p.steps(), base: b.rounds, next: 1}
	if x.steps == 0 {
		return
	}
	x.plan = p
	x.rounds = x.steps
	if p.reduce {
		x.lag++
		x.rounds++
	}
	if p.pull {
		x.lag++
		x.rounds = x.steps + x.lag
	}
	find := b.find
	if p.reduce && !b.oversubscribed && x.total < b.directBytes {
		find = findNone
	}
	b.layouts[b.me].describe(b.own.tensors, find)
	b.layouts[b.me].write(b.table())
	b.stageStep(p, 0)
	b.post(b.progress, x.base+1)
}

// round does the next round. If other ranks are not ready for it, round waits if wait is set, and otherwise
// returns Waiting.
func (b *Backend) round(wait bool) (ops.Progress, error) {
	x := &b.running
	p, r := x.plan, x.next
	if x.awaitsReaders {
		if ok, err := b.awaitReaders(wait); !ok || err != nil {
			return ops.Waiting, err
		}
		x.plan = nil
		return ops.Finished, nil
	}
	if ok, err := b.arrived(x.base+uint64(r), wait); !ok {
		return ops.Waiting, err
	}
	if r == 1 {
		if err := b.readLayouts(p, x.total); err != nil {
			if !wait && errors.Is(err, context.Canceled) {
				// a peer has shared an arena chunk, and its descriptor has not arrived
				return ops.Waiting, nil
			}
			return ops.Waiting, err
		}
		if !p.reduce && !b.anyStaged(p) {
			// Only staging needs several steps. Without it all data can be copied in one step.
			p.column = x.total
			x.steps, x.rounds = 1, 2
		}
	}
	if p.reduce && r-1 < x.steps {
		b.reduceStep(p, r-1)
	}
	if r < x.steps {
		b.stageStep(p, r)
	}
	b.post(b.progress, x.base+uint64(r)+1)
	if p.pull && r >= x.lag {
		b.pullStep(p, r-x.lag, x.total)
	}
	x.next++
	if x.next < x.rounds {
		return ops.Moving, nil
	}
	if x.awaitsReaders = b.finishRounds(x.base+uint64(x.rounds), x.steps); x.awaitsReaders {
		return ops.Moving, nil
	}
	x.plan = nil
	return ops.Finished, nil
}

// anyStaged reports whether any rank stages data in an exchange without a reduction, because its own block
// cannot be read in place. The answer is the same at all ranks.
func (b *Backend) anyStaged(p *plan) bool {
	begin := int64(0)
	for i, end := range p.ends {
		for k := range b.layouts[i].extents {
			e := &b.layouts[i].extents[k]
			from := int64(0)
			if k > 0 {
				from = b.layouts[i].extents[k-1].end
			}
			if e.in.staged() && from < end && e.end > begin {
				return true
			}
		}
		begin = end
	}
	return false
}

// finishRounds ends the rounds of an exchange after the last one. If peers may still read a caller's buffer,
// it returns true: the operation then ends only when all peers have finished.
func (b *Backend) finishRounds(round uint64, steps int) bool {
	b.stage += steps
	b.rounds = round
	b.turn ^= 1
	for i := range b.layouts {
		if b.layouts[i].direct {
			b.rounds++
			b.post(b.progress, b.rounds)
			return true
		}
	}
	return false
}

// awaitReaders reports whether all others have finished reading. If wait is set it waits for that.
func (b *Backend) awaitReaders(wait bool) (bool, error) {
	if ok, err := b.arrived(b.rounds, wait); !ok {
		return false, err
	}
	return true, b.checkAborts()
}

// checkAborts returns an error if a peer has given up the operation. A rank announces that before it gives
// its buffers back to its caller. So without an error, all buffers that this rank has read were unchanged.
func (b *Backend) checkAborts() error {
	shmem.Fence() // orders the reads of the buffers before those of the abort words
	for i := range b.peers {
		if i != b.me && atomic.LoadUint32(b.peers[i].abort) != 0 {
			return &transport.PeerError{Peer: b.ranks[i], Lane: b.lane, Err: errGivenUp}
		}
	}
	return nil
}

// table returns this rank's table for the operation.
func (b *Backend) table() []byte { return tableOf(b.segment, b.turn) }

func tableOf(segment []byte, turn int) []byte {
	return segment[tablesAt+turn*tableBytes:][:tableBytes]
}

// readLayouts reads where the peers' tensors lie.
func (b *Backend) readLayouts(p *plan, total int64) error {
	elem := int64(1)
	if p.reduce {
		elem = int64(b.reducer.dt.Size())
	}
	for i := range b.peers {
		if i == b.me {
			continue
		}
		b.chunkOwner = i
		if err := b.layouts[i].read(tableOf(b.peers[i].segment, b.turn), total, elem, b.chunk); err != nil {
			return b.peerError(i, err)
		}
	}
	return nil
}

// staged returns the place where member i stages n bytes from byte v on of block j. Step t of the block
// begins at byte from.
func (b *Backend) staged(p *plan, i, j, t int, from, v, n int64) []byte {
	at := stagingAt + int64((b.stage+t)%stages)*b.stageBytes + int64(j)*p.stride + v - from
	return b.peers[i].segment[at : at+n]
}

// contribution returns the contribution of member i from byte v on, at most n bytes, in block j.
func (b *Backend) contribution(p *plan, i, j, t int, from, v, n int64) []byte {
	if i == b.me {
		in, _ := b.own.at(v, n)
		return in
	}
	l := &b.layouts[i]
	k, begin := l.find(v)
	e := &l.extents[k]
	n = min(n, e.end-v)
	if e.in.staged() {
		return b.staged(p, i, j, t, from, v, n)
	}
	at := e.in.offset + v - begin
	return e.in.mem[at : at+n]
}

// result returns the result of member i, another member, for block i from byte v on, at most n bytes.
func (b *Backend) result(p *plan, i, t int, from, v, n int64) []byte {
	l := &b.layouts[i]
	k, begin := l.find(v)
	e := &l.extents[k]
	n = min(n, e.end-v)
	at := &e.out
	if !p.reduce {
		at = &e.in
	}
	if at.staged() {
		return b.staged(p, i, i, t, from, v, n)
	}
	return at.mem[at.offset+v-begin:][:n]
}

// stageStep copies the data that peers will read in step t and cannot read in place to the stage.
func (b *Backend) stageStep(p *plan, t int) {
	for j := range p.ends {
		if p.reduce == (j == b.me) {
			// In a reduction no peer reads this rank's contribution to its own block. Otherwise peers read
			// only that block.
			continue
		}
		from, to := p.block(j, t)
		b.stageRange(p, j, t, from, to)
	}
}

func (b *Backend) stageRange(p *plan, j, t int, from, to int64) {
	l := &b.layouts[b.me]
	for v := from; v < to; {
		k, _ := l.find(v)
		e := &l.extents[k]
		n := min(to, e.end) - v
		if e.in.staged() {
			in, _ := b.own.at(v, n)
			n = int64(len(in))
			copy(b.staged(p, b.me, j, t, from, v, n), in)
		}
		v += n
	}
}

// reduceStep reduces step t of this rank's block, and stages the result if peers read it and cannot read it
// in place.
func (b *Backend) reduceStep(p *plan, t int) {
	l := &b.layouts[b.me]
	from, to := p.block(b.me, t)
	for v := from; v < to; {
		_, out := b.own.at(v, to-v)
		n := int64(len(out))
		for i := range b.sources {
			b.sources[i] = b.contribution(p, i, b.me, t, from, v, n)
			n = min(n, int64(len(b.sources[i])))
		}
		k, _ := l.find(v)
		copied := p.pull && l.extents[k].out.staged()
		b.reducePiece(p, t, from, v, out[:n], copied)
		v += n
	}
}

// reducePiece reduces the sources to out, block by block, so that a copy finds each block in the cache.
func (b *Backend) reducePiece(p *plan, t int, from, v int64, out []byte, copied bool) {
	if !copied {
		b.reducer.reduce(out, b.sources)
		return
	}
	stage := b.staged(p, b.me, b.me, t, from, v, int64(len(out)))
	for at := 0; at < len(out); at += blockBytes {
		end := min(at+blockBytes, len(out))
		b.reducer.block(out[at:end], b.sources, at)
		copy(stage[at:end], out[at:end])
	}
}

// pullStep copies the results of step t from the owners of the other blocks.
func (b *Backend) pullStep(p *plan, t int, total int64) {
	n := len(p.ends)
	for k := 1; k < n; k++ {
		i := (b.me + k) % n // each rank begins with another peer
		from, to := p.block(i, t)
		for v := from; v < to; {
			_, out := b.own.at(v, to-v)
			src := b.result(p, i, t, from, v, int64(len(out)))
			out = out[:len(src)]
			if total >= streamBytes && b.layouts[b.me].direct {
				kernel.Stream(out, src)
			} else {
				copy(out, src)
			}
			v += int64(len(src))
		}
	}
}
