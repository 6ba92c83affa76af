package shmem

import (
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// opWait and opWake are operations of futex(2), without FUTEX_PRIVATE_FLAG.
const (
	opWait = 0
	opWake = 1
)

// maxWake is the maximum number of waiters that Wake wakes. The kernel counts waiters in an int32, so this
// means all waiters.
const maxWake = 1<<31 - 1

// Wait sleeps until Wake is called for addr, but at most for d. If *addr is not val or if d is not positive,
// Wait returns at once. It may also return early (a spurious wake-up). While Wait sleeps, it occupies a
// thread but not a P of the Go scheduler.
func Wait(addr *uint32, val uint32, d time.Duration) {
	if d <= 0 {
		return
	}
	ts := unix.NsecToTimespec(int64(d))
	// The error is ignored. It means that the word is not val, that the time is up, or that a signal has
	// arrived. In every case the caller checks the word again.
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(addr)), opWait, uintptr(val),
		uintptr(unsafe.Pointer(&ts)), 0, 0)
}

// Wake wakes all threads that wait for addr, in all processes that map its page. It never sleeps. It costs a
// system call even if no thread waits.
func Wake(addr *uint32) {
	// An error is possible only if the address is not mapped, and then no thread waits.
	_, _, _ = unix.RawSyscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(addr)), opWake, maxWake, 0, 0, 0)
}
