package shm

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/inorder"
)

// streamBytes is the smallest size of a buffer for which pullStep stores the results without bringing them
// into the caches. The results of such a buffer do not fit into the caches and would evict each other.
const streamBytes = 8 << 20

// directStages is the size of a step of a reduction, in stages, if no rank stages anything. Larger steps need
// fewer rounds, and in each round a rank may have to wait until another rank gets a processor. After such a
// step, its results are still in the caches when the peers copy them.
const directStages = 4

// directBytes is the size of a step that only copies, if no rank stages anything. A turn of the loop executes
// a whole step, so a larger one would delay all other operations and the heartbeats of this rank.
const directBytes = 32 << 20

// plan describes an exchange. The buffer is cut into one block for each rank, and each step handles a column
// of every block.
type plan struct {
	// stageBytes is the size of a stage.
	stageBytes int64
	// ends are the offsets at which the ranks' blocks end.
	ends []int64
	// column is the number of bytes of each block that a step handles. A stage has a column for each block,
	// and stride is the distance in bytes between the columns of two neighbouring blocks.
	stride, column int64
	// reduce is set if the owner of a block reduces the contributions of all ranks to the block. If it is not
	// set, the owner's data is the result.
	reduce bool
	// pull is set if the results of a block are copied by every other rank, or in a reduce by the root.
	pull bool
}

// block returns the range of bytes of block i that step t handles.
func (p *plan) block(i, t int) (from, to int64) {
	begin := int64(0)
	if i > 0 {
		begin = p.ends[i-1]
	}
	from = begin + int64(t)*p.column
	return min(from, p.ends[i]), min(from+p.column, p.ends[i])
}

// steps returns the number of steps that the longest block needs.
func (p *plan) steps() int {
	var longest, begin int64
	for _, end := range p.ends {
		longest = max(longest, end-begin)
		begin = end
	}
	return int((longest + p.column - 1) / p.column)
}

// blocks returns the number of blocks that have bytes.
func (p *plan) blocks() (n int64) {
	begin := int64(0)
	for _, end := range p.ends {
		if end > begin {
			n++
		}
		begin = end
	}
	return max(n, 1)
}

// columnOf returns how many bytes of each of n blocks a step handles.
func (p *plan) columnOf(n int) int64 { return p.stageBytes / int64(n) / lineBytes * lineBytes }

// even divides a buffer of total bytes into one block for each rank. It cuts only at multiples of a cache
// line. The lengths of the blocks are as equal as this allows.
func (p *plan) even(total int64) {
	n := int64(len(p.ends))
	lines := (total + lineBytes - 1) / lineBytes
	for i := range n {
		p.ends[i] = min(lines*(i+1)/n*lineBytes, total)
	}
}

// columns divides a stage into one column for each rank.
func (p *plan) columns() {
	p.column = p.columnOf(len(p.ends))
	p.stride = p.column
}

// cut divides a buffer into blocks of the given sizes.
func (p *plan) cut(counts []int64) error {
	var total int64
	if len(counts) != len(p.ends) {
		return fmt.Errorf("got %d block sizes, want one for each of the %d ranks", len(counts),
			len(p.ends))
	}
	for i, c := range counts {
		total += c
		p.ends[i] = total
	}
	return nil
}

// pullOnly plans an exchange in which every rank copies the other ranks' blocks. A rank stages only its own
// block, so that block gets the whole stage.
func (p *plan) pullOnly() {
	p.stride, p.column = 0, p.stageBytes
	p.reduce, p.pull = false, true
}

// findNone reports for every buffer that the buffer is not in an arena. It replaces Memory.Find if tensors
// must be staged.
func findNone([]byte) (arena.Ref, bool) { return arena.Ref{}, false }

// running is the state of an exchange in progress.
type running struct {
	plan          *plan // nil if no exchange is in progress
	total         int64
	steps, rounds int
	lag           int // the results of step t are copied in round t+lag
	next          int // the number of the next round
	base          uint64
	awaitsReaders bool   // all rounds are done, but peers may still read this rank's buffers
	out           []byte // the output of an alltoall
}

// An exchange runs in rounds over the tensors of this rank in b.own. A rank begins round r when all other
// ranks have finished round r-1. In round r the rank
//
//   - reduces the data of step r-1,
//   - stages the data of step r,
//   - posts its progress,
//   - copies the results of step r-2, or of step r-1 if there is nothing to reduce.
//
// So a rank reads data that is still in the caches, and a rank that is late by one round does not delay the
// others. Three parts of the staging area are in use at a time. A fourth is in use while a rank that has
// posted its progress still copies results.

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
	if b.discards {
		b.layouts[b.me].stageOutputs()
	}
	b.layouts[b.me].write(b.table())
	b.stageStep(p, 0)
	b.post(b.progress, x.base+1)
}

// round runs the next round. If other ranks are not ready for the round, the method waits for them if the
// parameter wait is set, and returns Waiting if it is not.
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
				// A step that does not wait uses endedContext, so the error context.Canceled only means that
				// mapping a chunk would have to wait: a peer has a tensor in a new arena chunk, and the
				// descriptor of the chunk has not arrived yet.
				return ops.Waiting, nil
			}
			return ops.Waiting, err
		}
		if !b.anyStaged(p) {
			b.enlargeSteps(p)
		}
	}
	if p.reduce && r-1 < x.steps {
		b.reduceStep(p, r-1)
	}
	if r < x.steps {
		b.stageStep(p, r)
	}
	b.post(b.progress, x.base+uint64(r)+1)
	if p.pull && r >= x.lag && !b.discards {
		b.pullStep(p, r-x.lag, x.total)
	}
	x.next++
	if x.next < x.rounds {
		return ops.Moving, nil
	}
	x.awaitsReaders = b.finishRounds(x.base+uint64(x.rounds), x.steps)
	if x.awaitsReaders {
		return ops.Moving, nil
	}
	x.plan = nil
	return ops.Finished, nil
}

// enlargeSteps changes the size of the steps of an exchange in which no rank stages anything. No step of it
// has been done yet.
func (b *Backend) enlargeSteps(p *plan) {
	x := &b.running
	if p.reduce {
		p.column *= directStages
	} else {
		p.column *= max(directBytes/p.stageBytes/p.blocks(), 1)
	}
	x.steps = p.steps()
	x.rounds = x.steps + x.lag
}

// anyStaged reports whether any rank stages data in an exchange, because its peers cannot read the data in
// place. Without a reduction, only the ranks' own blocks count. All ranks get the same result.
func (b *Backend) anyStaged(p *plan) bool {
	begin := int64(0)
	for i, end := range p.ends {
		for k := range b.layouts[i].extents {
			e := &b.layouts[i].extents[k]
			if p.reduce {
				if e.in.staged() || p.pull && e.out.staged() {
					return true
				}
				continue
			}
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

// finishRounds records the end of the last round of an exchange. It returns true if a rank has a buffer that
// its peers read in place. Peers may still be reading such a buffer, so the operation must then not end
// before all peers have finished.
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

// awaitReaders reports whether all other ranks have finished reading. If wait is set, it waits until they
// have.
func (b *Backend) awaitReaders(wait bool) (bool, error) {
	if ok, err := b.arrived(b.rounds, wait); !ok {
		return false, err
	}
	return true, b.checkAborts()
}

// checkAborts returns an error if a peer has abandoned the operation. A rank sets its abort word before it
// gives its buffers back to its caller. So if there is no error, no buffer has changed while this rank read
// it.
func (b *Backend) checkAborts() error {
	shmem.Fence() // orders the reads of the peers' buffers before the reads of the abort words
	for i := range b.peers {
		if i != b.me && atomic.LoadUint32(b.peers[i].abort) != 0 {
			return &transport.PeerError{Peer: b.ranks[i], Lane: b.lane, Err: errGivenUp}
		}
	}
	return nil
}

// table returns the table in this rank's segment that the operation uses.
func (b *Backend) table() []byte { return tableOf(b.segment, b.turn) }

func tableOf(segment []byte, turn int) []byte {
	return segment[tablesAt+turn*tableBytes:][:tableBytes]
}

// readLayouts reads from the peers' tables where their tensors lie.
func (b *Backend) readLayouts(p *plan, total int64) error {
	elem := int64(1)
	if p.reduce {
		elem = int64(b.op.DType.Size())
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

// staged returns n bytes from member i's staging area: the copy of the bytes of the member's buffer that
// begin at offset v. Byte v must belong to the part of block j that step t handles. The parameter from is the
// offset at which this part begins. Both offsets count from the start of the operation's buffer.
func (b *Backend) staged(p *plan, i, j, t int, from, v, n int64) []byte {
	at := stagingAt + int64((b.stage+t)%stages)*p.stageBytes + int64(j)*p.stride + v - from
	return b.peers[i].segment[at : at+n]
}

// contribution returns at most n bytes of the contribution of member i to block j, beginning at byte v. As in
// staged, byte v belongs to the part of the block that step t handles, and from is the offset at which this
// part begins.
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

// result returns at most n bytes of the result of block i, beginning at byte v. The returned slice lies in
// the memory of member i, which must not be this rank. The parameter from has the same meaning as in staged.
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

// stageStep copies to the staging area the data that peers need in step t and cannot read in place.
func (b *Backend) stageStep(p *plan, t int) {
	for j := range p.ends {
		if p.reduce == (j == b.me) {
			// In a reduction no peer reads this rank's contribution to this rank's own block. Without a
			// reduction, peers read only that block.
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
			b.stager.copy(b.staged(p, b.me, j, t, from, v, n), in)
		}
		v += n
	}
}

// reduceStep reduces the part of this rank's block that step t handles. If peers copy the result but cannot
// read it in place, reduceStep also stages the result. If this rank gets no result, reduceStep only stages
// it.
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
		if b.discards {
			b.reducer.Reduce(b.staged(p, b.me, b.me, t, from, v, n), b.sources)
			v += n
			continue
		}
		k, _ := l.find(v)
		copied := p.pull && b.op.Kind != message.Reduce && l.extents[k].out.staged()
		b.reducePiece(p, t, from, v, out[:n], copied)
		v += n
	}
}

// reducePiece reduces the sources to out. If the parameter copied is set, it also copies the result to the
// staging area. It handles inorder.BlockBytes bytes at a time, so that the copy reads from the cache.
func (b *Backend) reducePiece(p *plan, t int, from, v int64, out []byte, copied bool) {
	if !copied {
		b.reducer.Reduce(out, b.sources)
		return
	}
	staged := b.staged(p, b.me, b.me, t, from, v, int64(len(out)))
	for at := 0; at < len(out); at += inorder.BlockBytes {
		end := min(at+inorder.BlockBytes, len(out))
		b.reducer.Block(out[at:end], b.sources, at)
		stage(staged[at:end], out[at:end], b.stager.way())
	}
}

// pullStep copies the results of step t for all blocks of other ranks. It reads each result from the memory
// of the rank that owns the block.
func (b *Backend) pullStep(p *plan, t int, total int64) {
	n := len(p.ends)
	for k := 1; k < n; k++ {
		i := (b.me + k) % n // each rank begins with a different peer, so that not all read from the same one
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
