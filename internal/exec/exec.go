// Package exec executes the granted operations of a rank: it packs and scales tensors, copies them from and
// to devices, and has the backends run the collectives.
//
// Each process set has a Lane, a goroutine that executes the grants of the set in order. Turns of the loop
// also execute work that does not wait: a barrier, or steps of an operation of few bytes (StartInTurn, Step).
// If a step has to wait for long, the operation moves to the goroutine of its lane.
package exec

import (
	"context"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/ops"
)

// Observer learns what happens to work. Lanes and turns call its methods.
type Observer interface {
	// Since returns the time since the engine's start. All times are counted from this start.
	Since() time.Duration
	// Watched reports whether a timeline is on. If so, lanes record the activities of their work.
	Watched() bool
	// Ended is called when w has ended, before the results of its tensors are reported. err is nil if w has
	// completed.
	Ended(w *Work, err error)
}

// Config has what the lanes of a rank have in common.
type Config struct {
	Backends ops.Registry
	// Devices copies tensors on CUDA devices to host memory for operations that no backend for devices can
	// run. If it is nil, such operations fail.
	Devices *cuda.Devices
	// MaxResultBytes is the maximum size of a result that other ranks determine.
	MaxResultBytes int64
	Observer       Observer
	// Finished is called once for each piece of work: with nil when the results of its tensors were reported,
	// or with an error as soon as the work has failed. Any goroutine may call it.
	Finished func(w *Work, err error)
	// Retire is called instead of Finished if Step has finished work without an error. It reports whether a
	// turn must follow.
	Retire func(w *Work) (turn bool)
	// Pin is called at the start of the goroutine of each lane.
	Pin func()
	Log *zap.Logger
}

// Executor has the lanes of a rank. Only the goroutine that runs turns of the loop may call its methods,
// except Abort and Wait.
type Executor struct {
	cfg     Config
	ctx     context.Context
	cancel  context.CancelCauseFunc // aborts the operations that the lanes execute
	running sync.WaitGroup          // the goroutines of the lanes
	warned  sync.Map                // the reasons that warnInHost has logged
	started []*Lane                 // lanes with work that a turn has started
}

// New returns an executor without lanes.
func New(cfg Config) *Executor {
	x := &Executor{cfg: cfg}
	x.ctx, x.cancel = context.WithCancelCause(context.Background())
	return x
}

// NewLane returns a lane for a set in which this rank has position me. The goroutine of the lane starts with
// the first work that turns of the loop do not execute, so a set without such work has none.
func (x *Executor) NewLane(set controller.Set, me int) (*Lane, error) {
	manager, err := ops.NewManager(x.cfg.Backends, set.ID, set.Ranks, me)
	if err != nil {
		return nil, err
	}
	l := &Lane{set: set, me: me, manager: manager, cfg: &x.cfg, warned: &x.warned}
	l.changed.L = &l.mu
	l.spawn = func() {
		x.running.Go(func() {
			x.cfg.Pin()
			l.run(x.ctx)
			l.manager.Close()
		})
	}
	return l, nil
}

// Abort aborts the operations that the lanes execute. They fail with err.
func (x *Executor) Abort(err error) { x.cancel(err) }

// Wait waits for the goroutines of the lanes, which end after Lane.End.
func (x *Executor) Wait() { x.running.Wait() }
