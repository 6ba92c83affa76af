//go:build !amd64 && !arm64

package shmem

import "sync/atomic"

// Pause takes a short time, in proportion to n.
func Pause(n int) {
	for range n {
		spent.Load()
	}
}

// Fence executes a full memory barrier, by an atomic write.
func Fence() { spent.Add(1) }

// spent only gives Pause a variable to read and Fence a variable to write. Its value has no meaning.
var spent atomic.Uint32
