package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/launch"
)

// TestAllocated checks which hosts and how many ranks hvdrun takes from an allocation of Slurm, and how it
// reaches the hosts.
func TestAllocated(t *testing.T) {
	two := []string{"SLURM_JOB_ID=3", "SLURM_JOB_NODELIST=n[1-2]", "SLURM_TASKS_PER_NODE=4,1"}
	one := []string{"SLURM_JOB_ID=3", "SLURM_JOB_NODELIST=n1", "SLURM_TASKS_PER_NODE=4"}
	here := append([]string{"SLURMD_NODENAME=n1"}, one...)
	for name, c := range map[string]struct {
		env     []string
		np      string
		port    int
		want    []launch.Host
		ranks   string // the value of -np afterwards
		bySlurm bool
		err     string
	}{
		"two hosts":        {env: two, want: []launch.Host{{Name: "n1", Slots: 4}, {Name: "n2", Slots: 1}}, bySlurm: true},
		"with ssh":         {env: two, port: 22, want: []launch.Host{{Name: "n1", Slots: 4}, {Name: "n2", Slots: 1}}},
		"too many":         {env: two, np: "6", ranks: "6", err: "-np: got 6 ranks, but the allocation of Slurm is for 5 tasks (n1 has 4, n2 has 1)"},
		"from a login":     {env: one, want: []launch.Host{{Name: "n1", Slots: 4}}, bySlurm: true},
		"this host":        {env: here, ranks: "4"},
		"more on one host": {env: here, np: "9", ranks: "9"},
		"none":             {np: "2", ranks: "2"},
		"broken":           {env: []string{"SLURM_JOB_ID=3", "SLURM_JOB_NODELIST=n["}, err: "the hosts of the allocation: SLURM_JOB_NODELIST"},
	} {
		r := &runner{env: c.env, numProc: c.np, where: hostFlags{sshPort: c.port}}
		hosts, err := r.allocated(true)
		if (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: got error %v, want %q", name, err, c.err)
		}
		same := len(hosts) == len(c.want)
		for i := range hosts {
			same = same && hosts[i] == c.want[i]
		}
		if !same || r.numProc != c.ranks || (r.where.agent == slurmAgent) != c.bySlurm {
			t.Errorf("%s: got %+v, -np %q and agent %q, want %+v, %q and srun: %v", name, hosts, r.numProc, r.where.agent,
				c.want, c.ranks, c.bySlurm)
		}
	}
}

// TestGPUsOfJob checks what hvdrun reads from scontrol, and that it needs no scontrol for a job without GPUs.
func TestGPUsOfJob(t *testing.T) {
	for told, want := range map[string]string{
		"JOB_GRES=gpu:3   Nodes=n1 CPU_IDs=14-15 Mem=4000 GRES=gpu:2(IDX:0-1)   Nodes=n2 CPU_IDs=14 Mem=4 GRES=gpu:1(IDX:0) X=": "map[n1:2 n2:1] <nil>",
		"Nodes=n[1-2] CPU_IDs=0 Mem=1 GRES=gpu:a100:2(IDX:0,2),shard:4,gpu:v100:1(IDX:1) X=1":                                   "map[n1:3 n2:3] <nil>",
		"Nodes=n[1-2] CPU_IDs= Mem=1 GRES= X=gpu:1":                                                                             "map[n1:0 n2:0] <nil>",
		"Nodes=n1 CPU_IDs=0 Mem=1 GRES=gpu:1 Nodes=n[ CPU_IDs=0 Mem=1 GRES=":                                                    "map[] scontrol show job: Nodes: ",
		"Nodes=n1 CPU_IDs=0 Mem=1 GRES=gpu:1":                                                                                   "map[] scontrol show job does not say what the job has on n2",
	} {
		gpus, err := readGPUs(told, []string{"n1", "n2"})
		if got := fmt.Sprint(gpus, err); !strings.HasPrefix(got, want) {
			t.Errorf("%s: got %s, want %s", told, got, want)
		}
	}
	t.Setenv("PATH", t.TempDir())
	if gpus, err := gpusOfJob(map[string]string{"SLURM_JOB_ID": "3", "SLURM_TRES_PER_TASK": "cpu=2"}, []string{"n1"}); gpus != nil || err != nil {
		t.Errorf("without GPUs: got %v, %v", gpus, err)
	}
	scontrol := filepath.Join(os.Getenv("PATH"), "scontrol")
	if err := os.WriteFile(scontrol, []byte("#!/bin/sh\necho $5 is gone >&2\nexit 1\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	_, err := gpusOfJob(map[string]string{"SLURM_JOB_ID": "5", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2",
		"SLURM_TRES_PER_TASK": "cpu=2,gres/gpu=1"}, []string{"n1"})
	if err == nil || !strings.Contains(err.Error(), "5_2 is gone") {
		t.Errorf("got error %v, want what scontrol said of the task of the array", err)
	}
}
