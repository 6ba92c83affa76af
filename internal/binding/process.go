package binding

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"
)

// Allowed returns the CPUs that this process may use. This takes the cpusets of its cgroups into account.
func Allowed() (CPUs, error) {
	set, err := setOf(os.Getpid())
	if err != nil {
		return nil, err
	}
	var c CPUs
	for cpu := 0; len(c) < set.Count(); cpu++ {
		if set.IsSet(cpu) {
			c = append(c, cpu)
		}
	}
	return c, nil
}

// setOf returns the CPUs that a thread may use, or the calling thread if tid is 0.
func setOf(tid int) (set unix.CPUSet, err error) {
	if err := unix.SchedGetaffinity(tid, &set); err != nil {
		return set, fmt.Errorf("read the set of CPUs that a thread may use: %w", err)
	}
	return set, nil
}

func (c CPUs) set() (set unix.CPUSet) {
	for _, cpu := range c {
		set.Set(cpu)
	}
	return set
}

// Start calls start in a thread that is bound to c. A process that start makes inherits this. Afterwards the
// thread may use the same CPUs as before.
func Start(c CPUs, start func() error) error {
	runtime.LockOSThread()
	before, err := setOf(0)
	if err == nil {
		set := c.set()
		err = unix.SchedSetaffinity(0, &set)
	}
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("bind to CPUs %s: %w", c, err)
	}
	err = start()
	if unix.SchedSetaffinity(0, &before) == nil {
		runtime.UnlockOSThread() // otherwise the thread ends together with the goroutine
	}
	return err
}

// Process binds this process to c: all its threads, except those that the program has bound to other CPUs
// than the process. Threads that are made later inherit the CPUs of the thread that makes them. undo lets the
// threads use the same CPUs as before, except those that the program has bound since.
func Process(c CPUs) (undo func() error, err error) {
	before, err := setOf(os.Getpid())
	if err != nil {
		return nil, err
	}
	set := c.set()
	undo = func() error { return change(set, before) }
	if err := change(before, set); err != nil {
		return nil, errors.Join(fmt.Errorf("bind this process to CPUs %s: %w", c, err), undo())
	}
	return undo, nil
}

// change gives each thread of this process that may use the CPUs from the CPUs to.
func change(from, to unix.CPUSet) error {
	if from == to {
		return nil
	}
	// A thread that has not been changed yet may make another one meanwhile.
	done := make(map[int]bool)
	for changed := true; changed; {
		changed = false
		threads, err := os.ReadDir("/proc/self/task")
		if err != nil {
			return err
		}
		for _, t := range threads {
			tid, err := strconv.Atoi(t.Name())
			if err != nil {
				return err
			}
			if done[tid] {
				continue
			}
			if is, err := setOf(tid); errors.Is(err, unix.ESRCH) || err == nil && is != from {
				continue // the thread has ended, or is bound to other CPUs
			} else if err != nil {
				return err
			}
			if err := unix.SchedSetaffinity(tid, &to); err == nil {
				changed, done[tid] = true, true
			} else if !errors.Is(err, unix.ESRCH) {
				return err
			}
		}
	}
	return nil
}
