package e2e

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/gohvd/gohvd/internal/bootstrap"
	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/testnet"
)

// Two ranks run one program after the other, as with srun bash -c './train; ./eval'. Rank 1 begins the second
// one while rank 0 still serves the store of the first one at the same place. The ranks must meet.
func TestNextProgram(t *testing.T) {
	for name, kind := range map[string]bootstrap.Kind{"port": bootstrap.Slurm, "file": bootstrap.OpenMPI, "URL": ""} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, text := secret.New()
			port := testnet.FreePort(t)
			rows := launcherRows(t.TempDir(), port, 0)
			env := func(r int) []string {
				i := slices.IndexFunc(rows, func(row launcherRow) bool { return row.kind == kind })
				if i < 0 {
					return []string{fmt.Sprintf("HVD_INIT_METHOD=tcp://127.0.0.1:%d?rank=%d&world_size=2", port, r)}
				}
				all := slices.Concat(rows[i].sets(r, 2), rows[i].meet)
				if kind == bootstrap.Slurm {
					all = append(all, "HVD_SECRET="+text)
				}
				return all
			}

			log, entries := testnet.Logs()
			var meetings [2]*bootstrap.Meeting
			var sessions [2]*rank.Session
			var first, second sync.WaitGroup
			for r := range meetings {
				first.Go(func() {
					cfg, err := config.Load(config.Sources{Environ: env(r)})
					if err == nil {
						meetings[r], err = bootstrap.Open(testnet.Context(t), bootstrap.Config{Settings: cfg})
					}
					if err == nil {
						sessions[r], err = rank.OpenSession(testnet.Context(t),
							rank.SessionConfig{At: meetings[r], Log: log})
					}
					if err != nil {
						t.Error(err)
					}
				})
			}
			first.Wait()
			if t.Failed() {
				return
			}
			next := func(r int) {
				for _, c := range []io.Closer{sessions[r].Mesh, sessions[r], meetings[r]} {
					if err := c.Close(); err != nil {
						t.Error(err)
					}
				}
				second.Go(func() {
					cmd := exec.CommandContext(testnet.Context(t), os.Args[0])
					cmd.Env = append(env(r), programVariable+"=again", "OMP_NUM_THREADS=1",
						"HOROVOD_GLOO_TIMEOUT_SECONDS=300")
					var out bytes.Buffer
					cmd.Stdout, cmd.Stderr = &out, &out
					if err := cmd.Run(); err != nil || !strings.Contains(out.String(), fmt.Sprintf("place %d 2 ", r)) {
						t.Errorf("the second program of rank %d: %v\n%s", r, err, &out)
					}
				})
			}
			next(1)
			testnet.Eventually(t, "rank 1 has found the first program",
				func() bool { return testnet.Logged(entries, "joined too late") })
			next(0)
			second.Wait()
		})
	}
}
