//go:build amd64 || arm64

package shmem

// Pause tells the processor n times that the caller waits for a word to change. One costs 10 to 150 cycles of amd64,
// fewer of arm64. n <= 0 does nothing.
//
//go:noescape
func Pause(n int)

// Fence is a full memory barrier: what was stored before is seen by all before anything after it is loaded. Operations
// of sync/atomic are in one order already; Fence is for ordinary loads and stores beside them, and for non-temporal
// stores.
//
//go:noescape
func Fence()
