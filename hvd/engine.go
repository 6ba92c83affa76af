package hvd

import (
	"context"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/rank"
)

// Engine is one rank in one epoch of a job. A program that is one rank uses the package-level functions. A
// process that holds several ranks makes an Engine for each with New, and passes it to operations with On.
type Engine struct {
	rank      rank.Rank
	sets      sync.Map // the *ProcessSet of each *rank.Set that the program has seen
	slots     slots
	abandoned abandonedWaits
}

// An InitOption overrides what Init and New read from the environment.
type InitOption func(*initOptions)

type initOptions struct{ rank.Options }

// WithSetting sets the setting with the name of an environment variable (docs/settings.md) and overrides that
// variable.
func WithSetting(name, value string) InitOption {
	return func(o *initOptions) {
		if o.Settings == nil {
			o.Settings = make(map[string]string)
		}
		o.Settings[name] = value
	}
}

// WithLogger sends the log of the engine to l and makes HOROVOD_LOG_LEVEL have no effect. The default logs to
// standard error.
func WithLogger(l *zap.Logger) InitOption { return func(o *initOptions) { o.Log = l } }

// WithProcessSets makes process sets of the given ranks, numbered from 1 in this order, beside the set of all
// ranks. All ranks must give the same sets.
func WithProcessSets(sets ...[]int) InitOption {
	return func(o *initOptions) { o.Sets = append(o.Sets, sets...) }
}

// Stall is a report of the stall inspector: a tensor has waited long for some ranks.
type Stall struct {
	// Op is the operation, such as "allreduce", or empty if it is not known. Tensor is its name.
	Op, Tensor string
	// ProcessSet is the ID of the process set.
	ProcessSet int
	// Group is the name of the group if every rank has submitted the tensor and it waits for the rest of its
	// group; else it is empty.
	Group string
	// Missing are the ranks that have not submitted the tensor or the rest of its group. If Executing is set,
	// they are the ranks that have not finished the operation.
	Missing []int
	// Waited is how long the first rank has waited.
	Waited time.Duration
	// Executing says that all ranks have submitted the tensor and the operation has been granted.
	Executing bool
}

// OnStall makes f receive the stall reports. Only rank 0 has them, for all ranks: the first after
// HOROVOD_STALL_CHECK_TIME_SECONDS, and another each time that much more has passed. Stalls are logged too. f
// runs on the background loop, so it must return soon and must not wait for an operation.
func OnStall(f func(Stall)) InitOption {
	return func(o *initOptions) {
		if o.OnStall = nil; f != nil {
			o.OnStall = func(s *controller.Stall) { f(newStall(s)) }
		}
	}
}

// After makes the epoch of the new engine follow that of prev, which has shut down. nil is no engine.
func After(prev *Engine) InitOption {
	if prev == nil {
		return afterEpoch(0)
	}
	return afterEpoch(prev.Epoch())
}

func afterEpoch(n uint64) InitOption {
	return func(o *initOptions) { o.LastEpoch = max(o.LastEpoch, n) }
}

// New joins a rank to its job and waits until all ranks have joined, as Init does, without making it the rank
// of the process.
func New(ctx context.Context, opts ...InitOption) (*Engine, error) {
	e := new(Engine)
	if err := e.rank.Start(ctx, collect(opts)); err != nil {
		return nil, err
	}
	return e, nil
}

// collect applies opts in order.
func collect(opts []InitOption) rank.Options {
	o := new(initOptions)
	for _, opt := range opts {
		opt(o)
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

// Shutdown takes this rank out of the job, as the package-level Shutdown does for the rank of the process.
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
	return e.abandoned.explain(e.rank.Shutdown(ctx, why))
}

// Done returns a channel that is closed when the job is over for this rank: it has shut down, or the job has
// failed.
func (e *Engine) Done() <-chan struct{} { return e.rank.Engine.Ended() }

// Err returns why the job has failed. It is nil while the job runs and after a Shutdown.
func (e *Engine) Err() error {
	select {
	case <-e.rank.Engine.Ended():
		return e.abandoned.explain(e.rank.Engine.Err())
	default:
		return nil
	}
}

// Rank returns the number of this rank in the job, 0 to Size()-1.
func (e *Engine) Rank() int { return e.rank.Place.Rank }

// Size returns the number of ranks in the job.
func (e *Engine) Size() int { return e.rank.Place.Size }

// LocalRank returns the number of this rank among the ranks of its host.
func (e *Engine) LocalRank() int { return e.rank.Place.LocalRank }

// LocalSize returns the number of ranks on this host.
func (e *Engine) LocalSize() int { return e.rank.Place.LocalSize }

// CrossRank returns the index of this host among the hosts that have this local rank.
func (e *Engine) CrossRank() int { return e.rank.Place.CrossRank }

// CrossSize returns the number of hosts that have this local rank.
func (e *Engine) CrossSize() int { return e.rank.Place.CrossSize }

// IsHomogeneous reports whether every host has the same number of ranks.
func (e *Engine) IsHomogeneous() bool { return e.rank.Homogeneous }

// Epoch returns the number of this formation of the job. Each Init that the ranks complete together gets a
// greater one.
func (e *Engine) Epoch() uint64 { return e.rank.Epoch }
