package exec

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ops"
)

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
	l := &Lane{cfg: &x.cfg}
	l.machine = machine{set: set, me: me, manager: manager, cfg: &x.cfg, warned: &x.warned}
	l.changed.L, l.machine.setLimit, l.machine.ended = &l.mu, l.setLimit, l.ended
	l.spawn = func() {
		x.running.Go(func() {
			x.cfg.Pin()
			l.run(x.ctx)
			l.machine.manager.Close()
		})
	}
	return l, nil
}

// Abort aborts the operations that the lanes execute. They fail with err.
func (x *Executor) Abort(err error) { x.cancel(err) }

// Wait waits for the goroutines of the lanes, which end after Lane.End.
func (x *Executor) Wait() { x.running.Wait() }

// StartInTurn reports whether turns of the loop may execute w. If so, it starts w. Otherwise the caller must
// push w to the lane. now is the time at which the turn began, and waitedFor is set if the goroutine that
// runs the turns waits for w.
func (x *Executor) StartInTurn(l *Lane, w *Work, now time.Duration, waitedFor bool) bool {
	moves := w.Grant.Responses[0].Kind.MovesData()
	// A caller that runs the turns waits for its operation, so it has time for many steps. If another rank is
	// late for a step, or if the caller's context ends, the goroutine of the lane takes over.
	// A barrier must not complete before the operations that were granted before it. So a turn executes a
	// barrier only if the lane has reported the results of all earlier operations.
	if moves && !l.machine.fitsInTurn(w, waitedFor) || !l.claim(!moves) {
		return false
	}
	w.begin(now, x.cfg.Observer)
	if err := l.machine.start(w); err != nil || !moves {
		l.leaveTurn(w, err)
		x.cfg.Finished(w, err)
	} else {
		x.started = append(x.started, l)
	}
	return true
}

// Step executes the next step of each operation that a turn has started. It does not wait. If an operation is
// blocked, Step hands it over to its lane. It reports whether an operation has moved on, and whether a turn
// must follow, because the state of an operation has changed.
func (x *Executor) Step() (moved, turn bool) {
	for i := 0; i < len(x.started); {
		l := x.started[i]
		w := l.machine.execution.work
		progress, err := l.machine.step(x.ctx, false)
		switch {
		case err == nil && progress == ops.Waiting:
			i++
			continue
		case err == nil && progress == ops.Moving:
			moved, turn = true, true
			i++
			continue
		case err == nil && progress == ops.Blocked:
			l.unclaim(w)
			turn = true
		case err == nil:
			l.leaveTurn(w, nil)
			moved, turn = true, x.cfg.Retire(w) || turn
		default:
			l.leaveTurn(w, err)
			x.cfg.Finished(w, err)
			turn = true
		}
		x.started = slices.Delete(x.started, i, i+1)
	}
	return moved, turn
}

// leaveTurn ends the execution of w in turns and returns the lane to its goroutine. If err is nil, leaveTurn
// first reports the results of the tensors of w. Otherwise the lane reports the errors of the tensors when
// the verdict is known.
func (l *Lane) leaveTurn(w *Work, err error) {
	if err == nil {
		l.machine.finish(w, nil)
		w = nil
	} else {
		w.failed, w.cause = true, err
	}
	l.unclaim(w)
}

// InTurns returns the number of operations that turns execute.
func (x *Executor) InTurns() int { return len(x.started) }

// HandOff passes started operations to their lanes, which execute the steps that wait for other ranks.
func (x *Executor) HandOff() {
	for _, l := range x.started {
		l.unclaim(l.machine.execution.work)
	}
	clear(x.started)
	x.started = x.started[:0]
}

// These limits bound the size of an operation that is executed in turns of the loop. BackgroundThreadLoop
// also serves other operations, so in its turns an operation may move only maxLoopBytes. A goroutine that
// runs turns while it waits for the operation may move more (maxDriveBytes). For larger operations, the cost
// of waking the lane is comparatively small.
const (
	maxLoopBytes  = 64 << 10
	maxDriveBytes = 4 << 20
)

// fitsInTurn reports whether turns of the loop may execute w, a few steps in each turn. waitedFor is set if
// the goroutine that runs the turns waits for w.
func (m *machine) fitsInTurn(w *Work, waitedFor bool) bool {
	r := w.Grant.Responses[0]
	if w.copied() || w.allocates() {
		return false // the lane waits for the copies, or for the program
	}
	numBytes := total(w)
	if r.Kind.SendsRows() && !w.Absent {
		numBytes = int64(len(w.Entries[0].Input)) // this rank does not know yet how many bytes it receives
	}
	if !waitedFor {
		return (r.Kind == message.Allreduce || r.Kind == message.Reduce) &&
			numBytes*int64(max(len(m.set.Ranks)-1, 1)) <= maxLoopBytes
	}
	if numBytes <= maxDriveBytes {
		return true
	}
	// Work that is not copied to a buffer first may have any size if the backend divides it into many steps.
	// The first step must not copy or allocate a tensor, because no heartbeat leaves this rank meanwhile.
	if _, lists, _ := m.manager.Get(w.Grant.Backend, r.Kind, w.Grant.Algorithm); !lists {
		return false
	}
	switch r.Kind {
	case message.Allreduce, message.Reduce:
		return r.DType.Valid() && len(w.Grant.Absent) == 0 && r.Op != tensor.Adasum && !r.Wire.Valid()
	case message.Allgather:
		return len(w.Entries) == 1 && w.Entries[0].InPlace
	case message.Broadcast:
		return len(w.Entries) == 1 && (w.Entries[0].InPlace || r.Root != m.set.Ranks[m.me])
	}
	return false
}
