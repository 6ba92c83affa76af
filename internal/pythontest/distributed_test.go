package pythontest

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
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/testnet"
)

// distributed returns a command that runs Python, with torch 2.1 or newer and gohvd's package, without
// hvdrun. It skips the test if there is no such torch.
func distributed(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	return pythonCommand(t, testnet.NewTorch(t), args...)
}

// pythonCommand returns a command that runs an interpreter with gohvd's package. On a busy machine, ranks may
// take longer than the default to meet and to connect.
func pythonCommand(t *testing.T, interpreter string, args ...string) *exec.Cmd {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), pythonLimit)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, interpreter, args...)
	cmd.Env = append(os.Environ(), "PYTHONPATH="+python(t), "PYTHONDONTWRITEBYTECODE=1", "OMP_NUM_THREADS=1",
		"HVD_SIDECAR_BINARY="+hvdd, fmt.Sprint("HOROVOD_GLOO_TIMEOUT_SECONDS=", pythonLimit.Seconds()))
	cmd.WaitDelay = 10 * time.Second
	return cmd
}

// TestTorchIsTooOld checks that the import of gohvd.torch.distributed says which version of torch it needs.
func TestTorchIsTooOld(t *testing.T) {
	testnet.NeedTorch(t)
	out, err := pythonCommand(t, testnet.Python, "-c",
		`import torch; torch.__version__ = "2.0.1"; import gohvd.torch.distributed`).CombinedOutput()
	const want = "ImportError: gohvd.torch.distributed needs torch 2.1 or newer, but torch 2.0.1 is installed"
	if err == nil || !strings.Contains(string(out), want) {
		t.Errorf("got %v, want %q in\n%s", err, want, out)
	}
}

// forked runs jobs of a module of the Python tests and returns the output of each one. The ranks are forked
// after the import of torch, which takes longer than most of the tests. A job is the number of its ranks and
// the arguments of the module. The exit codes of the ranks must be in codes.
func forked(t *testing.T, module string, codes []string, jobs ...string) (outs []string) {
	t.Helper()
	args := append([]string{filepath.Join(python(t), "tests", "forked.py"), module}, jobs...)
	out, err := distributed(t, args...).CombinedOutput()
	rest := string(out)
	for _, job := range jobs {
		text, after, _ := strings.Cut(rest, "job "+job+": [")
		got, after, _ := strings.Cut(after, "]\n")
		if !slices.Contains(codes, got) {
			t.Fatalf("%s: %v, exit codes %q of the ranks, want one of %q\n%s", job, err, got, codes, rest)
		}
		outs, rest = append(outs, text), after
	}
	return outs
}

// TestTorchDistributed runs the tests of gohvd.torch.distributed without a launcher.
func TestTorchDistributed(t *testing.T) {
	testnet.NewTorch(t)
	var seen coverage
	zeros := []string{"0", "0, 0", "0, 0, 0", "0, 0, 0, 0"}
	for _, out := range forked(t, "distributed_ranks", zeros, "1", "2", "3", "4 Meshes Training.test_ddp") {
		seen.add(distributedTest.FindAllStringSubmatch(out, -1),
			distributedSkip.FindAllStringSubmatch(out, -1))
	}
	if !seen.ran["Meshes.test_same_names"] || !seen.ran["Training.test_ddp"] {
		t.Errorf("got only the tests %v", seen.ran)
	}
	delete(seen.skipped, withTorchrun)
	seen.report(t)
}

// TestTorchDistributedHosts runs some of the tests with torchrun on two simulated hosts, with two ranks on
// each.
func TestTorchDistributedHosts(t *testing.T) {
	testnet.NewTorch(t)
	hosts := testnet.NewHosts(t, 2)
	ctx, cancel := context.WithTimeout(t.Context(), pythonLimit)
	defer cancel()
	outs, errs := make([]bytes.Buffer, len(hosts)), make(chan error, len(hosts))
	for i, host := range hosts {
		alone := distributed(t, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=2",
			"--node_rank="+strconv.Itoa(i), "--master_addr="+hosts[0].Addr.String(), "--master_port=29500",
			filepath.Join(python(t), "tests", "distributed_ranks.py"), "Meshes", "Training.test_ddp")
		cmd := host.Command(ctx, alone.Path, alone.Args[1:]...)
		cmd.Env, cmd.WaitDelay, cmd.Stdout, cmd.Stderr = alone.Env, alone.WaitDelay, &outs[i], &outs[i]
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		go func() { errs <- cmd.Wait() }()
	}
	var failed error
	for range hosts {
		failed = errors.Join(failed, <-errs)
	}
	if failed != nil || !strings.Contains(outs[0].String(), "4 ranks: ") {
		t.Fatalf("%v\nfirst host:\n%s\nsecond host:\n%s", failed, &outs[0], &outs[1])
	}
}

// distributedTest matches what distributed_ranks.py prints about a test that was run or skipped, and
// distributedSkip about one that was skipped.
var (
	distributedTest = regexp.MustCompile(`(?m)^(?:ran|skipped) (\S+)`)
	distributedSkip = regexp.MustCompile(`(?m)^skipped (\S+): (.*)$`)
)

// TestTorchDistributedKilled kills rank 1 of three. The wait of every other rank raises an error that names
// rank 1, in each kind of wait.
func TestTorchDistributedKilled(t *testing.T) {
	testnet.NewTorch(t)
	hows := []string{"wait", "future", "ddp", "monitored_barrier"}
	var jobs []string
	for _, how := range hows {
		jobs = append(jobs, "3 "+how)
	}
	for i, out := range forked(t, "killed_ranks", []string{"1, -9, 1"}, jobs...) {
		operation := `all_reduce \(call \d+ of group 0\)`
		if hows[i] == "monitored_barrier" {
			operation = "monitored_barrier"
		}
		for _, rank := range []string{"0", "2"} {
			if !regexp.MustCompile(`(?m)^rank ` + rank + ` got .*torch.distributed.` + operation +
				`: .*rank 1 failed`).MatchString(out) {
				t.Errorf("%s: rank %s got no error that names rank 1\n%s", hows[i], rank, out)
			}
		}
	}
}

// withTorchrun is the test that needs a launcher.
const withTorchrun = "Lives.test_job_of_the_program"

// TestTorchDistributedRestarts kills rank 1 of two. Rank 0 gets an error. Then torchrun starts both ranks
// again, and they run a test.
func TestTorchDistributedRestarts(t *testing.T) {
	testnet.NewTorch(t)
	args := append([]string{"-m", "torch.distributed.run"}, testnet.Standalone(t)...)
	out, err := distributed(t, append(args, "--nproc_per_node=2", "--max_restarts=1",
		filepath.Join(python(t), "tests", "killed_ranks.py"), withTorchrun)...).CombinedOutput()
	for _, want := range []string{
		"rank 0 got torch.distributed.all_reduce", "rank 1 failed", "ran " + withTorchrun,
		"2 ranks: 1 tests passed",
	} {
		if err != nil || !strings.Contains(string(out), want) {
			t.Fatalf("%v, and want %q in\n%s", err, want, out)
		}
	}
}
