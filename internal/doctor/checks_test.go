package doctor

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/binding"
	"github.com/gohvd/gohvd/internal/config"
)

// TestBuilt checks the lines about the build, and that Build.read finds cgo and tags in the settings of the
// Go toolchain.
func TestBuilt(t *testing.T) {
	s := soundSystem()
	s.Build = Build{Go: "go1.26", CGO: true, NoAsm: true, Known: true}
	holds(t, "parts", look(t, s, "build"), "ok version: gohvd "+config.VersionText(),
		"ok compiler: go1.26 for amd64, cgo on, assembly off",
		"ok frameworks: Go, PyTorch (over libgohvd); not built in: TensorFlow, MXNet", "ok controllers: Gloo",
		"ok tensor operations: NCCL (version 2.28.9, over libgohvd), Gloo",
		"ok cpu operations: HOROVOD_CPU_OPERATIONS can be gloo, shm,tcp")

	s.Build = Build{Go: "go1.26"}
	if lines := look(t, s, "build"); lines[1].Text != "go1.26 for amd64" {
		t.Errorf("got %q, want no word about cgo, which is not known", lines[1].Text)
	}

	for _, c := range []struct {
		settings []debug.BuildSetting
		want     Build
	}{
		{nil, Build{}},
		{[]debug.BuildSetting{{Key: "CGO_ENABLED", Value: "1"}}, Build{Known: true, CGO: true}},
		{[]debug.BuildSetting{{Key: "CGO_ENABLED", Value: "0"}, {Key: "-tags", Value: "a,noasm"}},
			Build{Known: true, NoAsm: true}},
		{[]debug.BuildSetting{{Key: "-tags", Value: "noasm2"}}, Build{}},
	} {
		var b Build
		b.read(&debug.BuildInfo{Settings: c.settings})
		if fmt.Sprint(b) != fmt.Sprint(c.want) {
			t.Errorf("%v: got %+v, want %+v", c.settings, b, c.want)
		}
	}
}

func TestNvidia(t *testing.T) {
	for name, c := range map[string]struct {
		files files
		want  []string
	}{
		"none": {files{"dev/nvidiactl": "", "dev/null": ""}, []string{"ok nvidia: no device files"}},
		"two": {files{"dev/nvidiactl": "", "dev/nvidia0": "", "dev/nvidia1": ""},
			[]string{"ok nvidia: nvidia0 nvidia1; no driver"}},
		"driver": {files{"dev/nvidiactl": "", "dev/nvidia0": "",
			"proc/driver/nvidia/version": "NVRM 550\nGCC"}, []string{"ok nvidia: nvidia0; NVRM 550"}},
		"no ctl": {files{"dev/nvidia0": ""}, []string{"ok nvidia", "warn nvidia: dev/nvidiactl"}},
	} {
		s := soundSystem()
		s.Root = c.files.fs()
		lines := look(t, s, "nvidia")
		holds(t, name, lines, c.want...)
		if strings.Contains(lines[0].Text, "GCC") {
			t.Errorf("%s: got %q, want only the first line about the driver", name, lines[0].Text)
		}
	}
}

// TestNCCL checks the lines about the libraries that libgohvd finds, on machines with and without GPUs.
func TestNCCL(t *testing.T) {
	instead := func(old, replacement string) string { return strings.Replace(soundGPUs, old, replacement, 1) }
	for name, c := range map[string]struct {
		text string
		err  error
		// want is the text on any machine. fix is that on a machine with a GPU, or empty if there is nothing
		// to fix.
		want, fix string
	}{
		"all": {soundGPUs, nil, "NCCL 2.28.9 at /n/libnccl.so.2; CUDA 12.8 at /c/libcudart.so.12; " +
			"the driver supports CUDA 13.0; number of devices: 2", ""},
		"fabric manager": {instead(`"devices": 2`, `"devices": 0, "no_device": "system not yet initialized (802)"`),
			nil, "libcudart.so.12; system not yet initialized (802)", "start nvidia-fabricmanager"},
		"no device": {instead(`"devices": 2`, `"devices": 0`), nil, "libcudart.so.12; no device", "give this process"},
		"static":    {`{"built": false}`, nil, "libgohvd was built without NCCL", "make libgohvd"},
		"no CUDA": {instead(`12080, "error": ""`, `12080, "error": "no libcudart"`), nil, "no libcudart",
			"HVD_CUDART_LIBRARY"},
		"old NCCL": {instead(`22809, "error": ""`, `22809, "error": "too old"`), nil, "too old", "HVD_NCCL_LIBRARY"},
		"fails":    {"", errors.New("exit status 2"), "python3 cannot load libgohvd: exit status 2", "make libgohvd"},
		"no JSON":  {"what?", nil, "python3 cannot load libgohvd: invalid character", "make libgohvd"},
	} {
		s := soundSystem()
		s.Output = func(context.Context, []string, []string) (string, error) { return c.text, c.err }
		holds(t, name, look(t, s, "nccl"), "ok nccl: "+c.want)
		s.Root = files{"dev/nvidia0": ""}.fs()
		lines := look(t, s, "nccl")
		if c.fix == "" {
			holds(t, name, lines, "ok nccl: "+c.want)
			continue
		}
		holds(t, name, lines, "warn nccl: "+c.want)
		holds(t, name, lines, "warn nccl: "+c.fix)
	}
}

func TestSIMD(t *testing.T) {
	for _, c := range []struct {
		simd, arch string
		noasm      bool
		want       string
	}{
		{"neon", "arm64", false, "ok simd: neon"},
		{"none", "amd64", true, "warn simd: without the tag"},
		{"none", "arm64", true, "warn simd: without the tag"},
		{"none", "amd64", false, "warn simd: AVX2"},
		{"none", "riscv64", false, "warn simd: use amd64 or arm64"},
	} {
		s := soundSystem()
		s.SIMD, s.Arch, s.Build.NoAsm = c.simd, c.arch, c.noasm
		holds(t, fmt.Sprint(c), look(t, s, "simd"), c.want)
	}
}

func TestCores(t *testing.T) {
	for name, c := range map[string]struct {
		files   files
		threads int
		want    []string
	}{
		"all":   {soundFiles, 4, []string{"ok online: 3", "ok affinity: 4", "ok GOMAXPROCS: 4"}},
		"fewer": {soundFiles, 1, []string{"ok online", "ok affinity", "ok GOMAXPROCS: 1"}},
		"more": {soundFiles, 5, []string{"ok online", "ok affinity",
			"warn GOMAXPROCS: 5 threads for 4 cores"}},
		"no stat": {soundFiles.without("proc/stat"), 4, []string{"warn online: proc/stat", "ok affinity",
			"ok GOMAXPROCS"}},
	} {
		s := soundSystem()
		s.Root, s.GOMAXPROCS = c.files.fs(), c.threads
		holds(t, name, look(t, s, "cores"), c.want...)
	}
}

func TestTopology(t *testing.T) {
	const cpu = "sys/devices/system/cpu/cpu%d/topology/thread_siblings_list"
	twoNodes := files{"sys/devices/system/node/node0/cpulist": "0-1\n", "sys/devices/system/node/node1/cpulist": "2-3\n",
		fmt.Sprintf(cpu, 0): "0-1\n", fmt.Sprintf(cpu, 1): "0-1\n", fmt.Sprintf(cpu, 2): "2-3\n", fmt.Sprintf(cpu, 3): "2-3\n"}
	for name, c := range map[string]struct {
		files   files
		allowed binding.CPUs
		want    string
	}{
		"two nodes": {twoNodes, binding.CPUs{0, 1, 2, 3},
			"ok topology: 2 cores on CPUs 0-3, in 2 of 2 NUMA nodes: node 0 has 0-1, node 1 has 2-3"},
		"a mask":   {twoNodes, binding.CPUs{3}, "ok topology: 1 core on CPUs 3, in 1 of 2 NUMA nodes: node 1 has 3"},
		"no sysfs": {files{}, binding.CPUs{3}, "warn topology: read the topology of the processor"},
	} {
		s := soundSystem()
		s.Root, s.Allowed = c.files.fs(), c.allowed
		holds(t, name, look(t, s, "topology"), c.want)
	}
}

// TestQuota checks the quota that is reported for cgroups of version 1 and 2. It must be the smallest quota
// of the cgroup and the cgroups above it.
func TestQuota(t *testing.T) {
	const v1 = "proc/self/cgroup"
	cpu := func(dir, quota, period string) files {
		return files{dir + "/cpu.cfs_quota_us": quota + "\n", dir + "/cpu.cfs_period_us": period + "\n"}
	}
	for name, c := range map[string]struct {
		more files
		want string
	}{
		"no cgroup": {files{v1: ""}, "ok quota: no limit"},
		"v2 none":   {files{"sys/fs/cgroup/job/cpu.max": "max 100000\n"}, "ok quota: no limit"},
		"v2 exact": {files{"sys/fs/cgroup/job/cpu.max": "400000 100000\n"},
			"ok quota: 4 cores (/sys/fs/cgroup/job/cpu.max)"},
		"v2 less": {files{"sys/fs/cgroup/job/cpu.max": "150000 100000\n"},
			"warn quota: 1.5 cores of the 4"},
		"v2 above": {files{"sys/fs/cgroup/job/cpu.max": "600000 100000\n",
			"sys/fs/cgroup/cpu.max": "100000 50000\n"},
			"warn quota: 2 cores of the 4 that are visible (/sys/fs/cgroup/cpu.max)"},
		"v2 below": {files{"sys/fs/cgroup/job/cpu.max": "100000 100000\n",
			"sys/fs/cgroup/cpu.max": "300000 100000\n"},
			"warn quota: 1 cores of the 4 that are visible (/sys/fs/cgroup/job/cpu.max)"},
		"v2 container": {files{v1: "0::/host/path\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"},
			"warn quota: 0.5 cores"},
		"v2 escape": {files{v1: "0::/../../x\n", "sys/fs/cgroup/x/cpu.max": "50000 100000\n"},
			"warn quota: 0.5 cores"},
		"v2 unified": {files{v1: "3:cpuset:/\n0::/j\n", "sys/fs/cgroup/unified/j/cpu.max": "50000 100000\n"},
			"warn quota: 0.5 cores"},
		"v2 nonsense": {files{"sys/fs/cgroup/job/cpu.max": "many\n"}, "ok quota: no limit"},
		"v2 negative": {files{"sys/fs/cgroup/job/cpu.max": "100 -5\n"}, "ok quota: no limit"},
		"no path": {files{v1: "0::\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"},
			"warn quota: 0.5 cores"},
		"v2 zero": {files{"sys/fs/cgroup/job/cpu.max": "100 0\n"}, "ok quota: no limit"},
		"v1 none": {cpu("sys/fs/cgroup/cpu/a", "-1", "100000").with(files{v1: "4:cpu:/a\n0::/\n"}),
			"ok quota: no limit"},
		"v1 less": {cpu("sys/fs/cgroup/cpu/a", "100000", "100000").with(files{v1: "4:cpu:/a/b\n"}),
			"warn quota: 1 cores of the 4 that are visible (/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us)"},
		"v1 joined": {cpu("sys/fs/cgroup/cpu,cpuacct/a", "100000",
			"50000").with(files{v1: "4:cpu,cpuacct:/a\n"}), "warn quota: 2 cores"},
		"v1 other": {cpu("sys/fs/cgroup/cpu/a", "100000", "100000").with(files{v1: "4:cpuset:/a\n"}),
			"ok quota: no limit"},
		"bad lines": {files{v1: "4\n:\n\n0::/job\n", "sys/fs/cgroup/job/cpu.max": "50000 100000\n"},
			"warn quota: 0.5 cores"},
	} {
		s := soundSystem()
		s.Root = soundFiles.with(c.more).fs()
		holds(t, name, look(t, s, "quota"), c.want)
	}
}

func TestMemory(t *testing.T) {
	for text, want := range map[string]string{
		soundFiles["proc/meminfo"]:                            "ok memory: 4 GiB available of 8 GiB",
		"MemTotal: 8388608 kB\nMemAvailable: 1048576 kB\n":    "ok memory: 1 GiB",
		"MemTotal: 8388608 kB\nMemAvailable: 1048575 kB\n":    "warn memory: 1024 MiB available of 8 GiB",
		"MemTotal: 8388608 kB\n":                              "warn memory: no MemTotal or MemAvailable",
		"MemTotal: 8388608 kB\nMemAvailable: much\nMem:\n\n ": "warn memory: no MemTotal or MemAvailable",
	} {
		s := soundSystem()
		s.Root = files{"proc/meminfo": text}.fs()
		holds(t, text, look(t, s, "memory"), want)
	}
}

// TestMemoryLimit checks how much memory is reported as left in cgroups of version 1 and 2. The line must be
// about the cgroup with the least memory left. Cached pages of files must count as free.
func TestMemoryLimit(t *testing.T) {
	v2 := func(dir, limit, usage string) files {
		return files{"sys/fs/cgroup" + dir + "/memory.max": limit + "\n", "sys/fs/cgroup" + dir +
			"/memory.current": usage + "\n"}
	}
	v1 := func(limit, usage string) files {
		return files{"proc/self/cgroup": "4:memory:/job\n",
			"sys/fs/cgroup/memory/job/memory.limit_in_bytes": limit + "\n",
			"sys/fs/cgroup/memory/job/memory.usage_in_bytes": usage + "\n"}
	}
	for name, c := range map[string]struct {
		more files
		want string
	}{
		"none":   {nil, "ok cgroup: no limit"},
		"v2 max": {v2("/job", "max", "5"), "ok cgroup: no limit"},
		"v2 enough": {v2("/job", "3221225472", "2147483648"),
			"ok cgroup: 1 GiB left of 3 GiB (/sys/fs/cgroup/job/memory.max)"},
		"v2 little": {v2("/job", "3221225472", "2147483649"), "warn cgroup: left of 3 GiB"},
		"v2 over":   {v2("/job", "1024", "2147483649"), "warn cgroup: 0 bytes left of 1 KiB"},
		"v2 above": {v2("/job", "4294967296", "0").with(v2("", "2147483648", "0")),
			"ok cgroup: 2 GiB left of 2 GiB (/sys/fs/cgroup/memory.max)"},
		"v2 below": {v2("/job", "2147483648", "0").with(v2("", "4294967296", "0")),
			"ok cgroup: 2 GiB left of 2 GiB (/sys/fs/cgroup/job/memory.max)"},
		"v2 usage": {files{"sys/fs/cgroup/job/memory.max": "1"}, "ok cgroup: no limit"},
		"v2 cache": {v2("/job", "2147483648",
			"2147483648").with(files{
			"sys/fs/cgroup/job/memory.stat": "anon 5\ninactive_file 1073741824\nactive_file 1073741823\n"}),
			"ok cgroup: 2 GiB left"},
		"v2 much cache": {v2("/job", "2147483648",
			"5").with(files{"sys/fs/cgroup/job/memory.stat": "inactive_file 6\n"}),
			"ok cgroup: 2 GiB left of 2 GiB"},
		"v1 none":   {v1("9223372036854771712", "5"), "ok cgroup: no limit"},
		"v1 little": {v1("536870912", "268435456"), "warn cgroup: 256 MiB left of 512 MiB"},
		"v1 cache": {v1("536870912",
			"536870912").with(files{
			"sys/fs/cgroup/memory/job/memory.stat": "inactive_file 9\ntotal_inactive_file 1048576\ntotal_active_file 1048576\n"}),
			"warn cgroup: 2 MiB left of 512 MiB"},
	} {
		s := soundSystem()
		s.Root = soundFiles.with(c.more).fs()
		holds(t, name, look(t, s, "cgroup"), c.want)
	}
}

func TestDevShm(t *testing.T) {
	for _, c := range []struct {
		free uint64
		err  error
		want string
	}{
		{gib, nil, "ok /dev/shm: 1 GiB free of 2 GiB; gohvd does not use it"},
		{gib - 4096, nil, "warn /dev/shm: PyTorch's data loaders"},
		{0, nil, "warn /dev/shm: 0 bytes free of 2 GiB"},
		{0, unix.ENOENT, "warn /dev/shm: no such file or directory; gohvd does not use it"},
	} {
		s := soundSystem()
		s.Statfs = func(path string) (unix.Statfs_t, error) {
			if path != "/dev/shm" {
				t.Errorf("asked for %q", path)
			}
			return unix.Statfs_t{Bsize: 4096, Bavail: c.free / 4096, Blocks: 2 * gib / 4096}, c.err
		}
		holds(t, fmt.Sprint(c), look(t, s, "/dev/shm"), c.want)
	}
	for n, want := range map[uint64]string{0: "0 bytes", 1023: "1023 bytes", 1024: "1 KiB",
		64 << 20: "64 MiB", 3 << 29: "1.5 GiB", 1<<64 - 1: "16 EiB"} {
		if got := bytesText(n); got != want {
			t.Errorf("%d: got %q, want %q", n, got, want)
		}
	}
}

// TestRanks checks that the scarcest resource decides how many ranks a host can run, and that Crowded names
// each resource that does not suffice.
func TestRanks(t *testing.T) {
	const group, pids, none = "sys/fs/cgroup/job/", "sys/kernel/pid_max", unix.RLIM_INFINITY
	status := func(caps string) files {
		return files{"proc/self/status": "Name:\tx\nThreads:\t9\nCapEff:\t" + caps + "\n"}
	}
	for name, c := range map[string]struct {
		more          files
		nofile, nproc uint64
		want          string
		crowded       int // number of texts for 100 ranks
	}{
		"memory": {nil, none, none, "ok ranks: this host can run about 256 ranks", 0},
		"memory of the cgroup": {files{group + "memory.max": "60000000", group + "memory.current": "10000000"}, 65536, none,
			"warn ranks: fewer ranks than it has cores: 3 by 47.68 MiB of memory", 1},
		"open files": {nil, 32 + 500, none,
			"ok ranks: this host can run about 100 ranks of a small program: 100 by 532 open files", 0},
		"few files": {nil, 32 + 499, none, "ok ranks: 99 by 531 open files", 1},
		"pid_max": {files{"proc/" + pids: "1200\n"}, 65536, none,
			"ok ranks: 100 by 1200 processes and threads (/proc/" + pids, 0},
		"threads in use": {files{"proc/" + pids: "32768\n", "proc/loadavg": "0.1 0.1 0.1 1/32000 5\n"}, 65536, none,
			"ok ranks: 64 by 768 processes and threads (/proc/" + pids, 1},
		"pids of the cgroup": {files{"proc/" + pids: "32768\n", group + "pids.max": "1200", group + "pids.current": "1"},
			531, none, "ok ranks: 99 by 531 open files (hvdrun needs 5 for each rank, the lowest rank up to 4), 99 by 1199 processes", 2},
		"threads of the user": {status("0000000000000400"), none, 9 + 1199,
			"ok ranks: 99 by 1199 processes and threads (RLIMIT_NPROC", 1},
		"threads of root": {status("000001ffffffffff"), none, 1199,
			"ok ranks: this host can run about 256 ranks", 0},
	} {
		s := soundSystem()
		s.Root = soundFiles.with(c.more).fs()
		s.Rlimit = func(resource int) (unix.Rlimit, error) {
			n := c.nofile
			if resource == unix.RLIMIT_NPROC {
				n = c.nproc
			}
			return unix.Rlimit{Cur: n, Max: n}, nil
		}
		holds(t, name, look(t, s, "ranks"), c.want)
		texts := s.Crowded(100)
		if len(texts) != c.crowded {
			t.Errorf("%s: got %q for 100 ranks, want %d texts", name, texts, c.crowded)
		}
		for _, text := range texts {
			if !strings.HasPrefix(text, "100 ranks on this host: it has ") {
				t.Errorf("%s: got %q", name, text)
			}
		}
	}
}

func TestLimits(t *testing.T) {
	const none = unix.RLIM_INFINITY
	for _, c := range []struct {
		check    string
		resource int
		cur      uint64
		want     string
	}{
		{"file size", unix.RLIMIT_FSIZE, none, "ok file size: unlimited"},
		{"file size", unix.RLIMIT_FSIZE, gib, "ok file size: 1 GiB"},
		{"file size", unix.RLIMIT_FSIZE, gib - 1, "warn file size: 1024 MiB"},
		{"locked memory", unix.RLIMIT_MEMLOCK, 65536, "ok locked memory: 64 KiB"},
		{"open files", unix.RLIMIT_NOFILE, none, "ok open files: unlimited"},
		{"open files", unix.RLIMIT_NOFILE, 1024,
			"ok open files: 1024 (RLIMIT_NOFILE): the lowest rank of a host needs up to 4 files for each other rank there, and rank 0 2 for each rank on another host, enough for 249 ranks on its host or 497 on others"},
		{"open files", unix.RLIMIT_NOFILE, 1023, "warn open files: enough for 248 ranks on its host or 496 on others"},
		{"open files", unix.RLIMIT_NOFILE, 128, "warn open files: enough for 25 ranks on its host or 49 on others"},
		{"open files", unix.RLIMIT_NOFILE, 127, "fail open files: enough for 24 ranks on its host or 48 on others"},
		{"open files", unix.RLIMIT_NOFILE, 3, "fail open files: enough for 1 ranks on its host or 1 on others"},
	} {
		s := soundSystem()
		s.Rlimit = func(resource int) (unix.Rlimit, error) {
			if resource != c.resource {
				t.Errorf("%s: asked for limit %d, want %d", c.check, resource, c.resource)
			}
			return unix.Rlimit{Cur: c.cur, Max: none}, nil
		}
		holds(t, fmt.Sprint(c), look(t, s, c.check), c.want)
	}

	s := soundSystem()
	s.Root = files{"dev/infiniband/uverbs0": ""}.fs()
	holds(t, "infiniband", look(t, s, "locked memory"), "ok locked memory: unlimited")
	s.Rlimit = func(int) (unix.Rlimit, error) { return unix.Rlimit{Cur: 1 << 20}, nil }
	holds(t, "infiniband", look(t, s, "locked memory"), "warn locked memory: 1 MiB (RLIMIT_MEMLOCK)")
}

// TestInterfaces checks the lines about interfaces that are up, down, or without an address, and about
// bridges. A missing loopback must be a failure.
func TestInterfaces(t *testing.T) {
	lo := Interface{Name: "lo", Addrs: []string{"::1/128"}, MTU: 65536, Up: true, Running: true,
		Loopback: true}
	with := func(i Interface, change func(*Interface)) Interface {
		i.Addrs = slices.Clone(i.Addrs)
		change(&i)
		return i
	}
	eth := Interface{Name: "eth0", Addrs: []string{"10.0.0.2/24", "fd00::2/64"}, MTU: 9000, Up: true,
		Running: true}
	var many []Interface
	for i := range maxIdle + 2 {
		many = append(many, Interface{Name: fmt.Sprintf("v%d", i)})
	}
	for name, c := range map[string]struct {
		all  []Interface
		want []string
	}{
		"lo alone": {[]Interface{lo}, []string{"ok interface lo: up, mtu 65536, ::1/128"}},
		"two": {[]Interface{lo, eth},
			[]string{"ok interface lo", "ok interface eth0: up, mtu 9000, 10.0.0.2/24 fd00::2/64"}},
		"down": {[]Interface{lo, with(eth, func(i *Interface) { i.Up = false })},
			[]string{"ok interface lo", "warn interface eth0: down, mtu"}},
		"no carrier": {[]Interface{lo, with(eth, func(i *Interface) { i.Running = false })},
			[]string{"ok interface lo", "warn interface eth0: without a carrier"}},
		"no member": {[]Interface{lo, with(eth, func(i *Interface) {
			i.Name, i.Running = "docker0", false
		})}, []string{"ok interface lo", "ok interface docker0: a bridge that has no member that is up, mtu"}},
		"idle": {append([]Interface{lo}, many[:2]...),
			[]string{"ok interface lo", "ok no address: v0 v1"}},
		"many idle": {append([]Interface{lo}, many...),
			[]string{"ok interface lo", "ok no address: v7 and 2 other interfaces"}},
		"none":  {nil, []string{"fail loopback: ip link set lo up"}},
		"no lo": {[]Interface{eth}, []string{"ok interface eth0", "fail loopback"}},
		"lo down": {[]Interface{with(lo, func(i *Interface) { i.Up = false })},
			[]string{"warn interface lo: down", "fail loopback"}},
		"lo empty": {[]Interface{with(lo, func(i *Interface) { i.Addrs = nil })},
			[]string{"ok no address: lo", "fail loopback"}},
		"lo other": {[]Interface{with(lo, func(i *Interface) { i.Addrs[0] = "10.1.1.1/32" })},
			[]string{"ok interface lo", "fail loopback"}},
		"no lo flag": {[]Interface{with(lo, func(i *Interface) { i.Loopback = false })},
			[]string{"ok interface lo", "fail loopback"}},
	} {
		s := soundSystem()
		s.Root = files{"sys/class/net/docker0/bridge/bridge_id": ""}.fs()
		s.Interfaces = func() ([]Interface, error) { return c.all, nil }
		holds(t, name, look(t, s, "interfaces"), c.want...)
	}
}

func TestHostName(t *testing.T) {
	for name, c := range map[string]struct {
		addrs []string
		err   error
		hosts []string
		want  string
	}{
		"found": {[]string{"10.0.0.2", "127.0.1.1"}, nil, []string{"h1"},
			"ok host name: h0 is 10.0.0.2 127.0.1.1"},
		"loopback": {[]string{"127.0.1.1", "::1"}, nil, nil,
			"ok host name: h0 is 127.0.1.1 ::1, which only this host can reach"},
		"loopback with hosts": {[]string{"127.0.1.1", "::1"}, nil, []string{"h1"},
			"warn host name: other hosts cannot reach"},
		"not found": {nil, errors.New("no such host"), nil, "warn host name: h0: no such host"},
	} {
		s := soundSystem()
		s.Hosts = c.hosts
		s.LookupHost = func(_ context.Context, name string) ([]string, error) {
			if name != "h0" {
				t.Errorf("asked for %q, want h0", name)
			}
			return c.addrs, c.err
		}
		holds(t, name, look(t, s, "host name"), c.want)
	}
}

func TestClock(t *testing.T) {
	for _, c := range []struct {
		state    int
		status   int32
		maxError int64
		want     string
	}{
		{unix.TIME_OK, 0, 2500, "ok clock: wrong by at most 2.5ms"},
		{unix.TIME_OK, 0, 1e6, "ok clock: wrong by at most 1s"},
		{unix.TIME_OK, 0, 1e6 + 1, "warn clock: may be wrong by 1s"},
		{unix.TIME_ERROR, 0, 0, "warn clock: not synchronised"},
		{unix.TIME_OK, unix.STA_UNSYNC, 0, "warn clock: not synchronised"},
	} {
		s := soundSystem()
		s.Clock = func() (int, unix.Timex, error) {
			return c.state, unix.Timex{Status: c.status, Maxerror: c.maxError}, nil
		}
		holds(t, fmt.Sprint(c), look(t, s, "clock"), c.want)
	}
}

// TestLauncher checks the lines for several environments. Each kind of launcher must have a line, and one
// line must say which rank the environment gives.
func TestLauncher(t *testing.T) {
	s := soundSystem()
	kinds := []string{"hvdrun", "HVD_SIZE=1", "torchrun", "Open MPI", "MVAPICH", "LSF jsrun", "MPICH (PMI)", "Flux",
		"Slurm", "Kubernetes", "AWS Batch", "plain environment", "Cray PALS", "Cray ALPS", "PMIx", "PMI over a port", "PBS pbsdsh"}
	for _, test := range []struct {
		environ []string
		want    []string // the lines that must not be ok
		said    string   // text that some line must contain
	}{
		{nil, nil, "neither HOROVOD_RANK nor HOROVOD_SIZE is set"},
		{[]string{"OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE=2"},
			[]string{"fail Open MPI: rank 1 of 2, by OMPI_COMM_WORLD_RANK; the ranks meet nowhere: Open MPI does not say"}, ""},
		{[]string{"OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE=2", "HVD_RENDEZVOUS_HOST=h", "HVD_RENDEZVOUS_PORT=7"}, nil,
			"the ranks meet at a store of rank 0, h:7"},
		{[]string{"RANK=1", "WORLD_SIZE=2", "MASTER_ADDR=localhost", "MASTER_PORT=29500"}, nil,
			"rank 1 of 2, by RANK; the ranks meet at a store of rank 0, published at 127.0.0.1:29500"},
		{[]string{"RANK=1", "WORLD_SIZE=2", "HVD_UNIQUE_ID=x"}, nil,
			"rank 1 of 2, by RANK; the ranks meet at HVD_UNIQUE_ID"},
		{[]string{"HOROVOD_RANK=2", "HOROVOD_SIZE=2"},
			[]string{"fail launcher: bootstrap: hvdrun: HOROVOD_RANK is 2"}, "HOROVOD_RANK is 2"},
		{[]string{"RANK=1", "WORLD_SIZE=2"},
			[]string{"fail launcher: bootstrap: plain environment: rank 1 of 2 does not know where the ranks meet: MASTER_ADDR and MASTER_PORT not set"}, ""},
		{[]string{"RANK=1", "WORLD_SIZE=2", "HVD_SIZE=1"}, nil,
			"rank 0 of 1, local rank 0 of 1, cross rank 0 of 1, by HVD_SIZE; the ranks meet nowhere"},
		{[]string{"SLURM_JOB_ID=7", "SLURM_NTASKS=4"},
			[]string{"warn Slurm: SLURM_STEP_ID is not set: this process runs in an allocation for SLURM_NTASKS=4"},
			""},
		{[]string{"SLURM_JOB_ID=7", "SLURM_NTASKS=4", "HVD_SIZE=1"}, nil, "SLURM_NTASKS=4"},
		{[]string{"PMIX_RANK=1"}, []string{"fail launcher: bootstrap: PMIx: HVD_SIZE is not set"}, ""},
		{[]string{"HOROVOD_RANK=0", "HOROVOD_SIZE=1", "RANK=1", "WORLD_SIZE=4", "MASTER_ADDR=h", "MASTER_PORT=7"},
			[]string{"fail launcher: bootstrap: hvdrun says that this process is rank 0 of 1, but plain environment says rank 1 of 4"},
			""},
		{[]string{"HOROVOD_RANK=0", "HOROVOD_SIZE=2", "RANK=1", "WORLD_SIZE=4", "MASTER_ADDR=h", "MASTER_PORT=7"},
			[]string{"warn plain environment: hvdrun says that this process is rank 0 of 2"}, ""},
	} {
		s.Environ = test.environ
		var seen []string
		var bad []Line
		said := false
		for _, l := range look(t, s, "launcher") {
			if l.Status != OK {
				bad = append(bad, l)
			}
			if l.Name != "launcher" {
				seen = append(seen, l.Name)
			}
			said = said || strings.Contains(l.Text, test.said)
		}
		holds(t, fmt.Sprint(test.environ), bad, test.want...)
		if !slices.Equal(seen, kinds) || !said {
			t.Errorf("%q: got lines for %q, want %q, and one with %q", test.environ, seen, kinds, test.said)
		}
	}
}

// TestVariables checks that the settings in the environment are listed in the order of the table, without the
// values of secrets.
func TestVariables(t *testing.T) {
	s := soundSystem()
	s.Environ = []string{"PATH=/bin", "HVD_SECRET=hush hush hush hush", "HVD_UNIQUE_ID=hush",
		"HOROVOD_SIZE=4", "HOROVOD_RANK=1", "HOROVOD_CYCLE_TIME=2",
		"HVD_NO_SETTING=1", "HOROVOD_HOSTNAME=", "HVD_SECRET_FILE=/s"}
	lines := look(t, s, "variables")
	holds(t, "rank", lines, "ok HVD_SECRET_FILE: /s", "ok HOROVOD_CYCLE_TIME: 2", "ok HOROVOD_RANK: 1",
		"ok HOROVOD_SIZE: 4", "ok HVD_UNIQUE_ID: set, not shown", "ok HVD_SECRET: set, not shown")
	if strings.Contains(fmt.Sprint(lines), "hush") {
		t.Errorf("got %v, want no secret", lines)
	}
	s.Environ = []string{"HVD_NO_SETTING=1", "HOROVOD_HOSTNAME="}
	holds(t, "no rank", look(t, s, "variables"), "ok variables: no setting")
}
