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

// spent has no meaning. It is a variable that Pause can read and Fence can write.
var spent atomic.Uint32
