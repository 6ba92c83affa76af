package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/gohvd/gohvd/internal/bench"
	"github.com/gohvd/gohvd/tensor"
)

const deadline = time.Minute

var hvdrunPath string

// The test binary is hvdbench, if its first argument says so.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "hvdbench" {
		status := run(os.Args[2:], os.Environ(), os.Stdout, os.Stderr)
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
		if out, err := exec.Command("go", "build", "-o", hvdrunPath, "github.com/gohvd/gohvd/cmd/hvdrun").CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "building hvdrun: %v\n%s", err, out)
			return 1
		}
		return m.Run()
	}())
}

type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// prepare makes a call of hvdbench, under hvdrun if np is not 0.
func prepare(t *testing.T, np int, env []string, args ...string) (cmd *exec.Cmd, stdout, stderr *bytes.Buffer) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	command := append([]string{self, "hvdbench"}, args...)
	if np > 0 {
		command = append([]string{hvdrunPath, "-np", fmt.Sprint(np), "--tag-output=false"}, command...)
	}
	cmd = exec.Command(command[0], command[1:]...)
	stdout, stderr = new(bytes.Buffer), new(bytes.Buffer)
	cmd.Stdout, cmd.Stderr, cmd.Env = stdout, stderr, append(os.Environ(), env...)
	return cmd, stdout, stderr
}

// launch starts it, and kills it if it does not end.
func launch(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	kill := time.AfterFunc(deadline, func() { _ = cmd.Process.Kill() })
	t.Cleanup(func() { kill.Stop() })
}

// start prepares and launches.
func start(t *testing.T, np int, env []string, args ...string) (cmd *exec.Cmd, stdout, stderr *bytes.Buffer) {
	t.Helper()
	cmd, stdout, stderr = prepare(t, np, env, args...)
	launch(t, cmd)
	return cmd, stdout, stderr
}

func status(t *testing.T, cmd *exec.Cmd) int {
	t.Helper()
	var exit *exec.ExitError
	if err := cmd.Wait(); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode()
}

// parse gives the options of a command line.
func parse(args ...string) (bench.Options, error) {
	b := &bencher{stdout: new(bytes.Buffer), stderr: new(bytes.Buffer)}
	f := b.command().Flags()
	if err := f.Parse(args); err != nil {
		return b.options, err
	}
	err := b.complete(f, f.Args())
	return b.options, err
}

func TestFlags(t *testing.T) {
	o, err := parse("all_gather", "-b", "8", "-e", "128M", "-f", "2", "-n", "5", "-w", "3", "-c", "0", "-d", "half,int8", "-o", "max", "-r", "all", "-a", "3", "-z", "1", "--raw", "--touch")
	if err != nil {
		t.Fatal(err)
	}
	if o.Collective != "allgather" || o.MinBytes != 8 || o.MaxBytes != 128<<20 || o.StepFactor != 2 || o.Iters != 5 || o.Warmup != 3 || o.Checks != 0 ||
		!slices.Equal(o.Types, []tensor.DType{tensor.Float16, tensor.Int8}) || !slices.Equal(o.Ops, []tensor.ReduceOp{tensor.Max}) || o.Roots != nil ||
		o.Average != bench.OfMax || !o.Raw || !o.Touch || o.Arena || !slices.Equal(o.Placements, []bool{false, true}) {
		t.Errorf("got %+v", o)
	}
	o, err = parse()
	if err != nil || o.Collective != "allreduce" || o.MinBytes != 32<<20 || o.MaxBytes != 32<<20 || o.Iters != 20 || o.Warmup != 1 || o.Checks != 1 ||
		o.Average != bench.ByKind || !slices.Equal(o.Roots, []int{0}) || !slices.Equal(o.Modes, []string{"async"}) || o.Format != "nccl" {
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
		if o, err = parse(c.args...); err != nil || o.MinBytes != c.min || o.MaxBytes != c.max {
			t.Errorf("%q: %d to %d and error %v, want %d to %d", c.args, o.MinBytes, o.MaxBytes, err, c.min, c.max)
		}
	}
	if o, err = parse("--warmup_iters", "7", "--in_place=false"); err != nil || o.Warmup != 7 || !slices.Equal(o.Placements, []bool{false}) {
		t.Errorf("nccl-tests' spelling: %+v and error %v", o, err)
	}
	if o, err = parse("--many", "1000:256", "--mode", "grouped,async"); err != nil || o.Many != (bench.Many{Count: 1000, Bytes: 256}) || len(o.Modes) != 2 {
		t.Errorf("many: %+v and error %v", o, err)
	}
	for _, args := range [][]string{
		{"-z", "0"}, {"-b", "x"}, {"-d", "uint32"}, {"-o", "xor"}, {"gather"}, {"barrier", "--collective", "allreduce"}, {"-b", "2K", "-e", "1K"},
		{"--in-place=false", "--out-of-place=false"}, {"--format", "xml"}, {"-f", "1"}, {"-r", "x"}, {"--many", "3"}, {"--negotiation", "30"},
		{"--many", "3:8", "--negotiation", "30", "--raw"}, {"--many", "3:8", "--negotiation", "30", "-d", "all"},
		{"--many", "3:8", "--negotiation", "30", "--mode", "grouped"}, {"--many", "3:8", "--negotiation", "30", "-n", "5"},
		{"--many", "3:8", "--negotiation", "30", "-c", "0"}, {"--many", "3:8", "--negotiation", "30", "-a", "0"},
	} {
		if o, err := parse(args...); err == nil {
			t.Errorf("%q gives %+v, want an error", args, o)
		}
	}
}

func TestWrongUsage(t *testing.T) {
	for _, args := range [][]string{
		{"--no-such-flag"}, {"-z", "0"}, {"gather"}, {"barrier", "allreduce"}, {"--peers", "--variants", "fast"}, {"plot"}, {"plot", "x.csv"}, {"barrier", "--plot", "x.svg"}, {"--workload", "gpt2", "--negotiation", "9", "--raw"},
		{"plot", "x.csv", "-o", "y", "--metric", "z"}, {"report"},
	} {
		var stdout, stderr bytes.Buffer
		if got := run(args, nil, &stdout, &stderr); got != statusUsage || !strings.Contains(stderr.String(), "hvdbench --help") || stdout.Len() > 0 {
			t.Errorf("%q: status %d, stdout %q, stderr %q; want status 2 and a hint", args, got, stdout.String(), stderr.String())
		}
	}
}

func TestHelpAndCompletion(t *testing.T) {
	for _, c := range []struct {
		args []string
		want []string
	}{
		{[]string{"--help"}, []string{"-b, --minbytes SIZE", "#wrong", "hvdbench plot a.csv", "completion", "--workload FILE", "into FILE, as SVG\n"}},
		{[]string{"__complete", "allg"}, []string{"allgather\n"}},
		{[]string{"__complete", "--format", ""}, []string{"nccl\nosu\ncsv\njson\n"}},
		{[]string{"completion", "bash"}, []string{"__start_hvdbench"}},
	} {
		var stdout, stderr bytes.Buffer
		if got := run(c.args, nil, &stdout, &stderr); got != 0 {
			t.Errorf("%q: status %d: %s", c.args, got, stderr.String())
		}
		for _, want := range c.want {
			if !strings.Contains(stdout.String(), want) {
				t.Errorf("%q prints no %q:\n%s", c.args, want, stdout.String())
			}
		}
	}
}

// The whole way: measure under hvdrun, draw the result.
func TestTwoProcesses(t *testing.T) {
	dir := t.TempDir()
	drawn, again := filepath.Join(dir, "a.svg"), filepath.Join(dir, "b.svg")
	cmd, stdout, stderr := start(t, 2, nil, "-b", "64", "-e", "4K", "-f", "8", "-n", "5", "--format", "csv", "--plot", drawn, "--memory", "--cpu", "--progress")
	if s := status(t, cmd); s != 0 {
		t.Fatalf("status %d\n%s", s, stderr)
	}
	for _, want := range []string{"\nallreduce,negotiated,slices,false,2,64,16,float32,sum,-1,out-of-place,5,", ",512,128,", ",4096,1024,", "# cpu of rank 1, in-place", "# memory of rank 1"} {
		if !strings.Contains(stdout.String(), want) {
			t.Errorf("no %q in\n%s", want, stdout)
		}
	}
	if !strings.Contains(stderr.String(), "hvdbench: allreduce, 4K, float sum, in-place") {
		t.Errorf("no progress in\n%s", stderr)
	}
	file := filepath.Join(dir, "a.csv")
	if err := os.WriteFile(file, stdout.Bytes(), 0o666); err != nil {
		t.Fatal(err)
	}
	var out, errs bytes.Buffer
	if s := run([]string{"plot", file, "-o", again}, nil, &out, &errs); s != 0 {
		t.Fatalf("status %d: %s", s, errs.String())
	}
	for _, f := range []string{drawn, again} {
		if svg, err := os.ReadFile(f); err != nil || !bytes.Contains(svg, []byte("out-of-place")) || !bytes.HasSuffix(svg, []byte("</svg>\n")) {
			t.Errorf("%s: error %v and\n%s", f, err, svg)
		}
	}
}

func TestPeers(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"resnet50", "gpt2"} {
		if err := os.WriteFile(filepath.Join(dir, name+".txt"), []byte("a 100 10x10\nb 7 7\n"), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	env := []string{
		"BENCH_NP=2", "BENCH_PEER=mine", "BENCH_SHAPES=" + dir, "BENCH_OPS=barrier,allreduce,resnet50,gpt2", "BENCH_MAX_BYTES=64",
		"BENCH_SMALL_S=0.001", "BENCH_LARGE_S=0.001", "BENCH_HARD_S=0.001",
	}
	cmd, stdout, stderr := start(t, 2, env, "--peers")
	if s := status(t, cmd); s != 0 {
		t.Fatalf("status %d\n%s", s, stderr)
	}
	var got []string
	for l := range strings.Lines(stdout.String()) {
		f := strings.Split(l, ",")
		switch {
		case strings.HasPrefix(l, "# extra,mine"):
		case len(f) == 9:
			got = append(got, strings.Join(f[:4], ","))
		default:
			t.Errorf("unknown line %q", l)
		}
	}
	var want []string
	for _, peer := range []string{"mine", "mine-arena", "mine-raw", "mine-arena-raw"} {
		for _, c := range []string{
			"barrier,2,0", "allreduce,2,4", "allreduce,2,64", "resnet50_pertensor,2,428", "resnet50_async,2,428", "resnet50_bucket25,2,428",
			"gpt2_pertensor,2,428", "gpt2_async,2,428", "gpt2_bucket25,2,428",
		} {
			raw, arena := strings.Contains(peer, "raw"), strings.Contains(peer, "arena")
			if raw && strings.Contains(c, "bucket25") || arena && strings.Contains(c, "barrier") {
				continue
			}
			want = append(want, peer+","+c)
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("got rows\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	cmd, _, stderr = start(t, 2, slices.Concat(env, []string{"BENCH_NP=3"}), "--peers")
	if s := status(t, cmd); s != 1 || !strings.Contains(stderr.String(), "BENCH_NP is 3, but the job has 2 ranks") {
		t.Errorf("status %d\n%s", s, stderr)
	}
}

// A signal ends a benchmark that would go on for hours, with what it has shown.
func TestSignals(t *testing.T) {
	for _, np := range []int{0, 2} {
		for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
			cmd, stdout, stderr := prepare(t, np, nil, "-b", "4", "-e", "8", "-f", "2", "-n", "100000000", "-w", "0", "-c", "0", "--out-of-place=false", "--progress")
			measuring := make(chan struct{})
			once := sync.OnceFunc(func() { close(measuring) })
			cmd.Stderr = writerFunc(func(p []byte) (int, error) {
				if bytes.Contains(p, []byte("in-place")) {
					once()
				}
				return stderr.Write(p)
			})
			launch(t, cmd)
			select {
			case <-measuring:
			case <-time.After(deadline):
				t.Fatal("it measures nothing")
			}
			began := time.Now()
			if err := cmd.Process.Signal(sig); err != nil {
				t.Fatal(err)
			}
			if s := status(t, cmd); s != 128+int(sig) {
				t.Errorf("%d ranks, %v: status %d, want %d\n%s", np, sig, s, 128+int(sig), stderr)
			}
			if took := time.Since(began); took > 8*time.Second {
				t.Errorf("%d ranks, %v: the end took %v", np, sig, took)
			}
			if !strings.Contains(stdout.String(), "# Out of bounds values : 0 OK") {
				t.Errorf("%d ranks, %v: the table has no end:\n%s", np, sig, stdout)
			}
		}
	}
}
