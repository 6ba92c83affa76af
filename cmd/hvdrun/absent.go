package main

import (
	"fmt"

	"github.com/spf13/pflag"
)

// absentFlags are horovodrun's flags for what this version does not have, by what that is.
var absentFlags = []struct {
	feature string
	names   []string
}{
	{"checks over the network that a cache could spare", []string{"disable-cache"}},
	{"elastic jobs", []string{
		"host-discovery-script", "min-np", "min-num-proc", "max-np", "max-num-proc", "slots-per-host", "elastic-timeout",
		"reset-limit", "blacklist-cooldown-range",
	}},
	{"hierarchical and torus algorithms", []string{
		"hierarchical-allreduce", "no-hierarchical-allreduce", "hierarchical-allgather", "no-hierarchical-allgather",
		"torus-allreduce", "no-torus-allreduce",
	}},
	{"autotuning", []string{
		"autotune", "no-autotune", "autotune-log-file", "autotune-warmup-samples", "autotune-steps-per-sample",
		"autotune-bayes-opt-max-samples", "autotune-gaussian-process-noise",
	}},
	{"MPI", []string{"mpi", "jsrun", "mpi-args", "tcp", "mpi-threads-disable", "no-mpi-threads-disable", "binding-args"}},
	{"NCCL", []string{"num-nccl-streams"}},
}

// absentError says that a flag is Horovod's but not in this version.
type absentError struct{ flag, feature string }

func (e *absentError) Error() string {
	return fmt.Sprintf("--%s: this version does not have %s", e.flag, e.feature)
}

// absentFlag is the value of such a flag. It rejects every value, so none is asked for.
type absentFlag absentError

func (f *absentFlag) String() string     { return "" }
func (f *absentFlag) Type() string       { return "bool" }
func (f *absentFlag) Set(_ string) error { return (*absentError)(f) }

func addAbsentFlags(flags *pflag.FlagSet) {
	for _, a := range absentFlags {
		for _, name := range a.names {
			f := flags.VarPF(&absentFlag{name, a.feature}, name, "", "")
			f.NoOptDefVal = "true"
			f.Hidden = true
		}
	}
}
