package shm

import (
	"sync/atomic"
)

// PretendToCome writes what a rank does that comes to its first operation, of one tensor of numBytes in an arena, after
// change has changed the table.
func PretendToCome(segment []byte, numBytes int64, chunk uint32, change func(table []byte)) {
	l := layout{extents: []extent{{end: numBytes, in: place{chunk: chunk}, out: place{chunk: chunk}}}}
	l.write(tableOf(segment, 0))
	change(tableOf(segment, 0))
	atomic.StoreUint64(word(segment, progressAt), 1)
}

// PretendToHaveDone writes what a rank has written at the end of such an operation, and that it gave it up, if it did.
func PretendToHaveDone(segment []byte, numBytes int64, chunk uint32, gaveUp bool) {
	if gaveUp {
		atomic.StoreUint32(flag(segment, abortAt), 1)
	}
	PretendToCome(segment, numBytes, chunk, func([]byte) {})
	atomic.StoreUint64(word(segment, progressAt), 1000)
}
