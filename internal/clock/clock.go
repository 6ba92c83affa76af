// Package clock reads the clock that times of different processes of a host can be compared by.
package clock

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"math"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Domain names the clock that Monotonic reads: processes with the same one read the same clock. It stands for a boot of a host
// and for a time namespace, whose clocks are set apart (time_namespaces(7)). Where these cannot be found out it is one of
// its own.
func Domain() string {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return rand.Text()
	}
	namespace, err := os.Readlink("/proc/self/ns/time")
	if err != nil {
		namespace = "time" // a kernel without them
	}
	return fmt.Sprintf("%s/%s", bytes.TrimSpace(boot), namespace)
}

// Monotonic is what the clock of the domain shows at a time that time.Now gave a moment ago. It is right to within the time that
// two readings of a clock take.
func Monotonic(at time.Time) (time.Duration, error) {
	// Between the two readings the thread may lose its processor. Of some tries that with the least between them counts.
	best, shown := time.Duration(math.MaxInt64), time.Duration(0)
	for range 5 {
		before := time.Since(at)
		var ts unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
			return 0, fmt.Errorf("clock: %w", err)
		}
		if took := time.Since(at) - before; took < best {
			best, shown = took, time.Duration(ts.Nano())-before-took/2
		}
	}
	return shown, nil
}
