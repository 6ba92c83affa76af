// Package shm runs collectives between the ranks of one host, which map each other's memory.
//
// Every rank has a segment for each lane, and may have tensors in arenas. A rank reads the segments and
// arenas of its peers but writes only its own. So a rank that is late, stopped or broken corrupts no other
// rank. Peers cannot read ordinary memory in place. So data in ordinary memory is copied through the staging
// area of its owner's segment, in steps that fit into the caches. There is no fusion buffer.
//
// A reduction cuts the buffer into as many blocks as there are ranks. The owner of a block reads it from all
// other ranks and reduces it, and the other ranks copy the result. If a buffer of B bytes is reduced in place
// at n ranks, the traffic of main memory is at least
//
//	from arenas             nB read, nB written
//	from ordinary memory    nB read, nB written; the staging areas stay in the caches
//
// Sending the parts to their owners, or using a fusion buffer, would cost at least half as much again.
// Contributions are always reduced in the order of the ranks. So the result of an element depends only on the
// values of the ranks, and the deterministic mode costs nothing, except that Adasum is refused in it.
//
// Small operations take another path: each rank writes its whole contribution and the number of the operation
// to its segment, and every rank reduces all contributions.
//
// An Adasum combines the vectors of the ranks in the same tree as in every other backend (package
// ops/adasum). adasumState describes its steps.
//
// A rank that waits spins for a short while, then yields the core, then sleeps on a futex. If there are more
// ranks than cores, it yields almost at once. docs/execution.md has the rules for shared memory.
package shm

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/inorder"
)

// DefaultStageBytes is the default of Config.StageBytes.
const DefaultStageBytes = 512 << 10

const defaultDirectBytes = 4<<20 + 1

// Config configures a Backend. If a field is zero, its default applies.
type Config struct {
	// StageBytes is the size of a stage: the number of bytes that a rank stages in a step. It is rounded down
	// so that a stage has the same number of whole cache lines for each member of the set, and at least one
	// for each member. All ranks must use the same value. Larger stages need fewer rounds but more cache.
	// Default 512 KiB.
	StageBytes int64

	// SmallBytes is the largest size of a small operation, in which every rank reduces all contributions. The
	// size is the number of bytes that a rank reads from all other ranks together. All ranks must use the
	// same value. Default and maximum 64 KiB.
	//
	// DirectBytes is the smallest size of a reduction that reads tensors in arenas in place. Smaller
	// reductions copy the tensors first, because a reduction in place overwrites memory that the peers have
	// just read. Writing to cache lines that other processors hold costs more than the copy, unless the data
	// is so large that it has left their caches. Between two ranks whose cores share a cache, an allreduce of
	// 2 MiB took 107 us in place and 93 us with the copy, and one of 4 MiB as long as the other. Between
	// cores that do not, 4 MiB took 1010 us in place and 349 us with the copy. If Oversubscribed is set,
	// DirectBytes has no effect, and reductions of all sizes read in place. Default more than 4 MiB.
	SmallBytes, DirectBytes int64

	// Oversubscribed says that the host has more ranks than cores, so that a waiting rank must soon yield its
	// core.
	Oversubscribed bool

	// Groups has, for each rank of the job, the lowest rank with which it shares memory
	// (transport/shm.Sharer.Groups). Plan refuses process sets whose members do not all share memory. If
	// Groups is nil, all ranks of the job share memory.
	Groups []topo.Rank

	// Deterministic makes Plan refuse Adasum, because its last bits would depend on whether the ranks of a
	// set share memory.
	Deterministic bool
}

// Backend is the ops.Backend of one process set on one lane.
//
// Any error ends the backend: later calls fail with the same error. If the process of a peer is gone, the
// error wraps a *transport.PeerError that names the peer. If the context of a call ends, the error wraps
// context.Cause. A waiting call notices the end of its context within 20 ms.
type Backend struct {
	mem   transport.Memory
	lane  transport.Lane
	ranks []topo.Rank
	me    int
	find  func([]byte) (arena.Ref, bool) // mem.Find

	smallBytes     int64
	directBytes    int64
	spins, yields  int
	oversubscribed bool
	yielder        shmem.Yielder
	stager         stager

	ctx     context.Context // the context of the running step
	err     error           // the error that ended the backend, or nil
	segment []byte          // this rank's segment; nil before the first operation
	peers   []peer          // indexed by rank of the set, including this rank
	// connected is set if the segments of all peers are mapped.
	connected bool
	// progress and parked are the words at progressAt and parkedAt of this rank's segment. memory.go
	// describes the layout of a segment.
	progress *uint64
	parked   *uint32

	op    ops.Operation // the operation in progress, or the running part of an Adasum
	kind  message.Kind  // the kind of the operation in progress
	state state
	// discards is set if the operation is a reduce whose root is another rank. The outputs are then not used.
	discards bool

	// rounds is the number of rounds of all operations before this one. All ranks have finished them or will
	// finish them without waiting for this rank.
	rounds     uint64
	smallCount uint64 // number of small operations that were started
	// smallTotal is the number of bytes of the small operation in progress.
	smallTotal int64
	running    running // the exchange or alltoall in progress
	stage      int     // number of steps that were staged in the operations before this one
	turn       int     // index of the table that this operation uses, 0 or 1
	// ringPos is the offset in the ring at which the data of the running small operation begins. The data of
	// the next small operation will begin at offset ringEnd.
	ringPos, ringEnd int64

	// The fields below are kept from one operation to the next so that an operation allocates nothing.
	own        own
	one        [1]ops.Tensor
	three      [3]ops.Tensor
	layouts    []layout // indexed by rank of the set
	sources    [][]byte
	plan       plan
	blocks     blocks
	reducer    inorder.Reducer
	adasum     adasumState
	scratch    []byte                          // the result of a small operation of several tensors
	chunk      func(id uint32) ([]byte, error) // maps an arena chunk of member chunkOwner
	chunkOwner int
}

// peer has a member's segment and pointers to the words in it that this rank reads.
type peer struct {
	segment  []byte
	progress *uint64
	abort    *uint32
	parked   *uint32
}

// New returns the backend for the process set whose members are ranks, which the caller does not change
// afterwards. This rank is ranks[me]. All ranks of the set must share memory, and no other Backend may use
// the lane. Open or the first operation makes this rank's segment and the lists with an entry for each rank:
// a job has a Backend for each set, also for those whose members are on several hosts.
func New(mem transport.Memory, lane transport.Lane, ranks []topo.Rank, me int, cfg Config) *Backend {
	b := &Backend{
		mem: mem, lane: lane, ranks: ranks, me: me, find: mem.Find,
		smallBytes: cfg.SmallBytes, directBytes: cfg.DirectBytes,
		spins: spins, yields: yields, plan: plan{stageBytes: cfg.stage(len(ranks))},
	}
	if b.smallBytes <= 0 || b.smallBytes > smallBytes {
		b.smallBytes = smallBytes
	}
	if b.directBytes <= 0 {
		b.directBytes = defaultDirectBytes
	}
	if cfg.Oversubscribed {
		b.spins, b.yields, b.oversubscribed = oversubscribedSpins, oversubscribedYields, true
		b.yielder.Stay = true
	}
	b.chunk = func(id uint32) ([]byte, error) { return b.mem.Arena(b.ctx, b.ranks[b.chunkOwner], id) }
	return b
}

// SegmentBytes returns the size of the segment that the backend shares.
func (b *Backend) SegmentBytes() int64 { return segmentBytes(b.plan.stageBytes) }

// SegmentBytes returns the size of the segment that each of n ranks shares with the configuration cfg.
func SegmentBytes(n int, cfg Config) int64 { return segmentBytes(cfg.stage(n)) }

// stage returns the size of a stage for a set of n ranks.
func (cfg *Config) stage(n int) int64 {
	bytes := cfg.StageBytes
	if bytes <= 0 {
		bytes = DefaultStageBytes
	}
	return max(bytes/int64(n*lineBytes), 1) * int64(n*lineBytes)
}

// Register returns the Registration of the backend. If the members of the global process set share memory,
// they share their segments when the backend of the set is made, before any operation. Every other set shares
// its segments with its first operation, because it may never run an operation on this backend.
func Register(mem transport.Memory, cfg Config) ops.Registration {
	return ops.Registration{ID: message.SHM, Plan: cfg.plan, Lists: ops.Always,
		New: func(set topo.ProcessSetID, ranks []topo.Rank, me int) (ops.Backend, error) {
			b := New(mem, transport.DataLane(set), ranks, me, cfg)
			if set == topo.Global && len(ranks) > 1 && together(cfg.Groups, ranks) {
				if err := b.Open(); err != nil {
					return nil, err
				}
			}
			return b, nil
		}}
}

// together reports whether the given ranks share memory with each other.
func together(groups, ranks []topo.Rank) bool {
	return groups == nil || !slices.ContainsFunc(ranks, func(r topo.Rank) bool {
		return groups[r] != groups[ranks[0]]
	})
}

// Open makes and shares this rank's segment, so that the first operation need not do it.
func (b *Backend) Open() error {
	if b.segment != nil {
		return nil
	}
	b.makeLists()
	others := slices.Delete(slices.Clone(b.ranks), b.me, b.me+1)
	segment, err := b.mem.Share(b.lane, b.SegmentBytes(), others)
	if err != nil {
		return fmt.Errorf("ops/shm: share memory for lane %d: %w", b.lane, err)
	}
	b.segment = segment
	b.progress, b.parked = word(segment, progressAt), flag(segment, parkedAt)
	b.peers[b.me] = peerOf(segment)
	return nil
}

// makeLists makes the lists with an entry for each rank, unless they exist.
func (b *Backend) makeLists() {
	if n := len(b.ranks); b.peers == nil {
		b.peers, b.layouts, b.sources = make([]peer, n), make([]layout, n), make([][]byte, n)
		b.plan.ends = make([]int64, n)
	}
}

func peerOf(segment []byte) peer {
	return peer{segment: segment, progress: word(segment, progressAt), abort: flag(segment, abortAt),
		parked: flag(segment, parkedAt)}
}

// connect shares this rank's segment and maps the segments of all members.
func (b *Backend) connect() error {
	if err := b.Open(); err != nil {
		return err
	}
	for i := range b.peers {
		if b.peers[i].segment != nil {
			continue
		}
		segment, err := b.mem.Peer(b.ctx, b.lane, b.ranks[i])
		if err != nil {
			return err
		}
		if int64(len(segment)) < b.SegmentBytes() {
			return b.peerError(i, fmt.Errorf("got a segment of %d bytes, want at least %d", len(segment),
				b.SegmentBytes()))
		}
		b.peers[i] = peerOf(segment)
	}
	b.connected = true
	return nil
}

// peerError returns err as a *transport.PeerError for member i. If err already wraps a PeerError, it returns
// err.
func (b *Backend) peerError(i int, err error) error {
	var p *transport.PeerError
	if errors.As(err, &p) {
		return err
	}
	return &transport.PeerError{Peer: b.ranks[i], Lane: b.lane, Err: err}
}

// errGivenUp reports that a peer has abandoned the operation. The peer may have changed its buffers while
// this rank read them.
var errGivenUp = errors.New("the peer abandoned the operation")

// errApart and errAdasum are variables so that a refusal allocates nothing: the coordinator plans every
// grant.
var (
	errApart  = errors.New("the members of the process set do not all share memory")
	errAdasum = errors.New("in deterministic mode, the bits of an adasum must not depend on the hosts of the ranks")
)

// plan implements ops.Planner. The algorithm is always direct: the owner of a block reads the block from all
// other ranks.
func (cfg Config) plan(members []topo.Rank, r *message.Response, _ int64,
	_ *message.Tuning) (message.Algorithm, error) {
	if !together(cfg.Groups, members) {
		return message.NoAlgorithm, errApart
	}
	switch r.Kind {
	case message.Allreduce, message.Reduce, message.Reducescatter:
		if r.Kind != message.Allreduce && r.Op.Base() == tensor.Adasum {
			return message.NoAlgorithm, fmt.Errorf("%v with %v is not supported", r.Kind, r.Op)
		}
		if cfg.Deterministic && r.Op.Base() == tensor.Adasum {
			return message.NoAlgorithm, errAdasum
		}
		if err := tensor.CheckReduce(r.Op, r.WireType()); err != nil {
			return message.NoAlgorithm, err
		}
		return message.Direct, nil
	case message.Allgather, message.Broadcast, message.Alltoall, message.Gather, message.Scatter:
		return message.Direct, nil
	}
	return message.NoAlgorithm, fmt.Errorf("%v is not supported", r.Kind)
}

// fail ends the backend and returns the error for the operation. If the backend has already ended, the
// returned error wraps the error that ended it.
func (b *Backend) fail(kind message.Kind, err error) error {
	if b.err != nil {
		return fmt.Errorf("ops/shm: %v: the backend has failed before: %w", kind, b.err)
	}
	b.forget()
	b.err = fmt.Errorf("ops/shm: %v: %w", kind, err)
	if b.segment != nil {
		shmem.Store32(flag(b.segment, abortAt), 1)
		shmem.Fence() // so that peers see the abort word before the caller changes its buffers
	}
	return b.err
}

// forget drops the references to the tensors of an operation that has ended, so that the tensors can be
// garbage collected.
func (b *Backend) forget() {
	b.own.clear()
	clear(b.one[:])
	clear(b.three[:])
	clear(b.sources)
}

// single returns a list with one tensor, whose input and output are both the operation's buffer.
func (b *Backend) single() []ops.Tensor {
	b.one[0] = ops.Tensor{In: b.op.Buf, Out: b.op.Buf}
	return b.one[:]
}

// reduceSingle runs an allreduce in a set with one rank.
func (b *Backend) reduceSingle() {
	for _, t := range b.own.tensors {
		if &t.In[0] != &t.Out[0] {
			copy(t.Out, t.In)
		}
		b.reducer.ReduceOne(t.Out)
	}
}

func (b *Backend) planReducescatter() error {
	if err := b.plan.cut(b.op.Counts); err != nil {
		return err
	}
	if _, err := b.own.set(b.scattered()); err != nil {
		return err
	}
	if err := b.reducer.Prepare(b.op.Op, b.op.DType, b.op.Scaling, len(b.ranks)); err != nil {
		return err
	}
	if len(b.ranks) == 1 {
		b.reduceSingle()
	}
	b.plan.columns()
	b.plan.reduce, b.plan.pull = true, false
	return nil
}

// scattered returns the buffer of a reducescatter as tensors. This rank writes only its own block, whose
// result may be elsewhere. b.plan has been cut into the blocks.
func (b *Backend) scattered() []ops.Tensor {
	if b.op.Result == nil {
		return b.single()
	}
	end := b.plan.ends[b.me]
	begin := end - b.op.Counts[b.me]
	before, mine, after := b.op.Buf[:begin], b.op.Buf[begin:end], b.op.Buf[end:]
	b.three = [3]ops.Tensor{{In: before, Out: before}, {In: mine, Out: b.op.Result}, {In: after, Out: after}}
	return b.three[:]
}

func (b *Backend) planAllgather() error {
	if _, err := b.own.set(b.single()); err != nil {
		return err
	}
	if err := b.plan.cut(b.op.Counts); err != nil {
		return err
	}
	b.plan.pullOnly()
	return nil
}

func (b *Backend) planBroadcast() error {
	root := b.op.Root
	if err := b.op.CheckRoot(len(b.ranks)); err != nil {
		return err
	}
	if _, err := b.own.set(b.single()); err != nil {
		return err
	}
	for i := range b.plan.ends {
		b.plan.ends[i] = 0
		if i >= root {
			b.plan.ends[i] = int64(len(b.op.Buf))
		}
	}
	b.plan.pullOnly()
	return nil
}
