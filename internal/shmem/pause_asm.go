//go:build amd64 || arm64

package shmem

// Pause executes the processor's pause instruction n times, for a caller that polls a word. Each takes 10 to
// 150 cycles on amd64, and fewer on arm64. If n <= 0, Pause does nothing.
//
//go:noescape
func Pause(n int)

// Fence executes a full memory barrier: all processors see the stores before it before any load after it is
// executed. Operations of sync/atomic are in one order without it. Fence is for ordinary loads and stores
// near them, and for non-temporal stores.
//
//go:noescape
func Fence()
