package trace

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"hash/fnv"
	"math"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Clock describes a rank's clock. With it, times of the rank can be compared with times of other ranks.
type Clock struct {
	// Start is the time of day at which the engine started.
	Start time.Time
	// Domain is the name of the clock that the process reads. Processes with the same domain read the same
	// clock. A domain is a time namespace during one boot of a host.
	Domain string
	// Monotonic is the reading of the clock Domain at the engine's start.
	Monotonic time.Duration
}

// Job returns a name for one epoch of a job. c must be the clock of rank 0. No two epochs have the same name.
// If the domain of the clock is unknown, Job returns "".
func (c Clock) Job() string {
	if c.Domain == "" {
		return ""
	}
	h := fnv.New64a()
	fmt.Fprintf(h, "%s\n%d", c.Domain, c.Monotonic)
	return fmt.Sprintf("%016x", h.Sum64())
}

// NewClock returns the clock of an engine or node that was started a moment ago, at the time start. If the
// monotonic clock cannot be read, NewClock returns the error, and the clock has an empty domain. Then its
// times cannot be compared with the times of other processes of the host.
func NewClock(start time.Time) (Clock, error) {
	c := Clock{Start: start, Domain: clockDomain()}
	var err error
	if c.Monotonic, err = monotonic(start); err != nil {
		c.Domain = ""
	}
	return c, err
}

// clockDomain returns a name for the clock that monotonic reads. Processes with the same name read the same
// clock. The name consists of the boot id of the host and the id of the time namespace, because clocks in
// different time namespaces can have different offsets (time_namespaces(7)). If the boot id cannot be read,
// the name is random, so that no other process has the same name.
func clockDomain() string {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return rand.Text()
	}
	namespace, err := os.Readlink("/proc/self/ns/time")
	if err != nil {
		namespace = "time" // a kernel without time namespaces
	}
	return fmt.Sprintf("%s/%s", bytes.TrimSpace(boot), namespace)
}

// monotonic returns the reading that CLOCK_MONOTONIC had at the time at, which came from time.Now. The error
// of the result is at most the time between two consecutive readings of a clock.
func monotonic(at time.Time) (time.Duration, error) {
	// The thread may be descheduled between the readings. So monotonic makes several tries and uses the one
	// with the shortest time between the readings, because its error is the smallest.
	best, shown := time.Duration(math.MaxInt64), time.Duration(0)
	for range 5 {
		before := time.Since(at)
		var ts unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
			return 0, fmt.Errorf("read the monotonic clock: %w", err)
		}
		if took := time.Since(at) - before; took < best {
			best, shown = took, time.Duration(ts.Nano())-before-took/2
		}
	}
	return shown, nil
}
