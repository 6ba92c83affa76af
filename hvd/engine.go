package hvd

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/logs"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/rank"
)

// Engine is one rank in one epoch of a job. An epoch is the time from the Init of all ranks to shutdown or
// failure. A program that is one rank uses the package-level functions. A process that holds several ranks
// makes an Engine for each of them with New, and selects one for an operation with On.
type Engine struct {
	rank      rank.Rank
	sets      sync.Map // maps each *rank.Set that the program has seen to its *ProcessSet
	slots     slots
	abandoned abandonedWaits
	left      atomic.Bool // Shutdown has returned
}

// An InitOption configures the engine that Init or New starts. Options override environment variables. See
// Options in the package comment for options that are wrong or given twice.
type InitOption struct{ apply func(*initOptions) }

type initOptions struct{ rank.Options }

func initOption(apply func(*initOptions)) InitOption { return InitOption{apply} }

// WithSetting sets the setting with the given name to value. The name is that of an environment variable in
// docs/settings.md, which the option overrides. Init fails if there is no such setting or if the value is not
// valid.
func WithSetting(name, value string) InitOption {
	return initOption(func(o *initOptions) {
		if o.Settings == nil {
			o.Settings = make(map[string]string)
		}
		o.Settings[name] = value
	})
}

// WithLogger sends the log of the engine to l. HOROVOD_LOG_LEVEL has no effect then. The level of the lines
// that HOROVOD_LOG_LEVEL calls trace is slog.LevelDebug-4. By default, or if l is nil, the engine logs to
// standard error, from HOROVOD_LOG_LEVEL (default warning) on.
func WithLogger(l *slog.Logger) InitOption {
	return initOption(func(o *initOptions) {
		o.Log = nil
		if l != nil {
			o.Log = logs.FromSlog(l)
		}
	})
}

// WithProcessSets makes one process set for each of the given lists of ranks. The sets get the IDs 1, 2, ...
// in the order of the lists. The set of all ranks, which has ID 0, always exists and must not be given. By
// default there are no other sets. All ranks must pass the same lists. Init fails if a list is empty, has a
// rank that the job does not have, or has the same ranks as another list or as the job. If the option is
// given several times, it makes the sets of all of them.
func WithProcessSets(sets ...[]int) InitOption {
	return initOption(func(o *initOptions) { o.Sets = append(o.Sets, sets...) })
}

// Stall is a report by the stall inspector: a tensor has waited long for some ranks.
type Stall struct {
	// Op is the operation, such as "allreduce", or "" if it is not known. Tensor is the name of the tensor.
	Op, Tensor string
	// ProcessSet is the ID of the process set that the operation runs on.
	ProcessSet int
	// Group is the name of the group if every rank has submitted the tensor and the tensor waits for the rest
	// of its group. Otherwise it is empty.
	Group string
	// Missing holds the ranks that have not submitted the tensor or the rest of its group. If Executing is
	// set, Missing holds the ranks that have not finished the operation.
	Missing []int
	// Waited is how long the rank that submitted first has waited.
	Waited time.Duration
	// Executing is set if all ranks have submitted the tensor and the operation has been granted.
	Executing bool
}

// OnStall makes the engine call f with each stall report. By default, or if f is nil, the engine only logs
// them, which it does with f too. Only the engine of rank 0 gets reports; they are about the tensors of all
// ranks. The first report on a tensor comes after HOROVOD_STALL_CHECK_TIME_SECONDS (default 60 s; 0 turns
// reports off), and another after each further period of this length. f runs on the background loop, so it
// must return soon and must not wait for an operation.
func OnStall(f func(Stall)) InitOption {
	return initOption(func(o *initOptions) {
		o.OnStall = nil
		if f != nil {
			o.OnStall = func(s *controller.Stall) { f(newStall(s)) }
		}
	})
}

// After makes the new engine join an epoch that is later than the epoch of prev. Shutdown of prev must have
// returned, which New does not check. By default, or if prev is nil, the engine joins any epoch. Init needs
// no such option.
func After(prev *Engine) InitOption {
	if prev == nil {
		return afterEpoch(0)
	}
	return afterEpoch(prev.Epoch())
}

func afterEpoch(n uint64) InitOption {
	return initOption(func(o *initOptions) { o.LastEpoch = max(o.LastEpoch, n) })
}

// New joins a rank to its job and waits until all ranks have joined. Unlike Init, it does not change which
// engine the package-level functions use. Its errors are those of Init.
func New(ctx context.Context, opts ...InitOption) (*Engine, error) {
	e := new(Engine)
	if err := e.rank.Start(ctx, collect(opts)); err != nil {
		return nil, public(err)
	}
	return e, nil
}

// collect applies opts in their order and returns the resulting options.
func collect(opts []InitOption) rank.Options {
	o := new(initOptions)
	for _, opt := range opts {
		if opt.apply != nil { // the zero InitOption changes nothing
			opt.apply(o)
		}
	}
	return o.Options
}

func newStall(s *controller.Stall) Stall {
	stall := Stall{Tensor: s.Name, ProcessSet: int(s.Set), Group: s.Group, Waited: s.Waited,
		Executing: s.Executing}
	if s.Kind != message.NoKind {
		stall.Op = s.Kind.String()
	}
	for _, r := range s.Missing {
		stall.Missing = append(stall.Missing, int(r))
	}
	return stall
}

// Shutdown takes this rank out of the job. It is the method form of the package-level function Shutdown,
// which shuts down the engine that Init started.
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
		why.Reason = e.abandoned.describe()
	}
	defer e.left.Store(true)
	return e.abandoned.explain(e.rank.Shutdown(ctx, why))
}

// former reports whether the job of e has failed and Shutdown has returned.
func (e *Engine) former() bool { return e.left.Load() && e.Err() != nil }

// Done returns a channel that is closed when the job is over for this rank, because the rank has shut down or
// the job has failed.
func (e *Engine) Done() <-chan struct{} { return e.rank.Engine.Ended() }

// Err returns why the job has failed. It returns nil while the job runs, and after a Shutdown of a job that
// has not failed.
func (e *Engine) Err() error {
	select {
	case <-e.rank.Engine.Ended():
		return e.abandoned.explain(e.rank.Engine.Err())
	default:
		return nil
	}
}

// Rank returns the number of this rank in the job, from 0 to Size()-1.
func (e *Engine) Rank() int { return e.rank.Place.Rank }

// Size returns the number of ranks in the job.
func (e *Engine) Size() int { return e.rank.Place.Size }

// LocalRank returns the number of this rank among the ranks on its host, from 0.
func (e *Engine) LocalRank() int { return e.rank.Place.LocalRank }

// LocalSize returns the number of ranks on this host.
func (e *Engine) LocalSize() int { return e.rank.Place.LocalSize }

// CrossRank returns the index of this host among the hosts that have a rank with the same local rank as this
// rank.
func (e *Engine) CrossRank() int { return e.rank.Place.CrossRank }

// CrossSize returns the number of hosts that have a rank with the same local rank as this rank.
func (e *Engine) CrossSize() int { return e.rank.Place.CrossSize }

// IsHomogeneous reports whether every host has the same number of ranks.
func (e *Engine) IsHomogeneous() bool { return e.rank.Homogeneous }

// Epoch returns the number of the epoch that this engine belongs to. Each time that the ranks complete an
// Init together, the new epoch gets a greater number than the epoch before.
func (e *Engine) Epoch() uint64 { return e.rank.Epoch }
