package main

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/gohvd/gohvd/internal/config"
)

// absentFlag is the value of a flag of horovodrun that has no effect in hvdrun. If the flag only turns off a
// feature that hvdrun lacks, Set accepts every value. Otherwise Set rejects every value.
type absentFlag struct {
	name, reason string
	without      bool // the flag only turns off a feature that hvdrun lacks
}

func (f *absentFlag) String() string { return "" }
func (f *absentFlag) Type() string   { return "bool" }

func (f *absentFlag) Set(text string) error {
	if f.without {
		switch on, err := strconv.ParseBool(text); {
		case err != nil:
			return errors.New("want the flag without a value")
		case on:
			return nil
		}
	}
	return &absentError{f}
}

// absentError reports that a flag of horovodrun has no effect in hvdrun. Its text contains the reason.
type absentError struct{ flag *absentFlag }

func (e *absentError) Error() string { return fmt.Sprintf("--%s: %s", e.flag.name, e.flag.reason) }

func addAbsentFlags(flags *pflag.FlagSet) {
	for _, i := range config.Inerts() {
		for _, name := range strings.Fields(i.Flags) {
			without := strings.HasPrefix(name, "no-") || strings.HasPrefix(name, "disable-")
			f := flags.VarPF(&absentFlag{name, i.Reason, without}, name, "", "")
			f.NoOptDefVal = "true"
			f.Hidden = true
		}
	}
}

// foreignFlags lists flags of torchrun and mpirun for which hvdrun has another name or which it does not
// need. For each flag it has advice on what to use instead.
var foreignFlags = []struct {
	program string
	names   []string
	instead string
}{
	{"torchrun", []string{"nproc-per-node"}, "use -np N, or on several hosts -H h1:N,h2:N"},
	{"torchrun", []string{"nnodes", "node-rank", "local-addr"},
		"use -H h1:N,h2:N, because hvdrun itself starts the ranks of all hosts"},
	{
		"torchrun", []string{"rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "standalone"},
		"leave it out, because hvdrun itself serves the store",
	},
	{"torchrun", []string{"master-addr", "master-port"}, "use --torch-store ADDR"},
	{"torchrun", []string{"max-restarts", "monitor-interval"}, "use --restarts N, which restarts nodes of a parameter server, or --min-np N for ranks (docs/elastic.md)"},
	{"torchrun", []string{"log-dir", "redirects", "tee", "r", "t"}, "use --output-filename DIR"},
	{"torchrun", []string{"module", "m"}, "use python3 -m MODULE as the command"},
	{"torchrun", []string{"no-python"}, "leave it out, because hvdrun runs any command"},
	{"mpirun", []string{"host"}, "use -H h1:N,h2:N"},
	{"mpirun", []string{"machinefile", "f"}, "use --hostfile FILE"},
	{"mpirun", []string{"N", "npernode", "ppn", "map-by"}, "use -H h1:N,h2:N"},
	{"mpirun", []string{"c"}, "use -np N"},
	{"mpirun", []string{"oversubscribe"}, "leave it out, because a host gets as many ranks as -np or -H say"},
	{"mpirun", []string{"allow-run-as-root"}, "leave it out"},
	{"mpirun", []string{"mca", "gmca", "prtemca"},
		"put it into --mpi-args, with --mpi; hvdrun config shows the settings that hvdrun itself has"},
	{"mpirun", []string{"genv", "env"}, "use -x NAME=value"},
	{"mpirun", []string{"wdir", "wd"}, "use sh -c 'cd DIR && exec COMMAND' as the command"},
	{"mpirun", []string{"timestamp-output"}, "use --prefix-output-with-timestamp"},
	{"mpirun", []string{"report-bindings", "display-map"}, "use --verbose"},
}

// isForeign reports whether foreignFlags contains the flag.
func isForeign(name string) bool { return foreignError("", name) != nil }

// foreignError returns an error with advice if name is a flag of another launcher. For other flags it returns
// nil.
func foreignError(dashes, name string) error {
	for _, f := range foreignFlags {
		if slices.Contains(f.names, string(normalize(nil, name))) {
			return fmt.Errorf("%s%s is a flag of %s: %s", dashes, name, f.program, f.instead)
		}
	}
	return nil
}
