package engine

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/topo"
	"github.com/gohvd/gohvd/transport"
)

const (
	// lockstepCycle is the time between cycles where HOROVOD_CYCLE_TIME is not set.
	lockstepCycle = time.Millisecond
	// lockstepIdleCycle is what that grows to while no rank has anything to say.
	lockstepIdleCycle = 8 * time.Millisecond
	// lockstepGrace is how long a failure waits for a control connection to end and name the dead.
	lockstepGrace = 200 * time.Millisecond
	// lockstepVerdict is how long a rank waits for rank 0's word about a failure.
	lockstepVerdict = time.Second
)

// lockstep is the loop of an engine under the lock-step controller. All ranks enter every cycle, on a timer;
// grants execute in the loop, so nothing overlaps and process sets are not independent. The collectives are a
// star over the control connections.
//
// While the loop executes, the receivers watch for it: the end of a control connection, or a frame about a
// failure, aborts the data lanes, so that a dead rank stops those who wait for its living neighbours too.
type lockstep struct {
	e       *Engine
	core    *controller.Lockstep
	waiting [][][]byte // by rank: the frames that came and were not used yet
	ended   []error    // by rank: why its control connection ended
	failure error      // the first accusation (rank 0) or the verdict (others) that came
	and, or []uint64   // scratch
	ctx     context.Context
}

// isFailure reports whether an event is about a failure. It is the inbox's watch.
func (e *Engine) isFailure(ev *event) bool {
	switch {
	case ev.err != nil:
		return true
	case e.cfg.Rank == 0:
		return isSuspicion(ev.frame)
	default:
		return isVerdict(ev.frame)
	}
}

func isSuspicion(frame []byte) bool {
	return len(frame) > 0 && (message.UpType(frame[0]) == message.UpSuspect || message.UpType(frame[0]) == message.UpTimeout)
}

func isVerdict(frame []byte) bool {
	return len(frame) > 0 && message.DownType(frame[0]) == message.DownFail
}

// interruptLanes cuts off what the loop executes.
func (e *Engine) interruptLanes() {
	for _, l := range e.lanes.snapshot() {
		e.cfg.Mesh.Abort(transport.DataLane(l.set.ID), errInterrupted)
	}
}

var errInterrupted = errors.New("another rank reported a failure")

// lockstepLoop is nil after an orderly shutdown.
func (e *Engine) lockstepLoop(ctx context.Context) error {
	s := &lockstep{
		e: e, ctx: ctx,
		waiting: make([][][]byte, e.cfg.Size), ended: make([]error, e.cfg.Size),
		core: controller.NewLockstep(controller.LockstepConfig{
			Rank: e.cfg.Rank, Sets: e.sets(),
			CacheCapacity: e.cfg.CacheCapacity, FusionThresholdBytes: e.cfg.FusionThresholdBytes,
			DisableGroupFusion: e.cfg.DisableGroupFusion, Deterministic: e.cfg.Deterministic,
			Plan: e.plan,
		}),
	}
	period := e.cfg.CycleTime
	if period == 0 {
		period = lockstepCycle
	}
	pause := period
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-e.stop:
			return ErrClosed
		}
		over, err := s.cycle()
		if err != nil {
			return s.fail(err)
		}
		if over {
			// Once more round, so that nobody closes connections while another still executes.
			if _, _, err := s.allreduce(s.core.Vectors()); err != nil {
				return s.fail(err)
			}
			return nil
		}
		if s.core.Quiet() {
			pause = min(2*pause, max(lockstepIdleCycle, period))
		} else {
			pause = period
		}
		timer.Reset(pause)
	}
}

// cycle runs one. An error is a failure to be judged.
func (s *lockstep) cycle() (over bool, err error) {
	e := s.e
	leaving := e.leaving.Load() // before Pop: what was submitted before it does not come after it
	now := time.Since(e.start)
	for _, l := range e.lanes.all {
		if l.queue.Waiting() {
			e.submit(l, now, s.core.Submit)
		}
	}
	switch {
	case leaving == nil:
	case leaving.Failed:
		return false, &PeerError{Ranks: []int{int(e.cfg.Rank)}, Reason: leaving.Reason}
	default:
		s.core.Shutdown()
	}
	if late := e.overdue(now); len(late) > 0 {
		return false, &timeoutError{late[0].set, late[0].name, late[0].timeout}
	}
	e.now = now
	e.probe()
	and, or, err := s.allreduce(s.core.Vectors())
	if err != nil {
		return false, err
	}
	gather, broadcast, err := s.core.Combine(and, or)
	if err != nil || !broadcast {
		return false, err
	}
	e.traceVectors(and, or)
	down, err := s.exchange(gather)
	if err != nil {
		return false, err
	}
	e.traceDown(down)
	grants, err := s.core.Apply(down)
	if err != nil {
		return false, &transport.PeerError{Peer: 0, Err: err}
	}
	if t := e.observer.timeline.Load(); t != nil {
		(*t).Cycle(e.observer.since())
	}
	for _, g := range grants {
		if err := s.run(g); err != nil {
			return false, err
		}
	}
	if self := e.cfg.Rank; len(down.Ranks) > 0 && !slices.Contains(down.Ranks, self) {
		p := newPeerError(&controller.Verdict{Ranks: down.Ranks, Reason: down.Reason})
		p.ShutDown = true
		e.refusal = p
	}
	return s.core.Stopped(), nil
}

// run executes a grant. An error of this rank's controller is the coordinator's fault.
func (s *lockstep) run(g *controller.Grant) error {
	w := &work{grant: g}
	s.e.now = time.Since(s.e.start)
	if err := s.e.match(w); err != nil {
		return &transport.PeerError{Peer: 0, Err: err}
	}
	l, err := s.e.changeSets(g)
	if err != nil {
		return err
	}
	// What the grant says is read before its tensors are answered: then it may be the last of its set.
	r := g.Responses[0]
	s.e.observer.begin(w, s.e.observer.since())
	if err := l.execute(s.ctx, w); err != nil {
		return err // its tensors are abandoned
	}
	if r.Kind == message.RemoveProcessSet {
		s.e.dropSet(r.Set)
	}
	return nil
}

// allreduce combines every rank's vectors. The results are valid until the next call.
func (s *lockstep) allreduce(and, or []uint64) (_, _ []uint64, err error) {
	e := s.e
	if e.cfg.Rank != 0 {
		e.scratch.frame = message.AppendVectors(e.scratch.frame[:0], and, or)
		if err := s.send(0, e.scratch.frame); err != nil {
			return nil, nil, err
		}
		frame, err := s.receive(0)
		if err != nil {
			return nil, nil, err
		}
		if s.and, s.or, err = message.DecodeVectors(frame, s.and, s.or); err != nil {
			return nil, nil, &transport.PeerError{Peer: 0, Err: err}
		}
		return s.and, s.or, nil
	}
	for r := 1; r < e.cfg.Size; r++ {
		frame, err := s.receive(topo.Rank(r))
		if err == nil {
			s.and, s.or, err = message.DecodeVectors(frame, s.and, s.or)
			if err == nil && (len(s.and) != len(and) || len(s.or) != len(or)) {
				err = fmt.Errorf("vectors of %d and %d words, want %d and %d: do all ranks have the same HOROVOD_CACHE_CAPACITY?",
					len(s.and), len(s.or), len(and), len(or))
			}
			if err != nil {
				err = &transport.PeerError{Peer: topo.Rank(r), Err: err}
			}
		}
		if err != nil {
			return nil, nil, err
		}
		(*message.Bits)(&and).And(s.and)
		(*message.Bits)(&or).Or(s.or)
	}
	e.scratch.frame = message.AppendVectors(e.scratch.frame[:0], and, or)
	return and, or, s.tellAll(e.scratch.frame)
}

// exchange gathers requests at rank 0 if asked to, and gives every rank its decision.
func (s *lockstep) exchange(gather bool) (*message.Down, error) {
	e := s.e
	down := &message.Down{}
	if e.cfg.Rank != 0 {
		if gather {
			up := s.core.Gather()
			e.traceUp(up)
			frame, err := message.AppendUp(e.scratch.frame[:0], up)
			if err != nil {
				return nil, err
			}
			e.scratch.frame = frame
			if err := s.send(0, frame); err != nil {
				return nil, err
			}
		}
		frame, err := s.receive(0)
		if err != nil {
			return nil, err
		}
		if err := message.DecodeDown(frame, down); err != nil {
			return nil, &transport.PeerError{Peer: 0, Err: err}
		}
		return down, nil
	}
	var ups []*message.Up
	if gather {
		ups = append(ups, s.core.Gather())
		e.traceUp(ups[0])
		for r := 1; r < e.cfg.Size; r++ {
			frame, err := s.receive(topo.Rank(r))
			if err != nil {
				return nil, err
			}
			up := new(message.Up)
			if err := message.DecodeUp(frame, up); err != nil {
				return nil, &transport.PeerError{Peer: topo.Rank(r), Err: err}
			}
			ups = append(ups, up)
		}
	}
	decision, err := s.core.Decide(ups)
	var breach *controller.BreachError
	switch {
	case errors.As(err, &breach):
		return nil, &PeerError{Ranks: []int{int(breach.Rank)}, Reason: fmt.Sprintf("it broke the protocol: %v", breach.Err)}
	case err != nil:
		return nil, err
	}
	frame, err := message.AppendDown(e.scratch.frame[:0], decision)
	if err != nil {
		return nil, err
	}
	e.scratch.frame = frame
	// Rank 0 replays what the others get, not what it meant.
	if err := message.DecodeDown(frame, down); err != nil {
		return nil, err
	}
	return down, s.tellAll(frame)
}

func (s *lockstep) tellAll(frame []byte) error {
	for r := 1; r < s.e.cfg.Size; r++ {
		if err := s.send(topo.Rank(r), frame); err != nil {
			return err
		}
	}
	return nil
}

func (s *lockstep) send(to topo.Rank, frame []byte) error {
	l := s.e.links[max(0, int(to)-1)]
	if err := l.send(frame); err != nil {
		return &transport.PeerError{Peer: to, Err: cause(err)}
	}
	return nil
}

// receive waits for the next frame of a rank. News of a failure of any rank is an error.
func (s *lockstep) receive(from topo.Rank) ([]byte, error) {
	for {
		if frames := s.waiting[from]; len(frames) > 0 {
			s.waiting[from] = frames[1:]
			return frames[0], nil
		}
		if s.failure != nil {
			return nil, s.failure
		}
		if err := s.firstEnd(); err != nil {
			return nil, err
		}
		select {
		case <-s.e.bell:
			s.collect()
		case <-s.e.stop:
			return nil, ErrClosed
		}
	}
}

// collect sorts what came by rank.
func (s *lockstep) collect() {
	e := s.e
	e.scratch.events = e.inbox.take(e.scratch.events[:0])
	for _, ev := range e.scratch.events {
		switch {
		case ev.err != nil:
			s.ended[ev.from] = ev.err
		case message.IsProbe(ev.frame):
			if err := e.hearProbe(ev.from, ev.frame); err != nil {
				s.ended[ev.from] = err
			}
		case e.isFailure(&ev):
			if s.failure == nil {
				s.failure = s.readFailure(ev.from, ev.frame)
			}
		default:
			s.waiting[ev.from] = append(s.waiting[ev.from], ev.frame)
		}
	}
	clear(e.scratch.events)
}

// firstEnd is the failure of a rank whose control connection ended.
func (s *lockstep) firstEnd() error {
	for r, err := range s.ended {
		if errors.Is(err, transport.ErrClosed) {
			return ErrClosed // by this process itself, which says nothing about the peer
		}
		if err != nil {
			return &PeerError{Ranks: []int{r}, Reason: fmt.Sprintf("its control connection ended: %v", err)}
		}
	}
	return nil
}

// readFailure is the error that a frame about a failure stands for.
func (s *lockstep) readFailure(from topo.Rank, frame []byte) error {
	if s.e.cfg.Rank != 0 {
		var down message.Down
		if err := message.DecodeDown(frame, &down); err != nil {
			return &transport.PeerError{Peer: from, Err: err}
		}
		return &verdictError{newPeerError(&controller.Verdict{Ranks: down.Ranks, Reason: down.Reason})}
	}
	var up message.Up
	if err := message.DecodeUp(frame, &up); err != nil {
		return &transport.PeerError{Peer: from, Err: err}
	}
	if up.Type == message.UpTimeout {
		return s.late(from, &timeoutError{up.Set, up.Tensor, time.Duration(up.Millis) * time.Millisecond})
	}
	if up.Suspect == from {
		return &PeerError{Ranks: []int{int(from)}, Reason: up.Reason}
	}
	ranks := []int{int(up.Suspect), int(from)}
	slices.Sort(ranks)
	return &PeerError{Ranks: ranks, Reason: fmt.Sprintf("rank %d lost its channel to rank %d: %s", from, up.Suspect, up.Reason)}
}

// timeoutError says that an operation was not done in the time that its caller at this rank gave it.
type timeoutError struct {
	set    topo.ProcessSetID
	tensor string
	after  time.Duration
}

func (e *timeoutError) Error() string {
	return fmt.Sprintf("tensor %q of process set %d timed out after %v", e.tensor, e.set, e.after)
}

// late is the failure that a timeout is. Rank 0 knows who keeps the tensor waiting, the others name themselves.
func (s *lockstep) late(at topo.Rank, err *timeoutError) *PeerError {
	p := &PeerError{Reason: fmt.Sprintf("%v at rank %d", err, at)}
	if s.e.cfg.Rank == 0 {
		for _, r := range s.core.Missing(err.set, err.tensor) {
			p.Ranks = append(p.Ranks, int(r))
		}
	}
	if len(p.Ranks) == 0 {
		p.Ranks = []int{int(at)}
	} else {
		p.Reason += ", which waits for a request of this rank"
	}
	return p
}

// verdictError is rank 0's word: final.
type verdictError struct{ *PeerError }

// fail turns a failure into the verdict. Rank 0 gives it; the others ask for it, and go by what they know if it does
// not come.
func (s *lockstep) fail(err error) error {
	select {
	case <-s.e.stop:
		return ErrClosed
	default:
	}
	if errors.Is(err, ErrClosed) || errors.Is(err, transport.ErrClosed) {
		return ErrClosed
	}
	var (
		own  *PeerError
		late *timeoutError
	)
	switch {
	case errors.As(err, &own):
	case errors.As(err, &late):
		own = s.late(s.e.cfg.Rank, late)
	default:
		r, reason := blame(err, s.e.cfg.Rank)
		own = &PeerError{Ranks: []int{int(r)}, Reason: reason}
	}
	if s.e.cfg.Rank == 0 {
		return s.judge(err, own)
	}
	var final *verdictError
	known := func() bool { return errors.As(s.failure, &final) || s.ended[0] != nil }
	if s.collect(); !known() {
		up := &message.Up{Type: message.UpSuspect, Suspect: topo.Rank(own.Ranks[0]), Reason: own.Reason}
		if late != nil {
			up = &message.Up{Type: message.UpTimeout, Set: late.set, Tensor: late.tensor, Millis: uint32(min(late.after.Milliseconds(), math.MaxUint32))}
		}
		if frame, err := message.AppendUp(nil, up); err == nil {
			_ = s.send(0, frame) // if that fails, rank 0 is the one
		}
		s.await(lockstepVerdict, known)
	}
	if final != nil {
		return final.PeerError
	}
	if end := s.firstEnd(); end != nil {
		return end
	}
	return own
}

// judge is rank 0's verdict, which it tells all others. The dead are known by the end of their control connection,
// which may come a little later than what their neighbours notice.
func (s *lockstep) judge(err error, own *PeerError) error {
	s.await(lockstepGrace, func() bool { return s.firstEnd() != nil })
	if end := s.firstEnd(); errors.Is(end, ErrClosed) {
		return end
	} else if end != nil {
		errors.As(end, &own)
	} else if errors.Is(err, errInterrupted) && !errors.As(s.failure, &own) {
		r, reason := blame(s.failure, s.e.cfg.Rank)
		own = &PeerError{Ranks: []int{int(r)}, Reason: reason}
	}
	down := &message.Down{Type: message.DownFail, Reason: own.Reason}
	for _, r := range own.Ranks {
		down.Ranks = append(down.Ranks, topo.Rank(r))
	}
	if frame, err := message.AppendDown(nil, down); err == nil {
		for r := 1; r < s.e.cfg.Size; r++ {
			if s.ended[r] == nil {
				_ = s.send(topo.Rank(r), frame) // whom it does not reach is dead too
			}
		}
	}
	return own
}

// await collects until enough says so, at most for d.
func (s *lockstep) await(d time.Duration, enough func() bool) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	for {
		if s.collect(); enough() {
			return
		}
		select {
		case <-s.e.bell:
		case <-timer.C:
			return
		case <-s.e.stop:
			return
		}
	}
}
