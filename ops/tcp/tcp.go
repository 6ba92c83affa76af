// Package tcp runs collectives over the byte channels of a transport.Mesh. With the TCP mesh it works between
// any two hosts. It also runs on any other mesh.
//
// Every collective is cut into segments. A rank passes a segment on as soon as it has received the segment
// and, in a reduction, added its own values. So while a rank reduces one segment, the transport sends the
// segments before it and receives the segments after it. The streams carry only data, in an order that all
// ranks know. The only exception is an alltoall, which also sends the lengths of its blocks. Once the
// channels exist and the buffers have grown, an operation allocates nothing.
//
// An algorithm is a function that appends actions to a schedule: the methods send, receive and compute only
// say what this rank will do, in this order. The calls of Step do it.
//
// These are the algorithms for n ranks and a buffer of B bytes, and what a rank sends. L is log2 n, rounded
// up:
//
//	allreduce      ring                2(n-1) steps, 2(n-1)/n B
//	allreduce      direct              2 steps, 2(n-1)/n B, on n-1 channels
//	allreduce      halving-doubling    2L steps, 2(n-1)/n B; 2 steps and B more if n is not a power of two
//	allreduce      recursive-doubling  L steps, L B; the same if n is not a power of two
//	allreduce      exchange            1 step, (n-1) B, on n-1 channels
//	reducescatter  ring                n-1 steps, (n-1)/n B
//	reducescatter  direct              1 step, (n-1)/n B, on n-1 channels
//	reduce         direct              1 step, B, if the root receives at most 64 KiB; otherwise 2 steps, B
//	allgather      ring                n-1 steps, all blocks but one
//	allgather      bruck               L steps, all blocks but one
//	broadcast      tree                L deep; the root sends L B, the leaves nothing
//	broadcast      chain               n-1 deep; B
//	alltoall       direct              1 step, all blocks but its own, and 8 bytes before each, on n-1 channels
//	alltoall       bruck               L steps for the lengths of the blocks, 8 bytes through L/2 ranks; then
//	                                   the same for blocks of at most 2 KiB, or 1 step as in direct
//	gather         direct              as alltoall, but blocks are sent only to the root
//	scatter        direct              as alltoall, but blocks are sent only by the root
//	adasum         halving-doubling    see beginAdasum
//
// A Table chooses between them by the number of ranks and bytes.
//
// # Order of additions
//
// Floating-point addition is not associative. Every algorithm gives all ranks the same bits. In a ring, the
// position of an element in the buffer decides with which rank its sum begins. So the result depends on the
// tensors that are fused with it. With recursive doubling and halving-doubling the sum is computed in the
// same tree at every position. Direct and exchange add in the order of the ranks at every position, convert
// half-precision types to float32 before, and round once at the end. So Plan chooses only between direct and
// exchange for sums and products over three or more ranks of half-precision types and, if
// Config.Deterministic is set, of all floats. Over two ranks there is only one order, and every algorithm
// rounds once.
package tcp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/inorder"
)

// DefaultSegmentBytes is the default of Config.SegmentBytes.
const DefaultSegmentBytes = 1 << 20

// Config configures a Backend. If a field is zero, its default applies.
type Config struct {
	// SegmentBytes is the size of a segment. It is rounded down to whole elements, but to at least one
	// element. Larger segments need fewer calls. Smaller segments stay in the processor's cache and let the
	// next rank start sooner. All ranks must use the same size, because it decides the order of the data in
	// an allreduce by Ring and in reductions by Direct. If SegmentBytes is 0 or less, it is 1 MiB. An
	// operation may have another size.
	SegmentBytes int

	// Deterministic makes Plan choose only algorithms whose result for an element depends only on the ranks'
	// values for the element. In particular it does not depend on the position of the element in the buffer
	// or on the length of the buffer. Over three or more ranks, these algorithms need channels from every
	// rank to every other rank.
	// Deterministic does not change Adasum, which has only one algorithm: the last bits of an Adasum are
	// reproducible only if its tensors are not fused. Default false.
	Deterministic bool

	// Oversubscribed says that the host has more ranks than cores, so that ranks must share cores. Default
	// false.
	Oversubscribed bool

	// Table chooses the algorithms of operations. All ranks use the algorithms that rank 0 chooses, so the
	// other ranks need it only for Within. If it is nil, DefaultTable applies, as in every job.
	Table Table

	// Forced has algorithms that Plan chooses whatever the table says. Plan returns an error for an operation
	// that the forced algorithm cannot serve.
	Forced Forced
}

// Backend is the ops.Backend of one process set. It has a lane of its own.
//
// Any error ends the backend. Later calls fail with the same error, and the backend aborts its lane, so that
// its peers receive nothing more from this rank. The error wraps the error of the transport. If a peer with
// which this rank exchanges data has failed, the transport's error is a *transport.PeerError that names the
// peer. If another rank fails while this rank waits for a living peer, this rank learns of the failure only
// when its lane is aborted. If the context of a step ends, the error wraps context.Cause.
type Backend struct {
	ranks []topo.Rank
	me    int

	defaultSegment int // the segment size in bytes of operations that do not have one
	watch          watch
	err            error // the error that ended the backend, or nil

	op      ops.Operation // the operation in progress
	started bool          // an operation is in progress
	steps   schedule      // the rest of what this rank does in it

	// The fields below are kept from one operation to the next so that an operation allocates nothing. Each
	// operation sets the fields that it uses, and makes those that no operation has used before.
	parts   cut     // the ranks' parts of the buffer
	in      scratch // data that was received and is not yet reduced
	reducer inorder.Reducer
	sources [][]byte      // for each rank, its contribution to what reducer reduces
	list    tensorList    // the tensors of a reduction
	reduce  kernel.Func   // the reduction of two contributions
	share   int           // the ranks that get the results of direct, other than the one that reduces
	buf     [1]ops.Tensor // the tensors of a reducescatter
	// sent has the stream positions at which the parts of two chunks of an allreduce by Ring end
	// (ringChunk.sent), or for each rank the positions at which the segments of two rounds of direct end.
	sent     [2][]uint64
	alltoall alltoall
	adasum   adasumState
}

// New makes the backend for the process set whose members are ranks, which the caller does not change
// afterwards. This rank is ranks[me]. Nothing else may use the lane. New makes no channels and no lists with
// an entry for each rank: an operation makes those that it needs, and the backend keeps them.
func New(mesh transport.Mesh, lane transport.Lane, ranks []topo.Rank, me int, cfg Config) *Backend {
	b := &Backend{ranks: ranks, me: me, defaultSegment: cfg.SegmentBytes}
	b.steps = schedule{
		owner: b, mesh: mesh, lane: lane, ranks: b.ranks, me: me,
		yielder: shmem.Yielder{Stay: cfg.Oversubscribed},
	}
	b.alltoall = alltoall{op: &b.op, steps: &b.steps}
	if b.defaultSegment <= 0 {
		b.defaultSegment = DefaultSegmentBytes
	}
	b.watch.abort = func(err error) { mesh.Abort(lane, err) }
	return b
}

// Register returns the Registration of the backend for an ops.Registry.
func Register(mesh transport.Mesh, cfg Config) ops.Registration {
	return ops.Registration{ID: message.TCP,
		Plan:  newPlanner(cfg).plan,
		Lists: takesLists,
		New: func(set topo.ProcessSetID, ranks []topo.Rank, me int) (ops.Backend, error) {
			return New(mesh, transport.DataLane(set), ranks, me, cfg), nil
		}}
}

// Within returns the Registration of a backend which another backend of the process set uses. It uses the
// lane that the function lane returns, because the backend that Register returns has the set's DataLane. Each
// rank plans the operations itself, so cfg.Table must be the same at all ranks. cfg.Forced does not apply.
func Within(mesh transport.Mesh, lane func(topo.ProcessSetID) transport.Lane, cfg Config) ops.Registration {
	cfg.Forced = nil
	r := Register(mesh, cfg)
	r.New = func(set topo.ProcessSetID, ranks []topo.Rank, me int) (ops.Backend, error) {
		return New(mesh, lane(set), ranks, me, cfg), nil
	}
	return r
}

// Start implements ops.Backend.
func (b *Backend) Start(op ops.Operation) error {
	switch {
	case b.err != nil:
		return fmt.Errorf("ops/tcp: %v %v: the backend has failed before: %w", op.Kind, op.Algorithm, b.err)
	case b.started:
		return b.fail(errors.New("Start was called for another operation before this one had finished"))
	}
	b.op, b.started = op, true
	if b.steps.conns == nil {
		b.steps.conns, b.parts = make([]*stream, len(b.ranks)), make(cut, len(b.ranks)+1)
	}
	b.steps.begin(cmp.Or(max(op.SegmentBytes, 0), b.defaultSegment))
	if err := b.begin(); err != nil {
		return b.fail(err)
	}
	return nil
}

// Step implements ops.Backend.
func (b *Backend) Step(ctx context.Context, wait bool) (p ops.Progress, err error) {
	switch {
	case b.err != nil:
		return ops.Waiting, fmt.Errorf("ops/tcp: Step was called for a backend that has failed before: %w",
			b.err)
	case !b.started:
		return ops.Waiting, errors.New("ops/tcp: Step was called without an operation in progress")
	}
	if wait {
		b.steps.ctx = ctx
		if err = b.watch.begin(ctx); err == nil {
			p, err = b.steps.advance()
		}
		err = b.watch.end(err)
	} else {
		b.steps.ctx = nil
		p, err = b.steps.advance()
	}
	if err != nil {
		return ops.Waiting, b.fail(err)
	}
	if p == ops.Finished {
		b.started = false
		b.drop()
	}
	return p, nil
}

// drop ends the list of tensors, and drops the references to the buffers of the operation.
func (b *Backend) drop() {
	b.list.end()
	b.steps.dropActions()
	b.steps.ctx = nil
	clear(b.sources)
	b.op, b.buf, b.alltoall.blocks.out = ops.Operation{}, [1]ops.Tensor{}, nil
}

// fail ends the backend because the current operation has failed with err. It returns err with the kind and
// the algorithm of the operation, for the caller.
func (b *Backend) fail(err error) error {
	b.err = fmt.Errorf("ops/tcp: %v %v: %w", b.op.Kind, b.op.Algorithm, err)
	b.Close()
	b.steps.abort(b.err)
	b.drop()
	return b.err
}

// Close implements ops.Backend.
func (b *Backend) Close() { b.watch.close() }

// begin checks the operation and begins its schedule. If a single rank or an empty buffer needs no action,
// the schedule stays empty.
func (b *Backend) begin() error {
	switch kind := b.op.Kind; {
	case kind == message.Allreduce && b.op.Op == tensor.Adasum:
		return b.beginAdasum()
	case kind == message.Allreduce:
		return b.beginAllreduce()
	case kind == message.Reduce:
		return b.beginReduce()
	case kind == message.Reducescatter:
		return b.beginReducescatter()
	case kind == message.Allgather:
		return b.beginAllgather()
	case kind == message.Broadcast:
		return b.beginBroadcast()
	case kind.SendsRows():
		if err := b.by(algorithms[kind]...); err != nil {
			return err
		}
		return b.alltoall.begin()
	default:
		return fmt.Errorf("%v is not supported", kind)
	}
}

// by checks the operation's algorithm. It returns an error if the algorithm is not in known.
func (b *Backend) by(known ...message.Algorithm) error {
	if !slices.Contains(known, b.op.Algorithm) {
		return fmt.Errorf("got algorithm %v, want %s", b.op.Algorithm, list(known))
	}
	return nil
}

// tensor returns the buffer of an allreduce or of a reduce. It returns an error if the operation does not
// have exactly one tensor.
func (b *Backend) tensor() ([]byte, error) {
	if n := len(b.op.Tensors); n != 1 {
		return nil, fmt.Errorf("got %d tensors, want 1", n)
	}
	return b.op.Tensors[0].Out, nil
}

// list formats the names of algs with " or " between them.
func list(algs []message.Algorithm) string {
	var names []string
	for _, a := range algs {
		names = append(names, a.String())
	}
	return strings.Join(names, " or ")
}
