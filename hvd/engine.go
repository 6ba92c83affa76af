package hvd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/joblink"
	"github.com/gohvd/gohvd/internal/logs"
	"github.com/gohvd/gohvd/internal/meeting"
	"github.com/gohvd/gohvd/internal/observe"
	"github.com/gohvd/gohvd/internal/place"
	"github.com/gohvd/gohvd/internal/session"
	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/shm"
	"github.com/gohvd/gohvd/ops/tcp"
	"github.com/gohvd/gohvd/rendezvous"
	"github.com/gohvd/gohvd/store"
	"github.com/gohvd/gohvd/topo"
	"github.com/gohvd/gohvd/transport"
)

// Engine is one rank of one epoch of a job. Programs that are one rank use the package-level functions; a
// process that holds several ranks makes one Engine for each and passes it to operations by On.
type Engine struct {
	engine      *engine.Engine
	at          *meeting.Meeting
	session     *session.Session // nil in a job of one
	watch       *observe.Rank
	place       topo.Topology
	homogeneous bool
	epoch       uint64

	log *zap.Logger // nil if it is the program's

	global      *ProcessSet
	sets        setTable
	slots       slots
	dynamicSets bool
	timeout     time.Duration // of operations that say none
	abandoned   abandonedWaits
}

// InitOption changes what Init and New read from the environment.
type InitOption func(*initOptions)

type initOptions struct {
	settings    map[string]string
	store       store.Store
	method      string
	methods     place.Methods
	id          *meeting.ID
	device      string
	shareDevice bool
	kept        **meeting.Meeting // of Inits before, and for those to come
	sidecar     bool              // another process computes
	log         *zap.Logger
	ownLog      bool // not the program's
	lastEpoch   uint64
	sets        [][]int
	onStall     func(Stall)
}

// WithSetting sets a setting by the name of its environment variable, which it overrides.
func WithSetting(name, value string) InitOption {
	return func(o *initOptions) {
		if o.settings == nil {
			o.settings = make(map[string]string)
		}
		o.settings[name] = value
	}
}

// WithLogger sends the engine's log to l, whatever HOROVOD_LOG_LEVEL says.
func WithLogger(l *zap.Logger) InitOption { return func(o *initOptions) { o.log = l } }

// WithProcessSets makes process sets of these ranks beside that of all, numbered from 1 in this order. All ranks must give
// the same.
func WithProcessSets(sets ...[]int) InitOption {
	return func(o *initOptions) { o.sets = append(o.sets, sets...) }
}

// Stall is a report of the stall inspector: a tensor has waited long, and for whom.
type Stall struct {
	// Op is the operation, as "allreduce", or empty if that is not known; Tensor its name; ProcessSet the ID of its set.
	Op, Tensor string
	ProcessSet int
	// Group is that of a tensor which every rank has submitted, and which waits for the rest of its group; else empty.
	Group string
	// Missing are the ranks that have not submitted the tensor, or the rest of its group, or, if Executing, not finished
	// the operation.
	Missing   []int
	Waited    time.Duration
	Executing bool
}

// OnStall makes f hear of stalls at rank 0, which knows of all ranks': after HOROVOD_STALL_CHECK_TIME_SECONDS and again
// each time that much more has passed. Stalls are logged besides. f is called by the background loop, so it must return
// soon and must not wait for an operation.
func OnStall(f func(Stall)) InitOption { return func(o *initOptions) { o.onStall = f } }

// After makes the new engine's epoch follow that of prev, which was shut down. Nil is none.
func After(prev *Engine) InitOption {
	if prev == nil {
		return afterEpoch(0)
	}
	return afterEpoch(prev.epoch)
}

func afterEpoch(n uint64) InitOption {
	return func(o *initOptions) { o.lastEpoch = max(o.lastEpoch, n) }
}

// New joins a rank to its job and waits until all ranks have come, as Init does, without making it the process's.
func New(ctx context.Context, opts ...InitOption) (*Engine, error) {
	o, cfg, err := readOptions(opts)
	if err != nil {
		return nil, fmt.Errorf("hvd: init: %w", err)
	}
	for _, w := range cfg.Warnings {
		o.log.Warn(w)
	}
	e := &Engine{dynamicSets: cfg.DynamicProcessSets, timeout: cfg.OperationTimeout}
	if o.ownLog {
		e.log = o.log
	}
	ctx, cancel := context.WithTimeout(ctx, cfg.StartTimeout)
	defer cancel()
	if err := e.start(ctx, cfg, o); err != nil {
		return nil, fmt.Errorf("hvd: init: %w", errors.Join(dial.ExplainLimit(err), e.release()))
	}
	return e, nil
}

// readOptions takes the options, and reads the settings that they leave.
func readOptions(opts []InitOption) (*initOptions, config.Config, error) {
	o := new(initOptions)
	for _, opt := range opts {
		opt(o)
	}
	cfg, err := config.FromEnvironment(o.settings, o.store != nil || o.method != "" || o.id != nil)
	if err == nil && o.log == nil {
		o.log = logs.New(os.Stderr, &cfg)
		o.ownLog = true
	}
	return o, cfg, err
}

func (e *Engine) start(ctx context.Context, cfg config.Config, o *initOptions) (err error) {
	if e.at, err = o.meet(ctx, cfg); err != nil {
		return err
	}
	cfg = e.at.Settings
	rank, size := cfg.Rank, cfg.Size
	sets, err := staticSets(o.sets, size)
	if err != nil {
		return err
	}
	log := o.log.With(zap.Int("rank", rank), zap.Int("size", size), zap.String("host", cfg.Hostname))
	hosts := []string{cfg.Hostname}
	e.epoch = o.lastEpoch + 1
	ecfg := engine.Config{
		Rank: topo.Rank(rank), Size: size, Sets: sets, Mesh: transport.Alone{},
		CacheCapacity: cfg.CacheCapacity, FusionThresholdBytes: cfg.FusionThresholdBytes, DisableGroupFusion: cfg.DisableGroupFusion,
		CycleTime: cfg.CycleTime, LivenessTimeout: cfg.LivenessTimeout, Lockstep: cfg.Lockstep, Deterministic: cfg.Deterministic,
		StallWarning: cfg.StallWarning, StallShutdown: cfg.StallShutdown,
		OnVerdict: e.publish,
	}
	if size > 1 {
		e.session, err = session.Open(ctx, session.Config{
			At: e.at, LastEpoch: o.lastEpoch, Terms: map[string]string{"the list of process sets": setsText(sets)}, Device: o.device, SharesDevice: o.shareDevice, Log: log,
		})
		if err != nil {
			return e.failed(err)
		}
		var stop func()
		ctx, stop = e.session.Watch(ctx)
		defer stop()
		ecfg.Ready = e.session.Ready
		e.epoch, hosts = e.session.Epoch, e.session.Hosts
		ecfg.Mesh, ecfg.LocalProcesses = e.session.Mesh, o.processes(e.session.LocalSize)
		if e.session.Memory != nil {
			ecfg.Backends = append(ecfg.Backends, shm.Register(e.session.Memory, shm.Config{Crowded: shm.Crowded(ecfg.LocalProcesses)}))
		}
	}
	if err := e.at.Met(ctx); err != nil {
		log.Warn("rank 0 has not removed what it left for the other ranks to meet by", zap.Error(err))
	}
	ecfg.Backends = append(ecfg.Backends, tcp.Register(ecfg.Mesh, tcp.Config{Deterministic: cfg.Deterministic}))
	if e.session != nil {
		ecfg.Backends = slices.DeleteFunc(ecfg.Backends, func(r ops.Registration) bool {
			ranks, _ := e.session.Lacking(r.ID)
			return len(ranks) > 0
		})
	}
	log = log.With(zap.Uint64("epoch", e.epoch))
	ecfg.Log = log
	e.place, e.homogeneous = topologyOf(cfg, hosts, rank), topo.IsHomogeneous(hosts)
	if err := e.place.Validate(); err != nil {
		if e.session != nil {
			err = errors.Join(e.failed(e.session.Fail(err)), ecfg.Mesh.Close())
		}
		return err
	}
	e.global = e.newSet(topo.Global, controller.Global(size).Ranks)
	for _, s := range sets {
		e.newSet(s.ID, s.Ranks)
	}
	if n := e.place.LocalRank; n < len(cfg.ThreadAffinity) {
		ecfg.Cores = cfg.ThreadAffinity[n : n+1]
	}
	if o.onStall != nil {
		ecfg.OnStall = func(s *controller.Stall) { o.onStall(newStall(s)) }
	}
	e.watch = observe.New(observe.Config{
		Settings: &cfg, Rank: rank, Size: size, LocalRank: e.place.LocalRank, Host: cfg.Hostname, Epoch: e.epoch,
		Launcher: e.launcher(), Sets: e.members, Log: log,
	})
	e.watch.Configure(&ecfg)
	if e.engine, err = engine.Start(ctx, ecfg); err != nil {
		if e.session != nil {
			err = e.failed(e.session.Fail(err))
		}
		return err
	}
	if err := e.watch.Attach(e.engine); err != nil {
		e.engine.Close()
		return err
	}
	return nil
}

func newStall(s *controller.Stall) Stall {
	stall := Stall{Tensor: s.Name, ProcessSet: int(s.Set), Group: s.Group, Waited: s.Waited, Executing: s.Executing}
	if s.Kind != message.NoKind {
		stall.Op = s.Kind.String()
	}
	for _, r := range s.Missing {
		stall.Missing = append(stall.Missing, int(r))
	}
	return stall
}

// topologyOf is where this rank stands: what the environment says, else what follows from the hosts.
func topologyOf(cfg config.Config, hosts []string, rank int) topo.Topology {
	t := topo.FromHosts(hosts, topo.Rank(rank))
	for _, f := range []struct {
		field *int
		given int
	}{
		{&t.LocalRank, cfg.LocalRank}, {&t.LocalSize, cfg.LocalSize},
		{&t.CrossRank, cfg.CrossRank}, {&t.CrossSize, cfg.CrossSize},
	} {
		if f.given != config.Unset {
			*f.field = f.given
		}
	}
	return t
}

// failed makes what has failed the epoch before it began the error that it is later, and tells the launcher.
func (e *Engine) failed(err error) error {
	why, ok := errors.AsType[*rendezvous.FailedError](err)
	if refused, by := errors.AsType[*rendezvous.RefusedError](err); by && refused.Reason == rendezvous.RootFailed {
		why, ok = &rendezvous.FailedError{Epoch: e.epoch, Ranks: []topo.Rank{0}, Reason: refused.Text}, e.at.Settings.Rank != 0
	}
	if !ok {
		return err
	}
	e.epoch = why.Epoch
	p := &PeerError{Reason: why.Reason}
	for _, r := range why.Ranks {
		p.Ranks = append(p.Ranks, int(r))
	}
	e.publish(p)
	return p
}

// publish tells the launcher who failed, so that it does not blame a rank that gave up because of another.
func (e *Engine) publish(p *PeerError) {
	launcher := e.launcher()
	if launcher == nil {
		return
	}
	v := joblink.Verdict{Epoch: e.epoch, Reason: p.Reason}
	for _, r := range p.Ranks {
		v.Ranks = append(v.Ranks, topo.Rank(r))
	}
	ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
	defer cancel()
	// If the launcher cannot be told, the error that the program gets says the same.
	_ = launcher.Condemn(ctx, v)
}

// launcher is the link to the launcher; nil if there is none.
func (e *Engine) launcher() joblink.Link {
	kv := e.at.Launcher()
	if kv == nil {
		return nil
	}
	return joblink.New(kv, e.at.Settings.Rank)
}

// Shutdown is the package-level Shutdown for this rank.
func (e *Engine) Shutdown(ctx context.Context) error {
	var why engine.Departure
	if p := recover(); p != nil {
		defer panic(p)
		why = panicked(p)
	}
	return e.shutdown(ctx, why)
}

func (e *Engine) shutdown(ctx context.Context, why engine.Departure) error {
	if why.Reason == "" {
		why.Reason = e.abandoned.what()
	}
	err := e.engine.Shutdown(ctx, why)
	if err != nil {
		err = fmt.Errorf("hvd: shutdown: %w", e.abandoned.explain(err))
	}
	return errors.Join(err, e.release())
}

// release closes what the engine does not own.
func (e *Engine) release() error {
	var errs []error
	if e.watch != nil {
		errs = append(errs, e.watch.Close())
	}
	if e.session != nil {
		errs = append(errs, e.session.Close())
	}
	if e.at != nil {
		errs = append(errs, e.at.Close())
	}
	if e.log != nil {
		_ = e.log.Sync() // of lines that were left out; standard error itself may refuse
	}
	return errors.Join(errs...)
}

// Done is closed when the job is over for this rank: it has shut down, or the job has failed.
func (e *Engine) Done() <-chan struct{} { return e.engine.Ended() }

// Err is why the job has failed; nil while it runs and after a shutdown.
func (e *Engine) Err() error {
	select {
	case <-e.engine.Ended():
		return e.abandoned.explain(e.engine.Err())
	default:
		return nil
	}
}

// Rank is this rank's number in the job, 0 to Size()-1.
func (e *Engine) Rank() int { return e.place.Rank }

// Size is the number of ranks in the job.
func (e *Engine) Size() int { return e.place.Size }

// LocalRank is this rank's number among those of its host.
func (e *Engine) LocalRank() int { return e.place.LocalRank }

// LocalSize is the number of ranks on this host.
func (e *Engine) LocalSize() int { return e.place.LocalSize }

// CrossRank is the index of this host among those that have this local rank.
func (e *Engine) CrossRank() int { return e.place.CrossRank }

// CrossSize is the number of hosts that have this local rank.
func (e *Engine) CrossSize() int { return e.place.CrossSize }

// IsHomogeneous reports whether every host has the same number of ranks.
func (e *Engine) IsHomogeneous() bool { return e.homogeneous }

// Epoch numbers the formations of the job: it is greater in each Init that its ranks go through together.
func (e *Engine) Epoch() uint64 { return e.epoch }
