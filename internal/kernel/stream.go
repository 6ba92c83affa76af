package kernel

// streamBytes is the smallest length for which Stream uses stores that bypass the caches. The result of a
// shorter copy is likely to be read again soon, from the caches.
const streamBytes = 4 << 10

// Stream copies src to dst. It panics unless they have the same length. They must not overlap. For 4 KiB or
// more, Stream uses stores that bypass the caches, if the processor has them. So it is for data that is not
// read again soon.
//
// The writes have the same order as the writes of copy: they come before any later store, for example an
// atomic store. So a reader that sees that store sees the whole copy. On amd64, stores that bypass the caches
// are not ordered by themselves, so Stream executes SFENCE after them.
func Stream(dst, src []byte) {
	sameLength(dst, src)
	if len(dst) < streamBytes {
		copy(dst, src)
		return
	}
	best.stream(dst, src)
}
