package e2e

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/testnet"
)

// Open MPI, MPICH and torchrun start ranks. The ranks find each other, know their rank, local rank and cross
// rank, and can call Init again after Shutdown. The program "again" does this five times.
func TestOtherLaunchers(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	const n = 3
	for _, c := range []struct {
		program, pkg string
		args         []string
	}{
		{"mpirun.openmpi", "openmpi-bin", []string{"--oversubscribe", "--allow-run-as-root", "-np",
			strconv.Itoa(n), self}},
		{"mpiexec.mpich", "mpich", []string{"-n", strconv.Itoa(n), self}},
		{testnet.Python, "python3-torch", slices.Concat(
			[]string{"-m", "torch.distributed.run", "--nproc_per_node", strconv.Itoa(n)}, testnet.Standalone(
				t),
			// The flag --redirects is set because its default in PyTorch 1.13 fails with current versions of
			// Python. Its value redirects no output, because there is no rank 9.
			[]string{"--redirects=9:1", "--tee=9:1", "--no_python", self},
		)},
	} {
		t.Run(c.pkg, func(t *testing.T) {
			if c.pkg == "python3-torch" {
				testnet.NeedTorch(t)
			} else if _, err := exec.LookPath(c.program); err != nil {
				if os.Getenv("CI") != "" {
					t.Fatalf("%v; CI installs %s", err, c.pkg)
				}
				t.Skipf("%v; it is in Debian's package %s", err, c.pkg)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			cmd := exec.CommandContext(ctx, c.program, c.args...)
			cmd.Env = append(os.Environ(), programVariable+"=again", "OMP_NUM_THREADS=1")
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
	if err := os.WriteFile(path, []byte(text+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
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
			self, err := os.Executable()
			if err != nil {
				t.Fatal(err)
			}
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
