package main

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// cpuUsed returns the seconds of CPU time that this process has used.
func cpuUsed() (user, system float64, err error) {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0, 0, fmt.Errorf("CPU time of this process: %w", err)
	}
	return float64(u.Utime.Nano()) / 1e9, float64(u.Stime.Nano()) / 1e9, nil
}

// memoryUse is what the kernel says of this process's memory, in bytes.
type memoryUse struct {
	peak   float64 // the most that was resident
	shared float64 // of what is resident now, shared with other processes
}

func memoryUsed() (memoryUse, error) {
	f, err := os.Open("/proc/self/status")
	if err != nil {
		return memoryUse{}, fmt.Errorf("memory of this process: %w", err)
	}
	defer f.Close()
	return readMemory(f)
}

// readMemory reads /proc/PID/status (proc(5)).
func readMemory(r io.Reader) (m memoryUse, err error) {
	fields := map[string]*float64{"VmHWM": &m.peak, "RssShmem": &m.shared}
	s := bufio.NewScanner(r)
	for s.Scan() {
		name, value, _ := strings.Cut(s.Text(), ":")
		at := fields[name]
		if at == nil {
			continue
		}
		kib, err := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 64)
		if err != nil {
			return m, fmt.Errorf("memory of this process: %s is %q, want kB", name, value)
		}
		*at = kib * 1024
		delete(fields, name)
	}
	if err := s.Err(); err != nil {
		return m, err
	}
	if len(fields) > 0 {
		return m, fmt.Errorf("memory of this process: the kernel does not tell %d of VmHWM, RssShmem", len(fields))
	}
	return m, nil
}
