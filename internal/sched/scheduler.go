// Package sched decides which goroutine runs the turns of a rank's loop, how long it polls between turns, and
// when it parks. It also binds goroutines to processors.
package sched

import (
	"context"
	"math"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gohvd/gohvd/internal/outcome"
	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/transport"
)

// A Scheduler decides which goroutine runs the turns of the loop, how long the goroutine polls between turns,
// and when it parks.
//
// The goroutine that holds the lock (mu) runs the turns. It is BackgroundThreadLoop or a driver. A driver is
// a goroutine that runs turns while it waits for an operation: the caller of a blocking operation, or the
// reader of a sidecar's connection. If a caller drives the loop from the submission of its operation on, no
// other thread of this rank takes part in the operation.
//
// The state of the scheduler determines which goroutine holds the lock, which one polls, and what Notify
// does. A rank is busy for a poll budget after something has happened.
//
//	state       lock held by          polled by                     notify
//	parked      nobody                nobody; the mesh notifies     wakes BackgroundThreadLoop
//	background  BackgroundThreadLoop  the holder, while it is busy  is seen by the holder's next poll
//	wanted      BackgroundThreadLoop  nobody                        is seen by the driver's first turn
//	driven      a driver              the holder, while it is busy  is seen by the holder's next poll
//	over        anybody               nobody                        has no effect
//
//	from        event                                        to
//	parked      notify, or the next turn is due              background
//	parked      drive                                        driven
//	background  nothing arrives within the poll budget       parked
//	background  drive                                        wanted
//	wanted      BackgroundThreadLoop sees wanted, unlocks    driven
//	driven      another drive, which returns at once         driven
//	driven      the driver's operation is done, or           parked; or background if events keep arriving
//	            nothing arrives within the poll budget
//	any         a turn says that the epoch is over, or stop  over
//
// Before the holder of the lock parks, and while it still holds the lock, it hands started operations over to
// their lanes.
type Scheduler struct {
	loop  Loop
	peers Peers
	clock func() time.Duration
	stop  <-chan struct{}
	Limits
	drivable bool // whether drive may take the lock

	pending atomic.Bool   // whether notify was called since the last turn began
	parked  atomic.Bool   // whether no goroutine polls, or the holder of mu is about to stop polling
	wake    chan struct{} // wakes BackgroundThreadLoop
	polls   atomic.Uint64 // number of polls so far, for tests

	mu         sync.Mutex  // held by the goroutine that runs turns
	background atomic.Bool // whether BackgroundThreadLoop holds mu
	wanted     atomic.Bool // whether a driver waits for mu while BackgroundThreadLoop holds it
	missed     atomic.Bool // whether BackgroundThreadLoop was woken while a driver held mu

	// The fields below are owned by the goroutine that holds mu.
	now        time.Duration // the time at which the turn began, or about the time of the last poll
	budget     time.Duration // the poll budget of the goroutine that holds mu
	busyUntil  time.Duration // the time at which polling ends
	timer      *time.Timer   // wakes BackgroundThreadLoop
	alarm      time.Duration // the time at which timer fires or has fired
	meshParked bool          // whether the mesh notifies this rank of what arrives
	dispatched bool          // whether the last turn passed an operation to a lane
	unnotified unnotified
	yielder    shmem.Yielder
	over       bool
	err        error // the error with which the loop has ended

	deferred deferred
}

// Loop is the interface through which the scheduler uses the engine. Any goroutine may call Queued. Only the
// goroutine that holds the lock calls the other methods.
type Loop interface {
	RunLoopOnce() (next time.Duration, over bool, err error)
	// Arrived polls once and executes steps of started operations. It reports whether anything has changed.
	Arrived() bool
	// HandOff passes started operations to their lanes, which execute the steps that wait for other ranks.
	HandOff()
	// Executing reports whether a lane runs an operation.
	Executing() bool
	// Queued returns the number of operations that were submitted but that no turn has taken yet.
	Queued() int
	// Submitted returns the time at which the newest of these operations was submitted. If there are none, it
	// returns 0.
	Submitted() time.Duration
}

// Peers notifies the other ranks, and lets them know whether they must notify this rank. The methods are
// those of transport.Poller.
type Peers interface {
	NotifyPeers()
	Park() bool
	Unpark()
}

const (
	// pollsPerClock is the number of polls between two readings of the clock. If every poll read the clock,
	// that would be most of the cost of a poll.
	pollsPerClock = 8
	// pauses is the number of pause instructions between two polls. During a pause, the other hardware thread
	// of the core can use the execution units, and all cores can use more of the memory bandwidth.
	pauses = 4
	// pollsPerNotify is the number of polls after which parked peers are notified, unless the poll budget
	// ends earlier. The notification is delayed because a rank that has just finished an operation usually
	// begins the next one. Then the peer polls again by itself and needs no notification.
	pollsPerNotify = 64
	// lockTries is the number of times that a driver tries to take the lock before it blocks. All tries
	// together take about as long as a turn.
	lockTries = 50
	// soon is about the time that it takes to prepare for a notification and to be notified. If the next turn
	// is due before that, a rank that parks does not let its peers notify it.
	soon = 100 * time.Microsecond
	// turnsToPark is the maximum number of turns that a driver runs while it parks, if events keep arriving.
	// Running these turns is cheaper than waking another thread.
	turnsToPark = 4
)

// New returns a scheduler that does not poll and cannot be driven until poll is called.
func New(l Loop, clock func() time.Duration, stop <-chan struct{}) *Scheduler {
	s := &Scheduler{loop: l, peers: transport.Alone{}, clock: clock, stop: stop, wake: make(chan struct{}, 1),
		timer: time.NewTimer(0)}
	s.deferred.timer = time.AfterFunc(math.MaxInt64, s.deferralEnds)
	s.deferred.timer.Stop()
	s.deferred.period = deferralPeriod
	return s
}

// Poll makes the scheduler poll within limits. It must be called before run.
func (s *Scheduler) Poll(p Peers, limits Limits) {
	s.peers, s.Limits = p, limits
	s.budget = s.backgroundBudget
	s.yielder.Stay = limits.crowded
	s.drivable = !s.pinned && s.driveBudget > 0
}

// Notify makes the loop run a turn. Before the call, the caller must store what the turn has to find. No
// notification is lost, because one of three cases holds: the next turn has not begun yet; or the holder of
// the lock sees pending before it parks; or notify sees that the holder has parked, and wakes
// BackgroundThreadLoop.
func (s *Scheduler) Notify() {
	if s.pending.Load() {
		return
	}
	s.pending.Store(true)
	if s.parked.Load() {
		s.wakeBackground()
	}
}

func (s *Scheduler) wakeBackground() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Run runs turns in the calling goroutine, BackgroundThreadLoop, until the epoch is over. It returns the
// reason why the epoch ended.
func (s *Scheduler) Run() error {
	defer s.timer.Stop()
	for {
		if s.lockBackground() {
			parks := s.backgroundTurn()
			over := s.over
			s.background.Store(false)
			s.mu.Unlock()
			if over {
				return s.err
			}
			if !parks {
				continue
			}
		}
		select {
		case <-s.wake:
		case <-s.timer.C:
		case <-s.stop:
			s.mu.Lock() // a driver may still hold the lock
			s.end(outcome.ErrClosed)
			s.mu.Unlock()
			return s.err
		}
	}
}

// backgroundTurn runs a turn of BackgroundThreadLoop and then polls. It returns true if the caller must wait
// until timer fires or wake receives a value. That is so if nothing has arrived, if a driver wants the lock,
// or if the epoch is over.
func (s *Scheduler) backgroundTurn() (parks bool) {
	if s.over {
		return true
	}
	s.unpark()
	next := s.turn()
	if closed(s.stop) {
		s.end(outcome.ErrClosed)
	}
	if s.over {
		return true
	}
	if s.await(&s.backgroundPace, s.wanted.Load) {
		return false
	}
	if !s.wanted.Load() {
		s.loop.HandOff()
		s.NotifyPeers()
		if !s.park(next) {
			return false
		}
	}
	s.setAlarm(next)
	return true
}

// Now returns the time at which the turn began, or about the time of the last poll. Only the goroutine that
// holds the lock may call it.
func (s *Scheduler) Now() time.Duration { return s.now }

// InTurn reports whether turns may execute operations, and whether the goroutine that runs the turns waits
// for an operation. Only the goroutine that holds the lock may call it.
func (s *Scheduler) InTurn() (executes, waits bool) { return s.drivable, !s.background.Load() }

// Dispatched records that the turn has passed an operation to a lane.
func (s *Scheduler) Dispatched() { s.dispatched = true }

// HandOff passes started operations to their lanes after the end of Run.
func (s *Scheduler) HandOff() {
	s.mu.Lock() // a driver may still hold the lock
	defer s.mu.Unlock()
	s.loop.HandOff()
}

// Polls returns the number of times that the loop has polled, for tests.
func (s *Scheduler) Polls() uint64 { return s.polls.Load() }

// SetPollBudget sets the poll budget of BackgroundThreadLoop, for tests.
func (s *Scheduler) SetPollBudget(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.budget, s.backgroundBudget = d, d
}

// SetDeferralPeriod sets the time for which NotifyLater defers a notification, for tests. It must be called
// before NotifyLater.
func (s *Scheduler) SetDeferralPeriod(d time.Duration) { s.deferred.period = d }

// setAlarm makes the timer fire at the latest at the time next.
func (s *Scheduler) setAlarm(next time.Duration) {
	// The timer may fire too early and cause a needless turn. Unless it fires soon, that is cheaper than
	// resetting the timer in every turn.
	if next < s.alarm || s.alarm <= s.now || s.alarm < next && s.alarm < s.now+soon {
		s.timer.Reset(next - s.now)
		s.alarm = next
	}
}

// end ends the epoch with err, unless a turn has ended the epoch already.
func (s *Scheduler) end(err error) {
	if !s.over {
		s.over, s.err = true, err
	}
}

// lockBackground tries to take the lock for BackgroundThreadLoop and reports whether it has succeeded. If a
// driver holds the lock, lockBackground returns false, and the driver wakes BackgroundThreadLoop later.
func (s *Scheduler) lockBackground() bool {
	s.missed.Store(true)
	if !s.mu.TryLock() {
		return false
	}
	s.missed.Store(false)
	s.background.Store(true)
	return true
}

// lockDriver tries to take the lock for a driver and reports whether it has succeeded. If
// BackgroundThreadLoop holds the lock, lockDriver makes it unlock. If another driver holds the lock,
// lockDriver returns false.
func (s *Scheduler) lockDriver() bool {
	if s.mu.TryLock() {
		return true
	}
	if !s.background.Load() || !s.wanted.CompareAndSwap(false, true) {
		return false
	}
	defer s.wanted.Store(false)
	for range lockTries {
		if s.mu.TryLock() {
			return true
		}
		shmem.Pause(pauses)
	}
	s.mu.Lock()
	return true
}

// Drive runs turns in the calling goroutine until done returns true, ctx ends, it is the time until, or
// nothing arrives within the poll budget. If nothing arrives, the caller has to wait without driving. In all
// cases, a turn takes the queued operations.
func (s *Scheduler) Drive(ctx context.Context, until time.Duration, done func() bool) {
	if !s.drivable || !s.lockDriver() {
		s.Notify()
		return
	}
	if s.over {
		s.mu.Unlock()
		s.wakeBackground() // it may have found the lock held
		return
	}
	deferred := s.deferred.cancel()
	s.unpark()
	s.budget = s.driveBudget
	// If the caller has just submitted its operation, that time is the time of the turn.
	now := s.loop.Submitted()
	if deferred || now <= s.now {
		now = s.clock()
	}
	next := s.turnAt(now)
	s.Extend()
	enough := func() bool { return done() || s.now >= until || closed(ctx.Done()) || closed(s.stop) }
	for !s.over && !enough() && s.await(&s.drivePace, enough) {
		next = s.turn()
	}
	s.parkDriver(next)
}

// parkDriver releases the lock for a driver. It parks first unless events keep arriving. Then it wakes
// BackgroundThreadLoop, which runs the turns. next is the time at which the next turn is due.
func (s *Scheduler) parkDriver(next time.Duration) {
	s.budget = s.backgroundBudget
	s.busyUntil = min(s.busyUntil, s.now+s.budget)
	parked := false
	for range turnsToPark {
		s.loop.HandOff()
		if s.over || closed(s.stop) {
			break
		}
		if parked = s.park(next); parked {
			break
		}
		s.unpark()
		next = s.turn()
	}
	s.NotifyPeers()
	missed := s.missed.Swap(false) // because the timer has fired, or because notify was called after park
	if parked {
		if missed {
			s.alarm = s.now
		}
		s.setAlarm(next)
	}
	s.mu.Unlock()
	if s.missed.Swap(false) || !parked || missed && s.pending.Load() {
		s.wakeBackground()
	}
}

// turn runs a turn and returns the time at which the next turn is due.
func (s *Scheduler) turn() (next time.Duration) { return s.turnAt(s.clock()) }

// turnAt runs a turn for which it is the time now.
func (s *Scheduler) turnAt(now time.Duration) (next time.Duration) {
	s.pending.Store(false)
	s.now = now
	next, s.over, s.err = s.loop.RunLoopOnce()
	return next
}

// await reports whether the next turn has something to do. While this rank is busy, await polls until there
// is something to do or quit returns true.
func (s *Scheduler) await(p *pace, quit func() bool) bool {
	if s.dispatched && !s.pinned {
		// Yield, so that the lane runs next on this processor. It would run later if another thread had to be
		// woken for it.
		runtime.Gosched()
	}
	s.dispatched = false
	for n := 1; ; n++ {
		// Notify peers even if this rank has something to do at every poll, because another rank may wait for
		// the frames that were sent.
		if s.unnotified.isDue(s.now) {
			s.NotifyPeers()
		}
		if s.pending.Load() {
			return true
		}
		s.polls.Add(1)
		if s.loop.Arrived() {
			return true
		}
		if s.now >= s.busyUntil || s.oversubscribed && s.loop.Executing() || quit() {
			return false
		}
		if n%p.pollsPerYield == 0 {
			s.yielder.Yield()
		} else {
			shmem.Pause(pauses)
		}
		if !s.pinned && n%p.pollsPerGosched == 0 {
			runtime.Gosched()
		}
		if n%pollsPerClock == 0 {
			s.now = s.clock()
		}
	}
}

// Extend records that this rank is busy, so that it polls for another budget. Heartbeats do not make a rank
// busy, because an idle job must use no processor time.
func (s *Scheduler) Extend() {
	if !s.onlyAfterDrive || !s.background.Load() {
		s.busyUntil = s.now + s.budget
	}
}

// park records that no goroutine polls from now on. It returns false if something has arrived in the
// meantime. next is the time at which the next turn is due. If it is due soon, the mesh need not notify this
// rank before that.
func (s *Scheduler) park(next time.Duration) bool {
	s.parked.Store(true)
	s.meshParked = next > s.now+soon
	return !s.pending.Load() && (!s.meshParked || s.peers.Park())
}

// unpark records that the holder of the lock polls again.
func (s *Scheduler) unpark() {
	if s.parked.Load() {
		s.parked.Store(false)
		if s.meshParked {
			s.peers.Unpark()
		}
	}
}

// unnotified records whether and when parked peers must be notified of sent frames. They are notified after a
// number of polls, which may belong to several turns, or when the time in the field at has come, whichever is
// first.
type unnotified struct {
	any   bool
	polls int
	at    time.Duration
}

// Sent records that a frame was sent, so that parked peers must be notified.
func (s *Scheduler) Sent() {
	if u := &s.unnotified; !u.any {
		*u = unnotified{any: true, polls: pollsPerNotify, at: s.now + s.backgroundBudget}
	}
}

// isDue counts a poll and reports whether parked peers must be notified now.
func (u *unnotified) isDue(now time.Duration) bool {
	u.polls--
	return u.any && (u.polls <= 0 || now >= u.at)
}

// NotifyPeers notifies parked peers that frames were sent.
func (s *Scheduler) NotifyPeers() {
	s.unnotified.any = false
	s.peers.NotifyPeers()
}

// A caller that submits many operations one after another needs the processor for that. If the loop would
// take the processor away (Limits.oversubscribed), notifyLater defers the notification. The loop is
// notified when nothing was queued for a while, or when the caller polls or waits for an operation (flush,
// drive). The deferral also has the effect that the operations are negotiated together and fused.

const (
	// deferralPeriod is longer than it takes to queue an operation, but so short that the caller does not
	// notice it.
	deferralPeriod = 100 * time.Microsecond
	// deferralPeriods is the maximum number of periods for which a notification is deferred while the caller
	// keeps queuing operations.
	deferralPeriods = 10
)

// deferred is the state of a deferred notification. A timer delivers the notification.
type deferred struct {
	period time.Duration
	timer  *time.Timer
	armed  atomic.Bool // whether the timer will notify

	mu sync.Mutex // guards the fields below
	// Queued is the number of operations that were queued when the timer last fired. periods is the number of
	// times that the timer has deferred the notification.
	queued, periods int
}

// NotifyLater notifies the loop. It defers the notification if notifying at once would delay the caller.
func (s *Scheduler) NotifyLater() {
	driven := !s.parked.Load() && !s.background.Load()
	switch d := &s.deferred; {
	case !s.drivable || !s.oversubscribed || driven:
		s.Notify()
	case !d.armed.Load() && d.armed.CompareAndSwap(false, true):
		d.timer.Reset(d.period)
	}
}

// Flush notifies the loop now if notifyLater has deferred the notification. Otherwise it does nothing.
func (s *Scheduler) Flush() {
	if s.deferred.armed.Load() && s.deferred.armed.CompareAndSwap(true, false) {
		s.Notify()
	}
}

// cancel drops a deferred notification, because the caller is about to run a turn. It reports whether there
// was one.
func (d *deferred) cancel() bool {
	if !d.armed.Load() {
		return false
	}
	d.timer.Stop() // stop the timer before Store, because after Store another caller may start it again
	d.armed.Store(false)
	return true
}

// deferralEnds is called when the timer fires. It notifies the loop. If more operations were queued since the
// timer last fired, it defers the notification again.
func (s *Scheduler) deferralEnds() {
	d := &s.deferred
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.armed.Load() {
		d.queued, d.periods = 0, 0 // a turn has taken the operations
		return
	}
	queued := s.loop.Queued()
	if d.periods++; queued > d.queued && d.periods < deferralPeriods {
		d.queued = queued
		d.timer.Reset(d.period)
		return
	}
	d.queued, d.periods = 0, 0
	// Disarm before reading the queue. If an operation is queued after that, its caller arms the timer again.
	// If it was queued before, the loop is notified here.
	d.armed.Store(false)
	if s.loop.Queued() > 0 {
		s.Notify()
	}
}

// closed reports whether c is closed.
func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
