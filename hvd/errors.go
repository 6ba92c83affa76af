package hvd

import (
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/tensorqueue"
)

// Errors that operations return, to be compared with errors.Is.
var (
	// ErrNotInitialized is returned before Init and after Shutdown by calls that use the engine that Init
	// starts. Calls that name another engine with On or Over get ErrShutDown after the Shutdown of that
	// engine.
	ErrNotInitialized = rank.ErrNotInitialized
	// ErrShutDown reports that an operation cannot run because this rank has shut down, or because every rank
	// that could have submitted it has shut down. Two other errors match ErrShutDown in errors.Is: a
	// *PeerError that names ranks that have shut down, and every *StallError.
	ErrShutDown = engine.ErrShutDown
	// ErrClosed replaces ErrShutDown if the context of this rank's Shutdown ended before the other ranks were
	// ready to end the job, unless a verdict names other ranks: then the error is a *PeerError.
	ErrClosed = engine.ErrClosed
	// ErrNoProcessSet reports that the process set of an operation has been removed. If the operation was
	// submitted before the removal, the error is an *OpError, and otherwise a *UsageError.
	ErrNoProcessSet = engine.ErrNoProcessSet
)

// Types of errors that operations return, to be found with errors.As.
type (
	// UsageError reports that a call was wrong at this rank. Nothing was submitted, and the other ranks do
	// not know of the call. Its fields are Op, the operation, such as "allreduce"; Tensor, the name, or "" if
	// the call did not specify a name; and Err, the cause.
	UsageError = engine.UsageError
	// MismatchError says that the requests of the ranks for a tensor contradict each other, or that they
	// cannot be executed. Its field Tensor is the name of the tensor, and its field Text says which rank sent
	// what.
	MismatchError = engine.MismatchError
	// PeerError says that ranks have failed and that the epoch is over. Its fields are Ranks, the numbers of
	// the ranks, which are several if it is not known which of them has failed or if several have; Reason,
	// which says what was observed; and ShutDown, which is set if those ranks have shut down while other
	// ranks waited for them.
	PeerError = engine.PeerError
	// StallError says that the job was shut down because a tensor waited too long. A StallError is an
	// ErrShutDown. Its field Reason names the operation, the tensor, the missing ranks and how long the
	// tensor waited.
	StallError = engine.StallError
	// DuplicateNameError says that the name of a new operation is in use: an earlier operation of this name
	// is in flight, or the program has not observed that it is done. A DuplicateNameError is the cause of a
	// UsageError. Its fields are Kind, the operation, and Name.
	DuplicateNameError = tensorqueue.DuplicateNameError
	// NoMemoryError says that shared memory cannot be allocated. Alloc returns it. Its fields are What, the
	// purpose; NeedBytes, the number of bytes; and Err, the cause, which names the limit that was reached if
	// that limit is known.
	NoMemoryError = shmem.NoMemoryError
	// OpError wraps an error of an operation that was submitted, and adds the operation and the tensor that
	// it is about. Its fields are Op, the operation; Tensor, the name; and Err, the wrapped error.
	OpError = engine.OpError
	// InUseError says that an operation on device buffers has failed, and that the device may still read or
	// write them. The program must not use or free these buffers until the process ends. The error of the
	// operation matches both an InUseError, whose field Err is the cause, and the reason for the failure.
	InUseError = ops.InUseError
)
