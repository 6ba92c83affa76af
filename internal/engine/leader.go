package engine

import (
	"errors"
	"fmt"
	"slices"

	"github.com/gohvd/gohvd/internal/control"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
)

// combinedStep applies, at rank 0, a frame in which a leader has passed on frames of its ranks.
func (e *Engine) combinedStep(leader topo.Rank, frame []byte) {
	s := &e.scratch
	var err error
	if s.parts, err = message.DecodeCombined(frame, s.parts); err != nil {
		e.failSender(leader, err)
		return
	}
	for i := range s.parts {
		p := &s.parts[i]
		switch {
		case !e.links.Leads(leader, p.Ranks):
			e.failSender(leader, fmt.Errorf("got frames of %s, which it does not lead",
				topo.FormatRanks(p.Ranks)))
		case message.IsProbe(p.Frame):
			for _, r := range p.Ranks {
				e.probeStep(r, p.Frame)
			}
		default:
			if err := message.DecodeUp(p.Frame, &s.up); err != nil {
				e.failSender(p.Ranks[0], err)
				continue
			}
			if s.up.Type == message.UpNews {
				e.sched.Extend()
			}
			e.coordinator.Relay(leader, p.Ranks, p.Held, &s.up)
		}
	}
}

// memberUp passes on a frame of a rank that this rank leads.
func (e *Engine) memberUp(from topo.Rank, frame []byte) {
	if len(frame) > 0 && frame[0] == byte(message.UpNews) {
		e.sched.Extend()
	}
	e.combiner.Up(from, frame)
}

// distribute passes on a frame from rank 0 to the ranks of this host that it is for. This rank applies it
// last, so that its own work does not delay the other ranks.
func (e *Engine) distribute(frame []byte) {
	s := &e.scratch
	to, frame, err := message.DecodeAddressed(frame, s.to)
	s.to = to
	probe := message.IsProbe(frame)
	if err == nil && !probe {
		err = message.DecodeDown(frame, &s.down)
	}
	if err == nil && !e.links.Leads(e.cfg.Rank, to) {
		err = fmt.Errorf("a frame is for %s, which rank %d does not lead", topo.FormatRanks(to), e.cfg.Rank)
	}
	if err != nil {
		e.failSender(0, err)
		return
	}
	if !probe {
		e.combiner.Down(to, &s.down)
	}
	e.sendToMembers(to, frame)
	switch {
	case !slices.Contains(to, e.cfg.Rank):
	case probe:
		e.probeStep(0, frame)
	default:
		e.applyDown(&s.down)
	}
}

// sendToMembers sends a frame to ranks that this rank leads.
func (e *Engine) sendToMembers(to []topo.Rank, frame []byte) {
	for _, r := range to {
		if r == e.cfg.Rank {
			continue
		}
		// Reading from the connection returns any other error (see sendUp).
		if err := e.links.ToMember(r, frame); errors.Is(err, control.ErrBacklog) {
			e.combiner.Fault(r, err.Error())
			e.sched.Notify()
		}
	}
}

// combinerReady sends the frames of the combiner: to rank 0 what the ranks of this host have sent, and to
// these ranks heartbeats and a verdict that this rank has found.
func (e *Engine) combinerReady() {
	if e.combiner == nil {
		return
	}
	parts, quiet := e.combiner.Ready()
	var failed error
	for len(parts) > 0 {
		n, numBytes := 1, parts[0].NumBytes()
		for n < len(parts) && numBytes+parts[n].NumBytes() <= message.MaxFrameBytes/2 {
			numBytes += parts[n].NumBytes()
			n++
		}
		e.scratch.frame = message.AppendCombined(e.scratch.frame[:0], parts[:n])
		if err := e.sendToRoot(e.scratch.frame); err != nil {
			failed = err
		}
		parts = parts[n:]
	}
	e.combiner.Advance()
	e.sendDownTo(quiet, &message.Down{Type: message.DownHeartbeat})
	if failed != nil {
		e.suspect(e.self(), failed)
	}
	if v := e.member.Verdict(); v != nil {
		e.sendDownTo(e.combiner.Fail(), &message.Down{Type: message.DownFail, Ranks: v.Ranks,
			Reason: v.Reason})
	}
}

// sendDownTo sends a frame that this leader has made to ranks that it leads.
func (e *Engine) sendDownTo(to []topo.Rank, d *message.Down) {
	if len(to) > 0 {
		e.scratch.frame, _ = message.AppendDown(e.scratch.frame[:0], d) // fails only if there are responses
		e.sendToMembers(to, e.scratch.frame)
	}
}
