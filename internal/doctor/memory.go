package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// lowBytes is the amount of free memory below which the doctor warns. A few ranks need a few hundred MiB for
// their shared memory, their fusion buffers and their language runtimes.
const lowBytes = 1 << 30

func memory(_ context.Context, s *System) []Line {
	text, err := fs.ReadFile(s.Root, "proc/meminfo")
	if err != nil {
		return []Line{warn("", "mount /proc", "%v", err)}
	}
	total, known1 := field(string(text), "MemTotal:")
	available, known2 := field(string(text), "MemAvailable:")
	if !known1 || !known2 {
		return []Line{warn("", "mount /proc", "/proc/meminfo: no MemTotal or MemAvailable")}
	}
	// The sizes in the file are in KiB.
	found := fmt.Sprintf("%s available of %s", bytesText(available<<10), bytesText(total<<10))
	if available<<10 < lowBytes {
		return []Line{warn("", "stop other programs on this host, or start fewer ranks", "%s", found)}
	}
	return []Line{ok("", "%s", found)}
}

// memoryLimit reports how much memory the limits of the cgroups leave. If a limit is exceeded, the kernel
// kills processes.
func memoryLimit(_ context.Context, s *System) []Line {
	var (
		left, limit uint64 = math.MaxUint64, 0
		file        string
	)
	for g := range s.cgroups("memory") {
		if l, of, from, limited := s.memoryOf(g); limited && l < left {
			left, limit, file = l, of, from
		}
	}
	found := fmt.Sprintf("%s left of %s (/%s)", bytesText(left), bytesText(limit), file)
	switch {
	case file == "":
		return []Line{ok("", "no limit")}
	case left < lowBytes:
		return []Line{warn("",
			"raise the limit (docker --memory, limits.memory of the pod, MemoryMax=) or start fewer ranks",
			"%s: the kernel kills processes that exceed the limit", found)}
	default:
		return []Line{ok("", "%s", found)}
	}
}

// noLimit is the smallest value that means that a cgroup of version 1 has no limit. For such a cgroup the
// kernel shows the largest size that is a whole number of pages.
const noLimit = 1 << 62

// memoryOf returns the limit of one cgroup, the file with that limit, and how much memory is left below the
// limit. Cached pages of files count as free, because the kernel can reclaim them. If there is no limit, the
// result limited is false.
func (s *System) memoryOf(g cgroup) (left, limit uint64, file string, limited bool) {
	file, usage, caches := g.dir+"/memory.max", "/memory.current", []string{"inactive_file", "active_file"}
	if g.version == 1 {
		file, usage = g.dir+"/memory.limit_in_bytes", "/memory.usage_in_bytes"
		caches = []string{"total_inactive_file", "total_active_file"}
	}
	limit, err1 := strconv.ParseUint(s.word(file), 10, 64)
	used, err2 := strconv.ParseUint(s.word(g.dir+usage), 10, 64)
	if errors.Join(err1, err2) != nil || limit >= noLimit {
		return 0, 0, "", false
	}
	stat := s.word(g.dir + "/memory.stat")
	for _, name := range caches {
		cached, _ := field(stat, name)
		used -= min(used, cached)
	}
	return limit - min(limit, used), limit, file, true
}

// field looks in text for the line that begins with name, and returns the number after the name.
func field(text, name string) (uint64, bool) {
	for line := range strings.Lines(text) {
		if words := strings.Fields(line); len(words) > 1 && words[0] == name {
			n, err := strconv.ParseUint(words[1], 10, 64)
			return n, err == nil
		}
	}
	return 0, false
}

// devShm reports the free space in /dev/shm, the folder of POSIX shared memory. Docker limits it to 64 MiB.
func devShm(_ context.Context, s *System) []Line {
	const (
		users = "gohvd does not use it (it uses memfd), but PyTorch's data loaders, NCCL and Open MPI do"
		fix   = "make it larger: docker --shm-size=8g, an emptyDir with medium: Memory in a pod, or mount -o remount,size=8g /dev/shm"
	)
	st, err := s.Statfs("/dev/shm")
	if err != nil {
		return []Line{warn("", fix, "%v; %s", err, users)}
	}
	unit := uint64(st.Bsize)
	found := fmt.Sprintf("%s free of %s", bytesText(st.Bavail*unit), bytesText(st.Blocks*unit))
	if st.Bavail*unit < lowBytes {
		return []Line{warn("", fix, "%s; %s", found, users)}
	}
	return []Line{ok("", "%s; %s", found, users)}
}

// memfdWorks checks that this process can make and seal 1 MiB of shared memory. Every machine should have
// that much.
func memfdWorks(_ context.Context, s *System) []Line {
	const numBytes = 1 << 20
	if err := s.Memfd(numBytes); err != nil {
		return []Line{fail("",
			"raise the limit that the error names; or use Linux 5.1 or newer and a sandbox that permits memfd_create, fallocate and "+
				"file seals; or run ranks without shared memory with HOROVOD_CPU_OPERATIONS=shm,tcp", "%v", err)}
	}
	return []Line{ok("", "shared memory can be created, sized and sealed")}
}

// bytesText returns a text for n bytes, such as "4 GiB", with a suitable unit.
func bytesText(n uint64) string {
	const units = "KMGTPE"
	if n < 1<<10 {
		return fmt.Sprintf("%d bytes", n)
	}
	f, i := float64(n)/(1<<10), 0
	for f >= 1<<10 {
		f /= 1 << 10
		i++
	}
	return fmt.Sprintf("%.4g %ciB", f, units[i])
}

// limitText returns a text for a limit of n bytes.
func limitText(n uint64) string {
	if n == unix.RLIM_INFINITY {
		return "unlimited"
	}
	return bytesText(n)
}
