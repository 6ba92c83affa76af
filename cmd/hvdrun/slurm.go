package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

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
		r.where.agent = slurmAgent
		if r.where.gpus, err = gpusOfJob(vars, a.Hosts); err != nil {
			return nil, fmt.Errorf("the GPUs of the allocation: %w; or ask Slurm for --gpus-per-node", err)
		}
	}
	return hosts, nil
}

// scontrolTimeout is far longer than Slurm's own limit for an answer (MessageTimeout, by default 10 s).
const scontrolTimeout = time.Minute

// gpusOfJob returns the number of GPUs that the job has on each host. It returns nil if the job has requested
// none, or a number for each host, because srun gives its task all of them then.
func gpusOfJob(vars map[string]string, hosts []string) (map[string]int, error) {
	if !slices.ContainsFunc([]string{"SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU",
		"SLURM_NTASKS_PER_TRES"}, func(name string) bool { return vars[name] != "" }) &&
		!strings.Contains(vars["SLURM_TRES_PER_TASK"], "gpu") { // it may also have the processors
		return nil, nil
	}
	id := vars["SLURM_JOB_ID"]
	if array, task := vars["SLURM_ARRAY_JOB_ID"], vars["SLURM_ARRAY_TASK_ID"]; array != "" && task != "" {
		id = array + "_" + task // the number of one task of an array is also that of the array
	}
	ctx, cancel := context.WithTimeout(context.Background(), scontrolTimeout)
	defer cancel()
	out, err := exec.CommandContext(ctx, "scontrol", "--details", "--oneliner", "show", "job", id).Output()
	if err != nil {
		err = cmp.Or(ctx.Err(), err)
		if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
			err = fmt.Errorf("%w: %.500s", err, bytes.TrimSpace(exit.Stderr))
		}
		return nil, fmt.Errorf("scontrol show job %s: %w", id, err)
	}
	return readGPUs(string(out), hosts)
}

var (
	// allocatedGRES matches the resources that a job has on some hosts, as in "GRES=gpu:a100:2(IDX:0-1)".
	allocatedGRES = regexp.MustCompile(`\bNodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)`)
	allocatedGPUs = regexp.MustCompile(`\bgpu(?::[^:(,]+)?:(\d+)`)
)

// readGPUs returns the number of GPUs that a job has on each of its hosts, which scontrol has told.
func readGPUs(told string, hosts []string) (map[string]int, error) {
	gpus := make(map[string]int)
	for _, m := range allocatedGRES.FindAllStringSubmatch(told, -1) {
		names, err := bootstrap.ExpandHosts(m[1])
		if err != nil {
			return nil, fmt.Errorf("scontrol show job: Nodes: %w", err)
		}
		sum := 0
		for _, some := range allocatedGPUs.FindAllStringSubmatch(m[2], -1) {
			n, _ := strconv.Atoi(some[1])
			sum += n
		}
		for _, name := range names {
			gpus[name] = sum
		}
	}
	for _, host := range hosts {
		if _, ok := gpus[host]; !ok {
			return nil, fmt.Errorf("scontrol show job does not say what the job has on %s", host)
		}
	}
	return gpus, nil
}
