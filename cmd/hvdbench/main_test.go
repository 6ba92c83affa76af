package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/testcuda"
	"github.com/gohvd/gohvd/internal/testnet"
)

// deadline is how long a job may take. On a busy machine it takes much longer than usual.
const deadline = 5 * time.Minute

var hvdrunPath string

// TestMain builds hvdrun and runs the tests. If the first argument of the test binary says so, it runs
// hvdbench instead.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "hvdbench" {
		status := run(os.Args[2:], os.Stdout, os.Stderr)
		if err := goleak.Find(goleak.IgnoreTopFunction("os/signal.loop")); err != nil {
			fmt.Fprintln(os.Stderr, err)
			status = 99
		}
		os.Exit(status)
	}
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "hvdbench")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		hvdrunPath = filepath.Join(dir, "hvdrun")
		self, err := os.Executable()
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, "hvdbench"),
				[]byte("#!/bin/sh\nexec '"+self+"' hvdbench \"$@\"\n"), 0o777)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		if err := testnet.Link(dir, "cmd/hvdrun"); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return testcuda.Main(m)
	}())
}

type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// prepare returns a command that runs hvdbench. If np is not 0, the command runs hvdbench under hvdrun with
// np ranks.
func prepare(t *testing.T, np int, env []string,
	args ...string) (cmd *exec.Cmd, stdout, stderr *bytes.Buffer) {
	t.Helper()
	self := testnet.Self(t)
	command := append([]string{self, "hvdbench"}, args...)
	if np > 0 {
		command = append([]string{hvdrunPath, "-np", fmt.Sprint(np), "--tag-output=false"}, command...)
	}
	cmd = exec.Command(command[0], command[1:]...)
	stdout, stderr = new(bytes.Buffer), new(bytes.Buffer)
	cmd.Stdout, cmd.Stderr, cmd.Env = stdout, stderr, append(os.Environ(), env...)
	return cmd, stdout, stderr
}

// launch starts a command. If the command has not ended after deadline, launch kills it. When the test
// removes its folders, in which the command may write, the command has ended.
func launch(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	kill := time.AfterFunc(deadline, func() { _ = cmd.Process.Kill() })
	t.Cleanup(func() {
		_ = cmd.Process.Signal(os.Interrupt) // fails if the command has ended
		_ = cmd.Wait()                       // fails if the test has waited
		kill.Stop()
	})
}

// start prepares a command and launches it.
func start(t *testing.T, np int, env []string, args ...string) (cmd *exec.Cmd, stdout, stderr *bytes.Buffer) {
	t.Helper()
	cmd, stdout, stderr = prepare(t, np, env, args...)
	launch(t, cmd)
	return cmd, stdout, stderr
}

// status waits until a command that was started has ended, and returns its exit status.
func status(t *testing.T, cmd *exec.Cmd) int {
	t.Helper()
	var exit *exec.ExitError
	if err := cmd.Wait(); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode()
}

// parse returns the options for a command line.
func parse(args ...string) (got options, err error) {
	cmd := newCommand(func(_ context.Context, o options) error {
		got = o
		return nil
	})
	cmd.SetArgs(args)
	err = cmd.Execute()
	return got, err
}

func TestFlags(t *testing.T) {
	o, err := parse("all_gather", "-b", "8", "-e", "128M", "-f", "2", "-n", "5", "-w", "3", "-c", "0", "-d",
		"half,int8", "-o", "max", "-r", "all", "-a", "3", "--raw", "--touch", "--offset", "64")
	if err != nil {
		t.Fatal(err)
	}
	if o.kind != message.Allgather || o.minBytes != 8 || o.maxBytes != 128<<20 || o.stepFactor != 2 ||
		o.iters != 5 || o.warmup != 3 || o.checks != 0 ||
		!slices.Equal(o.types, []tensor.DType{tensor.Float16, tensor.Int8}) ||
		!slices.Equal(o.ops, []tensor.ReduceOp{tensor.Max}) || o.roots != nil ||
		o.average != ofMax || !o.raw || !o.touch || o.arena || o.offset != 64 ||
		!slices.Equal(o.placements, []bool{false, true}) {
		t.Errorf("got %+v", o)
	}
	o, err = parse()
	if err != nil || o.kind != message.Allreduce || o.minBytes != 32<<20 || o.maxBytes != 32<<20 ||
		o.iters != 20 || o.warmup != 1 || o.checks != 1 ||
		o.average != byKind || !slices.Equal(o.roots, []int{0}) ||
		!slices.Equal(o.modes, []stepMode{asynchronous}) || o.format != "nccl" {
		t.Errorf("without flags: %+v and error %v", o, err)
	}
	for _, c := range []struct {
		args     []string
		min, max int64
	}{
		{[]string{"--minbytes", "1K"}, 1 << 10, 1 << 10},
		{[]string{"-b", "64M"}, 64 << 20, 64 << 20},
		{[]string{"-b", "1K", "-f", "4"}, 1 << 10, 32 << 20},
		{[]string{"--maxbytes=1K"}, 1 << 10, 1 << 10},
	} {
		if o, err = parse(c.args...); err != nil || o.minBytes != c.min || o.maxBytes != c.max {
			t.Errorf("%q: %d to %d and error %v, want %d to %d", c.args, o.minBytes, o.maxBytes, err, c.min,
				c.max)
		}
	}
	if o, err = parse("--warmup_iters", "7", "--in_place=false"); err != nil || o.warmup != 7 ||
		!slices.Equal(o.placements, []bool{false}) {
		t.Errorf("nccl-tests' spelling: %+v and error %v", o, err)
	}
	if o, err = parse("--many", "1000:256", "--mode", "grouped,async"); err != nil ||
		o.many != (many{count: 1000, bytes: 256}) || len(o.modes) != 2 {
		t.Errorf("many: %+v and error %v", o, err)
	}
	for _, args := range [][]string{
		{"-z", "0"}, {"-b", "x"}, {"-d", "uint32"}, {"-o", "xor"}, {"gather"},
		{"barrier", "--collective", "allreduce"}, {"-b", "2K", "-e", "1K"},
		{"--in-place=false", "--out-of-place=false"}, {"--format", "xml"}, {"-f", "1"}, {"-r", "x"},
		{"--many", "3"},
	} {
		if o, err := parse(args...); err == nil {
			t.Errorf("%q gives %+v, want an error", args, o)
		}
	}
}

func TestWrongUsage(t *testing.T) {
	for _, args := range [][]string{
		{"--no-such-flag"}, {"-z", "0"}, {"gather"}, {"barrier", "allreduce"},
		{"--workload", "gpt2", "--many", "3:8"}, {"--workload", "gpt2", "-b", "8"},
		{"--many", "3:8", "--op", "max"}, {"--mode", "grouped"},
		{"cores", "allreduce"}, {"cores", "-b", "8"}, {"cores", "--format", "json"},
	} {
		var stdout, stderr bytes.Buffer
		if got := run(args, &stdout, &stderr); got != statusUsage ||
			!strings.Contains(stderr.String(), "hvdbench --help") || stdout.Len() > 0 {
			t.Errorf("%q: status %d, stdout %q, stderr %q; want status 2 and a hint", args, got,
				stdout.String(), stderr.String())
		}
	}
}

func TestHelpAndCompletion(t *testing.T) {
	for _, c := range []struct {
		args []string
		want []string
	}{
		{[]string{"--help"}, []string{"-b, --minbytes SIZE", "#wrong", "bench/plot.py a.csv",
			"--workload FILE"}},
		{[]string{"--version"}, []string{"hvdbench version " + config.VersionText() + "\n"}},
		{[]string{"__complete", "allg"}, []string{"allgather\n"}},
		{[]string{"__complete", "--format", ""}, []string{"nccl\ncsv\n"}},
		{[]string{"completion", "bash"}, []string{"__start_hvdbench"}},
		{[]string{"cores", "--help"}, []string{"hvdbench cores [flags]", "less than 0.2 us", "--format"}},
		{[]string{"__complete", "c"}, []string{"cores\t"}},
		{[]string{"__complete", "cores", "--format", ""}, []string{"nccl\ncsv\n"}},
		{[]string{"cores", "--format", "csv"}, []string{"\nstate,core,"}},
	} {
		var stdout, stderr bytes.Buffer
		if got := run(c.args, &stdout, &stderr); got != 0 {
			t.Errorf("%q: status %d: %s", c.args, got, stderr.String())
		}
		for _, want := range c.want {
			if !strings.Contains(stdout.String(), want) {
				t.Errorf("%q prints no %q:\n%s", c.args, want, stdout.String())
			}
		}
	}
}

func TestTwoProcesses(t *testing.T) {
	cmd, stdout, stderr := start(t, 2, nil, "-b", "64", "-e", "4K", "-f", "8", "-n", "5", "--format", "csv")
	if s := status(t, cmd); s != 0 {
		t.Fatalf("status %d\n%s", s, stderr)
	}
	testnet.WantText(t, stdout.String(),
		"\nallreduce,negotiated,slices,false,2,64,16,float32,sum,-1,out-of-place,5,", ",512,128,",
		",4096,1024,")
}

// script runs a script in bench, which needs only Python's standard library, and returns its standard output.
// If there is no python3, script skips the test. In CI it fails the test instead.
func script(t *testing.T, env []string, args ...string) (stdout string, err error) {
	t.Helper()
	if _, err := exec.LookPath("python3"); err != nil {
		if os.Getenv("CI") != "" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	cmd := exec.CommandContext(t.Context(), "python3", args...)
	cmd.Dir = "../../bench"
	cmd.Env = append(os.Environ(), append(env, "HVD_PROGRAMS="+filepath.Dir(hvdrunPath))...)
	var out, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &stderr
	if err = cmd.Run(); err != nil {
		err = fmt.Errorf("%q: %w\n%s", args, err, &stderr)
	}
	return out.String(), err
}

func TestScripts(t *testing.T) {
	if _, err := script(t, nil, "test_scripts.py"); err != nil {
		t.Error(err)
	}
}

// TestTheMatrixOfTheOtherLibraries checks that bench/peers/ours.py measures the same cases as the programs
// for the other libraries, and that bench/report.py can read its rows.
func TestTheMatrixOfTheOtherLibraries(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"resnet50", "gpt2"} {
		if err := os.WriteFile(filepath.Join(dir, name+".txt"), []byte("a 100 10x10\nb 7 7\n"),
			0o666); err != nil {
			t.Fatal(err)
		}
	}
	env := []string{
		"BENCH_NP=2", "BENCH_PEER=ours", "BENCH_SHAPES=" + dir, "BENCH_OPS=barrier,allreduce,gpt2",
		"BENCH_MAX_BYTES=64", "BENCH_VARIANTS=slices,arena-raw",
		"BENCH_SMALL_S=0.001", "BENCH_LARGE_S=0.001", "BENCH_HARD_S=0.001",
	}
	rows, err := script(t, env, "peers/ours.py")
	if err != nil {
		t.Fatal(err)
	}
	// The state of the cores comes before and after the rows of each call of hvdbench.
	const state = "# cores"
	var got []string
	for l := range strings.Lines(rows) {
		f := strings.Split(l, ",")
		if len(f) == 9 {
			l = strings.Join(f[:4], ",")
		} else if f[0] == state {
			l = state
		}
		got = append(got, l)
	}
	want := []string{
		state, "ours,barrier,2,0", state, "ours,allreduce,2,4", "ours,allreduce,2,64", state,
		"ours,gpt2_pertensor,2,428", "ours,gpt2_async,2,428", "ours,gpt2_bucket25,2,428", state,
		"ours-arena-raw,allreduce,2,4", "ours-arena-raw,allreduce,2,64", state,
		"ours-arena-raw,gpt2_pertensor,2,428", "ours-arena-raw,gpt2_async,2,428", state,
	}
	if !slices.Equal(got, want) {
		t.Errorf("got rows\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	// The machine may change its state between two calls, but report.py compares only runs of one state.
	rows = regexp.MustCompile("(?m)^# cores,.*").ReplaceAllString(rows, "# cores,near,0.1,2")
	for name, text := range map[string]string{"ours": rows, "ompi": strings.ReplaceAll(rows, "ours",
		"ompi")} {
		testnet.WriteFile(t, filepath.Join(dir, name+"-np2-round1.csv"), text)
	}
	if _, err := script(t, nil, "report.py", dir, "-o", filepath.Join(dir, "page.md")); err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile(filepath.Join(dir, "page.md"))
	if want := " ompi | **1.00** (1.00–1.00) |"; err != nil || !strings.Contains(string(page), want) {
		t.Errorf("error %v, and no %q in\n%s", err, want, page)
	}
	if _, err := script(t, append(env, "BENCH_OPS=alltoall"), "peers/ours.py"); err == nil ||
		!strings.Contains(err.Error(), "BENCH_OPS has alltoall") {
		t.Errorf("an operation that is not in the matrix: error %v", err)
	}
	if _, err := script(t, append(env, "BENCH_SHAPES=/nowhere"), "peers/ours.py"); err == nil ||
		!strings.Contains(err.Error(), "/nowhere/gpt2.txt") {
		t.Errorf("no shapes: error %v", err)
	}
}

// TestSignals checks that SIGINT and SIGTERM end a benchmark that would run for hours, and that the benchmark
// prints the end of its table before it ends.
func TestSignals(t *testing.T) {
	for _, np := range []int{0, 2} {
		for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
			cmd, stdout, stderr := prepare(t, np, nil, "-b", "4", "-e", "8", "-f", "2", "-n", "100000000",
				"-w", "0", "-c", "0", "--out-of-place=false")
			measuring := make(chan struct{})
			once := sync.OnceFunc(func() { close(measuring) })
			cmd.Stdout = writerFunc(func(p []byte) (int, error) {
				if bytes.Contains(p, []byte("# hvdbench: allreduce")) {
					once()
				}
				return stdout.Write(p)
			})
			launch(t, cmd)
			select {
			case <-measuring:
			case <-time.After(deadline):
				t.Fatal("the benchmark has not begun to measure")
			}
			if err := cmd.Process.Signal(sig); err != nil {
				t.Fatal(err)
			}
			if s := status(t, cmd); s != 128+int(sig) {
				t.Errorf("%d ranks, %v: status %d, want %d\n%s", np, sig, s, 128+int(sig), stderr)
			}
			if !strings.Contains(stdout.String(), "# Out of bounds values : 0 OK") {
				t.Errorf("%d ranks, %v: the table has no end:\n%s", np, sig, stdout)
			}
		}
	}
}
