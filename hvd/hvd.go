// Package hvd provides collective communication for data-parallel training: allreduce, allgather, broadcast,
// alltoall, reducescatter, reduce, gather, scatter, barrier and join on named tensors, over all ranks or over
// process sets. Send and Recv move messages between two ranks.
//
// A program calls Init, submits operations, and calls Shutdown. Ranks may submit tensors in any order: rank 0
// learns which ranks have submitted which tensors, and an operation runs when every rank has submitted it.
// Without a launcher the program is rank 0 of a job with one rank.
//
//	if err := hvd.Init(ctx); err != nil { ... }
//	defer hvd.Shutdown(ctx)
//	mean, err := hvd.Allreduce(ctx, gradient, hvd.Name("layer1.weight"))
//
// All functions and methods are safe for concurrent use.
//
// # Calls
//
// A function with a context submits its operation, even if the context has already ended, and then waits
// until the operation is done at this rank. If the context ends first, the error is a *PendingError. A
// function whose name ends in Async does not wait: it returns an error if the call is wrong, and otherwise a
// handle. Wait of the handle returns the result and the errors of the operation.
//
// An operation runs on all ranks of the job or, with the option Over, on the members of a process set. Where
// the documentation of an operation says "all ranks", it means those. But ranks in arguments and results,
// such as root, are numbers of ranks in the job, not positions in the process set. A root that is not a
// member is a *UsageError.
//
// Rank, Size, LocalRank, LocalSize, CrossRank, CrossSize, IsHomogeneous, ProcessSets and GlobalProcessSet
// return no error. They panic before Init and after Shutdown. The methods of Engine that ask for such facts
// work after its Shutdown too.
//
// # Options
//
// The type of a function's options says which options apply, and a call with another option does not compile.
// For example, Allreduce takes each AllreduceOption. A call fails with a *UsageError if the argument of an
// option is not valid. If a call has an option twice, the last one counts.
//
// An InitOption that is not valid makes Init, New or NewUniqueID fail. If it is given twice, the last one
// counts too, but WithProcessSets adds to the earlier ones, and WithSetting and WithInitScheme replace only
// those of the same name or scheme.
//
// # Names
//
// Ranks match tensors by name. A tensor without a name gets the name "<operation>.noname.<n>", where n counts
// the unnamed calls of that operation on that process set. So all ranks must make their unnamed calls in the
// same order. A join restarts the count. If a name is used again with the same shape and type, a rank
// requests the tensor with one bit instead of a message. If ranks use one name for different operations at
// the same time, the operations fail with a *MismatchError. If all ranks use the name first for one operation
// and later for another, the ranks have to negotiate the tensor in full again. So give each tensor a name of
// its own.
//
// A name that the program gives stays in use until the program has observed that the operation is done: until
// a synchronous call or Wait returns without a *PendingError, Poll returns true, or the channel that Done
// returned is closed. A second call with a name in use fails with a *UsageError that wraps a
// *DuplicateNameError. The second call fails at every rank, even if the first operation is already done
// there. If the program never observes that the operation is done, the name stays in use until Shutdown, even
// if the handle is garbage collected. So if the program starts an operation and never waits for it, give the
// operation no name, or call Done on its handle. Generated names are free as soon as the operation is done.
//
// # Buffers
//
// From the call until the operation is done the engine owns the slices that were passed. Until then the
// program must not write to these slices and must not read the result. If the context of a Wait or of a
// synchronous call ends, the request is not withdrawn: the slices remain in use until the operation is done
// at this rank. The *PendingError holds the handle with which the program can wait for the operation.
//
// The result of an operation is a new slice, which belongs to the program, unless the option InPlace is
// given.
//
// # Errors
//
// Every error of an operation names the operation and the tensor. Use errors.Is and errors.As to distinguish
// six kinds:
//
//   - *UsageError: the call is wrong at this rank. The name is in use (*DuplicateNameError), the process set
//     was removed before the call (ErrNoProcessSet) or does not contain this rank, Init was not called
//     (ErrNotInitialized), or an argument or an option is not valid. Nothing was submitted.
//   - *MismatchError: the requests of the ranks contradict each other or cannot be executed, for example
//     because the result of an allgather is larger than the memory of rank 0's host. All ranks get the error
//     and the job goes on. One exception: if the result of an in-place allgather or alltoall, of a Recv or of
//     an operation on device buffers does not fit the memory that a rank has passed, only that rank gets the
//     error.
//   - ErrNoProcessSet without a *UsageError: the process set was removed while the operation was pending. The
//     job goes on.
//   - ErrShutDown: this rank has shut down, or the stall inspector has ended the job (*StallError, which Err
//     and Shutdown return too). ErrClosed: the context of this rank's Shutdown ended before the other ranks
//     were ready to end the job, and no other rank is at fault.
//   - *PeerError: ranks failed, or shut down while this rank waited for them (then the error is an
//     ErrShutDown too), or an operation timed out, or a rank cannot execute an operation, for example because
//     the rows that an alltoall sends to it are larger than the memory of its host. The epoch is over. After
//     Shutdown the surviving ranks may call Init again, which waits until all ranks of the job are present.
//   - *PendingError: the context of a wait ended. The operation goes on. If the job ends before the operation
//     is done, later errors at this rank also say that this rank had given up waiting.
package hvd

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/gohvd/gohvd/internal/bootstrap"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/rank"
)

// process holds the Engine that the package-level functions use.
var process struct {
	mu     sync.Mutex
	engine *Engine       // nil before Init and after Shutdown
	busy   chan struct{} // not nil while an Init or a Shutdown is in progress; closed at its end
	epoch  uint64        // the epoch of the last engine
	// meeting is set if the ranks were allowed to meet only once (bootstrap.Meeting.Once). A later Init uses
	// it to join a new epoch without a second meeting. It is kept until the process ends.
	meeting *bootstrap.Meeting
	// member is the part of this process in an elastic job. It is set by the first Init.
	member *rank.Membership
}

// begin waits until no other Init or Shutdown is in progress. Then it calls done with process.engine. If done
// returns true, the caller has nothing to do, and begin returns true as its second result. Otherwise begin
// returns process.engine, and until the caller calls end, no other call can change process.engine. The caller
// must not call end if the second result is true or if there is an error.
func begin(ctx context.Context, done func(*Engine) bool) (e *Engine, nothing bool, err error) {
	for {
		process.mu.Lock()
		busy := process.busy
		if busy == nil {
			defer process.mu.Unlock()
			if done(process.engine) {
				return nil, true, nil
			}
			process.busy = make(chan struct{})
			return process.engine, false, nil
		}
		process.mu.Unlock()
		select {
		case <-busy:
		case <-ctx.Done():
			return nil, false, fmt.Errorf("hvd: another Init or Shutdown is in progress: %w", ctx.Err())
		}
	}
}

// end sets process.engine to e and lets the next Init or Shutdown begin.
func end(e *Engine) {
	process.mu.Lock()
	defer process.mu.Unlock()
	process.engine = e
	close(process.busy)
	process.busy = nil
}

// Init joins this process to its job and waits until all ranks have joined.
//
// The environment says which job this is and which rank this process is. hvdrun sets the environment, or
// another launcher does: Open MPI, MPICH, torchrun, Slurm, Kubernetes, or any program that sets RANK,
// WORLD_SIZE, MASTER_ADDR and MASTER_PORT (see docs/launchers.md for all). If no launcher has started this
// process, the job has one rank. If a launcher has started this process as one of several, but does not say
// enough to join their job, Init fails. Options override the environment. WithSetting("HVD_SIZE", "1") makes
// a job with one rank under any launcher except hvdrun.
//
// Init returns an error if a setting or an option is wrong, if the ranks contradict each other, if one of
// them fails, or if not all have joined within HOROVOD_GLOO_TIMEOUT_SECONDS (default 30) or before ctx ends.
// The error names the ranks that are missing. If ranks have failed and are known, the error is a *PeerError.
// Other errors of Init are of none of the kinds in the package comment. If the process has already joined,
// Init does nothing. After Shutdown, Init joins a new epoch of the job.
func Init(ctx context.Context, opts ...InitOption) error {
	_, nothing, err := begin(ctx, func(e *Engine) bool { return e != nil })
	if nothing || err != nil {
		return err
	}
	e, err := New(ctx, slices.Concat(opts, []InitOption{afterEpoch(process.epoch),
		withMeeting(&process.meeting), withMember(&process.member)})...)
	if err == nil {
		process.epoch = e.Epoch()
	}
	end(e)
	return err
}

// Shutdown takes this rank out of the job. This rank can submit nothing more. Shutdown waits for the
// operations that this rank has submitted, which run if every other rank submits them too. The other ranks
// can go on with process sets that do not contain this rank. If another rank waits, now or later, for an
// operation that this rank has not submitted, the job fails: the remaining ranks get a *PeerError that names
// this rank and is an ErrShutDown too. Rank 0 coordinates, so its Shutdown continues to serve the other ranks
// until they have shut down too.
//
// If the deadline of ctx passes before this rank can leave, the job fails with a *PeerError that names the
// ranks for which Shutdown has waited, and Shutdown returns this error too. If ctx is canceled before, or has
// ended before the call, the other ranks get a *PeerError that names this rank. If another rank is silent,
// the error names that rank. The verdict is usually there at once, and Shutdown waits for it for at most 9 s.
// If there is none by then, this rank ends, and the other ranks get a *PeerError that names it.
//
// There is no verdict if this rank, other than rank 0, has finished all its operations and only waits until
// the other ranks have finished the operations that they execute together with it. When ctx ends, it leaves.
// A rank that then still needs it gets a *PeerError that names this rank.
//
// If the job has already failed, Shutdown returns the reason. Before Init it does nothing. If a process exits
// without calling Shutdown, or before Shutdown has returned, the other ranks consider its rank failed.
//
// If Shutdown is deferred, as in "defer hvd.Shutdown(ctx)", and the goroutine panics, Shutdown tells the
// other ranks that this rank has failed, and lets the panic continue.
func Shutdown(ctx context.Context) error {
	var why engine.Departure
	if p := recover(); p != nil {
		defer panic(p)
		why = panicked(p)
	}
	e, nothing, err := begin(ctx, func(e *Engine) bool { return e == nil })
	if nothing || err != nil {
		return err
	}
	err = e.shutdown(ctx, why)
	end(nil)
	return err
}

// panicked returns the Departure to report if the program of this rank panicked with the value p.
func panicked(p any) engine.Departure {
	text := strings.ToValidUTF8(fmt.Sprint(p), "") // a protobuf string holds only valid UTF-8
	return engine.Departure{Reason: "the program panicked: " + text, Failed: true}
}

// IsInitialized reports whether Init has succeeded and no Shutdown has completed since.
func IsInitialized() bool { return current() != nil }

// current returns the Engine that Init started, or nil before Init and after Shutdown.
func current() *Engine {
	process.mu.Lock()
	defer process.mu.Unlock()
	return process.engine
}

// mustCurrent returns the Engine that Init started. It is called by queries such as Rank, which return no
// error. If there is no Engine, mustCurrent panics, because a query outside a job is a bug in the program.
// query is the name of the calling function.
func mustCurrent(query string) *Engine {
	e := current()
	if e == nil {
		panic(fmt.Sprintf("hvd: %s called before Init or after Shutdown", query))
	}
	return e
}

// Rank returns the number of this process in the job, from 0 to Size()-1.
func Rank() int { return mustCurrent("Rank").Rank() }

// Size returns the number of processes in the job.
func Size() int { return mustCurrent("Size").Size() }

// LocalRank returns the number of this process among the processes on its host, from 0. Use it to choose a
// GPU.
func LocalRank() int { return mustCurrent("LocalRank").LocalRank() }

// LocalSize returns the number of processes on this host.
func LocalSize() int { return mustCurrent("LocalSize").LocalSize() }

// CrossRank returns the index of this host among the hosts that have a process with the same local rank as
// this process.
func CrossRank() int { return mustCurrent("CrossRank").CrossRank() }

// CrossSize returns the number of hosts that have a process with the same local rank as this process.
func CrossSize() int { return mustCurrent("CrossSize").CrossSize() }

// IsHomogeneous reports whether every host has the same number of processes.
func IsHomogeneous() bool { return mustCurrent("IsHomogeneous").IsHomogeneous() }
