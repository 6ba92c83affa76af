//go:build race && !noasm

package kernel

import (
	"runtime"
	"unsafe"
)

// noteRead tells the race detector, which does not see into assembly, that b is read.
func noteRead(b []byte) {
	if len(b) > 0 {
		runtime.RaceReadRange(unsafe.Pointer(unsafe.SliceData(b)), len(b))
	}
}

// noteWrite tells the race detector that b is written.
func noteWrite(b []byte) {
	if len(b) > 0 {
		runtime.RaceWriteRange(unsafe.Pointer(unsafe.SliceData(b)), len(b))
	}
}
