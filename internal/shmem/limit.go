package shmem

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// checkLimits returns an error if a segment of need bytes would exceed a known limit. The error names the
// limit. checkLimits must be called before the allocation. If an allocation exceeds the limit of a cgroup or
// the memory of the machine, the kernel kills a process instead of returning an error.
func checkLimits(need int64) error {
	var files unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &files); err == nil && uint64(need) > files.Cur {
		return fmt.Errorf("files are limited to %d bytes (RLIMIT_FSIZE, ulimit -f)", files.Cur)
	}
	if err := machine("/proc/meminfo").check(need); err != nil {
		return err
	}
	return cgroups{"/proc/self/cgroup", "/sys/fs/cgroup"}.check(need)
}

// explain returns an error that adds the likely cause to err, an error from the kernel.
func explain(err error) error {
	switch {
	case errors.Is(err, unix.EFBIG):
		return fmt.Errorf("the size exceeds the limit for files (RLIMIT_FSIZE, ulimit -f): %w", err)
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.ENOMEM):
		return fmt.Errorf("the machine has no memory left, or the kernel does not allow more: %w", err)
	default:
		return fmt.Errorf("fallocate: %w", err)
	}
}

// machine is the path of the file in which the kernel describes the memory of the machine, /proc/meminfo.
type machine string

// check returns an error if the machine has less than need bytes of memory left. If the file cannot be read,
// check returns nil.
func (m machine) check(need int64) error {
	text, err := os.ReadFile(string(m))
	if err != nil {
		return nil // without /proc, only the allocation itself shows whether there is enough memory
	}
	available, known := field(string(text), "MemAvailable:")
	swap, _ := field(string(text), "SwapFree:")
	if left := (available + swap) << 10; known && need > left {
		return fmt.Errorf("the machine has only %d bytes of memory and swap left", left)
	}
	return nil
}

// cgroups says where the cgroups of this process are found. self is the path of the file that lists them, and
// mount is the directory under which their hierarchies are mounted.
type cgroups struct{ self, mount string }

// files holds the names of the files of a memory controller. These names differ between versions 1 and 2 of
// cgroups.
type files struct {
	limit, usage string
	// cache holds the names of the fields in memory.stat that count the page cache, which contains parts of
	// files that were read. The kernel can reclaim these pages. If they counted as used, a job that has read
	// its data would seem to have no memory left.
	cache []string
}

var (
	version1 = files{"memory.limit_in_bytes", "memory.usage_in_bytes",
		[]string{"total_inactive_file", "total_active_file"}}
	version2 = files{"memory.max", "memory.current", []string{"inactive_file", "active_file"}}
)

// check returns an error if a cgroup of this process, or a cgroup above it, has less than need bytes left. It
// ignores limits that it cannot read.
func (c cgroups) check(need int64) error {
	text, err := os.ReadFile(c.self)
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(text)) {
		// A line has the form hierarchy-ID:controllers:path. In version 2 of cgroups the ID is 0 and the list
		// of controllers is empty (cgroups(7)).
		part := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(part) != 3 {
			continue
		}
		roots, names := []string{"memory"}, version1
		if part[0] == "0" {
			roots, names = []string{".", "unified"}, version2
		} else if !strings.Contains(","+part[1]+",", ",memory,") {
			continue
		}
		for _, root := range roots {
			if err := names.check(filepath.Join(c.mount, root), part[2], need); err != nil {
				return err
			}
		}
	}
	return nil
}

// check checks a cgroup and all cgroups above it. root is the directory of the hierarchy, and path is the
// path of the cgroup in it. Inside a container, path may be the path on the host, which does not exist in the
// container. In this case root itself is the container's cgroup.
func (f files) check(root, path string, need int64) error {
	for path = filepath.Clean("/" + path); ; path = filepath.Dir(path) {
		if err := f.checkOne(filepath.Join(root, path), need); err != nil {
			return err
		}
		if path == "/" {
			return nil
		}
	}
}

func (f files) checkOne(dir string, need int64) error {
	limit, limited := number(filepath.Join(dir, f.limit))
	usage, known := number(filepath.Join(dir, f.usage))
	if !limited || !known {
		return nil
	}
	left := limit - usage
	if stat, err := os.ReadFile(filepath.Join(dir, "memory.stat")); err == nil {
		for _, name := range f.cache {
			cached, _ := field(string(stat), name)
			left += cached
		}
	}
	if left = max(0, left); need > left {
		return fmt.Errorf("the cgroup has only %d bytes left of its memory limit of %d bytes (%s)", left, limit, filepath.Join(dir, f.limit))
	}
	return nil
}

// number returns the number in a file and true. If the file contains another text, for example "max", it
// returns false.
func number(file string) (int64, bool) {
	text, err := os.ReadFile(file)
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	return n, err == nil
}

// field finds the line of text that begins with name. It returns the number after name and true, or false if
// there is none.
func field(text, name string) (int64, bool) {
	for line := range strings.Lines(text) {
		words := strings.Fields(line)
		if len(words) < 2 || words[0] != name {
			continue
		}
		n, err := strconv.ParseInt(words[1], 10, 64)
		return n, err == nil
	}
	return 0, false
}
