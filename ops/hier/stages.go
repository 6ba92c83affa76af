package hier

import (
	"fmt"

	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ops"
)

// stage is one part of an operation. Stages begin in order, each as soon as the levels in after have no
// operation in progress. begin either does the part at once, or starts an operation of a level.
type stage struct {
	after levels
	begin func(b *Backend) error
	chunk int // the index of the chunk of the operation's buffer that the stage processes
}

// levels is a set of levels.
type levels uint8

const (
	innerLevel levels = 1 << iota
	outerLevel
	bothLevels = innerLevel | outerLevel
)

// sequence returns stages that run one after another.
func sequence(parts ...func(b *Backend) error) (stages []stage) {
	for _, begin := range parts {
		stages = append(stages, stage{after: bothLevels, begin: begin})
	}
	return stages
}

// These are the stages of the operations that are not cut into chunks.
var (
	reducescatterStages = sequence(reduceOnHost, reduceBetweenHosts, placePiece, gatherPieces)
	allgatherStages     = sequence(gatherBlocks, takePiece, gatherBetweenHosts, gatherOnHost, unpack)
	broadcastStages     = sequence(broadcastOnHost, broadcastBetweenHosts, gatherElsewhere)
)

// allreduceStages sets b.pipeline to the stages of an allreduce. While chunk c is reduced between the hosts,
// chunk c+1 is reduced on each host. While chunk c is gathered between the hosts, chunk c-1 is gathered on
// each host.
func (b *Backend) allreduceStages() []stage {
	p := append(b.pipeline[:0], stage{bothLevels, widenChunk, 0}, stage{bothLevels, reduceOnHost, 0})
	for c := range b.chunks {
		p = append(p, stage{bothLevels, allreduceBetweenHosts, c})
		if c+1 < b.chunks {
			p = append(p, stage{innerLevel, widenChunk, c + 1}, stage{innerLevel, reduceOnHost, c + 1})
		}
		p = append(p, stage{outerLevel, narrowResult, c}, stage{outerLevel, gatherResults, c})
		if c > 0 {
			p = append(p, stage{innerLevel, gatherOnHost, c - 1})
		}
	}
	b.pipeline = append(p, stage{bothLevels, gatherOnHost, b.chunks - 1})
	return b.pipeline
}

// plan sets the algorithm of an operation of a level with numBytes bytes. The level chooses it.
func (b *Backend) plan(l *level, op *ops.Operation, numBytes int) (err error) {
	b.response.Kind, b.response.DType, b.response.Op = op.Kind, op.DType, op.Op
	op.Algorithm, err = l.plan(l.ranks, &b.response, int64(numBytes), nil)
	return err
}

// start plans and starts an operation of a level.
func (b *Backend) start(l *level, op ops.Operation) error {
	if err := b.plan(l, &op, len(op.Buf)); err != nil {
		return err
	}
	return b.startPlanned(l, op)
}

// startPlanned starts an operation of a level that has an algorithm.
func (b *Backend) startPlanned(l *level, op ops.Operation) error {
	op.SegmentBytes = b.op.SegmentBytes
	err := l.backend.Start(op)
	l.running = err == nil
	return err
}

// sumType returns the type of the elements of b.work.
func (b *Backend) sumType() tensor.DType {
	if b.wide {
		return tensor.Float32
	}
	return b.op.DType
}

// reduces returns an operation of a level that reduces buf, which has blocks of the given sizes.
func (b *Backend) reduces(buf []byte, counts []int64) ops.Operation {
	return ops.Operation{Kind: message.Reducescatter, DType: b.sumType(), Op: b.op.Op, Buf: buf,
		Counts: counts, Scaling: ops.Scaling{Pre: 1, Post: 1}}
}

// gathers returns an operation of a level that gathers buf, which has blocks of the given sizes.
func gathers(buf []byte, counts []int64) ops.Operation {
	return ops.Operation{Kind: message.Allgather, DType: tensor.Uint8, Buf: buf, Counts: counts}
}

// widenChunk converts the chunk to the type in which it is reduced.
func widenChunk(b *Backend) error {
	if b.wide {
		b.widen(b.work, b.buf)
	}
	return nil
}

// reduceOnHost reduces each slice of b.work on this host. The owner of the slice gets the result.
func reduceOnHost(b *Backend) error {
	return b.start(&b.inner, b.reduces(b.work, b.slices(b.width())))
}

// reduceBetweenHosts reduces this rank's slice of b.work over its owners. Each owner gets the result of the
// piece of its host.
func reduceBetweenHosts(b *Backend) error {
	if !b.place.owns() {
		return nil
	}
	from, to := b.slice(b.place.local)
	w := b.width()
	return b.start(&b.outer, b.reduces(b.work[from*w:to*w], b.pieces(w)))
}

// allreduceBetweenHosts does as reduceBetweenHosts, unless the owners of a slice can allreduce it in fewer
// steps, by recursive doubling. Then each owner gets the result of the whole slice. Recursive doubling sends
// more bytes if the sums are wide or if there are more than two hosts, and then it is only for small tensors.
// It is not for several chunks, because two outer operations for a chunk overlap with the two inner ones.
// All owners of a slice decide the same, because their slices have the same size.
func allreduceBetweenHosts(b *Backend) error {
	if !b.place.owns() {
		return nil
	}
	from, to := b.slice(b.place.local)
	w := b.width()
	slice := b.work[from*w : to*w]
	b.whole[0] = ops.Tensor{In: slice, Out: slice}
	op := ops.Operation{Kind: message.Allreduce, DType: b.sumType(), Op: b.op.Op, Tensors: b.whole[:]}
	if err := b.plan(&b.outer, &op, len(slice)); err != nil {
		return err
	}
	b.doubled = op.Algorithm == message.RecursiveDoubling && b.chunks == 1 &&
		(len(b.buf) <= smallBytes || len(b.place.hosts) == 2 && !b.wide)
	if b.doubled {
		return b.startPlanned(&b.outer, op)
	}
	return reduceBetweenHosts(b)
}

// narrowResult converts the result of this rank's piece, or slice if it has that, from b.work to b.buf.
func narrowResult(b *Backend) error {
	if !b.wide || !b.place.owns() {
		return nil
	}
	from, to := b.piece(b.place.local, b.place.host)
	if b.doubled {
		from, to = b.slice(b.place.local)
	}
	b.narrow(b.buf[from:to], b.work[2*from:2*to])
	return nil
}

// gatherResults does as gatherBetweenHosts, unless this rank has the result of its whole slice.
func gatherResults(b *Backend) error {
	if b.doubled {
		return nil
	}
	return gatherBetweenHosts(b)
}

// gatherBetweenHosts gathers the pieces of this rank's slice of b.buf from its owners.
func gatherBetweenHosts(b *Backend) error {
	if !b.place.owns() {
		return nil
	}
	from, to := b.slice(b.place.local)
	return b.start(&b.outer, gathers(b.buf[from:to], b.pieces(1)))
}

// gatherOnHost gathers the slices of b.buf on this host.
func gatherOnHost(b *Backend) error { return b.start(&b.inner, gathers(b.buf, b.slices(1))) }

// placePiece copies the result of this rank's piece from b.work to the host's blocks in the operation's
// buffer.
func placePiece(b *Backend) error {
	if !b.place.owns() {
		return nil
	}
	from, to := b.piece(b.place.local, b.place.host)
	at, end := b.pieceOfBlocks(b.place.local, b.place.host)
	if b.wide {
		b.narrow(b.op.Buf[at:end], b.work[2*from:2*to])
	} else {
		copy(b.op.Buf[at:end], b.work[from:to])
	}
	return nil
}

// gatherPieces gathers the pieces of the host's blocks on this host.
func gatherPieces(b *Backend) error {
	counts := b.inner.counts
	clear(counts)
	for k := range b.place.slices {
		from, to := b.piece(k, b.place.host)
		counts[k] = to - from
	}
	return b.start(&b.inner, gathers(b.blocks(b.place.host), counts))
}

// gatherBlocks gathers the members' own blocks on this host.
func gatherBlocks(b *Backend) error {
	members := b.place.hosts[b.place.host] // consecutive
	counts := b.op.Counts[members[0]:][:len(members)]
	return b.start(&b.inner, gathers(b.blocks(b.place.host), counts))
}

// takePiece copies this rank's piece from the host's blocks to its slice.
func takePiece(b *Backend) error {
	if b.place.owns() {
		from, to := b.piece(b.place.local, b.place.host)
		at, end := b.pieceOfBlocks(b.place.local, b.place.host)
		copy(b.buf[from:to], b.op.Buf[at:end])
	}
	return nil
}

// unpack copies the blocks of the other hosts from the slices to the operation's buffer.
func unpack(b *Backend) error {
	for k := range b.place.slices {
		for j := range b.place.hosts {
			if j != b.place.host {
				from, to := b.piece(k, j)
				at, end := b.pieceOfBlocks(k, j)
				copy(b.op.Buf[at:end], b.buf[from:to])
			}
		}
	}
	return nil
}

// broadcastOnHost copies the root's buffer to the members on the root's host.
func broadcastOnHost(b *Backend) error {
	if b.place.host != b.root {
		return nil
	}
	_, root := b.place.hostOf(b.op.Root)
	return b.start(&b.inner, ops.Operation{Kind: message.Broadcast, DType: tensor.Uint8, Buf: b.buf,
		Root: root})
}

// broadcastBetweenHosts copies this rank's slice from its owner on the root's host to its other owners.
func broadcastBetweenHosts(b *Backend) error {
	if !b.place.owns() {
		return nil
	}
	from, to := b.slice(b.place.local)
	return b.start(&b.outer, ops.Operation{Kind: message.Broadcast, DType: tensor.Uint8, Buf: b.buf[from:to],
		Root: b.root})
}

// gatherElsewhere gathers the slices, except on the root's host.
func gatherElsewhere(b *Backend) error {
	if b.place.host == b.root {
		return nil
	}
	return gatherOnHost(b)
}

func (b *Backend) beginAllreduce() error {
	if n := len(b.op.Tensors); n != 1 {
		return fmt.Errorf("got %d tensors, want 1", n)
	}
	if err := b.prepare(); err != nil {
		return err
	}
	b.all = b.op.Tensors[0].Out
	b.allWork = b.all
	if b.wide {
		b.allWork = b.packed.Bytes(2 * len(b.all))
	}
	b.chunks = max((len(b.all)+b.chunkBytes-1)/b.chunkBytes, 1)
	b.stages = b.allreduceStages()
	return nil
}

func (b *Backend) beginReducescatter() error {
	if err := b.cutBlocks(); err != nil {
		return err
	}
	if err := b.prepare(); err != nil {
		return err
	}
	b.stages = reducescatterStages
	b.work = b.packed.Bytes(len(b.op.Buf) * int(b.width()))
	for k := range b.place.slices {
		for j := range b.place.hosts {
			from, to := b.piece(k, j)
			at, end := b.pieceOfBlocks(k, j)
			if b.wide {
				b.widen(b.work[2*from:2*to], b.op.Buf[at:end])
			} else {
				copy(b.work[from:to], b.op.Buf[at:end])
			}
		}
	}
	return nil
}

func (b *Backend) beginAllgather() error {
	b.stages = allgatherStages
	err := b.cutBlocks()
	b.buf = b.gathered.Bytes(len(b.op.Buf))
	return err
}

func (b *Backend) beginBroadcast() error {
	b.root, _ = b.place.hostOf(b.op.Root)
	if b.root < 0 {
		return fmt.Errorf("got root %d, want a member of the set", b.op.Root)
	}
	b.buf, b.stages = b.op.Buf, broadcastStages
	b.cutWhole(len(b.buf))
	return nil
}

// prepare decides whether the reduction is wide: sums and products of 16-bit floats are computed in float32.
func (b *Backend) prepare() (err error) {
	dt := b.op.DType
	b.wide = dt.IsHalf() && (b.op.Op == tensor.Sum || b.op.Op == tensor.Product)
	if !b.wide || b.dt == dt {
		return nil
	}
	if b.widen, err = kernel.Convert(tensor.Float32, dt); err != nil {
		return err
	}
	b.narrow, err = kernel.Convert(dt, tensor.Float32)
	b.dt = dt
	return err
}

// width returns the size of an element of b.work as a multiple of the size of an element of b.buf.
func (b *Backend) width() int64 {
	if b.wide {
		return 2
	}
	return 1
}
