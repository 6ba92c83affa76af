//go:build mpi

package mpi

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"time"

	empi "github.com/emer/empi/mpi"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/ops"
)

// process is the MPI of this process. MPI is a property of the process: it can be initialized only once. So
// Join returns the same world to all callers.
var process struct {
	mu    sync.Mutex
	world *world
}

// world implements World.
type world struct {
	thread  thread
	own     bool // whether this package has initialized MPI
	comm    comm // used by Join, then by Broadcast, then by Collectives
	groups  []topo.Rank
	library string

	mu     sync.Mutex // guards the fields below
	users  int        // number of calls of Join minus number of calls of Leave
	err    error      // why MPI cannot be used any more, or nil
	pinned []*runtime.Pinner
}

// thread calls functions that call MPI, one at a time.
type thread struct {
	token chan struct{} // full while a function is called
	stuck chan struct{} // closed when the world has failed, because the function may never return
	// serialized is set if the goroutine that calls do may call MPI itself. Otherwise the goroutine that has
	// initialized MPI does so.
	serialized bool
	calls      chan func() error
	returned   chan error
}

// do calls f, which may call MPI, and returns its error. If MPI cannot be used any more, do does not call f
// but returns the reason.
func (w *world) do(f func() error) error {
	t := &w.thread
	select {
	case t.token <- struct{}{}:
	case <-t.stuck:
		return w.failure()
	}
	defer func() { <-t.token }()
	switch err := w.failure(); {
	case err != nil:
		return err
	case t.serialized:
		return f()
	}
	return t.onOwner(f)
}

// onOwner calls f in the goroutine that has initialized MPI. The caller holds the token.
func (t *thread) onOwner(f func() error) error {
	t.calls <- f
	return <-t.returned
}

// run calls the functions that onOwner passes to it, in a goroutine that is locked to its thread.
func (t *thread) run() {
	runtime.LockOSThread()
	for f := range t.calls {
		t.returned <- f()
	}
}

// Join initializes MPI unless the program has done so, and returns the processes of the job. All processes
// must call it. It waits for them until ctx ends.
func Join(ctx context.Context, o Options) (World, error) {
	process.mu.Lock()
	defer process.mu.Unlock()
	if process.world == nil {
		w := new(world)
		w.thread.calls, w.thread.returned = make(chan func() error), make(chan error)
		w.thread.token, w.thread.stuck = make(chan struct{}, 1), make(chan struct{})
		go w.thread.run()
		err := w.await(ctx, "joining the other processes", func() error { return w.initialize(o) })
		if err != nil {
			w.spoil(err)
			return nil, fmt.Errorf("%w: have all processes of the job called Init?", err)
		}
		process.world = w
	}
	if err := process.world.failure(); err != nil {
		return nil, err
	}
	process.world.mu.Lock()
	defer process.world.mu.Unlock()
	process.world.users++
	return process.world, nil
}

// await calls f, which blocks until other ranks have called it too, in the goroutine that has initialized
// MPI. It returns early if ctx ends. Then MPI cannot be used any more, because this goroutine is still in the
// call.
func (w *world) await(ctx context.Context, what string, f func() error) error {
	done := make(chan error, 1)
	go func() {
		w.thread.token <- struct{}{}
		defer func() { <-w.thread.token }()
		done <- w.thread.onOwner(f)
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		err := fmt.Errorf("ops/mpi: %s with MPI: %w", what, context.Cause(ctx))
		w.spoil(err)
		return err
	}
}

func (w *world) initialize(o Options) (err error) {
	if w.thread.serialized, w.own, err = initialize(o.SingleThread); err != nil {
		return err
	}
	empi.LogErrors = false
	w.library = libraryVersion()
	if w.comm, err = newWorld(); err == nil {
		w.groups, err = w.comm.groups()
	}
	return err
}

// Rank implements World.
func (w *world) Rank() int { return w.comm.rank() }

// Size implements World.
func (w *world) Size() int { return w.comm.size() }

// Groups implements World.
func (w *world) Groups() []topo.Rank { return w.groups }

// Library implements World.
func (w *world) Library() string { return w.library }

// Broadcast implements World.
func (w *world) Broadcast(ctx context.Context, buf []byte) error {
	return w.collective(ctx, buf, func() error { return w.comm.broadcast(buf, 0) })
}

// collective begins an operation on all ranks and waits until it has completed. buf is its buffer.
func (w *world) collective(ctx context.Context, buf []byte, begin func() error) error {
	pins := new(runtime.Pinner)
	pin(pins, buf)
	err := w.do(begin)
	if err == nil {
		_, err = w.wait(ctx, newTester(w.comm), false)
	}
	if err != nil {
		w.abandon(pins, err)
		return fmt.Errorf("ops/mpi: %w", err)
	}
	pins.Unpin()
	return nil
}

// pin pins a buffer.
func pin[T any](pins *runtime.Pinner, buf []T) {
	if len(buf) > 0 {
		pins.Pin(&buf[0])
	}
}

const (
	// polls is the number of tests in one call of MPI. A test takes about as long as the call of C itself.
	polls = 8
	// yieldsPerNap is the number of calls after which a rank that waits begins to nap between calls. All
	// calls together take about a millisecond.
	yieldsPerNap = 1000
	// nap is the time between two calls then. MPI cannot wake a rank that waits.
	nap = 50 * time.Microsecond
)

// tester tests the operation on a communicator. Its function is made once, so that a test does not allocate.
type tester struct {
	poll  func() error // sets done
	done  bool
	timer *time.Timer // of naps; nil before the first one
}

func newTester(c comm) *tester {
	t := new(tester)
	t.poll = func() (err error) {
		t.done, err = c.test(polls)
		return err
	}
	return t
}

// test reports whether the operation has completed. It has not if MPI cannot be used any more.
func (w *world) test(t *tester) (done bool, err error) {
	t.done = false
	err = w.do(t.poll)
	return t.done, err
}

// wait waits until the operation on c has completed or ctx ends.
func (w *world) wait(ctx context.Context, t *tester, oversubscribed bool) (done bool, err error) {
	for n := 1; ; n++ {
		if done, err = w.test(t); done || err != nil {
			return done, err
		}
		switch {
		case ctx.Err() != nil:
			return false, context.Cause(ctx)
		case n < yieldsPerNap:
			if oversubscribed || n%16 == 0 {
				shmem.Yield()
			}
			if n%64 == 0 {
				runtime.Gosched()
			}
			continue
		case t.timer == nil:
			t.timer = time.NewTimer(nap)
		default:
			t.timer.Reset(nap)
		}
		select {
		case <-t.timer.C:
		case <-ctx.Done():
		}
	}
}

// failure returns why MPI cannot be used any more, or nil.
func (w *world) failure() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.err
}

func (w *world) spoil(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err == nil {
		w.err = fmt.Errorf("MPI cannot be used any more in this process, because it has failed: %w", err)
		close(w.thread.stuck)
	}
}

// abandon is called when an operation has failed. It keeps the buffers of the operation, because MPI may
// still refer to them.
func (w *world) abandon(pins *runtime.Pinner, err error) {
	w.spoil(err)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.pinned = append(w.pinned, pins)
}

// Register implements World.
func (w *world) Register(deterministic, oversubscribed bool) ops.Registration {
	return ops.Registration{ID: message.MPI,
		New: func(ctx context.Context, set topo.ProcessSetID, ranks []topo.Rank, _ int) (ops.Backend, error) {
			b := &backend{world: w, deterministic: deterministic, oversubscribed: oversubscribed}
			err := w.failure()
			if err == nil {
				b.comm, err = w.sub(ctx, set, ranks)
			}
			if err != nil {
				return nil, fmt.Errorf("ops/mpi: process set %d: %w", set, err)
			}
			b.begin, b.tester = b.beginNow, newTester(b.comm)
			return b, nil
		}}
}

// sub makes the communicator of a process set. All members must call it, in the same order as that of other
// sets. MPI_Comm_create_group cannot be polled, so sub blocks until they have done so, or ctx ends.
func (w *world) sub(ctx context.Context, set topo.ProcessSetID, ranks []topo.Rank) (c comm, err error) {
	made := make(chan comm, 1)
	err = w.await(ctx, "MPI_Comm_create_group", func() error {
		c, err := w.comm.sub(ranks, set)
		made <- c
		return err
	})
	if ctx.Err() != nil && err != nil {
		return c, &ops.UnknownRankError{Ranks: ranks,
			Err: fmt.Errorf("%w: not all of %s have taken part (MPI does not tell which rank is missing)", err,
				topo.FormatRanks(ranks))}
	}
	return <-made, err
}

// Leave implements World.
func (w *world) Leave(ctx context.Context) error {
	if err := w.failure(); err != nil {
		return fmt.Errorf("ops/mpi: MPI is not finalized: %w", err)
	}
	w.mu.Lock()
	w.users--
	last := w.users == 0
	w.mu.Unlock()
	if !w.own || !last {
		return nil
	}
	err := w.await(ctx, "finalizing", func() error {
		empi.Finalize()
		return nil
	})
	w.mu.Lock()
	defer w.mu.Unlock()
	w.err = ErrFinalized
	if err == nil {
		close(w.thread.calls)
	}
	return err
}
