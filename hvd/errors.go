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
	// ErrShutDown answers operations that this rank submits after its Shutdown, or that nobody is left to run with it. A
	// *PeerError is one too if it names ranks that have shut down, and so is a *StallError.
	ErrShutDown = engine.ErrShutDown
	// ErrClosed answers them when this rank's own Shutdown was cut short by its context.
	ErrClosed = engine.ErrClosed
	// ErrNoProcessSet refuses operations on a process set that was removed, and answers those that waited in it.
	ErrNoProcessSet = engine.ErrNoProcessSet
)

// The errors of operations, by cause.
type (
	// UsageError refuses a call that this rank should not have made. Nothing was submitted and other ranks do not know of it.
	UsageError = engine.UsageError
	// MismatchError: the ranks' requests for a tensor contradict each other, or ask for what cannot be done.
	MismatchError = engine.MismatchError
	// PeerError: ranks have failed, and the epoch with them.
	PeerError = engine.PeerError
	// StallError: the job was shut down because a tensor waited too long. It is an ErrShutDown.
	StallError = engine.StallError
	// DuplicateNameError: the name is in use by a tensor in flight, or by one that the program has not seen done. It is the
	// cause of a UsageError.
	DuplicateNameError = tensorqueue.DuplicateNameError
	// NoMemoryError: shared memory cannot be had. It names the bytes that were needed.
	NoMemoryError = shmem.NoMemoryError
	// OpError wraps the cause of an operation's failure with the operation and the tensor.
	OpError = engine.OpError
)
