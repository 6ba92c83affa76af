package shmem

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// tree creates a directory with the given files and returns its path. The keys of files are the paths of the
// files, and the values are their contents.
func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func TestCgroups(t *testing.T) {
	for name, c := range map[string]struct {
		files map[string]string
		left  int64 // number of bytes that are left; -1 means no limit
	}{
		"none":       {nil, -1},
		"not in one": {map[string]string{"self": "0::/\n"}, -1},
		"v2": {map[string]string{"self": "0::/job\n", "cg/job/memory.max": "1000\n",
			"cg/job/memory.current": "300\n"}, 700},
		"v2 unlimited": {map[string]string{"self": "0::/job\n", "cg/job/memory.max": "max\n",
			"cg/job/memory.current": "300\n"}, -1},
		"v2 over": {map[string]string{"self": "0::/job\n", "cg/job/memory.max": "1000\n",
			"cg/job/memory.current": "1300\n"}, 0},
		"v2 unknown use": {map[string]string{"self": "0::/job\n", "cg/job/memory.max": "1000\n"}, -1},
		"v2 above": {map[string]string{
			"self": "0::/job/step\n", "cg/job/memory.max": "1000\n", "cg/job/memory.current": "300\n",
			"cg/job/step/memory.max": "900\n", "cg/job/step/memory.current": "100\n",
		}, 700},
		"v2 in a container": {map[string]string{"self": "0::/host/path\n", "cg/memory.max": "1000\n",
			"cg/memory.current": "300\n"}, 700},
		"v2 with read files": {map[string]string{
			"self": "0::/job\n", "cg/job/memory.max": "1000\n", "cg/job/memory.current": "950\n",
			"cg/job/memory.stat": "anon 50\ninactive_file 600\nactive_file 200\ninactive_anon 9\n",
		}, 850},
		"v1": {map[string]string{
			"self":                                "9:name=systemd:/x\n4:memory:/job\n0::/\n",
			"cg/memory/job/memory.limit_in_bytes": "1000\n", "cg/memory/job/memory.usage_in_bytes": "900\n",
			"cg/memory/job/memory.stat": "inactive_file 7\ntotal_inactive_file 20\ntotal_active_file 30\n",
		}, 150},
		"v1 with others": {map[string]string{
			"self":                                "4:cpu,memory:/job\n",
			"cg/memory/job/memory.limit_in_bytes": "1000\n", "cg/memory/job/memory.usage_in_bytes": "900\n",
		}, 100},
		"hybrid": {map[string]string{
			"self": "4:cpu:/job\n0::/job\n", "cg/unified/job/memory.max": "1000\n",
			"cg/unified/job/memory.current": "300\n",
		}, 700},
		"nonsense": {map[string]string{"self": "4\n:\n0::\n\n", "cg/memory.max": "many\n",
			"cg/memory.current": "300\n"}, -1},
	} {
		root := tree(t, c.files)
		groups := cgroups{filepath.Join(root, "self"), filepath.Join(root, "cg")}
		if c.left < 0 {
			if err := groups.check(1 << 60); err != nil {
				t.Errorf("%s: got %v, want no limit", name, err)
			}
			continue
		}
		if err := groups.check(c.left); err != nil {
			t.Errorf("%s: %d bytes: %v", name, c.left, err)
		}
		if err := groups.check(c.left + 1); err == nil || !strings.Contains(err.Error(), "cgroup has") {
			t.Errorf("%s: %d bytes: got %v, want an error", name, c.left+1, err)
		}
	}
}

func TestMachine(t *testing.T) {
	root := tree(t, map[string]string{
		"known":   "MemTotal: 100 kB\nMemFree: 1 kB\nMemAvailable:   50 kB\nSwapFree: 10 kB\n",
		"unknown": "MemTotal: 100 kB\n",
	})
	known := machine(filepath.Join(root, "known"))
	if err := known.check(60 << 10); err != nil {
		t.Error(err)
	}
	if err := known.check(60<<10 + 1); err == nil {
		t.Error("got more than there is")
	}
	for _, file := range []string{"unknown", "absent"} {
		if err := machine(filepath.Join(root, file)).check(1 << 60); err != nil {
			t.Errorf("%s: %v", file, err)
		}
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
