// Package cgroup reads how much memory, processor time and processes Linux leaves to this process: the memory
// of the machine, and the limits of the control groups (cgroups(7)) of version 1 and 2.
//
// The argument root of each function is the root of the file system, with the folders /proc and /sys.
package cgroup

import (
	"errors"
	"io/fs"
	"iter"
	"path"
	"slices"
	"strconv"
	"strings"
)

// Memory is the memory of the machine, in bytes.
type Memory struct {
	Total uint64
	// Available is how much processes can still get without swapping. FreeSwap is how much can be swapped.
	Available, FreeSwap uint64
}

// MachineMemory returns the memory of the machine. It returns an error if the kernel does not tell it.
func MachineMemory(root fs.FS) (Memory, error) {
	const file = "proc/meminfo"
	text, err := fs.ReadFile(root, file)
	if err != nil {
		return Memory{}, err
	}
	total, known1 := field(string(text), "MemTotal:")
	available, known2 := field(string(text), "MemAvailable:")
	if !known1 || !known2 {
		return Memory{}, errors.New("/" + file + ": no MemTotal or MemAvailable")
	}
	swap, _ := field(string(text), "SwapFree:")
	return Memory{total << 10, available << 10, swap << 10}, nil // the sizes in the file are in KiB
}

// MemoryLimit is the limit of a cgroup for the memory of its processes, in bytes.
type MemoryLimit struct {
	Limit uint64
	// Left is how much memory the cgroup leaves. Cached pages of files count as free, because the kernel can
	// reclaim them. If they counted as used, a job that has read its data would seem to have no memory left.
	Left uint64
	File string // the file that contains the limit, relative to the root
}

// LeastMemory returns the limit that leaves the least memory to this process. If there is no limit, limited
// is false.
func LeastMemory(root fs.FS) (least MemoryLimit, limited bool) {
	for g := range cgroups(root, "memory") {
		if m, ok := g.memory(); ok && (!limited || m.Left < least.Left) {
			least, limited = m, true
		}
	}
	return least, limited
}

// SmallestLimit returns the smallest limit for the memory of this process. If there is no limit, limited is
// false.
func SmallestLimit(root fs.FS) (numBytes uint64, limited bool) {
	for g := range cgroups(root, "memory") {
		if m, ok := g.memory(); ok && (!limited || m.Limit < numBytes) {
			numBytes, limited = m.Limit, true
		}
	}
	return numBytes, limited
}

// LeastTasks returns the least number of processes and threads that the cgroups still permit, and the file
// with the limit, relative to the root. If there is no limit, limited is false.
func LeastTasks(root fs.FS) (left uint64, file string, limited bool) {
	for g := range cgroups(root, "pids") {
		most, err1 := strconv.ParseUint(g.read("pids.max"), 10, 64) // "max" means no limit
		used, err2 := strconv.ParseUint(g.read("pids.current"), 10, 64)
		if n := most - min(most, used); errors.Join(err1, err2) == nil && (!limited || n < left) {
			left, file, limited = n, path.Join(g.dir, "pids.max"), true
		}
	}
	return left, file, limited
}

// Quota is the processor time that a cgroup permits, as a number of cores.
type Quota struct {
	Cores float64
	File  string // the file that contains the quota, relative to the root
}

// LeastQuota returns the least quota for this process. If there is no quota, limited is false.
func LeastQuota(root fs.FS) (least Quota, limited bool) {
	for g := range cgroups(root, "cpu") {
		if q, ok := g.quota(); ok && (!limited || q.Cores < least.Cores) {
			least, limited = q, true
		}
	}
	return least, limited
}

// cgroup is a folder in a cgroup hierarchy of version 1 or 2.
type cgroup struct {
	root    fs.FS
	dir     string
	version int
}

// cgroups returns the cgroups that may limit this process through the given controller. In each hierarchy
// that may have the controller, these are the cgroup of the process and all cgroups above it. In a container
// the path in /proc may be a path on the host that does not exist in the container. Then the root of the
// hierarchy is the container's cgroup. So a returned folder may not exist, or may lack the files of the
// controller.
func cgroups(root fs.FS, controller string) iter.Seq[cgroup] {
	const mount = "sys/fs/cgroup"
	return func(yield func(cgroup) bool) {
		text, err := fs.ReadFile(root, "proc/self/cgroup")
		if err != nil {
			return // the kernel has no cgroups
		}
		for line := range strings.Lines(string(text)) {
			// The format is hierarchy-ID:controllers:path. For version 2 the ID is 0 and there are no
			// controllers (cgroups(7)).
			part := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
			if len(part) != 3 {
				continue
			}
			version, hierarchies := 2, []string{mount, mount + "/unified"}
			if part[0] != "0" {
				names := strings.Split(part[1], ",")
				if !slices.Contains(names, controller) {
					continue
				}
				version, hierarchies = 1, []string{mount + "/" + controller}
				if len(names) > 1 {
					hierarchies = append(hierarchies, mount+"/"+part[1])
				}
			}
			for _, h := range hierarchies {
				for p := path.Clean("/" + part[2]); ; p = path.Dir(p) {
					if !yield(cgroup{root, path.Join(h, p), version}) {
						return
					}
					if p == "/" {
						break
					}
				}
			}
		}
	}
}

// noLimit is the smallest value that means that a cgroup of version 1 has no limit. For such a cgroup the
// kernel shows the largest size that is a whole number of pages.
const noLimit = 1 << 62

// memory returns the limit of g. If there is none, limited is false.
func (g cgroup) memory() (m MemoryLimit, limited bool) {
	limitFile, usageFile, caches := "memory.max", "memory.current", []string{"inactive_file", "active_file"}
	if g.version == 1 {
		limitFile, usageFile = "memory.limit_in_bytes", "memory.usage_in_bytes"
		caches = []string{"total_inactive_file", "total_active_file"}
	}
	limit, err1 := strconv.ParseUint(g.read(limitFile), 10, 64)
	used, err2 := strconv.ParseUint(g.read(usageFile), 10, 64)
	if errors.Join(err1, err2) != nil || limit >= noLimit {
		return MemoryLimit{}, false
	}
	stat := g.read("memory.stat")
	for _, name := range caches {
		cached, _ := field(stat, name)
		used -= min(used, cached)
	}
	return MemoryLimit{limit, limit - min(limit, used), path.Join(g.dir, limitFile)}, true
}

// quota returns the quota of g. If there is none, limited is false.
func (g cgroup) quota() (q Quota, limited bool) {
	file := "cpu.max" // such as "200000 100000", or "max 100000" for no quota
	text, period, _ := strings.Cut(g.read(file), " ")
	if g.version == 1 {
		file = "cpu.cfs_quota_us" // -1 means no quota
		text, period = g.read(file), g.read("cpu.cfs_period_us")
	}
	used, err1 := strconv.ParseInt(text, 10, 64)
	of, err2 := strconv.ParseInt(period, 10, 64)
	if errors.Join(err1, err2) != nil || used <= 0 || of <= 0 {
		return Quota{}, false
	}
	return Quota{float64(used) / float64(of), path.Join(g.dir, file)}, true
}

// read returns the content of a file in the folder of g, or "" if the file cannot be read.
func (g cgroup) read(file string) string {
	text, err := fs.ReadFile(g.root, path.Join(g.dir, file))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
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
