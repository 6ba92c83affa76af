// Hvdrun starts the ranks of a job on this host, supervises them and reports how they ended.
//
//	hvdrun -np 4 python train.py
//
// See hvdrun --help.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/signal"
	"runtime/debug"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/launch"
	"github.com/gohvd/gohvd/rendezvous"
)

// version is set by the linker (-X main.version=...) in a release.
var version string

// Exit statuses besides those of the job.
const (
	statusFailure = 1 // of hvdrun itself
	statusUsage   = 2
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == launch.HelperArg {
		os.Exit(launch.HelperMain(os.Args[2:], os.Environ()))
	}
	os.Exit(run(os.Args[1:], os.Environ(), os.Stdout, os.Stderr))
}

// usageError is one of the user's making.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// run is main without the process: it returns the exit status.
func run(args, env []string, stdout, stderr io.Writer) int {
	r := &runner{env: env, stdout: stdout, stderr: stderr}
	cmd := r.command()
	cmd.SetArgs(rewrite(args, cmd.Flags()))
	err := cmd.Execute()
	if err == nil {
		return r.status
	}
	fmt.Fprintf(stderr, "hvdrun: %s\n", strings.TrimPrefix(err.Error(), "launch: "))
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

// runner is one call of hvdrun.
type runner struct {
	env            []string
	stdout, stderr io.Writer
	status         int // of the job

	numProc      string
	exports      []string
	outputDir    string
	tagOutput    bool
	timestamp    bool
	startTimeout string
	verbose      bool
}

const long = `Hvdrun starts N processes of a command on this host, the ranks of a job, and supervises them.

Each line that a rank prints comes out as "[rank]<stdout>:line". Standard input of the ranks is empty. When a rank
fails the others have 5 s to end by themselves; then they get SIGTERM, and SIGKILL 5 s later. Ctrl-C, SIGTERM and
SIGHUP end all ranks likewise; a second Ctrl-C kills them at once. SIGUSR1, SIGUSR2 and SIGQUIT are passed on.
When the command of a rank has ended, processes that it left in the background are killed.

The exit status is 0 if all ranks end with 0. Otherwise it is that of the rank that caused the failure, 128+n for
signal n: if signal n ended the job, or the rank; 2 for wrong usage, 126 and 127 if the command cannot be run or
found, 1 if hvdrun itself fails.`

const examples = `  hvdrun -np 4 python train.py --lr 0.1
  hvdrun -np 2 -x HOROVOD_LOG_LEVEL=debug --output-filename logs go run ./train`

func (r *runner) command() *cobra.Command {
	cmd := &cobra.Command{
		Use:           "hvdrun -np N [flags] command [args...]",
		Short:         "Start and supervise the ranks of a job",
		Long:          long,
		Example:       examples,
		Version:       versionText(),
		Args:          cobra.ArbitraryArgs,
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE:          r.launch,

		DisableFlagsInUseLine: true,
	}
	cmd.SetOut(r.stdout)
	cmd.SetErr(r.stderr)
	cmd.SetVersionTemplate("hvdrun {{.Version}}\n")
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	help := cmd.HelpFunc()
	cmd.SetHelpFunc(func(c *cobra.Command, args []string) {
		help(c, args)
		if c == cmd {
			printSettings(c.OutOrStdout())
		}
	})

	f := cmd.Flags()
	f.SetInterspersed(false)
	f.SetNormalizeFunc(normalize)
	f.SortFlags = false
	f.StringVarP(&r.numProc, "num-proc", "n", "", "number of ranks `N`; also -np and --np")
	f.StringArrayVarP(&r.exports, "x", "x", nil,
		"set `NAME=value` in the ranks' environment; NAME alone changes nothing, as all of hvdrun's environment is passed on")
	f.StringVar(&r.outputDir, "output-filename", "",
		"also write each rank's output to `DIR`/rank.R/stdout and stderr, without prefix")
	f.BoolVar(&r.tagOutput, "tag-output", true, "put [rank]<stdout>: in front of each line")
	f.BoolVar(&r.timestamp, "prefix-output-with-timestamp", false, "put the time in front of each line")
	f.StringVar(&r.startTimeout, "start-timeout", "",
		"`seconds` until Init gives up waiting for the other ranks (HOROVOD_GLOO_TIMEOUT_SECONDS)")
	f.BoolVar(&r.verbose, "verbose", false, "tell what hvdrun does")
	cmd.InitDefaultHelpFlag()
	cmd.InitDefaultVersionFlag()
	return cmd
}

func (r *runner) launch(_ *cobra.Command, command []string) error {
	if r.numProc == "" {
		return usagef("the number of ranks is missing: hvdrun -np N command [args...]")
	}
	np, err := strconv.Atoi(r.numProc)
	if err != nil || np < 1 || np > launch.MaxRanks {
		return usagef("-np: got %q, want a number from 1 to %d", r.numProc, launch.MaxRanks)
	}
	if len(command) == 0 {
		return usagef("the command is missing: hvdrun -np %d command [args...]", np)
	}
	set, err := r.set()
	if err != nil {
		return err
	}

	store := rendezvous.NewHashStore(rendezvous.Limits{})
	defer store.Close()
	server, err := rendezvous.Serve("127.0.0.1:0", store, r.logger())
	if err != nil {
		return err
	}
	defer server.Close()
	addr, err := netip.ParseAddrPort(server.Addr())
	if err != nil {
		return fmt.Errorf("address of the store: %w", err)
	}

	signals := make(chan os.Signal, 16)
	for _, s := range []os.Signal{unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2} {
		if !signal.Ignored(s) { // as under nohup
			signal.Notify(signals, s)
		}
	}
	defer signal.Stop(signals)

	result, err := launch.Run(context.Background(), launch.Options{
		NP: np, Command: command, Env: r.env, Set: set,
		Store: store, StoreAddr: addr,
		Stdout: r.stdout, Stderr: r.stderr,
		NoPrefix: !r.tagOutput, Timestamp: r.timestamp, OutputDir: r.outputDir, Verbose: r.verbose,
		Signals: signals,
	})
	r.status = result.Status
	return err
}

// set is what the flags add to the ranks' environment.
func (r *runner) set() ([]string, error) {
	var set []string
	if r.startTimeout != "" {
		const name = "HOROVOD_GLOO_TIMEOUT_SECONDS"
		if _, err := config.Load(func(n string) (string, bool) { return r.startTimeout, n == name }, false); err != nil {
			return nil, usagef("--start-timeout: %w", err)
		}
		set = append(set, name+"="+r.startTimeout)
	}
	for _, x := range r.exports {
		switch name, _, ok := strings.Cut(x, "="); {
		case name == "":
			return nil, usagef("-x: got %q, want NAME or NAME=value", x)
		case ok:
			set = append(set, x)
		}
	}
	return set, nil
}

// logger is the store's.
func (r *runner) logger() *zap.Logger {
	level := zapcore.WarnLevel
	if r.verbose {
		level = zapcore.InfoLevel
	}
	return zap.New(zapcore.NewCore(zapcore.NewConsoleEncoder(zap.NewDevelopmentEncoderConfig()),
		zapcore.Lock(zapcore.AddSync(r.stderr)), level))
}

func versionText() string {
	text, commit := version, ""
	if info, ok := debug.ReadBuildInfo(); ok {
		if text == "" {
			text = info.Main.Version
		}
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				commit = " (" + s.Value + ")"
			}
		}
	}
	if text == "" {
		text = "(devel)"
	}
	return text + commit
}

func printSettings(w io.Writer) {
	fmt.Fprint(w, "\nSettings of the ranks, by environment:\n")
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, s := range config.Settings() {
		fmt.Fprintf(table, "  %s\t%s (default: %s)\n", s.Name, s.Doc, s.Default)
	}
	table.Flush()
}
