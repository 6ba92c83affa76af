package cgroup

import (
	"maps"
	"testing"
	"testing/fstest"
)

// rootWith returns a file system with the given files: their paths and their contents.
func rootWith(files map[string]string) fstest.MapFS {
	root := fstest.MapFS{}
	for name, text := range files {
		root[name] = &fstest.MapFile{Data: []byte(text)}
	}
	return root
}

// TestLeastMemory checks how much memory is left in cgroups of version 1 and 2. The cgroup with the least
// memory left decides, and cached pages of files count as free.
func TestLeastMemory(t *testing.T) {
	const self, top = "proc/self/cgroup", "sys/fs/cgroup/"
	for name, c := range map[string]struct {
		files map[string]string
		left  int64  // number of bytes that are left; -1 means no limit
		file  string // the file with the limit, below top
	}{
		"none":       {nil, -1, ""},
		"not in one": {map[string]string{self: "0::/\n"}, -1, ""},
		"v2": {map[string]string{self: "0::/job\n", top + "job/memory.max": "1000\n",
			top + "job/memory.current": "300\n"}, 700, "job/memory.max"},
		"v2 unlimited": {map[string]string{self: "0::/job\n", top + "job/memory.max": "max\n",
			top + "job/memory.current": "300\n"}, -1, ""},
		"v2 over": {map[string]string{self: "0::/job\n", top + "job/memory.max": "1000\n",
			top + "job/memory.current": "1300\n"}, 0, "job/memory.max"},
		"v2 unknown use": {map[string]string{self: "0::/job\n", top + "job/memory.max": "1000\n"}, -1, ""},
		"v2 above": {map[string]string{
			self: "0::/job/step\n", top + "job/memory.max": "1000\n", top + "job/memory.current": "300\n",
			top + "job/step/memory.max": "900\n", top + "job/step/memory.current": "100\n",
		}, 700, "job/memory.max"},
		"v2 in a container": {map[string]string{self: "0::/host/path\n", top + "memory.max": "1000\n",
			top + "memory.current": "300\n"}, 700, "memory.max"},
		"v2 with read files": {map[string]string{
			self: "0::/job\n", top + "job/memory.max": "1000\n", top + "job/memory.current": "950\n",
			top + "job/memory.stat": "anon 50\ninactive_file 600\nactive_file 200\ninactive_anon 9\n",
		}, 850, "job/memory.max"},
		"v1": {map[string]string{
			self:                                     "9:name=systemd:/x\n4:memory:/job\n0::/\n",
			top + "memory/job/memory.limit_in_bytes": "1000\n", top + "memory/job/memory.usage_in_bytes": "900\n",
			top + "memory/job/memory.stat": "inactive_file 7\ntotal_inactive_file 20\ntotal_active_file 30\n",
		}, 150, "memory/job/memory.limit_in_bytes"},
		"v1 with others": {map[string]string{
			self: "4:cpu,memory:/job\n", top + "memory/job/memory.limit_in_bytes": "1000\n",
			top + "memory/job/memory.usage_in_bytes": "900\n",
		}, 100, "memory/job/memory.limit_in_bytes"},
		"v1 unlimited": {map[string]string{
			self: "4:memory:/job\n", top + "memory/job/memory.limit_in_bytes": "9223372036854771712\n",
			top + "memory/job/memory.usage_in_bytes": "900\n",
		}, -1, ""},
		"hybrid": {map[string]string{
			self: "4:cpu:/job\n0::/job\n", top + "unified/job/memory.max": "1000\n",
			top + "unified/job/memory.current": "300\n",
		}, 700, "unified/job/memory.max"},
		"nonsense": {map[string]string{self: "4\n:\n0::\n\n", top + "memory.max": "many\n",
			top + "memory.current": "300\n"}, -1, ""},
	} {
		m, limited := LeastMemory(rootWith(c.files))
		if limited != (c.left >= 0) || limited && (m.Left != uint64(c.left) || m.File != top+c.file) {
			t.Errorf("%s: got %+v, limited %v, want %d bytes by %s", name, m, limited, c.left, c.file)
		}
	}
}

// TestLeastTasks checks that the cgroup that permits the fewest further processes decides.
func TestLeastTasks(t *testing.T) {
	const self, job = "proc/self/cgroup", "sys/fs/cgroup/job/"
	for name, c := range map[string]struct {
		files map[string]string
		left  int64 // -1 means no limit
	}{
		"none":      {nil, -1},
		"unlimited": {map[string]string{job + "pids.max": "max\n", job + "pids.current": "3\n"}, -1},
		"limited":   {map[string]string{job + "pids.max": "2048\n", job + "pids.current": "48\n"}, 2000},
		"over":      {map[string]string{job + "pids.max": "10\n", job + "pids.current": "48\n"}, 0},
		"step": {map[string]string{
			self: "0::/job/step\n", job + "pids.max": "100\n", job + "pids.current": "48\n",
			job + "step/pids.max": "90\n", job + "step/pids.current": "8\n",
		}, 52},
	} {
		files := map[string]string{self: "0::/job\n"}
		maps.Copy(files, c.files)
		left, file, limited := LeastTasks(rootWith(files))
		if limited != (c.left >= 0) || limited && (left != uint64(c.left) || file != job+"pids.max") {
			t.Errorf("%s: got %d by %s, limited %v, want %d", name, left, file, limited, c.left)
		}
	}
}

func TestMachineMemory(t *testing.T) {
	for text, want := range map[string]Memory{
		"MemTotal: 100 kB\nMemFree: 1 kB\nMemAvailable:   50 kB\nSwapFree: 10 kB\n": {100 << 10, 50 << 10, 10 << 10},
		"MemTotal: 100 kB\nMemAvailable: 50 kB\n":                                   {100 << 10, 50 << 10, 0},
		"MemTotal: 100 kB\n": {},
	} {
		m, err := MachineMemory(rootWith(map[string]string{"proc/meminfo": text}))
		if m != want || (err == nil) != (want != Memory{}) {
			t.Errorf("%q: got %+v, error %v, want %+v", text, m, err, want)
		}
	}
	if m, err := MachineMemory(rootWith(nil)); err == nil {
		t.Errorf("without the file: got %+v, want an error", m)
	}
}

// The smallest limit decides, even if another cgroup leaves less.
func TestSmallestLimit(t *testing.T) {
	const pod = "sys/fs/cgroup/pod/"
	files := map[string]string{"proc/self/cgroup": "0::/pod/container\n",
		pod + "memory.max": "9000\n", pod + "memory.current": "8000\n",
		pod + "container/memory.max": "max\n", pod + "container/memory.current": "100\n"}
	for limit, want := range map[string]uint64{"max": 9000, "3000": 3000} {
		files[pod+"container/memory.max"] = limit + "\n"
		if got, limited := SmallestLimit(rootWith(files)); got != want || !limited {
			t.Errorf("limit %s: got %d bytes, limited %t, want %d", limit, got, limited, want)
		}
	}
	if got, limited := SmallestLimit(rootWith(nil)); limited {
		t.Errorf("without cgroups: got a limit of %d bytes", got)
	}
}
