//go:build !noasm

package kernel

import (
	"unsafe"

	"golang.org/x/sys/cpu"
)

// levels returns the levels that this processor supports, the fastest first.
func levels() []level {
	var all []level
	if x := cpu.X86; x.HasAVX512F && x.HasAVX512BW && x.HasAVX512DQ && x.HasAVX512VL {
		all = append(all, level{"avx512", functionsAVX512.vectorize, copyPast(streamAVX512)})
	}
	if x := cpu.X86; x.HasAVX2 && x.HasF16C && x.HasFMA {
		all = append(all, level{"avx2", functionsAVX2.vectorize, copyPast(streamAVX2)})
	}
	return all
}

const streamAlign = 64 // a cache line in bytes; stores that bypass the caches are fast only for whole lines

// copyPast returns a function that copies a slice with stores that bypass the caches. For the whole cache
// lines of the destination it calls run, which copies n bytes. It copies the bytes before and after them with
// copy. In each call of run, dst and n are multiples of streamAlign.
func copyPast(run func(dst, src *byte, n int)) func(dst, src []byte) {
	return func(dst, src []byte) {
		head := min(len(dst), int(-uintptr(unsafe.Pointer(unsafe.SliceData(dst)))%streamAlign))
		copy(dst[:head], src)
		dst, src = dst[head:], src[head:]
		whole := len(dst) &^ (streamAlign - 1)
		noteWrite(dst[:whole])
		noteRead(src[:whole])
		for i := 0; i < whole; i += stretchBytes {
			run(at(dst, i), at(src, i), min(stretchBytes, whole-i))
		}
		copy(dst[whole:], src[whole:])
	}
}
