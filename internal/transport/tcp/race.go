//go:build race

package tcp

import (
	"runtime"
	"unsafe"
)

// ioSync stands for all sockets. Each write to a socket happens before every later read from one, together
// with all that the writing goroutine did before. Package syscall tells the race detector the same.
var ioSync int

// noteRead reports to the race detector that a system call has read into b.
func noteRead(b []byte) {
	runtime.RaceAcquire(unsafe.Pointer(&ioSync))
	if len(b) > 0 {
		runtime.RaceWriteRange(unsafe.Pointer(unsafe.SliceData(b)), len(b))
	}
}

// noteWrite reports to the race detector that a system call is about to write b.
func noteWrite(b []byte) {
	runtime.RaceReleaseMerge(unsafe.Pointer(&ioSync))
	if len(b) > 0 {
		runtime.RaceReadRange(unsafe.Pointer(unsafe.SliceData(b)), len(b))
	}
}
