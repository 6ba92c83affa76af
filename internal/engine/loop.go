package engine

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/exec"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/outcome"
	"github.com/gohvd/gohvd/internal/sched"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/tensorqueue"
)

// BackgroundThreadLoop runs turns until the epoch is over. Then it ends all operations and releases the
// connections and the goroutines.
func (e *Engine) BackgroundThreadLoop() {
	defer close(e.released)
	defer e.exec.Abort(nil)
	defer e.endFlush()
	sched.Pin(e.cfg.Cores, e.log)
	var connected sync.WaitGroup
	err := e.sched.Run()
	e.sched.NotifyPeers() // wake the peers, so that they read the last frames
	e.failure = err
	if err == nil {
		e.failure = e.stopCause
	}
	close(e.over)
	e.answer(err)
	close(e.ended)
	if e.cfg.Tuner != nil {
		e.cfg.Tuner.Close()
	}
	// Make sure that the last frames reach the peers. If this rank closes a connection that has unread input,
	// the kernel resets the connection, and the reset may overtake the verdict. So after a failure, keep the
	// connections open until Shutdown or Close is called.
	connected.Go(e.links.Drain)
	flushed := make(chan struct{})
	connected.Go(func() {
		defer close(flushed)
		e.links.Flush()
	})
	select {
	case <-flushed:
	case <-time.After(flushTimeout):
	}
	if err != nil {
		<-e.stop
	}
	if err := e.cfg.Mesh.Close(); err != nil {
		e.log.Warn("closing the connections failed", zap.Error(err))
	}
	connected.Wait()
}

// flushTimeout is how long the rank tries to send its last frames before it closes the connections.
const flushTimeout = time.Second

// answer ends the lanes and all pending operations. The operations end with err, or with ErrShutDown if err
// is nil.
func (e *Engine) answer(err error) {
	e.stalls.Close()
	reason := err
	if err == nil {
		reason = ErrShutDown
	}
	if p, ok := errors.AsType[*PeerError](reason); ok && p != e.stopCause {
		e.reportVerdict(p)
	}
	for _, s := range e.sets.all {
		s.queue.Close(reason)
	}
	e.sched.HandOff()
	e.sets.endLanes(err)
	if err != nil {
		e.exec.Abort(err)
	}
	ended := reason
	if err == nil && e.stopCause != nil {
		ended = e.stopCause
	}
	e.messages.end(ended, err == nil, e.flushing)
	e.exec.Wait()
	for _, s := range e.sets.all {
		e.sets.endEntries(s, reason, func(*tensorqueue.Entry) bool { return true })
	}
}

// workFinished reports to the next turn that w has ended, or has failed with err. Any goroutine may call it.
func (e *Engine) workFinished(w *exec.Work, err error) {
	e.mu.Lock()
	e.finished = append(e.finished, finishedWork{w, err})
	e.reported.Store(true)
	e.mu.Unlock()
	e.sched.Notify()
}

// Fail makes the epoch fail because of err, of which this rank is the cause. It does not wait for the end of
// the epoch. Any goroutine may call it.
func (e *Engine) Fail(err error) { e.workFinished(nil, err) }

// RunLoopOnce runs one turn: it takes the queued requests, looks up each of them in the cache, negotiates,
// and dispatches grants to lanes. It does not block. It returns the latest time for the next turn, counted
// from the engine's start, and whether the epoch is over. If the epoch is over, err is the reason, or nil
// after a shutdown.
func (e *Engine) RunLoopOnce() (next time.Duration, over bool, err error) {
	e.now = e.sched.Now()
	e.member.Tick(e.now)
	if e.combiner != nil {
		e.combiner.Tick(e.now)
	}
	if e.coordinator != nil {
		e.coordinator.Tick(e.now)
		if watched := e.observer.Watched(); watched != e.tracing {
			e.tracing = watched
			e.coordinator.Trace(watched)
		}
	}
	if e.cfg.Tuner != nil {
		if t, changed := e.cfg.Tuner.Changed(); changed {
			e.coordinator.Tune(t)
		}
	}
	e.clock.Probe(e.now)
	e.messages.receive()
	e.takeFailedMessages()
	e.takeFinished()
	e.takeRequests()
	// Search the operations in flight only when the earliest known deadline has passed, so that this costs
	// nothing while no operation is late.
	if e.now >= e.due {
		e.due = e.sets.expire(e.now, e.member)
	}
	if e.coordinator != nil {
		e.observer.CutSteps(e.coordinator)
	}
	if err := e.negotiation.turn(); err != nil {
		return 0, true, err
	}
	switch {
	case e.member.Verdict() != nil:
		if l := e.leaving.Load(); l != nil && l.expired && slices.Equal(e.member.Verdict().Ranks, e.self()) {
			return 0, true, ErrClosed
		}
		return 0, true, outcome.OfVerdict(e.member.Verdict())
	case e.member.Closed() && e.granted > 0 && e.stopCause != nil:
		return 0, true, outcome.CutShort(e.stopCause)
	case e.member.Closed() && e.granted > 0:
		return 0, true, ErrCutShort
	case e.member.Closed():
		return 0, true, nil
	}
	next = e.negotiation.next()
	if e.coordinator != nil {
		stalls := e.coordinator.Events()
		e.observer.Publish(e.coordinator, e.now, len(stalls) > 0)
		e.stalls.Add(e.now, stalls)
	}
	return min(next, e.due, e.expiredDue, e.clock.Due(), e.stalls.Due()), false, nil
}

func (e *Engine) takeFailedMessages() {
	broken, late := e.messages.takeFailed()
	for _, b := range broken {
		if !errors.Is(b.err, transport.ErrClosed) {
			e.log.Info("a channel for messages failed", zap.Int("set", int(b.set)), zap.Error(b.err))
			suspects, reason := blame(b.err, e.cfg.Rank)
			e.member.SuspectChannel(b.set, suspects, reason)
		}
	}
	for _, m := range late {
		e.member.TimeoutOfMessage(m.set, m.name, m.peer, m.timeout)
	}
}

func (e *Engine) takeFinished() {
	if !e.reported.Load() {
		return
	}
	s := &e.scratch
	e.mu.Lock()
	e.reported.Store(false)
	s.finished = append(s.finished[:0], e.finished...)
	clear(e.finished)
	e.finished = e.finished[:0]
	e.mu.Unlock()
	if len(s.finished) > 0 {
		e.sched.Extend()
	}
	for _, f := range s.finished {
		if errors.Is(f.err, transport.ErrClosed) {
			continue // this rank closed its connections; the control connections report that too
		}
		if f.err != nil {
			log := e.log
			if f.w != nil {
				r := f.w.Grant.Responses[0]
				log = log.With(zap.Stringer("operation", r.Kind), zap.String("tensor", r.Name))
			}
			log.Warn("an operation failed", zap.Error(f.err))
			e.member.Suspect(blame(f.err, e.cfg.Rank))
			continue
		}
		e.retire(f.w)
	}
	clear(s.finished)
}

// retire releases w, whose results were reported. It reports whether a turn must follow.
func (e *Engine) retire(w *exec.Work) (more bool) {
	e.granted--
	if r := w.Grant.Responses[0]; r.Kind == message.RemoveProcessSet {
		e.sets.drop(r.Set)
	}
	more = e.member.Finished(w.Grant)
	w.Reset()
	e.works = append(e.works, w)
	return more
}

// waitingPeriod is the time after which expire searches requests that wait for a lock-step cycle. The cycle
// may never come, because another rank has not entered the one before.
const waitingPeriod = 100 * time.Millisecond

func (e *Engine) takeRequests() {
	// Read leaving before the queues, so that requests that were submitted before the shutdown are sent
	// before it or together with it.
	leaving, accepts := e.leaving.Load(), e.negotiation.accepts()
	for _, s := range e.sets.all {
		switch {
		case !s.queue.Waiting():
		case accepts:
			e.sched.Extend()
			e.submit(s)
		default:
			e.due = min(e.due, e.now+waitingPeriod)
		}
	}
	switch {
	case leaving == nil:
	case leaving.Failed && e.stopCause != nil: // the stop caused the failure
	case leaving.Failed:
		e.member.Suspect(e.self(), leaving.Reason)
	default:
		if accepts && !e.announced {
			e.announced = true
			e.member.Shutdown(leaving.Reason, e.messages.channels())
		}
		e.expireShutdown(leaving)
	}
}

// expireShutdown reports to the coordinator that the context of Shutdown has ended, and repeats the report.
func (e *Engine) expireShutdown(l *leaving) {
	if l.expired && (e.expiredDue == controller.Never || e.now >= e.expiredDue) {
		e.member.ExpireShutdown(l.waited)
		e.expiredDue = e.now + timeoutReportInterval
	}
}

// submit passes the queued requests of a set to the controller.
func (e *Engine) submit(from *processSet) {
	now := e.now
	s := &e.scratch
	s.entries = from.queue.Pop(s.entries[:0])
	if len(s.entries) > 0 {
		e.negotiation.took(s.entries[0].Times.Submitted)
	}
	for _, entry := range s.entries {
		if err := e.member.Submit(entry.Set, &entry.Request); err != nil {
			entry.Finish(&UsageError{Op: entry.Request.Kind.String(), Tensor: entry.Request.Name, Err: err})
			continue
		}
		from.voted.add(entry)
		// The entry may have been submitted during this turn, and so later than now. Its times must be in
		// order.
		entry.Times.Sent.Store(int64(max(now, entry.Times.Submitted)))
		if entry.Deadline > 0 {
			e.due = min(e.due, entry.Deadline)
		}
	}
	clear(s.entries)
}

// hasLeft reports whether this rank has announced its shutdown, and all its operations have ended. If the job
// then stops for another reason, that does not concern this rank, which may as well have been closed before.
func (e *Engine) hasLeft() bool {
	busy := func(s *processSet) bool { return s.queue.Len() > 0 }
	return e.announced && !slices.ContainsFunc(e.sets.all, busy)
}

// stopFor is called when the job stops and this rank has not left it. It records the reason and
// returns it as an error. If ranks is not empty, the job stops because these ranks have shut down. Otherwise
// it stops because a tensor has stalled.
func (e *Engine) stopFor(ranks []topo.Rank, reason string) error {
	if len(ranks) > 0 {
		p := outcome.OfVerdict(&controller.Verdict{Ranks: ranks, Reason: reason})
		p.ShutDown = true
		e.stopCause = p
		e.reportVerdict(p)
		return p
	}
	stalled := &StallError{Reason: reason}
	e.stopCause = stalled
	if e.cfg.OnStallShutdown != nil {
		e.cfg.OnStallShutdown(stalled)
	}
	return stalled
}

// reportVerdict logs p and passes it to OnVerdict. The caller must call it before any operation ends with p.
func (e *Engine) reportVerdict(p *PeerError) {
	e.log.Error("the job failed", zap.Error(p))
	if e.cfg.OnVerdict != nil {
		e.cfg.OnVerdict(p)
	}
}

// dispatch finds this rank's tensors for a grant and starts the operation in this turn or pushes it to the
// lane. If this rank cannot execute the grant, it returns an error and the ranks to suspect.
func (e *Engine) dispatch(g *controller.Grant) (suspects []topo.Rank, err error) {
	var w *exec.Work
	if n := len(e.works); n > 0 {
		w, e.works = e.works[n-1], e.works[:n-1]
	} else {
		w = new(exec.Work)
	}
	w.Grant = g
	if err := e.match(w); err != nil {
		return []topo.Rank{0}, err // the coordinator sent a wrong grant
	}
	l, err := e.sets.change(g)
	if err != nil {
		suspects, _ = blame(err, e.cfg.Rank)
		return suspects, err
	}
	e.granted++
	if w.OnDevices() {
		w.Order = e.onDevices
		e.onDevices++
	}
	e.measure(g)
	e.sched.Extend()
	if executes, waits := e.sched.InTurn(); !executes || !e.exec.StartInTurn(l, w, e.now, waits) {
		e.sched.Dispatched()
		l.Push(w)
	}
	return nil, nil
}

// measure tells the tuner which tensors of the global set were granted for an allreduce.
func (e *Engine) measure(g *controller.Grant) {
	if e.cfg.Tuner == nil || g.Set != topo.Global || g.Responses[0].Kind != message.Allreduce {
		return
	}
	for _, r := range g.Responses {
		e.cfg.Tuner.Granted(r.Name, r.WireBytes(), e.now)
	}
}

// match finds this rank's tensors for the grant of w. It returns an error if this rank has not submitted one
// of the tensors, or has submitted it with other parameters.
func (e *Engine) match(w *exec.Work) error {
	e.frames.Grant(w.Grant)
	w.Granted = e.now
	if e.coordinator != nil && e.tracing {
		w.Arrivals = append(w.Arrivals[:0], e.coordinator.Arrivals(w.Grant.Set, len(w.Grant.Responses))...)
	}
	w.Absent = slices.Contains(w.Grant.Absent, e.cfg.Rank)
	if w.Absent {
		return nil
	}
	s := e.sets.find(w.Grant.Asked)
	for i, r := range w.Grant.Responses {
		var entry *tensorqueue.Entry
		if i < len(w.Grant.Bits) {
			entry = s.voted.take(w.Grant.Bits[i], r)
		}
		if entry == nil {
			entry = s.queue.Find(r.Name)
			s.voted.drop(entry)
		}
		if entry == nil {
			return fmt.Errorf("rank 0 granted %v %q, which rank %d has not submitted", r.Kind, r.Name,
				e.cfg.Rank)
		}
		if q := &entry.Request; r.Kind != message.Error && q.Hit != r && !r.Matches(q, s.me) {
			return fmt.Errorf("rank 0 granted %v %q with parameters that differ from the request of rank %d", r.Kind,
				r.Name, e.cfg.Rank)
		}
		if entry.Times.Granted.Load() != 0 {
			return fmt.Errorf("rank 0 granted %v %q twice", r.Kind, r.Name)
		}
		w.Granted = max(w.Granted, time.Duration(entry.Times.Sent.Load()))
		entry.Times.Grant.Store(w.Grant.Number<<8 | uint64(w.Grant.Backend))
		entry.Times.Granted.Store(int64(w.Granted))
		entry.Response = r
		w.Entries = append(w.Entries, entry)
	}
	return nil
}
