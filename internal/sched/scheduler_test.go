package sched

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/outcome"
)

// fakeLoop implements loop and peers for tests of the scheduler. The test determines what the turns of the
// loop do.
type fakeLoop struct {
	start time.Time
	ahead atomic.Int64 // the loop's clock minus the clock of the bubble; each poll advances it

	mu     sync.Mutex
	turns  []time.Duration                     // the times at which the turns began
	turn   func() (time.Duration, bool, error) // runs a turn; if nil, the next turn is due in an hour
	work   atomic.Int32                        // number of queued operations
	newest atomic.Int64                        // when the newest of them was submitted, or 0
	polls  func(n int) bool                    // reports whether poll n finds an event; nil: none does
	polled int

	handOffs, notified, parks, unparks int
	onHandOff, onNotify                func()
	busy                               bool
}

func (l *fakeLoop) clock() time.Duration { return time.Since(l.start) + time.Duration(l.ahead.Load()) }

func (l *fakeLoop) RunLoopOnce() (time.Duration, bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.turns = append(l.turns, l.clock())
	l.work.Store(0)
	if l.turn != nil {
		return l.turn()
	}
	return l.clock() + time.Hour, false, nil
}

// Arrived counts a poll and advances the loop's clock by a microsecond.
func (l *fakeLoop) Arrived() bool {
	l.ahead.Add(int64(time.Microsecond))
	l.polled++
	return l.polls != nil && l.polls(l.polled)
}

func (l *fakeLoop) Executing() bool { return l.busy }
func (l *fakeLoop) Queued() int     { return int(l.work.Load()) }

func (l *fakeLoop) Submitted() time.Duration { return time.Duration(l.newest.Load()) }

func (l *fakeLoop) Park() bool { l.parks++; return true }
func (l *fakeLoop) Unpark()    { l.unparks++ }

func (l *fakeLoop) HandOff() {
	l.handOffs++
	if l.onHandOff != nil {
		l.onHandOff()
	}
}

func (l *fakeLoop) NotifyPeers() {
	l.notified++
	if l.onNotify != nil {
		l.onNotify()
	}
}

// nextTurns sets the function that the following turns execute. If it is nil, the turns do nothing.
func (l *fakeLoop) nextTurns(turn func() (time.Duration, bool, error)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.turn = turn
}

// took returns the times at which turns have begun since took was called last.
func (l *fakeLoop) took() []time.Duration {
	synctest.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	turns := l.turns
	l.turns = nil
	return turns
}

// scheduled creates a scheduler in a synctest bubble, executes its method run in another goroutine, and calls
// test. Then it ends the scheduler and checks that run has returned the error want.
func scheduled(t *testing.T, budget time.Duration, want error,
	test func(t *testing.T, s *Scheduler, l *fakeLoop)) {
	synctest.Test(t, func(t *testing.T) {
		l := &fakeLoop{start: time.Now()}
		stop := make(chan struct{})
		s := New(l, l.clock, stop)
		limits := Limits{backgroundBudget: budget, driveBudget: budget,
			backgroundPace: pace{1 << 30, 1 << 30}, drivePace: pace{1 << 30, 1 << 30}}
		s.Poll(l, limits)
		var err error
		var running sync.WaitGroup
		running.Go(func() { err = s.Run() })
		if got := l.took(); len(got) != 1 {
			t.Fatalf("turns at %v at the start, want one", got)
		}
		test(t, s, l)
		close(stop)
		s.Notify()
		running.Wait()
		if !errors.Is(err, want) {
			t.Errorf("run returned %v, want %v", err, want)
		}
	})
}

// isAt reports whether a turn that was due at the time due has begun on time. at is the time at which it
// began. isAt allows for the polls since the scheduler last read the clock.
func isAt(at, due time.Duration) bool { return at >= due && at <= due+pollsPerClock*time.Microsecond }

const pollBudget = 50 * time.Microsecond

// If a parked scheduler is notified, or if a turn is due, it runs a turn in the background. Several
// notifications before that turn cause no further turn.
func TestSchedulerParks(t *testing.T) {
	scheduled(t, pollBudget, outcome.ErrClosed, func(t *testing.T, s *Scheduler, l *fakeLoop) {
		if !s.parked.Load() || l.parks == 0 {
			t.Error("an idle scheduler is not parked")
		}
		for range 3 {
			time.Sleep(time.Second)
			at := l.clock()
			s.Notify()
			s.Notify()
			if got := l.took(); !slices.Equal(got, []time.Duration{at}) {
				t.Errorf("notified at %v: turns at %v", at, got)
			}
		}
		// A notification that comes after the last poll, while the loop is parking, is not lost.
		l.onHandOff = func() {
			l.onHandOff = nil
			s.Notify()
		}
		s.Notify()
		if got := l.took(); len(got) != 2 {
			t.Errorf("turns at %v, want one more for the notification while it was parking", got)
		}
		due := l.clock() + time.Minute
		l.nextTurns(func() (time.Duration, bool, error) { return due, false, nil })
		s.Notify()
		l.took()
		l.nextTurns(nil)
		time.Sleep(2 * time.Minute)
		if got := l.took(); len(got) != 1 || !isAt(got[0], due) {
			t.Errorf("turns at %v, want one at %v, when it is due", got, due)
		}
		if l.unparks == 0 {
			t.Error("the mesh was not notified that the scheduler polls again")
		}
	})
}

// In the background, a busy rank polls for its budget and an idle rank polls once. If a poll finds an event,
// a turn runs at once.
func TestSchedulerPolls(t *testing.T) {
	scheduled(t, pollBudget, outcome.ErrClosed, func(t *testing.T, s *Scheduler, l *fakeLoop) {
		for _, busy := range []bool{false, true} {
			want := 1
			if busy {
				want = int(pollBudget / time.Microsecond)
			}
			l.polled = 0
			l.nextTurns(func() (time.Duration, bool, error) {
				if busy {
					s.Extend()
				}
				return l.clock() + time.Hour, false, nil
			})
			s.Notify()
			time.Sleep(time.Millisecond)
			l.took()
			if l.polled < want || l.polled > want+pollsPerClock {
				t.Errorf("busy %v: %d polls, want %d", busy, l.polled, want)
			}
		}
		// If a poll finds an event, a turn runs at once.
		l.polls = func(n int) bool { return n == 10 }
		l.polled = 0
		at := l.clock()
		s.Notify()
		time.Sleep(time.Millisecond)
		if got := l.took(); len(got) != 2 || got[1] != at+10*time.Microsecond {
			t.Errorf("turns at %v, want them at %v and 10us later", got, at)
		}
	})
}

// With onlyAfterDrive, BackgroundThreadLoop polls for its budget after a drive, but only once after a turn of
// its own.
func TestSchedulerPollsOnlyAfterDrive(t *testing.T) {
	scheduled(t, pollBudget, outcome.ErrClosed, func(t *testing.T, s *Scheduler, l *fakeLoop) {
		s.onlyAfterDrive = true
		l.nextTurns(func() (time.Duration, bool, error) {
			s.Extend()
			return l.clock() + time.Hour, false, nil
		})
		polls := func() int {
			l.polled = 0
			s.Notify()
			time.Sleep(time.Millisecond)
			l.took()
			return l.polled
		}
		if got := polls(); got != 1 {
			t.Errorf("%d polls after a turn, want 1", got)
		}
		s.Drive(t.Context(), controller.Never, func() bool { return true })
		if got, want := polls(), int(pollBudget/time.Microsecond); got < want || got > want+pollsPerClock {
			t.Errorf("%d polls after a drive, want %d", got, want)
		}
		if got := polls(); got != 1 {
			t.Errorf("%d polls later, want 1", got)
		}
	})
}

// A driver runs turns until its operation is done, its context ends, it is its deadline, or nothing arrives
// within the budget. Then the scheduler is parked again, and a notification causes a turn in
// BackgroundThreadLoop. When the epoch is over, drive returns at once.
func TestSchedulerDrives(t *testing.T) {
	over := errors.New("over")
	scheduled(t, pollBudget, over, func(t *testing.T, s *Scheduler, l *fakeLoop) {
		canceled, cancel := context.WithCancel(t.Context())
		cancel()
		no := func() bool { return false }
		for name, c := range map[string]struct {
			ctx   context.Context
			limit time.Duration
			done  func() bool
			want  time.Duration
		}{
			"done": {t.Context(), time.Hour, func() bool { return l.polled >= 7 },
				7 * time.Microsecond},
			"canceled": {canceled, time.Hour, no, 0},
			"deadline": {t.Context(), 12 * time.Microsecond, no, 12 * time.Microsecond},
			"late":     {t.Context(), 0, no, 0},
			"budget":   {t.Context(), time.Hour, no, pollBudget},
		} {
			l.polled, l.handOffs = 0, 0
			at := l.clock()
			s.Drive(c.ctx, at+c.limit, c.done)
			if took := l.clock() - at; took < c.want || took > c.want+pollsPerClock*time.Microsecond {
				t.Errorf("%s: drove for %v, want %v", name, took, c.want)
			}
			if l.handOffs == 0 || !s.parked.Load() {
				t.Errorf("%s: %d hand-offs, parked %v after driving", name, l.handOffs, s.parked.Load())
			}
			l.took()
			s.Notify()
			if got := l.took(); len(got) != 1 {
				t.Errorf("%s: turns at %v after a notification, want one", name, got)
			}
		}
		l.nextTurns(func() (time.Duration, bool, error) { return 0, true, over })
		s.Drive(t.Context(), controller.Never, func() bool { return false })
		before := len(l.took())
		s.Drive(t.Context(), controller.Never, func() bool { t.Error("a driver waits after the loop is over"); return true })
		if got := l.took(); len(got) > 0 || before != 1 {
			t.Errorf("%d turns and then turns at %v, want one turn, which ends the loop", before, got)
		}
	})
}

// After a driver has returned, BackgroundThreadLoop runs a turn when the next turn is due according to the
// driver's last turn. It also runs a turn if it was woken while the driver held the lock.
func TestSchedulerHandsOff(t *testing.T) {
	scheduled(t, pollBudget, outcome.ErrClosed, func(t *testing.T, s *Scheduler, l *fakeLoop) {
		due := l.clock() + time.Second
		l.nextTurns(func() (time.Duration, bool, error) { return due, false, nil })
		s.Drive(t.Context(), controller.Never, func() bool { return true })
		l.took()
		l.nextTurns(nil)
		time.Sleep(time.Minute)
		if got := l.took(); !slices.ContainsFunc(got, func(at time.Duration) bool { return isAt(at, due) }) {
			t.Errorf("turns at %v, want one at %v, which a driver's turn has returned", got, due)
		}

		// Here the timer fires while a driver holds the lock: when the driver polls, or when it is about to
		// park. The next turn is due when the driver's turn says so.
		pass := func() { time.Sleep(3 * soon) } // this takes no real time in the bubble
		for _, parking := range []bool{false, true} {
			early, late := l.clock()+2*soon, l.clock()+time.Second
			l.nextTurns(func() (time.Duration, bool, error) { return early, false, nil })
			s.Notify()
			l.took()
			l.nextTurns(func() (time.Duration, bool, error) { return late, false, nil })
			if parking {
				l.onNotify = func() {
					l.onNotify = nil
					pass()
				}
			}
			s.Drive(t.Context(), controller.Never, func() bool {
				if !parking {
					pass()
				}
				return true
			})
			l.nextTurns(nil)
			time.Sleep(time.Minute)
			if got := l.took(); len(got) != 2 || got[1] < late || got[1] > late+10*soon {
				t.Errorf("parking %v: turns at %v, want one by the driver and one at %v", parking, got, late)
			}
		}

		// Here another goroutine calls notify after the driver has parked and before it unlocks.
		l.onNotify = func() {
			l.onNotify = nil
			s.Notify()
			synctest.Wait() // BackgroundThreadLoop has found the lock held
		}
		s.Drive(t.Context(), controller.Never, func() bool { return true })
		if got := l.took(); len(got) != 2 {
			t.Errorf("notified while parking: turns at %v, want one by the driver and one at once", got)
		}
	})
}

// If a driver has ended the epoch, and BackgroundThreadLoop finds the lock held by another driver, it returns
// nevertheless.
func TestSchedulerEndsAfterDrivers(t *testing.T) {
	over := errors.New("over")
	scheduled(t, pollBudget, over, func(t *testing.T, s *Scheduler, l *fakeLoop) {
		s.mu.Lock()
		s.end(over)
		s.wakeBackground()
		synctest.Wait() // BackgroundThreadLoop has found the lock held
		s.mu.Unlock()
		s.Drive(t.Context(), controller.Never, func() bool { return true })
		synctest.Wait()
		if !s.mu.TryLock() {
			t.Fatal("the lock is held")
		}
		s.mu.Unlock()
		if s.missed.Load() {
			t.Error("BackgroundThreadLoop does not know that the epoch is over")
		}
	})
}

// If the next turn is due soon, the mesh need not notify a driver that parks, nor BackgroundThreadLoop.
func TestSchedulerParksForAMoment(t *testing.T) {
	scheduled(t, pollBudget, outcome.ErrClosed, func(t *testing.T, s *Scheduler, l *fakeLoop) {
		for _, c := range []struct {
			due   time.Duration
			parks int
		}{{soon / 2, 0}, {2 * soon, 1}} {
			parks, unparks := l.parks, l.unparks
			l.nextTurns(func() (time.Duration, bool, error) { return l.clock() + c.due, false, nil })
			s.Drive(t.Context(), controller.Never, func() bool { return true })
			if got := l.parks - parks; got != c.parks || !s.parked.Load() {
				t.Errorf("next turn in %v: parked %d times, want %d", c.due, got, c.parks)
			}
			l.nextTurns(nil)
			if got := l.took(); len(got) != 1 {
				t.Errorf("next turn in %v: turns at %v, want one by the driver", c.due, got)
			}
			time.Sleep(time.Minute)
			if got := l.took(); len(got) != 1 {
				t.Errorf("next turn in %v: turns at %v, want one when it is due", c.due, got)
			}
			if got, want := l.unparks-unparks, 1+c.parks; got != want {
				t.Errorf("next turn in %v: unparked %d times, want %d", c.due, got, want)
			}
		}
	})
}

// If BackgroundThreadLoop is polling, a driver takes the lock from it. A second driver returns at once, and
// the first driver runs a turn for it.
func TestSchedulerTakesTheLock(t *testing.T) {
	scheduled(t, time.Hour, outcome.ErrClosed, func(t *testing.T, s *Scheduler, l *fakeLoop) {
		var turns atomic.Int32
		l.nextTurns(func() (time.Duration, bool, error) {
			turns.Add(1)
			s.Extend()
			return l.clock() + 2*time.Hour, false, nil
		})
		var end atomic.Bool
		l.polls = func(int) bool { // no poll finds an event during the test
			runtime.Gosched()
			l.ahead.Store(0)
			return false
		}
		until := func(what string, holds func() bool) {
			for n := 0; !holds(); n++ {
				if n == 100_000_000 {
					panic(what)
				}
				runtime.Gosched()
			}
		}
		s.Notify()
		until("BackgroundThreadLoop polls", func() bool {
			return turns.Load() == 1 && s.background.Load() &&
				!s.parked.Load()
		})
		var driver sync.WaitGroup
		driver.Go(func() { s.Drive(t.Context(), controller.Never, end.Load) })
		until("the driver has the lock", func() bool {
			return turns.Load() == 2 && !s.background.Load() &&
				!s.wanted.Load()
		})
		if s.parked.Load() {
			t.Error("parked while a driver polls")
		}
		s.Drive(t.Context(), controller.Never, func() bool { t.Error("a second driver waits"); return true })
		until("a turn for the second driver", func() bool { return turns.Load() == 3 })
		end.Store(true)
		driver.Wait()
		if !s.parked.Load() {
			t.Error("not parked after the driver")
		}
	})
}

// If a rank finds something to do at almost every poll, it still notifies parked peers of the frames that it
// has sent. It does so once, after pollsPerNotify polls or when the poll budget has passed.
func TestSchedulerNotifiesPeers(t *testing.T) {
	l := &fakeLoop{start: time.Now()}
	s := New(l, l.clock, nil)
	s.Poll(l, Limits{backgroundBudget: time.Hour})
	polls := func(n int) {
		for range n {
			s.pending.Store(true)
			if !s.await(&pace{1, 1}, func() bool { return false }) {
				t.Fatal("await did not see a notification")
			}
		}
	}
	want := func(when string, n int) {
		t.Helper()
		if l.notified != n {
			t.Errorf("%s: peers were notified %d times, want %d", when, l.notified, n)
		}
		l.notified = 0
	}
	polls(2 * pollsPerNotify)
	want("nothing was sent", 0)
	for range 3 {
		s.Sent()
		polls(pollsPerNotify - 1)
		s.Sent() // this must not delay the notification of earlier frames
		want("before a peer has had time to poll", 0)
		polls(1)
		want("after that", 1)
		polls(2 * pollsPerNotify)
		want("nothing more was sent", 0)
	}
	s.Sent()
	polls(1)
	s.now += time.Hour
	polls(1)
	want("in an hour", 1)
}

// If oversubscribed is set, notifyLater defers the turn until no more operations are queued, but for at most
// deferralPeriods periods. flush and drive end the deferral at once.
func TestSchedulerDefers(t *testing.T) {
	scheduled(t, pollBudget, outcome.ErrClosed, func(t *testing.T, s *Scheduler, l *fakeLoop) {
		s.oversubscribed = true
		queue := func() {
			l.work.Add(1)
			s.NotifyLater()
		}
		at := l.clock()
		queue()
		time.Sleep(deferralPeriod / 2)
		queue()
		time.Sleep(time.Second)
		if got := l.took(); !slices.Equal(got, []time.Duration{at + 2*deferralPeriod}) {
			t.Errorf("queued at %v: turns at %v, want one after two periods", at, got)
		}
		at = l.clock()
		for range 4 * deferralPeriods {
			queue()
			time.Sleep(deferralPeriod / 2)
		}
		time.Sleep(time.Second)
		if got := l.took(); len(got) < 2 || got[0] != at+deferralPeriods*deferralPeriod {
			t.Errorf("queued from %v on: turns at %v, want the first after %d periods", at, got,
				deferralPeriods)
		}
		at = l.clock()
		queue()
		s.Flush()
		if got := l.took(); !slices.Equal(got, []time.Duration{at}) {
			t.Errorf("flushed at %v: turns at %v", at, got)
		}
		at = l.clock()
		queue()
		s.Drive(t.Context(), controller.Never, func() bool { return true })
		if got := l.took(); len(got) == 0 || got[0] != at {
			t.Errorf("driven at %v: turns at %v", at, got)
		}
		time.Sleep(time.Second)
		if got := l.took(); len(got) > 1 { // BackgroundThreadLoop may run a turn to set its timer
			t.Errorf("turns at %v after the drive, want at most one", got)
		}
		s.oversubscribed = false
		at = l.clock()
		queue()
		if got := l.took(); !slices.Equal(got, []time.Duration{at}) {
			t.Errorf("with a processor to spare, queued at %v: turns at %v", at, got)
		}
	})
}

// newPollLimits computes the right budgets and paces from the numbers of processes, cores and threads.
func TestPollLimits(t *testing.T) {
	for _, test := range []struct {
		name                  string
		budget                time.Duration
		pinned, kernel        bool
		forClient             bool
		ranks, cores, threads int
		want                  Limits
	}{
		{"room for all", 0, false, false, false, 2, 16, 16, Limits{backgroundBudget: defaultPoll,
			driveBudget: defaultDrive, backgroundPace: pace{16, 64}, drivePace: pace{16, 256}}},
		{"polling enters the kernel", 0, false, true, false, 2, 16, 16,
			Limits{backgroundBudget: defaultPoll, driveBudget: defaultDrive, backgroundPace: pace{1, 64},
				drivePace: pace{1, 256}}},
		{"room for one thread each", 0, false, false, false, 2, 4, 1,
			Limits{backgroundBudget: defaultPoll, driveBudget: defaultDrive, backgroundPace: pace{16, 1},
				drivePace: pace{16, 256}}},
		{"alone on one processor", 0, false, false, false, 1, 1, 1, Limits{backgroundBudget: defaultPoll,
			driveBudget: defaultDrive, backgroundPace: pace{1, 1}, drivePace: pace{16, 256}}},
		{"as many ranks as processors", 0, false, false, false, 2, 2, 2,
			Limits{backgroundBudget: 2 * defaultPoll, driveBudget: defaultDrive,
				backgroundPace: pace{1, 4}, oversubscribed: true, drivePace: pace{16, 256}}},
		{"the same with a thread each", 0, false, false, false, 2, 2, 1,
			Limits{backgroundBudget: defaultPoll, driveBudget: defaultDrive, backgroundPace: pace{1, 1},
				drivePace: pace{16, 256}}},
		{"more ranks than processors", 0, false, false, false, 4, 2, 2,
			Limits{backgroundBudget: 4 * defaultPoll, driveBudget: 4 * defaultPoll,
				backgroundPace: pace{1, 1}, oversubscribed: true, crowded: true,
				drivePace: pace{1, 64}}},
		{"the program is another process", 0, false, false, true, 4, 2, 2,
			Limits{backgroundBudget: 4 * defaultPoll, driveBudget: 4 * defaultPoll,
				backgroundPace: pace{1, 1}, oversubscribed: true, crowded: true, onlyAfterDrive: true,
				drivePace: pace{1, 64}}},
		{"the same with room for all", 0, false, false, true, 4, 16, 16,
			Limits{backgroundBudget: defaultPoll, driveBudget: defaultDrive, backgroundPace: pace{16, 64},
				drivePace: pace{16, 256}}},
		{"pinned", 0, true, false, false, 2, 16, 16, Limits{backgroundBudget: defaultPoll,
			driveBudget: defaultDrive, backgroundPace: pace{1, 4}, drivePace: pace{16, 256}, pinned: true}},
		{"a budget of its own", time.Hour, false, false, false, 4, 2, 2,
			Limits{backgroundBudget: time.Hour, driveBudget: time.Hour, backgroundPace: pace{1, 1},
				oversubscribed: true, crowded: true, drivePace: pace{1, 64}}},
		{"no budget", -1, false, false, false, 2, 16, 16, Limits{backgroundPace: pace{16, 64},
			drivePace: pace{16, 256}}},
	} {
		if got := NewLimits(test.budget, test.pinned, test.kernel, test.forClient, test.ranks, test.cores,
			test.threads); got != test.want {
			t.Errorf("%s: got %+v, want %+v", test.name, got, test.want)
		}
	}
}

// The first turn of a driver begins when the newest operation was submitted. If an earlier turn began later,
// if no operation waits for a turn, or if its notification was deferred, the driver reads the clock.
func TestDriveAfterSubmission(t *testing.T) {
	scheduled(t, pollBudget, outcome.ErrClosed, func(t *testing.T, s *Scheduler, l *fakeLoop) {
		for _, c := range []struct {
			newest          time.Duration // counted from the last turn
			deferred, reads bool
		}{{time.Second, false, false}, {time.Second, true, true}, {-1, false, true}, {0, false, true}} {
			l.ahead.Add(int64(2 * time.Second))
			want := l.clock()
			if l.newest.Store(int64(s.now + c.newest)); !c.reads {
				want = s.now + c.newest
			}
			s.deferred.armed.Store(c.deferred)
			s.Drive(t.Context(), controller.Never, func() bool { return true })
			if s.now != want {
				t.Errorf("%+v: the turn began at %v, want %v", c, s.now, want)
			}
		}
	})
}
