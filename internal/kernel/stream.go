package kernel

// streamBytes is the least that Stream takes past the caches: less is likely to be read again from them.
const streamBytes = 4 << 10

// Stream copies src to dst, which must have the same length, or it panics. They do not overlap. From 4 KiB on it writes
// past the caches where the processor can: for what is not read again soon.
//
// What it wrote is ordered as that of copy is: before a store that follows, an atomic one say, so whoever sees that
// sees all of the copy. Stores past the caches are not ordered by themselves on amd64; Stream ends them with SFENCE.
func Stream(dst, src []byte) {
	sameLength(dst, src)
	if len(dst) < streamBytes {
		copy(dst, src)
		return
	}
	best.stream(dst, src)
}
