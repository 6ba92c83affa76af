package main

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/launch"
)

// group is a set of flags under a heading in the help.
type group struct {
	title string
	flags *pflag.FlagSet
}

func newGroup(title string) group {
	g := group{title, pflag.NewFlagSet(title, pflag.ContinueOnError)}
	g.flags.SortFlags = false
	return g
}

// jobFlags returns the group of the flags that apply to a job but do not set a setting.
func (r *runner) jobFlags() group {
	g := newGroup("The job and its output")
	f := g.flags
	f.StringVarP(&r.numProc, "num-proc", "n", "",
		"number of ranks `N`; also -np and --np (default: the number of slots, if --hosts or --hostfile is given)")
	f.StringVar(&r.servers, "servers", "",
		"number `N` of servers of a job with a parameter server (docs/ps.md), spread over the hosts; requires --workers")
	f.StringVar(&r.workers, "workers", "",
		"number `N` of workers of a job with a parameter server; requires --servers")
	f.StringVar(&r.restarts, "restarts", "0",
		"how often `N` each server and worker is started again if it is killed or ends with a status other than 0")
	f.VarP(&exportFlag{r}, "x", "x",
		"set `NAME=value` in the environment of the ranks. The ranks inherit the environment of hvdrun. Ranks on other hosts do "+
			"not inherit variables that describe this host or login, such as TMPDIR; to pass such a variable on, give -x NAME "+
			"without a value")
	f.StringVar(&r.outputDir, "output-filename", "",
		"also write the output of each rank R to `DIR`/rank.R/stdout and DIR/rank.R/stderr, without prefixes; that of nodes to "+
			"DIR/scheduler, DIR/server.R and DIR/worker.R")
	f.BoolVar(&r.tagOutput, "tag-output", true, "print [rank]<stdout>: or [rank]<stderr>: before each line")
	f.BoolVar(&r.timestamp, "prefix-output-with-timestamp", false,
		"print the time before each line; also -prefix-timestamp")
	f.StringVar(&r.torchStore, "torch-store", "127.0.0.1:0",
		"address `ADDR`, as host:port, at which hvdrun serves a TCPStore for torch.distributed in the ranks, or off. Every "+
			"client that can reach ADDR can change the store. In a job on several hosts, hvdrun serves a TCPStore only if this "+
			"flag is given. It cannot be used in elastic jobs")
	f.StringVar(&r.metricsAddr, "metrics-addr", "",
		"address `ADDR`, as host:port, at which hvdrun serves the metrics of all ranks for Prometheus (docs/metrics.md). The default host is "+
			"127.0.0.1. 0.0.0.0:PORT listens on all interfaces. Every client that can reach ADDR can read the metrics")
	f.StringVar(&r.viewAddr, "view", "",
		"serve the page of hvdrun view about this job at the address `HOST:PORT`, given as --view=HOST:PORT, and print its address. "+
			"--view is --view=127.0.0.1:0, which chooses a free port")
	f.Lookup("view").NoOptDefVal = "127.0.0.1:0"
	f.BoolVar(&r.tcp, "tcp", false,
		"use TCP and not InfiniBand: set NCCL_IB_DISABLE=1 for NCCL and, with --mpi, the networks of MPI (docs/mpi.md). gohvd's "+
			"own connections between hosts always use TCP")
	f.BoolVar(&r.verbose, "verbose", false, "log what hvdrun does")
	f.BoolVar(&r.checkBuild, "check-build", false, "print the features of this build and exit; also -cb")
	return g
}

// settingFlags returns the flags in the table of settings. There is a group for each section of the table.
func (r *runner) settingFlags() []group {
	var groups []group
	for _, s := range config.Settings() {
		for i, f := range s.Flags {
			if len(groups) == 0 || groups[len(groups)-1].title != s.Section {
				groups = append(groups, newGroup(s.Section))
			}
			v := groups[len(groups)-1].flags.VarPF(&settingFlag{r, s, f}, f.Name, "", usage(s, i))
			v.Hidden = f.Instead != ""
			if f.Arg == "" {
				v.NoOptDefVal = "true"
			}
		}
	}
	return groups
}

// usage returns the help text of the flag with index i of a setting. The text of the first flag describes the
// setting, and the texts of the other flags refer to the first flag.
func usage(s config.Setting, i int) string {
	switch first := s.Flags[0]; {
	case i == 0:
		return fmt.Sprintf("%s (%s; default: %s)", s.Doc, s.Name, s.Fallback())
	case s.Flags[i].Means == first.Means:
		return "the same as --" + first.Name
	default:
		return "the opposite of --" + first.Name
	}
}

// showFlags returns the group of flags that only the subcommand config has.
func (r *runner) showFlags() group {
	g := newGroup("Output")
	g.flags.BoolVar(&r.asJSON, "json", false, "print the settings as JSON")
	g.flags.BoolVar(&r.asMarkdown, "markdown", false, "print the reference page of all settings, as Markdown")
	return g
}

// settingFlag is the pflag.Value of a setting's flag.
type settingFlag struct {
	r       *runner
	setting config.Setting
	flag    config.Flag
}

func (f *settingFlag) String() string { return "" }

// Type returns the placeholder that the help prints for the flag's value, such as SECONDS.
func (f *settingFlag) Type() string {
	if f.flag.Arg == "" {
		return "bool"
	}
	return f.flag.Arg
}

func (f *settingFlag) Set(text string) error {
	value, err := f.setting.FromFlag(f.flag, text)
	if err != nil {
		return err
	}
	if f.setting.Name == config.FileVariable {
		if value, err = f.file(value); err != nil {
			return err
		}
	}
	f.r.flags = append(f.r.flags, config.FlagValue{Flag: "--" + f.flag.Name, Name: f.setting.Name,
		Value: value})
	return nil
}

// file returns path as an absolute path, so that the path stays valid if a rank changes its working
// directory. It returns an error if path is empty or the flag was given before.
func (f *settingFlag) file(path string) (string, error) {
	given := func(v config.FlagValue) bool { return v.Name == config.FileVariable }
	if path == "" || slices.ContainsFunc(f.r.flags, given) {
		return "", errors.New("want the path of one settings file: pass this flag only once")
	}
	return filepath.Abs(path)
}

// exportFlag is the pflag.Value of -x. If -x sets a setting, the setting counts as given by a flag.
type exportFlag struct{ r *runner }

func (f *exportFlag) String() string { return "" }
func (f *exportFlag) Type() string   { return "string" }

func (f *exportFlag) Set(text string) error {
	name, value, assigned := strings.Cut(text, "=")
	s, isSetting := config.Lookup(name)
	switch {
	case name == "":
		return errors.New("want NAME or NAME=value")
	case !assigned:
		i := slices.IndexFunc(f.r.env, func(e string) bool { return strings.HasPrefix(e, name+"=") })
		if i < 0 {
			f.r.warnings = append(f.r.warnings,
				fmt.Sprintf("-x %s: the environment has no such variable, so the ranks do not get it", name))
			break
		}
		if launch.IsOfHost(name) {
			f.r.extra = append(f.r.extra, f.r.env[i])
		}
	case isSetting && s.Scope != config.ByLauncher && value != "":
		f.r.flags = append(f.r.flags, config.FlagValue{Flag: "-x", Name: name, Value: value})
	default:
		f.r.extra = append(f.r.extra, text)
	}
	return nil
}

// flagError turns an error from pflag into a message for the user.
func flagError(cmd *cobra.Command, err error) error {
	var (
		absent  *absentError
		invalid *pflag.InvalidValueError
		unknown *pflag.NotExistError
	)
	switch {
	case errors.As(err, &absent):
		return usageError{absent}
	case errors.As(err, &invalid):
		name := "--" + invalid.GetFlag().Name
		if name == "--x" {
			name = "-x"
		}
		return usagef("%s: got %q, %w", name, invalid.GetValue(), invalid.Unwrap())
	case errors.As(err, &unknown) && unknown.GetSpecifiedShortnames() != "":
		if foreign := foreignError("-", unknown.GetSpecifiedName()); foreign != nil {
			return usageError{foreign}
		}
	case errors.As(err, &unknown):
		if foreign := foreignError("--", unknown.GetSpecifiedName()); foreign != nil {
			return usageError{foreign}
		}
		var names []string
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			if !f.Hidden {
				names = append(names, f.Name)
			}
		})
		if near := config.Nearest(unknown.GetSpecifiedName(), names, ""); near != "" {
			return usagef("%w; did you mean --%s?", err, near)
		}
	}
	return usageError{err}
}
