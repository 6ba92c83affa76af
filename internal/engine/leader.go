package engine

import (
	"errors"
	"fmt"
	"slices"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/control"
	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/sched"
	"github.com/gohvd/gohvd/internal/topo"
)

// leader passes on the control frames of the ranks behind this rank.
type leader struct {
	combiner *controller.Combiner
	links    *control.Links
	sched    *sched.Scheduler
	// toRoot sends a frame to rank 0 or to the leader of this rank. failed is called if this rank has failed.
	toRoot func(frame []byte) error
	failed func(error)
	// These are memory for a frame, for the parts of one and for peers that are at fault.
	frame  []byte
	parts  []message.Part
	faults []control.Event
}

// up passes on a frame of a rank behind this rank.
func (l *leader) up(from topo.Rank, frame []byte) {
	if !message.IsCombined(frame) {
		l.extend(frame)
		l.combiner.Up(from, frame)
		return
	}
	var err error
	if l.parts, err = message.DecodeCombined(frame, l.parts); err != nil {
		l.combiner.Fault(from, protocolError(err))
		return
	}
	for i := range l.parts {
		p := &l.parts[i]
		if err := checkLed(l.links, from, p.Ranks); err != nil {
			l.combiner.Fault(from, protocolError(err))
			return
		}
		l.extend(p.Frame)
		l.combiner.Relay(from, p)
	}
}

func (l *leader) extend(frame []byte) {
	if len(frame) > 0 && frame[0] == byte(message.UpNews) {
		l.sched.Extend()
	}
}

// sendToMembers sends a frame to ranks behind this rank, or to all of them if none are given.
func (l *leader) sendToMembers(to []topo.Rank, frame []byte) {
	if len(to) == 0 {
		l.faults = l.links.DownAll(frame, l.faults[:0])
	} else {
		l.faults = l.links.Downs(to, frame, l.faults[:0])
	}
	for _, f := range l.faults {
		if errors.Is(f.Err, control.ErrTooLarge) || dial.LacksResource(f.Err) {
			l.failed(f.Err) // this rank is at fault
			continue
		}
		l.combiner.Fault(f.From, f.Err.Error())
		l.sched.Notify()
	}
}

// ready sends the frames of the combiner: to rank 0 what the ranks behind this rank have sent, and to these
// heartbeats and the verdict v, if this rank has found one.
func (l *leader) ready(v *controller.Verdict) {
	parts, quiet := l.combiner.Ready()
	var failed error
	for len(parts) > 0 {
		n, numBytes := 1, parts[0].NumBytes()
		for n < len(parts) && numBytes+parts[n].NumBytes() <= message.MaxFrameBytes/2 {
			numBytes += parts[n].NumBytes()
			n++
		}
		l.frame = message.AppendCombined(l.frame[:0], parts[:n])
		if err := l.toRoot(l.frame); err != nil {
			failed = err
		}
		parts = parts[n:]
	}
	l.combiner.Advance()
	l.sendDownTo(quiet, &message.Down{Type: message.DownHeartbeat})
	if failed != nil {
		l.failed(failed)
	}
	if v != nil {
		l.sendDownTo(l.combiner.Fail(), &message.Down{Type: message.DownFail, Ranks: v.Ranks,
			Reason: v.Reason})
	}
}

// sendDownTo sends a frame that this leader has made to ranks that it leads.
func (l *leader) sendDownTo(to []topo.Rank, d *message.Down) {
	if len(to) > 0 {
		l.frame, _ = message.AppendDown(l.frame[:0], d) // fails only if there are responses
		l.sendToMembers(to, l.frame)
	}
}

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
		case checkLed(e.links, leader, p.Ranks) != nil:
			e.failSender(leader, checkLed(e.links, leader, p.Ranks))
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
			e.coordinator.Relay(leader, p, &s.up)
		}
	}
}

// checkLed returns an error unless a leader passes on the frames of all the given ranks.
func checkLed(links *control.Links, leader topo.Rank, ranks []topo.Rank) error {
	if links.Leads(leader, ranks) {
		return nil
	}
	return fmt.Errorf("got frames of %s, which it does not lead", topo.FormatRanks(ranks))
}

// distribute passes on a frame from rank 0 to the ranks behind this rank that it is for, which are all of
// them and this rank if it names none. This rank applies it last, so that its own work does not delay the
// other ranks.
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
		e.failSender(e.links.Upstream(), err)
		return
	}
	if !probe {
		e.combiner.Down(to, &s.down)
	}
	e.leader.sendToMembers(to, frame)
	switch {
	case len(to) > 0 && !slices.Contains(to, e.cfg.Rank):
	case probe:
		e.probeStep(0, frame)
	default:
		e.applyDown(&s.down)
	}
}
