package pythontest

import (
	"context"
	"fmt"
	"net"
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

// torchEnvironment is environment, for jobs without hvdrun. On a busy machine, ranks may take longer than the
// default to meet and to connect.
func torchEnvironment(t testing.TB) []string {
	return append(environment(t), fmt.Sprint("HOROVOD_GLOO_TIMEOUT_SECONDS=", pythonLimit.Seconds()))
}

// torchCommand returns a command that begins with an interpreter, or with what takes its place, and runs with
// gohvd's package.
func torchCommand(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), pythonLimit)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Env, cmd.WaitDelay = torchEnvironment(t), 10*time.Second
	return cmd
}

// TestTorchDistributed runs jobs of gohvd.torch.distributed without a launcher.
func TestTorchDistributed(t *testing.T) {
	t.Parallel()
	t.Run("tests", distributedTests)
	t.Run("hosts", distributedHosts)
	for _, how := range []string{"wait", "future", "ddp", "monitored_barrier"} {
		t.Run("killed/"+how, func(t *testing.T) { distributedKilled(t, how) })
	}
	for _, rank := range []string{"0", "1"} {
		t.Run("hung in Init/"+rank, func(t *testing.T) { distributedHungInInit(t, rank) })
	}
	for _, way := range []string{"torchft", "torch"} {
		t.Run("elastic/"+way, func(t *testing.T) { distributedElastic(t, way) })
	}
}

// distributedTests runs the tests on 1 and 3 ranks, some on 4, and those on 2 ranks in sidecars.
func distributedTests(t *testing.T) {
	var seen coverage
	for _, job := range []ranksJob{
		{ranks: 1}, {ranks: 3}, {ranks: 4, args: []string{"Meshes", "Training.test_ddp"}},
		{ranks: 2, env: []string{sidecarVariable}},
	} {
		job.module = "distributed_ranks"
		out := runRanks(t, job, "0", "0, 0", "0, 0, 0", "0, 0, 0, 0")
		seen.add(distributedTest.FindAllStringSubmatch(out, -1),
			distributedSkip.FindAllStringSubmatch(out, -1))
	}
	if !seen.ran["Meshes.test_same_names"] || !seen.ran["Training.test_ddp"] {
		t.Errorf("got only the tests %v", seen.ran)
	}
	delete(seen.skipped, withTorchrun)
	seen.report(t)
}

// distributedHosts runs some of the tests on two simulated hosts, with two ranks on each.
func distributedHosts(t *testing.T) {
	runRanks(t, ranksJob{module: "distributed_ranks", ranks: 4, args: []string{"Meshes", "Training.test_ddp"},
		hosts: testnet.NewHosts(t, 2)}, "0, 0, 0, 0")
}

// distributedTest matches what distributed_ranks.py prints about a test that was run or skipped, and
// distributedSkip about one that was skipped.
var (
	distributedTest = regexp.MustCompile(`(?m)^(?:ran|skipped) (\S+)`)
	distributedSkip = regexp.MustCompile(`(?m)^skipped (\S+): (.*)$`)
)

// distributedKilled kills rank 1 of three. The wait of every other rank raises an error that names rank 1, in
// each kind of wait.
func distributedKilled(t *testing.T, how string) {
	out := runRanks(t, ranksJob{module: "killed_ranks", ranks: 3, args: []string{how}}, "1, -9, 1")
	operation := `all_reduce \(call \d+ of group 0\)`
	if how == "monitored_barrier" {
		operation = "monitored_barrier"
	}
	for _, rank := range []string{"0", "2"} {
		if !regexp.MustCompile(`(?m)^rank ` + rank + ` got .*torch.distributed.` + operation +
			`: .*rank 1 failed`).MatchString(out) {
			t.Errorf("rank %s got no error that names rank 1\n%s", rank, out)
		}
	}
}

// distributedHungInInit checks that the ranks that make a process group name the rank that does not, when the
// time limit of Init has passed, also if it is rank 0.
func distributedHungInInit(t *testing.T, hung string) {
	out := runRanks(t, ranksJob{module: "killed_ranks", ranks: 3, args: []string{"hung", hung},
		env: []string{"HOROVOD_GLOO_TIMEOUT_SECONDS=10"}}, "0, 0, 0")
	got := regexp.MustCompile(`(?m)^rank \d got (.*)`).FindAllStringSubmatch(out, -1)
	for _, g := range got {
		if !strings.Contains(g[1], "waiting for rank "+hung) && !strings.Contains(g[1], "waiting until rank "+hung) {
			t.Errorf("got %s, want that it has waited for rank %s", g[0], hung)
		}
	}
	if len(got) != 2 {
		t.Errorf("got %d errors, want those of 2 ranks", len(got))
	}
	if strings.Contains(out, "direct cause of the following exception") {
		t.Error("a traceback contains the error twice")
	}
	if t.Failed() {
		t.Log(out)
	}
}

// distributedElastic kills rank 1 of three. The others reconfigure the group. With torch's way they train on
// with a new DistributedDataParallel of torch.
func distributedElastic(t *testing.T, way string) {
	out := runRanks(t, ranksJob{module: "elastic_group_ranks", ranks: 3, args: []string{way}}, "0, -9, 0",
		"0, 0, 0")
	if reason := regexp.MustCompile("torch .* cannot reconfigure groups").FindString(out); reason != "" {
		t.Skip(reason)
	}
	if strings.Count(out, " ends\n") != 2 {
		t.Errorf("want two ranks that end:\n%s", out)
	}
}

// withTorchrun is the test that needs a launcher.
const withTorchrun = "Lives.test_job_of_the_program"

// TestTorchDistributedRestarts kills rank 1 of two. Rank 0 gets an error. Then torchrun starts both ranks
// again, and they run a test.
func TestTorchDistributedRestarts(t *testing.T) {
	t.Parallel()
	python2 := withTorch(t, testnet.NewTorch(t))
	args := slices.Concat(python2, []string{"-m", "torch.distributed.run"}, testnet.Standalone(t),
		[]string{"--nproc_per_node=2", "--max_restarts=1", "--no-python"}, python2,
		[]string{filepath.Join(python(t), "tests", "killed_ranks.py"), withTorchrun})
	out, err := torchCommand(t, args...).CombinedOutput()
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
	t.Parallel()
	python := withTorch(t, testnet.NewTorch(t))
	for how, want := range map[string]string{
		"exits":   "  rank 1: exit status 0\n",
		"stopped": "  rank 1: killed by SIGKILL from hvdrun\n",
	} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			dir, addr := t.TempDir(), net.JoinHostPort("127.0.0.1", strconv.Itoa(testnet.FreePort(t)))
			script, file := filepath.Join(dir, "script.py"), filepath.Join(dir, "fail")
			testnet.WriteFile(t, script, distributedFault)
			args := append([]string{"-np", "2", "--start-timeout", "300", "--metrics-addr", addr}, python...)
			cmd := launched(t, append(args, script, file, how)...)
			log, err := os.Create(filepath.Join(dir, "log"))
			if err != nil {
				t.Fatal(err)
			}
			defer log.Close()
			output := func() string {
				text := testnet.ReadFile(t, log.Name())
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
			until("all ranks train", func() bool { return strings.Count(output(), " trains\n") == 2 })
			until("the metrics of all ranks", func() bool {
				text, _ := testnet.Get(t.Context(), "http://"+addr+"/metrics") // an error while it serves none yet
				return len(regexp.MustCompile(`(?m)^hvd_up\{[^}]*\} 1$`).FindAllString(text, -1)) == 2
			})
			until("the answers of all ranks to SIGQUIT", func() bool {
				reports := strings.Count(output(), "hvdrun: SIGQUIT: ")
				if err := cmd.Process.Signal(syscall.SIGQUIT); err != nil {
					t.Fatal(err)
				}
				until("a report", func() bool { return strings.Count(output(), "hvdrun: SIGQUIT: ") > reports })
				return strings.Contains(output(), "hvdrun: SIGQUIT: 2 of 2 ranks answered")
			})
			testnet.WriteFile(t, file, "")
			err = <-ended
			_, report, _ := strings.Cut(output(), "hvdrun: the job failed with exit status ")
			_, cause, found := strings.Cut(report, "\nRoot cause (found by the surviving ranks): ")
			if _, cause, _ = strings.Cut(cause, "\n"); !found || !strings.HasPrefix(cause, want) {
				t.Errorf("%v, want the root cause %q\n%s", err, want, output())
			}
		})
	}
}
