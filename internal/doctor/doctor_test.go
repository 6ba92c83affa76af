package doctor

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/binding"
	"github.com/gohvd/gohvd/internal/config"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const testLimit = 30 * time.Second

// files maps paths to the contents of files.
type files map[string]string

func (f files) fs() fstest.MapFS {
	root := fstest.MapFS{}
	for name, text := range f {
		root[name] = &fstest.MapFile{Data: []byte(text)}
	}
	return root
}

// without returns a copy of f without the named files.
func (f files) without(names ...string) files {
	rest := maps.Clone(f)
	for _, n := range names {
		delete(rest, n)
	}
	return rest
}

// with returns a copy of f to which the files in more are added. They replace files of the same name.
func (f files) with(more files) files {
	all := maps.Clone(f)
	maps.Copy(all, more)
	return all
}

var soundFiles = files{
	"proc/stat":        "cpu  8 0\ncpu0 2 0\ncpu1 2 0\ncpu5 4 0\nintr 9\n",
	"proc/self/cgroup": "0::/job\n",
	"sys/devices/system/cpu/cpu0/topology/thread_siblings_list": "0\n",
	"proc/meminfo": "MemTotal:  8388608 kB\nMemFree: 1 kB\nMemAvailable:   4194304 kB\n",
}

// soundGPUs is what gpuProbe prints on a machine with two GPUs.
const soundGPUs = `{"built": true, "nccl": {"file": "/n/libnccl.so.2", "version": "2.28.9", "code": 22809, "error": ""},
	"cuda": {"file": "/c/libcudart.so.12", "version": "12.8", "code": 12080, "error": ""}, "driver": "13.0", "devices": 2}`

const gib = 1 << 30

// soundSystem returns a machine on which no check finds a problem.
func soundSystem() *System {
	return &System{
		Root: soundFiles.fs(), SIMD: "avx2", Arch: "amd64", Affinity: 4, GOMAXPROCS: 4, Allowed: binding.CPUs{0},
		Build: Build{Go: "go1", Known: true},
		Agent: func(host string, words []string) []string {
			return append([]string{"agent", "-q", host}, words...)
		},
		Rlimit: func(int) (unix.Rlimit, error) {
			return unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY}, nil
		},
		Statfs: func(string) (unix.Statfs_t, error) {
			return unix.Statfs_t{Bsize: 4096, Blocks: 4 * gib / 4096, Bavail: 2 * gib / 4096}, nil
		},
		Clock: func() (int, unix.Timex, error) { return unix.TIME_OK, unix.Timex{Maxerror: 2500}, nil },
		Memfd: func(int64) error { return nil },
		Interfaces: func() ([]Interface, error) {
			return []Interface{
				{Name: "lo", Addrs: []string{"127.0.0.1/8", "::1/128"}, MTU: 65536, Up: true, Running: true,
					Loopback: true},
				{Name: "eth0", Addrs: []string{"10.0.0.2/24"}, MTU: 1500, Up: true, Running: true},
			}, nil
		},
		Hostname:   func() (string, error) { return "h0", nil },
		LookupHost: func(context.Context, string) ([]string, error) { return []string{"10.0.0.2"}, nil },
		Python:     AnyPython,
		LookPath:   func(name string) (string, error) { return "/usr/bin/" + name, nil },
		Output: func(_ context.Context, _, argv []string) (string, error) {
			if slices.Contains(argv, gpuProbe) {
				return soundGPUs, nil
			}
			return `{"version": "3.12.1", "minor": 12, "torch": "2.4", "numpy": "2", "gohvd": "0.6", "at": "/p/gohvd",
				"library": "/p/gohvd/lib/libgohvd.so", "its": "` + config.Version() + `"}`, nil
		},
		Reach: func(context.Context, []string) (string, error) { return "", nil },
	}
}

// look runs the check with this name and returns its lines.
func look(t *testing.T, s *System, name string) []Line {
	t.Helper()
	all := Checks()
	i := slices.IndexFunc(all, func(c Check) bool { return c.Name == name })
	if i < 0 {
		t.Fatalf("no check is called %q", name)
	}
	return Run(t.Context(), s, all[i:i+1], testLimit)
}

// holds checks that lines has one line for each element of want, in this order. An element has the form "ok
// memory: 4 GiB": the status, the name, and a part of the text or of the fix.
func holds(t *testing.T, what string, lines []Line, want ...string) {
	t.Helper()
	if len(lines) != len(want) {
		t.Errorf("%s: got %d lines %+v, want %d: %q", what, len(lines), lines, len(want), want)
		return
	}
	for i, l := range lines {
		head, part, _ := strings.Cut(want[i], ": ")
		if string(l.Status)+" "+l.Name != head || !strings.Contains(l.Text+" | "+l.Fix, part) {
			t.Errorf("%s: got %+v, want %s", what, l, want[i])
		}
		if (l.Fix != "") != (l.Status != OK) {
			t.Errorf("%s: got status %s and fix %q, want a fix unless the status is ok", what, l.Status, l.Fix)
		}
	}
}

// TestASoundMachine checks that all lines are ok on a machine without problems, and that the sections are in
// the right order.
func TestASoundMachine(t *testing.T) {
	s := soundSystem()
	output, asked := s.Output, new(atomic.Int32)
	s.Output = func(ctx context.Context, env, argv []string) (string, error) {
		if slices.Contains(argv, gpuProbe) {
			asked.Add(1)
		}
		return output(ctx, env, argv)
	}
	lines := Run(t.Context(), s, Checks(), testLimit)
	if n := asked.Load(); n != 1 {
		t.Errorf("libgohvd was asked %d times for GPUs, want once", n)
	}
	for _, l := range lines {
		if l.Status != OK || l.Fix != "" || l.Section == "" || l.Name == "" || l.Text == "" {
			t.Errorf("got %+v, want ok and all but the fix", l)
		}
	}
	sections := slices.Compact(func() (all []string) {
		for _, l := range lines {
			all = append(all, l.Section)
		}
		return all
	}())
	want := []string{"build", "found at run time", "python", "processor", "memory", "limits", "network",
		"clock", "hosts", "launch environment"}
	if !slices.Equal(sections, want) {
		t.Errorf("got sections %q, want %q", sections, want)
	}
}

// TestABrokenMachine checks what each check reports on a machine where no file can be read and every call
// fails.
func TestABrokenMachine(t *testing.T) {
	broken := errors.New("broken")
	s := soundSystem()
	s.Root = fstest.MapFS{}
	s.Rlimit = func(int) (unix.Rlimit, error) { return unix.Rlimit{}, broken }
	s.Statfs = func(string) (unix.Statfs_t, error) { return unix.Statfs_t{}, broken }
	s.Clock = func() (int, unix.Timex, error) { return 0, unix.Timex{}, broken }
	s.Memfd = func(int64) error { return broken }
	s.Interfaces = func() ([]Interface, error) { return nil, broken }
	s.Hostname = func() (string, error) { return "", broken }
	s.LookPath = func(string) (string, error) { return "", broken }
	holds(t, "broken", Run(t.Context(), s, Checks(), testLimit),
		"ok version", "ok compiler", "ok frameworks: Go; not built in: PyTorch (python3 is not in PATH", "ok controllers",
		"ok tensor operations: NCCL (python3 is not in PATH", "ok cpu operations",
		"ok nvidia: no device", "ok nccl: python3 is not",
		"ok python: not in PATH",
		"ok simd", "warn online", "ok affinity", "ok GOMAXPROCS", "warn topology: read the topology", "ok quota: no limit",
		"warn memory", "ok cgroup: no limit", "warn /dev/shm: broken", "fail memfd: broken",
		"warn file size: broken", "warn locked memory: broken", "warn open files: broken", "warn ranks: limits of this host are unknown",
		"warn interfaces: broken", "fail host name: broken", "warn clock: broken",
		"warn agent: broken; only jobs on several hosts", "ok hosts: no other hosts were given",
		"ok hvdrun", "ok HVD_SIZE=1", "ok torchrun", "ok Open MPI", "ok MVAPICH", "ok LSF jsrun",
		"ok MPICH (PMI)", "ok Flux", "ok Slurm", "ok Kubernetes", "ok AWS Batch", "ok plain environment", "ok Cray PALS",
		"ok Cray ALPS", "ok PMIx", "ok PMI over a port", "ok PBS pbsdsh",
		"ok variables: no setting")
}

// TestHangs runs checks of which some hang. Run must return in time. Its lines must include a warning for
// each check that hangs and all lines of the other checks.
func TestHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const limit = 8 * time.Second
		release := make(chan struct{})
		hang := func(context.Context, *System) []Line { <-release; return []Line{ok("", "late")} }
		// This check returns exactly when its context ends. No line that arrives in time may be missing.
		// There are many such checks, because select chooses at random if two channels are ready.
		returns := Check{"a", "returns", func(ctx context.Context, _ *System) []Line {
			<-ctx.Done()
			return []Line{fail("x", "y", "z")}
		}}
		checks := []Check{
			{"a", "hangs", hang},
			returns, returns, returns, returns, returns, returns, returns, returns,
			{"b", "answers", func(context.Context, *System) []Line {
				return []Line{ok("", "fine"), ok("more", "fine")}
			}},
			{"b", "hangs too", hang},
		}
		start := time.Now()
		lines := Run(t.Context(), nil, checks, limit)
		if took := time.Since(start); took != limit {
			t.Errorf("took %v, want %v", took, limit)
		}
		holds(t, "hanging", lines, "warn hangs: the check has not ended within 8s",
			"fail x: z", "fail x: z", "fail x: z", "fail x: z", "fail x: z", "fail x: z", "fail x: z",
			"fail x: z",
			"ok answers: fine", "ok more: fine", "warn hangs too: the check has not ended within 8s")
		if lines[0].Section != "a" || lines[len(lines)-1].Section != "b" {
			t.Errorf("got sections %q and %q, want a and b", lines[0].Section, lines[len(lines)-1].Section)
		}

		start = time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		lines = Run(ctx, nil, checks[:2], limit)
		if took := time.Since(start); took != 2*time.Second+grace {
			t.Errorf("after the end of the context: took %v, want %v", took, 2*time.Second+grace)
		}
		holds(t, "interrupted", lines, "warn hangs: within 3s", "fail x: z")
		close(release)
		synctest.Wait()
	})
}

// TestForeignText checks that no control character in a text from another host or from the environment
// reaches the terminal, and that long texts are cut.
func TestForeignText(t *testing.T) {
	const most = 1024
	for _, c := range []struct{ in, want string }{
		{"a\x1b[31mb\nc\td\x00\u202e", `a\x1b[31mb\nc\td\x00\u202e`},
		{"höst", "höst"},
		{strings.Repeat("x", most), strings.Repeat("x", most)},
		{strings.Repeat("x", most+1), strings.Repeat("x", most) + "... (1025 bytes)"},
		{strings.Repeat("x", most-1) + "öö", strings.Repeat("x", most-1) + "... (1027 bytes)"},
	} {
		foreign := func(context.Context, *System) []Line { return []Line{warn(c.in, c.in, "%s", c.in)} }
		got := Run(t.Context(), nil, []Check{{"s", "n", foreign}}, testLimit)[0]
		if got.Name != c.want || got.Text != c.want || got.Fix != c.want {
			t.Errorf("%q: got %+v, want %q", c.in, got, c.want)
		}
	}
}

func TestPrinting(t *testing.T) {
	lines := []Line{
		{"one", "a", OK, "fine", ""},
		{"one", "löng", Warn, "<so so>", "do & this"},
		{"two", "b", Fail, "bad", "do that"},
	}
	var text strings.Builder
	if err := WriteText(&text, lines); err != nil {
		t.Fatal(err)
	}
	want := `one
  ok    a     fine
  warn  löng  <so so>
              fix: do & this
two
  fail  b  bad
           fix: do that
1 ok, 1 warn, 1 fail
`
	if text.String() != want {
		t.Errorf("got\n%s\nwant\n%s", text.String(), want)
	}

	text.Reset()
	if err := WriteJSON(&text, lines[1:2]); err != nil {
		t.Fatal(err)
	}
	want = `[
  {
    "section": "one",
    "name": "löng",
    "status": "warn",
    "text": "<so so>",
    "fix": "do & this"
  }
]
`
	if text.String() != want {
		t.Errorf("got\n%s\nwant\n%s", text.String(), want)
	}
	text.Reset()
	if err := WriteJSON(&text, nil); err != nil || text.String() != "[]\n" {
		t.Errorf("got %q and error %v, want an empty array", text.String(), err)
	}
	for _, write := range []func() error{
		func() error { return WriteText(full{}, lines) }, func() error { return WriteJSON(full{}, lines) },
	} {
		if err := write(); !errors.Is(err, errFull) {
			t.Errorf("got error %v, want %v", err, errFull)
		}
	}
}

var errFull = errors.New("full")

type full struct{}

func (full) Write([]byte) (int, error) { return 0, errFull }

// TestThisMachine runs all checks on this machine and checks the form of their lines.
func TestThisMachine(t *testing.T) {
	s := Here(os.Environ())
	s.Agent = func(host string, words []string) []string { return append([]string{"ssh", host}, words...) }
	lines := Run(t.Context(), s, Checks(), testLimit)
	status := map[string]Status{}
	for _, l := range lines {
		t.Logf("%+v", l)
		if l.Section == "" || l.Name == "" || l.Text == "" || (l.Fix != "") != (l.Status != OK) {
			t.Errorf("got %+v, want section, name, text, and a fix unless ok", l)
		}
		status[l.Name] = l.Status
	}
	// These findings must be ok, because tests of other packages fail on a machine where one of them is not.
	for _, name := range []string{"online", "affinity", "memfd", "interface lo"} {
		if status[name] != OK {
			t.Errorf("%s: got %q, want ok", name, status[name])
		}
	}
	if _, found := status["loopback"]; found || status["compiler"] != OK || !s.Build.Known {
		t.Errorf("got %v, want no line about a missing loopback, and a known compiler", status)
	}
}

// TestEveryCheckIsDescribed checks that docs/doctor.md has a row for each check and a heading for each
// section.
func TestEveryCheckIsDescribed(t *testing.T) {
	page, err := fs.ReadFile(os.DirFS("../../docs"), "doctor.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range Checks() {
		if !strings.Contains(string(page), "| "+c.Name+" |") {
			t.Errorf("docs/doctor.md has no row for %q", c.Name)
		}
		if !strings.Contains(string(page), "\n## "+c.Section+"\n") {
			t.Errorf("docs/doctor.md has no heading %q", c.Section)
		}
	}
}
