package simulate

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// threadCPU reads the CPU time of this thread.
func threadCPU() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		panic(err)
	}
	return time.Duration(t.Nano())
}

// BenchmarkCosts measures what the state machines use in the simulation, from which the entries of Measured
// are computed: the differences between jobs with few and many tensors and ranks.
func BenchmarkCosts(b *testing.B) {
	for _, job := range []struct {
		policy         Policy
		ranks, perHost int
	}{{Star, 8, 8}, {Star, 512, 8}, {Leaders, 512, 8}, {Leaders, 8192, 128}} {
		for _, tensors := range []int{1, 161} {
			for _, capacity := range []int{1024, 0} {
				if job.ranks > 512 && (tensors > 1 || capacity == 0) {
					continue // it takes too long
				}
				b.Run(fmt.Sprintf("%s/ranks=%d/tensors=%d/cache=%d", job.policy, job.ranks, tensors, capacity),
					func(b *testing.B) {
						runtime.LockOSThread() // for threadCPU
						defer runtime.UnlockOSThread()
						r, err := Run(Config{Ranks: job.ranks, PerHost: job.perHost, Policy: job.policy,
							Workload: Small(tensors),
							Steps:    2 + b.N, CacheCapacity: capacity,
							Costs: Measured, CPU: threadCPU})
						if err != nil {
							b.Fatal(err)
						}
						var root, leader, member Load
						for _, s := range r.Steps[2:] {
							root.add(s.Root)
							leader.add(s.Leader)
							member.add(s.Member)
						}
						us := func(d time.Duration) float64 { return float64(d) / 1e3 / float64(b.N) }
						b.ReportMetric(us(root.Real), "root-us/op")
						b.ReportMetric(us(leader.Real), "leader-us/op")
						b.ReportMetric(us(member.Real), "member-us/op")
					})
			}
		}
	}
}
