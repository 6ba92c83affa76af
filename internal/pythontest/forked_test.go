package pythontest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/gohvd/gohvd/internal/testnet"
)

// forking is a process of forked.py, from which those of programs are forked.
type forking struct {
	cmd    *exec.Cmd
	input  io.Closer
	socket string
	err    error
}

// forkings are the running processes of forked.py, by their interpreters.
var forkings struct {
	sync.Mutex
	of map[string]*forking
}

// withTorch returns the beginning of a command that takes the place of an interpreter with PyTorch. In the
// targets of make nightly, each process imports PyTorch itself, as those of users do.
func withTorch(t testing.TB, interpreter string) []string {
	t.Helper()
	if os.Getenv("TESTTORCH_FORKED") == "no" {
		return []string{interpreter}
	}
	return forked(t, interpreter)
}

// forked is like withTorch. The process is always forked from one that has imported PyTorch, which takes
// longer than most of the programs.
func forked(t testing.TB, interpreter string) []string {
	t.Helper()
	forkings.Lock()
	defer forkings.Unlock()
	f, ok := forkings.of[interpreter]
	script := filepath.Join(python(t), "tests", "forked.py")
	if !ok {
		socket := filepath.Join(filepath.Dir(hvdrun), fmt.Sprint("forked", len(forkings.of)))
		f = startForking(environment(t), interpreter, script, socket)
		if forkings.of == nil {
			forkings.of = make(map[string]*forking)
		}
		forkings.of[interpreter] = f
	}
	if f.err != nil {
		t.Fatal(f.err)
	}
	// The options make the interpreter start faster. It only asks for the process.
	return []string{interpreter, "-S", "-E", script, f.socket}
}

// startForking starts forked.py, and returns when it listens.
func startForking(env []string, interpreter, script, socket string) *forking {
	f := &forking{cmd: exec.Command(interpreter, script, socket), socket: socket}
	f.cmd.Env, f.cmd.Stderr = env, os.Stderr
	input, err := f.cmd.StdinPipe()
	out, outErr := f.cmd.StdoutPipe()
	f.input, f.err = input, errors.Join(err, outErr)
	if f.err == nil {
		f.err = f.cmd.Start()
	}
	if f.err != nil {
		return f
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		f.err = fmt.Errorf("forked.py has printed %q: %w", line, err)
	}
	return f
}

// endForking ends the processes of forked.py.
func endForking() error {
	var errs []error
	for _, f := range forkings.of {
		if f.cmd.Process != nil {
			errs = append(errs, f.input.Close(), f.cmd.Wait())
		}
	}
	return errors.Join(errs...)
}

// ranksJob is a job of ranks that call the function run of a module of python/tests, without a launcher.
type ranksJob struct {
	module string
	ranks  int
	args   []string
	env    []string
	hosts  []*testnet.Host // with an equal number of ranks on each; nil for this host
}

// callRun is the program of a rank of a ranksJob.
const callRun = `
import importlib, sys
module, rank, size, init_method, *args = sys.argv[1:]
importlib.import_module(module).run(int(rank), int(size), init_method, args)
`

// runRanks runs a job with PyTorch 2.1 or newer, and returns its output. The exit codes of its ranks must be
// in codes. A signal is a negative exit code.
func runRanks(t *testing.T, job ranksJob, codes ...string) string {
	t.Helper()
	dir := t.TempDir()
	out, err := os.Create(filepath.Join(dir, "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	ctx, cancel := context.WithTimeout(t.Context(), pythonLimit)
	defer cancel()
	command := append(forked(t, testnet.NewTorch(t)), "-c", callRun, job.module)
	method := "file://" + filepath.Join(dir, "store")
	if job.hosts != nil {
		method = fmt.Sprintf("tcp://%v:29500", job.hosts[0].Addr)
	}
	var ranks []*exec.Cmd
	for r := range job.ranks {
		args := append(slices.Clone(command), fmt.Sprint(r), fmt.Sprint(job.ranks), method)
		args = append(args, job.args...)
		cmd := exec.CommandContext(ctx, args[0], args[1:]...)
		if job.hosts != nil {
			cmd = job.hosts[r*len(job.hosts)/job.ranks].Command(ctx, args[0], args[1:]...)
		}
		cmd.Env = slices.Concat(torchEnvironment(t), job.env)
		cmd.Dir, cmd.Stdout, cmd.Stderr = filepath.Join(python(t), "tests"), out, out
		if err := cmd.Start(); err != nil {
			cancel()
			t.Error(err)
			break
		}
		ranks = append(ranks, cmd)
	}
	var got []string
	for _, cmd := range ranks {
		_ = cmd.Wait() // the exit code says what happened
		code := cmd.ProcessState.ExitCode()
		if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && status.Signaled() {
			code = -int(status.Signal())
		}
		got = append(got, fmt.Sprint(code))
	}
	text := testnet.ReadFile(t, out.Name())
	if got := strings.Join(got, ", "); !slices.Contains(codes, got) {
		t.Fatalf("exit codes %q of the ranks, want one of %q\n%s", got, codes, text)
	}
	return string(text)
}
