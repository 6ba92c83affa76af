package engine

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/transport"
)

// scheduler decides which goroutine runs the turns of the loop, how long it polls between them, and when it
// parks.
//
// The goroutine that holds the lock runs the turns. It is BackgroundThreadLoop or a driver: a goroutine that
// waits for an operation and drives the loop meanwhile (the caller of a blocking operation, or the reader of
// a sidecar's connection). If a caller drives its operation from the submission on, no other thread takes
// part in it.
//
//	state       lock held by          polled by                    notify
//	parked      nobody                nobody; the mesh notifies    wakes BackgroundThreadLoop
//	background  BackgroundThreadLoop  it, while a rank is busy     is seen by its next poll
//	wanted      BackgroundThreadLoop  nobody                       is seen by the driver's first turn
//	driven      a driver              it, while a rank is busy     is seen by its next poll
//	over        anybody               nobody                       has no effect
//
//	from        event                                        to
//	parked      notify, or the next turn is due              background
//	parked      drive                                        driven
//	background  nothing arrives within the poll budget       parked
//	background  drive                                        wanted
//	wanted      BackgroundThreadLoop sees that and unlocks   driven
//	driven      another drive: that returns at once          driven
//	driven      what the driver waits for is done, or        parked; background if BackgroundThreadLoop was
//	            nothing arrives within the poll budget       woken meanwhile, a turn is due, or turns do not end
//	any         a turn says that the epoch is over, or stop  over
//
// Before the holder of the lock parks, and while it still holds the lock, it hands started operations off to
// their lanes.
type scheduler struct {
	loop  loop
	peers peers
	clock func() time.Duration
	stop  <-chan struct{}
	pollLimits
	drivable bool // drive may take the lock

	pending atomic.Bool   // notify was called since the last turn began
	parked  atomic.Bool   // no goroutine polls, or the holder of mu is about to stop polling
	wake    chan struct{} // wakes BackgroundThreadLoop
	polls   atomic.Uint64 // number of polls; only tests read it

	mu         sync.Mutex  // held by the goroutine that runs turns
	background atomic.Bool // BackgroundThreadLoop holds mu
	wanted     atomic.Bool // a driver waits for mu, which BackgroundThreadLoop holds
	missed     atomic.Bool // BackgroundThreadLoop was woken while a driver held mu

	// Owned by the holder of mu.
	now        time.Duration // when the turn began, or about when the last poll ended
	budget     time.Duration // the poll budget of the goroutine that holds mu
	busyUntil  time.Duration // the time at which polling ends
	alarm      time.Duration // when BackgroundThreadLoop's timer fires, or should have fired
	dispatched bool          // the last turn gave an operation to a lane
	unnotified unnotified
	over       bool
	err        error // the error with which the loop ended

	deferred deferred
}

// loop runs the turns of a scheduler. The holder of the lock calls its methods. Any goroutine may call
// queued.
type loop interface {
	RunLoopOnce() (next time.Duration, over bool, err error)
	// arrived polls once, executes steps of started operations, and reports whether that changed something.
	arrived() bool
	// handOff passes started operations to their lanes, which wait for other ranks.
	handOff()
	// executing reports whether a lane runs an operation.
	executing() bool
	// queued returns the number of operations that were submitted and have not been taken by a turn.
	queued() int
}

// peers notifies the other ranks, and lets them know whether to notify this one. Its methods are from
// transport.Poller.
type peers interface {
	NotifyPeers()
	Park() bool
	Unpark()
}

const (
	// defaultPoll is about the time that a wake-up takes, including its cost for the goroutine that wakes.
	defaultPoll = 50 * time.Microsecond
	// defaultDrive is the poll budget of a driver with a processor of its own. Other ranks may be late by the
	// time that they need to queue the tensors of a step.
	defaultDrive = time.Millisecond
	// pollsPerClock is the number of polls for each reading of the clock, which would otherwise be most of
	// the cost of a poll.
	pollsPerClock = 8
	// pauses is the number of pause instructions between two polls. They leave resources to a sibling
	// hyper-thread and to the memory.
	pauses = 4
	// pollsPerNotify is the number of polls after which parked peers are notified, if the poll budget does
	// not pass earlier. Until then a peer may poll by itself: a rank that has just finished an operation
	// mostly begins the next.
	pollsPerNotify = 64
	// lockTries is the number of times that a driver tries to take the lock before it blocks. They take about
	// as long as a turn.
	lockTries = 50
	// turnsToPark is the number of turns that a driver which is about to park runs for events that arrive
	// meanwhile. Running them is cheaper than waking another thread.
	turnsToPark = 4
)

// pollLimits are the limits on the polling of a holder of the lock before it parks.
type pollLimits struct {
	backgroundBudget, driveBudget time.Duration // 0 disables polling
	backgroundPace, drivePace     pace
	pinned                        bool // to a thread: only another thread can run a lane
	oversubscribed                bool // a lane that executes needs the processor that polling would take
	// BackgroundThreadLoop does not extend its polling because of its own work
	onlyAfterDrive bool
}

// pace is how often a goroutine that polls yields.
type pace struct {
	pollsPerYield   int // polls between two yields to other threads
	pollsPerGosched int // polls between two yields to other goroutines
}

// newPollLimits returns the limits of a loop in one of the given number of processes on a host with so many
// cores. threads is the number of threads on which the process runs goroutines, budget is Config.Spin, pinned
// says that the loop is bound to processors, and entersKernel that polling makes system calls. The numbers of
// polls are the ones with the shortest times to completion in measurements.
//
// forClient says that the program is another of these processes. If it has no processor of its own,
// BackgroundThreadLoop polls only for a budget after a drive: a program that waits drives, and a program that
// computes needs the processor.
func newPollLimits(budget time.Duration, pinned, entersKernel, forClient bool, processes, cores,
	threads int) pollLimits {
	// Each process can keep two threads busy: the loop polls while a lane or the caller runs. If the caller
	// drives, only one thread is busy.
	busy := processes * min(2, threads)
	// The kernel may put two threads on one processor although another is idle, so there are always some
	// yields. Yielding to a goroutine may wake a thread for it, which is expensive if that thread has no
	// processor of its own to look for work.
	l := pollLimits{pinned: pinned, oversubscribed: busy > cores, onlyAfterDrive: forClient &&
		processes > cores, backgroundPace: pace{16, 64}, drivePace: pace{16, 256}}
	if pinned || busy >= cores {
		l.backgroundPace = pace{1, 4}
	}
	if threads == 1 || processes > cores {
		l.backgroundPace.pollsPerGosched = 1 // there is no other thread, or it runs late
	}
	if processes > cores {
		l.drivePace = pace{1, 64}
	}
	if entersKernel {
		l.backgroundPace.pollsPerYield, l.drivePace.pollsPerYield = 1, 1
	}
	l.backgroundBudget = max(budget, 0)
	if budget == 0 {
		// A thread that yields also waits until it runs again.
		l.backgroundBudget = defaultPoll * time.Duration((busy+cores-1)/cores)
	}
	l.driveBudget = l.backgroundBudget
	if budget == 0 && processes <= cores {
		l.driveBudget = max(l.backgroundBudget, defaultDrive)
	}
	return l
}

// newScheduler returns a scheduler that does not poll and cannot be driven until poll is called.
func newScheduler(l loop, clock func() time.Duration, stop <-chan struct{}) *scheduler {
	s := &scheduler{loop: l, peers: transport.Alone{}, clock: clock, stop: stop, wake: make(chan struct{}, 1)}
	s.deferred.timer = time.AfterFunc(never, s.deferralEnds)
	s.deferred.timer.Stop()
	s.deferred.period = deferralPeriod
	return s
}

// poll makes the scheduler poll within limits. It is called before run.
func (s *scheduler) poll(p peers, limits pollLimits) {
	s.peers, s.pollLimits = p, limits
	s.budget = s.backgroundBudget
	s.drivable = !s.pinned && s.driveBudget > 0
}

// notify makes the loop run a turn. The caller has already stored what the turn is to find. No notification
// is lost: either the turn has not begun, or the holder of the lock sees pending before it parks, or notify
// sees that it is parked and wakes BackgroundThreadLoop.
func (s *scheduler) notify() {
	if s.pending.Load() {
		return
	}
	s.pending.Store(true)
	if s.parked.Load() {
		s.wakeBackground()
	}
}

func (s *scheduler) wakeBackground() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// run runs turns in the calling goroutine, BackgroundThreadLoop, until the epoch is over, and returns why it
// ended.
func (s *scheduler) run() error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		if s.lockBackground() {
			parks := s.backgroundTurn(timer)
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
		case <-timer.C:
		case <-s.stop:
			s.mu.Lock() // waits for a driver, which is about to unlock mu
			s.end(ErrClosed)
			s.mu.Unlock()
			return s.err
		}
	}
}

// backgroundTurn runs a turn of BackgroundThreadLoop and then polls. It reports whether to wait for timer or
// wake, because nothing has arrived or a driver wants the lock.
func (s *scheduler) backgroundTurn(timer *time.Timer) (parks bool) {
	if s.over {
		return true
	}
	s.unpark()
	next := s.turn()
	if closed(s.stop) {
		s.end(ErrClosed)
	}
	if s.over {
		return true
	}
	if s.await(&s.backgroundPace, s.wanted.Load) {
		return false
	}
	if !s.wanted.Load() {
		s.loop.handOff()
		s.notifyPeers()
		if !s.park() {
			return false
		}
	}
	// A timer that fires too early costs a needless turn, which is cheaper than resetting the timer in every
	// turn.
	if next < s.alarm || s.alarm <= s.now {
		timer.Reset(next - s.now)
		s.alarm = next
	}
	return true
}

// end ends the epoch with err, unless a turn has ended it for another reason.
func (s *scheduler) end(err error) {
	if !s.over {
		s.over, s.err = true, err
	}
}

// lockBackground takes the lock for BackgroundThreadLoop, and reports whether it could. If not, the driver
// that holds the lock wakes BackgroundThreadLoop later.
func (s *scheduler) lockBackground() bool {
	s.missed.Store(true)
	if !s.mu.TryLock() {
		return false
	}
	s.missed.Store(false)
	s.background.Store(true)
	return true
}

// lockDriver takes the lock for a driver, if necessary from BackgroundThreadLoop. It returns false if there
// is another driver.
func (s *scheduler) lockDriver() bool {
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

// drive runs turns in the calling goroutine until done reports true, ctx ends, or nothing arrives within the
// poll budget; the caller then waits without driving. In any case the loop takes what was queued.
func (s *scheduler) drive(ctx context.Context, done func() bool) {
	if !s.drivable || !s.lockDriver() {
		s.notify()
		return
	}
	if s.over {
		s.mu.Unlock()
		return
	}
	s.deferred.cancel()
	s.unpark()
	s.now = s.clock()
	s.budget = s.driveBudget
	s.extend()
	var next time.Duration
	enough := func() bool { return done() || closed(ctx.Done()) || closed(s.stop) }
	for !s.over {
		if next = s.turn(); enough() || !s.await(&s.drivePace, enough) {
			break
		}
	}
	s.parkDriver(next)
}

// parkDriver parks, unless something keeps arriving, and unlocks. next is when the next turn is due. It wakes
// BackgroundThreadLoop if that has to run turns or to reset its timer.
func (s *scheduler) parkDriver(next time.Duration) {
	s.budget = s.backgroundBudget
	s.busyUntil = min(s.busyUntil, s.now+s.budget)
	parked := false
	for range turnsToPark {
		s.loop.handOff()
		if s.over || closed(s.stop) {
			break
		}
		if parked = s.park(); parked {
			break
		}
		s.unpark()
		next = s.turn()
	}
	s.notifyPeers()
	due := !parked || next < s.alarm || s.alarm <= s.now
	s.mu.Unlock()
	if s.missed.Swap(false) || due {
		s.wakeBackground()
	}
}

// turn runs a turn and returns when the next is due.
func (s *scheduler) turn() (next time.Duration) {
	s.pending.Store(false)
	s.now = s.clock()
	next, s.over, s.err = s.loop.RunLoopOnce()
	return next
}

// await reports whether there is something to do. While this rank is busy await polls for that, unless quit
// reports true.
func (s *scheduler) await(p *pace, quit func() bool) bool {
	if s.dispatched && !s.pinned {
		// Yield so that the lane runs next on this processor, which is sooner than another thread could run
		// it.
		runtime.Gosched()
	}
	s.dispatched = false
	for n := 1; ; n++ {
		// Peers are notified even if this rank always has something to do: another rank may wait for what was
		// sent.
		if s.unnotified.isDue(s.now) {
			s.notifyPeers()
		}
		if s.pending.Load() {
			return true
		}
		s.polls.Add(1)
		if s.loop.arrived() {
			return true
		}
		if s.now >= s.busyUntil || s.oversubscribed && s.loop.executing() || quit() {
			return false
		}
		if n%p.pollsPerYield == 0 {
			shmem.Yield()
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

// extend records that this rank is busy, so that it polls for another budget. Heartbeats do not make a rank
// busy: an idle job takes no processor time.
func (s *scheduler) extend() {
	if !s.onlyAfterDrive || !s.background.Load() {
		s.busyUntil = s.now + s.budget
	}
}

// park records that nobody polls from now on, and reports whether nothing has arrived meanwhile.
func (s *scheduler) park() bool {
	s.parked.Store(true)
	return !s.pending.Load() && s.peers.Park()
}

// unpark records that the holder of the lock polls again.
func (s *scheduler) unpark() {
	if s.parked.Load() {
		s.parked.Store(false)
		s.peers.Unpark()
	}
}

// unnotified is the state of a notification that parked peers have yet to get for what was sent. They get it
// after a number of polls, which may extend over several turns, or at a point in time.
type unnotified struct {
	any   bool
	polls int
	at    time.Duration
}

// sent records that something was sent of which parked peers are to be notified.
func (s *scheduler) sent() {
	if u := &s.unnotified; !u.any {
		*u = unnotified{any: true, polls: pollsPerNotify, at: s.now + s.backgroundBudget}
	}
}

// isDue counts a poll, and reports whether parked peers are to be notified now.
func (u *unnotified) isDue(now time.Duration) bool {
	u.polls--
	return u.any && (u.polls <= 0 || now >= u.at)
}

// notifyPeers notifies parked peers of what was sent.
func (s *scheduler) notifyPeers() {
	s.unnotified.any = false
	s.peers.NotifyPeers()
}

// A caller that submits many operations one after another needs the processor for that. If the loop would
// take it away (pollLimits.oversubscribed), notifyLater defers the notification until nothing was queued for
// a while, or the caller polls or waits for an operation (flush, drive). So the operations are also
// negotiated together, and fused.

const (
	// deferralPeriod is longer than queuing an operation takes, and too short to matter for a caller.
	deferralPeriod = 100 * time.Microsecond
	// deferralPeriods bounds how many periods a notification is deferred while operations keep being queued.
	deferralPeriods = 10
)

// deferred is a deferred notification, which a timer delivers.
type deferred struct {
	period time.Duration
	timer  *time.Timer
	armed  atomic.Bool // the timer is running and will notify

	mu sync.Mutex // guards the fields below
	// Number of operations that were queued when the timer fired last, and number of deferrals since then.
	queued, periods int
}

// notifyLater notifies the loop, but not at once if that would delay the caller.
func (s *scheduler) notifyLater() {
	driven := !s.parked.Load() && !s.background.Load()
	switch d := &s.deferred; {
	case !s.drivable || !s.oversubscribed || driven:
		s.notify()
	case !d.armed.Load() && d.armed.CompareAndSwap(false, true):
		d.timer.Reset(d.period)
	}
}

// flush notifies the loop now if notifyLater has deferred the notification.
func (s *scheduler) flush() {
	if s.deferred.armed.Load() && s.deferred.armed.CompareAndSwap(true, false) {
		s.notify()
	}
}

// cancel drops a deferred notification. The caller runs a turn next.
func (d *deferred) cancel() {
	if d.armed.Load() {
		// The timer stops before armed changes. So if another caller arms it again, its timer runs.
		d.timer.Stop()
		d.armed.Store(false)
	}
}

// deferralEnds is called when the timer fires. It notifies the loop, or defers again if more operations were
// queued.
func (s *scheduler) deferralEnds() {
	d := &s.deferred
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.armed.Load() {
		d.queued, d.periods = 0, 0 // a turn has taken the operations that were queued
		return
	}
	queued := s.loop.queued()
	if d.periods++; queued > d.queued && d.periods < deferralPeriods {
		d.queued = queued
		d.timer.Reset(d.period)
		return
	}
	d.queued, d.periods = 0, 0
	// Disarm before looking at the queue: an operation that is queued later arms the timer again, and the
	// loop is notified of the earlier ones.
	d.armed.Store(false)
	if s.loop.queued() > 0 {
		s.notify()
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
