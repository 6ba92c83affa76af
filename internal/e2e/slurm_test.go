package e2e

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/testnet"
)

// inSlurm is the variable that is set if this process runs in the cluster of scripts/slurm-cluster.sh.
const inSlurm = "GOHVD_E2E_SLURM"

// TestSlurm runs TestUnderSlurm in a cluster of Slurm, which it starts.
func TestSlurm(t *testing.T) {
	t.Parallel() // the jobs mostly wait for Slurm
	for _, program := range []string{"slurmctld", "slurmd", "munged", "srun"} {
		if _, err := exec.LookPath(program); err != nil {
			// CI has the packages slurmctld, slurmd, slurm-client and munge.
			if os.Getenv("CI") != "" {
				t.Fatal(err)
			}
			t.Skip(err)
		}
	}
	if os.Getuid() != 0 {
		t.Skip("only root can start a cluster of Slurm here")
	}
	self := testnet.Self(t)
	ctx, cancel := context.WithTimeout(t.Context(), jobLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, "../../scripts/slurm-cluster.sh", self, "-test.run=^TestUnderSlurm$", "-test.v")
	cmd.Env = append(os.Environ(), inSlurm+"=1")
	cmd.WaitDelay = 10 * time.Second
	out, err := cmd.CombinedOutput()
	if err != nil || !bytes.Contains(out, []byte("--- PASS: TestUnderSlurm ")) {
		t.Fatalf("%v\n%s", err, out)
	}
	t.Logf("%s", out)
}

// secretFile makes a secret for jobs that srun starts, and returns the variable that names it.
func secretFile(t *testing.T) string {
	file := filepath.Join(t.TempDir(), "secret")
	testnet.WriteFile(t, file, strings.Repeat("s", 43))
	return "HVD_SECRET_FILE=" + file
}

// TestUnderSlurm runs jobs in a cluster with the nodes n1 and n2.
func TestUnderSlurm(t *testing.T) {
	if os.Getenv(inSlurm) == "" {
		t.Skip("TestSlurm runs this test in a cluster")
	}
	self := testnet.Self(t)
	// run runs a command line in which SELF and HVDRUN stand for programs, and checks its lines of output.
	// A line that is wanted several times must occur as often.
	run := func(name, command string, want ...string) {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			cmd := exec.CommandContext(ctx, "bash", "-c",
				strings.NewReplacer("SELF", self, "HVDRUN", hvdrunPath).Replace(command))
			cmd.Dir = t.TempDir()
			cmd.Env = append(os.Environ(), programVariable+"=again", secretFile(t))
			cmd.WaitDelay = 10 * time.Second
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Errorf("%v", err)
			}
			for _, w := range slices.Compact(slices.Sorted(slices.Values(want))) {
				times := 0
				for _, v := range want {
					if v == w {
						times++
					}
				}
				if got := len(regexp.MustCompile(w).FindAll(out, -1)); got != times {
					t.Errorf("got %d lines with %q, want %d", got, w, times)
				}
			}
			if t.Failed() {
				t.Logf("%s", out)
			}
		})
	}
	// Rank, size, local rank, local size, cross rank and cross size of each rank.
	places := func(tasks ...int) (lines []string) {
		size := 0
		for _, n := range tasks {
			size += n
		}
		rank := 0
		for node, n := range tasks {
			for local := range n {
				cross, crossSize := 0, 0
				for i, m := range tasks {
					if m > local {
						if crossSize++; i < node {
							cross++
						}
					}
				}
				lines = append(lines, fmt.Sprintf("place %d %d %d %d %d %d\n", rank, size, local, n, cross, crossSize))
				rank++
			}
		}
		return lines
	}

	run("srun", "srun -N2 --ntasks-per-node=2 SELF", places(2, 2)...)
	run("different numbers of tasks", "srun -N2 -n4 --distribution=plane=3 SELF", places(3, 1)...)
	run("PMI2", "srun --mpi=pmi2 -N1 -n2 SELF", places(2)...)
	run("PMIx", "srun --mpi=pmix -N2 -n2 SELF", places(1, 1)...)
	run("sbatch", `printf '#!/bin/sh\nexec srun SELF\n' >script
		sbatch --quiet --wait -N2 --ntasks-per-node=2 --output=out script; cat out`, places(2, 2)...)
	run("hvdrun in sbatch", `printf '#!/bin/sh\nexec HVDRUN --tag-output=false SELF\n' >script
		sbatch --quiet --wait -N2 --ntasks=3 --distribution=plane=2 --output=out script; cat out`, places(2, 1)...)
	run("hvdrun in salloc", "salloc --quiet -N2 --ntasks-per-node=2 HVDRUN -np 3 --tag-output=false SELF",
		places(2, 1)...)
	run("name of the node", `printf '#!/bin/sh\nexec HVDRUN --tag-output=false printenv SLURMD_NODENAME\n' >script
		sbatch --quiet --wait -N2 --output=out script; cat out`, "(?m)^n1$", "(?m)^n2$")
	// The job has no GPU, so srun would fail if it took the limit for itself.
	run("limits for each task", `salloc --quiet -N2 --ntasks-per-node=2 \
		env SLURM_GPUS_PER_TASK=1 HVDRUN --tag-output=false SELF`, places(2, 2)...)
	for _, gpus := range []string{"--ntasks-per-node=2 --gpus=4 --cpus-per-gpu=2 --mem-per-gpu=9",
		"--ntasks-per-node=2 --gpus-per-task=1", "--gpus=4 --ntasks-per-gpu=1", "--ntasks-per-node=2 --gpus-per-node=2"} {
		run(gpus, "salloc --quiet -N2 "+gpus+" HVDRUN --tag-output=false printenv SLURM_GPUS_ON_NODE",
			slices.Repeat([]string{"(?m)^2$"}, 4)...)
	}
	run("different numbers of GPUs", "salloc --quiet -N2 --ntasks=3 --gpus-per-task=1 HVDRUN --tag-output=false "+
		`printenv SLURM_GPUS_ON_NODE`, "(?m)^2$", "(?m)^2$", "(?m)^1$")
	run("hvdrun on one node", `printf '#!/bin/sh\nexec HVDRUN --tag-output=false SELF\n' >script
		sbatch --quiet --wait -N1 --ntasks=3 --output=out script; cat out`, places(3)...)
	run("too many ranks", "salloc --quiet -N2 HVDRUN -np 4 SELF || true",
		"-np: got 4 ranks, but the allocation of Slurm is for 2 tasks \\(n1 has 1, n2 has 1\\): ask Slurm for more")
	run("heterogeneous", `salloc --quiet -n1 : -n2 bash -c 'srun --het-group=0,1 SELF; HVDRUN SELF || true'`,
		append(places(1, 2), "this is a heterogeneous job of Slurm: name the hosts")...)
	if all, half, _ := placesOfTwo(t); all != nil {
		run("srun with bound ranks", "HVD_BIND_TO=core "+programVariable+"=bound srun -N1 -n2 SELF",
			boundLines(half, all)...)
		half = slices.Concat(half, half)
		run("hvdrun with bound ranks", programVariable+"=bound salloc --quiet -N2 --ntasks-per-node=2 "+
			"HVDRUN --tag-output=false --bind-to core SELF", boundLines(half, half)...)
	}
}
