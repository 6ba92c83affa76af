package shmem

import (
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// opWait and opWake are operations of futex(2), without FUTEX_PRIVATE_FLAG.
const (
	opWait = 0
	opWake = 1
)

// maxWake is the number of waiters that Wake wakes at most. The kernel counts waiters in an int32, so this is
// all of them.
const maxWake = 1<<31 - 1

// Wait sleeps until Wake is called for addr, but at most for d. If *addr is not val or if d is not positive,
// Wait returns at once. It may also return early for no reason. While it sleeps, it occupies a thread but no
// P of the Go scheduler.
func Wait(addr *uint32, val uint32, d time.Duration) {
	if d <= 0 {
		return
	}
	ts := unix.NsecToTimespec(int64(d))
	// The error does not matter: the word differs, the time is up, or a signal came. In every case the caller
	// checks the word again.
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(addr)), opWait, uintptr(val),
		uintptr(unsafe.Pointer(&ts)), 0, 0)
}

// Wake wakes all threads that wait for addr, in all processes that map its page. It does not sleep. It costs
// a system call even if no thread waits.
func Wake(addr *uint32) {
	// The call can fail only for an address that is not mapped, and then no thread waits.
	_, _, _ = unix.RawSyscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(addr)), opWake, maxWake, 0, 0, 0)
}

// Yield lets another thread of this core run, if one is ready. Unlike runtime.Gosched, it keeps the P of the
// Go scheduler, so no other goroutine runs on that P in the meantime.
func Yield() { _, _, _ = syscall.RawSyscall(syscall.SYS_SCHED_YIELD, 0, 0, 0) }
