// Hvdrun starts the ranks of a job on this host and on others, or the nodes of a parameter server, supervises
// them, and reports how they ended.
//
//	hvdrun -np 4 python train.py
//	hvdrun -H h1:4,h2:4 python train.py
//	hvdrun --servers 2 --workers 4 ./train
//
// See hvdrun --help.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/launch"
)

// Exit statuses that come from hvdrun itself and not from the job.
const (
	statusFailure  = 1
	statusUsage    = 2
	statusNotFound = 127 // as a shell returns for a command that it does not find
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == launch.HelperArg {
		os.Exit(launch.HelperMain(os.Args[2:], os.Environ()))
	}
	if len(os.Args) > 1 && os.Args[1] == launch.AgentArg {
		os.Exit(launch.AgentMain(os.Args[2:], os.Environ()))
	}
	if len(os.Args) > 1 && os.Args[1] == mpiRankArg {
		os.Exit(mpiRankMain(os.Args[2:], os.Environ(), os.Stderr))
	}
	if len(os.Args) > 1 && os.Args[1] == mpiReachArg {
		os.Exit(mpiReachMain(os.Args[2:], os.Environ(), os.Stderr))
	}
	os.Exit(run(os.Args[1:], os.Environ(), os.Stdout, os.Stderr))
}

// usageError is an error in the user's command line or settings.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// runner is the state of one execution of hvdrun.
type runner struct {
	env            []string
	stdout, stderr io.Writer
	status         int // the exit status

	numProc      string
	servers      string
	workers      string
	restarts     string
	elasticFlags elasticFlags
	where        hostFlags
	mpi          mpiFlags
	outputDir    string
	tagOutput    bool
	timestamp    bool
	tcp          bool
	verbose      bool
	torchStore   string
	metricsAddr  string
	viewAddr     string
	checkBuild   bool

	flags    []config.FlagValue // settings in the order of the command line
	extra    []string           // variables for the ranks that are not settings, as NAME=value
	warnings []string

	asJSON, asMarkdown bool // flags of hvdrun config
}

// run runs hvdrun and returns its exit status.
func run(args, env []string, stdout, stderr io.Writer) int {
	r := &runner{env: env, stdout: stdout, stderr: stderr}
	cmd := r.command()
	cmd.SetArgs(rewrite(args, cmd.Flags()))
	err := cmd.Execute()
	if err == nil {
		return r.status
	}
	text := strings.TrimPrefix(strings.TrimPrefix(err.Error(), "launch: "), "config: ")
	fmt.Fprintf(stderr, "hvdrun: %s\n", text)
	var (
		usage  usageError
		option *launch.OptionError
		start  *launch.CommandError
	)
	switch {
	case errors.As(err, &usage), errors.As(err, &option):
		fmt.Fprintln(stderr, "Try 'hvdrun --help'.")
		return statusUsage
	case errors.As(err, &start):
		return start.Status
	case r.status != 0:
		return r.status
	}
	return statusFailure
}
