package shm

import (
	"sync/atomic"
)

// PretendToCome writes the words and the table that a rank writes when it starts its first operation, on one
// tensor of numBytes in an arena. change may change the table before.
func PretendToCome(segment []byte, numBytes int64, chunk uint32, change func(table []byte)) {
	l := layout{extents: []extent{{end: numBytes, in: place{chunk: chunk}, out: place{chunk: chunk}}}}
	l.write(tableOf(segment, 0))
	change(tableOf(segment, 0))
	atomic.StoreUint64(word(segment, progressAt), 1)
}

// PretendToHaveDone writes the words that a rank has written at the end of such an operation, and the abort
// word if it gave up the operation.
func PretendToHaveDone(segment []byte, numBytes int64, chunk uint32, gaveUp bool) {
	if gaveUp {
		atomic.StoreUint32(flag(segment, abortAt), 1)
	}
	PretendToCome(segment, numBytes, chunk, func([]byte) {})
	atomic.StoreUint64(word(segment, progressAt), 1000)
}
