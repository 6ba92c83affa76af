package doctor

import (
	"context"
	"fmt"
	"io/fs"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/cgroup"
)

// These are what each rank on a host needs at least, as measured with small programs in Go. With n ranks, a
// rank needs rankBytes and n times peerBytes, most of them for the page tables of the segments of the others.
// The threads are those on a host with 2 cores. With more cores a rank may have more.
const (
	rankBytes, peerBytes = 14 << 20, 8 << 10
	rankThreads          = 12
	// launcherFiles is the number of files that hvdrun has open for each rank on its host.
	launcherFiles = 5
)

// room is what a resource of this host permits.
type room struct {
	ranks int    // number of ranks for which the resource suffices
	what  string // the resource, how much of it is left, and how much a rank needs
	fix   string
}

// rooms returns the rooms of the resources whose limits are known, the smallest first.
func rooms(s *System) (all []room) {
	add := func(left, each uint64, fix, format string, args ...any) {
		all = append(all, room{int(min(left/each, 1<<20)), fmt.Sprintf(format, args...), fix})
	}
	if m, err := cgroup.MachineMemory(s.Root); err == nil {
		left := m.Available + m.FreeSwap
		if c, limited := cgroup.LeastMemory(s.Root); limited {
			left = min(left, c.Left)
		}
		n := 0
		for ; uint64(n+1)*(rankBytes+uint64(n+1)*peerBytes) <= left; n++ {
		}
		add(uint64(n), 1, "start fewer ranks, or stop other programs on this host",
			"%s of memory (a rank needs at least %s and %s for each rank)", bytesText(left),
			bytesText(rankBytes), bytesText(peerBytes))
	}
	if r, err := s.Rlimit(unix.RLIMIT_NOFILE); err == nil && r.Cur != unix.RLIM_INFINITY {
		add(r.Cur-min(r.Cur, filesOwn), max(filesPerLocal, launcherFiles), openFilesFix,
			"%d open files (hvdrun needs %d for each rank, the lowest rank up to %d)", r.Cur, launcherFiles, filesPerLocal)
	}
	if left, limit, limited := threads(s); limited {
		add(left, rankThreads, "raise the limit (ulimit -u, docker --pids-limit, TasksMax=, sysctl kernel.pid_max)",
			"%d processes and threads (%s; a rank needs about %d, on 2 cores)", left, limit, rankThreads)
	}
	slices.SortStableFunc(all, func(a, b room) int { return a.ranks - b.ranks })
	return all
}

// threads returns how many processes and threads the kernel, the cgroups and the limit of the user still
// permit, and the name of the least limit. From the limit of the user, only those of this process are
// subtracted, because the files of all processes would have to be read for the others of the user.
func threads(s *System) (left uint64, limit string, limited bool) {
	least := func(n uint64, name string) {
		if !limited || n < left {
			left, limit, limited = n, name, true
		}
	}
	if n, file, found := cgroup.LeastTasks(s.Root); found {
		least(n, "/"+file)
	}
	used := runningThreads(s)
	for _, name := range []string{"proc/sys/kernel/pid_max", "proc/sys/kernel/threads-max"} {
		text, err := fs.ReadFile(s.Root, name)
		if err != nil {
			continue
		}
		if n, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64); err == nil {
			least(n-min(n, used), "/"+name)
		}
	}
	if r, err := s.Rlimit(unix.RLIMIT_NPROC); err == nil && r.Cur != unix.RLIM_INFINITY && !exempt(s) {
		own, _ := strconv.ParseUint(ownStatus(s, "Threads"), 10, 64) // 0 if it is unknown
		least(r.Cur-min(r.Cur, own), "RLIMIT_NPROC; those of this user's other processes are not subtracted")
	}
	return left, limit, limited
}

// runningThreads returns the number of threads of this machine, or 0 if it is unknown.
func runningThreads(s *System) uint64 {
	text, _ := fs.ReadFile(s.Root, "proc/loadavg") // without the file there are no fields
	f := strings.Fields(string(text))
	if len(f) < 4 {
		return 0
	}
	_, all, _ := strings.Cut(f[3], "/") // as in "0.20 0.18 0.12 1/80 11206"
	n, _ := strconv.ParseUint(all, 10, 64)
	return n
}

// exempt reports whether RLIMIT_NPROC does not apply to this process, because it has the capability
// CAP_SYS_RESOURCE or CAP_SYS_ADMIN.
func exempt(s *System) bool {
	const caps = 1<<unix.CAP_SYS_RESOURCE | 1<<unix.CAP_SYS_ADMIN
	n, _ := strconv.ParseUint(ownStatus(s, "CapEff"), 16, 64) // 0 if they are unknown
	return n&caps != 0
}

// ownStatus returns the value of a field of /proc/self/status, or "" if it is unknown.
func ownStatus(s *System, field string) string {
	text, _ := fs.ReadFile(s.Root, "proc/self/status") // without the file there are no fields
	for line := range strings.Lines(string(text)) {
		if value, found := strings.CutPrefix(line, field+":"); found {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// ranks reports how many ranks this host can run.
func ranks(_ context.Context, s *System) []Line {
	all := rooms(s)
	if len(all) == 0 {
		return []Line{warn("", "mount /proc", "the limits of this host are unknown")}
	}
	var parts []string
	for _, r := range all {
		parts = append(parts, fmt.Sprintf("%d by %s", r.ranks, r.what))
	}
	text := strings.Join(parts, ", ")
	if least := all[0]; least.ranks < s.Affinity {
		return []Line{warn("", least.fix, "this host can run fewer ranks than it has cores: %s", text)}
	}
	return []Line{ok("", "this host can run about %d ranks of a small program: %s", all[0].ranks, text)}
}

// Crowded returns a text for each resource of this host that does not suffice for n ranks.
func (s *System) Crowded(n int) (texts []string) {
	for _, r := range rooms(s) {
		if r.ranks < n {
			texts = append(texts, fmt.Sprintf("%d ranks on this host: it has %s, enough for %d ranks: %s", n,
				r.what, r.ranks, r.fix))
		}
	}
	return texts
}
