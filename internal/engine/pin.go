package engine

import (
	"runtime"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"
)

// pin binds the calling goroutine to the processors of Config.Cores. It locks the goroutine to its thread and
// never unlocks it, so that the thread ends together with the goroutine.
func (e *Engine) pin() {
	if len(e.cfg.Cores) == 0 {
		return
	}
	runtime.LockOSThread()
	var set unix.CPUSet
	for _, c := range e.cfg.Cores {
		set.Set(c)
	}
	if err := unix.SchedSetaffinity(0, &set); err != nil {
		e.log.Warn("pinning a background thread to the cores of HOROVOD_THREAD_AFFINITY failed",
			zap.Ints("processors", e.cfg.Cores), zap.Error(err))
	}
}
