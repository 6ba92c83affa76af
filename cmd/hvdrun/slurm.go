package main

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/gohvd/gohvd/internal/bootstrap"
	"github.com/gohvd/gohvd/internal/launch"
)

// slurmAgent reaches the hosts of an allocation of Slurm. srun would take the limits for each task from the
// variables. They are for a rank, but the task of srun runs all ranks of a host. Without --overlap, srun
// would wait for cores that no other step uses. Without --cpu-bind=none, it might bind the ranks of a host to
// one core.
const slurmAgent = "env -u SLURM_CPUS_PER_TASK -u SRUN_CPUS_PER_TASK -u SLURM_GPUS_PER_TASK " +
	"-u SLURM_TRES_PER_TASK " +
	"srun --unbuffered --overlap --nodes=1 --ntasks=1 --cpu-bind=none --mpi=none --nodelist=" + hostPlace

// allocated returns the hosts of the allocation of Slurm in which hvdrun runs, with as many slots as tasks.
// srun then reaches them, unless flags say otherwise. If there is no allocation, allocated returns nil. If
// the only host is this one, it returns nil too, and the number of tasks is the default of -np, if the
// processes are ranks.
func (r *runner) allocated(ranks bool) ([]launch.Host, error) {
	vars := make(map[string]string)
	for _, v := range r.env {
		name, value, _ := strings.Cut(v, "=")
		vars[name] = value
	}
	a, err := bootstrap.FindAllocation(func(name string) string { return vars[name] })
	if err != nil {
		return nil, usagef("the hosts of the allocation: %w; or give them with -H", err)
	}
	if a == nil {
		return nil, nil
	}
	var hosts []launch.Host
	var tasks []string
	for i, name := range a.Hosts {
		hosts = append(hosts, launch.Host{Name: name, Slots: a.Tasks[i]})
		tasks = append(tasks, fmt.Sprintf("%s has %d", name, a.Tasks[i]))
	}
	if len(hosts) == 1 && (launch.IsThisHost(hosts[0].Name) || hosts[0].Name == vars["SLURMD_NODENAME"]) {
		if r.numProc == "" && ranks {
			r.numProc = strconv.Itoa(hosts[0].Slots)
		}
		return nil, nil
	}
	if np, err := strconv.Atoi(r.numProc); err == nil && np > launch.Slots(hosts) {
		return nil, usagef("-np: got %d ranks, but the allocation of Slurm is for %d tasks (%.200s): ask Slurm for more with "+
			"--ntasks-per-node, or name the hosts with -H", np, launch.Slots(hosts), strings.Join(tasks, ", "))
	}
	if r.where.agent == "" && r.where.sshPort == 0 && r.where.sshIdentity == "" {
		r.where.agent = slurmAgent
	}
	return hosts, nil
}
