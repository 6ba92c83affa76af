package doctor

import (
	"context"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/cgroup"
)

// lowBytes is the amount of free memory below which the doctor warns. A few ranks need a few hundred MiB for
// their shared memory, their fusion buffers and their language runtimes.
const lowBytes = 1 << 30

func memory(_ context.Context, s *System) []Line {
	m, err := cgroup.MachineMemory(s.Root)
	if err != nil {
		return []Line{warn("", "mount /proc", "%v", err)}
	}
	found := fmt.Sprintf("%s available of %s", bytesText(m.Available), bytesText(m.Total))
	if m.Available < lowBytes {
		return []Line{warn("", "stop other programs on this host, or start fewer ranks", "%s", found)}
	}
	return []Line{ok("", "%s", found)}
}

// memoryLimit reports how much memory the limits of the cgroups leave. If a limit is exceeded, the kernel
// kills processes.
func memoryLimit(_ context.Context, s *System) []Line {
	m, limited := cgroup.LeastMemory(s.Root)
	found := fmt.Sprintf("%s left of %s (/%s)", bytesText(m.Left), bytesText(m.Limit), m.File)
	switch {
	case !limited:
		return []Line{ok("", "no limit")}
	case m.Left < lowBytes:
		return []Line{warn("",
			"raise the limit (docker --memory, limits.memory of the pod, MemoryMax=) or start fewer ranks",
			"%s: the kernel kills processes that exceed the limit", found)}
	default:
		return []Line{ok("", "%s", found)}
	}
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
