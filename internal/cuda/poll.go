//go:build nccl && cgo

package cuda

import (
	"context"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// These are the times of Poll. While it spins it learns of the end at once, but uses a core.
const (
	spinning   = 100 * time.Microsecond
	longestNap = 200 * time.Microsecond
)

// Poll calls f until it returns true or an error. If ctx ends before, Poll returns the cause. It calls f
// without a pause at first, and later every 1/8 of the time that it has waited, at most every 200 us.
func Poll(ctx context.Context, f func() (done bool, err error)) error {
	var begun time.Time
	for {
		if done, err := f(); done || err != nil {
			return err
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		now := time.Now()
		if begun.IsZero() {
			begun = now
		}
		if waited := now.Sub(begun); waited < spinning {
			runtime.Gosched()
		} else {
			nap(min(waited/8, longestNap))
		}
	}
}

// nap blocks the thread for d. A timer of the Go runtime would take a millisecond if all goroutines wait
// (golang/go#53824).
func nap(d time.Duration) {
	t := unix.NsecToTimespec(int64(d))
	_ = unix.Nanosleep(&t, nil) // a signal may end it early
}
