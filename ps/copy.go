package ps

import (
	"sync"
	"sync/atomic"
)

const (
	// longCopy is the minimum size of a copy that is worth a second goroutine, in bytes.
	longCopy = 1 << 20
	// copyPiece is the number of bytes that a goroutine copies at once. It is small enough that both end at
	// about the same time.
	copyPiece = 256 << 10
)

// copyValues copies the values of a push to a message. dst and src have the same length. If they are long and
// this node has a core of its own, two goroutines copy, because one core cannot use all of the bandwidth of
// caches and memory. In a pull that does not pay off.
func (po *postoffice) copyValues(dst, src []byte) {
	if len(src) < longCopy || !po.van.HasCore() {
		copy(dst, src)
		return
	}
	var next atomic.Int64
	pieces := func() {
		for {
			to := int(next.Add(copyPiece))
			from := to - copyPiece
			if from >= len(src) {
				return
			}
			copy(dst[from:], src[from:min(to, len(src))])
		}
	}
	var other sync.WaitGroup
	other.Go(pieces)
	pieces()
	other.Wait()
}
