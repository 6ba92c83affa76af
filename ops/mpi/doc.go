// Package mpi runs collectives with MPI. It is built only with the tag mpi, because it needs a C compiler and
// an MPI library. Without the tag, Join returns ErrNotBuilt and nothing of MPI is in the program.
//
// All calls are nonblocking: Start begins an MPI operation, and Start and Step test a bounded number of times
// whether it has completed. So an operation whose peers are stopped ends when its context ends, and
// operations of several process sets cannot block each other. Each process set has a communicator of its own,
// which is made after New has returned. Operations wait for it.
//
//	operation      MPI
//	allreduce      MPI_Iallreduce in place, or MPI_Start if a small one is repeated
//	reduce         MPI_Ireduce in place
//	reducescatter  MPI_Ireduce_scatter in place
//	allgather      MPI_Iallgatherv in place
//	broadcast      MPI_Ibcast
//	alltoall       MPI_Ialltoall of the sizes of the blocks, then MPI_Isend and MPI_Irecv
//	gather         the same
//	scatter        the same
//
// The counts of MPI are of type int. An operation with more elements is cut into several calls, and above
// this limit a reducescatter is an allreduce and an allgather is a broadcast of each block.
//
// 16-bit floats are reduced in float32 and rounded once. Sums and products of 8- and 16-bit integers, and
// minima and maxima of unsigned integers and floats, are reductions of this package, because those of MPI
// libraries saturate, compare unsigned integers as signed ones, or do not say how they compare a NaN. MPI may
// add in any order. So this backend refuses sums and products of floats in deterministic mode.
//
// # Threads
//
// One goroutine, locked to its thread, initializes and finalizes MPI. If the MPI library allows calls from
// any thread, one at a time (MPI_THREAD_SERIALIZED), the goroutine that needs a call makes it itself.
// Otherwise it passes the call to the locked goroutine. HOROVOD_MPI_THREADS_DISABLE chooses the latter.
//
// The locked goroutine also makes and frees communicators. To make one, MPI blocks until all its members take
// part. Meanwhile no other call is made, and nothing waits for MPI except an operation.
//
// # Failures
//
// If the exchange of a block with a peer fails, the error is a *transport.PeerError. MPI does not tell which
// rank has failed in a collective. The error is then an *ops.UnknownRankError, and the negotiation finds out
// which rank it is, if it can.
//
// MPI cannot cancel a collective. After an operation or the job has failed, the library may still refer to
// the buffers of operations. So this package keeps these buffers in memory, and makes no further MPI call in
// this process.
package mpi

import (
	"context"
	"errors"

	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/ops"
)

// ErrNotBuilt reports that the program was built without MPI.
var ErrNotBuilt = errors.New("this program was built without MPI: build it with -tags mpi (docs/mpi.md)")

// ErrFinalized reports that MPI cannot be used again in this process.
var ErrFinalized = errors.New("MPI was finalized, and a process can initialize it only once: " +
	"call Init once in a process, or initialize MPI in the program before Init")

// Options are the parameters of Join.
type Options struct {
	// SingleThread makes one thread call MPI.
	SingleThread bool
	// KeepThreads is set if the user has chosen GOMAXPROCS. Otherwise Join raises it from 1 to 2.
	KeepThreads bool
	// Comm points to the Fortran handle (MPI_Comm_c2f) of a communicator of the program, which must have
	// initialized MPI. Its processes are those of the job. If Comm is nil, all processes are.
	Comm *int32
}

// Collectives has the methods of engine.Collectives.
type Collectives interface {
	AndOr(and, or []uint64)
	Gather(frame []byte)
	Broadcast(frame []byte)
	Poll() bool
	Test() (frames [][]byte, done bool, err error)
	Missing() []topo.Rank
}

// World contains all processes that the MPI launcher has started. Its methods may be called from any
// goroutine.
type World interface {
	// Rank and Size return the rank of this process and the number of processes.
	Rank() int
	Size() int
	// Groups returns for each rank the lowest rank with which it can share memory, which may be the rank
	// itself.
	Groups() []topo.Rank
	// Library returns the name and the version of the MPI library.
	Library() string
	// Broadcast copies the buf of rank 0 to the buf of all other ranks. All ranks must call it with a buf of
	// the same length. It fails if ctx ends.
	Broadcast(ctx context.Context, buf []byte) error
	// Register returns the Registration of the backend. If deterministic is set, the backend refuses
	// reductions whose result depends on the order of additions. If oversubscribed is set, there are more
	// ranks than cores, and a rank that waits yields its core. A rank that is bound to one core always does,
	// because its other threads, such as those of the garbage collector, need that core too. All ranks must
	// make the backends of process sets in the same order.
	Register(deterministic, oversubscribed bool) ops.Registration
	// Collectives returns the collectives for negotiation in lock-step. Only one rank of the process may use
	// them at a time.
	Collectives() Collectives
	// Leave ends the use of MPI that a call of Join has begun. The last Leave finalizes MPI if Join has
	// initialized it, and waits for the other ranks to do so too. It fails if ctx ends, or if MPI has failed.
	Leave(ctx context.Context) error
	// Fail is called instead of Leave if the job has failed with err. Operations of the job may then be
	// pending at some ranks, where MPI cannot cancel them, so later operations could get their messages.
	// After Fail, MPI cannot be used any more in this process, and Join returns the reason.
	Fail(err error)
}
