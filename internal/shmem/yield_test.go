package shmem

import (
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// yieldDeadline is far longer than a thread needs to move, also on a busy machine.
const yieldDeadline = time.Minute

// onOneCore calls the functions at the same time, each in a thread of its own. All threads begin on the same
// core, and may use all cores that this process may use. A test fails if a thread may use other cores
// afterwards.
func onOneCore(t *testing.T, functions ...func()) {
	t.Helper()
	var all, first unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		t.Fatal(err)
	}
	if all.Count() < 2 || runtime.GOMAXPROCS(0) < 2 {
		t.Skip("this process may use only one core, so a thread cannot move")
	}
	for core := 0; first.Count() == 0; core++ {
		if all.IsSet(core) {
			first.Set(core)
		}
	}
	var wg sync.WaitGroup
	for _, f := range functions {
		wg.Go(func() {
			runtime.LockOSThread() // and never unlock it, so that the thread ends with the goroutine
			for _, set := range []*unix.CPUSet{&first, &all} {
				if err := unix.SchedSetaffinity(0, set); err != nil {
					t.Error(err)
					return
				}
			}
			f()
			var after unix.CPUSet
			if err := unix.SchedGetaffinity(0, &after); err != nil || after != all {
				t.Errorf("the thread may use the cores %v afterwards, want %v; error %v", after, all, err)
			}
		})
	}
	wg.Wait()
}

// core returns the core on which the calling thread runs.
func core(t *testing.T) (c uint32) {
	t.Helper()
	if _, _, err := unix.RawSyscall(unix.SYS_GETCPU, uintptr(unsafe.Pointer(&c)), 0, 0); err != 0 {
		t.Fatal(err)
	}
	return c
}

func TestMove(t *testing.T) {
	onOneCore(t, func() {
		// The kernel may move the thread back at any time, so one attempt proves nothing.
		for end := time.Now().Add(yieldDeadline); time.Now().Before(end); {
			before := core(t)
			if move(); core(t) != before {
				return
			}
		}
		t.Error("the thread has never run on another core after a move")
	})
}

// TestMoveStaysInside moves a thread that may use only one core, as one of a bound rank.
func TestMoveStaysInside(t *testing.T) {
	onOneCore(t, func() {
		var all, one, after unix.CPUSet
		own := core(t)
		one.Set(int(own))
		if err := errors.Join(unix.SchedGetaffinity(0, &all), unix.SchedSetaffinity(0, &one)); err != nil {
			t.Error(err)
			return
		}
		move()
		if err := unix.SchedGetaffinity(0, &after); err != nil || after != one || core(t) != own {
			t.Errorf("the thread runs on core %d and may use %v, want only %d; error %v", core(t), after, own, err)
		}
		if err := unix.SchedSetaffinity(0, &all); err != nil {
			t.Error(err)
		}
	})
}

// TestYielder lets two threads on one core wait for each other in turn, until one of them moves. As in a
// backend, each thread spins for some time before it yields.
func TestYielder(t *testing.T) {
	var turn atomic.Uint32
	var moved atomic.Bool
	wait := func(me uint32) func() {
		return func() {
			y, end := new(Yielder), time.Now().Add(10*time.Millisecond)
			for !moved.Load() && time.Now().Before(end) {
				if turn.Load()%2 == me {
					turn.Add(1)
				}
				for spun := time.Now(); time.Since(spun) < 2*switchTime; {
				}
				if y.Yield(); !y.moved.IsZero() {
					moved.Store(true)
				}
			}
		}
	}
	// The kernel may separate the threads at any time, so they begin on one core again and again.
	for end := time.Now().Add(yieldDeadline); !moved.Load() && time.Now().Before(end); {
		onOneCore(t, wait(0), wait(1))
	}
	if !moved.Load() {
		t.Errorf("no thread has moved in %d turns", turn.Load())
	}
}

// TestYielderStays yields for as long as a thread would need to move.
func TestYielderStays(t *testing.T) {
	var others atomic.Int32
	y := Yielder{Stay: true}
	onOneCore(t, func() {
		for range 100 * maxSwitches {
			y.Yield()
		}
		others.Store(1)
	}, func() {
		for others.Load() == 0 {
			Yield()
		}
	})
	if y != (Yielder{Stay: true}) {
		t.Errorf("got %+v, want a yielder that has noted nothing", y)
	}
}

// TestYielderPauses checks how often a thread moves if all its yields run other threads.
func TestYielderPauses(t *testing.T) {
	began := time.Unix(1000, 0)
	var y Yielder
	now := began
	next := func() time.Duration { // returns the time until the next move
		for last := now; ; {
			now = now.Add(10 * time.Microsecond)
			if y.note(switchTime, now) {
				return now.Sub(last)
			}
		}
	}
	if first := next(); first < minSwitches*10*time.Microsecond || first >= maxSwitches*10*time.Microsecond {
		t.Errorf("the first move came after %v, want %d to %d yields of 10 us", first, minSwitches, maxSwitches)
	}
	for want := firstPause; want < 4*longestPause; want *= 2 {
		if got := next(); got != min(want, longestPause) {
			t.Errorf("a move came %v after the last one, want %v", got, min(want, longestPause))
		}
	}
	// A few yields that run no other thread do not show that a move has helped.
	alone := func(yields int) {
		for range yields {
			now = now.Add(time.Microsecond)
			y.note(switchTime-1, now)
		}
	}
	for _, yields := range []int{helpedYields - 1, 1} {
		alone(yields)
		if got := next(); got < longestPause-time.Millisecond {
			t.Errorf("after %d yields alone, a move came %v after the last one, want about %v", yields, got,
				longestPause)
		}
	}
	// When a move has helped, the next one need not wait for the end of the long pause.
	alone(helpedYields)
	if got := next(); got > firstPause {
		t.Errorf("after a move that has helped, the next one came %v later, want at most %v", got, firstPause)
	}
	for want := firstPause; want < longestPause; want *= 2 {
		if got := next(); got != want {
			t.Errorf("after that, a move came %v after the last one, want %v", got, want)
		}
	}
}

// TestYielderIsAlone checks that a yield which runs no other thread begins the count again.
func TestYielderIsAlone(t *testing.T) {
	var y Yielder
	for k := range 10 * maxSwitches {
		took := switchTime
		if k%minSwitches == 0 {
			took--
		}
		if y.note(took, time.Unix(1000, 0)) {
			t.Fatalf("the thread moves at yield %d, want no move if at most %d yields in a row run another thread", k,
				minSwitches-1)
		}
	}
}
