package engine

import (
	"fmt"
	"time"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/control"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
)

// These constants determine the time between two cycles. All ranks count the same cycles, so they pause for
// the same time. Cycles are counted, because a pause that depends on clocks would differ between ranks.
const (
	// eagerCycles is the number of cycles without a decision that follow a decision with no other pause than
	// HOROVOD_CYCLE_TIME. A program that waits for its operations begins the next one in this time.
	eagerCycles = 100
	// Later, the pause doubles from cycle to cycle, from shortestPause to waitingPause if a rank has votes or
	// news, and to idlePause if no rank has any.
	shortestPause = 50 * time.Microsecond
	waitingPause  = time.Millisecond
	idlePause     = 8 * time.Millisecond
	// pollCollective is how long a rank polls a collective that cannot wake it, before it parks. It does so
	// only in eager cycles, because an idle job must use little processor time.
	pollCollective = 5 * time.Millisecond
	parkedPoll     = time.Millisecond // the time between two polls afterwards
	// patience is how long a rank that has got a grant waits for its program to submit the next request
	// before it enters the next cycle. Without requests of this rank, that cycle would decide nothing for it.
	// The wait ends at a multiple of patienceStep, so that most grants need not set the timer again.
	patience     = 50 * time.Microsecond
	patienceStep = 25 * time.Microsecond
	// pollsPerRead is the number of polls after which a rank that polls a collective of another library reads
	// its control connections. That takes longer than such a poll.
	pollsPerRead = 256
)

// Collectives are the operations that negotiation in lock-step needs. All ranks start the same collectives in
// the same order. Starting a collective does not block. Then the rank calls Test until the collective has
// completed. Until then it must not change the arguments or start another collective.
type Collectives interface {
	// AndOr combines two bit vectors of all ranks, the first by bitwise AND and the second by bitwise OR. The
	// results replace the arguments.
	AndOr(and, or []uint64)
	// Gather sends one frame of each rank to rank 0.
	Gather(frame []byte)
	// Broadcast sends a frame from rank 0 to all ranks. Ranks other than 0 pass nil.
	Broadcast(frame []byte)
	// Poll reports whether Test has to be called, because the collective has moved on. The loop calls it
	// while it polls. Collectives that notify the loop return false.
	Poll() bool
	// Test reports whether the collective that this rank started last has completed at this rank. After a
	// gather, rank 0 gets the frames of all ranks, in the order of the ranks, and other ranks get no frames.
	// After a broadcast, every rank gets one frame. The frames are valid until the next collective starts. An
	// error ends the negotiation.
	Test() (frames [][]byte, done bool, err error)
	// Missing returns the ranks for which the collective still waits, as far as this rank knows them.
	Missing() []topo.Rank
}

// phase is a part of a lock-step cycle.
type phase uint8

const (
	pausing phase = iota // waiting until the next cycle is due
	combining
	gathering
	broadcasting
)

// lockstep is the negotiation by collectives that all ranks enter in every cycle, on a timer. The collectives
// carry requests and cycles. All other frames (heartbeats, timeouts, suspicions, the verdict, the bye) are
// sent and received by the embedded events, which is the negotiation without lock-step.
type lockstep struct {
	events
	core        *controller.Lockstep
	collectives Collectives
	// star implements the collectives with control connections. It is nil if Config.Collectives is set.
	star *control.Star

	phase    phase
	polls    int           // number of calls of reads
	failed   bool          // whether this rank has reported an error in a cycle and waits for the verdict
	and, or  []uint64      // the bit vectors of this cycle
	frame    []byte        // the frame of this rank in this cycle
	due      time.Duration // the time at which the next cycle begins
	pause    time.Duration // the time between two cycles
	idle     int           // number of cycles since the last decision
	began    time.Duration // the time at which the pending collective began
	deadline time.Duration // the time by which the pending collective must have completed
	last     time.Duration // the time at which the last turn began
	granted  bool          // whether this rank has got a grant after its last request
	until    time.Duration // the time until which this rank waits for the next request after a grant
	late     bool          // whether the last request after a grant came later than that
}

func newLockstep(e *Engine) *lockstep {
	n := &lockstep{
		events: events{e}, core: controller.NewLockstep(e.member, e.coordinator),
		collectives: e.cfg.Collectives,
	}
	if n.collectives == nil {
		n.star = control.NewStar(control.StarConfig{
			Rank: e.cfg.Rank, Size: e.cfg.Size, Malformed: e.failSender,
			Up: func(frame []byte) {
				if err := e.sendUp(frame); err != nil {
					e.suspect(e.self(), err)
				}
			},
			Down: func(to topo.Rank, frame []byte) {
				if r, err := e.links.Down(to, frame); err != nil {
					e.coordinator.Fault(r, err.Error())
				}
			},
		})
		n.collectives = n.star
	}
	return n
}

// accepts reports whether a cycle begins in this turn. Requests are submitted only when a cycle begins,
// because a vote refers to the cache as it is between two cycles.
func (n *lockstep) accepts() bool { return n.phase == pausing && n.e.now >= n.due }

// took implements the interface negotiation. It decides whether the next grant is worth waiting after.
func (n *lockstep) took(submitted time.Duration) {
	if n.granted {
		n.granted, n.late = false, submitted > n.until
	}
}

// waits reports whether this rank enters no cycle yet, because its program probably submits a request soon. A
// rank with votes or news does not wait, so decisions about its requests are not delayed.
func (n *lockstep) waits(now time.Duration) bool {
	return n.granted && !n.late && now < n.until && !n.core.Contributes()
}

func (n *lockstep) handleFrame(from topo.Rank, frame []byte) {
	if n.star != nil && n.star.Take(from, frame) {
		return
	}
	n.events.handleFrame(from, frame)
}

// reads implements the interface negotiation. While this rank polls a collective of another library, only
// some polls read the control connections.
func (n *lockstep) reads() bool {
	n.polls++
	return !n.polling() || n.polls%pollsPerRead == 0
}

// polling reports whether this rank polls a collective that cannot wake it.
func (n *lockstep) polling() bool {
	return n.star == nil && n.idle <= eagerCycles && n.e.sched.Now() < n.began+pollCollective
}

// arrived implements the interface negotiation.
func (n *lockstep) arrived() bool {
	switch {
	case n.over():
		return false
	case n.phase == pausing:
		return n.pause == 0 && !n.waits(n.e.sched.Now())
	case n.collectives.Poll():
		return true
	}
	if n.polling() {
		n.e.sched.Extend() // nothing would wake this rank
	}
	return false
}

func (n *lockstep) turn() error {
	if err := n.exchange(); err != nil {
		return err
	}
	if now := n.e.now; now-n.last > longTurn {
		n.deadline += min(now-n.last, controller.Never-n.deadline) // the process was stopped for this time
	}
	n.last = n.e.now
	for n.step() {
	}
	n.sendReplies()
	return nil
}

// longTurn is longer than the time between two turns of a running process. That time is bounded, because a
// turn sends the heartbeats. A longer time means that the process was stopped.
const longTurn = 2 * time.Second

// next implements the interface negotiation.
func (n *lockstep) next() time.Duration {
	next := n.events.next()
	switch {
	case n.over():
		return next
	case n.phase == pausing && n.waits(n.e.now):
		return min(next, max(n.due, n.until))
	case n.phase == pausing:
		return min(next, n.due)
	}
	if n.star == nil {
		next = min(next, n.e.now+parkedPoll) // nothing notifies the loop of the end of the collective
	}
	return min(next, n.deadline)
}

// over reports whether this rank begins no more cycles.
func (n *lockstep) over() bool {
	return n.core.Over() || n.failed || n.e.coordinator != nil && n.e.coordinator.Closed()
}

// step moves the cycle to its next phase if that is possible now, and reports whether it has done so.
func (n *lockstep) step() bool {
	e := n.e
	if n.over() {
		return false
	}
	if n.phase == pausing {
		if e.now < n.due || n.waits(e.now) {
			return false
		}
		n.begin(combining)
		n.and, n.or = n.core.Vectors()
		n.collectives.AndOr(n.and, n.or)
		return true
	}
	frames, done, err := n.collectives.Test()
	if err != nil {
		n.fail(err)
		return false
	}
	if !done {
		if e.now >= n.deadline {
			n.expire()
		}
		return false
	}
	switch n.phase {
	case combining:
		n.combined()
	case gathering:
		n.gathered(frames)
	case broadcasting:
		e.memberStep(frames[0])
		n.core.Decided(&e.scratch.down)
		n.endCycle(true)
	}
	return n.phase != pausing // requests are taken before the next cycle
}

// fail reports an error of this rank in a cycle. The rank then waits for the verdict.
func (n *lockstep) fail(err error) {
	n.failed = true
	suspects, _ := blame(err, n.e.cfg.Rank)
	n.e.suspect(suspects, err)
}

// begin enters a phase. The collective of the phase must complete within two liveness timeouts.
func (n *lockstep) begin(p phase) {
	n.phase, n.began, n.deadline = p, n.e.now, n.e.now+2*n.e.cfg.LivenessTimeout
}

// endCycle ends the cycle and computes when the next cycle is due. decided says whether rank 0 has decided
// something.
func (n *lockstep) endCycle(decided bool) {
	longest := waitingPause
	if n.core.Quiet() {
		longest = idlePause
	}
	if n.idle++; decided {
		n.idle = 0
	}
	if decided && n.core.Granted() {
		n.granted, n.until = true, (n.e.now+patience).Truncate(patienceStep)+patienceStep
	}
	n.pause = min(max(2*n.pause, shortestPause), longest)
	if n.idle <= eagerCycles {
		n.pause = 0
	}
	n.pause = max(n.pause, n.e.cycleTime)
	n.phase, n.due = pausing, n.e.now+n.pause
}

// combined continues the cycle after andOr has completed.
func (n *lockstep) combined() {
	e := n.e
	gather, broadcast, repeated := n.core.Combine(n.and, n.or)
	if broadcast || repeated != nil {
		e.frames.Vectors(n.and, n.or)
	}
	switch {
	case gather:
		up := n.core.Gather()
		e.frames.Up(up)
		frame, err := message.AppendUp(n.frame[:0], up)
		if err != nil {
			n.fail(err)
			return
		}
		n.frame = frame
		n.begin(gathering)
		n.collectives.Gather(frame)
	case broadcast:
		n.decide(nil)
	case repeated != nil:
		e.applyDown(repeated)
		n.endCycle(true)
	default:
		n.endCycle(false)
	}
}

// gathered continues the cycle after gather has completed.
func (n *lockstep) gathered(frames [][]byte) {
	var ups []*message.Up
	for r, frame := range frames { // only rank 0 has frames
		up := new(message.Up)
		if err := message.DecodeUp(frame, up); err != nil {
			n.e.failSender(topo.Rank(r), err)
			return
		}
		ups = append(ups, up)
	}
	n.decide(ups)
}

// decide starts the broadcast of rank 0's decision. The slice ups holds the gathered frames at rank 0, and is
// empty at other ranks.
func (n *lockstep) decide(ups []*message.Up) {
	var frame []byte
	if n.e.coordinator != nil {
		down := n.core.Decide(ups)
		if down == nil {
			return // the coordinator has given a verdict
		}
		var err error
		if frame, err = message.AppendDown(n.frame[:0], down); err != nil {
			n.e.coordinator.Fault(0, err.Error())
			return
		}
		n.frame = frame
	}
	n.begin(broadcasting)
	n.collectives.Broadcast(frame)
}

// expire fails the ranks for which the pending collective waits, even if they have sent heartbeats. If it is
// unknown for which ranks the collective waits, all ranks are suspects.
func (n *lockstep) expire() {
	n.deadline = controller.Never
	limit := 2 * n.e.cfg.LivenessTimeout
	reason := fmt.Sprintf("it has not entered a negotiation cycle for %v, although it sends heartbeats", limit)
	missing := n.collectives.Missing()
	if len(missing) == 0 {
		n.e.suspect(topo.UpTo(n.e.cfg.Size), fmt.Errorf(
			"a negotiation cycle has not ended for %v, although all ranks send heartbeats", limit))
	}
	for _, r := range missing {
		if n.e.coordinator != nil {
			n.e.coordinator.Fault(r, reason)
		} else {
			n.e.member.Suspect([]topo.Rank{r}, reason)
		}
	}
}
