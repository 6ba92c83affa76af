package shmem

import (
	"strings"
	"testing"
	"testing/fstest"

	"golang.org/x/sys/unix"
)

// TestMemoryLimits checks that an allocation may use the memory that the machine or a cgroup has left, and no
// byte more.
func TestMemoryLimits(t *testing.T) {
	machine := &fstest.MapFile{Data: []byte("MemTotal: 9 kB\nMemAvailable: 5 kB\nSwapFree: 1 kB\n")}
	for name, c := range map[string]struct {
		root fstest.MapFS
		left uint64
		want string
	}{
		"machine": {fstest.MapFS{"proc/meminfo": machine}, 6 << 10, "the machine has only 6144 bytes"},
		"cgroup": {fstest.MapFS{
			"proc/meminfo": machine, "proc/self/cgroup": {Data: []byte("0::/job\n")},
			"sys/fs/cgroup/job/memory.max":     {Data: []byte("1000\n")},
			"sys/fs/cgroup/job/memory.current": {Data: []byte("300\n")},
		}, 700, "the cgroup has only 700 bytes left of its memory limit of 1000 bytes (/sys/fs/cgroup/job/memory.max)"},
	} {
		if err := checkMemory(c.root, c.left); err != nil {
			t.Errorf("%s: %d bytes: %v", name, c.left, err)
		}
		if err := checkMemory(c.root, c.left+1); err == nil || !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("%s: %d bytes: got error %v, want %s", name, c.left+1, err, c.want)
		}
	}
	if err := checkMemory(fstest.MapFS{}, 1<<60); err != nil {
		t.Errorf("without limits: %v", err)
	}
}

// TestFileLimitByKernel calls fill when only the kernel enforces the limit on the size of files. fill must
// return an error that names the limit and the size. The kernel also sends a signal, which does not end the
// process because Go ignores it.
func TestFileLimitByKernel(t *testing.T) {
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &old); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: 1 << 20, Max: old.Max}); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &old); err != nil {
			t.Fatal(err)
		}
	}()
	fd, err := open("test")
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	s, err := fill("test", fd, 2<<20)
	if err == nil || !strings.Contains(err.Error(), "RLIMIT_FSIZE") ||
		!strings.Contains(err.Error(), "2097152") {
		t.Errorf("got %v, %v, want an error with limit and size", s, err)
	}
}
