package main

import (
	"fmt"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/gohvd/gohvd/internal/bootstrap"
	"github.com/gohvd/gohvd/internal/launch"
)

// slurmAgent reaches the hosts of an allocation of Slurm. srun would take limits from the variables that are
// for each rank or for all hosts together, but its task runs all ranks of one host. Without --overlap, srun
// would wait for cores that no other step uses. Without --cpu-bind=none, it might bind the ranks of a host to
// one core.
const slurmAgent = "env -u SLURM_CPUS_PER_TASK -u SRUN_CPUS_PER_TASK -u SLURM_TRES_PER_TASK -u SLURM_GPUS " +
	"-u SLURM_GPUS_PER_TASK -u SLURM_NTASKS_PER_GPU -u SLURM_NTASKS_PER_TRES " +
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
		gpus, err := gpusPerHost(vars)
		if err != nil {
			return nil, err
		}
		r.where.agent = slurmAgent + gpus
	}
	return hosts, nil
}

var (
	// allocatedGRES matches the resources that a job has on some hosts, as in "GRES=gpu:a100:2(IDX:0-1)".
	allocatedGRES = regexp.MustCompile(`\bNodes=\S+ CPU_IDs=\S* Mem=\S* GRES=(\S*)`)
	allocatedGPUs = regexp.MustCompile(`\bgpu(?::[^:(,]+)?:(\d+)`)
)

// gpusPerHost returns the option with which srun gives its task all GPUs of the job on a host, after a space.
// It returns "" if the job has none, or has requested them for each host, because srun does so itself then.
func gpusPerHost(vars map[string]string) (string, error) {
	if !slices.ContainsFunc([]string{"SLURM_TRES_PER_TASK", "SLURM_GPUS", "SLURM_GPUS_PER_TASK",
		"SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_TRES"}, func(name string) bool { return vars[name] != "" }) {
		return "", nil
	}
	out, err := exec.Command("scontrol", "--details", "--oneliner", "show", "job", vars["SLURM_JOB_ID"]).Output()
	if err != nil {
		return "", fmt.Errorf("the GPUs of the allocation: scontrol show job: %w; or ask Slurm for --gpus-per-node", err)
	}
	var counts []int
	for _, m := range allocatedGRES.FindAllStringSubmatch(string(out), -1) {
		sum := 0
		for _, gpus := range allocatedGPUs.FindAllStringSubmatch(m[1], -1) {
			n, _ := strconv.Atoi(gpus[1])
			sum += n
		}
		counts = append(counts, sum)
	}
	switch counts = slices.Compact(counts); {
	case len(counts) > 1:
		return "", usagef("the hosts of the allocation have different numbers of GPUs (%v): ask Slurm for --gpus-per-node, "+
			"or give -H and --agent", counts)
	case len(counts) == 0 || counts[0] == 0:
		return "", nil
	}
	return " --gpus-per-node=" + strconv.Itoa(counts[0]), nil
}
