// Package hvd is data-parallel communication for training: allreduce, allgather, broadcast, alltoall, reducescatter,
// barrier and join on named tensors, over all ranks or process sets.
//
// A program calls Init, works, and calls Shutdown. Ranks may submit tensors in any order: they agree on one
// through rank 0, by name, and run each operation when every rank has asked for it. Without a launcher a program
// is rank 0 of 1 and works.
//
//	if err := hvd.Init(ctx); err != nil { ... }
//	defer hvd.Shutdown(ctx)
//	mean, err := hvd.Allreduce(ctx, gradient, hvd.Name("layer1.weight"))
//
// # Names
//
// The name is what ranks match by. A tensor without one gets "<operation>.noname.<n>", counted per operation and process set, so
// ranks must make the unnamed calls of an operation in the same order; a join begins the count anew. A repeated name with equal shape and
// type costs one bit of negotiation instead of a message. The same name for different operations is a mismatch if ranks differ, and
// forgets the cached agreement if they do not: give each use its own name.
//
// A name that the program gives is in use from the call until the program has seen that the operation is done: until a
// synchronous call or Wait has returned without a *PendingError, Poll has said true, or the channel that Done gave is closed.
// A second call with a name in use is a *UsageError with a *DuplicateNameError, at every rank alike, even if the first
// operation has long been done. A name that nobody looks after is in use until Shutdown, also if its handle is garbage: an
// operation that is started and forgotten should have no name, or its Done should be asked for. Names that are counted are
// free when the operation is done.
//
// # Buffers
//
// From the call until the operation is done the engine owns the slices passed to it. They must not be written, and
// results must not be read. A Wait or a synchronous call that ends by its context does not withdraw the request: the slices
// stay in use until the operation is done at this rank. The error, a *PendingError, has the handle to wait for that.
//
// # Errors
//
// Every error names operation and tensor. There are five sorts, found by errors.Is and errors.As:
//
//   - *UsageError: this rank should not have made the call, because the name is in use (*DuplicateNameError), the
//     process set is gone (ErrNoProcessSet) or not its own, Init was not called (ErrNotInitialized), or the arguments do
//     not fit. Nothing was submitted.
//   - *MismatchError: the ranks' requests contradict each other, and the job goes on. All of them get it, but where
//     allgather or alltoall in place has another result than one rank has room for: that rank alone knows.
//   - ErrShutDown: this rank has shut down, or the stall inspector has ended the job (*StallError, which Err and Shutdown
//     give too); ErrClosed: the context of this rank's Shutdown ended before the others were ready.
//   - *PeerError: ranks failed, or shut down while this one waits for them (then it is an ErrShutDown too), or an operation
//     ran out of time. The epoch is over, and after Shutdown the survivors may Init again, once all ranks of the job are
//     there anew.
//   - *PendingError: the context of a wait has ended, and the operation goes on. If the job ends before the operation is done,
//     this rank's errors say that it had given up waiting.
package hvd

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/place"
)

// process is the face that the package-level functions put on one Engine.
var process struct {
	mu     sync.Mutex
	engine *Engine       // nil before Init and after Shutdown
	busy   chan struct{} // not nil while an Init or a Shutdown is under way; closed at its end
	epoch  uint64        // of the last engine
	// met is where the ranks have met, if that cannot be done again (place.Meeting.Once). It lives as long as the process.
	met *place.Meeting
}

// begin makes the caller the one who changes process.engine, after those who do it now. The engine is as they left
// it. If there is an error, or done says that nothing is to be changed, end must not be called.
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
			return nil, false, fmt.Errorf("hvd: another Init or Shutdown is under way: %w", ctx.Err())
		}
	}
}

// end sets the engine.
func end(e *Engine) {
	process.mu.Lock()
	defer process.mu.Unlock()
	process.engine = e
	close(process.busy)
	process.busy = nil
}

// Init joins this process to its job, as its environment says, and waits until all ranks have come. The environment is that
// of hvdrun, of another launcher (Open MPI, MPICH, torchrun, Slurm, Kubernetes, or RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT:
// docs/launchers.md), or of none, which makes a job of one; options say otherwise. WithSetting("HVD_SIZE", "1") makes a job of one. Called again while initialized it does nothing; after Shutdown it joins a new epoch. ctx
// bounds the wait in addition to HOROVOD_GLOO_TIMEOUT_SECONDS.
func Init(ctx context.Context, opts ...InitOption) error {
	_, nothing, err := begin(ctx, func(e *Engine) bool { return e != nil })
	if nothing || err != nil {
		return err
	}
	e, err := New(ctx, slices.Concat(opts, []InitOption{afterEpoch(process.epoch), keeping(&process.met)})...)
	if err == nil {
		process.epoch = e.Epoch()
	}
	end(e)
	return err
}

// Shutdown takes this rank out of the job. What it has submitted still runs if every other rank submits it too, and
// Shutdown waits for that; it submits nothing more. The other ranks go on with process sets without this rank. If one of
// them waits for an operation that this rank has not submitted, then or later, the job has failed: the other ranks get a
// *PeerError that names this one, and is an ErrShutDown too. Rank 0, which coordinates, serves the others until they have
// shut down too or ctx ends; ranks that are left then get a *PeerError that names rank 0.
//
// The error says why the job had failed before. Without Init it does nothing. A process that exits without Shutdown, or
// before it has returned, is a failed rank to the others.
//
// Deferred, as "defer hvd.Shutdown(ctx)", it tells the others if the goroutine panics, and lets the panic go on.
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

// panicked is the departure of a rank whose program has panicked with p.
func panicked(p any) engine.Departure {
	text := strings.ToValidUTF8(fmt.Sprint(p), "") // protobuf refuses anything else
	return engine.Departure{Reason: "its program has panicked: " + text, Failed: true}
}

// IsInitialized reports whether Init has succeeded and no Shutdown has ended since.
func IsInitialized() bool { return current() != nil }

func current() *Engine {
	process.mu.Lock()
	defer process.mu.Unlock()
	return process.engine
}

// mustCurrent is for queries that have no error to return. Asking for the rank of no job is a defect of the program.
func mustCurrent(query string) *Engine {
	e := current()
	if e == nil {
		panic(fmt.Sprintf("hvd: %s called before Init or after Shutdown", query))
	}
	return e
}

// Rank is this process's number in the job, 0 to Size()-1. Like all queries it panics before Init.
func Rank() int { return mustCurrent("Rank").Rank() }

// Size is the number of processes in the job.
func Size() int { return mustCurrent("Size").Size() }

// LocalRank is this process's number among those of its host: the GPU to use.
func LocalRank() int { return mustCurrent("LocalRank").LocalRank() }

// LocalSize is the number of processes on this host.
func LocalSize() int { return mustCurrent("LocalSize").LocalSize() }

// CrossRank is the index of this host among those that have this local rank.
func CrossRank() int { return mustCurrent("CrossRank").CrossRank() }

// CrossSize is the number of hosts that have this local rank.
func CrossSize() int { return mustCurrent("CrossSize").CrossSize() }

// IsHomogeneous reports whether every host has the same number of processes.
func IsHomogeneous() bool { return mustCurrent("IsHomogeneous").IsHomogeneous() }
