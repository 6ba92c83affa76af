package pythontest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
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
	cmd.Env = append(environment(t), fmt.Sprint("HOROVOD_GLOO_TIMEOUT_SECONDS=", pythonLimit.Seconds()))
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

// TestTorchDistributedFirstRankDies checks that a rank does not wait for the timeout of the group if the
// first rank has died before it has said how the ranks meet.
func TestTorchDistributedFirstRankDies(t *testing.T) {
	out, err := distributed(t, "-c", `
import datetime, torch.distributed as dist
from gohvd.torch.distributed import _job
store = dist.HashStore()
store.compare_set("gohvd/meeting 1/first", "", "0")
assert _job._LONGEST_START == datetime.timedelta(minutes=1)
_job._LONGEST_START = datetime.timedelta(seconds=0.1)
_job._meet(store, 1, 2, None, datetime.timedelta(hours=9), False)
`).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "rank 0 has begun to make it and not gone on") {
		t.Errorf("got %v, want an error that names rank 0:\n%s", err, out)
	}
}

// forked runs jobs of a module of the Python tests and returns the output of each one. The ranks are forked
// after the import of torch, which takes longer than most of the tests. A job is the number of its ranks and
// the arguments of the module. The exit codes of the ranks must be in codes. env has more variables.
func forked(t *testing.T, env []string, module string, codes []string, jobs ...string) (outs []string) {
	t.Helper()
	args := append([]string{filepath.Join(python(t), "tests", "forked.py"), module}, jobs...)
	cmd := distributed(t, args...)
	cmd.Env = append(cmd.Env, env...)
	out, err := cmd.CombinedOutput()
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

// TestTorchDistributed runs the tests of gohvd.torch.distributed without a launcher, on two ranks in
// sidecars.
func TestTorchDistributed(t *testing.T) {
	testnet.NewTorch(t)
	var seen coverage
	zeros := []string{"0", "0, 0", "0, 0, 0", "0, 0, 0, 0"}
	outs := forked(t, nil, "distributed_ranks", zeros, "1", "3", "4 Meshes Training.test_ddp")
	outs = append(outs, forked(t, []string{sidecarVariable}, "distributed_ranks", zeros, "2")...)
	for _, out := range outs {
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
	for i, out := range forked(t, nil, "killed_ranks", []string{"1, -9, 1"}, jobs...) {
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

// TestTorchDistributedElastic kills rank 1 of three. The others reconfigure the group. With torch's way they
// train on with a new DistributedDataParallel of torch.
func TestTorchDistributedElastic(t *testing.T) {
	hasReconfigure := exec.Command(testnet.NewTorch(t), "-c",
		"import torch.distributed as dist; dist.ProcessGroup.reconfigure").Run() == nil
	jobs := []string{"3 torchft"}
	if hasReconfigure {
		jobs = append(jobs, "3 torch")
	}
	for _, out := range forked(t, nil, "elastic_group_ranks", []string{"0, -9, 0"}, jobs...) {
		if strings.Count(out, " ends\n") != 2 {
			t.Errorf("want two ranks that end:\n%s", out)
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

// distributedFault is a program whose ranks train until the file of its first argument is there. Then rank 1
// fails in the way that the second argument says. With one of the ways, only a group of all ranks uses gohvd.
const distributedFault = `
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import gohvd.torch.distributed

file, how = sys.argv[1:]
group = None
if how == "exits":
    dist.init_process_group("gloo")
    group = dist.new_group(list(range(dist.get_world_size())), backend="gohvd")
else:
    dist.init_process_group("gohvd", timeout=timedelta(seconds=5))
x = torch.ones(4)
for step in range(1000000):
    dist.all_reduce(x, group=group)
    if step == 10:
        sys.stderr.write("rank %d trains\n" % dist.get_rank())
    if dist.get_rank() == 1 and os.path.exists(file):
        if how == "exits":
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.01)
`

// TestTorchDistributedUnderHvdrun checks that hvdrun knows a job whose ranks have met by torch's store: its
// metrics and its report on SIGQUIT contain all ranks, and the root cause is the rank that has failed, and
// not one whose operation has failed because of it.
func TestTorchDistributedUnderHvdrun(t *testing.T) {
	python := testnet.NewTorch(t)
	for how, want := range map[string]string{
		"exits":   "  rank 1: exit status 0\n",
		"stopped": "  rank 1: killed by SIGKILL from hvdrun\n",
	} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			dir, addr := t.TempDir(), net.JoinHostPort("127.0.0.1", strconv.Itoa(testnet.FreePort(t)))
			script, file := filepath.Join(dir, "script.py"), filepath.Join(dir, "fail")
			if err := os.WriteFile(script, []byte(distributedFault), 0o600); err != nil {
				t.Fatal(err)
			}
			cmd := launched(t, "-np", "3", "--start-timeout", "300", "--metrics-addr", addr, python, script, file, how)
			log, err := os.Create(filepath.Join(dir, "log"))
			if err != nil {
				t.Fatal(err)
			}
			defer log.Close()
			output := func() string {
				text, err := os.ReadFile(log.Name())
				if err != nil {
					t.Fatal(err)
				}
				return string(text)
			}
			cmd.Stdout, cmd.Stderr = log, log
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			ended := make(chan error, 1)
			go func() { ended <- cmd.Wait() }()
			until := func(what string, is func() bool) {
				t.Helper()
				for !is() {
					select {
					case err := <-ended:
						t.Fatalf("before %s: hvdrun has ended with %v\n%s", what, err, output())
					case <-time.After(10 * time.Millisecond):
					}
				}
			}
			until("all ranks train", func() bool { return strings.Count(output(), " trains\n") == 3 })
			until("the metrics of all ranks", func() bool {
				text := metricsAt(addr)
				return len(regexp.MustCompile(`(?m)^hvd_up\{[^}]*\} 1$`).FindAllString(text, -1)) == 3
			})
			until("the answers of all ranks to SIGQUIT", func() bool {
				reports := strings.Count(output(), "hvdrun: SIGQUIT: ")
				if err := cmd.Process.Signal(syscall.SIGQUIT); err != nil {
					t.Fatal(err)
				}
				until("a report", func() bool { return strings.Count(output(), "hvdrun: SIGQUIT: ") > reports })
				return strings.Contains(output(), "hvdrun: SIGQUIT: 3 of 3 ranks answered")
			})
			if err := os.WriteFile(file, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			err = <-ended
			_, report, _ := strings.Cut(output(), "hvdrun: the job failed with exit status ")
			_, cause, found := strings.Cut(report, "\nRoot cause (found by the surviving ranks): ")
			if _, cause, _ = strings.Cut(cause, "\n"); !found || !strings.HasPrefix(cause, want) {
				t.Errorf("%v, want the root cause %q\n%s", err, want, output())
			}
		})
	}
}

// metricsAt returns what hvdrun serves as metrics, or "" if it does not serve any yet.
func metricsAt(addr string) string {
	r, err := http.Get("http://" + addr + "/metrics")
	if err != nil {
		return ""
	}
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	if err != nil {
		return ""
	}
	return string(text)
}

// distributedHung is a program in which the rank of the first argument never makes the process group. The
// others make it at the same time, when each has made its file in the folder of the second argument.
const distributedHung = `
import os, sys, time
import torch, torch.distributed as dist
import gohvd.torch.distributed

rank, size, hung, folder = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(sys.argv[1]), sys.argv[2]
open(os.path.join(folder, str(rank)), "w").close()
while rank == hung or len(os.listdir(folder)) < size:
    time.sleep(0.01)
try:
    dist.init_process_group("gohvd")
except RuntimeError as e:
    sys.stderr.write("\nrank %d got %s\n" % (rank, str(e).replace("\n", " ")))
    raise
`

// TestTorchDistributedHungInInit checks that the ranks that make a process group name the rank that does not,
// when the time limit of Init has passed, also if it is rank 0.
func TestTorchDistributedHungInInit(t *testing.T) {
	python := testnet.NewTorch(t)
	for _, hung := range []string{"0", "1"} {
		t.Run(hung, func(t *testing.T) {
			t.Parallel()
			script := filepath.Join(t.TempDir(), "script.py")
			if err := os.WriteFile(script, []byte(distributedHung), 0o600); err != nil {
				t.Fatal(err)
			}
			out, err := launched(t, "-np", "3", "--start-timeout", "10", python, script, hung,
				t.TempDir()).CombinedOutput()
			got := regexp.MustCompile(`rank \d got (.*)`).FindAllSubmatch(out, -1)
			if err == nil || len(got) == 0 {
				t.Errorf("%v, want that ranks fail", err)
			}
			for _, g := range got {
				if !strings.Contains(string(g[1]), "waiting for rank "+hung) &&
					!strings.Contains(string(g[1]), "waiting until rank "+hung) {
					t.Errorf("got %s, want that it has waited for rank %s", g[0], hung)
				}
			}
			if bytes.Contains(out, []byte("direct cause of the following exception")) {
				t.Error("a traceback contains the error twice")
			}
			if t.Failed() {
				t.Logf("%s", out)
			}
		})
	}
}
