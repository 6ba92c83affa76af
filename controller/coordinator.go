package controller

import (
	"fmt"
	"slices"
	"time"

	"github.com/gohvd/gohvd/fusion"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/responsecache"
)

// CoordinatorConfig configures a Coordinator.
type CoordinatorConfig struct {
	// Sets are the process sets with which the job begins. They are in ascending order of ID, so the global
	// set is the first.
	Sets []Set
	// CacheCapacity is the maximum number of responses in the cache of each set.
	CacheCapacity int
	// FusionThresholdBytes is the maximum number of bytes of a fused response.
	FusionThresholdBytes int64
	// If DisableGroupFusion is set, the tensors of a group are not fused with other tensors.
	DisableGroupFusion bool
	// Deterministic disables fusion that could change the bits of a result. So Adasum is never fused.
	Deterministic bool
	// CycleTime is the minimum time between two cycles.
	CycleTime time.Duration
	// LivenessTimeout is the maximum time between two frames from a rank. If a rank is silent for longer, it
	// has failed.
	LivenessTimeout time.Duration
	// StallWarning is how long a tensor waits until Events reports it, whether it waits for ranks to request
	// it or to finish it. After each further period of this length, Events reports the tensor again. 0
	// disables reports. StallShutdown is how long a tensor waits until the job is stopped. 0 disables the
	// stop.
	StallWarning, StallShutdown time.Duration
	// Lockstep is set if a controller.Lockstep carries the requests and the cycles. In this case all cycles
	// go to all ranks, and all ranks are stopped together, when the last rank has shut down.
	Lockstep bool
	// Leaders says which ranks pass on the frames of other ranks.
	Leaders topo.Leaders
	// Groups has for each rank the lowest rank with which it shares memory, or the rank itself. The lowest
	// rank passes on memory between the others, so the job needs it until they have sent bye, and it is
	// closed after them. Groups is nil if no ranks share memory.
	Groups []topo.Rank
	// Plan chooses the backend and the algorithm of each response.
	Plan Planner
}

// Outgoing is a frame and the ranks to which it is sent.
type Outgoing struct {
	To   []topo.Rank
	Down *message.Down
	// shared is set if To belongs to a process set.
	shared bool
}

type coordinatorState uint8

const (
	running  coordinatorState = iota
	stopping                  // the stop was decided; the ranks finish the operations that were granted
	closed                    // every rank has sent bye
	failed                    // the verdict was given
)

// Coordinator decides which operations run and in which order, for all process sets of a job. It is not safe
// for concurrent use.
//
// In each turn, call Tick, then Step and Lost for the frames and errors that have arrived, then Expire and
// Ready. Send the frames that Ready returns, and then call Advance.
type Coordinator struct {
	cfg    CoordinatorConfig
	policy policy
	sets   *setTable
	waits  *waits
	ranks  roster
	state  coordinatorState

	now time.Duration
	// settled is set if Expire and Ready have handled all events. Then they have nothing to do until quiet,
	// which Next sets, unless another event comes first.
	settled   bool
	quiet     time.Duration
	cycle     uint64
	lastCycle time.Duration // the time at which the last cycle was issued
	combined  time.Duration // in lock-step, the time at which all ranks had entered the last cycle
	leaving   int           // number of ranks that will submit nothing more
	left      []topo.Rank   // ranks that have sent bye in this turn, while others stay
	stopSent  bool          // whether every rank was stopped
	// stopReason is the reason for which the job is stopped. It is empty if every rank has asked for the
	// stop. stopRanks are the ranks whose shutdown is the reason.
	stopReason string
	stopRanks  []topo.Rank
	byes       int
	progress   time.Duration // the time at which the shutdown last made progress

	// tuning has the values that the next cycle changes, or nil if it changes none.
	tuning *message.Tuning

	suspicion         *suspicion
	timeouts          []reportedTimeout // those of this turn
	out               []Outgoing
	events, oldEvents []Event
	stallReports      uint64

	group  responsecache.Members // memory for relayVotes
	listed message.Part          // memory for each

	// decide reuses the memory of the fields below.
	decision message.Down // the decisions about all sets
	states   []*setState  // the sets about which something was decided
	mine     []int        // indexes in states of the sets to which one rank belongs
	spare    []Outgoing
}

type suspicion struct {
	by       topo.Rank
	suspects []topo.Rank
	reason   string
	since    time.Duration
}

// NewCoordinator returns the coordinator for an epoch that begins at the time now.
func NewCoordinator(cfg CoordinatorConfig, now time.Duration) *Coordinator {
	w := newWaits(cfg.StallWarning, cfg.StallShutdown, now, len(cfg.Sets[0].Ranks))
	c := &Coordinator{cfg: cfg, now: now, lastCycle: now - cfg.CycleTime, waits: w}
	c.ranks = roster{all: make([]rankState, len(cfg.Sets[0].Ranks)), leaders: cfg.Leaders, groups: cfg.Groups,
		levels: cfg.Leaders.Levels(), now: now}
	c.sets = newSetTable(cfg.Sets, cfg.CacheCapacity, w, c.ranks.isLeaving)
	c.policy = policy{
		fusion: fusion.Options{ThresholdBytes: cfg.FusionThresholdBytes,
			DisableGroupFusion: cfg.DisableGroupFusion, Deterministic: cfg.Deterministic},
		plan: cfg.Plan, sets: c.sets,
	}
	for r := range c.ranks.all {
		if c.ranks.leaders.Of(topo.Rank(r)) == topo.Rank(r) {
			c.ranks.direct = append(c.ranks.direct, topo.Rank(r))
		}
		c.ranks.all[r].received, c.ranks.all[r].lastSent = now, now
		c.ranks.eachKeeper(topo.Rank(r), func(keeper topo.Rank) {
			c.ranks.all[keeper].open++
			c.ranks.all[keeper].active++
		})
	}
	c.ranks.setGroups()
	return c
}

// Tune changes settings. The new values hold from the grants of the next cycle on, at all ranks. With
// Lockstep, this cycle gathers the requests of all ranks.
func (c *Coordinator) Tune(t message.Tuning) {
	c.disturb()
	c.tuning = &t
}

// disturb records an event, which Expire and Ready have to handle.
func (c *Coordinator) disturb() { c.settled, c.quiet = false, 0 }

// takeTuning applies the values that the current cycle changes, and returns them for the frames of the cycle.
// It returns nil if the cycle changes none.
func (c *Coordinator) takeTuning() *message.Tuning {
	t := c.tuning
	if t != nil {
		c.tuning = nil
		c.cfg.CycleTime = t.CycleTime
		c.policy.tuning = t
		c.policy.fusion.ThresholdBytes, c.policy.cacheOff = t.FusionThresholdBytes, t.CacheOff
	}
	return t
}

// Tick sets the current time to now.
func (c *Coordinator) Tick(now time.Duration) {
	if g := gap(c.now, now); g > 0 {
		for r := range c.ranks.all {
			c.ranks.all[r].received += g
			c.ranks.all[r].executing.since += g
		}
		for _, r := range c.ranks.direct {
			if led := c.ranks.all[r].group; led != nil {
				led.lastReceived += g
			}
		}
		for _, s := range c.sets.sets {
			s.shiftWaits(g)
		}
		c.progress += g
		c.combined += g
		if c.suspicion != nil {
			c.suspicion.since += g
		}
	}
	c.now, c.waits.now, c.ranks.now = now, now, now
}

// Expire gives the verdicts that are due, and reports tensors that wait for too long. It must be called after
// the frames that had arrived at the time of the last Tick were applied: if the process ran late, they have
// been waiting, and the ranks that sent them were not silent.
func (c *Coordinator) Expire() {
	if c.now < c.quiet {
		return
	}
	for i := range c.timeouts {
		// A suspicion, perhaps of this turn too, explains a timeout better. The rank repeats its report.
		if c.suspicion == nil && (c.state == running || c.state == stopping) {
			c.timeout(&c.timeouts[i])
		}
	}
	c.timeouts = c.timeouts[:0]
	switch {
	case c.state != running && c.state != stopping:
	case c.now >= c.suspicion.due(&c.ranks):
		c.fail(c.suspicion.verdict(&c.ranks))
	case c.now >= c.ranks.silentDue && len(c.ranks.silent(c.cfg.LivenessTimeout)) > 0:
		c.failSilent()
	case c.state == stopping && c.now-c.progress >= closeTimeout:
		c.endStuckShutdown()
	case c.state == running:
		c.checkStalls()
	}
	if c.now >= c.ranks.silentDue {
		c.ranks.silentDue = c.ranks.nextSilent(c.cfg.LivenessTimeout)
	}
}

// nextSilent returns a time before which no rank has been silent for the duration d.
func (t *roster) nextSilent(d time.Duration) time.Duration {
	next := Never
	for i := range t.all {
		if t.needs(topo.Rank(i)) {
			next = min(next, t.lastReceived(topo.Rank(i))+d)
		}
	}
	return next
}

// silent returns the ranks that the job needs and that have sent nothing for the duration d.
func (t *roster) silent(d time.Duration) (ranks []topo.Rank) {
	for i := range t.all {
		if r := topo.Rank(i); t.heard(r)-t.lastReceived(r) >= d && t.needs(r) {
			ranks = append(ranks, r)
		}
	}
	return ranks
}

// failSilent gives the verdict when a rank has been silent for LivenessTimeout. The verdict also names ranks
// that have been silent for almost as long. They were most likely lost together with that rank, for example
// because all of them were on one host. Their last frames may be up to a heartbeat period apart.
func (c *Coordinator) failSilent() {
	long := c.cfg.LivenessTimeout
	if d := long - heartbeatPeriod; d >= 2*heartbeatPeriod {
		long = d
	}
	silent := c.ranks.silent(long)
	text := fmt.Sprintf("silent for %v", c.cfg.LivenessTimeout)
	if len(silent) > 1 {
		text = fmt.Sprintf("silent for up to %v", c.cfg.LivenessTimeout)
	}
	c.fail(silent, text+c.ranks.behindText(silent))
}

// endStuckShutdown ends a shutdown that makes no progress. If ranks have missed their heartbeats, it gives a
// verdict that names them. Otherwise it closes the epoch, even if ranks still execute operations.
func (c *Coordinator) endStuckShutdown() {
	if silent := c.ranks.silent(2 * heartbeatPeriod); len(silent) > 0 {
		c.fail(silent, fmt.Sprintf("silent during the shutdown of the job, which has made no progress for %v",
			closeTimeout))
		return
	}
	c.close()
}

// Step applies a frame from a rank. If the frame breaks the protocol, Step fails the rank.
func (c *Coordinator) Step(from topo.Rank, up *message.Up) { c.step(from, up, false) }

// step applies a frame from a rank. relayed is set if a leader has passed the frame on. Such a frame may
// stand for frames of several ranks, some of which have applied later cycles than the frame says.
func (c *Coordinator) step(from topo.Rank, up *message.Up, relayed bool) {
	if c.state == closed || c.state == failed {
		return
	}
	c.disturb()
	k := &c.ranks.all[from]
	c.ranks.received(from, 0)
	// In lock-step, the news may have overtaken this frame, because collectives of another library do not use
	// the control connection.
	overtaken, latest := relayed, c.cycle
	if c.cfg.Lockstep && up.Type != message.UpNews {
		overtaken = true
		latest++ // the rank may have repeated a decision in a cycle that rank 0 has not ended yet
	}
	if up.Seen < c.ranks.seen(from) && !overtaken || up.Seen > latest {
		c.failSender(from, fmt.Errorf("got an acknowledgment of cycle %d, want a cycle from %d to %d",
			up.Seen, c.ranks.seen(from), latest))
		return
	}
	c.ranks.received(from, up.Seen)
	switch up.Type {
	case message.UpHeartbeat:
		k.executing.handle(up, c.waits)
	case message.UpTimeout:
		if int(up.Suspect) >= len(c.ranks.all) {
			c.failSender(from, fmt.Errorf("got a timeout of a message of rank %d, want a rank from 0 to %d",
				up.Suspect, len(c.ranks.all)-1))
			return
		}
		// If the rank has seen a later cycle, rank 0 does not know yet what was granted. It drops the report,
		// and the rank repeats it.
		switch {
		case from != 0 && !c.ranks.needs(from):
			c.closeRank(from) // it waits only for ranks that may still execute operations with it
		case !c.ranks.postpone(from) && up.Seen <= c.cycle:
			c.timeouts = append(c.timeouts, reportedTimeout{from, *up})
		}
	case message.UpBye:
		switch {
		case k.stop == 0 || up.Seen != k.stop: // the stop must be the last cycle that the rank has applied
			c.failSender(from, fmt.Errorf("the rank announced its departure before the coordinator had stopped it"))
			return
		case k.bye:
			c.failSender(from, fmt.Errorf("the rank announced its departure twice"))
			return
		}
		c.handleBye(from)
	case message.UpReleased:
		for _, r := range up.Released {
			if int(r) >= len(c.ranks.all) {
				c.failSender(from, fmt.Errorf("got a report that all operations with rank %d have ended, want a rank from 0 to %d", r,
					len(c.ranks.all)-1))
				return
			}
			c.released(r, from)
		}
	case message.UpSuspect:
		c.suspect(from, up)
	case message.UpLost, message.UpFault:
		c.failMember(from, up)
	case message.UpNews:
		if k.stop != 0 {
			c.progress = c.now
			return // sent before the sender received the stop; the sender ends the requests in it
		}
		if err := c.news(from, up); err != nil {
			c.failSender(from, err)
		}
	}
}

func (c *Coordinator) news(from topo.Rank, up *message.Up) error {
	for i := range up.Sets {
		u := &up.Sets[i]
		s, member := c.sets.member(u.Set, from)
		if s == nil && c.sets.crossed(u.Set, from, up.Seen) {
			continue
		}
		if s == nil {
			return fmt.Errorf("got requests for process set %d, but rank %d is not a member of it", u.Set,
				from)
		}
		for bit, ok := u.Hits.Next(0); ok; bit, ok = u.Hits.Next(bit + 1) {
			if err := s.vote(member, bit, up.Seen); err != nil {
				return err
			}
		}
		for bit, ok := u.Invalid.Next(0); ok; bit, ok = u.Invalid.Next(bit + 1) {
			if err := s.invalid(member, bit, up.Seen); err != nil {
				return err
			}
		}
		for _, q := range u.Requests {
			if err := s.request(member, q); err != nil {
				return err
			}
			if q.Kind == message.Join {
				s.joinVotes(member)
				s.joinAll()
			}
		}
		if u.Done > 0 {
			if member != 0 {
				return fmt.Errorf("got a report of finished responses of process set %d, but only rank %d, the first rank of the set, may send it",
					u.Set, s.Ranks[0])
			}
			if unfinished := s.granted - s.done; uint64(u.Done) > unfinished {
				return fmt.Errorf("got a report of %d finished responses of process set %d, want at most %d, the number of unfinished grants", u.Done, u.Set, unfinished)
			}
			s.done += uint64(u.Done)
		}
	}
	c.sets.addFounded()
	if up.Shutdown {
		return c.leave(from, up)
	}
	return nil
}

// member returns a set and the position of a rank in it. It returns nil if the set does not exist or if the
// rank is not a member.
func (t *setTable) member(id topo.ProcessSetID, r topo.Rank) (*setState, int) {
	if s := t.find(id); s != nil {
		if i := s.index(r); i >= 0 {
			return s, i
		}
	}
	return nil, 0
}

// forget drops erased cache entries and removed sets that no frame in flight can refer to anymore, if ranks
// have acknowledged cycles in this turn.
func (c *Coordinator) forget() {
	if !c.ranks.acked {
		return
	}
	c.ranks.acked = false
	for _, s := range c.sets.sets {
		if s.cache.Remembered() > 0 {
			s.cache.Forget(c.leastSeen(s.Ranks))
		}
	}
	if len(c.sets.removed) > 0 {
		c.sets.forget(c.leastSeen)
	}
}

// leastSeen returns the last cycle that all the given ranks have applied, except those that were stopped,
// whose news are ignored.
func (c *Coordinator) leastSeen(ranks []topo.Rank) uint64 {
	least := c.cycle
	for _, r := range ranks {
		if k := &c.ranks.all[r]; k.stop == 0 {
			least = min(least, c.ranks.seen(r))
		}
	}
	return least
}

// Lost records that the control connection of a rank has ended. If the job still needs the rank, Lost fails
// the rank.
func (c *Coordinator) Lost(r topo.Rank, reason string) {
	c.disturb()
	k := &c.ranks.all[r]
	if !k.lost {
		k.lost = true
		c.ranks.eachKeeper(r, func(keeper topo.Rank) {
			if !k.closed {
				c.ranks.all[keeper].open--
			}
			if !k.bye {
				c.ranks.all[keeper].active--
			}
		})
	}
	if c.ranks.needs(r) && (c.state == running || c.state == stopping) {
		c.fail([]topo.Rank{r}, reason)
	}
	c.closeKeepers(r)
}

// Fault fails a rank whose control connection still works, so that the rank receives the verdict too.
func (c *Coordinator) Fault(r topo.Rank, reason string) {
	c.disturb()
	if c.state == running || c.state == stopping {
		c.fail([]topo.Rank{r}, reason)
	}
}

// failSender fails a rank because a frame from it broke the protocol.
func (c *Coordinator) failSender(r topo.Rank, err error) {
	c.fail([]topo.Rank{r}, fmt.Sprintf("protocol error: %v", err))
}

// suspect records a suspicion but does not give a verdict yet. If a rank has died, its control connection
// usually ends soon, which shows the rank that has died. An immediate verdict could name a living rank. The
// first suspicion counts, but one of several ranks gives way to one of a single rank.
func (c *Coordinator) suspect(by topo.Rank, up *message.Up) {
	suspects := up.Suspects
	switch {
	case len(suspects) == 0:
		c.failSender(by, fmt.Errorf("got a report of a suspected rank that names no rank"))
	case int(slices.Max(suspects)) >= len(c.ranks.all):
		c.failSender(by, fmt.Errorf("got a report that rank %d is suspected, want a rank from 0 to %d",
			slices.Max(suspects), len(c.ranks.all)-1))
	case c.ranks.all[by].closed: // no rank needs the sender any more
	case c.sets.find(up.Set) == nil: // the suspect has removed the set, and the sender is about to
	case len(suspects) == 1 && suspects[0] == by:
		c.fail(suspects, up.Reason)
	case c.suspicion == nil || clearer(suspects, c.suspicion.suspects):
		c.suspicion = &suspicion{by: by, suspects: suspects, reason: up.Reason, since: c.now}
	}
}

// clearer reports whether a suspicion of the ranks a replaces an earlier one of the ranks b.
func clearer(a, b []topo.Rank) bool { return len(a) == 1 && len(b) > 1 }

// due returns the time at which the coordinator gives its verdict about the suspicion, or never. By
// then, a suspect that has failed has missed its heartbeats. A rank behind a leader has done so only when the
// leader is heard two heartbeat periods later. The leader is heard at least once in a heartbeat period, and
// each leader on the way may hold the last frame of the rank and that of the rank's leader. If there is one
// suspect, and it has missed its heartbeats already, the coordinator waits only for control connections to
// end.
func (s *suspicion) due(t *roster) time.Duration {
	if s == nil {
		return Never
	}
	if len(s.suspects) == 1 && len(t.gone(s.suspects)) > 0 {
		return s.since + suspectGrace
	}
	return s.since + verdictGrace(t.levels)
}

// verdict returns the ranks that have failed, and the reason. It is called only if no control connection has
// ended meanwhile. If the suspects, or leaders that pass on their frames, have missed their heartbeats, they
// have failed. Otherwise, if the rank that suspects them has missed its heartbeats, or its leader has, that
// rank or leader has failed. Otherwise, the suspects and the rank that suspects them have failed.
func (s *suspicion) verdict(t *roster) (ranks []topo.Rank, reason string) {
	ranks = t.gone(s.suspects)
	if len(ranks) == 0 {
		ranks = t.gone([]topo.Rank{s.by})
	}
	found := len(ranks) > 0
	if !found {
		ranks = append(slices.Clone(s.suspects), s.by)
		slices.Sort(ranks)
		ranks = slices.Compact(ranks)
	}
	switch {
	case len(s.suspects) == 1 && (!found || slices.Equal(ranks, s.suspects)):
		reason = fmt.Sprintf("rank %d lost its connection to rank %d: %s", s.by, s.suspects[0], s.reason)
	case !found:
		reason = fmt.Sprintf("rank %d cannot tell which of %s has failed: %s", s.by,
			topo.FormatRanks(s.suspects), s.reason)
	default:
		reason = fmt.Sprintf("missed two heartbeats or closed the control connection%s; rank %d reported: %s",
			t.behindText(ranks), s.by, s.reason)
	}
	return ranks, reason
}

// gone returns those of the given ranks and of all leaders of theirs that have missed two heartbeats or whose
// control connections have ended, in ascending order.
func (t *roster) gone(ranks []topo.Rank) []topo.Rank {
	all := slices.Clone(ranks)
	for _, r := range ranks {
		for leader := t.leaders.Of(r); leader != r; r, leader = leader, t.leaders.Of(leader) {
			all = append(all, leader)
		}
	}
	slices.Sort(all)
	return slices.DeleteFunc(slices.Compact(all), func(r topo.Rank) bool {
		k := &t.all[r]
		return !k.lost && t.heard(r)-t.lastReceived(r) < 2*heartbeatPeriod
	})
}

// fail gives the verdict. It is called at most once.
func (c *Coordinator) fail(ranks []topo.Rank, reason string) {
	c.state = failed
	// Drop the decisions of this turn, but keep the DownClose frames, which allow ranks that have left to
	// close.
	c.out = slices.DeleteFunc(c.out, func(o Outgoing) bool { return o.Down.Type != message.DownClose })
	d := &message.Down{Type: message.DownFail, Cycle: c.cycle, Ranks: ranks, Reason: reason}
	c.emit(d, c.ranks.present())
}

func (c *Coordinator) close() {
	c.state = closed
	c.emit(&message.Down{Type: message.DownClose, Cycle: c.cycle}, c.ranks.present())
}

// present returns the ranks that are not closed and have a working control connection.
func (t *roster) present() []topo.Rank {
	var all []topo.Rank
	for r := range t.all {
		if k := &t.all[r]; !k.lost && !k.closed {
			all = append(all, topo.Rank(r))
		}
	}
	return all
}

func (c *Coordinator) emit(d *message.Down, to []topo.Rank) {
	c.disturb() // Ready has to return the frame
	c.out = append(c.out, Outgoing{To: to, Down: d})
	for _, r := range to {
		c.ranks.all[r].lastSent = c.now
	}
}

// Ready issues a cycle if there is anything to decide. It returns the frames to send now, in order. The
// result is valid until Advance.
func (c *Coordinator) Ready() []Outgoing {
	if c.now < c.quiet {
		return nil
	}
	c.forget()
	c.tellLeft()
	if !c.cfg.Lockstep {
		if c.leaving > 0 && c.state == running {
			c.checkLeavers()
		}
		if c.state == running && c.now-c.lastCycle >= c.cfg.CycleTime || c.state == stopping && !c.stopSent {
			c.decide()
		}
	}
	if c.state == running || c.state == stopping {
		c.sendHeartbeats()
	}
	return c.out
}

// Advance drops the frames that Ready has returned. The caller must not report any event between Ready and
// Advance, because Advance would also drop the frames that the event causes.
func (c *Coordinator) Advance() {
	for _, o := range c.out {
		if o.Down.Type == message.DownCycle {
			c.spare = append(c.spare, o)
		}
	}
	clear(c.out)
	c.out = c.out[:0]
	c.settled = len(c.timeouts) == 0 // Expire handles timeouts, but it was called before Ready
}

// nextDirect returns a time before which no direct rank needs a heartbeat or has been silent for the duration
// d. A rank behind a leader is silent only when a frame from its leader arrives.
func (t *roster) nextDirect(d time.Duration) time.Duration {
	next := Never
	for _, r := range t.direct {
		k := &t.all[r]
		if !k.lost && !k.closed {
			next = min(next, k.lastSent+heartbeatPeriod)
		}
		if t.needs(r) {
			next = min(next, t.lastReceived(r)+d)
		}
	}
	return next
}

// decide issues a cycle. Each rank gets a frame with the decisions about its own sets. Ranks that get
// decisions about the same sets share a frame. If the cycle changes settings, every rank that is not stopped
// gets a frame.
func (c *Coordinator) decide() {
	stop := c.state == stopping
	next := c.cycle + 1
	c.sets.addFounded()
	tuning := c.takeTuning()
	c.decision.Reset()
	c.states = c.states[:0]
	for _, s := range c.sets.sets {
		// The cycle with the stop is the last cycle. So it also grants the ready tensors of sets whose gate
		// is closed.
		if len(s.ready) == 0 || !(s.open() || stop) {
			continue
		}
		s.decide(c.decision.AddSet(s.ID), next, &c.policy, nil)
		c.states = append(c.states, s)
	}
	stops := stop
	if c.leaving > 0 {
		for r := range c.ranks.all {
			k := &c.ranks.all[r]
			k.stops = stop && k.stop == 0 || c.stopsAlone(topo.Rank(r))
			stops = stops || k.stops
		}
	}
	if len(c.states) == 0 && !stops && tuning == nil {
		return
	}
	c.cycle, c.lastCycle = next, c.now
	c.stopSent = stop
	if len(c.states) == 1 && !stops && tuning == nil {
		c.sendCycle(c.states[0])
		return
	}
	first := len(c.out)
rank:
	for r := range c.ranks.all {
		rank, k := topo.Rank(r), &c.ranks.all[r]
		if k.stop != 0 {
			continue
		}
		stops := stop || k.stops
		c.mine = c.mine[:0]
		for i, s := range c.states {
			if s.index(rank) >= 0 {
				c.mine = append(c.mine, i)
			}
		}
		if len(c.mine) == 0 && !stops && tuning == nil {
			continue
		}
		k.lastSent = c.now
		if stops {
			k.stop = next
		}
		for i := first; i < len(c.out); i++ {
			if d := c.out[i].Down; d.Stop == stops && sameSets(d, c.states, c.mine) {
				c.out[i].To = append(c.out[i].To, rank)
				continue rank
			}
		}
		o := c.newOutgoing()
		o.To = append(o.To, rank)
		o.Down.Type, o.Down.Cycle, o.Down.Stop, o.Down.Reason = message.DownCycle, next, stops, c.stopReason
		o.Down.Tuning, o.Down.Brief = tuning, c.brief()
		o.Down.Ranks = append(o.Down.Ranks, c.stopRanks...)
		for _, i := range c.mine {
			o.Down.Sets = append(o.Down.Sets, c.decision.Sets[i])
		}
		c.out = append(c.out, o)
	}
}

// sendCycle emits a cycle that has only decisions about the set s.
func (c *Coordinator) sendCycle(s *setState) {
	o := c.newOutgoing()
	o.Down.Type, o.Down.Cycle, o.Down.Reason = message.DownCycle, c.cycle, c.stopReason
	o.Down.Brief = c.brief()
	o.Down.Ranks = append(o.Down.Ranks, c.stopRanks...)
	o.Down.Sets = append(o.Down.Sets, c.decision.Sets[0])
	if c.leaving == 0 {
		o.To, o.shared = s.Ranks, true
	} else { // only ranks that are leaving were stopped
		for _, r := range s.Ranks {
			if c.ranks.all[r].stop == 0 {
				o.To = append(o.To, r)
			}
		}
	}
	for _, r := range c.ranks.direct {
		if s.index(r) >= 0 && c.ranks.all[r].stop == 0 {
			c.ranks.all[r].lastSent = c.now
		}
	}
	if len(o.To) > 0 {
		c.out = append(c.out, o)
	}
}

// brief reports whether leaders need not pass on the time of each vote and request.
func (c *Coordinator) brief() bool { return c.ranks.leaders != nil && !c.waits.trace }

// newOutgoing returns an empty frame without recipients. It reuses the memory of an earlier frame if there is
// one.
func (c *Coordinator) newOutgoing() Outgoing {
	n := len(c.spare)
	if n == 0 {
		return Outgoing{Down: new(message.Down)}
	}
	o := c.spare[n-1]
	c.spare = c.spare[:n-1]
	if o.shared {
		o.To, o.shared = nil, false
	}
	o.To = o.To[:0]
	o.Down.Reset()
	return o
}

func sameSets(d *message.Down, states []*setState, mine []int) bool {
	if len(d.Sets) != len(mine) {
		return false
	}
	for i, m := range mine {
		if d.Sets[i].Set != states[m].ID {
			return false
		}
	}
	return true
}

// sendHeartbeats sends a heartbeat to the ranks to which no frame was sent for heartbeatPeriod, and to all
// ranks when a rank has announced its shutdown and not left for as long. A heartbeat names such ranks.
// Leaders send the other heartbeats to the ranks behind them.
func (c *Coordinator) sendHeartbeats() {
	if c.leaving == 0 && c.now < c.ranks.beatDue {
		return
	}
	var leaving, quiet []topo.Rank
	news := false
	for r := range c.ranks.all {
		if k := &c.ranks.all[r]; k.leaving && c.now-k.at >= heartbeatPeriod {
			leaving = append(leaving, topo.Rank(r))
			news = news || !k.told
			k.told = true
		}
	}
	for r := range c.ranks.all {
		k, direct := &c.ranks.all[r], c.ranks.leaders.Of(topo.Rank(r)) == topo.Rank(r)
		if !k.lost && !k.closed && (news || direct && c.now-k.lastSent >= heartbeatPeriod) {
			quiet = append(quiet, topo.Rank(r))
		}
	}
	if len(quiet) > 0 {
		c.emitLeavers(message.DownHeartbeat, leaving, quiet)
	}
}

// Closed reports whether the epoch is over for the coordinator. When it is, the next call of Ready returns
// the last frames.
func (c *Coordinator) Closed() bool { return c.state == closed || c.state == failed }

// Next returns the time by which Tick and Ready must be called again, even if nothing arrives before.
func (c *Coordinator) Next() time.Duration {
	if c.Closed() {
		return Never
	}
	if c.now < c.quiet {
		return c.quiet
	}
	if c.now >= c.ranks.beatDue {
		c.ranks.beatDue = c.ranks.nextDirect(c.cfg.LivenessTimeout)
	}
	next := min(c.ranks.beatDue, c.suspicion.due(&c.ranks))
	if c.state == stopping {
		next = min(next, c.progress+closeTimeout)
	}
	if c.state == running {
		next = min(next, c.waits.due)
	}
	if len(c.sets.sets[0].founded) > 0 && !c.cfg.Lockstep {
		next = min(next, c.lastCycle+c.cfg.CycleTime)
	}
	if c.cfg.CycleTime > 0 && c.state == running && !c.cfg.Lockstep {
		if c.canStop() || c.tuning != nil {
			next = min(next, c.lastCycle+c.cfg.CycleTime)
		}
		for _, s := range c.sets.sets {
			if len(s.ready) > 0 && s.open() {
				next = min(next, c.lastCycle+c.cfg.CycleTime)
			}
		}
	}
	// A suspicion or a shutdown may need a turn earlier, because ranks miss their heartbeats meanwhile.
	if c.settled && c.suspicion == nil && c.leaving == 0 {
		c.quiet = next
	}
	return next
}

// Digest returns a digest of the coordinator's cache of a set. Right after Ready, it equals the digest of
// every member that has applied the last cycle. Later it may differ: the coordinator erases entries at once,
// but the members learn of the erasures only with the next cycle of the set.
func (c *Coordinator) Digest(id topo.ProcessSetID) uint64 {
	if s := c.sets.find(id); s != nil {
		return s.cache.Digest()
	}
	return 0
}
