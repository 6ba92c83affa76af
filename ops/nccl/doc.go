// Package nccl runs collectives of tensors on CUDA devices with NCCL. It loads libnccl and libcudart when a
// program asks for it, so it needs neither of them to be built, and one program runs on machines with and
// without GPUs. It is built only with cgo and with the tag nccl. In other builds Load returns
// cuda.ErrNotBuilt.
//
//	operation      NCCL
//	allreduce      ncclAllReduce
//	reduce         ncclReduce
//	reducescatter  ncclReduceScatter, or ncclReduce of each block if the blocks have different sizes
//	allgather      ncclAllGather, or ncclBroadcast of each block if the blocks have different sizes
//	broadcast      ncclBroadcast
//	alltoall       ncclSend and ncclRecv of the blocks, after the ranks have exchanged their sizes
//	gather         the same
//	scatter        the same
//
// A process set has a communicator for each combination of devices that its ranks use. It is made by the
// first operation that needs it: the first rank of the set makes a unique id, and the ranks broadcast it with
// a backend for host memory, which also exchanges the sizes of blocks.
//
// A list of several tensors is copied to a buffer on the device, and copied back afterwards. The work of a
// process set is enqueued on one stream of the device, which other process sets may share. The lane goes on
// with the next operation, and a goroutine for each stream asks events which operations have ended.
// Communicators are blocking, so that NCCL launches an operation in the thread that calls it. Each is made in
// a goroutine of its own, which is left behind if the ranks do not connect in time.
//
// # Reductions
//
// NCCL adds in an order of its own, so this backend refuses sums and products of floats in deterministic
// mode. Averages are ncclAvg. Other scale factors are applied before the reduction (PreMulSum), because NCCL
// cannot scale a result; so only sums and averages of floats can be scaled. NCCL has no 16-bit integers.
// Adasum is refused.
//
// # Failures
//
// NCCL does not say which rank has failed. If a communicator reports an error, the operation fails, and the
// control connections of the job show which rank died. As soon as an operation has failed, or the job has
// (Library.Fail), the communicators of all process sets are aborted at once, each in a goroutine of its own,
// because ncclCommAbort may wait for the work of the others. An operation that has failed waits until the
// device no longer uses its buffers. If the device does not end this work within a few seconds, the error is
// an *ops.InUseError.
//
// At the end, the ranks destroy their communicators together. A rank that waits too long for another one
// leaves the call behind.
package nccl

import (
	"fmt"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/ops"
)

// Error is an error that a function of NCCL has returned, or that a communicator has reported.
type Error struct {
	Call string // the name of the function
	Code int
	Text string // what the code means
	// Detail is NCCL's last message in this process, which may be about another call, or "".
	Detail string
}

func (e *Error) Error() string {
	text := fmt.Sprintf("%s: %s (%d)", e.Call, e.Text, e.Code)
	if e.Detail != "" {
		text += ": NCCL's last message: " + e.Detail
	}
	return text
}

// Config configures a backend. All ranks must have the same values of Streams, Deterministic and InHost.
type Config struct {
	// Device, modulo the number of devices of the host, is the device of this rank for operations for which
	// it has no tensor because it has joined.
	Device int
	// Host is the backend with which the ranks of a set exchange unique ids and the sizes of blocks. It
	// must run broadcast and alltoall.
	Host ops.Registration
	// StartTimeout bounds how long NCCL may take to connect the ranks of a communicator.
	StartTimeout time.Duration
	// Streams is the number of streams of each device. 0 means 1. Process set s uses stream s modulo Streams.
	// If there are several, they bound the number of blocks of threads of each operation, and NCCL must be
	// 2.17 or newer.
	Streams int
	// FusionBytes is the size of the fused tensors of an operation. The buffer for them, of at most 64 MiB,
	// is allocated by the first operation on a stream, before the program has used the memory.
	FusionBytes int
	// Deterministic forbids reductions whose result depends on the order of additions.
	Deterministic bool
	// InHost has the kinds of operations that do not run on NCCL, each with the setting that decides this.
	InHost map[message.Kind]string
}
