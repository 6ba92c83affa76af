package bootstrap

import (
	"errors"
	"fmt"
	"strconv"
)

// Allocation is what Slurm has allocated to the script or the shell in which a process runs.
type Allocation struct {
	// Hosts are the names of the hosts, and Tasks the number of tasks that the user wants on each.
	Hosts []string
	Tasks []int
}

// FindAllocation returns the allocation of Slurm in which this process runs. It returns nil if there is none,
// or if this process is a task of a step: then srun has started it, perhaps as one of several. getenv returns
// the value of an environment variable.
func FindAllocation(getenv func(string) string) (*Allocation, error) {
	if step := getenv("SLURM_STEP_ID"); step != "" {
		if id, err := strconv.ParseUint(step, 10, 32); err != nil || id < firstSpecialStep {
			return nil, nil
		}
	}
	if getenv("SLURM_HET_SIZE") != "" {
		return nil, errors.New("this is a heterogeneous job of Slurm: name the hosts, and say with an agent how to reach " +
			"them (srun --het-group)")
	}
	list := getenv("SLURM_JOB_NODELIST")
	if getenv("SLURM_JOB_ID") == "" || list == "" {
		return nil, nil
	}
	hosts, err := ExpandHosts(list)
	if err != nil {
		return nil, fmt.Errorf("SLURM_JOB_NODELIST: %w", err)
	}
	const name = "SLURM_TASKS_PER_NODE"
	tasks, err := ExpandTasks(getenv(name))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if len(tasks) != len(hosts) {
		return nil, fmt.Errorf("%s is %s, which means %d hosts, but SLURM_JOB_NODELIST has %d", name, quote(getenv(name)),
			len(tasks), len(hosts))
	}
	return &Allocation{hosts, tasks}, nil
}
