package e2e

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/gohvd/gohvd/internal/bootstrap"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/store"
)

// launcherRow says which variables a launcher sets for a process, in a job of size processes on one host.
type launcherRow struct {
	kind bootstrap.Kind
	// sets returns the variables of the launcher alone, as NAME=value.
	sets func(rank, size int) []string
	// meet are the variables with which the user says what the launcher does not.
	meet []string
	// without is a variable whose lack makes the job incomplete.
	without string
}

// launcherRows returns the launchers in the order of the table in docs/launchers.md. dir is a private folder,
// port is a free port of this host, and launcherPort is the port of a store like that of hvdrun.
func launcherRows(dir string, port, launcherPort int) []launcherRow {
	master := []string{"MASTER_ADDR=127.0.0.1", fmt.Sprintf("MASTER_PORT=%d", port)}
	rendezvous := []string{"HVD_RENDEZVOUS_HOST=127.0.0.1", fmt.Sprintf("HVD_RENDEZVOUS_PORT=%d", port)}
	sized := append([]string{"HVD_SIZE=2"}, master...)
	// numbered returns the variables more, and those with the given names for the rank and the size of a job
	// on one host. A name may be empty.
	numbered := func(rankName, sizeName, localRank, localSize string,
		more ...string) func(int, int) []string {
		return func(rank, size int) []string {
			all := slices.Clone(more)
			for _, v := range []struct {
				name  string
				value int
			}{{rankName, rank}, {sizeName, size}, {localRank, rank}, {localSize, size}} {
				if v.name != "" {
					all = append(all, fmt.Sprintf("%s=%d", v.name, v.value))
				}
			}
			return all
		}
	}
	return []launcherRow{
		{bootstrap.Hvdrun, numbered("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE",
			"HOROVOD_GLOO_RENDEZVOUS_ADDR=127.0.0.1", fmt.Sprintf("HOROVOD_GLOO_RENDEZVOUS_PORT=%d", launcherPort)),
			nil, "HOROVOD_GLOO_RENDEZVOUS_ADDR"},
		{bootstrap.Torchrun, numbered("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
			append([]string{"TORCHELASTIC_RUN_ID=r"}, master...)...), nil, "WORLD_SIZE"},
		{bootstrap.OpenMPI, numbered("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
			"OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE=7", "PMIX_SERVER_TMPDIR="+dir), nil, "PMIX_SERVER_TMPDIR"},
		{bootstrap.MVAPICH, numbered("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
			"MV2_COMM_WORLD_LOCAL_SIZE"), master, "MV2_COMM_WORLD_SIZE"},
		{bootstrap.Jsrun, numbered("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK",
			"JSM_NAMESPACE_LOCAL_SIZE"), rendezvous, "HVD_RENDEZVOUS_HOST"},
		// With PMI_FD, TestOtherLaunchers runs the real mpiexec.
		{bootstrap.PMI, numbered("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"), master, "MASTER_PORT"},
		{bootstrap.Flux, numbered("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "", "FLUX_JOB_NNODES=1",
			"FLUX_JOB_ID=7", "FLUX_JOB_TMPDIR="+dir), nil, "FLUX_JOB_SIZE"},
		{bootstrap.Slurm, numbered("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE",
			"SLURM_JOB_ID=7", "SLURM_STEP_ID=0", "SLURM_STEP_NODELIST=n", "SLURM_NODEID=0"), rendezvous[1:],
			"SLURM_STEP_NODELIST"},
		{bootstrap.Kubernetes, func(rank, _ int) []string {
			return []string{fmt.Sprintf("JOB_COMPLETION_INDEX=%d", rank), fmt.Sprintf("HOSTNAME=train-%d", rank)}
		}, append([]string{"HVD_SIZE=2"}, rendezvous...), "HVD_SIZE"},
		{bootstrap.Batch, func(rank, size int) []string {
			all := numbered("AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_NUM_NODES", "", "")(rank, size)
			if rank > 0 { // the main node has no such variable
				all = append(all, "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS=127.0.0.1")
			}
			return all
		}, rendezvous[1:], "AWS_BATCH_JOB_NUM_NODES"},
		{bootstrap.Plain, numbered("RANK", "WORLD_SIZE", "", "", master...), nil, "MASTER_ADDR"},
		{bootstrap.PALS, numbered("PALS_RANKID", "", "", ""), sized, "HVD_SIZE"},
		{bootstrap.ALPS, numbered("ALPS_APP_PE", "", "", ""), sized, "HVD_SIZE"},
		{bootstrap.PMIx, numbered("PMIX_RANK", "", "", "", "PMIX_NAMESPACE=prterun-h-7@1"), sized, "HVD_SIZE"},
		{bootstrap.PMIPort, numbered("PMI_ID", "", "", "", "PMI_PORT=h:7"), sized, "MASTER_ADDR"},
		{bootstrap.PBS, numbered("PBS_VNODENUM", "", "", "", "PBS_TASKNUM=2"), sized, "HVD_SIZE"},
	}
}

// TestNoRankTrainsAlone starts two processes with the variables that each launcher of the table in
// docs/launchers.md sets. The table says in which cases the processes meet and in which Init fails. A process
// must never be a job of one rank, unless HVD_SIZE=1 says so.
func TestNoRankTrainsAlone(t *testing.T) {
	table := launcherTable(t)
	rows := launcherRows("", 0, 0)
	if len(table) != len(rows)+1 {
		t.Fatalf("the table in docs/launchers.md has %d launchers, want %d", len(table)-1, len(rows))
	}
	var printed strings.Builder
	for i, want := range table {
		if i == 0 {
			fmt.Fprintf(&printed, "| %s |\n", strings.Join(want, " | "))
			continue
		}
		kind := rows[i-1].kind
		got := []string{string(kind)}
		for _, c := range launcherCases {
			t.Run(string(kind)+"/"+c.name, func(t *testing.T) {
				s, text := secret.New()
				l := launcherRows(t.TempDir(), testnet.FreePort(t), serveLauncher(t, s))[i-1]
				got = append(got, outcome(t, kind, func(rank int) []string {
					return append(c.env(l, rank), "HVD_SECRET="+text)
				}))
			})
		}
		if !slices.Equal(got, want) {
			t.Errorf("got %q, want %q as in docs/launchers.md", got, want)
		}
		fmt.Fprintf(&printed, "| %s |\n", strings.Join(got, " | "))
	}
	t.Logf("two processes of each launcher:\n%s", &printed)
}

// launcherCases are the columns of the table in docs/launchers.md. env returns the variables of a process of
// two.
var launcherCases = []struct {
	name string
	env  func(l launcherRow, rank int) []string
}{
	{"complete", func(l launcherRow, rank int) []string { return slices.Concat(l.sets(rank, 2), l.meet) }},
	{"incomplete", func(l launcherRow, rank int) []string {
		return slices.DeleteFunc(slices.Concat(l.sets(rank, 2), l.meet), func(v string) bool {
			return strings.HasPrefix(v, l.without+"=")
		})
	}},
	{"around", func(l launcherRow, rank int) []string {
		if l.kind == bootstrap.Hvdrun {
			return append(l.sets(rank, 2), "OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE=1")
		}
		return append(l.sets(rank, 2), "HOROVOD_RANK=0", "HOROVOD_SIZE=1")
	}},
	{"inside", func(l launcherRow, rank int) []string {
		if l.kind == bootstrap.Torchrun || l.kind == bootstrap.Plain { // they set RANK themselves
			return append(l.sets(0, 1), fmt.Sprintf("ALPS_APP_PE=%d", rank))
		}
		return append(l.sets(0, 1), fmt.Sprintf("RANK=%d", rank), "WORLD_SIZE=2")
	}},
	{"one", func(l launcherRow, rank int) []string { return append(l.sets(rank, 2), "HVD_SIZE=1") }},
}

// TestShellsAreAlone starts processes with the variables of shells and of jobs of one task, such as
// srun --pty python. Each must be a job of one rank, without a setting.
func TestShellsAreAlone(t *testing.T) {
	step := []string{"SLURM_JOB_ID=7", "SLURM_STEP_ID=0", "SLURM_PROCID=0", "SLURM_NTASKS=1", "SLURM_NODEID=0",
		"SLURM_STEP_NODELIST=n", "SLURM_LOCALID=0", "SLURM_STEP_TASKS_PER_NODE=1"}
	for name, env := range map[string][]string{
		"srun --pty":              step,
		"srun --pty --mpi=pmix":   append(slices.Clone(step), "PMIX_RANK=0", "PMIX_NAMESPACE=slurm.pmix.7.0"),
		"srun --pty, Cray":        append(slices.Clone(step), "PALS_RANKID=0", "PALS_APID=a"),
		"salloc":                  {"SLURM_JOB_ID=7", "SLURM_NTASKS=1"},
		"bsub -Is":                {"LSB_JOBID=7", "LSB_HOSTS=h1", "LSB_MCPU_HOSTS=h1 1", "LSB_DJOB_NUMPROC=1"},
		"qsub -I":                 {"PBS_JOBID=7", "PBS_ENVIRONMENT=PBS_INTERACTIVE", "PBS_VNODENUM=0", "PBS_TASKNUM=1"},
		"AWS Batch, one node":     {"AWS_BATCH_JOB_ID=7", "AWS_BATCH_JOB_ATTEMPT=1"},
		"jsrun -n 1":              {"JSM_NAMESPACE_RANK=0", "JSM_NAMESPACE_SIZE=1", "PMIX_RANK=0", "LSB_JOBID=7"},
		"flux alloc":              {"FLUX_URI=local:///run/flux", "FLUX_ENCLOSING_ID=f7"},
		"flux run -n 1":           {"FLUX_TASK_RANK=0", "FLUX_JOB_SIZE=1", "FLUX_JOB_NNODES=1", "FLUX_JOB_ID=f7"},
		"hvdrun in srun --pty":    append(slices.Clone(step), "HOROVOD_RANK=0", "HOROVOD_SIZE=1"),
		"mpirun -np 1 in a shell": append(slices.Clone(step), "OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE=1"),
	} {
		if got := outcome(t, "", func(int) []string { return env }); got != "alone" {
			t.Errorf("%s: got %s, want alone", name, got)
		}
	}
}

// launcherTable returns the cells of the table in docs/launchers.md, without the line of dashes.
func launcherTable(t *testing.T) (rows [][]string) {
	t.Helper()
	page := testnet.ReadFile(t, "../../docs/launchers.md")
	_, text, ok := strings.Cut(string(page), "\n| launcher | complete |")
	if !ok {
		t.Fatal("docs/launchers.md has no table that begins with launcher and complete")
	}
	text, _, _ = strings.Cut("| launcher | complete |"+text, "\n\n")
	dashes := regexp.MustCompile(`^\|[-|]+\|$`)
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); dashes.MatchString(line) {
			continue
		}
		cells := strings.Split(strings.Trim(line, "|"), "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		rows = append(rows, cells)
	}
	return rows
}

// serveLauncher serves a store like that of hvdrun, for a job with the secret s, and returns its port.
func serveLauncher(t *testing.T, s secret.Secret) int {
	t.Helper()
	h := store.NewHashStore(store.Limits{})
	server, err := store.Serve("127.0.0.1:0", h, store.Config{Secret: s})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Close(); err != nil {
			t.Error(err)
		}
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	})
	_, port, _ := strings.Cut(server.Addr(), ":")
	n, err := strconv.Atoi(port)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// outcome runs two processes of the program again with the given variables and no others of a launcher. It
// returns "joined" if both are ranks of one job, "alone" if both are jobs of one rank, and "error" if Init
// has failed in both with an error that says how to be alone. With hvdrun, there is no such way.
func outcome(t *testing.T, kind bootstrap.Kind, env func(rank int) []string) string {
	t.Helper()
	self := testnet.Self(t)
	ctx, cancel := context.WithTimeout(t.Context(), jobLimit)
	defer cancel()
	var outputs [2]string
	var wg sync.WaitGroup
	for r := range outputs {
		wg.Go(func() {
			cmd := exec.CommandContext(ctx, self)
			cmd.Env = append(env(r), programVariable+"=again", "PATH="+os.Getenv("PATH"), "OMP_NUM_THREADS=1")
			var out bytes.Buffer
			cmd.Stdout, cmd.Stderr = &out, &out
			err := cmd.Run()
			text := out.String()
			switch {
			case err == nil && strings.Contains(text, fmt.Sprintf("place %d 2 ", r)):
				text = "joined"
			case err == nil && strings.Contains(text, "place 0 1 0 1 0 1\n"):
				text = "alone"
			case err != nil && (kind == bootstrap.Hvdrun || strings.Contains(text, "HVD_SIZE=1")):
				text = "error"
			}
			outputs[r] = text
		})
	}
	wg.Wait()
	if outputs[0] != outputs[1] {
		return strings.Join(outputs[:], " and ")
	}
	return outputs[0]
}
