package controller

import (
	"fmt"
	"slices"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/responsecache"
)

// Relay applies a part of a combined frame: a frame that several ranks have sent and that their leader has
// passed on. up is the frame of the part. If it breaks the protocol, Relay fails its sender.
func (c *Coordinator) Relay(leader topo.Rank, p *message.Part, up *message.Up) {
	if c.state == closed || c.state == failed {
		return
	}
	for _, r := range p.Ranks {
		if !c.ranks.passes(leader, r) {
			c.failSender(leader, fmt.Errorf("got a frame of rank %d, which it does not lead", r))
			return
		}
	}
	if p.All {
		g := c.ranks.all[leader].group
		switch {
		case g == nil:
			c.failSender(leader, fmt.Errorf("got a frame of all ranks behind it, but it leads no rank"))
			return
		case c.relayAll(g, p, up):
			return
		}
		p = c.each(g, p)
	}
	if c.relayVotes(leader, p, up) {
		return
	}
	for i, r := range p.Ranks {
		c.waits.now = c.arrival(p.Held[i])
		c.step(r, up, true)
	}
	c.waits.now = c.now
	c.ranks.received(leader, 0)
}

// ledGroup is a rank with a connection to rank 0 together with all ranks behind it.
type ledGroup struct {
	ranks   []topo.Rank // in ascending order
	members responsecache.Members
	// A frame that all the ranks have sent arrived at lastReceived, and all of them have applied the cycle
	// seen. The state of each rank may be later (roster.lastReceived, roster.seen).
	seen         uint64
	lastReceived time.Duration
}

// setGroups makes the groups.
func (t *roster) setGroups() {
	for f := range t.leaders {
		r := topo.Rank(f)
		hop := t.leaders.Hop(0, r)
		if hop == r {
			continue
		}
		top := &t.all[hop]
		if top.group == nil {
			top.group = &ledGroup{lastReceived: t.now}
		}
		t.all[r].group = top.group
	}
	for f := range t.leaders {
		if g := t.all[f].group; g != nil {
			g.ranks = append(g.ranks, topo.Rank(f))
			g.members.Add(f)
		}
	}
}

// lastReceived returns the time at which the last frame from a rank arrived.
func (t *roster) lastReceived(r topo.Rank) time.Duration {
	k := &t.all[r]
	if k.group != nil {
		return max(k.received, k.group.lastReceived)
	}
	return k.received
}

// seen returns the last cycle that a rank has applied.
func (t *roster) seen(r topo.Rank) uint64 {
	k := &t.all[r]
	if k.group != nil {
		return max(k.acknowledged, k.group.seen)
	}
	return k.acknowledged
}

// relayAll applies a frame that all ranks of a group have sent. It must have nothing but votes and requests
// in the global set, and no rank may have joined or be about to leave. For all other frames relayAll changes
// nothing and returns false. The cost for a vote does not depend on the number of ranks, and that for a
// request hardly.
func (c *Coordinator) relayAll(g *ledGroup, p *message.Part, up *message.Up) bool {
	if up.Type != message.UpNews || len(up.Sets) != 1 || up.Sets[0].Set != topo.Global || up.Shutdown ||
		up.Seen > c.cycle || c.waits.trace || c.state != running || c.leaving > 0 {
		return false
	}
	u, s := &up.Sets[0], c.sets.find(topo.Global)
	if u.Done > 0 || u.Invalid.Any() || !s.canVote(&g.members, u.Hits, up.Seen) {
		return false
	}
	for i := range u.Requests {
		if !s.canRequest(g.ranks, &u.Requests[i]) {
			return false
		}
	}
	times := askTimes{first: c.arrival(p.First), latest: c.arrival(p.Held[0]), latestBy: p.Ranks[0],
		second: c.arrival(p.Held[1]), secondBy: p.Ranks[1]}
	c.disturb()
	g.lastReceived = c.now
	if up.Seen > g.seen {
		g.seen, c.ranks.acked = up.Seen, true
	}
	s.voteTogether(&g.members, u.Hits, &times)
	for i := range u.Requests {
		if err := s.requestTogether(g.ranks, u.Requests[i], &times); err != nil {
			c.failSender(g.ranks[0], err)
			break
		}
	}
	return true
}

// each returns the part p, which all ranks of a group have sent, with the list of these ranks. Those that p
// does not name have the time of the first one.
func (c *Coordinator) each(g *ledGroup, p *message.Part) *message.Part {
	x := &c.listed
	x.Ranks, x.Held, x.Frame = g.ranks, x.Held[:0], p.Frame
	for range g.ranks {
		x.Held = append(x.Held, p.First)
	}
	for i, r := range p.Ranks {
		if at, found := slices.BinarySearch(g.ranks, r); found {
			x.Held[at] = p.Held[i]
		}
	}
	return x
}

// passes reports whether a rank with a control connection to rank 0 is rank r or passes on the frames of r.
func (t *roster) passes(leader, r topo.Rank) bool {
	return int(r) < len(t.all) && t.leaders.Hop(0, r) == leader
}

// arrival returns the time at which a frame arrived at the leader that has held it for so many microseconds.
func (c *Coordinator) arrival(held uint32) time.Duration {
	return max(0, c.now-time.Duration(held)*time.Microsecond)
}

// relayVotes applies a frame of several ranks if it has nothing but votes for one process set, of members
// that are neither stopped nor joined and have not voted before. The ranks must be in ascending order, as
// those are whose votes a leader has held. The cost for a vote does not depend on the number of ranks. For
// all other frames relayVotes changes nothing and returns false.
func (c *Coordinator) relayVotes(leader topo.Rank, p *message.Part, up *message.Up) bool {
	ranks := p.Ranks
	if len(ranks) < 2 || len(up.Sets) != 1 || up.Type != message.UpNews || up.Shutdown || up.Seen > c.cycle ||
		c.waits.trace || c.state == closed || c.state == failed {
		return false
	}
	u := &up.Sets[0]
	s := c.sets.find(u.Set)
	if s == nil || u.Done > 0 || len(u.Requests) > 0 || u.Invalid.Any() {
		return false
	}
	g, last := &c.group, -1
	g.Reset()
	var times askTimes
	for i, r := range ranks {
		if c.ranks.all[r].stop != 0 {
			return false
		}
		member := s.index(r)
		if member <= last {
			return false
		}
		last = member
		g.Add(member)
		times.add(r, c.arrival(p.Held[i]))
	}
	if !s.canVote(g, u.Hits, up.Seen) {
		return false
	}
	c.disturb()
	for _, r := range ranks {
		c.ranks.received(r, up.Seen)
	}
	c.ranks.received(leader, 0)
	s.voteTogether(g, u.Hits, &times)
	return true
}

// received records that a frame of rank r has arrived, which has applied the cycle seen.
func (t *roster) received(r topo.Rank, seen uint64) {
	k := &t.all[r]
	k.received = t.now
	if seen > t.seen(r) {
		k.acknowledged, t.acked = seen, true
	}
}

// heard returns the latest time at which a frame of rank r would have arrived if r had sent one before: now
// or, if a leader passes on the frames of r, the time at which the last frame of the leader arrived. If
// nothing has come from r since that time, the reason may be that the leader is silent.
func (t *roster) heard(r topo.Rank) time.Duration {
	if leader := t.leaders.Of(r); leader != r {
		return t.lastReceived(leader)
	}
	return t.now
}

// behind returns the ranks whose frames the given ranks pass on.
func (t *roster) behind(leaders []topo.Rank) (ranks []topo.Rank) {
	for f := range t.leaders {
		r := topo.Rank(f)
		if slices.ContainsFunc(leaders, func(leader topo.Rank) bool { return t.leaders.Lead(leader, r) }) {
			ranks = append(ranks, r)
		}
	}
	return ranks
}

// behindText returns a text for a verdict about the given ranks, which names the ranks behind them. It is
// empty if there are none.
func (t *roster) behindText(leaders []topo.Rank) string {
	behind := t.behind(leaders)
	if len(behind) == 0 {
		return ""
	}
	return fmt.Sprintf("; it passes on the frames of %s", topo.FormatRanks(behind))
}

// failMember applies the report of a leader that the control connection of one of its ranks has ended, or
// that the rank has broken the protocol.
func (c *Coordinator) failMember(leader topo.Rank, up *message.Up) {
	r := up.Suspect
	switch {
	case int(r) >= len(c.ranks.all) || r == leader || c.ranks.leaders.Of(r) != leader:
		c.failSender(leader, fmt.Errorf("got a report about the connection of rank %d, which it does not lead",
			r))
	case up.Type == message.UpLost:
		c.Lost(r, up.Reason)
	default:
		c.Fault(r, up.Reason)
	}
}

// eachKeeper calls visit for each rank that stays until rank r is closed: the leaders through which the
// frames of r pass, and the lowest rank of its group. Usually that is the first leader.
func (t *roster) eachKeeper(r topo.Rank, visit func(topo.Rank)) {
	for from, leader := r, t.leaders.Of(r); leader != from; from, leader = leader, t.leaders.Of(leader) {
		visit(leader)
	}
	if t.groups != nil && t.groups[r] != r && !t.leaders.Lead(t.groups[r], r) {
		visit(t.groups[r])
	}
}

// keptBy returns the ranks that rank r keeps: r stays until they are closed.
func (t *roster) keptBy(r topo.Rank) (ranks []topo.Rank) {
	for f := range t.all {
		t.eachKeeper(topo.Rank(f), func(keeper topo.Rank) {
			if keeper == r {
				ranks = append(ranks, topo.Rank(f))
			}
		})
	}
	return ranks
}

// kept has the numbers of ranks that a rank keeps and whose control connections have not ended: those that
// are not closed, and those that have not sent bye.
type kept struct{ open, active int }

// needs reports whether the job cannot go on without rank r: r has not sent bye, or it keeps a rank that has
// not sent bye.
func (t *roster) needs(r topo.Rank) bool { return !t.all[r].bye || t.all[r].active > 0 }

// expireKeeper gives the verdict because the context of the Shutdown of rank r has ended after the bye of r,
// and r keeps ranks that have not sent bye. If Shutdown has waited until its deadline, those of these ranks
// that have not called Shutdown have failed, because r stays for them, as rank 0 stays for all ranks. If it
// was canceled, r has failed. If all these ranks have called Shutdown, there is no verdict.
func (c *Coordinator) expireKeeper(r topo.Rank, u *message.Up) {
	stay := slices.DeleteFunc(c.ranks.keptBy(r), c.ranks.isLeaving)
	why := have(stay) + " not called Shutdown"
	switch silent := c.ranks.silent(2 * heartbeatPeriod); {
	case len(silent) > 0:
		c.fail(silent, timeoutText(message.NoKind, r, u, c.ranks.silentText(silent)))
	case len(stay) == 0:
	case u.Millis == 0:
		c.fail([]topo.Rank{r}, "its Shutdown was canceled: "+why)
	default:
		c.fail(stay, timeoutText(message.NoKind, r, u, why))
	}
}

// closeKeepers closes the ranks that have stayed for rank r, which is closed or lost, if no rank needs them
// anymore. Rank 0 is not among them, because it is closed last.
func (c *Coordinator) closeKeepers(r topo.Rank) {
	c.ranks.eachKeeper(r, func(keeper topo.Rank) {
		if keeper != 0 && c.ranks.all[keeper].bye && c.state == running {
			c.closeReleased(keeper)
		}
	})
}

// postpone reports whether the coordinator must not yet act on a timeout that rank r reports, because leaders
// may hold requests that were made before. The rank repeats the report while the operation is pending.
func (t *roster) postpone(r topo.Rank) bool {
	k := &t.all[r].timeouts
	if k.last == 0 || t.now-k.last > 2*heartbeatPeriod {
		k.first = t.now
	}
	k.last = t.now
	return t.leaders != nil && t.now-k.first < 2*holdPeriod
}

// timeoutReports has the times of the first and the last report of a rank that operations have timed out.
// Reports that are farther apart than repetitions do not count as one series.
type timeoutReports struct{ first, last time.Duration }
