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

// Engine is one rank of one epoch of a job. Programs that are one rank use the package-level functions; a
// process that holds several ranks makes one Engine for each and passes it to operations by On.
type Engine struct {
	rank      rank.Rank
	sets      sync.Map // the *ProcessSet of each *rank.Set that the program has seen
	slots     slots
	abandoned abandonedWaits
}

// InitOption changes what Init and New read from the environment.
type InitOption func(*initOptions)

type initOptions struct{ rank.Options }

// WithSetting sets a setting by the name of its environment variable, which it overrides.
func WithSetting(name, value string) InitOption {
	return func(o *initOptions) {
		if o.Settings == nil {
			o.Settings = make(map[string]string)
		}
		o.Settings[name] = value
	}
}

// WithLogger sends the engine's log to l, whatever HOROVOD_LOG_LEVEL says.
func WithLogger(l *zap.Logger) InitOption { return func(o *initOptions) { o.Log = l } }

// WithProcessSets makes process sets of these ranks beside that of all, numbered from 1 in this order. All ranks must give
// the same.
func WithProcessSets(sets ...[]int) InitOption {
	return func(o *initOptions) { o.Sets = append(o.Sets, sets...) }
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
func OnStall(f func(Stall)) InitOption {
	return func(o *initOptions) {
		if o.OnStall = nil; f != nil {
			o.OnStall = func(s *controller.Stall) { f(newStall(s)) }
		}
	}
}

// After makes the new engine's epoch follow that of prev, which was shut down. Nil is none.
func After(prev *Engine) InitOption {
	if prev == nil {
		return afterEpoch(0)
	}
	return afterEpoch(prev.Epoch())
}

func afterEpoch(n uint64) InitOption {
	return func(o *initOptions) { o.LastEpoch = max(o.LastEpoch, n) }
}

// New joins a rank to its job and waits until all ranks have come, as Init does, without making it the process's.
func New(ctx context.Context, opts ...InitOption) (*Engine, error) {
	e := new(Engine)
	if err := e.rank.Start(ctx, collect(opts)); err != nil {
		return nil, err
	}
	return e, nil
}

// collect returns what opts say together.
func collect(opts []InitOption) rank.Options {
	o := new(initOptions)
	for _, opt := range opts {
		opt(o)
	}
	return o.Options
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
	return e.abandoned.explain(e.rank.Shutdown(ctx, why))
}

// Done is closed when the job is over for this rank: it has shut down, or the job has failed.
func (e *Engine) Done() <-chan struct{} { return e.rank.Engine.Ended() }

// Err is why the job has failed; nil while it runs and after a shutdown.
func (e *Engine) Err() error {
	select {
	case <-e.rank.Engine.Ended():
		return e.abandoned.explain(e.rank.Engine.Err())
	default:
		return nil
	}
}

// Rank is this rank's number in the job, 0 to Size()-1.
func (e *Engine) Rank() int { return e.rank.Place.Rank }

// Size is the number of ranks in the job.
func (e *Engine) Size() int { return e.rank.Place.Size }

// LocalRank is this rank's number among those of its host.
func (e *Engine) LocalRank() int { return e.rank.Place.LocalRank }

// LocalSize is the number of ranks on this host.
func (e *Engine) LocalSize() int { return e.rank.Place.LocalSize }

// CrossRank is the index of this host among those that have this local rank.
func (e *Engine) CrossRank() int { return e.rank.Place.CrossRank }

// CrossSize is the number of hosts that have this local rank.
func (e *Engine) CrossSize() int { return e.rank.Place.CrossSize }

// IsHomogeneous reports whether every host has the same number of ranks.
func (e *Engine) IsHomogeneous() bool { return e.rank.Homogeneous }

// Epoch numbers the formations of the job: it is greater in each Init that its ranks go through together.
func (e *Engine) Epoch() uint64 { return e.rank.Epoch }
