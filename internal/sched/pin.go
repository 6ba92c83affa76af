package sched

import (
	"runtime"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"
)

// Pin binds the calling goroutine to the given processors, if there are any. It locks the goroutine to its
// thread and never unlocks it, so that the thread ends together with the goroutine.
func Pin(processors []int, log *zap.Logger) {
	if len(processors) == 0 {
		return
	}
	runtime.LockOSThread()
	var set unix.CPUSet
	for _, c := range processors {
		set.Set(c)
	}
	if err := unix.SchedSetaffinity(0, &set); err != nil {
		log.Warn("pinning a background thread to the cores of HOROVOD_THREAD_AFFINITY failed",
			zap.Ints("processors", processors), zap.Error(err))
	}
}
