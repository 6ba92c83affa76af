package controller

import (
	"fmt"
	"slices"
	"time"

	"github.com/gohvd/gohvd/fusion"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
)

// CoordinatorConfig configures a Coordinator.
type CoordinatorConfig struct {
	// Sets are the process sets with which the job begins, ascending by ID, the global set first.
	Sets []Set
	// CacheCapacity is the number of responses that each set remembers.
	CacheCapacity int
	// FusionThresholdBytes bounds a fused response.
	FusionThresholdBytes int64
	// DisableGroupFusion keeps the tensors of a group apart from all others.
	DisableGroupFusion bool
	// Deterministic excludes fusion that would change bits: Adasum is never fused.
	Deterministic bool
	// CycleTime is the least time between two cycles.
	CycleTime time.Duration
	// LivenessTimeout is the silence after which a rank counts as failed.
	LivenessTimeout time.Duration
	// StallWarning is how long a tensor waits, for ranks to request it or to finish it, before Events reports
	// that, and then the time between reports; 0 disables reports. StallShutdown is how long it waits before
	// the job is stopped; 0 disables that.
	StallWarning, StallShutdown time.Duration
	// Lockstep says that a Lockstep brings the requests and carries the cycles, which go to all ranks. Ranks
	// that shut down are then stopped together, when the last one shuts down.
	Lockstep bool
	// Plan chooses backend and algorithm.
	Plan Planner
}

// Outgoing is a frame and the ranks that it goes to.
type Outgoing struct {
	To   []topo.Rank
	Down *message.Down
}

type coordinatorState uint8

const (
	running  coordinatorState = iota
	stopping                  // STOP is decided; ranks finish the operations that were granted
	closed                    // every rank has said bye
	failed                    // the verdict is given
)

// Coordinator decides what runs when, for all process sets of a job. It is not safe for concurrent use.
//
// A turn is: Tick, then Step and Lost for the frames and errors that have arrived, then Ready, send its
// frames, then Advance.
type Coordinator struct {
	cfg    CoordinatorConfig
	policy policy
	sets   *setTable
	waits  *waits
	ranks  []rankState
	state  coordinatorState

	now       time.Duration
	cycle     uint64
	lastCycle time.Duration // the time at which the cycle was issued
	combined  time.Duration // in lock-step, the time at which all ranks had last entered a cycle
	leaving   int           // ranks that submit nothing more
	stopSent  bool          // every rank was stopped
	// stopReason is why the job is stopped, unless every rank has asked for it, and stopRanks the ranks that
	// caused it by their shutdown.
	stopReason string
	stopRanks  []topo.Rank
	byes       int
	progress   time.Duration // the time at which the shutdown last made progress

	suspicion         *suspicion
	out               []Outgoing
	events, oldEvents []Event
	stallReports      uint64

	// These fields are reused memory of decide and its frames.
	decision message.Down // the decision about all sets
	states   []*setState  // the sets of the decision
	mine     []int        // the indexes in states of one rank's sets
	spare    []Outgoing
}

// rankState is the state of a rank at the coordinator.
type rankState struct {
	seen         uint64        // the last cycle that it has applied
	lastReceived time.Duration // the time at which its last frame arrived
	lastSent     time.Duration // the time at which the last frame to it was created
	lost         bool          // its control connection ended
	// executing is the oldest grant that the rank has not finished.
	executing execution
	departure
}

type suspicion struct {
	by, suspect topo.Rank
	reason      string
	since       time.Duration
}

// NewCoordinator returns the coordinator for an epoch that begins at now.
func NewCoordinator(cfg CoordinatorConfig, now time.Duration) *Coordinator {
	w := newWaits(cfg.StallWarning, cfg.StallShutdown, now, len(cfg.Sets[0].Ranks))
	c := &Coordinator{cfg: cfg, now: now, lastCycle: now - cfg.CycleTime, waits: w,
		sets: newSetTable(cfg.Sets, cfg.CacheCapacity, w)}
	c.policy = policy{
		fusion: fusion.Options{ThresholdBytes: cfg.FusionThresholdBytes,
			DisableGroupFusion: cfg.DisableGroupFusion, Deterministic: cfg.Deterministic},
		plan: cfg.Plan, sets: c.sets,
	}
	c.ranks = make([]rankState, len(cfg.Sets[0].Ranks))
	for r := range c.ranks {
		c.ranks[r].lastReceived, c.ranks[r].lastSent = now, now
	}
	return c
}

// Tick sets the time.
func (c *Coordinator) Tick(now time.Duration) {
	if g := gap(c.now, now); g > 0 {
		for r := range c.ranks {
			c.ranks[r].lastReceived += g
			c.ranks[r].executing.since += g
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
	c.now, c.waits.now = now, now
	switch c.state {
	case running, stopping:
	default:
		return
	}
	if s := c.suspicion; s != nil && now-s.since >= suspectGrace {
		c.decideSuspicion(s)
		return
	}
	if len(c.silent(c.cfg.LivenessTimeout)) > 0 {
		c.failSilent()
		return
	}
	switch {
	case c.state == stopping && now-c.progress >= closeTimeout:
		c.endStuckShutdown()
	case c.state == running:
		c.checkStalls()
	}
}

// silent returns the ranks that have sent nothing for d.
func (c *Coordinator) silent(d time.Duration) (ranks []topo.Rank) {
	for r := range c.ranks {
		if k := &c.ranks[r]; !k.bye && c.now-k.lastReceived >= d {
			ranks = append(ranks, topo.Rank(r))
		}
	}
	return ranks
}

// failSilent gives the verdict when a rank has been silent for too long. It names the ranks that are about to
// be silent for too long as well: they were most likely lost with it, as all ranks of a host are, and each
// sent its last frame within a heartbeat period of the others.
func (c *Coordinator) failSilent() {
	long := c.cfg.LivenessTimeout
	if d := long - heartbeatPeriod; d >= 2*heartbeatPeriod {
		long = d
	}
	silent := c.silent(long)
	text := fmt.Sprintf("silent for %v", c.cfg.LivenessTimeout)
	if len(silent) > 1 {
		text = fmt.Sprintf("silent for up to %v", c.cfg.LivenessTimeout)
	}
	c.fail(silent, text)
}

// endStuckShutdown ends a shutdown that makes no progress: with a verdict if ranks have missed their
// heartbeats, else regardless of ranks that still work.
func (c *Coordinator) endStuckShutdown() {
	if silent := c.silent(2 * heartbeatPeriod); len(silent) > 0 {
		c.fail(silent, fmt.Sprintf("silent during the shutdown of the job, which has made no progress for %v",
			closeTimeout))
		return
	}
	c.close()
}

// Step applies a frame from a rank. A frame that breaks the protocol fails that rank.
func (c *Coordinator) Step(from topo.Rank, up *message.Up) {
	if c.state == closed || c.state == failed {
		return
	}
	k := &c.ranks[from]
	k.lastReceived = c.now
	if up.Seen < k.seen || up.Seen > c.cycle {
		c.failSender(from, fmt.Errorf("got an acknowledgment of cycle %d, want one of cycles %d to %d",
			up.Seen, k.seen, c.cycle))
		return
	}
	if up.Seen > k.seen {
		k.seen = up.Seen
		c.forget(from)
	}
	switch up.Type {
	case message.UpHeartbeat:
		k.executing.handle(up, c.waits)
	case message.UpTimeout:
		c.timeout(from, up)
	case message.UpBye:
		switch {
		case k.stop == 0 || up.Seen != k.stop: // the cycle of the stop is the last one that the rank receives
			c.failSender(from, fmt.Errorf("bye before the coordinator has stopped the rank"))
			return
		case k.bye:
			c.failSender(from, fmt.Errorf("second bye"))
			return
		}
		c.handleBye(from)
	case message.UpReleased:
		if int(up.Suspect) >= len(c.ranks) {
			c.failSender(from, fmt.Errorf("got a release of rank %d, want a rank from 0 to %d", up.Suspect,
				len(c.ranks)-1))
			return
		}
		c.released(up.Suspect, from)
	case message.UpSuspect:
		c.suspect(from, up)
	case message.UpNews:
		if k.stop != 0 {
			c.progress = c.now
			return // STOP was sent before this arrived: the sender answers its requests itself
		}
		if err := c.news(from, up); err != nil {
			c.failSender(from, err)
		}
	}
}

func (c *Coordinator) news(from topo.Rank, up *message.Up) error {
	for i := range up.Sets {
		u := &up.Sets[i]
		s, member := c.member(u.Set, from)
		if s == nil && c.sets.crossed(u.Set, from, up.Seen) {
			continue
		}
		if s == nil {
			return fmt.Errorf("requests for process set %d, of which rank %d is not a member", u.Set, from)
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
				return fmt.Errorf("report of finished responses of process set %d, which only rank %d sends",
					u.Set, s.Ranks[0])
			}
			if unfinished := s.granted - s.done; uint64(u.Done) > unfinished {
				return fmt.Errorf("got a report of %d finished responses of process set %d, want at most %d, the number of unfinished grants", u.Done, u.Set, unfinished)
			}
			s.done += uint64(u.Done)
		}
	}
	if up.Shutdown {
		return c.leave(from, up)
	}
	return nil
}

// member returns a set and the position of a rank in it, or nil if the rank is not a member.
func (c *Coordinator) member(id topo.ProcessSetID, r topo.Rank) (*setState, int) {
	if s := c.sets.find(id); s != nil {
		if i := s.index(r); i >= 0 {
			return s, i
		}
	}
	return nil, 0
}

// forget drops, after a rank has seen more cycles, what no member can refer to any more from the caches and
// the removed sets.
func (c *Coordinator) forget(r topo.Rank) {
	for _, s := range c.sets.sets {
		if s.cache.Remembered() > 0 && s.index(r) >= 0 {
			s.cache.Forget(c.leastSeen(s.Ranks))
		}
	}
	if len(c.sets.removed) > 0 {
		c.sets.forget(c.leastSeen(c.cfg.Sets[0].Ranks))
	}
}

// leastSeen returns the last cycle that all of ranks have applied.
func (c *Coordinator) leastSeen(ranks []topo.Rank) uint64 {
	least := c.cycle
	for _, r := range ranks {
		least = min(least, c.ranks[r].seen)
	}
	return least
}

// Lost says that the control connection of a rank has ended. After the bye of that rank it is no failure.
func (c *Coordinator) Lost(r topo.Rank, reason string) {
	k := &c.ranks[r]
	k.lost = true
	if !k.bye && (c.state == running || c.state == stopping) {
		c.fail([]topo.Rank{r}, reason)
	}
}

// Fault fails a rank although its control connection works, so the rank receives the verdict too.
func (c *Coordinator) Fault(r topo.Rank, reason string) {
	if c.state == running || c.state == stopping {
		c.fail([]topo.Rank{r}, reason)
	}
}

// failSender fails a rank that broke the protocol.
func (c *Coordinator) failSender(r topo.Rank, err error) {
	c.fail([]topo.Rank{r}, fmt.Sprintf("protocol error: %v", err))
}

// suspect records a suspicion. A death usually ends the control connection too. Waiting for that avoids
// naming a living rank for the death of another.
func (c *Coordinator) suspect(by topo.Rank, up *message.Up) {
	switch {
	case int(up.Suspect) >= len(c.ranks):
		c.failSender(by, fmt.Errorf("got a suspicion of rank %d, want a rank from 0 to %d", up.Suspect,
			len(c.ranks)-1))
	case up.Suspect == by:
		c.fail([]topo.Rank{by}, up.Reason)
	case c.suspicion == nil:
		c.suspicion = &suspicion{by: by, suspect: up.Suspect, reason: up.Reason, since: c.now}
	}
}

// decideSuspicion gives the verdict about a suspect whose control connection has not ended, or has ended
// after its bye. It names only the suspect if the suspect has missed its heartbeat or has left. Otherwise it
// names both ranks, because either may have failed.
func (c *Coordinator) decideSuspicion(s *suspicion) {
	ranks := []topo.Rank{s.suspect}
	if k := &c.ranks[s.suspect]; !k.lost && c.now-k.lastReceived < 2*heartbeatPeriod {
		ranks = append(ranks, s.by)
		slices.Sort(ranks)
	}
	c.fail(ranks, fmt.Sprintf("rank %d lost its connection to rank %d: %s", s.by, s.suspect, s.reason))
}

// fail gives the verdict. It is called once.
func (c *Coordinator) fail(ranks []topo.Rank, reason string) {
	c.state = failed
	// Drop the decisions of this turn, but still notify ranks that have left that they may close.
	c.out = slices.DeleteFunc(c.out, func(o Outgoing) bool { return o.Down.Type != message.DownClose })
	d := &message.Down{Type: message.DownFail, Cycle: c.cycle, Ranks: ranks, Reason: reason}
	c.emit(d, c.present())
}

func (c *Coordinator) close() {
	c.state = closed
	c.emit(&message.Down{Type: message.DownClose, Cycle: c.cycle}, c.present())
}

// present returns the ranks that have not left and whose control connection works.
func (c *Coordinator) present() []topo.Rank {
	var all []topo.Rank
	for r := range c.ranks {
		if k := &c.ranks[r]; !k.lost && !k.closed {
			all = append(all, topo.Rank(r))
		}
	}
	return all
}

func (c *Coordinator) emit(d *message.Down, to []topo.Rank) {
	c.out = append(c.out, Outgoing{To: to, Down: d})
	for _, r := range to {
		c.ranks[r].lastSent = c.now
	}
}

// Ready issues a cycle if anything can be decided, and returns the frames to send now, in this order. The
// result is valid until Advance.
func (c *Coordinator) Ready() []Outgoing {
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

// Advance says that the outputs of Ready were taken. No event may come between Ready and Advance: its outputs
// would be dropped.
func (c *Coordinator) Advance() {
	for _, o := range c.out {
		if o.Down.Type == message.DownCycle {
			c.spare = append(c.spare, o)
		}
	}
	clear(c.out)
	c.out = c.out[:0]
}

// decide issues a cycle. Each rank gets a frame with those of its sets about which something was decided.
// Ranks with the same such sets share a frame.
func (c *Coordinator) decide() {
	stop := c.state == stopping
	next := c.cycle + 1
	c.decision.Reset()
	c.states = c.states[:0]
	for _, s := range c.sets.sets {
		// The STOP cycle also grants the ready tensors of sets with a closed gate, because no cycle follows.
		if len(s.ready) == 0 || !(s.open() || stop) {
			continue
		}
		s.decide(c.decision.AddSet(s.ID), next, &c.policy, nil)
		c.states = append(c.states, s)
	}
	stops := stop
	if c.leaving > 0 {
		for r := range c.ranks {
			k := &c.ranks[r]
			k.stops = k.stop == 0 && (stop || k.leaving && !c.outstanding(topo.Rank(r)))
			stops = stops || k.stops
		}
	}
	if len(c.states) == 0 && !stops {
		return
	}
	c.cycle, c.lastCycle = next, c.now
	c.stopSent = stop
	first := len(c.out)
rank:
	for r := range c.ranks {
		rank, k := topo.Rank(r), &c.ranks[r]
		stops := k.stop == 0 && (stop || k.stops)
		c.mine = c.mine[:0]
		for i, s := range c.states {
			if s.index(rank) >= 0 {
				c.mine = append(c.mine, i)
			}
		}
		if len(c.mine) == 0 && !stops {
			continue
		}
		if k.lastSent = c.now; stops {
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
		o.Down.Ranks = append(o.Down.Ranks, c.stopRanks...)
		for _, i := range c.mine {
			o.Down.Sets = append(o.Down.Sets, c.decision.Sets[i])
		}
		c.out = append(c.out, o)
	}
}

// newOutgoing returns an empty frame without recipients. It reuses the memory of an earlier one if possible.
func (c *Coordinator) newOutgoing() Outgoing {
	n := len(c.spare)
	if n == 0 {
		return Outgoing{Down: new(message.Down)}
	}
	o := c.spare[n-1]
	c.spare = c.spare[:n-1]
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

// sendHeartbeats sends a heartbeat to the ranks to which nothing was sent for heartbeatPeriod.
func (c *Coordinator) sendHeartbeats() {
	var quiet []topo.Rank
	for r := range c.ranks {
		if k := &c.ranks[r]; !k.lost && !k.closed && c.now-k.lastSent >= heartbeatPeriod {
			quiet = append(quiet, topo.Rank(r))
		}
	}
	if len(quiet) > 0 {
		c.emit(&message.Down{Type: message.DownHeartbeat, Cycle: c.cycle}, quiet)
	}
}

// Closed reports whether the epoch is over for the coordinator: the frames of Ready are the last ones.
func (c *Coordinator) Closed() bool { return c.state == closed || c.state == failed }

// Next returns the time at which Tick and Ready must be called again if nothing arrives before.
func (c *Coordinator) Next() time.Duration {
	if c.Closed() {
		return never
	}
	next := never
	for r := range c.ranks {
		k := &c.ranks[r]
		if !k.lost && !k.closed {
			next = min(next, k.lastSent+heartbeatPeriod)
		}
		if !k.bye {
			next = min(next, k.lastReceived+c.cfg.LivenessTimeout)
		}
	}
	if c.suspicion != nil {
		next = min(next, c.suspicion.since+suspectGrace)
	}
	if c.state == stopping {
		next = min(next, c.progress+closeTimeout)
	}
	if c.state == running {
		next = min(next, c.waits.due)
	}
	if c.cfg.CycleTime > 0 && c.state == running && !c.cfg.Lockstep {
		if c.canStop() {
			next = min(next, c.lastCycle+c.cfg.CycleTime)
		}
		for _, s := range c.sets.sets {
			if len(s.ready) > 0 && s.open() {
				next = min(next, c.lastCycle+c.cfg.CycleTime)
			}
		}
	}
	return next
}

// Digest returns the digest of the coordinator's cache of a set. Right after Ready it equals the digest of
// every member that has applied the last cycle. It already contains later erasures, which travel with the
// next cycle of the set.
func (c *Coordinator) Digest(id topo.ProcessSetID) uint64 {
	if s := c.sets.find(id); s != nil {
		return s.cache.Digest()
	}
	return 0
}
