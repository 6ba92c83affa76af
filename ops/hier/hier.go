// Package hier runs collectives of process sets with members on several hosts, on two levels. It composes two
// other backends: the inner one connects the members on one host (shared memory), and the outer one connects
// hosts (TCP). Data crosses the network between hosts as seldom as possible, and the members of a host share
// the work between hosts.
//
// Let h be the number of hosts of the members, and k the smallest number of members on one of these hosts.
// The first k members of each host are its owners. A buffer is cut into k slices, and owner i of each host
// owns slice i. The owners of a slice, one on each host, exchange it through an outer backend of their own.
// Members that own no slice take part only in the inner operations. A slice has a piece for each host. For a
// buffer of B bytes:
//
//	allreduce      reducescatter of the slices inside each host; reducescatter of the pieces of each slice
//	               between its owners, then allgather of the pieces; allgather of the slices inside each host.
//	               All ranks of a host together send 2(h-1)/h × B bytes to other hosts, or 3(h-1)/h × B
//	               bytes for 16-bit floats, whose sums are sent as float32.
//	reducescatter  the same up to the first outer operation; then an allgather of the host's own blocks inside
//	               each host. (h-1)/h × B bytes leave a host.
//	allgather      allgather of the host's own blocks inside each host; allgather of the pieces of each slice
//	               between its owners; allgather of the slices inside each host. A host sends its own blocks
//	               h-1 times, or passes on as many bytes of other hosts.
//	broadcast      broadcast inside the root's host; broadcast of each slice between its owners; allgather of
//	               the slices inside each other host. Each other host receives B bytes once.
//
// Alltoall and Adasum are refused, because two levels would send as many bytes. An alltoall sends no byte to
// another host twice. On one level, Adasum combines neighbours first. If the members of each host are
// consecutive and their number is the same power of two, they then share the work between hosts, and a host
// sends 2(h-1)/h × B bytes. Adding the members of a host and combining only the sums of the hosts, as Horovod
// does on GPUs, gives another result. All kinds of operations that are not listed above are refused too.
//
// An allreduce is cut into chunks, and the levels work at the same time: while a chunk is exchanged between
// the hosts, the next chunk is reduced inside each host, and the previous one is gathered.
//
// For a small allreduce the number of steps counts. If there is only one chunk, and the outer backend plans
// recursive doubling for a slice, the owners allreduce the slice: one step between two hosts instead of two.
// If that sends more bytes, it is only for buffers of at most 32 KiB. In an allreduce or a broadcast, such a
// buffer is not cut: it is the last piece of the last slice.
//
// # Order of additions
//
// The members of a host are added in the order of the ranks, and then the sums of the hosts, in an order that
// depends on the position of the element in the buffer. All ranks get the same bits. Sums and products of
// 16-bit floats are computed in float32 on both levels and rounded once. In deterministic mode, reductions
// are refused, because the result must depend only on the values of the ranks, not on their hosts.
package hier

import (
	"context"
	"errors"
	"fmt"

	"github.com/gohvd/gohvd/fusion"
	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/ops"
)

// Config configures a Backend. All ranks must have the same values.
type Config struct {
	// Groups has for each rank of the job the lowest rank with which it shares memory
	// (transport/shm.Sharer.Groups). Ranks with the same entry are on one host.
	Groups []topo.Rank
	// Inner is the backend among the members of a set on one host. Outer is the backend among the owners of a
	// slice. Both must run reducescatter, allgather and broadcast. They must not share a lane.
	Inner, Outer ops.Registration
	// Kinds has the kinds of operations that may run on two levels.
	Kinds [message.NumKinds]bool
	// Deterministic forbids reductions.
	Deterministic bool
	// ChunkBytes is the size of the chunks of an allreduce. While a chunk is exchanged between hosts, other
	// chunks are reduced and gathered inside the hosts. Smaller chunks leave less time in which the network
	// is idle, but need more operations. Default 2 MiB.
	ChunkBytes int
}

const defaultChunkBytes = 2 << 20

// Backend is the ops.Backend of one process set.
//
// An allreduce of 16-bit floats needs memory for its buffer in float32, and a reducescatter and an allgather
// need memory for a copy of their buffers. The backend keeps this memory for later operations.
//
// Any error ends the backend. The error wraps the error of the inner or outer backend, which names the peer
// if a peer has failed.
type Backend struct {
	me int
	// chunkBytes is Config.ChunkBytes or its default.
	chunkBytes int
	place      place
	inner      level
	outer      level // has no backend at a member that owns no slice

	err    error         // the error that ended the backend, or nil
	op     ops.Operation // the operation in progress
	root   int           // in a broadcast, the index of the root's host
	stages []stage       // the stages that were not begun
	active bool          // an operation is in progress

	// The fields below describe the operation in progress. They are kept so that an operation allocates
	// nothing.
	ends          []int64          // where the pieces end in buf: see piece
	begins        []int64          // where the blocks of each host begin and end in op.Buf
	response      message.Response // describes a stage to Plan
	wide          bool             // reduce 16-bit floats as float32
	pipeline      []stage          // the stages of an allreduce
	chunks        int              // the number of chunks of an allreduce; 0 in other operations
	all, allWork  []byte           // buf and work of all chunks
	whole         [1]ops.Tensor    // the slice of the current chunk, if the outer level allreduces it
	doubled       bool             // the outer level allreduces the slice of the current chunk
	buf           []byte           // the slices of the result of the current chunk
	work          []byte           // the slices of the chunk that are reduced; may be the same as buf
	gathered      fusion.Buffer    // memory for buf
	packed        fusion.Buffer    // memory for work
	dt            tensor.DType     // the type of widen and narrow
	widen, narrow kernel.ConvertFunc
}

// level is one of the two levels: a backend and the ranks that it connects.
type level struct {
	backend ops.Backend
	plan    ops.Planner
	ranks   []topo.Rank
	running bool    // an operation of the level is in progress
	counts  []int64 // sizes of the blocks of this operation
}

// step runs a step of the level's operation.
func (l *level) step(ctx context.Context, wait bool) (ops.Progress, error) {
	p, err := l.backend.Step(ctx, wait)
	if err != nil || p == ops.Finished {
		l.running = false
	}
	return p, err
}

// Register returns the Registration of the backend.
func Register(cfg Config) ops.Registration {
	p := &planner{cfg: &cfg, census: make(census, len(cfg.Groups))}
	return ops.Registration{ID: message.Hier, Plan: p.plan,
		New: func(set topo.ProcessSetID, ranks []topo.Rank, me int) (ops.Backend, error) {
			return newBackend(&cfg, p.count(ranks).refusal() == nil, set, ranks, me)
		}}
}

// newBackend makes the backend of a process set. If levels is false, the set cannot run on two levels, and
// the backend has none.
func newBackend(cfg *Config, levels bool, set topo.ProcessSetID, ranks []topo.Rank,
	me int) (_ *Backend, err error) {
	b := &Backend{me: me, chunkBytes: cfg.ChunkBytes}
	if b.chunkBytes <= 0 {
		b.chunkBytes = defaultChunkBytes
	}
	if !levels {
		return b, nil
	}
	p := newPlace(cfg.Groups, ranks, me)
	b.place = p
	b.ends, b.begins = make([]int64, p.slices*len(p.hosts)), make([]int64, len(p.hosts)+1)
	b.inner.counts, b.outer.counts = make([]int64, len(p.hosts[p.host])), make([]int64, len(p.hosts))
	b.inner.ranks = pick(ranks, p.hosts[p.host])
	b.inner.plan, b.outer.plan = cfg.Inner.Plan, cfg.Outer.Plan
	if b.inner.backend, err = cfg.Inner.New(set, b.inner.ranks, p.local); err != nil || !p.owns() {
		return b, err
	}
	for _, members := range p.hosts {
		b.outer.ranks = append(b.outer.ranks, ranks[members[p.local]])
	}
	if b.outer.backend, err = cfg.Outer.New(set, b.outer.ranks, p.host); err != nil {
		b.inner.backend.Close()
	}
	return b, err
}

// pick returns the elements of ranks at the given positions.
func pick(ranks []topo.Rank, positions []int) (picked []topo.Rank) {
	for _, i := range positions {
		picked = append(picked, ranks[i])
	}
	return picked
}

// Start implements ops.Backend.
func (b *Backend) Start(op ops.Operation) error {
	switch {
	case b.err != nil:
		return fmt.Errorf("ops/hier: %v: the backend has failed before: %w", op.Kind, b.err)
	case b.active:
		return b.fail(errors.New("Start was called for another operation before this one had finished"))
	}
	b.op, b.active = op, true
	if op.Algorithm != message.TwoLevel {
		return b.fail(fmt.Errorf("got algorithm %v, want %v", op.Algorithm, message.TwoLevel))
	}
	if b.inner.backend == nil {
		return b.fail(errOneLevel)
	}
	if err := b.begin(); err != nil {
		return b.fail(err)
	}
	return nil
}

// starts has the functions that cut the buffer of an operation into slices and list its stages, for each kind
// of operation that the backend supports.
var starts = [message.NumKinds]func(*Backend) error{
	message.Allreduce:     (*Backend).beginAllreduce,
	message.Reducescatter: (*Backend).beginReducescatter,
	message.Allgather:     (*Backend).beginAllgather,
	message.Broadcast:     (*Backend).beginBroadcast,
}

// begin cuts the buffer of the operation into slices and begins the first stages.
func (b *Backend) begin() error {
	b.chunks = 0
	start := starts[b.op.Kind]
	if start == nil {
		return errUnsupported
	}
	if err := start(b); err != nil {
		return err
	}
	return b.advance()
}

// advance begins stages until the next one has to wait for a level.
func (b *Backend) advance() error {
	for len(b.stages) > 0 {
		next := b.stages[0]
		if b.inner.running && next.after&innerLevel != 0 || b.outer.running && next.after&outerLevel != 0 {
			break
		}
		b.stages = b.stages[1:]
		b.selectChunk(next.chunk)
		if err := next.begin(b); err != nil {
			return err
		}
	}
	return nil
}

// Step implements ops.Backend.
func (b *Backend) Step(ctx context.Context, wait bool) (ops.Progress, error) {
	switch {
	case b.err != nil:
		return ops.Waiting, fmt.Errorf("ops/hier: step of a backend that has failed before: %w", b.err)
	case !b.active:
		return ops.Waiting, errors.New("ops/hier: Step was called without an operation in progress")
	}
	p, err := b.stepLevels(ctx, wait)
	if err == nil && p == ops.Finished {
		p, err = ops.Moving, b.advance()
	}
	switch {
	case err != nil:
		return ops.Waiting, b.fail(err)
	case b.inner.running || b.outer.running:
		return p, nil
	}
	b.op, b.active = ops.Operation{}, false
	b.drop()
	return ops.Finished, nil
}

// stepLevels runs a step of each level that has an operation in progress. It returns Finished if one of these
// operations has finished, or if there is none.
//
// If both levels have an operation and may wait, stepLevels waits for the inner one. This cannot deadlock:
// all ranks wait for their operations in the same order, because each operation of the inner level begins
// after and ends before the same operations of the outer level at every rank. So the ranks that wait for the
// earliest operation make progress.
func (b *Backend) stepLevels(ctx context.Context, wait bool) (ops.Progress, error) {
	switch {
	case b.inner.running && b.outer.running:
	case b.inner.running:
		return b.inner.step(ctx, wait)
	case b.outer.running:
		return b.outer.step(ctx, wait)
	default:
		return ops.Finished, nil
	}
	outer, err := b.outer.step(ctx, false)
	if err != nil {
		return ops.Waiting, err
	}
	// Waiting is less than Blocked, Moving and Finished.
	inner, err := b.inner.step(ctx, wait && outer <= ops.Blocked)
	return max(inner, outer), err
}

// fail ends the backend because the current operation has failed with err. It returns err with the kind of
// the operation, for the caller. If the other level has an operation in progress, fail makes this level
// abandon it, because the buffers of the operation belong to the caller again.
func (b *Backend) fail(err error) error {
	b.err = fmt.Errorf("ops/hier: %v: %w", b.op.Kind, err)
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(b.err)
	for _, l := range []*level{&b.inner, &b.outer} {
		for l.running {
			_, _ = l.step(ctx, true) // fails with b.err, unless the operation has just finished
		}
	}
	b.op = ops.Operation{}
	b.drop()
	return b.err
}

// drop drops the references to the buffers of the operation.
func (b *Backend) drop() {
	b.all, b.allWork, b.buf, b.work = nil, nil, nil, nil
	b.whole[0] = ops.Tensor{}
}

// Close implements ops.Backend.
func (b *Backend) Close() {
	for _, l := range []*level{&b.inner, &b.outer} {
		if l.backend != nil {
			l.backend.Close()
		}
	}
}
