package hvd

import (
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/tensorqueue"
)

// States that operations end in.
var (
	// ErrNotInitialized is the error of an operation before Init or after Shutdown.
	ErrNotInitialized = rank.ErrNotInitialized
	// ErrShutDown is the error of an operation that this rank submits after its Shutdown, or that no other
	// rank is left to run. A *PeerError that names ranks that have shut down is an ErrShutDown too, and so is
	// a *StallError.
	ErrShutDown = engine.ErrShutDown
	// ErrClosed is the error of such an operation if the context of this rank's Shutdown ended first.
	ErrClosed = engine.ErrClosed
	// ErrNoProcessSet is the error of an operation on a process set that was removed, also if it was pending
	// at the removal.
	ErrNoProcessSet = engine.ErrNoProcessSet
)

// The errors of operations, by cause.
type (
	// UsageError is the error of a call that is wrong at this rank. Nothing was submitted and the other ranks
	// do not know of it. Its fields are Op, such as "allreduce", Tensor, which is empty if the call gave no
	// name, and Err, the cause.
	UsageError = engine.UsageError
	// MismatchError says that the requests of the ranks for a tensor contradict each other, or cannot be
	// executed. Its fields are Tensor, the name, and Text, which says which rank sent what.
	MismatchError = engine.MismatchError
	// PeerError says that ranks have failed and that the epoch is over. Its fields are Ranks, the ranks that
	// failed (two, if either may be the cause), Reason, what was observed, and ShutDown, which is set
	// if those ranks have shut down while others waited for them.
	PeerError = engine.PeerError
	// StallError says that the job was shut down because a tensor waited too long. It is an ErrShutDown. Its
	// field Reason names operation, tensor, missing ranks and time.
	StallError = engine.StallError
	// DuplicateNameError says that the name is in use by a tensor in flight, or by one whose end the program
	// has not observed. It is the cause of a UsageError. Its fields are Kind and Name.
	DuplicateNameError = tensorqueue.DuplicateNameError
	// NoMemoryError says that shared memory cannot be allocated. Its fields are What, the purpose, NeedBytes,
	// and Err, which names the limit if it is known.
	NoMemoryError = shmem.NoMemoryError
	// OpError adds the operation, Op, and the tensor, Tensor, to the cause of a failure, Err.
	OpError = engine.OpError
)
