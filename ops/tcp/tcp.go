// Package tcp runs collectives over the byte channels of a transport.Mesh: the backend that works between any two
// hosts. It is as well served by any other mesh.
//
// Every collective is cut into segments, and each segment is passed on as soon as it has been received and, in a
// reduction, added: while one is reduced, the transport sends those before it and receives those behind it. The streams
// carry data alone, in an order that all ranks know; only an alltoall says how long its blocks are. Nothing is allocated
// once the channels are there and the buffers have grown.
//
// The algorithms, for n ranks and messages so long that latency does not count:
//
//	allreduce      ring    2(n-1) steps; each rank sends and receives 2(n-1)/n of the buffer
//	allreduce      direct  2 steps; the same bytes, on n-1 channels
//	reducescatter  ring    n-1 steps; each rank sends and receives (n-1)/n of the buffer
//	reducescatter  direct  1 step; the same bytes, on n-1 channels
//	allgather      ring    n-1 steps; each rank sends all blocks but one
//	broadcast      tree    ceil(log2 n) deep; the root sends ceil(log2 n) times the buffer, the leaves nothing
//	alltoall       direct  1 step; each rank sends all blocks but its own, and 8 bytes before each
//	adasum         halving-doubling: log2 n halvings and as many doublings; each rank sends 2(n-1)/n of the buffer
//
// # Order of additions
//
// Floating-point addition is not associative. Every algorithm gives all ranks the same bits. In a ring, which rank the
// sum of an element begins with depends on its place in the buffer, so on what it was fused with; direct adds in the
// order of the ranks, whatever the place. Plan chooses direct for sums and products of floats if Config.Deterministic
// says so, and always for those of halves: these are widened to float32, reduced, and rounded once, where a ring would
// round at every rank.
//
// # Adasum
//
// The adaptive sum of two vectors a and b (Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020)
// is
//
//	(1 - a·b/(2 a·a)) a + (1 - a·b/(2 b·b)) b
//
// It adds what is orthogonal and averages what is parallel. A factor is 1 where the squared norm below the fraction is
// less than the square root of the smallest normal float64, 2^-511 (Horovod's rule, ops/adasum/adasum.h). The products
// are computed in float64, and so is the combination, which is rounded once to the element type.
//
// It is commutative but not associative, so the tree is part of the result. Let x[i] be the vector of rank i of n, and p
// the largest power of two up to n. Written with + for the adaptive sum, a + b, the result is c[p, 0] of
//
//	c[1, i]  = x[i] + x[p+i]             for i < n-p
//	c[1, i]  = x[i]                      for n-p <= i < p
//	c[2d, i] = c[d, 2i] + c[d, 2i+1]     for d = 1, 2, 4 ... p/2 and i < p/2d
//
// For six ranks that is ((x[0]+x[4]) + (x[1]+x[5])) + (x[2]+x[3]). Every tensor of a fused buffer is combined by itself.
package tcp

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/tensor"
	"github.com/gohvd/gohvd/topo"
	"github.com/gohvd/gohvd/transport"
)

// DefaultSegmentBytes is the segment size unless a Config says otherwise.
const DefaultSegmentBytes = 256 << 10

// Config says how a Backend behaves. The zero value is the default.
type Config struct {
	// SegmentBytes is the size of a segment, rounded down to whole elements but to one at least. Larger segments cost
	// fewer calls, smaller ones stay in the processor's cache and fill the ring sooner. Ranks may differ. Default
	// 256 KiB.
	SegmentBytes int

	// Deterministic has Plan choose algorithms by which the result of an element depends on the ranks' values alone:
	// not on where in the buffer it lies, nor on how long that is. It costs channels from every rank to every other.
	// Adasum has but one algorithm: its last bits stay the same if its tensors are not fused. Default false.
	Deterministic bool
}

// Backend is the ops.Backend of one process set on one lane, which it has to itself.
//
// Whenever a method returns, with an error too, nothing reads or writes its buffers any more. Any error ends the
// backend: later calls fail with it, and the lane of this rank is aborted, which its peers take for silence. The
// error wraps what the transport said: a *transport.PeerError names the peer that failed, which is always a direct
// one. A rank that waits for a living peer learns of a death elsewhere when its lane is aborted. When the context of
// a call ends, the error wraps context.Cause.
type Backend struct {
	mesh  transport.Mesh
	lane  transport.Lane
	ranks []topo.Rank
	me    int

	segBytes      int
	deterministic bool
	conns         []transport.Conn // by rank of the set, nil until needed
	ctx           watch
	err           error // what ended the backend

	// What follows is kept because steady state allocates nothing. Each operation fills what it uses.
	parts   cut      // the ranks' parts of the buffer
	in      scratch  // received but not yet reduced
	ordered inOrder  // of direct reductions
	starts  []uint64 // where this operation began in the stream to each rank
	blocks  blocks   // of alltoall
	adasum  adasum
}

// New makes the backend of rank ranks[me] for the process set ranks, on a lane that nothing else uses. Channels are
// made when an operation first needs them, and kept.
func New(mesh transport.Mesh, lane transport.Lane, ranks []topo.Rank, me int, cfg Config) *Backend {
	n := len(ranks)
	b := &Backend{
		mesh: mesh, lane: lane, ranks: slices.Clone(ranks), me: me,
		segBytes: cfg.SegmentBytes, deterministic: cfg.Deterministic,
		conns:  make([]transport.Conn, n),
		parts:  make(cut, n+1),
		starts: make([]uint64, n),
		blocks: newBlocks(n),
	}
	if b.segBytes <= 0 {
		b.segBytes = DefaultSegmentBytes
	}
	b.ctx.abort = func(err error) { mesh.Abort(lane, err) }
	return b
}

// ID implements ops.Backend.
func (b *Backend) ID() message.Backend { return message.TCP }

// Plan implements ops.Backend. The size makes no difference.
func (b *Backend) Plan(r *message.Response, _ int64) (message.Algorithm, error) {
	switch r.Kind {
	case message.Allreduce, message.Reducescatter:
		return b.planReduction(r)
	case message.Allgather:
		return message.Ring, nil
	case message.Broadcast:
		return message.Tree, nil
	case message.Alltoall:
		return message.Direct, nil
	}
	return message.NoAlgorithm, fmt.Errorf("no method for %v", r.Kind)
}

// planReduction is Plan for what reduces. Where every order of additions gives the same bits, the ring will do.
func (b *Backend) planReduction(r *message.Response) (message.Algorithm, error) {
	dt := r.WireType()
	if err := tensor.CheckReduce(r.Op, dt); err != nil {
		return message.NoAlgorithm, err
	}
	switch op := r.Op.Base(); {
	case op == tensor.Adasum && r.Kind == message.Allreduce:
		return message.HalvingDoubling, nil
	case op == tensor.Adasum:
		return message.NoAlgorithm, fmt.Errorf("no method for %v by %v", r.Kind, op)
	case !dt.IsFloat() || op == tensor.Min || op == tensor.Max:
		return message.Ring, nil
	case dt.IsHalf() || b.deterministic:
		return message.Direct, nil
	}
	return message.Ring, nil
}

// run is the frame of every operation. The operation can be run by the algorithms known.
func (b *Backend) run(ctx context.Context, kind message.Kind, alg message.Algorithm, op func() error, known ...message.Algorithm) error {
	if b.err != nil {
		return fmt.Errorf("ops/tcp: %v %v: after a failure: %w", kind, alg, b.err)
	}
	err := b.ctx.begin(ctx)
	if err == nil && !slices.Contains(known, alg) {
		err = fmt.Errorf("got algorithm %v, want %s", alg, list(known))
	}
	if err == nil {
		err = op()
	}
	if err = b.ctx.end(err); err == nil {
		return nil
	}
	b.err = fmt.Errorf("ops/tcp: %v %v: %w", kind, alg, err)
	// The streams have lost their position. Once the lane is aborted Flush no longer waits for peers, but only until
	// the channel holds no buffer; it fails with an error that adds nothing.
	b.mesh.Abort(b.lane, b.err)
	for _, c := range b.conns {
		if c != nil {
			_ = c.Flush()
		}
	}
	return b.err
}

// list is "x or y".
func list(algs []message.Algorithm) string {
	var names []string
	for _, a := range algs {
		names = append(names, a.String())
	}
	return strings.Join(names, " or ")
}
