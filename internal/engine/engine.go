// Package engine runs a rank: it joins the pure controller to the queue of submitted tensors, the transport,
// the backends and the clock.
//
// Turns of the loop (RunLoopOnce) own the controller and never wait for a peer. A submission, a frame, a finished grant or the
// controller's next deadline makes a turn due. BackgroundThreadLoop runs the turns, or a caller that waits for its operation
// (Drive); the scheduler decides which. The goroutine that runs the turns polls the control
// connections. Each process set has a lane, a goroutine that executes its grants in order. All goroutines end in Shutdown or
// Close.
//
// What takes no waiting is done in a turn: a barrier, or steps of an allreduce of few bytes. Callers that drive the loop while
// they wait have it do steps of larger operations as well, which go to the lane if a step has to wait long. So a blocking call
// neither leaves the caller's thread nor wakes another.
package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/logs"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/tensorqueue"
)

// Config is what an engine needs.
type Config struct {
	Rank topo.Rank
	Size int
	// Mesh connects the ranks of this epoch. The engine owns and closes it.
	Mesh transport.Mesh
	// Backends are those that all ranks have, in the order in which they are asked.
	Backends ops.Registry

	// Sets are the process sets that the job begins with, beside the global one: ascending by id and the same at all
	// ranks.
	Sets []controller.Set

	CacheCapacity        int
	FusionThresholdBytes int64
	DisableGroupFusion   bool
	CycleTime            time.Duration
	LivenessTimeout      time.Duration
	// StallWarning is how long a tensor waits for ranks before OnStall hears of it, and again; StallShutdown how long
	// until the job is shut down. 0 is never.
	StallWarning, StallShutdown time.Duration
	// MaxResultBytes bounds the result of an allgather or alltoall, whose size other ranks decide; 0 is the memory of
	// the host.
	MaxResultBytes int64
	// Lockstep has all ranks enter every cycle of the negotiation.
	Lockstep bool
	// Deterministic makes sums equal bit by bit in every run.
	Deterministic bool
	// Cores are the processors that the loop and the lanes keep to; empty is all.
	Cores []int
	// Spin is how long the loop of a rank that is busy polls for what comes next before it parks, and a caller that waits
	// (Drive). 0 is a default that depends on LocalProcesses, and is longer for a caller with a
	// processor of its own; less than 0 is not at all. The greater it is the less often a rank that waits for others has to
	// be woken, and the more processor time it takes.
	Spin time.Duration
	// LocalProcesses is the number of processes of the job on this host that want a processor: ranks, and those that ranks run
	// operations for; 0 is Size. If there are more than processors they give way to each other while they wait.
	LocalProcesses int
	// ForClient says that the program is another process than this one.
	ForClient bool

	// Ready, if not nil, is called when this rank is connected, and returns when all are. An error ends Start.
	Ready func(context.Context) error
	// Log hears of failures; nil is silence.
	Log *zap.Logger
	// ClockDomain names the clock that the process reads; empty is that of the host and its time namespace. It is for tests, which
	// have ranks of one process measure their clocks.
	ClockDomain string
	// Recorder, if not nil, hears of every operation.
	Recorder Recorder
	// OnVerdict, if not nil, is called once when the epoch has failed, before any operation is answered with
	// it. It delays the answers, so it must bound what it does.
	OnVerdict func(*PeerError)
	// OnStallShutdown, if not nil, is called at every rank when the stall inspector ends the job, before any operation is answered with
	// that. It must bound what it does likewise.
	OnStallShutdown func(*StallError)
	// OnStall, if not nil, is called at rank 0 for each report of the stall inspector. It delays the negotiation, so it
	// must return soon.
	OnStall func(*controller.Stall)
	// StallsExplained, if not nil, reports whether the launcher prints a report of all that waits when it hears of a stall.
	// Then the log names one stall where else it names several. It is called as OnStall is.
	StallsExplained func() bool
}

// Engine is one rank of one epoch.
type Engine struct {
	// What Start has made.
	cfg    Config
	log    *zap.Logger
	traced bool // log takes what each cycle says
	start  time.Time
	ctx    context.Context
	cancel context.CancelCauseFunc // cuts off what the lanes execute
	links  []*link                 // to rank 0; at rank 0, to every other rank
	sched  *scheduler

	// For any goroutine.
	lanes     laneTable
	running   sync.WaitGroup // of the lanes
	observer  observer
	published atomic.Pointer[trace.Coordinator] // what the coordinator had counted a little earlier
	leaving   atomic.Pointer[leaving]           // not nil after Shutdown
	stop      chan struct{}                     // closed: give up without ceremony
	stopOnce  sync.Once
	ended     chan struct{} // closed: the epoch is over and every operation is answered
	released  chan struct{} // closed: connections and goroutines are gone too
	failure   error         // why the epoch ended other than by an orderly shutdown; read after ended
	mu        sync.Mutex
	finished  []finishedWork // from the lanes; guarded by mu

	// Owned by the goroutine that runs turns, which holds the scheduler's lock.
	now         time.Duration // when the turn began
	member      *controller.Member
	coordinator *controller.Coordinator // rank 0 only
	negotiation negotiation
	polled      []*frames // of the links
	clock       rankClock
	tracing     bool          // the coordinator notes arrivals for the observer
	publishedAt time.Duration // when published was
	granted     int           // grants given to lanes and not finished
	started     []*lane       // those whose work a turn has started
	stopped     bool          // STOP is applied
	stopCause   error         // why, unless this rank has asked for it: a *StallError or a *PeerError
	due         time.Duration // when the first of the operations in flight runs out of time
	complaints  complaints
	works       []*work // free
	scratch     struct {
		entries  []*tensorqueue.Entry
		failed   []event
		finished []finishedWork
		frame    []byte
		up       message.Up
		down     message.Down
	}
}

type finishedWork struct {
	w   *work
	err error
}

// Start connects the control channels and starts the engine. It waits for the other ranks until ctx ends. On
// error the mesh is closed.
func Start(ctx context.Context, cfg Config) (*Engine, error) {
	if cfg.Log == nil {
		cfg.Log = zap.NewNop()
	}
	if cfg.MaxResultBytes == 0 {
		var host unix.Sysinfo_t
		if err := unix.Sysinfo(&host); err != nil {
			return nil, errors.Join(fmt.Errorf("engine: memory of the host: %w", err), cfg.Mesh.Close())
		}
		cfg.MaxResultBytes = int64(host.Totalram) * int64(host.Unit)
	}
	e := &Engine{
		cfg: cfg, log: cfg.Log, start: time.Now(), due: never,
		stop:     make(chan struct{}),
		ended:    make(chan struct{}),
		released: make(chan struct{}),
		traced:   cfg.Log.Core().Enabled(logs.Trace),
	}
	e.observer.start, e.observer.recorder, e.observer.fusionThreshold = e.start, cfg.Recorder, cfg.FusionThresholdBytes
	e.clock.Clock = newClock(e.start, e.log)
	if cfg.ClockDomain != "" {
		e.clock.Domain = cfg.ClockDomain
	}
	e.ctx, e.cancel = context.WithCancelCause(context.Background())
	e.sched = newScheduler(e, e.observer.since, e.stop)
	e.log.Debug("init: connecting to the other ranks")
	if err := e.connect(ctx); err != nil {
		return nil, e.abandon(err)
	}
	e.openPolled()
	for _, set := range e.sets() {
		if err := e.addSet(set); err != nil {
			return nil, e.quit(err)
		}
	}
	if cfg.Ready != nil {
		e.log.Debug("init: connected, waiting for the other ranks to be")
		if err := cfg.Ready(ctx); err != nil {
			return nil, e.quit(err)
		}
	}
	e.negotiate()
	go e.BackgroundThreadLoop()
	return e, nil
}

// sets returns the process sets that the job begins with.
func (e *Engine) sets() []controller.Set {
	return append([]controller.Set{controller.Global(e.cfg.Size)}, e.cfg.Sets...)
}

// negotiate makes the controller.
func (e *Engine) negotiate() {
	sets := e.sets()
	lockstep := e.cfg.Lockstep
	own := slices.DeleteFunc(slices.Clone(sets), func(s controller.Set) bool { return !lockstep && !slices.Contains(s.Ranks, e.cfg.Rank) })
	e.member = controller.NewMember(controller.MemberConfig{
		Rank: e.cfg.Rank, Sets: own, LivenessTimeout: e.cfg.LivenessTimeout, Lockstep: lockstep,
	}, 0)
	if e.cfg.Rank == 0 {
		e.coordinator = controller.NewCoordinator(controller.CoordinatorConfig{
			Sets: sets, CacheCapacity: e.cfg.CacheCapacity, FusionThresholdBytes: e.cfg.FusionThresholdBytes,
			DisableGroupFusion: e.cfg.DisableGroupFusion, Deterministic: e.cfg.Deterministic,
			CycleTime: e.cfg.CycleTime, LivenessTimeout: e.cfg.LivenessTimeout,
			StallWarning: e.cfg.StallWarning, StallShutdown: e.cfg.StallShutdown,
			Lockstep: lockstep, Plan: e.plan,
		}, 0)
	}
	if e.negotiation = (events{e}); lockstep {
		e.negotiation = newLockstep(e)
	}
}

// plan chooses for the coordinator what runs a response. Every lane has the same backends, and rank 0 need not be a member of
// the set: so the global set's answer holds for all.
func (e *Engine) plan(_ topo.ProcessSetID, r *message.Response, numBytes int64) (message.Backend, message.Algorithm, error) {
	l := e.lanes.all[0]
	if err := l.checkResult(r.Kind, numBytes); err != nil {
		return message.NoBackend, message.NoAlgorithm, err
	}
	if len(r.Parts) == 0 || r.DType.Valid() {
		return l.manager.Plan(r, numBytes)
	}
	return planTypes(l.manager, r, numBytes)
}

// planTypes chooses for a group of several types, which run one after the other: what runs each of them. If the algorithms
// differ that is the direct one, which has no conditions.
func planTypes(m *ops.Manager, r *message.Response, numBytes int64) (backend message.Backend, algorithm message.Algorithm, err error) {
	one := *r
	one.Parts = nil
	for dt := range r.Parts.Types() {
		one.DType = dt
		b, a, err := m.Plan(&one, numBytes)
		switch {
		case err != nil:
			return message.NoBackend, message.NoAlgorithm, err
		case backend == message.NoBackend:
			backend, algorithm = b, a
		case b != backend:
			return message.NoBackend, message.NoAlgorithm, fmt.Errorf("no backend for all types of the group: %v for some, %v for others", backend, b)
		case a != algorithm:
			algorithm = message.Direct
		}
	}
	return backend, algorithm, nil
}

// abandon closes the mesh and returns the error of a Start that failed.
func (e *Engine) abandon(err error) error { return errors.Join(err, e.cfg.Mesh.Close()) }

// quit is abandon for an engine that has lanes: it ends them.
func (e *Engine) quit(err error) error {
	e.cancel(err)
	e.endLanes(err)
	e.running.Wait()
	return e.abandon(err)
}

// connect makes the control channels: a star with rank 0 in the middle.
func (e *Engine) connect(ctx context.Context) error {
	var peers []topo.Rank
	if e.cfg.Rank == 0 {
		for r := 1; r < e.cfg.Size; r++ {
			peers = append(peers, topo.Rank(r))
		}
	} else {
		peers = []topo.Rank{0}
	}
	e.links = make([]*link, len(peers))
	errs := make([]error, len(peers))
	var wg sync.WaitGroup
	for i, p := range peers {
		wg.Go(func() {
			conn, err := e.cfg.Mesh.Conn(ctx, transport.Control, p)
			e.links[i], errs[i] = &link{peer: p, conn: conn}, err
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("engine: rank %d: control channel: %w", e.cfg.Rank, err)
	}
	return nil
}

// Departure says why a rank leaves. The zero value is an orderly shutdown that needs no explanation.
type Departure struct {
	// Reason is a clause for the other ranks, as `exit status 1`. It may be empty unless Failed.
	Reason string
	// Failed says that the program of the rank has failed. Then the job has.
	Failed bool
}

// leaving is a Departure in progress. It is replaced, never changed.
type leaving struct {
	Departure
	expired bool // the context of Shutdown has ended
}

const (
	// expireTimeout is how long a rank whose Shutdown is cut short takes to tell the others.
	expireTimeout = 500 * time.Millisecond
	// failTimeout is how long a rank that fails waits for the verdict.
	failTimeout = time.Second
)

// Shutdown takes this rank out of the job. What it has submitted is still run if every other rank submits it too; it
// submits nothing more. Operations of process sets without this rank go on. If another rank waits for an operation that
// this one has not submitted, or does so later, the job has failed and this rank is to blame. Rank 0, which
// coordinates, serves the others until they have shut down too.
//
// It returns when no other rank needs this one, or when ctx ends, which fails this rank unless it was ready to go. With
// why.Failed it fails this rank at once and waits for a second at most. The error is why the epoch had failed before, or
// ctx's.
func (e *Engine) Shutdown(ctx context.Context, why Departure) error {
	e.depart(&leaving{Departure: why})
	if why.Failed {
		e.awaitEnd(ctx, failTimeout)
		return e.failure
	}
	select {
	case <-e.ended:
		e.Close()
		return e.failure
	case <-ctx.Done():
		e.depart(&leaving{Departure: why, expired: true})
		e.awaitEnd(context.Background(), expireTimeout)
		return fmt.Errorf("engine: rank %d: shutdown: %w", e.cfg.Rank, ctx.Err())
	}
}

// depart makes the loop end this rank.
func (e *Engine) depart(how *leaving) {
	for _, l := range e.lanes.snapshot() {
		l.queue.Close(ErrShutDown)
	}
	e.leaving.Store(how)
	e.sched.notify()
}

// awaitEnd closes the engine when the epoch has ended, at the latest after d or when ctx ends.
func (e *Engine) awaitEnd(ctx context.Context, d time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	select {
	case <-e.ended:
	case <-ctx.Done():
	}
	e.Close()
}

// Close ends this rank at once and lets go of everything. To the other ranks it is a death, unless the epoch is
// over. It may be called more than once.
func (e *Engine) Close() {
	e.stopOnce.Do(func() {
		close(e.stop)
		e.sched.notify() // it may be polling
	})
	<-e.released
}

// Ended is closed when the epoch is over for this rank and every operation is answered. Err then says why.
func (e *Engine) Ended() <-chan struct{} { return e.ended }

// Err is why the epoch ended: nil after an orderly shutdown. It must not be called before Ended is closed.
func (e *Engine) Err() error { return e.failure }
