package shmem

import (
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Operations of futex(2), without FUTEX_PRIVATE_FLAG.
const (
	opWait = 0
	opWake = 1
)

// maxWake is the number of waiters that one Wake wakes: all of them, since the kernel counts them in an
// int32.
const maxWake = 1<<31 - 1

// Wait sleeps while *addr is val, until a Wake, or for at most d. It returns at once if *addr is not val or d
// is not positive, and may return spuriously. It occupies a thread while it sleeps, but no P of the Go
// scheduler.
func Wait(addr *uint32, val uint32, d time.Duration) {
	if d <= 0 {
		return
	}
	ts := unix.NsecToTimespec(int64(d))
	// The error does not matter (the word differs, the time is up, or a signal came), because in every case
	// the caller checks the word again.
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(addr)), opWait, uintptr(val),
		uintptr(unsafe.Pointer(&ts)), 0, 0)
}

// Wake wakes all threads that wait for addr, in all processes that map its page. It does not sleep. It costs
// a system call even if no thread waits.
func Wake(addr *uint32) {
	// The call can fail only for an address that is not mapped, and then no thread waits.
	_, _, _ = unix.RawSyscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(addr)), opWake, maxWake, 0, 0, 0)
}

// Yield lets another thread of this core run, if one is ready. It keeps the P of the Go scheduler, so
// goroutines of this process do not run on that P meanwhile; runtime.Gosched lets them run.
func Yield() { _, _, _ = syscall.RawSyscall(syscall.SYS_SCHED_YIELD, 0, 0, 0) }
