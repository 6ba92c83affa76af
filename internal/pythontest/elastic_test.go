package pythontest

import (
	"context"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/testnet"
)

// elasticJob returns a command that runs a program of elastic_ranks.py under hvdrun with flags.
func elasticJob(t *testing.T, flags []string, program ...string) *exec.Cmd {
	t.Helper()
	testnet.NeedTorch(t)
	return elasticJobOf(t, withTorch(t, testnet.Python), "elastic_ranks.py", flags, program...)
}

// elasticNumpyJob is elasticJob with the programs of elastic_numpy_ranks.py, which do without torch.
func elasticNumpyJob(t *testing.T, flags []string, program ...string) *exec.Cmd {
	t.Helper()
	testnet.NeedTorch(t) // which brings numpy
	return elasticJobOf(t, []string{testnet.Python}, "elastic_numpy_ranks.py", flags, program...)
}

// elasticJobOf is elasticJob with an interpreter, or what takes its place, and the file of the programs.
func elasticJobOf(t *testing.T, interpreter []string, file string, flags []string,
	program ...string) *exec.Cmd {
	t.Helper()
	script := filepath.Join(python(t), "tests", file)
	cmd := launched(t, slices.Concat(flags, []string{"--blacklist-cooldown-range", "1,1"}, interpreter,
		[]string{script}, program)...)
	// On a busy machine the import of torch takes longer than the 30 s after which the first ranks begin
	// without the others.
	cmd.Env = append(cmd.Env, "HOROVOD_GLOO_TIMEOUT_SECONDS=600")
	return cmd
}

// ends runs an elastic job, which must succeed and whose output must match the patterns, each as often as it
// says.
func ends(t *testing.T, cmd *exec.Cmd, want map[string]int) {
	t.Helper()
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("hvdrun: %v", err)
	}
	for pattern, n := range want {
		if got := regexp.MustCompile(pattern).FindAllString(string(out), -1); len(got) != n {
			t.Errorf("got %q, want %d matches of %s", got, n, pattern)
		}
	}
	if t.Failed() {
		t.Logf("%s", out)
	}
}

// TestElasticTorch kills a rank while it trains. The others go on with the same parameters and the same state
// of the optimizer, and a new process takes the place of the dead one. The state is one of the package, or
// one of a program. If the rank dies before the vote about the commit of step 12, the others go on with the
// commit before it, that of step 9.
func TestElasticTorch(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ state, victim, where string }{
		{"TorchState", "0", "anywhere"}, {"TorchState", "1", "commit"}, {"State", "0", "anywhere"},
	} {
		t.Run(c.state+"/"+c.victim, func(t *testing.T) {
			t.Parallel()
			cmd := elasticJob(t, []string{"-np", "3", "--min-np", "2"}, "train", c.state, c.victim, c.where)
			want := map[string]int{`:done \w+\n`: 3, `hvdrun: generation 2: 2 ranks: rank ` + c.victim: 1,
				`hvdrun: generation 3: 3 ranks: new`: 1, `hvdrun: generation 4`: 0}
			if c.where == "commit" {
				want[`:begins at step 9\n`] = 2
			}
			ends(t, cmd, want)
		})
	}
}

// TestElasticExample trains with the program of the examples, also if there are more ranks than images in a
// batch. A batch without images is refused.
func TestElasticExample(t *testing.T) {
	t.Parallel()
	testnet.NeedTorch(t)
	example := func(batch string) *exec.Cmd {
		return launched(t, "-np", "2", "--min-np", "2", testnet.Python, "../../examples/elastic_digits.py",
			"--epochs", "1", "--batch", batch)
	}
	ends(t, example("1"), map[string]int{`:digits: ranks=2 test_accuracy=0\.\d+ weights_sha256=`: 2})
	if out, err := example("0").CombinedOutput(); err == nil ||
		!strings.Contains(string(out), "error: want --epochs of at least 0, and --batch of at least 1") {
		t.Errorf("a batch of 0: %v\n%s", err, out)
	}
}

// TestElasticLeave sends SIGTERM to a rank. It leaves, and the others lose no step.
func TestElasticLeave(t *testing.T) {
	t.Parallel()
	cmd := elasticNumpyJob(t, []string{"-np", "3", "--min-np", "2"}, "leave")
	ends(t, cmd, map[string]int{`:done after 2\n`: 2, `has been removed from elastic job\n`: 1,
		`hvdrun: generation 2: 2 ranks: rank 1 \([^)]*\) leaves: SIGTERM\n`: 1, `hvdrun: generation 3`: 0})
}

// TestElasticTwice kills a rank in the second training of a program. The others go on, though they are fewer
// than --min-np, because no process is added after the first training.
func TestElasticTwice(t *testing.T) {
	t.Parallel()
	cmd := elasticNumpyJob(t, []string{"-np", "3", "--min-np", "3"}, "twice")
	ends(t, cmd, map[string]int{`:done 10 110 2\n`: 2, `hvdrun: generation 2: 2 ranks: rank 1 `: 1,
		`hvdrun: generation 3`: 0})
}

// TestElasticTorchSteps kills a rank, and ends the new one with SIGTERM. Each step is a commit, so no rank
// goes back.
func TestElasticTorchSteps(t *testing.T) {
	t.Parallel()
	cmd := elasticJob(t, []string{"-np", "3", "--min-np", "2"}, "steps", "0")
	ends(t, cmd, map[string]int{`:done \w+\n`: 2, `hvdrun: generation 2: 2 ranks: rank 0 `: 1,
		`hvdrun: generation 3: 3 ranks: new`: 1, `hvdrun: generation 4: 2 ranks: rank 2 .* leaves: SIGTERM\n`: 1})
}

// TestElasticTorchAhead kills a rank when only some others have learned of the vote for a step, and one of
// these while it sends its state to the rank that has not. No rank goes back.
func TestElasticTorchAhead(t *testing.T) {
	t.Parallel()
	cmd := elasticJob(t, []string{"-np", "4", "--min-np", "2"}, "ahead", t.TempDir())
	ends(t, cmd, map[string]int{`:done 0 11\n`: 2, `hvdrun: generation 2: 3 ranks: rank 1 `: 1,
		`hvdrun: generation 3: 2 ranks: rank 1 `: 1})
}

// BenchmarkElasticTorchVote measures the vote for a step from Python and, for comparison, an allreduce of 4
// bytes, with 2 ranks: the median at the slower one.
func BenchmarkElasticTorchVote(b *testing.B) {
	testnet.NeedTorch(b)
	script := filepath.Join(python(b), "tests", "elastic_ranks.py")
	cmd := launched(b, "-np", "2", "--min-np", "1", testnet.Python, script, "votes", strconv.Itoa(b.N))
	out, err := cmd.CombinedOutput()
	took := regexp.MustCompile(`:votes took (\d+) (\d+)\n`).FindAllStringSubmatch(string(out), -1)
	if err != nil || len(took) != 2 {
		b.Fatalf("hvdrun: %v\n%s", err, out)
	}
	for i, unit := range []string{"ns/op", "ns/allreduce"} {
		first, _ := strconv.Atoi(took[0][i+1])
		second, _ := strconv.Atoi(took[1][i+1])
		b.ReportMetric(float64(max(first, second)), unit)
	}
}

// TestElasticBuilding kills a rank. The others train while the new process makes its model, which ends
// only when they have made 300 steps.
func TestElasticBuilding(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	if err := unix.Mkfifo(filepath.Join(folder, "pipe"), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := elasticNumpyJob(t, []string{"-np", "3", "--min-np", "2"}, "build", folder)
	ends(t, cmd, map[string]int{`:goes on after 300 steps\n`: 1, `:done True\n`: 3,
		`hvdrun: generation 3: 3 ranks: new: `: 1, `hvdrun: generation 4`: 0})
}

// TestElasticDDP kills a rank of a job that trains with gohvd's DistributedDataParallel.
func TestElasticDDP(t *testing.T) {
	t.Parallel()
	cmd := elasticJobOf(t, withTorch(t, testnet.NewTorch(t)), "elastic_ranks.py", []string{"-np", "3", "--min-np", "2"}, "ddp")
	ends(t, cmd, map[string]int{`:done \w+\n`: 3, `hvdrun: generation 2: 2 ranks: rank 1 `: 1,
		`hvdrun: generation 3: 3 ranks: new`: 1, `hvdrun: generation 4`: 0})
}

// TestElasticErrors has errors that are not the failure of ranks. They leave the wrapper. The job goes
// on without the rank that has an error of its own.
func TestElasticErrors(t *testing.T) {
	t.Parallel()
	cmd := elasticNumpyJob(t, []string{"-np", "3", "--min-np", "1"}, "own")
	ends(t, cmd, map[string]int{`:left with KeyError\('mine'\)`: 1, `:left with MismatchError`: 3,
		`hvdrun: generation 2: 2 ranks: rank 1 `: 1})
}

// TestElasticTorchHosts adds and removes hosts, also that of rank 0, and kills a rank, while the ranks go
// once through a data set. Each sample is used once.
func TestElasticTorchHosts(t *testing.T) {
	t.Parallel()
	testnet.NeedTorch(t)
	hosts := testnet.NewHosts(t, 3)
	list := filepath.Join(t.TempDir(), "hosts")
	names := []string{hosts[0].Name, hosts[1].Name, hosts[2].Name}
	testnet.WriteFile(t, list, names[0]+":1\n"+names[1]+":1\n")
	alone := elasticJob(t, []string{"-np", "2", "--min-np", "1", "--host-discovery-script", "cat " + list,
		"--agent", "ip netns exec {host}"}, append([]string{"samples", list}, names...)...)
	ctx, cancel := context.WithTimeout(t.Context(), pythonLimit)
	t.Cleanup(cancel)
	cmd := hosts[0].Command(ctx, alone.Path, alone.Args[1:]...)
	cmd.Env, cmd.WaitDelay = alone.Env, 20*time.Second
	ends(t, cmd, map[string]int{`:done with ranks 2 3 2 1 2 3\n`: 3, `has been removed from elastic job\n`: 1,
		`leaves: its slot is not offered any more`: 2})
}
