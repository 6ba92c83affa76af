package main

import (
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/spf13/pflag"
)

// absentFlags are horovodrun's flags for what this version does not have, by what that is.
var absentFlags = []struct {
	feature string
	names   []string // ask for it
	without []string // switches that ask to do without it, as this version does
}{
	// They are not the response cache, which is --cache-capacity.
	{"cached checks over the network", nil, []string{"disable-cache"}},
	{"elastic jobs", []string{
		"host-discovery-script", "min-np", "min-num-proc", "max-np", "max-num-proc", "slots-per-host", "elastic-timeout",
		"reset-limit", "blacklist-cooldown-range",
	}, nil},
	{
		"hierarchical and torus algorithms",
		[]string{"hierarchical-allreduce", "hierarchical-allgather", "torus-allreduce"},
		[]string{"no-hierarchical-allreduce", "no-hierarchical-allgather", "no-torus-allreduce"},
	},
	{"autotuning", []string{
		"autotune", "autotune-log-file", "autotune-warmup-samples", "autotune-steps-per-sample",
		"autotune-bayes-opt-max-samples", "autotune-gaussian-process-noise",
	}, []string{"no-autotune"}},
	{"MPI", []string{"mpi", "jsrun", "mpi-args", "tcp", "mpi-threads-disable", "binding-args"}, []string{"no-mpi-threads-disable"}},
	{"NCCL", []string{"num-nccl-streams"}, nil},
}

// absentError says that a flag is Horovod's but not in this version.
type absentError struct{ flag, feature string }

func (e *absentError) Error() string {
	return fmt.Sprintf("--%s: this version does not have %s", e.flag, e.feature)
}

// absentFlag is the value of such a flag. It rejects every value, but for a switch the one that asks for nothing.
type absentFlag struct {
	absentError
	without bool
}

func (f *absentFlag) String() string { return "" }
func (f *absentFlag) Type() string   { return "bool" }

func (f *absentFlag) Set(text string) error {
	if !f.without {
		return &f.absentError
	}
	switch on, err := strconv.ParseBool(text); {
	case err != nil:
		return errors.New("want no value")
	case !on:
		return &f.absentError
	}
	return nil
}

func addAbsentFlags(flags *pflag.FlagSet) {
	for _, a := range absentFlags {
		for _, name := range slices.Concat(a.names, a.without) {
			f := flags.VarPF(&absentFlag{absentError{name, a.feature}, slices.Contains(a.without, name)}, name, "", "")
			f.NoOptDefVal = "true"
			f.Hidden = true
		}
	}
}
