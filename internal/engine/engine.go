// Package engine runs a rank: it connects the pure controller to the queue of submitted tensors, the
// transport, the backends and the clock.
//
// The controller is used only in turns of the loop (RunLoopOnce). A turn never waits for a peer. A turn
// becomes due when a tensor is submitted, a frame arrives, a grant has finished, or the controller's next
// deadline passes. Turns run in BackgroundThreadLoop, or in a caller that waits for its operation (Drive).
// The scheduler decides which of them runs a turn. The goroutine that runs the turns also polls the control
// connections. Each process set has a lane, a goroutine that executes the grants of the set in order. All
// goroutines end in Shutdown or Close.
//
// A turn executes work that does not wait: a barrier, or steps of an allreduce of few bytes. A caller that
// drives the loop while it waits also executes steps of larger operations in its turns. If a step has to wait
// for long, the operation moves to its lane. If no step has to wait, a blocking call stays in the caller's
// thread and wakes no other thread.
package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/cgroup"
	"github.com/gohvd/gohvd/internal/control"
	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/internal/exec"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/sched"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/internal/watch"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/tensorqueue"
)

// Config holds the settings of an engine and the components that it uses.
type Config struct {
	Rank topo.Rank
	Size int
	// Hosts has the host of each rank. If the job has more than LeadersAbove ranks, the lowest rank of each
	// host, its leader, passes on the control frames of the host's ranks, except on the host of rank 0. If
	// there are more than LevelsAbove other hosts, some of the leaders pass on the frames of others.
	// LeadersAbove 0 selects 64, and LevelsAbove 0 the greater one of 64 and LeadersAbove; only tests set
	// LevelsAbove. If Hosts is empty, every rank has a control connection to rank 0.
	Hosts                     []string
	LeadersAbove, LevelsAbove int
	// Mesh connects the ranks of this epoch. The engine owns and closes it.
	Mesh transport.Mesh
	// Memory is the memory that this rank shares with other ranks, for messages. It is nil if no ranks share
	// memory. Groups has, for each rank, the lowest rank with which it shares memory.
	Memory transport.Memory
	Groups []topo.Rank
	// Backends are the backends that every rank has, in order of preference.
	Backends ops.Registry
	// Devices copies tensors on CUDA devices to host memory for operations that no backend for devices can
	// run. If it is nil, such operations fail.
	Devices *cuda.Devices

	// Sets are the process sets that exist from the start, except the global set. They are in ascending order
	// of their ids and must be equal at all ranks.
	Sets []controller.Set

	CacheCapacity        int
	FusionThresholdBytes int64
	DisableGroupFusion   bool
	CycleTime            time.Duration
	LivenessTimeout      time.Duration
	// StallWarning is how long a tensor waits for ranks before OnStall is called. After each further period
	// of this length, OnStall is called again. StallShutdown is how long a tensor waits before the job is
	// shut down. In both fields, 0 means never.
	StallWarning, StallShutdown time.Duration
	// MaxResultBytes is the maximum size of the result of an allgather or alltoall. It protects this rank,
	// because other ranks determine the size of the result. 0 selects the memory of the host, and for results
	// in host memory the limit of a cgroup of this process if that is smaller.
	MaxResultBytes int64
	// Lockstep makes the ranks negotiate by collectives that all ranks enter in every cycle.
	Lockstep bool
	// Collectives are the collectives for Lockstep. If it is nil, the ranks use their control connections.
	Collectives Collectives
	// Deterministic makes each sum bitwise equal in every run of the program.
	Deterministic bool
	// Cores are the processors to which the threads of the loop and of the lanes are bound. If Cores is
	// empty, the threads are not bound.
	Cores []int
	// Spin is the poll budget: how long a busy rank, or a caller that waits in Drive, polls for new work
	// before it parks. 0 selects a default that depends on LocalProcesses. The default is longer for a caller
	// that has a processor of its own. A negative value disables polling. With a greater value, a rank that
	// waits for other ranks is woken less often but uses more processor time.
	Spin time.Duration
	// LocalProcesses is the number of processes of the job on this host that need a processor: the ranks and,
	// with ForClient, the programs that submit operations from other processes. 0 selects Size. If
	// LocalProcesses exceeds Processors, the processes yield to each other while they wait.
	LocalProcesses int
	// Processors is the number of processors on which these processes may run. 0 selects the number of
	// processors on which this process may run.
	Processors int
	// ForClient is set if a program in another process submits the operations, as with the sidecar.
	ForClient bool

	// If Tuner is not nil, rank 0 changes settings during the job as it says. The engine starts and closes
	// it.
	Tuner Tuner

	// If Ready is not nil, Start calls it when this rank is connected, and waits until it returns. Ready
	// returns when all ranks are connected. If Ready returns an error, Start fails.
	Ready func(context.Context) error
	// Log receives the log messages of the engine. nil disables logging.
	Log *zap.Logger
	// ClockDomain is the name of the clock that the process reads. If it is empty, the engine derives a name
	// from the host and the time namespace. Tests set different names so that the ranks of one process
	// measure the offsets of their clocks.
	ClockDomain string
	// If Recorder is not nil, it receives a record of every operation.
	Recorder watch.Recorder
	// If OnVerdict is not nil, it is called when the epoch has failed, before any operation ends with the
	// verdict. If the job stops because ranks have shut down, and ranks fail before all have left, it is
	// called again for these. The operations end only after it has returned, so it must return within a
	// bounded time.
	OnVerdict func(*PeerError)
	// If OnStallShutdown is not nil, it is called at every rank when the stall inspector ends the job, before
	// any operation ends with the *StallError. Like OnVerdict, it must return within a bounded time.
	OnStallShutdown func(*StallError)
	// If OnStall is not nil, it is called at rank 0 for each report of the stall inspector. It delays the
	// negotiation, so it must return soon.
	OnStall func(*controller.Stall)
	// StallsExplained reports whether the launcher prints a report of all waiting operations when it receives
	// a stall. If so, the log names only one stall in each window of time. Otherwise, and if StallsExplained
	// is nil, the log names several. Like OnStall, StallsExplained is called at rank 0 and must return soon.
	StallsExplained func() bool
}

// Tuner decides which settings change during a job. The engine calls Granted and Changed in its turns, so
// they must return at once.
type Tuner interface {
	// Start begins to tune. After a change, the Tuner calls notify, which does not block.
	Start(notify func())
	// Granted reports that a tensor of the global set was granted for an allreduce. bytes is its size.
	Granted(name string, bytes int64, at time.Duration)
	// Changed returns the values that must hold from now on, and whether they have changed.
	Changed() (values message.Tuning, changed bool)
	// Stats returns the state of the search. Any goroutine may call it.
	Stats() *trace.Tuning
	// Close ends the search and waits for its goroutine.
	Close()
}

// Engine runs one rank in one epoch of a job.
type Engine struct {
	// These fields are set by Start.
	cfg    Config
	log    *zap.Logger
	start  time.Time
	exec   *exec.Executor
	links  *control.Links
	handle func(control.Event) error // handleEvent
	sched  *sched.Scheduler
	levels int // of leaders (topo.Leaders.Levels)

	// Any goroutine may use these fields.
	sets     setTable
	observer *watch.Observer
	leaving  atomic.Pointer[leaving] // not nil after Shutdown was called
	stop     chan struct{}           // when closed, the engine ends at once
	// flushing ends, by endFlush, when this rank no longer waits until its messages have left it.
	flushing context.Context
	endFlush context.CancelFunc
	stopOnce sync.Once
	over     chan struct{} // when closed, the epoch is over, but operations may not have ended yet
	ended    chan struct{} // when closed, the epoch is over and every operation has ended
	released chan struct{} // when closed, connections and goroutines are gone too
	failure  error         // why the epoch ended (nil after a shutdown); read only after over is closed
	mu       sync.Mutex
	finished []finishedWork // work that lanes have ended; guarded by mu
	reported atomic.Bool    // whether finished has elements; stored with mu held
	messages messages

	// Only the goroutine that runs turns may use these fields. It holds the scheduler's lock.
	now         time.Duration // the time at which the turn began
	member      *controller.Member
	coordinator *controller.Coordinator // only at rank 0
	combiner    *controller.Combiner    // only at leaders
	leader      *leader                 // only at leaders
	negotiation negotiation
	clock       *control.Clock
	tracing     bool          // whether the coordinator records arrival times for the observer
	cycleTime   time.Duration // HOROVOD_CYCLE_TIME or the value that rank 0 has chosen since
	granted     int           // number of grants that were dispatched and are not finished
	onDevices   uint64        // number of grants on devices that were dispatched
	announced   bool          // whether the member knows that this rank submits nothing more
	stopped     bool          // whether the coordinator's stop was applied
	stopCause   error         // *StallError or *PeerError; nil if this rank asked for the stop
	due         time.Duration // the earliest deadline of the operations in flight
	expiredDue  time.Duration // the time of the next report that the context of Shutdown has ended, or never
	stalls      *watch.Stalls
	frames      *watch.Frames
	works       []*exec.Work // work values that later grants can reuse
	scratch     struct {
		entries  []*tensorqueue.Entry
		failed   []control.Event
		finished []finishedWork
		frame    []byte
		up       message.Up
		down     message.Down
		// The fields below are used only if there are leaders.
		parts []message.Part
		to    []topo.Rank
	}
}

type finishedWork struct {
	w   *exec.Work // nil if the rank fails because of err, whatever its work does
	err error
}

// Start opens the control connections and starts the engine. It blocks until the other ranks are connected
// too, or until ctx ends. On error it closes the mesh.
func Start(ctx context.Context, cfg Config) (*Engine, error) {
	if cfg.Log == nil {
		cfg.Log = zap.NewNop()
	}
	maxDeviceBytes := cfg.MaxResultBytes
	if cfg.MaxResultBytes == 0 {
		var host unix.Sysinfo_t
		if err := unix.Sysinfo(&host); err != nil {
			return nil, errors.Join(fmt.Errorf("engine: reading the memory size of the host: %w", err),
				cfg.Mesh.Close())
		}
		maxDeviceBytes = int64(host.Totalram) * int64(host.Unit)
		cfg.MaxResultBytes = maxDeviceBytes
		if limit, limited := cgroup.SmallestLimit(os.DirFS("/")); limited {
			cfg.MaxResultBytes = int64(min(limit, uint64(cfg.MaxResultBytes)))
		}
	}
	e := &Engine{
		cfg: cfg, log: cfg.Log, start: time.Now(), due: controller.Never, expiredDue: controller.Never,
		cycleTime: cfg.CycleTime,
		stop:      make(chan struct{}),
		over:      make(chan struct{}),
		ended:     make(chan struct{}),
		released:  make(chan struct{}),
		stalls:    watch.NewStalls(cfg.Log, cfg.StallsExplained, cfg.OnStall),
		frames:    watch.NewFrames(cfg.Log),
	}
	e.observer = watch.New(e.start, cfg.Recorder, cfg.FusionThresholdBytes, cfg.Rank == 0)
	clock, err := trace.NewClock(e.start)
	if err != nil {
		e.log.Warn("reading the monotonic clock failed: times of this rank are not comparable with times of "+
			"other ranks of the host", zap.Error(err))
	}
	if cfg.ClockDomain != "" {
		clock.Domain = cfg.ClockDomain
	}
	e.clock = control.NewClock(clock, control.ClockConfig{
		Rank: cfg.Rank, Now: e.observer.Since, Measured: e.observer.Align,
		Up:   func(probe []byte) { _ = e.sendUp(probe) },
		Down: func(to topo.Rank, answer []byte) { _, _ = e.links.Down(to, answer) },
	})
	cores, log := cfg.Cores, cfg.Log // Pin, which lives as long as e, must not keep the rest of cfg
	e.exec = exec.New(exec.Config{
		Backends: cfg.Backends, Devices: cfg.Devices, MaxResultBytes: cfg.MaxResultBytes,
		MaxDeviceBytes: maxDeviceBytes,
		Observer:       e.observer, Finished: e.workFinished, Retire: e.retire,
		Pin: func() { sched.Pin(cores, log) }, Log: e.log,
	})
	e.flushing, e.endFlush = context.WithCancel(context.Background())
	e.handle = e.handleEvent
	e.sched = sched.New(e, e.observer.Since, e.stop)
	e.sets = setTable{
		rank: cfg.Rank, exec: e.exec, mesh: cfg.Mesh, observer: e.observer, forget: e.messages.drop,
	}
	e.messages = messages{
		cfg: &e.cfg, sets: &e.sets, observer: e.observer, notify: e.sched.Notify,
		receives: func(from []topo.Rank) { e.member.Receives(from) },
	}
	e.log.Debug("init: connecting to the other ranks")
	// The components share the lists of ranks, which nobody changes.
	sets, leaders := append([]controller.Set{controller.Global(cfg.Size)}, cfg.Sets...), cfg.leaders()
	e.levels, e.cfg.Hosts = leaders.Levels(), nil // nothing else needs the hosts
	if err := e.connect(ctx, sets, leaders); err != nil {
		return nil, e.abandon(err)
	}
	e.startPolling()
	for _, set := range sets {
		if err := e.sets.add(set); err != nil {
			return nil, e.quit(err)
		}
	}
	if cfg.Ready != nil {
		e.log.Debug("init: connected, waiting until all ranks are connected")
		if err := cfg.Ready(ctx); err != nil {
			return nil, e.quit(err)
		}
	}
	e.negotiate(sets, leaders)
	go e.BackgroundThreadLoop()
	return e, nil
}

// negotiate creates the member, the negotiation and, at rank 0, the coordinator. sets are the process sets
// that exist from the start.
func (e *Engine) negotiate(sets []controller.Set, leaders topo.Leaders) {
	lockstep := e.cfg.Lockstep
	own := slices.DeleteFunc(slices.Clone(sets), func(s controller.Set) bool {
		return !lockstep && !slices.Contains(s.Ranks, e.cfg.Rank)
	})
	e.member = controller.NewMember(controller.MemberConfig{
		Rank: e.cfg.Rank, Sets: own, Leader: e.links.Upstream(), Combiner: e.combiner,
		Keeps:           e.combiner != nil || e.cfg.sharesBelow(),
		LivenessTimeout: e.cfg.LivenessTimeout, Lockstep: lockstep,
	}, 0)
	if e.cfg.Rank == 0 {
		e.coordinator = controller.NewCoordinator(controller.CoordinatorConfig{
			Sets: sets, CacheCapacity: e.cfg.CacheCapacity, FusionThresholdBytes: e.cfg.FusionThresholdBytes,
			DisableGroupFusion: e.cfg.DisableGroupFusion, Deterministic: e.cfg.Deterministic,
			CycleTime: e.cfg.CycleTime, LivenessTimeout: e.cfg.LivenessTimeout,
			StallWarning: e.cfg.StallWarning, StallShutdown: e.cfg.StallShutdown,
			Lockstep: lockstep, Leaders: leaders, Groups: e.cfg.Groups,
			Plan: e.exec.Plan,
		}, 0)
	}
	if e.cfg.Tuner != nil {
		e.cfg.Tuner.Start(e.sched.Notify)
	}
	e.negotiation = (events{e})
	if lockstep {
		e.negotiation = newLockstep(e)
	}
}

// abandon closes the mesh and returns the error with which Start fails.
func (e *Engine) abandon(err error) error { return errors.Join(err, e.cfg.Mesh.Close()) }

// quit ends the lanes, closes the mesh and returns the error with which Start fails.
func (e *Engine) quit(err error) error {
	e.exec.Abort(err)
	e.sets.endLanes(err)
	e.exec.Wait()
	return e.abandon(err)
}

// leaders returns the leaders of the job, or nil (control.Leaders).
func (c *Config) leaders() topo.Leaders {
	if c.Lockstep {
		return nil
	}
	return control.Leaders(c.Hosts, c.Size, c.LeadersAbove, c.LevelsAbove)
}

// sharesBelow reports whether this rank is the lowest of several ranks that share memory.
func (c *Config) sharesBelow() bool {
	for r, lowest := range c.Groups {
		if topo.Rank(r) != c.Rank && lowest == c.Rank {
			return true
		}
	}
	return false
}

// connect opens the control connections, and makes the combiner if this rank leads other ranks.
func (e *Engine) connect(ctx context.Context, sets []controller.Set, leaders topo.Leaders) (err error) {
	e.links, err = control.Open(ctx, control.Config{
		Rank: e.cfg.Rank, Size: e.cfg.Size, Leaders: leaders, Mesh: e.cfg.Mesh, Sent: e.sched.Sent,
	})
	if err != nil {
		return err
	}
	if leaders != nil {
		e.log.Debug("init: leaders pass on control frames", zap.Int32("leader",
			int32(leaders.Of(e.cfg.Rank))))
	}
	e.combiner = controller.NewCombiner(e.cfg.Rank, leaders, sets, 0)
	if e.combiner != nil {
		e.leader = &leader{
			combiner: e.combiner, links: e.links, sched: e.sched, toRoot: e.sendToRoot,
			failed: func(err error) { e.suspect(e.self(), err) },
		}
	}
	return nil
}

// startPolling makes the scheduler poll the control connections.
func (e *Engine) startPolling() {
	e.cfg.Mesh.OnNotify(e.sched.Notify)
	e.sched.Poll(e.cfg.Mesh, sched.NewLimits(e.cfg.Spin, len(e.cfg.Cores) > 0,
		e.cfg.Mesh.EntersKernel() && e.cfg.Collectives == nil,
		e.cfg.ForClient,
		cmp.Or(e.cfg.LocalProcesses, e.cfg.Size), cmp.Or(e.cfg.Processors, runtime.NumCPU()),
		runtime.GOMAXPROCS(0)))
}

// Departure is the reason why a rank leaves the job. The zero value means an orderly shutdown without an
// explanation.
type Departure struct {
	// Reason is a clause that appears in the errors of the other ranks, such as `exit status 1`. It may be
	// empty if Failed is false.
	Reason string
	// Failed is set if the program of the rank has failed. Then the job fails.
	Failed bool
}

// leaving is the state of a Shutdown in progress. A value of it is never changed: when the state changes, a
// new value replaces the old one.
type leaving struct {
	Departure
	expired bool // whether the context of Shutdown has ended
	// waited is how long Shutdown has waited until the deadline of its context. It is 0 if the context was
	// canceled, or had ended before Shutdown was called.
	waited time.Duration
}

const (
	// expireGrace is how much longer Shutdown waits for the end of the epoch, after its context has ended,
	// than the coordinator may need for its verdict, if there is a suspicion.
	expireGrace = 800 * time.Millisecond
	// failTimeout is how long the Shutdown of a failed rank waits for the verdict.
	failTimeout = time.Second
)

// Shutdown takes this rank out of the job. Afterwards this rank can submit no more operations. Operations
// that it has submitted still run if every other rank submits them too. Operations of process sets without
// this rank continue. If another rank waits for an operation that this rank has not submitted, or submits
// such an operation later, the job fails and the verdict names this rank. Rank 0, the coordinator, serves the
// other ranks until they have shut down too.
//
// Shutdown returns when no other rank needs this one, or soon after ctx has ended. If the deadline of ctx
// passes before this rank can leave, the job fails, and the verdict names the ranks for which it has waited.
// A rank other than 0 that has sent its bye closes without a verdict then. If ctx is canceled before, this
// rank fails. If why.Failed is set, the rank fails at once, and Shutdown waits at most one second. If the
// epoch had already failed, Shutdown returns that error. If ctx ended, it returns the error of ctx and, if it
// names other ranks, the verdict.
func (e *Engine) Shutdown(ctx context.Context, why Departure) error {
	began, late := time.Now(), ctx.Err() != nil
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
		expired := &leaving{Departure: why, expired: true}
		if !late && errors.Is(ctx.Err(), context.DeadlineExceeded) {
			expired.waited = max(time.Since(began), time.Millisecond)
		}
		e.depart(expired)
		e.endFlush()
		e.awaitEnd(context.Background(), controller.LongestVerdict(e.levels)+expireGrace)
		err := ctx.Err()
		if p, ok := errors.AsType[*PeerError](e.failure); ok {
			err = fmt.Errorf("%w: %w", err, p)
		}
		return fmt.Errorf("engine: rank %d: shutdown: %w", e.cfg.Rank, err)
	}
}

// depart closes the queues and makes the loop take this rank out of the job.
func (e *Engine) depart(how *leaving) {
	for _, s := range e.sets.snapshot() {
		s.queue.Close(ErrShutDown)
	}
	e.messages.quit(ErrShutDown)
	e.leaving.Store(how)
	e.sched.Notify()
}

// awaitEnd waits until the epoch has ended, until the duration d has passed, or until ctx ends. Then it
// closes the engine.
func (e *Engine) awaitEnd(ctx context.Context, d time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	select {
	case <-e.ended:
	case <-ctx.Done():
	}
	e.Close()
}

// Close ends this rank at once and waits until its connections and goroutines are gone. Unless the epoch is
// over, a call of Close looks to the other ranks like the death of the process. Close may be called more than
// once.
func (e *Engine) Close() {
	e.stopOnce.Do(func() {
		close(e.stop)
		e.endFlush()
		e.sched.Notify() // the loop may be polling
	})
	<-e.released
}

// Ended returns a channel that is closed when the epoch is over for this rank and every operation has ended.
// Afterwards Err returns the reason.
func (e *Engine) Ended() <-chan struct{} { return e.ended }

// Over returns a channel that is closed when the epoch is over for this rank, before any operation ends
// because of it. Afterwards Err returns the reason.
func (e *Engine) Over() <-chan struct{} { return e.over }

// Err returns why the epoch ended. It returns nil after an orderly shutdown. It must not be called before the
// channel of Over is closed.
func (e *Engine) Err() error { return e.failure }
