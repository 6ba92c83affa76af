package shm

import (
	"fmt"
	"math/bits"
	"slices"

	"github.com/gohvd/gohvd/fusion"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/adasum"
)

// adasumState is the state of an Adasum, which runs as a series of other operations, its parts. The buffer is
// cut into one block for each rank.
//
//   - In an alltoall, each rank copies its block of the vectors of all ranks.
//   - For each level of the tree (package ops/adasum), each rank computes the dot products of all pairs of
//     vectors in its block. An allreduce adds them to the dot products of the whole vectors. Then each rank
//     combines the pairs in its block.
//   - In an allgather, each rank copies the blocks of the other ranks.
//
// A rank reads about twice as many bytes of its peers as in an allreduce, and keeps memory for len(buf)
// bytes. The dot products of the blocks are added in the order of the ranks. So all ranks get the same bits.
// The other tensors in the buffer may change the last bits of the products, because they move the blocks.
type adasumState struct {
	combiner adasum.Combiner
	buf      []byte  // this rank's tensors; nil if no Adasum is in progress
	counts   []int64 // the sizes of the blocks, by rank
	from, to int     // this rank's block of buf
	// vectors is the number of vectors whose blocks are in parts, one after another.
	vectors int
	parts   []byte
	memory  fusion.Buffer // the memory of parts
	dots    []float64     // the dot products of each pair of vectors of the level
	one     [1]ops.Tensor
	collect func(counts []int64) ([]byte, error) // Backend.collect, kept so that no operation allocates
}

// beginAdasum begins the first part of an Adasum.
func (b *Backend) beginAdasum() error {
	a := &b.adasum
	if n := len(b.op.Tensors); n != 1 {
		return fmt.Errorf("got %d tensors, want 1", n)
	}
	buf := b.op.Tensors[0].Out
	if err := a.combiner.Prepare(b.op.DType, len(buf), b.op.Counts); err != nil {
		return err
	}
	if len(b.ranks) == 1 || len(buf) == 0 {
		b.state = done
		return nil
	}
	b.plan.even(int64(len(buf)))
	a.counts = a.counts[:0]
	var begin int64
	for i, end := range b.plan.ends {
		a.counts = append(a.counts, end-begin)
		if i == b.me {
			a.from, a.to = int(begin), int(end)
		}
		begin = end
	}
	if a.collect == nil {
		a.collect = b.collect
	}
	a.buf, a.vectors = buf, len(b.ranks)
	a.parts = a.memory.Bytes(len(b.ranks) * (a.to - a.from))
	return b.beginPart(ops.Operation{Kind: message.Alltoall, Buf: buf, Counts: a.counts, Allocate: a.collect})
}

// collect returns the memory for the blocks of all vectors. counts are the sizes of these blocks.
func (b *Backend) collect(counts []int64) ([]byte, error) {
	want := b.adasum.counts[b.me]
	for i, n := range counts {
		if n != want {
			return nil, b.peerError(i, fmt.Errorf("got %d bytes of its vectors, want %d", n, want))
		}
	}
	return b.adasum.parts, nil
}

// beginPart begins a part of an Adasum.
func (b *Backend) beginPart(op ops.Operation) error {
	op.Algorithm = message.Direct
	b.op = op
	b.own.clear()
	return b.begin()
}

// nextPart does what follows the part that has ended, and begins the next part. After the last part, it
// returns Finished.
func (b *Backend) nextPart() (ops.Progress, error) {
	a := &b.adasum
	switch b.op.Kind {
	case message.Allgather:
		a.buf = nil
		return ops.Finished, nil
	case message.Allreduce:
		a.combinePairs()
	}
	if a.vectors == 1 {
		copy(a.buf[a.from:a.to], a.parts)
		return ops.Moving, b.beginPart(ops.Operation{Kind: message.Allgather, Buf: a.buf, Counts: a.counts})
	}
	a.multiplyPairs()
	dots := tensor.Bytes(a.dots)
	a.one[0] = ops.Tensor{In: dots, Out: dots}
	return ops.Moving, b.beginPart(ops.Operation{Kind: message.Allreduce, DType: tensor.Float64,
		Op: tensor.Sum, Tensors: a.one[:], Scaling: ops.Scaling{Pre: 1, Post: 1}})
}

// vector returns this rank's block of vector i.
func (a *adasumState) vector(i int) []byte {
	n := a.to - a.from
	return a.parts[i*n:][:n]
}

// pairs returns the number of pairs that the current level of the tree combines.
func (a *adasumState) pairs() int {
	if extra := a.vectors - a.power(); extra > 0 {
		return extra
	}
	return a.vectors / 2
}

// power returns the largest power of two up to the number of vectors.
func (a *adasumState) power() int { return 1 << (bits.Len(uint(a.vectors)) - 1) }

// pair returns this rank's block of the two vectors of pair i. Vector i of the next level is their
// combination.
func (a *adasumState) pair(i int) (x, y []byte) {
	if p := a.power(); p < a.vectors {
		return a.vector(i), a.vector(p + i)
	}
	return a.vector(2 * i), a.vector(2*i + 1)
}

// multiplyPairs computes the dot products of all pairs in this rank's block.
func (a *adasumState) multiplyPairs() {
	n, each := a.pairs(), a.combiner.Dots()
	a.dots = slices.Grow(a.dots[:0], n*each)[:n*each]
	clear(a.dots)
	for i := range n {
		x, y := a.pair(i)
		a.combiner.AddDots(a.dots[i*each:][:each], x, y, a.from)
	}
}

// combinePairs combines all pairs in this rank's block. It needs the dot products of the whole vectors.
func (a *adasumState) combinePairs() {
	n, each := a.pairs(), a.combiner.Dots()
	for i := range n {
		x, y := a.pair(i)
		a.combiner.Combine(a.vector(i), x, y, a.from, a.dots[i*each:][:each])
	}
	a.vectors -= n
}
