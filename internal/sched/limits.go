package sched

import "time"

const (
	// defaultPoll is about the time that it takes to wake a goroutine, including the work of the goroutine
	// that wakes it.
	defaultPoll = 50 * time.Microsecond
	// defaultDrive is the poll budget of a driver that has a processor of its own. Another rank may need this
	// time to queue the tensors of a training step, so it may be late by that much.
	defaultDrive = time.Millisecond
)

// Limits determines for how long and in which way the holder of the lock polls before it parks.
type Limits struct {
	backgroundBudget, driveBudget time.Duration // 0 disables polling
	backgroundPace, drivePace     pace
	// pinned is set if the loop is bound to a thread, so that only another thread can run a lane.
	pinned bool
	// oversubscribed is set if polling would take the processor away from lanes that execute.
	oversubscribed bool
	// crowded is set if there are more processes than cores.
	crowded bool
	// onlyAfterDrive is set if BackgroundThreadLoop polls only for one budget after the last turn of a
	// driver. Turns of BackgroundThreadLoop itself do not extend this time.
	onlyAfterDrive bool
}

// pace determines how often a goroutine that polls yields its processor.
type pace struct {
	pollsPerYield   int // number of polls between two yields to other threads
	pollsPerGosched int // number of polls between two yields to other goroutines
}

// NewLimits returns the limits for one of several processes on a host. processes is the number of
// processes, and cores the number of processor cores. threads is the number of threads on which this process
// runs goroutines. budget is the poll budget, 0 for a default,
// or negative to disable polling. pinned is set if the loop is bound to processors, and entersKernel
// if polling makes system calls. The paces were chosen because they gave the shortest completion times in
// measurements.
//
// forClient is set if one of the other processes is the program that submits the operations. If that program
// has no processor of its own, BackgroundThreadLoop polls only for one budget after a driver's last turn:
// while the program waits, it drives the loop, and while it computes, it needs the processor.
func NewLimits(budget time.Duration, pinned, entersKernel, forClient bool, processes, cores,
	threads int) Limits {
	// Each process can keep two threads busy, because the loop polls while a lane or the caller runs. If the
	// caller drives the loop, only one thread is busy.
	busy := processes * min(2, threads)
	// The kernel may put two threads on one processor even if another processor is idle, so a polling thread
	// always yields now and then. A yield to another goroutine may wake a thread, which then searches for
	// work. That is expensive if this thread has no processor of its own.
	l := Limits{pinned: pinned, oversubscribed: busy > cores, crowded: processes > cores,
		onlyAfterDrive: forClient && processes > cores, backgroundPace: pace{16, 64},
		drivePace: pace{16, 256}}
	if pinned || busy >= cores {
		l.backgroundPace = pace{1, 4}
	}
	if threads == 1 || processes > cores {
		l.backgroundPace.pollsPerGosched = 1 // there is no other thread, or it gets a processor late
	}
	if processes > cores {
		l.drivePace = pace{1, 64}
	}
	if entersKernel {
		l.backgroundPace.pollsPerYield, l.drivePace.pollsPerYield = 1, 1
	}
	l.backgroundBudget = max(budget, 0)
	if budget == 0 {
		// A thread that yields waits until it runs again, and the wait grows with the number of busy threads
		// per core. So the budget grows with that number too.
		l.backgroundBudget = defaultPoll * time.Duration((busy+cores-1)/cores)
	}
	l.driveBudget = l.backgroundBudget
	if budget == 0 && processes <= cores {
		l.driveBudget = max(l.backgroundBudget, defaultDrive)
	}
	return l
}
