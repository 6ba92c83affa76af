//go:build !amd64 && !arm64

package shmem

import "sync/atomic"

// Pause passes a little time, in proportion to n.
func Pause(n int) {
	for range n {
		spent.Load()
	}
}

// Fence is a full memory barrier: an operation of sync/atomic that writes.
func Fence() { spent.Add(1) }

// spent is nobody's: it exists to be touched.
var spent atomic.Uint32
