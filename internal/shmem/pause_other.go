//go:build !amd64 && !arm64

package shmem

import "sync/atomic"

// Pause takes a short time that is proportional to n.
func Pause(n int) {
	for range n {
		spent.Load()
	}
}

// Fence executes a full memory barrier, by an atomic write.
func Fence() { spent.Add(1) }

// spent is a variable that Pause reads and Fence writes. Its value has no meaning.
var spent atomic.Uint32
