//go:build race && !noasm

package kernel

import (
	"runtime"
	"unsafe"
)

// noteRead reports a read of b to the race detector, because the race detector does not see reads in
// assembly.
func noteRead(b []byte) {
	if len(b) > 0 {
		runtime.RaceReadRange(unsafe.Pointer(unsafe.SliceData(b)), len(b))
	}
}

// noteWrite reports a write of b to the race detector.
func noteWrite(b []byte) {
	if len(b) > 0 {
		runtime.RaceWriteRange(unsafe.Pointer(unsafe.SliceData(b)), len(b))
	}
}
