package doctor

import (
	"context"
	"errors"
	"io/fs"
	"math"
	"strconv"
	"strings"
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

// quota reports how much processor time the cgroups permit. When a quota is used up, the kernel stops all
// processes of the cgroup until the next period begins, usually for up to 100 ms.
func quota(_ context.Context, s *System) []Line {
	least, file := math.Inf(1), ""
	for g := range s.cgroups("cpu") {
		if cores, from, limited := s.quotaOf(g); limited && cores < least {
			least, file = cores, from
		}
	}
	switch {
	case file == "":
		return []Line{ok("", "no limit")}
	case least < float64(s.Affinity):
		return []Line{warn("",
			"raise the quota (docker --cpus, limits.cpu of the pod, CPUQuota=) or start fewer ranks",
			"%.3g cores of the %d that are visible (/%s): ranks are stopped when the quota is used up", least,
			s.Affinity, file)}
	default:
		return []Line{ok("", "%.3g cores (/%s)", least, file)}
	}
}

// quotaOf returns the quota of one cgroup, as a number of cores, and the file with the quota. If there is no
// quota, the result limited is false.
func (s *System) quotaOf(g cgroup) (cores float64, file string, limited bool) {
	var text, period string
	if g.version == 2 {
		file = g.dir + "/cpu.max" // such as "200000 100000", or "max 100000" for no quota
		text, period, _ = strings.Cut(s.word(file), " ")
	} else {
		file = g.dir + "/cpu.cfs_quota_us" // -1 means no quota
		text, period = s.word(file), s.word(g.dir+"/cpu.cfs_period_us")
	}
	q, err1 := strconv.ParseInt(text, 10, 64)
	p, err2 := strconv.ParseInt(period, 10, 64)
	if errors.Join(err1, err2) != nil || q <= 0 || p <= 0 {
		return 0, "", false
	}
	return float64(q) / float64(p), file, true
}
