package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/tensorqueue"
)

// work is a grant and the tensors of this rank that the grant names. The tensors are in the order of the
// grant's responses.
type work struct {
	grant   *controller.Grant
	entries []*tensorqueue.Entry
	// absent is set if this rank has joined. In this case it has no tensors and contributes neutral elements.
	absent bool
	// order is the number of the operation among those of this rank on devices.
	order uint64
	// inHost has copies of the tensors if they are on devices and the backend needs them in host memory.
	inHost inHost
	// started is set if the operation was started and so must be finished. failed is set if the operation has
	// ended with an error. This error is reported for the tensors when the verdict is known.
	started, failed bool
	// completed is set if the results of the tensors were reported before the end of the operation. Then
	// entries is empty.
	completed bool
	// granted and begun are the times at which the work was granted and begun, counted from the engine's
	// start. watched is set if a timeline is on. In this case, clock is the engine's start, and marks are the
	// activities of the work so far.
	granted, begun time.Duration
	watched        bool
	clock          time.Time
	marks          []mark
	// arrivals are the times at which the members' requests arrived at rank 0, ordered by tensor, then by
	// member. It is empty if the times are unknown.
	arrivals []time.Duration
	// refused holds an error for each tensor that fails while the operation completes for the other tensors.
	// A tensor fails if the ranks disagreed about it, or if this rank cannot store its result. refused is
	// empty, or has one element for each entry.
	refused []error
}

func (w *work) reset() {
	clear(w.entries)
	clear(w.refused)
	*w = work{entries: w.entries[:0], refused: w.refused[:0], marks: w.marks[:0], arrivals: w.arrivals[:0]}
}

// refuse makes tensor i end with err. The operation continues for the other tensors.
func (w *work) refuse(i int, err error) {
	for len(w.refused) < len(w.entries) {
		w.refused = append(w.refused, nil)
	}
	w.refused[i] = err
}

// A lane executes the grants of one process set in order. It shares no state with other lanes, so a long
// operation of one set does not delay other sets. The goroutine of the lane runs the method run, which
// executes the grants. While run has nothing to do, the loop may claim the lane and execute grants itself.
type lane struct {
	set            controller.Set
	me             int // the position of this rank in the set
	queue          *tensorqueue.Queue
	manager        *ops.Manager
	maxResultBytes int64
	observer       *observer
	devices        *cuda.Devices
	log            *zap.Logger
	scratch        scratch
	execution      execution
	// spawn starts the goroutine of run. It is called when run has something to do for the first time.
	spawn func()

	// voted holds submitted entries, indexed by their cache bits. Only the loop uses it.
	voted votes

	// mu guards the fields below. The fields executing and claimed also determine the owner of scratch and
	// execution: run owns them while executing is set, and the loop while claimed is set.
	mu        sync.Mutex
	changed   sync.Cond // wakes run
	todo      []*work
	spawned   bool  // whether the goroutine of run was started
	executing bool  // whether run is executing an operation
	answering bool  // whether run has executed an operation but not reported all its results
	claimed   bool  // whether the loop has claimed the lane, so that run waits
	limit     limit // of the operation that run is executing, if its entries have completed
	ended     bool  // whether no more work will be pushed
	err       error // the error with which all remaining work ends, or nil if the work is to be executed
}

// limit is the time limit of an operation whose entries have completed before its end.
type limit struct {
	name    string        // of the tensor with the limit
	timeout time.Duration // 0 means that there is no limit
	due     time.Duration // when the timeout ends, or when it must be reported again
}

// expire calls report if the operation whose entries have completed has not ended in time, and again each
// timeoutReportInterval. It returns when it must be called again.
func (l *lane) expire(now time.Duration, report func(name string, timeout time.Duration)) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch m := &l.limit; {
	case m.timeout == 0:
		return never
	case m.due <= now:
		report(m.name, m.timeout)
		m.due = now + timeoutReportInterval
	}
	return l.limit.due
}

// newLane returns a lane for a set in which this rank has position me.
func (e *Engine) newLane(set controller.Set, me int) (*lane, error) {
	manager, err := ops.NewManager(e.cfg.Backends, set.ID, set.Ranks, me)
	l := &lane{set: set, me: me, queue: tensorqueue.New(), maxResultBytes: e.cfg.MaxResultBytes,
		observer: &e.observer, manager: manager, devices: e.cfg.Devices, log: e.log}
	l.changed.L = &l.mu
	return l, err
}

// votes is a table of submitted entries, indexed by their cache bits. With it, the engine finds the entries
// of a large grant without looking up each name.
type votes []*tensorqueue.Entry

// add stores e under its cache bit. The caller must have looked up e's request in the response cache, which
// sets the bit.
func (v *votes) add(e *tensorqueue.Entry) {
	for int(e.Request.Bit) >= len(*v) {
		*v = append(*v, nil)
	}
	(*v)[e.Request.Bit] = e
}

// take removes and returns the entry with the given bit if that entry belongs to r. Otherwise it returns nil.
func (v votes) take(bit uint32, r *message.Response) *tensorqueue.Entry {
	if int64(bit) >= int64(len(v)) || v[bit] == nil {
		return nil
	}
	e := v[bit]
	if q := &e.Request; q.Hit != r && q.Name != r.Name {
		return nil
	}
	v[bit] = nil
	return e
}

// drop removes e from the table, so that the memory that e refers to can be freed. e may be nil.
func (v votes) drop(e *tensorqueue.Entry) {
	if e != nil && int64(e.Request.Bit) < int64(len(v)) && v[e.Request.Bit] == e {
		v[e.Request.Bit] = nil
	}
}

// push appends w to the work that run has to execute.
func (l *lane) push(w *work) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.todo = append(l.todo, w)
	l.wake()
}

// wake wakes the goroutine of run if it has something to do. The caller holds mu.
func (l *lane) wake() {
	if !l.claimed && (len(l.todo) > 0 || l.ended) {
		l.signal()
	}
}

// signal wakes the goroutine of run, or starts it if it was not started before. The caller holds mu.
func (l *lane) signal() {
	if l.spawned {
		l.changed.Signal()
		return
	}
	l.spawned = true
	l.spawn()
}

// claim claims the lane for the loop if run has nothing to do, and reports whether it has succeeded. If
// inOrder is set, claim also requires that run has reported the results of everything that it has executed.
func (l *lane) claim(inOrder bool) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.executing || l.claimed || l.ended || l.err != nil || len(l.todo) > 0 || inOrder && l.answering {
		return false
	}
	l.claimed = true
	return true
}

// unclaim returns the lane to run. If w is not nil, run continues with w.
func (l *lane) unclaim(w *work) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.claimed = false
	if w != nil {
		l.todo = slices.Insert(l.todo, 0, w)
	}
	l.wake()
}

// end makes run return when no work is left. If err is not nil, run ends work that has not begun with err
// instead of executing it. Work that has begun is aborted only when the context of run ends.
func (l *lane) end(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.err, l.ended = err, true
	l.signal() // this wakes run even if it waits for the verdict
}

// next removes and returns the oldest work. It also returns the error that was passed to end, if any. It
// blocks until there is work. If the lane has ended and no work is left, next returns nil.
func (l *lane) next() (w *work, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.executing, l.answering, l.limit = false, false, limit{}
	for l.claimed || len(l.todo) == 0 {
		if l.ended && !l.claimed {
			return nil, nil
		}
		l.changed.Wait()
	}
	w = l.todo[0]
	l.todo = slices.Delete(l.todo, 0, 1)
	l.executing = true
	return w, l.err
}

// executed records that run has executed the work that next returned. run calls it before it reports the
// results. So if a caller gets its result and begins the next operation, it finds the lane free.
func (l *lane) executed() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.executing, l.answering, l.limit = false, true, limit{}
}

// verdict blocks until the epoch has failed, and returns the reason.
func (l *lane) verdict() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.err == nil {
		l.changed.Wait()
	}
	return l.err
}

// run executes work until end is called. It calls finished once for each piece of work: with nil when the
// results of the tensors have been reported, or with an error as soon as the work has failed. The tensors of
// failed work end with the error that was passed to end, because the verdict may name a different rank than
// the peer whose connection broke.
func (l *lane) run(ctx context.Context, finished func(w *work, err error)) {
	for {
		w, err := l.next()
		if w == nil {
			return
		}
		// Even after end, finish work that was started, because peers may still read this rank's memory. If
		// the work cannot be finished, the peers must be notified before the caller gets its memory back.
		if (err == nil || w.started) && !w.failed {
			if err = l.execute(ctx, w); err == nil {
				l.executed()
				if !w.completed {
					l.answer(w)
				}
				finished(w, nil)
				continue
			}
			finished(w, err)
			w.failed = true
		}
		if w.failed {
			err = withInUse(l.verdict(), err)
			l.releaseCopies(w) // not earlier, because peers may have read the copies until now
		}
		if w.completed {
			continue
		}
		l.observer.ended(w, err)
		for _, e := range w.entries {
			l.finish(e, err)
		}
	}
}

// withInUse returns the verdict. If err says that a device may still use the buffers, the result says so too.
func withInUse(verdict, err error) error {
	if inUse, ok := errors.AsType[*ops.InUseError](err); ok {
		return fmt.Errorf("%w; %w", verdict, inUse)
	}
	return verdict
}

// blame returns the ranks to suspect after an error during execution, and the reason. The suspect is the peer
// whose connection failed. If the backend cannot tell which rank failed, all ranks of the operation are
// suspects. Otherwise the suspect is this rank.
func blame(err error, self topo.Rank) ([]topo.Rank, string) {
	if p, ok := errors.AsType[*transport.PeerError](err); ok {
		return []topo.Rank{p.Peer}, cause(err).Error()
	}
	if u, ok := errors.AsType[*ops.UnknownRankError](err); ok {
		return u.Ranks, err.Error()
	}
	return []topo.Rank{self}, err.Error()
}
