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

// TestTorchDistributed runs the tests of gohvd.torch.distributed, with ranks that torchrun or
// torch.multiprocessing has started.
func TestTorchDistributed(t *testing.T) {
	testnet.NewTorch(t)
	program := filepath.Join(python(t), "tests", "distributed_ranks.py")
	var seen coverage
	for _, n := range []int{1, 2, 3} {
		t.Run("spawn "+strconv.Itoa(n), func(t *testing.T) {
			passed(t, n, &seen, distributed(t, program, strconv.Itoa(n)))
		})
	}
	t.Run("torchrun 4", func(t *testing.T) {
		args := append([]string{"-m", "torch.distributed.run"}, testnet.Standalone(t)...)
		args = append(args, "--nproc_per_node=4", program, "Meshes", "Training.test_ddp",
			"Lives.test_job_of_the_program") // which mp.spawn cannot run
		passed(t, 4, &seen, distributed(t, args...))
	})
	seen.report(t)
}

// TestTorchDistributedHosts runs the same program with torchrun on two simulated hosts, with two ranks on
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

// passed runs a job of n ranks that runs distributed_ranks.py, and adds its tests to seen.
func passed(t *testing.T, n int, seen *coverage, cmd *exec.Cmd) {
	t.Helper()
	out, err := cmd.CombinedOutput()
	text := string(out)
	if err != nil || !strings.Contains(text, strconv.Itoa(n)+" ranks: ") {
		t.Fatalf("%v\n%s", err, text)
	}
	seen.add(distributedTest.FindAllStringSubmatch(text, -1), distributedSkip.FindAllStringSubmatch(text, -1))
}

// distributedVictim is a program that trains until an operation fails, and then prints the error. In the
// first attempt of torchrun, rank 1 kills itself after a few operations. Then torchrun sends SIGTERM to the
// other ranks, which may arrive before the error. The last operation of the victim may fail at other ranks.
const distributedVictim = `
import os, signal, sys
import torch, torch.distributed as dist
import gohvd.torch.distributed

signal.signal(signal.SIGTERM, lambda *_: None)
dist.init_process_group("gohvd")
rank, first = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100))
x = torch.ones(4)
try:
    for step in range(10):
        dist.all_reduce(x)
    if rank == 1 and first:
        os.kill(os.getpid(), signal.SIGKILL)
    while first:
        if sys.argv[1] == "ddp":
            model(torch.randn(2, 100)).sum().backward()
        elif sys.argv[1] == "wait":
            dist.all_reduce(x)
        elif sys.argv[1] == "monitored barrier":
            dist.monitored_barrier()
        else:
            dist.all_reduce(x, async_op=True).get_future().wait()
except RuntimeError as e:
    sys.stdout.write("\nrank %d got %s\n" % (rank, str(e).replace("\n", " ")))
    raise SystemExit(1)
dist.destroy_process_group()
sys.stdout.write("rank %d ends\n" % rank)
`

// TestTorchDistributedKilled kills rank 1 of three. The wait of every other rank raises an error that names
// rank 1, in each kind of wait. Then torchrun starts all ranks again, and they end in order.
func TestTorchDistributedKilled(t *testing.T) {
	testnet.NewTorch(t)
	script := filepath.Join(t.TempDir(), "script.py")
	if err := os.WriteFile(script, []byte(distributedVictim), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, how := range []string{"wait", "future", "ddp", "monitored barrier"} {
		t.Run(how, func(t *testing.T) {
			args := append([]string{"-m", "torch.distributed.run"}, testnet.Standalone(t)...)
			cmd := distributed(t, append(args, "--nproc_per_node=3", "--max_restarts=1", script, how)...)
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			for r := range 3 {
				if end := "rank " + strconv.Itoa(r) + " ends\n"; !strings.Contains(string(out), end) {
					t.Errorf("the output does not contain %q\n%s", end, out)
				}
				operation := `all_reduce \(call \d+ of group 0\)`
				if how == "monitored barrier" {
					operation = "monitored_barrier"
				}
				got := regexp.MustCompile(`(?m)^rank ` + strconv.Itoa(r) + ` got .*torch.distributed.` + operation +
					`: .*rank 1 failed`).Match(out)
				if got != (r != 1) {
					t.Errorf("rank %d got an error that names rank 1: %v, want %v\n%s", r, got, r != 1, out)
				}
			}
		})
	}
}
