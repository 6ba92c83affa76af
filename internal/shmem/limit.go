package shmem

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/cgroup"
)

// checkLimits returns an error if a segment of need bytes would exceed a known limit. The error names the
// limit. checkLimits must be called before the allocation. If an allocation exceeds the limit of a cgroup or
// the memory of the machine, the kernel kills a process instead of returning an error.
func checkLimits(need int64) error {
	var files unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &files); err == nil && uint64(need) > files.Cur {
		return fmt.Errorf("files are limited to %d bytes (RLIMIT_FSIZE, ulimit -f)", files.Cur)
	}
	return checkMemory(os.DirFS("/"), uint64(need))
}

// checkMemory returns an error if the machine, or a cgroup of this process, has less than need bytes of
// memory left. root is the root of the file system. checkMemory ignores limits that it cannot read, because
// then the allocation itself shows whether there is enough memory.
func checkMemory(root fs.FS, need uint64) error {
	if m, err := cgroup.MachineMemory(root); err == nil && need > m.Available+m.FreeSwap {
		return fmt.Errorf("the machine has only %d bytes of memory and swap left", m.Available+m.FreeSwap)
	}
	if m, limited := cgroup.LeastMemory(root); limited && need > m.Left {
		return fmt.Errorf("the cgroup has only %d bytes left of its memory limit of %d bytes (/%s)", m.Left,
			m.Limit, m.File)
	}
	return nil
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
