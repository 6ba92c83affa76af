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

// scheduler decides which goroutine runs the turns of the loop, how long it polls between them, and when it parks.
//
// The goroutine that holds the lock runs turns: BackgroundThreadLoop, or one that waits for an operation and drives the loop
// meanwhile (the caller of a blocking operation, the reader of a sidecar's connection). An operation that its caller drives
// from the submission on passes through no other thread.
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
//	background  nothing comes within the poll budget         parked
//	background  drive                                        wanted
//	wanted      BackgroundThreadLoop sees that and unlocks   driven
//	driven      another drive: that returns at once          driven
//	driven      what the driver waits for is done, or        parked; background if BackgroundThreadLoop was
//	            nothing comes within the poll budget         woken meanwhile, a turn is due, or turns do not end
//	any         a turn says that the epoch is over, or stop  over
//
// While the lock is held and before the holder parks it hands started operations off to their lanes.
type scheduler struct {
	loop  loop
	peers peers
	clock func() time.Duration
	stop  <-chan struct{}
	pollLimits
	drivable bool // drive may take the lock

	pending atomic.Bool   // notify was called after the last turn began
	parked  atomic.Bool   // nobody polls, or is about to stop that
	wake    chan struct{} // wakes BackgroundThreadLoop
	polls   atomic.Uint64 // how often the loop was polled; for tests

	mu         sync.Mutex  // held by the goroutine that runs turns
	background atomic.Bool // BackgroundThreadLoop holds mu
	wanted     atomic.Bool // a driver waits for mu, which BackgroundThreadLoop holds
	missed     atomic.Bool // BackgroundThreadLoop was woken while a driver held mu

	// Owned by the holder of mu.
	now        time.Duration // when the turn, or about when the poll began
	budget     time.Duration // of the holder
	busyUntil  time.Duration // when polling ends
	alarm      time.Duration // when BackgroundThreadLoop wakes by itself, or should have
	dispatched bool          // the last turn gave an operation to a lane
	unnotified unnotified
	over       bool
	err        error // why it is over

	deferred deferred
}

// loop has the turns that a scheduler runs. The holder of the lock calls its methods; queued may be called by any goroutine.
type loop interface {
	RunLoopOnce() (next time.Duration, over bool, err error)
	// arrived polls once, does steps of started operations, and reports whether that brought something.
	arrived() bool
	// handOff gives started operations to their lanes, which wait for other ranks.
	handOff()
	// executing reports whether a lane runs an operation.
	executing() bool
	// queued is the number of operations that were submitted and not taken by a turn.
	queued() int
}

// peers are the other ranks, as transport.Poller has them.
type peers interface {
	NotifyPeers()
	Park() bool
	Unpark()
}

const (
	// defaultPoll is about what it takes to be woken, with what that costs whoever wakes.
	defaultPoll = 50 * time.Microsecond
	// defaultDrive is for a driver with a processor of its own: others may be late by what it takes them to queue a step's tensors.
	defaultDrive = time.Millisecond
	// pollsPerClock keeps the look at the clock from being what a poll costs.
	pollsPerClock = 8
	// pauses between two polls leave a sibling hyper-thread, and the memory, some room.
	pauses = 4
	// pollsPerNotify is for how many polls, or a budget's time, a parked peer is left to poll by itself: one that has just
	// finished an operation mostly begins the next.
	pollsPerNotify = 64
	// lockTries are about as many as a turn takes.
	lockTries = 50
	// turnsToPark is how often a driver that is about to park does what has come meanwhile. It is cheaper than to wake another
	// thread for it.
	turnsToPark = 4
)

// pollLimits say how a holder of the lock polls before it parks.
type pollLimits struct {
	backgroundBudget, driveBudget time.Duration // 0 is not at all
	backgroundPace, drivePace     pace
	pinned                        bool // to a thread: then only another thread can run a lane
	tight                         bool // a lane that executes needs the processor that polling would take
	onlyAfterDrive                bool // BackgroundThreadLoop does not poll for longer because of what it does itself
}

// pace is how often a goroutine that polls gives way.
type pace struct {
	pollsPerYield   int // after so many polls to other threads
	pollsPerGosched int // after so many polls to other goroutines
}

// newPollLimits is for a loop among the given number of processes on a host with so many processors, in one that uses so many
// threads for goroutines. The numbers of polls are those of the shortest times to completion that were measured.
//
// forClient says that the program is another of these processes. If it has no processor of its own, BackgroundThreadLoop polls only
// for a budget after a drive: it is driven for a program that waits, and one that computes needs the processor.
func newPollLimits(budget time.Duration, pinned, entersKernel, forClient bool, processes, cores, threads int) pollLimits {
	// Each process keeps two threads busy if it can: the loop polls while a lane runs, or the caller. If the caller drives it is
	// one.
	busy := processes * min(2, threads)
	// The kernel may put two threads on one processor though another is idle, so there are always some yields. To give way
	// to a goroutine may wake a thread for it, which is much where it has no processor of its own to look from.
	l := pollLimits{pinned: pinned, tight: busy > cores, onlyAfterDrive: forClient && processes > cores, backgroundPace: pace{16, 64}, drivePace: pace{16, 256}}
	if pinned || busy >= cores {
		l.backgroundPace = pace{1, 4}
	}
	if threads == 1 || processes > cores {
		l.backgroundPace.pollsPerGosched = 1 // there is no other thread, or it is late
	}
	if processes > cores {
		l.drivePace = pace{1, 64}
	}
	if entersKernel {
		l.backgroundPace.pollsPerYield, l.drivePace.pollsPerYield = 1, 1
	}
	l.backgroundBudget = max(budget, 0)
	if budget == 0 {
		// A thread that gives way waits for its turn as well.
		l.backgroundBudget = defaultPoll * time.Duration((busy+cores-1)/cores)
	}
	l.driveBudget = l.backgroundBudget
	if budget == 0 && processes <= cores {
		l.driveBudget = max(l.backgroundBudget, defaultDrive)
	}
	return l
}

// newScheduler returns the scheduler of a loop that nobody polls or drives.
func newScheduler(l loop, clock func() time.Duration, stop <-chan struct{}) *scheduler {
	s := &scheduler{loop: l, peers: transport.Alone{}, clock: clock, stop: stop, wake: make(chan struct{}, 1)}
	s.deferred.timer = time.AfterFunc(never, s.deferralEnds)
	s.deferred.timer.Stop()
	s.deferred.period = deferralPeriod
	return s
}

// poll makes the scheduler poll within limits.
func (s *scheduler) poll(p peers, limits pollLimits) {
	s.peers, s.pollLimits = p, limits
	s.budget = s.backgroundBudget
	s.drivable = !s.pinned && s.driveBudget > 0
}

// notify makes the loop run a turn, after what the turn is to see was put where it looks. Either the turn has not begun, or
// the holder of the lock sees pending before it parks, or it is seen to be parked.
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

// run runs turns in the calling goroutine, BackgroundThreadLoop, until the epoch is over. The error says why.
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
			s.mu.Lock() // a driver is about to unlock it
			s.end(ErrClosed)
			s.mu.Unlock()
			return s.err
		}
	}
}

// backgroundTurn is a turn of BackgroundThreadLoop, which then polls. It reports whether to wait for timer or wake: nothing came, or a
// driver wants the lock.
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
	// An alarm too early is a turn for nothing, and cheaper than to move it in every turn.
	if next < s.alarm || s.alarm <= s.now {
		timer.Reset(next - s.now)
		s.alarm = next
	}
	return true
}

// end ends the epoch, unless a turn has done so for another reason.
func (s *scheduler) end(err error) {
	if !s.over {
		s.over, s.err = true, err
	}
}

// lockBackground takes the lock for BackgroundThreadLoop. If it fails, the driver that holds the lock wakes it later.
func (s *scheduler) lockBackground() bool {
	s.missed.Store(true)
	if !s.mu.TryLock() {
		return false
	}
	s.missed.Store(false)
	s.background.Store(true)
	return true
}

// lockDriver takes the lock for a driver, from BackgroundThreadLoop if need be. It fails if there is another driver.
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

// drive runs turns in the calling goroutine until done reports true or ctx has ended, but not for long if nothing comes: the
// caller goes on to wait. What was queued is noticed in any case.
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

// parkDriver parks, if nothing comes while it does, and unlocks. It wakes BackgroundThreadLoop if that is to go on, or to set
// another alarm.
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

// turn runs a turn, and returns when the next is due.
func (s *scheduler) turn() (next time.Duration) {
	s.pending.Store(false)
	s.now = s.clock()
	next, s.over, s.err = s.loop.RunLoopOnce()
	return next
}

// await reports whether there is something to do. While this rank is busy it polls for that, unless quit reports true.
func (s *scheduler) await(p *pace, quit func() bool) bool {
	if s.dispatched && !s.pinned {
		// The lane comes next on this processor, which is sooner than another thread could take it.
		runtime.Gosched()
	}
	s.dispatched = false
	for n := 1; ; n++ {
		// Also if there is always something to do for this rank: what waits may be another's.
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
		if s.now >= s.busyUntil || s.tight && s.loop.executing() || quit() {
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

// extend notes that this rank is busy: it polls for another budget. Heartbeats are no reason: an idle job takes no processor
// time.
func (s *scheduler) extend() {
	if !s.onlyAfterDrive || !s.background.Load() {
		s.busyUntil = s.now + s.budget
	}
}

// park notes that nobody polls from now on, and reports whether nothing has come.
func (s *scheduler) park() bool {
	s.parked.Store(true)
	return !s.pending.Load() && s.peers.Park()
}

// unpark notes that the holder of the lock polls again.
func (s *scheduler) unpark() {
	if s.parked.Load() {
		s.parked.Store(false)
		s.peers.Unpark()
	}
}

// unnotified says that something was sent of which parked peers were not notified. They are after so many polls, in as many
// turns as they take, or when the time comes.
type unnotified struct {
	any   bool
	polls int
	at    time.Duration
}

// sent notes that something was sent.
func (s *scheduler) sent() {
	if u := &s.unnotified; !u.any {
		*u = unnotified{any: true, polls: pollsPerNotify, at: s.now + s.backgroundBudget}
	}
}

// isDue counts a poll, and reports whether parked peers are to be notified.
func (u *unnotified) isDue(now time.Duration) bool {
	u.polls--
	return u.any && (u.polls <= 0 || now >= u.at)
}

// notifyPeers notifies parked peers of what was sent.
func (s *scheduler) notifyPeers() {
	s.unnotified.any = false
	s.peers.NotifyPeers()
}

// A caller that starts many operations one after the other needs the processor for that. If the loop would take it away
// (pollLimits.tight), notifyLater defers the notification until nothing was queued for a while, or the caller asks what has become
// of an operation (flush, drive). So the operations are also negotiated together, and fused.

const (
	// deferralPeriod is longer than it takes to queue an operation, and shorter than anybody minds.
	deferralPeriod = 100 * time.Microsecond
	// deferralPeriods bounds how long a notification is deferred while operations keep being queued.
	deferralPeriods = 10
)

// deferred is a notification that a timer makes up for.
type deferred struct {
	period time.Duration
	timer  *time.Timer
	armed  atomic.Bool // the timer will notify

	mu              sync.Mutex // for what follows
	queued, periods int        // how many operations the timer saw last, and how often it has waited for more
}

// notifyLater is notify, but not at once if that would delay the caller.
func (s *scheduler) notifyLater() {
	driven := !s.parked.Load() && !s.background.Load()
	switch d := &s.deferred; {
	case !s.drivable || !s.tight || driven:
		s.notify()
	case !d.armed.Load() && d.armed.CompareAndSwap(false, true):
		d.timer.Reset(d.period)
	}
}

// flush notifies now if notifyLater has deferred that.
func (s *scheduler) flush() {
	if s.deferred.armed.Load() && s.deferred.armed.CompareAndSwap(true, false) {
		s.notify()
	}
}

// cancel drops a deferred notification: a turn follows.
func (d *deferred) cancel() {
	if d.armed.Load() {
		d.timer.Stop() // first: a caller that arms it again has a timer that runs
		d.armed.Store(false)
	}
}

// deferralEnds notifies, or defers again, when the timer fires.
func (s *scheduler) deferralEnds() {
	d := &s.deferred
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.armed.Load() {
		d.queued, d.periods = 0, 0 // of a batch that others have noticed
		return
	}
	queued := s.loop.queued()
	if d.periods++; queued > d.queued && d.periods < deferralPeriods {
		d.queued = queued
		d.timer.Reset(d.period)
		return
	}
	d.queued, d.periods = 0, 0
	// In this order: what is queued from now on arms it again, and for what was the loop is notified.
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
