//go:build amd64 || arm64

package shmem

// Pause executes the processor's pause instruction n times, for a caller that polls a word. Each instruction
// takes 10 to 150 cycles on amd64, and fewer on arm64. If n <= 0, Pause does nothing.
//
//go:noescape
func Pause(n int)

// Fence executes a full memory barrier: no load after Fence is executed before all processors can see the
// stores that come before Fence. Operations of sync/atomic are ordered without Fence. It is needed for
// ordinary loads and stores near them, and for non-temporal stores.
//
//go:noescape
func Fence()
