package engine

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

// negotiation transfers the requests of the ranks to the coordinator, and its grants to the ranks. None of
// its methods waits for another rank.
type negotiation interface {
	// accepts reports whether this turn may submit requests to the member.
	accepts() bool
	// turn sends the output of the member and the coordinator, and applies the frames that have arrived. An
	// error ends the epoch at once.
	turn() error
	// handleFrame applies a frame that arrived on a control connection and is not a clock probe.
	handleFrame(from topo.Rank, frame []byte)
	// next returns when the next turn is due at the latest.
	next() time.Duration
}

// events is the negotiation by frames: a rank sends when it has news, and the coordinator answers at once.
type events struct{ e *Engine }

func (n events) accepts() bool { return true }

func (n events) turn() error {
	n.e.memberReady()
	if err := n.e.receive(); err != nil {
		return err
	}
	n.sendReplies()
	return nil
}

// sendReplies sends what follows from the frames that have arrived and from the grants in them.
func (n events) sendReplies() {
	e := n.e
	for again := true; again; {
		if e.coordinator != nil {
			e.coordinatorReady()
		}
		// The frames may have brought grants, or a stop. A bye may follow a stop.
		sent := e.memberReady()
		if e.stopped && e.granted == 0 {
			e.member.Drained()
			sent = e.memberReady() || sent
		}
		// coordinatorReady has run before the coordinator received the frames that memberReady has sent.
		again = sent && e.coordinator != nil
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
	return next
}

// memberReady sends the frames and dispatches the grants of the member, and reports whether it has sent
// something.
func (e *Engine) memberReady() (sent bool) {
	r := e.member.Ready()
	var failed error // an error of this rank, or of a coordinator that sent a wrong grant
	suspect := e.cfg.Rank
	for _, up := range r.Ups {
		if up == nil {
			continue
		}
		sent = true
		e.traceUp(up)
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
			if failed = e.dispatch(g); failed != nil {
				suspect = 0
			}
		}
	}
	stop, reason := r.Stop, error(ErrShutDown)
	if r.StopReason != "" {
		reason = e.stopFor(r.StopRanks, r.StopReason)
	}
	e.member.Advance()
	if failed != nil {
		// suspect must follow Advance, which drops the output of Ready.
		e.suspect(suspect, failed)
	}
	if stop {
		e.stopped = true
		for _, l := range e.lanes.all {
			l.refuse(reason)
		}
	}
	return sent
}

// suspect fails a rank, possibly this one, because of an error that this rank has detected.
func (e *Engine) suspect(r topo.Rank, err error) {
	e.log.Error("negotiation failed", zap.Int("suspect", int(r)), zap.Error(err))
	e.member.Suspect(r, err.Error())
	e.sched.notify()
}

// sendUp sends a frame to rank 0. It returns only errors for which this rank is responsible; a full backlog
// fails rank 0.
func (e *Engine) sendUp(frame []byte) error {
	err := e.send(e.links[0], frame)
	switch {
	case errors.Is(err, errTooLarge):
		return err
	case errors.Is(err, errBacklog):
		e.member.Lost(err.Error())
	}
	// Any other error also ends the receiving half, which reports it after the frames that arrived before.
	return nil
}

// sendDown sends a frame from rank 0 to another rank. On error it also returns the rank that has failed.
func (e *Engine) sendDown(to topo.Rank, frame []byte) (failed topo.Rank, err error) {
	err = e.send(e.links[to-1], frame)
	switch {
	case errors.Is(err, errTooLarge):
		return 0, err
	case errors.Is(err, errBacklog):
		return to, err
	}
	return 0, nil // the receiving half reports any other error (see sendUp)
}

// handleEvent applies a frame or the end of a control connection. An error ends the epoch at once.
func (e *Engine) handleEvent(ev *event) error {
	switch {
	case errors.Is(ev.err, transport.ErrClosed):
		// Connections that this process closed itself say nothing about the peers.
		return ErrClosed
	case e.coordinator != nil && errors.Is(ev.err, errFrame):
		e.coordinator.Fault(ev.from, fmt.Sprintf("protocol error: %v", ev.err))
	case ev.err == nil && message.IsProbe(ev.frame):
		if err := e.handleProbe(ev.from, ev.frame); err != nil {
			e.failSender(ev.from, err)
		}
	case e.coordinator != nil && ev.err != nil:
		e.coordinator.Lost(ev.from, fmt.Sprintf("its control connection ended: %v", ev.err))
	case ev.err != nil:
		e.member.Lost(fmt.Sprintf("its control connection ended: %v", ev.err))
	default:
		e.negotiation.handleFrame(ev.from, ev.frame)
	}
	return nil
}

// failSender fails a peer that sent a malformed frame.
func (e *Engine) failSender(from topo.Rank, err error) {
	if e.coordinator != nil {
		e.coordinator.Fault(from, fmt.Sprintf("protocol error: %v", err))
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
		e.sched.extend() // rank 0 coordinates all operations, so all of them make it busy
	}
	e.coordinator.Step(from, &e.scratch.up)
}

func (e *Engine) memberStep(frame []byte) {
	if err := message.DecodeDown(frame, &e.scratch.down); err != nil {
		// At rank 0 the frame may come from its own coordinator.
		e.member.Lost(fmt.Sprintf("malformed frame: %v", err))
		return
	}
	e.traceDown(&e.scratch.down)
	if t := e.observer.timeline.Load(); t != nil && e.scratch.down.Type == message.DownCycle {
		(*t).Cycle(e.now)
	}
	// Grants accumulate in the member. The next memberReady dispatches them and sends what the step allows.
	if err := e.member.Step(&e.scratch.down); err != nil {
		e.log.Error("protocol error of the coordinator", zap.Error(err))
	}
}

// coordinatorReady sends the decisions of the coordinator. Rank 0's own member receives them in the same
// encoding, and last, so that its work does not delay the other ranks.
func (e *Engine) coordinatorReady() {
	failed := e.scratch.failed[:0]
	for _, o := range e.coordinator.Ready() {
		frame, err := message.AppendDown(e.scratch.frame[:0], o.Down)
		if err != nil {
			// The other ranks must not wait for this frame, so this rank fails.
			failed = append(failed, event{from: e.cfg.Rank, err: err})
			continue
		}
		e.scratch.frame = frame
		for _, r := range o.To {
			if r == 0 {
				continue
			}
			if r, err := e.sendDown(r, frame); err != nil {
				failed = append(failed, event{from: r, err: err})
			}
		}
		if slices.Contains(o.To, 0) {
			e.memberStep(frame)
		}
	}
	e.coordinator.Advance()
	// Fault must follow Advance, which drops the output of Ready and would drop the verdict with it.
	for _, f := range failed {
		e.coordinator.Fault(f.from, f.err.Error())
		e.sched.notify()
	}
	clear(failed)
	e.scratch.failed = failed
}
