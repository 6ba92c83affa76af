// Package pythontest runs the tests of the Python package in the way in which users run programs: under
// hvdrun, with PyTorch and numpy.
package pythontest

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/testcuda"
	"github.com/gohvd/gohvd/internal/testnet"
)

// hvdrun and hvdd are the paths of the programs with these names, and library is that of libgohvd.so.
// TestMain builds them.
var hvdrun, hvdd, library string

func TestMain(m *testing.M) {
	flag.Parse()
	// Four tests run in parallel even on small machines, because the jobs often wait, for ranks, workers and
	// time limits. Each has up to 5 processes of up to 0.7 GB.
	_ = flag.Set("test.parallel", "4")
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "pythontest")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		hvdrun, hvdd = filepath.Join(dir, "hvdrun"), filepath.Join(dir, "hvdd")
		if err := testnet.Link(dir, "cmd/hvdrun", "cmd/hvdd"); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		library = filepath.Join(dir, "libgohvd.so")
		if out, err := exec.Command("../../scripts/build-libgohvd.sh", library).CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "building the library: %v\n%s", err, out)
			return 1
		}
		status := testcuda.WithLibraries(m.Run)
		if err := endForking(); err != nil {
			fmt.Fprintf(os.Stderr, "forked.py: %v\n", err)
			status = 1
		}
		return status
	}())
}

// withoutRanks lists the test modules that need no other ranks. They run only in the job with one rank.
var withoutRanks = []string{"test_core_exit", "test_core_process", "test_core_programs", "test_core_wheel"}

// withThreeRanks lists the test modules, and the tests of others, in which a third rank differs from the
// second: a root, a member or a receiver that is neither the first nor the last rank, sets of several sizes,
// ranks that join one after the other, and algorithms for numbers that are no power of two. The other tests
// run on two ranks.
var withThreeRanks = []string{"test_numpy", "test_torch_ops", "test_torch_sets",
	"test_torch_optimizer.Training.test_members_of_a_set",
	"test_torch_optimizer.Training.test_uneven_data_and_join",
	"test_torch_elastic.Elastic.test_sync_in_pairs"}

// withoutSidecars lists the test modules that test what the package computes with the results of operations,
// which are the same in sidecars.
var withoutSidecars = []string{"test_shim", "test_torch_autograd", "test_torch_functions", "test_torch_modes",
	"test_torch_optimizer", "test_torch_sync_batch_norm"}

// pythonLimit limits the time of the Python tests for one number of ranks. In addition each test has a limit
// of its own, but pythonLimit also ends a program that hangs outside of the tests.
const pythonLimit = 20 * time.Minute

// python returns the directory of the Python package.
func python(t testing.TB) string {
	t.Helper()
	dir, err := filepath.Abs("../../python")
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// job returns a command that runs a Python program on n ranks under hvdrun, with the Python package of this
// checkout.
func job(t testing.TB, n int, args ...string) *exec.Cmd {
	t.Helper()
	return jobOf(t, []string{testnet.Python}, n, args...)
}

// jobOf is like job, with the given interpreter, or what takes its place.
func jobOf(t testing.TB, interpreter []string, n int, args ...string) *exec.Cmd {
	t.Helper()
	// The start timeout is long, because a rank may wait for another rank that still runs tests without other
	// ranks.
	flags := []string{"-np", fmt.Sprint(n), "--start-timeout", fmt.Sprint(pythonLimit.Seconds())}
	return launched(t, slices.Concat(flags, interpreter, args)...)
}

// launched returns a command that runs hvdrun with the Python package of this checkout. args has the flags of
// hvdrun and the command of the ranks.
func launched(t testing.TB, args ...string) *exec.Cmd {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), pythonLimit)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, hvdrun, args...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 20 * time.Second
	cmd.Env = append(environment(t), "HVD_RUN="+hvdrun)
	return cmd
}

// ranksOf starts a Python program on n ranks of this host, without hvdrun, which would end ranks some seconds
// after the death of another one, and the processes that a rank leaves behind. It returns a function for each
// rank, which waits for the end of its process and returns its output.
func ranksOf(t *testing.T, n int, env []string, args ...string) (ends []func() (string, error)) {
	t.Helper()
	ctx, dir := testnet.Context(t), t.TempDir()
	env = slices.Concat(environment(t), []string{"HVD_INIT_METHOD=file://" + filepath.Join(dir, "job"),
		"HOROVOD_SIZE=" + fmt.Sprint(n)}, env)
	for r := range n {
		cmd := exec.CommandContext(ctx, testnet.Python, args...)
		cmd.Env = append(slices.Clone(env), "HOROVOD_RANK="+fmt.Sprint(r))
		file := filepath.Join(dir, fmt.Sprint(r)) // no pipe, which processes that are left would keep open
		out, err := os.Create(file)
		if err != nil {
			t.Fatal(err)
		}
		defer out.Close()
		cmd.Stdout, cmd.Stderr = out, out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		ends = append(ends, func() (string, error) {
			err := <-ended
			text, readErr := os.ReadFile(file)
			if readErr != nil {
				t.Error(readErr)
			}
			return string(text), err
		})
	}
	return ends
}

// environment returns the environment of a Python program that uses the Python package of this checkout.
func environment(t testing.TB) []string {
	return append(os.Environ(), "PYTHONPATH="+python(t), "PYTHONDONTWRITEBYTECODE=1", "OMP_NUM_THREADS=1",
		"HVD_LIBRARY="+library, "HVD_SIDECAR_BINARY="+hvdd)
}

// sidecarVariable makes each rank of a Python program run in a sidecar of its own.
const sidecarVariable = "HVD_SIDECAR=spawn"

// All tests of the Python package pass on 1 rank, those that need ranks on 2 or 3 ranks (withThreeRanks),
// with PyTorch 2 if it is installed, and those of the operations on 2 ranks that run in sidecars. (make
// test-torch2 runs all tests with both versions of PyTorch on 1, 2 and 3 ranks.) All test files run in one
// program, because importing torch takes longer than most of them.
func TestPython(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob(filepath.Join(python(t), "tests", "test_*.py"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no Python tests: %v", err)
	}
	testnet.NeedTorch(t)
	var seen coverage
	t.Run("ranks", func(t *testing.T) {
		for _, c := range []struct {
			ranks             int
			newTorch, sidecar bool
		}{{1, false, false}, {2, true, false}, {3, true, false}, {2, false, true}} {
			t.Run(fmt.Sprintf("%d,sidecar=%v", c.ranks, c.sidecar), func(t *testing.T) {
				t.Parallel()
				pythonTests(t, &seen, files, c.ranks, c.newTorch, c.sidecar)
			})
		}
	})
	seen.report(t)
}

// pythonTests runs the test files on n ranks, and adds the tests that rank 0 has run to seen.
func pythonTests(t *testing.T, seen *coverage, files []string, n int, newTorch, sidecar bool) {
	interpreter := []string{testnet.Python}
	switch {
	case newTorch:
		interpreter = withTorch(t, testnet.NewestTorch(t))
	case sidecar:
		interpreter = withTorch(t, testnet.Python)
	}
	modules := testModules(files, n, sidecar)
	args := []string{"-W", "error::ResourceWarning", "-m", "unittest", "-v"}
	if n == 1 {
		// The development mode checks the memory and the locks of the interpreter.
		args = append([]string{"-X", "dev"}, args...)
	}
	cmd := jobOf(t, interpreter, n, append(args, modules...)...)
	cmd.Dir = filepath.Dir(files[0])
	if sidecar {
		cmd.Env = append(cmd.Env, sidecarVariable)
	}
	out, err := cmd.CombinedOutput()
	text := string(out)
	if err != nil || strings.Count(text, ":Ran ") != n {
		t.Fatalf("%v\n%s", err, text)
	}
	rank0 := ofRank0(text)
	seen.add(pythonTest.FindAllStringSubmatch(rank0, -1), pythonSkip.FindAllStringSubmatch(rank0, -1))
	// If the output does not have the name of a module, no test of this module has run.
	for _, module := range modules {
		if !strings.Contains(text, "("+module+".") && !strings.Contains(text, "("+module+")") {
			t.Errorf("no test of %s was run\n%s", module, text)
		}
	}
}

// testModules returns the modules with the tests that run on n ranks, or in sidecars, or the names of tests.
func testModules(files []string, n int, sidecar bool) (modules []string) {
	if n == 3 {
		return withThreeRanks
	}
	for _, file := range files {
		module := strings.TrimSuffix(filepath.Base(file), ".py")
		leftOut := n > 1 && slices.Contains(withoutRanks, module) ||
			n > 1 && !sidecar && slices.Contains(withThreeRanks, module) ||
			sidecar && slices.Contains(withoutSidecars, module)
		if !leftOut {
			modules = append(modules, module)
		}
	}
	return modules
}

// pythonTest matches what unittest prints about a test, and pythonSkip about one that was skipped. The test
// may have a docstring, whose first line is printed. Output of the test before it may be on the same line.
var (
	pythonTest = regexp.MustCompile(`(?m)\btest_\w+ \(([\w.]+)\)`)
	pythonSkip = regexp.MustCompile(pythonTest.String() + `(?:\n.*)? \.\.\. skipped ['"](.*)['"]$`)
)

// ofRank0 returns the standard error output of rank 0 in the output of hvdrun.
func ofRank0(out string) string {
	var b strings.Builder
	for line := range strings.Lines(out) {
		if text, ok := strings.CutPrefix(line, "[0]<stderr>:"); ok {
			b.WriteString(text)
		}
	}
	return b.String()
}

// coverage has the names of the Python tests that were run, and for each one that was skipped a reason.
type coverage struct {
	mu      sync.Mutex
	ran     map[string]bool
	skipped map[string]string
}

// add adds the tests of a job, and which of them were skipped. They are matches that contain the name and, in
// the case of skips, the reason.
func (c *coverage) add(tests, skips [][]string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ran == nil {
		c.ran, c.skipped = make(map[string]bool), make(map[string]string)
	}
	skipped := make(map[string]bool)
	for _, skip := range skips {
		skipped[skip[1]], c.skipped[skip[1]] = true, skip[2]
	}
	for _, test := range tests {
		c.ran[test[1]] = c.ran[test[1]] || !skipped[test[1]]
	}
}

// report shows the tests that no job has run as skipped tests of Go.
func (c *coverage) report(t *testing.T) {
	for _, name := range slices.Sorted(maps.Keys(c.skipped)) {
		if !c.ran[name] {
			t.Run(name, func(t *testing.T) { t.Skip(c.skipped[name]) })
		}
	}
}

// forkedWorker is the beginning of a program that forks a worker after init, as a DataLoader of torch does.
// The worker runs until the file of the program is gone, if its rank does not end it. The programs do without
// torch, whose import takes longer than the rest.
const forkedWorker = `
import ctypes, multiprocessing, os, pathlib, signal, sys, time
import numpy as np
import gohvd.numpy as hvd

def work():
    while os.path.exists(__file__):
        time.sleep(0.1)

hvd.init()
worker = multiprocessing.get_context("fork").Process(target=work, daemon=True)
worker.start()
x = np.ones(4, np.float32)
`

// pythonVictim is a program that runs allreduces until one of them fails, and then prints the error. After
// some steps, rank 1 ends as the last argument says.
const pythonVictim = forkedWorker + `
for step in range(20):
    hvd.allreduce(x, name="x")
if hvd.rank() == 1:
    print("worker", worker.pid, flush=True)
    if sys.argv[1] == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    elif sys.argv[1] == "SIGSEGV":
        ctypes.string_at(1)
    elif "ValueError" in sys.argv[1]:
        raise ValueError("no luck")
    else:
        os._exit(7)
try:
    while True:
        hvd.allreduce(x, name="x")
except hvd.HorovodInternalError as e:
    print("rank", hvd.rank(), "got", type(e).__name__, str(e).replace("\n", " "), flush=True)
    hvd.shutdown()
`

// Rank 1 dies in several ways: it is killed, it crashes in C code, it exits without shutdown, or it raises an
// exception. Rank 0 gets an error that names rank 1. In a sidecar, it is the same.
func TestPythonKilled(t *testing.T) {
	testnet.NeedTorch(t) // which brings numpy
	for _, c := range []struct {
		how     string
		sidecar bool
	}{
		{"SIGKILL", false}, {"SIGSEGV", false}, {"exit status 7", false}, {"SIGKILL", true}, {"exit status 7", true},
		{"its program raised ValueError: no luck", true},
	} {
		how := c.how
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			cmd := job(t, 2, script(t, pythonVictim), how)
			if c.sidecar {
				cmd.Env = append(cmd.Env, sidecarVariable)
			}
			out, err := cmd.CombinedOutput()
			text := string(out)
			if !namesRank1.MatchString(text) {
				t.Errorf("rank 0 has not heard that rank 1 failed: %v\n%s", err, text)
			}
			if !regexp.MustCompile(`rank 1.*: .*` + how).MatchString(text) {
				t.Errorf("hvdrun does not say how rank 1 has ended: %v\n%s", err, text)
			}
		})
	}
}

// namesRank1 matches what pythonVictim prints at rank 0.
var namesRank1 = regexp.MustCompile("rank 0 got PeerError .*rank 1")

// script writes a program to a file of the test and returns its path.
func script(t *testing.T, program string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "script.py")
	testnet.WriteFile(t, file, program)
	return file
}

// TestPythonWorkerOutlivesRank checks that rank 0 hears of the death of rank 1 although a forked worker of
// rank 1 goes on. It does not wait for heartbeats, because the worker does not keep the connections of the
// rank open.
func TestPythonWorkerOutlivesRank(t *testing.T) {
	testnet.NeedTorch(t) // which brings numpy
	for _, setting := range []string{"HOROVOD_CPU_OPERATIONS=shm", "HOROVOD_CPU_OPERATIONS=tcp", "HVD_SIDECAR=spawn"} {
		t.Run(setting, func(t *testing.T) {
			t.Parallel()
			ends := ranksOf(t, 2, []string{setting, "HVD_LIVENESS_SECONDS=3600"},
				script(t, pythonVictim), "SIGKILL")
			out, err := ends[0]()
			if err != nil || !namesRank1.MatchString(out) {
				t.Errorf("rank 0 has not heard that rank 1 failed: %v\n%s", err, out)
			}
			out, err = ends[1]()
			worker := 0
			if _, scanErr := fmt.Sscanf(out, "worker %d\n", &worker); scanErr != nil || !alive(t, worker) {
				t.Errorf("the worker of rank 1 has ended before rank 0, or did not begin: %v, %v\n%s", scanErr, err,
					out)
			}
		})
	}
}

// forks is a program that forks between operations over TCP, and prints how many sockets the children had.
const forks = `
import os
import numpy as np
import gohvd.numpy as hvd

def sockets():
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink("/proc/self/fd/" + fd).startswith("socket:"):
                yield fd
        except FileNotFoundError:
            pass  # the descriptor of listdir

hvd.init()
x = np.ones(1 << 16, np.float32)
left = 0
for _ in range(20):
    hvd.allreduce(x, name="x")
    pid = os.fork()
    if pid == 0:
        os._exit(len(list(sockets())))
    left += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print("left", left, flush=True)
hvd.shutdown()
`

// A forked process has no socket of the rank, also if the rank waits for no data on the socket, so that it is
// in no epoll instance.
func TestForkClosesSockets(t *testing.T) {
	testnet.NeedTorch(t) // which brings numpy
	t.Parallel()
	cmd := job(t, 2, script(t, forks))
	cmd.Env = append(cmd.Env, "HOROVOD_CPU_OPERATIONS=tcp")
	out, err := cmd.CombinedOutput()
	if n := strings.Count(string(out), "left 0\n"); err != nil || n != 2 {
		t.Errorf("got %d ranks whose children had no socket, want 2: %v\n%s", n, err, out)
	}
}

// pythonWorker is a program that prints the IDs of its processes, with its sidecar if it has one, and then
// runs until it is killed.
const pythonWorker = forkedWorker + `
hvd.allreduce(x, name="x")
children = [pid for path in pathlib.Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]
sidecars = [pid for pid in children if pathlib.Path("/proc", pid, "comm").read_text() == "hvdd\n"]
print("processes", os.getpid(), worker.pid, *sidecars, flush=True)
while True:
    hvd.allreduce(x, name="x")
`

// hvdrun is killed. Afterwards no rank, forked worker or sidecar of the job is running.
func TestHvdrunKilled(t *testing.T) {
	t.Parallel()
	testnet.NeedTorch(t) // which brings numpy
	t.Run("in process", func(t *testing.T) { hvdrunKilled(t, 2) })
	t.Run("sidecar", func(t *testing.T) { hvdrunKilled(t, 3, sidecarVariable) })
}

// hvdrunKilled kills hvdrun and checks that the processes of the ranks end. There are perRank of each rank.
func hvdrunKilled(t *testing.T, perRank int, env ...string) {
	t.Parallel()
	const ranks = 2
	cmd := job(t, ranks, script(t, pythonWorker))
	cmd.Env = append(cmd.Env, env...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var all []int
	lines := bufio.NewScanner(out)
	for len(all) < ranks*perRank && lines.Scan() {
		if _, pids, ok := strings.Cut(lines.Text(), "processes "); ok {
			for pid := range strings.FieldsSeq(pids) {
				n, err := strconv.Atoi(pid)
				if err != nil {
					t.Fatal(err)
				}
				all = append(all, n)
			}
		}
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil || len(all) != ranks*perRank {
		t.Fatalf("%d processes before the end, want %d: %v\n%s", len(all), ranks*perRank, err, &stderr)
	}
	testnet.Eventually(t, "the end of all processes", func() bool {
		return !slices.ContainsFunc(all, func(pid int) bool { return alive(t, pid) })
	})
}

// alive reports whether a process is running. A zombie does not count as running.
func alive(t *testing.T, pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
		return false
	}
	if err != nil {
		t.Fatal(err)
	}
	_, state, _ := strings.Cut(string(stat), ") ") // the state comes after the name, which is in parentheses
	return !strings.HasPrefix(state, "Z") && !strings.HasPrefix(state, "X")
}
