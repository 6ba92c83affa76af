//go:build mpi

package mpi

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	empi "github.com/emer/empi/mpi"
	"golang.org/x/sys/unix"

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
	own     bool   // whether this package has initialized MPI
	given   *int32 // Options.Comm of the first Join
	comm    comm   // used by Join, then by Broadcast, then by Collectives
	groups  []topo.Rank
	library string

	failed atomic.Pointer[error] // why MPI cannot be used any more

	mu          sync.Mutex // guards the fields below
	users       int        // number of calls of Join minus number of calls of Leave
	pinned      []*runtime.Pinner
	collectives *collectives // nil before the first call of Collectives
}

// thread makes the MPI calls of this process, one at a time.
type thread struct {
	// serialized is set if any goroutine may call MPI. Otherwise only the goroutine that has initialized MPI
	// may.
	serialized bool
	calls      chan func() error // calls for that goroutine
	returned   chan error
	notified   chan struct{} // wakes that goroutine because the queue has a call

	mu      sync.Mutex // held during a call that does not block, and guards the fields below
	queue   []func()   // calls that block until other ranks make them too
	blocked bool       // whether a call of the queue has not returned
}

// do calls f, which calls MPI but does not block, and returns its error. It does nothing while a call of the
// queue blocks. If MPI cannot be used any more, do returns the reason.
func (w *world) do(f func() error) error {
	t := &w.thread
	t.mu.Lock()
	err := w.failure()
	switch {
	case err != nil || t.blocked:
	case t.serialized:
		err = f()
	default:
		t.calls <- f
		err = <-t.returned
	}
	t.mu.Unlock()
	return err
}

// enqueue passes f to the goroutine that has initialized MPI. f may block until other ranks have called it
// too. The calls are made in the order in which they were enqueued, which must be the same at these ranks. If
// MPI cannot be used any more, f gets the reason and must not call MPI.
func (w *world) enqueue(f func(failed error)) {
	t := &w.thread
	t.mu.Lock()
	defer t.mu.Unlock()
	t.queue = append(t.queue, func() { f(w.failure()) })
	if !t.blocked {
		t.blocked = true
		t.notified <- struct{}{}
	}
}

// next removes and returns the oldest call of the queue. If there is none, it returns nil.
func (t *thread) next() func() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.blocked = len(t.queue) > 0
	if !t.blocked {
		return nil
	}
	f := t.queue[0]
	t.queue = slices.Delete(t.queue, 0, 1)
	return f
}

// run makes the calls of do and of the queue, in a goroutine that is locked to its thread.
func (t *thread) run() {
	runtime.LockOSThread()
	for {
		select {
		case f, ok := <-t.calls:
			if !ok {
				return
			}
			t.returned <- f()
		case <-t.notified:
			for f := t.next(); f != nil; f = t.next() {
				f()
			}
		}
	}
}

// Join initializes MPI unless the program has done so, and returns the processes of the job. All processes
// must call it. It waits for them until ctx ends.
func Join(ctx context.Context, o Options) (World, error) {
	process.mu.Lock()
	defer process.mu.Unlock()
	if process.world == nil {
		w := &world{given: o.Comm}
		w.thread.calls, w.thread.returned = make(chan func() error), make(chan error)
		w.thread.notified = make(chan struct{}, 1)
		go w.thread.run()
		err := w.await(ctx, "joining the other processes", func() error { return w.initialize(o) })
		if err != nil {
			w.Fail(err)
			return nil, fmt.Errorf("%w: have all processes of the job called Init?", err)
		}
		process.world = w
	}
	if err := process.world.failure(); err != nil {
		return nil, err
	}
	if given := process.world.given; (given == nil) != (o.Comm == nil) || given != nil && *given != *o.Comm {
		return nil, errors.New("ops/mpi: got another communicator than the first Init of this process: pass the same one to each Init")
	}
	process.world.mu.Lock()
	defer process.world.mu.Unlock()
	process.world.users++
	return process.world, nil
}

// await enqueues f and waits until it has returned. It returns early if ctx ends. Then MPI cannot be used any
// more, because the goroutine that has initialized MPI is still in a call.
func (w *world) await(ctx context.Context, what string, f func() error) error {
	done := make(chan error, 1)
	w.enqueue(func(err error) {
		if err == nil {
			err = f()
		}
		done <- err
	})
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		err := fmt.Errorf("ops/mpi: %s with MPI: %w", what, context.Cause(ctx))
		w.Fail(err)
		return err
	}
}

func (w *world) initialize(o Options) (err error) {
	if w.thread.serialized, w.own, err = initialize(o.SingleThread); err != nil {
		return err
	}
	if o.Comm != nil && w.own {
		return fmt.Errorf("got a communicator, but the program has not initialized %s, for which gohvd was built",
			libraryVersion())
	}
	empi.LogErrors = false
	// If the Go runtime has no idle P, its monitor takes the P of a call of C that has run for 20 us.
	// mpirun of Open MPI binds a process to one core, so that the runtime has one P. There the monitor
	// would interrupt each long call of MPI. A second P is idle meanwhile.
	if runtime.GOMAXPROCS(0) == 1 && !o.KeepThreads {
		runtime.GOMAXPROCS(2)
	}
	w.library = libraryVersion()
	if w.comm, err = newWorld(o.Comm); err == nil {
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
	t := newTester(w.comm)
	err := w.start(t, begin)
	if err == nil {
		_, err = w.wait(ctx, t, &shmem.Yielder{Stay: true})
	}
	if err != nil {
		w.abandon(err, pins)
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

// A rank that waits for other ranks naps between calls, because MPI cannot wake it.
const (
	// eagerCalls is the number of calls after which a rank may nap. They take about a millisecond.
	eagerCalls = 1000
	// workingCall is the shortest time of a call that has moved data. The rank naps only if no call has done
	// so for eagerTime, because the data of a large tensor move in many calls.
	workingCall = 50 * time.Microsecond
	eagerTime   = time.Millisecond
	// A nap is longestNap, or the time that the rank has waited divided by napsPerWait if that is shorter. So
	// the rank is late by a small part of the time for which it has waited.
	napsPerWait = 16
	longestNap  = time.Millisecond
)

// tester tests the operation on a communicator. Its functions are made once, so that a test does not
// allocate.
type tester struct {
	begin func() error // begins and tests the operation; nil when it has begun
	poll  func() error // calls begin or tests the operation, and sets done
	done  bool
	timed bool          // whether poll measures tests
	took  time.Duration // the time that the test has taken, if timed is set
}

func newTester(c comm) *tester {
	t := new(tester)
	t.poll = func() (err error) {
		if t.begin != nil {
			err = t.begin()
			t.begin = nil
		} else if t.timed {
			began := time.Now()
			c.test()
			t.took = time.Since(began)
		} else {
			c.test()
		}
		if err == nil {
			t.done, err = c.tested()
		}
		return err
	}
	return t
}

// start begins an operation and tests whether it has completed. If a call of the queue blocks, test begins it
// later.
func (w *world) start(t *tester, begin func() error) error {
	t.begin, t.done, t.timed = begin, false, false
	return w.do(t.poll)
}

// test reports whether the operation has completed. It has not if MPI cannot be used any more.
func (w *world) test(t *tester) (done bool, err error) {
	if !t.done {
		err = w.do(t.poll)
	}
	return t.done, err
}

// wait waits until the operation on c has completed or ctx ends. The parameter y yields the core.
func (w *world) wait(ctx context.Context, t *tester, y *shmem.Yielder) (done bool, err error) {
	if w.thread.serialized {
		// MPI allocates buffers in these calls, and malloc takes memory from another arena for each thread.
		// If the goroutine moved between threads, the buffers of large operations would not fit into the
		// caches.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
	}
	var n naps
	for calls := 1; ; calls++ {
		t.timed, t.took = calls > eagerCalls, 0
		if done, err = w.test(t); done || err != nil {
			return done, err
		}
		if ctx.Err() != nil {
			return false, context.Cause(ctx)
		}
		if t.timed {
			nap(n.after(time.Now(), t.took))
		}
		if y.Stay || calls%16 == 0 {
			y.Yield()
		}
		if calls%64 == 0 && runtime.GOMAXPROCS(0) == 1 {
			runtime.Gosched() // otherwise, other goroutines run on other threads
		}
	}
}

// naps determines for how long a rank naps between two calls.
type naps struct{ worked time.Time } // when a call last moved data, or when the first call ended

// after returns the time of the nap after a call that took the given time.
func (n *naps) after(now time.Time, took time.Duration) time.Duration {
	if n.worked.IsZero() || took >= workingCall {
		n.worked = now
	}
	if waited := now.Sub(n.worked); waited >= eagerTime {
		return min(waited/napsPerWait, longestNap)
	}
	return 0
}

// nap blocks this thread for d. A timer of the Go runtime would take a millisecond if all goroutines wait.
func nap(d time.Duration) {
	if d == 0 {
		return
	}
	t := unix.NsecToTimespec(int64(d))
	_ = unix.Nanosleep(&t, nil) // a signal may end it early
}

// failure returns why MPI cannot be used any more, or nil.
func (w *world) failure() error {
	if err := w.failed.Load(); err != nil {
		return *err
	}
	return nil
}

// abandon is called when an operation has failed. It keeps the buffers of the operation, because MPI may
// still refer to them.
func (w *world) abandon(err error, pins ...*runtime.Pinner) {
	w.Fail(err)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.pinned = append(w.pinned, pins...)
}

// Register implements World.
func (w *world) Register(deterministic, oversubscribed bool) ops.Registration {
	return ops.Registration{ID: message.MPI, Plan: planner{deterministic}.plan,
		New: func(set topo.ProcessSetID, ranks []topo.Rank, _ int) (ops.Backend, error) {
			b := &backend{
				world: w, comm: newComm(ranks, set),
				pins: new(runtime.Pinner), kept: new(runtime.Pinner),
				yielder: shmem.Yielder{Stay: oversubscribed || runtime.NumCPU() == 1},
			}
			b.begin, b.tester, b.small = b.beginNow, newTester(b.comm), small[byte](b.comm)
			w.change(set, func() error { return w.comm.sub(b.comm) })
			return b, w.failure()
		}}
}

// change enqueues f, which makes or frees the communicator of a process set. If f fails, MPI cannot be used
// any more.
func (w *world) change(set topo.ProcessSetID, f func() error) {
	w.enqueue(func(failed error) {
		if failed != nil {
			return
		}
		if err := f(); err != nil {
			w.Fail(fmt.Errorf("ops/mpi: process set %d: %w", set, err))
		}
	})
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
	finalizes := w.own && last
	err := w.await(ctx, "leaving", func() error {
		if finalizes {
			empi.Finalize()
		}
		return nil
	})
	if err != nil || !finalizes {
		return err
	}
	finalized := ErrFinalized
	w.failed.Store(&finalized)
	close(w.thread.calls)
	return nil
}

// Fail implements World.
func (w *world) Fail(err error) {
	err = fmt.Errorf("MPI cannot be used any more in this process after a failure: %w", err)
	w.failed.CompareAndSwap(nil, &err)
}
