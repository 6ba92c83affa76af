package main

import (
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
