package shmem

import (
	"math/rand/v2"
	"runtime"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Yield lets another thread run on this core, if one is ready. Unlike runtime.Gosched, it keeps the P of the
// Go scheduler, so no other goroutine runs on that P in the meantime.
func Yield() { _, _, _ = syscall.RawSyscall(syscall.SYS_SCHED_YIELD, 0, 0, 0) }

const (
	// switchTime is the time of a yield from which on it has probably run another thread. Such a yield takes
	// at least 1.5 us, and one that runs no other thread about 0.5 us. If the latter take longer on a
	// machine, threads move once in longestPause, which costs little.
	switchTime = 1200 * time.Nanosecond
	// A thread moves after at least minSwitches and less than maxSwitches yields in a row that each ran
	// another thread. The number is random, because two threads that share a core count the same yields
	// and would otherwise move together.
	minSwitches, maxSwitches = 16, 48
	// firstPause is the least time between two moves. After each move the time doubles, up to longestPause,
	// so that moves cost nothing if all cores are busy. It is firstPause again when a move has helped: when
	// helpedYields yields in a row have run no other thread.
	firstPause   = 2 * time.Millisecond
	longestPause = time.Second
	helpedYields = 64
)

// A Yielder yields the core of a thread that waits for other processes, and moves the thread to another core
// if it shares its core with one of them. Its zero value is ready for use. Only one goroutine at a time may
// use it.
//
// The kernel often puts a thread that was woken on the core of the thread that has woken it. If these two
// wait for each other in turn, only one of them is ready to run at any time. So the kernel never separates
// them, even if other cores are idle, and everything they do takes two to three times as long.
type Yielder struct {
	// Stay is set if there are more waiting threads than cores, so that some of them must share a core. The
	// thread then never moves.
	Stay bool

	switches  int // the number of the last yields in a row that ran another thread
	alone     int // the number of the last yields in a row that ran no other thread
	limit     int // the number of switches after which the thread moves
	moved     time.Time
	pause     time.Duration
	mayMoveAt time.Time
}

// Yield does the same as the function Yield. If the last yields all ran another thread, it also moves the
// calling thread to another core. The set of cores that the thread may use is afterwards the same as before.
// On a kernel with more than 1024 cores, the thread does not move.
func (y *Yielder) Yield() {
	if y.Stay {
		Yield()
		return
	}
	began := time.Now()
	Yield()
	if took := time.Since(began); y.note(took, began.Add(took)) {
		move()
	}
}

// note records a yield that has ended at the time now. It reports whether the thread must move.
func (y *Yielder) note(took time.Duration, now time.Time) bool {
	if took < switchTime {
		y.switches = 0
		if y.alone++; y.alone == helpedYields && y.pause > 0 {
			y.pause, y.mayMoveAt = 0, y.moved.Add(firstPause)
		}
		return false
	}
	y.alone = 0
	if y.switches == 0 {
		y.limit = minSwitches + rand.IntN(maxSwitches-minSwitches)
	}
	y.switches++
	if y.switches < y.limit || now.Before(y.mayMoveAt) {
		return false
	}
	y.pause = min(max(2*y.pause, firstPause), longestPause)
	y.switches, y.moved, y.mayMoveAt = 0, now, now.Add(y.pause)
	return true
}

// move moves the calling thread to another core, if it may use one. The kernel chooses an idle core, if there
// is one.
func move() {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var core uint32
	if _, _, errno := unix.RawSyscall(unix.SYS_GETCPU, uintptr(unsafe.Pointer(&core)), 0, 0); errno != 0 {
		return
	}
	var allowed unix.CPUSet
	if unix.SchedGetaffinity(0, &allowed) != nil {
		return // the kernel supports more cores than a CPUSet has
	}
	others := allowed
	others.Clear(int(core))
	if others.Count() == 0 || unix.SchedSetaffinity(0, &others) != nil {
		return
	}
	// The thread runs on one of the other cores now, which may be busy. The kernel looks for an idle core
	// when a thread wakes up.
	sleep := unix.Timespec{Nsec: 1}
	_, _, _ = unix.RawSyscall(unix.SYS_NANOSLEEP, uintptr(unsafe.Pointer(&sleep)), 0, 0)
	// This was the set before. The kernel refuses it only if the cpuset of the process has changed meanwhile,
	// and has then set the thread's cores itself.
	_ = unix.SchedSetaffinity(0, &allowed)
}
