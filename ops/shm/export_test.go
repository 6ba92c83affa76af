package shm

import (
	"sync/atomic"
)

// PretendToCome writes to a segment what a rank writes when it starts its first operation. The operation has
// one tensor of numBytes bytes in the given arena chunk. The function change may modify the rank's table
// before the progress word shows that the rank has started.
func PretendToCome(segment []byte, numBytes int64, chunk uint32, change func(table []byte)) {
	l := layout{extents: []extent{{end: numBytes, in: place{chunk: chunk}, out: place{chunk: chunk}}}}
	l.write(tableOf(segment, 0))
	change(tableOf(segment, 0))
	atomic.StoreUint64(word(segment, progressAt), 1)
}

// PretendToHaveDone writes to a segment what a rank has written by the end of the operation that
// PretendToCome describes. If gaveUp is set, it also sets the abort word, as a rank does when it gives up the
// operation.
func PretendToHaveDone(segment []byte, numBytes int64, chunk uint32, gaveUp bool) {
	if gaveUp {
		atomic.StoreUint32(flag(segment, abortAt), 1)
	}
	PretendToCome(segment, numBytes, chunk, func([]byte) {})
	atomic.StoreUint64(word(segment, progressAt), 1000)
}
