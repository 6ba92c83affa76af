package engine

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
)

// leadersAbove is the greatest size of a job in which every rank has a control connection to rank 0.
const leadersAbove = 64

// leaders returns for each rank the rank that passes on its frames to rank 0: the lowest rank of its host, or
// the rank itself if it has a control connection to rank 0. It returns nil if all ranks have one. The result
// is the same at all ranks.
func (c *Config) leaders() []topo.Rank {
	if c.Lockstep || c.Size <= cmp.Or(c.LeadersAbove, leadersAbove) || len(c.Hosts) != c.Size {
		return nil
	}
	first := map[string]topo.Rank{}
	leaders := make([]topo.Rank, c.Size)
	behind := false
	for i, host := range c.Hosts {
		r := topo.Rank(i)
		if leader, found := first[host]; found && host != c.Hosts[0] {
			leaders[i], behind = leader, true
			continue
		}
		first[host], leaders[i] = r, r
	}
	if !behind {
		return nil
	}
	return leaders
}

// setLeaders determines which ranks have control connections to which. It returns the ranks to which this
// rank has one.
func (e *Engine) setLeaders() (peers []topo.Rank) {
	e.leaders = e.cfg.leaders()
	led := []topo.Rank{e.cfg.Rank}
	for i := range e.cfg.Size {
		switch r := topo.Rank(i); {
		case r == e.cfg.Rank:
		case e.cfg.Rank == 0 && e.leaderOf(r) == r:
			peers = append(peers, r)
		case e.leaders != nil && e.leaders[r] == e.cfg.Rank:
			led = append(led, r)
		}
	}
	if e.cfg.Rank == 0 {
		return peers
	}
	if e.leaderOf(e.cfg.Rank) != e.cfg.Rank {
		return []topo.Rank{e.leaderOf(e.cfg.Rank)}
	}
	if len(led) > 1 {
		e.combiner = controller.NewCombiner(led, e.firstSets(), 0)
	}
	return append([]topo.Rank{0}, led[1:]...)
}

// setRoutes determines over which link this rank reaches each other rank.
func (e *Engine) setRoutes() {
	e.routes = make([]*link, e.cfg.Size)
	for _, l := range e.links {
		e.routes[l.peer] = l
	}
	for f, leader := range e.leaders {
		if r := topo.Rank(f); e.cfg.Rank == 0 && leader != r {
			e.routes[r] = e.routes[leader]
			e.routes[r].leads = true
		}
	}
}

// upstream returns the rank to which this rank has its control connection: its leader or rank 0.
func (e *Engine) upstream() topo.Rank {
	if leader := e.leaderOf(e.cfg.Rank); leader != e.cfg.Rank {
		return leader
	}
	return 0
}

// leaderOf returns the rank that passes on the frames of rank r.
func (e *Engine) leaderOf(r topo.Rank) topo.Rank {
	if e.leaders == nil {
		return r
	}
	return e.leaders[r]
}

// leads reports whether the rank leader passes on the frames of all the given ranks.
func (e *Engine) leads(leader topo.Rank, ranks []topo.Rank) bool {
	return !slices.ContainsFunc(ranks, func(r topo.Rank) bool {
		return int(r) >= e.cfg.Size || e.leaderOf(r) != leader
	})
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
		case !e.leads(leader, p.Ranks):
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
	if err == nil && !e.leads(e.cfg.Rank, to) {
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
		if err := e.send(e.routes[r], frame); errors.Is(err, errBacklog) {
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

// sendDowns sends a frame from rank 0 to other ranks. A leader gets it once for all its ranks. On error,
// sendDowns appends the rank that is at fault to failed.
func (e *Engine) sendDowns(to []topo.Rank, frame []byte, failed []event) []event {
	for _, r := range to {
		if r != 0 {
			e.routes[r].to = append(e.routes[r].to, r)
		}
	}
	for _, l := range e.links {
		if len(l.to) == 0 {
			continue
		}
		if r, err := e.sendOver(l, frame); err != nil {
			failed = append(failed, event{from: r, err: err})
		}
	}
	return failed
}

// sendOver sends a frame from rank 0 to the ranks in l.to. On error, it also returns the rank that is at
// fault.
func (e *Engine) sendOver(l *link, frame []byte) (failed topo.Rank, err error) {
	if l.leads {
		e.scratch.addressed = message.AppendAddressed(e.scratch.addressed[:0], l.to, frame)
		frame = e.scratch.addressed
	}
	l.to = l.to[:0]
	switch err = e.send(l, frame); {
	case errors.Is(err, errTooLarge):
		return 0, err
	case errors.Is(err, errBacklog):
		return l.peer, err
	}
	return 0, nil // reading from the connection returns any other error (see sendUp)
}
