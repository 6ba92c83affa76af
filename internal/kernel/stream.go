package kernel

// streamBytes is the least length that Stream writes past the caches. A shorter copy is likely to be read
// again from them.
const streamBytes = 4 << 10

// Stream copies src to dst. They must have the same length, or Stream panics, and must not overlap. From 4
// KiB on Stream writes past the caches if the processor can. It is for data that is not read again soon.
//
// The writes are ordered like those of copy: they come before any later store, for example an atomic one, so
// a reader that observes that store observes the whole copy. On amd64, stores past the caches are not ordered
// by themselves; Stream ends them with SFENCE.
func Stream(dst, src []byte) {
	sameLength(dst, src)
	if len(dst) < streamBytes {
		copy(dst, src)
		return
	}
	best.stream(dst, src)
}
