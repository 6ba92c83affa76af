package engine

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/control"
	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/ops"
)

// negotiation carries the requests of the ranks to the coordinator, and the coordinator's grants to the
// ranks. No method waits for another rank.
type negotiation interface {
	// accepts reports whether this turn may submit requests to the member.
	accepts() bool
	// took is called when a turn has taken requests. The first of them was submitted at the given time.
	took(submitted time.Duration)
	// reads reports whether this poll or turn reads the control connections.
	reads() bool
	// turn sends the output of the member and the coordinator, and applies the frames that have arrived. If
	// it returns an error, the epoch ends at once.
	turn() error
	// handleFrame applies a frame that arrived on a control connection. Clock probes are not passed to it.
	handleFrame(from topo.Rank, frame []byte)
	// arrived reports whether a turn has something to do, apart from frames.
	arrived() bool
	// next returns the latest time for the next turn.
	next() time.Duration
}

// events is the negotiation by frames. A rank sends a frame when it has news, and the coordinator answers at
// once.
type events struct{ e *Engine }

func (n events) accepts() bool { return true }

func (n events) took(time.Duration) {}

func (n events) reads() bool { return true }

func (n events) arrived() bool { return false }

func (n events) turn() error {
	err := n.exchange()
	if err == nil {
		n.sendReplies()
	}
	return err
}

// exchange sends the output of the member and applies the frames that have arrived. After that, the member
// and the coordinator know which ranks are silent.
func (n events) exchange() error {
	n.e.memberReady()
	if err := n.e.receive(); err != nil {
		return err
	}
	n.e.member.Expire()
	if n.e.coordinator != nil {
		n.e.coordinator.Expire()
	}
	return nil
}

// sendReplies sends the frames with which the member and the coordinator respond to the received frames, and
// dispatches the grants in the received frames.
func (n events) sendReplies() {
	e := n.e
	for again := true; again; {
		if e.coordinator != nil {
			e.coordinatorReady()
		}
		// The received frames may contain grants or a stop. After a stop, this rank may have to send a bye.
		sent := e.memberReady()
		if e.stopped && e.granted == 0 {
			e.member.Drained()
			sent = e.memberReady() || sent
		}
		again = sent && e.coordinator != nil // the coordinator has to handle these frames
	}
	if e.leader != nil {
		e.leader.ready(e.member.Verdict())
	}
}

func (n events) handleFrame(from topo.Rank, frame []byte) {
	if n.e.coordinator != nil {
		n.e.coordinatorStep(from, frame)
	} else {
		n.e.memberStep(frame)
	}
}

func (n events) next() time.Duration {
	next := n.e.member.Next()
	if n.e.coordinator != nil {
		next = min(next, n.e.coordinator.Next())
	}
	if n.e.combiner != nil {
		next = min(next, n.e.combiner.Next())
	}
	return next
}

// memberReady sends the frames of the member and dispatches its grants. It reports whether it has sent a
// frame.
func (e *Engine) memberReady() (sent bool) {
	if !e.member.HasOutput() {
		return false
	}
	r := e.member.Ready()
	var failed error         // an error of this rank, or of a coordinator that sent a wrong grant
	var suspects []topo.Rank // nil for this rank
	for _, up := range r.Ups {
		if up == nil {
			continue
		}
		sent = true
		e.frames.Up(up)
		frame, err := message.AppendUp(e.scratch.frame[:0], up)
		if err != nil {
			failed = err
			break
		}
		e.scratch.frame = frame
		if e.coordinator != nil {
			e.coordinatorStep(e.cfg.Rank, frame)
			continue
		}
		if err := e.sendUp(frame); err != nil {
			failed = err
		}
	}
	for _, g := range r.Grants {
		if failed == nil {
			suspects, failed = e.dispatch(g)
		}
	}
	stop, reason := r.Stop, error(ErrShutDown)
	if r.StopReason != "" && !e.hasLeft() {
		reason = e.stopFor(r.StopRanks, r.StopReason)
	}
	e.member.Advance()
	if failed != nil {
		// Call suspect after Advance, because Advance drops the output of the member.
		if suspects == nil {
			suspects = e.self()
		}
		e.suspect(suspects, failed)
	}
	if stop {
		e.stopped = true
		for _, s := range e.sets.all {
			e.sets.refuse(s, reason)
		}
	}
	return sent
}

// suspect reports that one of the given ranks has failed, because of an error that this rank has detected.
// This rank may be among them.
func (e *Engine) suspect(ranks []topo.Rank, err error) {
	e.log.Error("negotiation failed", zap.String("suspects", topo.FormatRanks(ranks)), zap.Error(err))
	e.member.Suspect(ranks, err.Error())
	e.sched.Notify()
}

// self returns this rank, for suspicions of this rank itself.
func (e *Engine) self() []topo.Rank { return []topo.Rank{e.cfg.Rank} }

// sendUp sends a frame of this rank to rank 0, or to the leader that passes it on. It returns an error only
// if this rank is at fault.
func (e *Engine) sendUp(frame []byte) error {
	if e.combiner != nil {
		e.combiner.Up(e.cfg.Rank, frame)
		return nil
	}
	return e.sendToRoot(frame)
}

// sendToRoot sends a frame over the link to rank 0 or to the leader. It returns an error only if this rank is
// at fault. If the backlog is full, the other rank is at fault: sendToRoot declares that it has failed, and
// returns nil.
func (e *Engine) sendToRoot(frame []byte) error {
	err := e.links.Up(frame)
	switch {
	case errors.Is(err, control.ErrTooLarge) || dial.LacksResource(err):
		return err
	case errors.Is(err, control.ErrBacklog):
		e.member.Lost(err.Error())
	}
	// Ignore any other error. Reading from the connection returns the same error, after the frames that
	// arrived before it.
	return nil
}

// receive handles the frames that have arrived on the control connections. If it returns an error, the epoch
// ends at once.
func (e *Engine) receive() error {
	if !e.links.Unread() && !e.negotiation.reads() {
		return nil
	}
	err := e.links.Receive(e.handle)
	if e.links.Unread() {
		e.sched.Notify()
	}
	return err
}

// handleEvent handles a received frame or the end of a control connection. If it returns an error, the epoch
// ends at once.
func (e *Engine) handleEvent(ev control.Event) error {
	// The event may be from a rank that this rank leads.
	member := e.combiner != nil && ev.From != e.links.Upstream()
	switch {
	case errors.Is(ev.Err, transport.ErrClosed):
		// This process has closed the connection itself, so the error says nothing about the peer.
		return ErrClosed
	case dial.LacksResource(ev.Err):
		e.suspect(e.self(), fmt.Errorf("control connection with rank %d: %w", ev.From,
			dial.ExplainLimit(ev.Err)))
	case (e.coordinator != nil || member) && errors.Is(ev.Err, control.ErrFrame):
		e.failSender(ev.From, ev.Err)
	case member && ev.Err != nil:
		e.combiner.Lost(ev.From, lostText(ev.Err))
	case e.coordinator != nil && ev.Err != nil:
		e.coordinator.Lost(ev.From, lostText(ev.Err))
	case ev.Err != nil:
		e.member.Lost(lostText(ev.Err))
	case member:
		e.leader.up(ev.From, ev.Frame)
	case e.combiner != nil:
		e.distribute(ev.Frame)
	case message.IsProbe(ev.Frame):
		e.probeStep(ev.From, ev.Frame)
	case e.coordinator != nil && message.IsCombined(ev.Frame):
		e.combinedStep(ev.From, ev.Frame)
	default:
		e.negotiation.handleFrame(ev.From, ev.Frame)
	}
	return nil
}

// lostText returns the reason of a verdict on a rank whose control connection has ended.
func lostText(err error) string { return fmt.Sprintf("its control connection ended: %v", err) }

// probeStep handles a frame of a clock measurement.
func (e *Engine) probeStep(from topo.Rank, frame []byte) {
	if err := e.clock.Handle(from, frame); err != nil {
		e.failSender(from, err)
	}
}

func protocolError(err error) string { return fmt.Sprintf("protocol error: %v", err) }

// failSender declares that the peer that sent a malformed frame has failed.
func (e *Engine) failSender(from topo.Rank, err error) {
	reason := protocolError(err)
	switch {
	case e.coordinator != nil:
		e.coordinator.Fault(from, reason)
		return
	case e.combiner != nil && from != e.links.Upstream():
		e.combiner.Fault(from, reason)
		return
	}
	e.member.Lost(fmt.Sprintf("malformed frame: %v", err))
}

func (e *Engine) coordinatorStep(from topo.Rank, frame []byte) {
	if err := message.DecodeUp(frame, &e.scratch.up); err != nil {
		e.failSender(from, err)
		return
	}
	if e.scratch.up.Type == message.UpNews {
		e.sched.Extend() // rank 0 coordinates all operations, so news from any rank makes it busy
	}
	e.coordinator.Step(from, &e.scratch.up)
}

func (e *Engine) memberStep(frame []byte) {
	if err := message.DecodeDown(frame, &e.scratch.down); err != nil {
		e.member.Lost(fmt.Sprintf("malformed frame: %v", err)) // from rank 0, possibly this rank
		return
	}
	e.applyDown(&e.scratch.down)
}

// applyDown applies a frame of the coordinator.
func (e *Engine) applyDown(d *message.Down) {
	e.frames.Down(d)
	if d.Type == message.DownCycle {
		e.observer.Cycle(e.now)
	}
	if t := d.Tuning; t != nil {
		e.cycleTime = t.CycleTime
		e.observer.Tuned(e.now, t)
	}
	// The member collects the grants. The next memberReady dispatches them and sends the frames with which
	// the member responds.
	if err := e.member.Step(d); err != nil {
		e.log.Error("the coordinator broke the protocol", zap.Error(err))
	}
	if d.Type == message.DownLeft || d.Type == message.DownHeartbeat {
		e.messages.ranksLeft(d.Ranks, d.Channels)
	}
}

// coordinatorReady sends the decisions of the coordinator to the members. Rank 0's own member receives them
// in the same encoding. It receives them last, so that rank 0's own work does not delay the other ranks.
func (e *Engine) coordinatorReady() {
	failed := e.scratch.failed[:0]
	for _, o := range e.coordinator.Ready() {
		frame, err := message.AppendDown(e.scratch.frame[:0], o.Down)
		if err != nil {
			// The other ranks would wait for this frame forever, so this rank fails.
			failed = append(failed, control.Event{From: e.cfg.Rank, Err: err})
			continue
		}
		e.scratch.frame = frame
		if len(o.To) == e.cfg.Size {
			failed = e.links.DownAll(frame, failed)
		} else {
			failed = e.links.Downs(o.To, frame, failed)
		}
		if slices.Contains(o.To, 0) {
			e.memberStep(frame)
		}
	}
	e.coordinator.Advance()
	// Call Fault after Advance, because Advance drops the output of Ready, including a verdict.
	for _, f := range failed {
		e.coordinator.Fault(f.From, f.Err.Error())
		e.sched.Notify()
	}
	clear(failed)
	e.scratch.failed = failed
}

// blame returns the ranks to suspect after an error during execution, and the reason. The suspect is the peer
// whose connection failed. If the connection failed because this rank lacks memory or descriptors, this rank
// is the suspect. If the backend cannot tell which rank failed, all ranks of the operation are suspects.
// Otherwise the suspect is this rank.
func blame(err error, self topo.Rank) ([]topo.Rank, string) {
	if p, ok := errors.AsType[*transport.PeerError](err); ok {
		suspect := p.Peer
		if dial.LacksResource(err) {
			suspect = self
		}
		return []topo.Rank{suspect}, dial.ExplainLimit(control.Cause(err)).Error()
	}
	if u, ok := errors.AsType[*ops.UnknownRankError](err); ok {
		return u.Ranks, err.Error()
	}
	return []topo.Rank{self}, err.Error()
}
