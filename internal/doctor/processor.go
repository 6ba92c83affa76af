package doctor

import (
	"context"
	"io/fs"
	"strings"

	"github.com/gohvd/gohvd/internal/binding"
	"github.com/gohvd/gohvd/internal/cgroup"
)

func simd(_ context.Context, s *System) []Line {
	const slow = "none: reductions run in plain Go, several times slower"
	switch {
	case s.SIMD != "none":
		return []Line{ok("", "%s", s.SIMD)}
	case s.Build.NoAsm:
		return []Line{warn("", "build without the tag noasm", slow)}
	case s.Arch == "amd64":
		return []Line{warn("",
			"use a processor with AVX2, F16C and FMA, or a virtual machine that exposes them", slow)}
	default:
		return []Line{warn("", "use amd64 or arm64, for which gohvd has assembly", slow)}
	}
}

// cores reports how many cores the machine has, how many this process may use, and GOMAXPROCS. GOMAXPROCS
// exceeds the number of cores that this process may use only if the environment sets it.
func cores(_ context.Context, s *System) []Line {
	var lines []Line
	if text, err := fs.ReadFile(s.Root, "proc/stat"); err != nil {
		lines = append(lines, warn("online", "mount /proc", "%v", err))
	} else { // the first line is for all cores, then there is a line for each core (proc_stat(5))
		lines = append(lines, ok("online", "%d cores", strings.Count(string(text), "\ncpu")))
	}
	lines = append(lines, ok("affinity", "this process may run on %d cores", s.Affinity))
	if s.GOMAXPROCS > s.Affinity {
		return append(lines,
			warn("GOMAXPROCS", "unset GOMAXPROCS, or allow more cores (taskset, --cpuset-cpus, --cpus-per-task)",
				"%d threads for %d cores: threads wait for each other", s.GOMAXPROCS, s.Affinity))
	}
	return append(lines, ok("GOMAXPROCS", "%d threads", s.GOMAXPROCS))
}

// topology reports the cores and the NUMA nodes to which --bind-to binds the ranks of this host.
func topology(_ context.Context, s *System) []Line {
	t, err := binding.Read(s.Root, s.Allowed)
	if err != nil {
		return []Line{warn("", "mount /sys, or do not use --bind-to", "%v", err)}
	}
	return []Line{ok("", "%s", t.Describe())}
}

// quota reports how much processor time the cgroups permit. When a quota is used up, the kernel stops all
// processes of the cgroup until the next period begins, usually for up to 100 ms.
func quota(_ context.Context, s *System) []Line {
	q, limited := cgroup.LeastQuota(s.Root)
	switch {
	case !limited:
		return []Line{ok("", "no limit")}
	case q.Cores < float64(s.Affinity):
		return []Line{warn("",
			"raise the quota (docker --cpus, limits.cpu of the pod, CPUQuota=) or start fewer ranks",
			"%.3g cores of the %d that are visible (/%s): ranks are stopped when the quota is used up", q.Cores,
			s.Affinity, q.File)}
	default:
		return []Line{ok("", "%.3g cores (/%s)", q.Cores, q.File)}
	}
}
