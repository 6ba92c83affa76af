// Package rank joins one rank to its job. It reads the settings and makes a connected and running engine with
// process sets, timeline, metrics and flight recorder. It checks and names operations and queues them in the
// engine. Package hvd wraps it for Go programs, internal/library for programs in other languages, and
// internal/sidecar for programs in other processes.
package rank

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/binding"
	"github.com/gohvd/gohvd/internal/bootstrap"
	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/joblink"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/rendezvous"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/hier"
	"github.com/gohvd/gohvd/ops/nccl"
	"github.com/gohvd/gohvd/ops/shm"
	"github.com/gohvd/gohvd/ops/tcp"
	"github.com/gohvd/gohvd/store"
)

// ErrNotInitialized is returned by operations that are called before Init.
var ErrNotInitialized = errors.New("not initialized: call hvd.Init first")

// Rank is one rank in one epoch of a job. Start sets its fields. They do not change afterwards.
type Rank struct {
	// Engine and Watch are nil if the engine is in another process, which Remote reaches. Otherwise Remote is
	// nil.
	Engine      *engine.Engine
	Watch       *Watch
	Remote      Remote
	Place       topo.Topology
	Homogeneous bool // whether every host has the same number of ranks
	Epoch       uint64
	Global      *Set // the set of all ranks

	// Devices marks the streams of the program on CUDA devices. It is nil if operations on them are not
	// possible, and NoDevices says why.
	Devices   *cuda.Devices
	NoDevices string
	// AsyncCompletion is set if operations on CUDA devices complete when they have been launched.
	AsyncCompletion bool
	// lastDevice is the tensor.Device of the last operation on a CUDA device, or tensor.Host.
	lastDevice atomic.Int32

	nccl        *nccl.Library // nil if the rank does not use NCCL
	mpi         *MPI          // nil if the rank does not use MPI
	meeting     *bootstrap.Meeting
	member      *Membership // nil if the job is not elastic
	generation  uint64      // the generation of an elastic job, or 0
	session     *Session    // nil in a job with one rank
	log         *zap.Logger // nil if the logger belongs to the program
	sets        setTable
	dynamicSets bool
	timeout     time.Duration // the timeout of operations without a timeout of their own
	unbind      func() error  // nil if this process is not bound (HVD_BIND_TO)
}

// Start joins r to its job and waits until all ranks have joined. r must be the zero value before the call.
// If Start returns an error, r cannot be used.
func (r *Rank) Start(ctx context.Context, o Options) error {
	ownLog := o.Log == nil
	cfg, err := o.Read()
	if err != nil {
		return fmt.Errorf("hvd: init: %w", err)
	}
	cfg.WarnUnread(config.Rank)
	for _, w := range cfg.Warnings {
		o.Log.Warn(w)
	}
	if o.ForClient && !cfg.GPU.Use(config.GPUNone) {
		return errors.New("hvd: init: the settings ask for operations on CUDA devices, which only work in the process of " +
			"the program: unset HVD_SIDECAR, or unset HOROVOD_GPU_OPERATIONS to copy tensors through host memory")
	}
	r.dynamicSets, r.timeout = cfg.DynamicProcessSets, cfg.OperationTimeout
	r.AsyncCompletion = cfg.AsyncCompletion
	if ownLog {
		r.log = o.Log
	}
	join := r.start
	if cfg.Member != "" && !o.chosen(cfg) {
		join = r.startMember // it waits until the launcher makes this process a rank
	} else {
		if cfg.Member != "" {
			cfg.LocalRank = config.Unset // the launcher has told that of the elastic job
		}
		var cancel context.CancelFunc
		ctx, cancel = withStartTimeout(ctx, &cfg)
		defer cancel()
	}
	var first error // of the first attempt, if there were several
	var wait dial.Backoff
	err = join(ctx, cfg, &o)
	for r.metEarlier(ctx, err, &o) {
		o.Log.Debug("init: the store was that of an earlier program, meeting again", zap.Error(err))
		if first == nil {
			first = err
		}
		if err := r.forget(&o); err != nil {
			o.Log.Debug("init: closing what the first attempt has left", zap.Error(err))
		}
		dial.Pause(ctx, wait.Next(), nil)
		err = join(ctx, cfg, &o)
	}
	if err != nil {
		if first != nil {
			// If that store was the one of this program, the first error says how the job has failed.
			err = fmt.Errorf("%w (first attempt: %w)", err, first)
		}
		r.mpi.fail(err)
		return fmt.Errorf("hvd: init: %w", errors.Join(dial.ExplainLimit(err), r.release()))
	}
	return nil
}

// metEarlier reports whether err, the error of join, says that r has met the ranks of an earlier program,
// which has ended meanwhile. This happens if one process after the other runs on each host, as with srun bash
// -c './train; ./eval', and rank 0 ends its first program later than r.
func (r *Rank) metEarlier(ctx context.Context, err error, o *Options) bool {
	return errors.Is(err, rendezvous.ErrStoreEnded) && ctx.Err() == nil && r.meeting.Reused &&
		(o.LastEpoch == 0 || !r.meeting.Once) // else it is the store of this program
}

// forget closes what a failed attempt to join has opened, so that the next one can meet again.
func (r *Rank) forget(o *Options) error {
	once := r.meeting.Once
	err := r.reset()
	if once && o.Kept != nil && *o.Kept != nil {
		err = errors.Join(err, (*o.Kept).Close())
		*o.Kept = nil
	}
	return err
}

// levelsAbove is the key of the value of WithLevelsAbove.
type levelsAbove struct{}

// WithLevelsAbove returns a context with which Start sets engine.Config.LevelsAbove to hosts, for tests that
// run the ranks of a small job as processes. No setting has this effect.
func WithLevelsAbove(ctx context.Context, hosts int) context.Context {
	return context.WithValue(ctx, levelsAbove{}, hosts)
}

// startTimeout is the cause of the end of a context whose time limit of Init has passed.
type startTimeout struct{ advice string }

func (e *startTimeout) Error() string { return fmt.Sprintf("%v: %s", e.Unwrap(), e.advice) }

func (e *startTimeout) Unwrap() error { return context.DeadlineExceeded }

// withStartTimeout returns a context that ends with a *startTimeout when the time limit of Init has passed.
func withStartTimeout(ctx context.Context, cfg *config.Config) (context.Context, context.CancelFunc) {
	advice := fmt.Sprintf("Init must end within %v: raise HOROVOD_GLOO_TIMEOUT_SECONDS (hvdrun --start-timeout) if ranks start late",
		cfg.StartTimeout)
	if cores := onlineCores(); cores > 0 && cfg.LocalSize > cores {
		count := fmt.Sprintf("%d cores", cores)
		if cores == 1 {
			count = "1 core"
		}
		advice += fmt.Sprintf(", as they may with %d ranks on the %s of this host", cfg.LocalSize, count)
	}
	return context.WithTimeoutCause(ctx, cfg.StartTimeout, &startTimeout{advice})
}

// onlineCores returns the number of cores of the host, or 0 if it is unknown. runtime.NumCPU does not tell
// it, because a launcher may have bound each rank to cores of its own.
func onlineCores() int {
	text, _ := os.ReadFile("/proc/stat")
	return strings.Count(string(text), "\ncpu") // the first line is for all cores
}

// explainTimeout adds what to do to err if the time limit of Init has passed and err does not say so.
func explainTimeout(ctx context.Context, err error) error {
	late, ok := errors.AsType[*startTimeout](context.Cause(ctx))
	if !ok || !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, late) {
		return err
	}
	return fmt.Errorf("%w: %s", err, late.advice)
}

// start joins r to its job and starts the engine.
func (r *Rank) start(ctx context.Context, cfg config.Config, o *Options) (err error) {
	if err := r.meet(ctx, &cfg, o); err != nil {
		return explainTimeout(ctx, err)
	}
	dial.NeedDescriptors(cfg.Size)
	sets, err := staticSets(o.Sets, cfg.Size)
	if err != nil {
		return err
	}
	overTCP, err := TCPConfig(&cfg)
	if err != nil {
		return err
	}
	log := o.Log.With(zap.Int("rank", cfg.Rank), zap.Int("size", cfg.Size), zap.String("host", cfg.Hostname))
	r.Epoch = o.LastEpoch + 1
	devices := r.offerDevices(&cfg, o)
	if cfg.Size > 1 {
		r.session, err = OpenSession(ctx, SessionConfig{
			At: r.meeting, LastEpoch: o.LastEpoch,
			Terms: map[string]string{"the list of process sets": setsText(sets)}, Device: o.Device,
			SharesDevice: o.SharesDevice, Capabilities: devices, Log: log,
		})
		if err != nil {
			return r.failed(explainTimeout(ctx, err))
		}
		var stop func()
		ctx, stop = r.session.Watch(ctx)
		defer stop()
		r.Epoch = r.session.Epoch
	}
	log = log.With(zap.Uint64("epoch", r.Epoch))
	if err := r.meeting.Met(ctx); err != nil {
		log.Warn("removing the rendezvous data of rank 0 failed", zap.Error(err))
	}
	ecfg, err := r.configure(&cfg, o, sets, overTCP, log)
	if err != nil {
		if r.session != nil {
			err = errors.Join(r.failed(r.session.Fail(err)), r.session.Mesh.Close())
		}
		return err
	}
	ecfg.LevelsAbove, _ = ctx.Value(levelsAbove{}).(int)
	if r.Engine, err = engine.Start(ctx, ecfg); err != nil {
		if r.session != nil {
			err = r.failed(r.session.Fail(err))
		}
		return err
	}
	r.session.forget()
	if err := r.Watch.Attach(r.Engine); err != nil {
		r.Engine.Close()
		return err
	}
	return nil
}

// meet opens the place where the ranks meet, and sets cfg to the settings that r has got there.
func (r *Rank) meet(ctx context.Context, cfg *config.Config, o *Options) (err error) {
	explain := enterMPI(ctx, cfg, o)
	r.mpi, err = JoinMPI(ctx, cfg, o.MPIComm, o.chosen(*cfg), o.Log)
	if err = explain(err); err != nil {
		return err
	}
	if r.mpi != nil && r.mpi.ID != nil {
		o.ID = r.mpi.ID
	}
	if r.meeting, err = o.meet(ctx, *cfg); err != nil {
		return err
	}
	*cfg = r.meeting.Settings
	if r.generation > 0 {
		r.meeting.Store = store.NewPrefixStore(joblink.Place(r.generation), r.meeting.Store)
	}
	return r.mpi.check(cfg.Rank, cfg.Size)
}

// configure returns the configuration of the engine. It sets the place of r among the hosts, opens the
// devices of r, and makes its process sets and its Watch.
func (r *Rank) configure(cfg *config.Config, o *Options, sets []controller.Set, overTCP tcp.Config,
	log *zap.Logger) (ecfg engine.Config, err error) {
	ecfg = engine.Config{
		Rank: topo.Rank(cfg.Rank), Size: cfg.Size, Sets: sets, Mesh: transport.Alone{},
		CacheCapacity: cfg.CacheCapacity, FusionThresholdBytes: cfg.FusionThresholdBytes,
		DisableGroupFusion: cfg.DisableGroupFusion, LeadersAbove: cfg.LeadersAbove,
		CycleTime: cfg.CycleTime, LivenessTimeout: cfg.LivenessTimeout, Lockstep: cfg.Lockstep,
		Deterministic: cfg.Deterministic,
		StallWarning:  cfg.StallWarning, StallShutdown: cfg.StallShutdown,
		OnStall: o.OnStall, Log: log,
	}
	hosts := []string{cfg.Hostname}
	if s := r.session; s != nil {
		hosts = s.Hosts
		ecfg.Ready, ecfg.Mesh, ecfg.Hosts = s.Ready, s.Mesh, s.Hosts
		ecfg.LocalProcesses, ecfg.Processors = o.processes(s.LocalSize), s.Processors
		ecfg.ForClient = o.ForClient
		ecfg.Memory, ecfg.Groups = s.Memory, s.Groups
	}
	if s := r.session; s != nil && s.Memory != nil && oneGroup(s.Groups) &&
		cfg.SharedMemory != config.SharedAlways {
		// Only the ranks together know that they are on one host, so Config.WarnUnread does not.
		if cfg.Given("HVD_ALGORITHM") && cfg.Rank == 0 {
			log.Warn("HVD_ALGORITHM has no effect: all ranks share memory, and it chooses among algorithms over TCP")
		}
	}
	r.Place, r.Homogeneous = topologyOf(cfg, hosts), topo.IsHomogeneous(hosts)
	// In an elastic job the local rank is that of the slot, so it can be greater than the local size.
	if err := r.Place.Validate(); err != nil && r.member == nil {
		return ecfg, err
	}
	if err := cfg.CheckBinding(); err != nil {
		return ecfg, err
	}
	if ecfg.Cores, err = threadCores(cfg.ThreadAffinity, r.Place, affinity()); err != nil {
		return ecfg, err
	}
	if err := r.bind(cfg.BindTo); err != nil {
		return ecfg, fmt.Errorf("HVD_BIND_TO=%s: %w", cfg.BindTo, err)
	}
	ecfg.Backends = Backends(r.mpi, r.session, ecfg.Mesh, cfg, overTCP,
		ops.Oversubscribed(ecfg.LocalProcesses, ecfg.Processors))
	if err := r.openDevices(&ecfg, cfg); err != nil {
		return ecfg, err
	}
	if cfg.MPIController && cfg.Lockstep && cfg.Size > 1 {
		ecfg.Collectives = r.mpi.Collectives()
	}
	if err := configureTuner(&ecfg, cfg, r.session); err != nil {
		return ecfg, err
	}
	r.Global = r.newSet(topo.Global, topo.UpTo(cfg.Size), false)
	for _, s := range sets {
		r.newSet(s.ID, s.Ranks, false)
	}
	r.observe(&ecfg, cfg)
	return ecfg, nil
}

// bind binds this process to its part of the cores of the host, until release.
func (r *Rank) bind(to binding.Unit) error {
	if to == binding.None {
		return nil
	}
	if r.member != nil {
		return errors.New("the ranks of a host change in an elastic job, so they cannot be bound")
	}
	allowed, err := binding.Allowed()
	if err != nil {
		return err
	}
	t, err := binding.Read(os.DirFS("/"), allowed)
	if err != nil {
		return err
	}
	cpus, err := t.Place(to, r.Place.LocalRank, r.Place.LocalSize)
	if err != nil {
		return err
	}
	r.unbind, err = binding.Process(cpus)
	return err
}

// oneGroup reports whether all ranks share memory. groups has the lowest rank of the group of each rank.
func oneGroup(groups []topo.Rank) bool {
	return !slices.ContainsFunc(groups, func(lowest topo.Rank) bool { return lowest != groups[0] })
}

// observe makes r.Watch, which receives the records of the engine, and connects NCCL to its verdict.
func (r *Rank) observe(ecfg *engine.Config, cfg *config.Config) {
	r.Watch = NewWatch(WatchConfig{
		Settings: cfg, Rank: cfg.Rank, Size: cfg.Size, LocalRank: r.Place.LocalRank, Host: cfg.Hostname,
		Epoch:    r.Epoch,
		Launcher: r.launcher(), Sets: r.members, Log: ecfg.Log,
	})
	r.Watch.Configure(ecfg)
	if r.nccl != nil {
		report := ecfg.OnVerdict
		ecfg.OnVerdict = func(p *engine.PeerError) {
			r.nccl.Fail(p)
			report(p)
		}
	}
}

// Backends returns the backends that all ranks have, in order of preference. m is nil without MPI, and
// session is nil in a job of one rank. mesh is the mesh of the session, or transport.Alone. The parameter
// oversubscribed says that the host has more ranks than cores.
func Backends(m *MPI, session *Session, mesh transport.Mesh, set *config.Config, overTCP tcp.Config,
	oversubscribed bool) (all ops.Registry) {
	overTCP.Oversubscribed = oversubscribed
	if set.MPIOperations {
		all = append(all, m.Register(set.Deterministic, oversubscribed))
	}
	if session != nil && session.Memory != nil {
		inMemory := shm.Register(session.Memory,
			shm.Config{Oversubscribed: oversubscribed, Groups: session.Groups,
				Deterministic: set.Deterministic})
		all = append(all, inMemory)
		if set.HierarchicalAllreduce || set.HierarchicalAllgather {
			all = append(all, hier.Register(hier.Config{
				Groups: session.Groups, Inner: inMemory,
				Outer: tcp.Within(mesh, transport.OuterLane, overTCP),
				Kinds: onTwoLevels(set, overTCP.Forced), Deterministic: set.Deterministic,
			}))
		}
	}
	return append(all, tcp.Register(mesh, overTCP))
}

// gpuFiles are those of which a host with the driver of NVIDIA's GPUs has one. The second one is for WSL 2.
var gpuFiles = []string{"/dev/nvidiactl", "/dev/dxg"}

// hasGPU reports whether the host has a file of gpuFiles.
func hasGPU() bool {
	return slices.ContainsFunc(gpuFiles, func(file string) bool {
		_, err := os.Stat(file)
		return err == nil
	})
}

// offerDevices loads NCCL if no setting says how operations on CUDA devices run, so that it is used if all
// ranks have it. It returns the entry of the rank's capabilities that says so. CUDA's driver starts in this
// process only at the first operation on a device, because the program may set CUDA_VISIBLE_DEVICES after
// Init, or fork processes that use CUDA.
func (r *Rank) offerDevices(cfg *config.Config, o *Options) map[string]string {
	if !cfg.OffersNCCL() {
		return nil
	}
	reason := ""
	switch {
	case !cuda.Built:
		reason = cuda.ErrNotBuilt.Error()
	case o.ForClient:
		reason = "a sidecar cannot use memory of the program's devices: unset HVD_SIDECAR"
	case !hasGPU() && cfg.NCCLLibrary == "":
		reason = fmt.Sprintf("its host has no GPU with a driver of NVIDIA (there is none of the files %s)",
			strings.Join(gpuFiles, " and "))
	default:
		var err error
		if r.nccl, err = nccl.Load(cfg.NCCLLibrary, cfg.CUDALibrary); err != nil {
			reason = err.Error()
		}
	}
	r.NoDevices = reason
	return map[string]string{message.NCCL.String(): reason}
}

// openDevices loads the libraries for the operations on CUDA devices that the settings ask for, or uses those
// that all ranks have offered.
func (r *Rank) openDevices(ecfg *engine.Config, cfg *config.Config) (err error) {
	if cfg.OffersNCCL() {
		if r.session != nil {
			_, r.NoDevices = r.session.Lacking(message.NCCL)
		}
		switch {
		case r.NoDevices == "":
			cfg.GPU.UseAll(config.GPUNCCL)
		case r.nccl != nil:
			ecfg.Log.Info("operations on CUDA devices do not use NCCL", zap.String("reason", r.NoDevices))
			if err := r.nccl.Close(); err != nil {
				return err
			}
			r.nccl = nil
		}
	}
	switch {
	case cfg.GPU.Use(config.GPUNone) && r.NoDevices == "":
		r.NoDevices = "HOROVOD_GPU_OPERATIONS is none"
	case cfg.GPU.Use(config.GPUNCCL):
		if r.nccl == nil {
			if r.nccl, err = nccl.Load(cfg.NCCLLibrary, cfg.CUDALibrary); err == nil {
				_, err = r.nccl.Count()
			}
		}
		if err != nil {
			return fmt.Errorf("%s: %w", cfg.GPUChoice(config.GPUNCCL), err)
		}
		r.Devices = r.nccl.Devices
		ecfg.Backends = append(ecfg.Backends, r.nccl.Register(nccl.Config{
			Device:       r.Place.LocalRank,
			Host:         tcp.Within(ecfg.Mesh, transport.DeviceLane, tcp.Config{}),
			StartTimeout: cfg.StartTimeout, Streams: cfg.NCCLStreams, Deterministic: cfg.Deterministic,
			FusionBytes: int(cfg.FusionThresholdBytes), InHost: inHost(&cfg.GPU),
		}))
	case cfg.GPU.Use(config.GPUHost):
		runtime, err := cuda.Load(cfg.CUDALibrary)
		if err != nil {
			return fmt.Errorf("%s: %w", cfg.GPUChoice(config.GPUHost), err)
		}
		r.Devices = cuda.NewDevices(runtime)
	}
	ecfg.Devices = r.Devices
	return nil
}

// Mark does what Devices.Mark does. If operations on devices are not possible, its error says why.
func (r *Rank) Mark(device int, stream uintptr) (*cuda.Event, error) {
	if r.Devices == nil {
		return nil, fmt.Errorf("operations on CUDA devices are not possible: %s (HOROVOD_GPU_OPERATIONS, docs/nccl.md)",
			r.NoDevices)
	}
	return r.Devices.Mark(device, stream)
}

// inHost returns the kinds of operations that the settings do not run on NCCL, and for each the setting that
// could choose NCCL.
func inHost(g *config.GPUOperations) map[message.Kind]string {
	refused := make(map[message.Kind]string)
	for _, s := range []struct {
		name    string
		backend config.GPUBackend
		kinds   []message.Kind
	}{
		{"HOROVOD_GPU_ALLREDUCE", g.Allreduce, []message.Kind{message.Allreduce, message.Reduce}},
		{"HOROVOD_GPU_ALLGATHER", g.Allgather, []message.Kind{message.Allgather}},
		{"HOROVOD_GPU_BROADCAST", g.Broadcast, []message.Kind{message.Broadcast}},
		{"HOROVOD_GPU_ALLTOALL", g.Alltoall, []message.Kind{message.Alltoall, message.Gather, message.Scatter}},
		{"HOROVOD_GPU_REDUCESCATTER", g.Reducescatter, []message.Kind{message.Reducescatter}},
	} {
		for _, k := range s.kinds {
			if s.backend != config.GPUNCCL {
				refused[k] = s.name
			}
		}
	}
	return refused
}

// onTwoLevels returns the kinds of operations that may run on two levels. If the user has forced an algorithm
// for a kind, operations of that kind run on one level, with this algorithm.
func onTwoLevels(set *config.Config, forced tcp.Forced) (kinds [message.NumKinds]bool) {
	for _, k := range []message.Kind{message.Allreduce, message.Reducescatter, message.Broadcast} {
		kinds[k] = set.HierarchicalAllreduce
	}
	kinds[message.Allgather] = set.HierarchicalAllgather
	for k := range forced {
		kinds[k] = false
	}
	return kinds
}

// topologyOf returns the position of this rank among the hosts. Values in the environment take precedence
// over values that are computed from the hosts.
func topologyOf(cfg *config.Config, hosts []string) topo.Topology {
	t := topo.FromHosts(hosts)[cfg.Rank]
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

// failed handles an error that occurred before the epoch began. If the error says which ranks failed, failed
// reports them to the launcher and returns an *engine.PeerError, as operations do after the epoch has begun.
// If the time limit of Init has passed before all ranks have joined, failed reports the ranks for which this
// rank has waited, and returns err. If the launcher has changed the ranks of an elastic job meanwhile, it
// reports nothing and returns errSuperseded. Otherwise it only returns err.
func (r *Rank) failed(err error) error {
	why, found := errors.AsType[*rendezvous.FailedError](err)
	refused, _ := errors.AsType[*rendezvous.RefusedError](err)
	awaited := rendezvous.Awaited(err)
	switch {
	case found:
	case refused != nil && refused.Reason == rendezvous.RootFailed && r.meeting.Settings.Rank != 0:
		found = true
		why = &rendezvous.FailedError{Epoch: r.Epoch, Ranks: []topo.Rank{0}, Reason: refused.Text}
	case awaited != nil:
		why = &rendezvous.FailedError{Epoch: r.Epoch, Ranks: awaited,
			Silent: refused == nil && r.meeting.Settings.Rank != 0 && slices.Equal(awaited, []topo.Rank{0}),
			Reason: fmt.Sprintf("the time limit of Init passed at rank %d: %v", r.meeting.Settings.Rank, err)}
	default:
		return err
	}
	if r.member != nil && r.member.Pending() != nil {
		return errSuperseded // the others leave this generation too, and what they waited for is known
	}
	r.Epoch = why.Epoch
	p := &engine.PeerError{Reason: why.Reason}
	for _, failed := range why.Ranks {
		p.Ranks = append(p.Ranks, int(failed))
	}
	reportVerdict(context.Background(), r.launcher(),
		joblink.Verdict{Epoch: r.Epoch, Silent: why.Silent, Starting: true}, p)
	if !found {
		return err
	}
	return p
}

// launcher returns the link to the launcher, or nil if there is none.
func (r *Rank) launcher() joblink.Link {
	kv := r.meeting.Launcher()
	if kv == nil {
		return nil
	}
	if set := &r.meeting.Settings; set.LauncherRanks != nil {
		return joblink.NewOfPart(kv, set.LauncherRanks, set.Rank)
	}
	return joblink.NewOf(r.generation, kv, r.meeting.Settings.Rank)
}

// Shutdown makes r leave the job, as hvd.Shutdown does, and then closes it.
func (r *Rank) Shutdown(ctx context.Context, why engine.Departure) error {
	if r.Remote != nil {
		return r.Remote.Shutdown(ctx, why)
	}
	err := r.Engine.Shutdown(ctx, why)
	switch {
	case err != nil:
		r.mpi.fail(err)
	case r.mpi != nil:
		err = r.mpi.Leave(ctx)
	}
	if r.member != nil {
		r.member.endedShutdown(err)
	}
	if err != nil {
		err = fmt.Errorf("hvd: shutdown: %w", err)
	}
	return errors.Join(err, r.release())
}

// Fail makes r fail at once, and also ends a Shutdown in progress. Shutdown must still be called. why.Failed
// is set.
func (r *Rank) Fail(why engine.Departure) error {
	if r.Remote != nil {
		return r.Remote.Shutdown(context.Background(), why)
	}
	return r.Engine.Shutdown(context.Background(), why)
}

// Close closes r at once. If the job is not over, the other ranks cannot distinguish this from the death of
// the process.
func (r *Rank) Close() error {
	r.Engine.Close()
	r.mpi.fail(r.Engine.Err())
	return r.release()
}

// release closes everything that r has opened and that the engine does not own.
func (r *Rank) release() error {
	var errs []error
	if r.Watch != nil {
		errs = append(errs, r.Watch.Close())
	}
	if r.session != nil {
		errs = append(errs, r.session.Close())
	}
	if r.meeting != nil {
		errs = append(errs, r.meeting.Close())
	}
	r.mpi.Close()
	if r.unbind != nil {
		errs = append(errs, r.unbind())
	}
	if errs = append(errs, r.nccl.Close()); r.nccl == nil {
		errs = append(errs, r.Devices.Close())
	}
	if r.log != nil {
		// Sync logs how many lines were omitted. Ignore the error that Sync returns, because the file to
		// which standard error is connected may not support Sync.
		_ = r.log.Sync()
	}
	return errors.Join(errs...)
}
