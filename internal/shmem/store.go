package shmem

import "sync/atomic"

// Store32 stores v in a word of shared memory. A load that follows is not executed before the store, so two
// sides that each store a word and then load the word of the other cannot both miss the store of the other
// (Dekker's algorithm). atomic.StoreUint32 has this property too, but not in a build with the race detector:
// there it is a plain store for memory that Go has not allocated. Without the race detector, both are the
// same instruction on amd64.
func Store32(word *uint32, v uint32) { atomic.SwapUint32(word, v) }

// Store64 does the same as Store32 with a word of 64 bits.
func Store64(word *uint64, v uint64) { atomic.SwapUint64(word, v) }
