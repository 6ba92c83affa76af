// Hvdd is the sidecar: it runs one rank for another program, in any language.
//
//	hvdd --fd 3
//	hvdd --socket /run/user/1000/hvdd.sock
//
// See hvdd --help, and docs/sidecar.md for the protocol.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/gohvd/gohvd/internal/config"
)

// Exit statuses.
const (
	statusFailure = 1 // also the death of the rank
	statusUsage   = 2
)

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

// usageError is an error in the user's command line.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

const long = `Hvdd runs one rank of a job for another program, which talks to it over a Unix socket and shared memory. It finds its place
in the job in its environment, as a rank does (see hvdrun --help).

With --fd the program at the other end of that descriptor is its only client, and it ends with that program. With --socket it
listens at a path, that only its own user can use, for any number of clients. Without either it takes the socket that systemd
gives it (LISTEN_FDS). A client that goes in the middle of a job is the failure of the rank: the status is 1 then.

SIGTERM shuts the job down, for all ranks, and ends hvdd; so does SIGINT, but not with --fd, where the terminal's Ctrl-C is the
program's to deal with. A second signal ends it at once. Under systemd (Type=notify) it tells of its state and feeds the watchdog.`

// run runs hvdd and returns its exit status.
func run(args []string, stdout, stderr io.Writer) int {
	d := &daemon{stderr: stderr}
	cmd := &cobra.Command{
		Use:   "hvdd [--fd N | --socket PATH] [flags]",
		Short: "Run one rank of a job for another program",
		Long:  long,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usagef("got the argument %q, want flags alone", args[0])
			}
			return nil
		},
		Version:       config.VersionText(),
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE:          func(*cobra.Command, []string) error { return d.run() },

		DisableFlagsInUseLine: true,
	}
	d.version = cmd.Version
	cmd.SetOut(stdout)
	cmd.SetErr(stderr)
	cmd.SetArgs(args)
	cmd.SetVersionTemplate("hvdd {{.Version}}\n")
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	f := cmd.Flags()
	f.SortFlags = false
	f.IntVar(&d.fd, "fd", -1, "descriptor of a Unix socket to the only client")
	f.StringVar(&d.socket, "socket", "", "listen at this path")
	f.StringVar(&d.health, "health", "", "answer http://ADDR/healthz, loopback unless a host is given (HOST:PORT or PORT)")
	// hvdd has a completion command of its own because cobra adds one only to programs with subcommands.
	cmd.AddCommand(completion(cmd))
	err := cmd.Execute()
	if err == nil {
		return 0
	}
	fmt.Fprintf(stderr, "hvdd: %v\n", err)
	if _, ok := errors.AsType[usageError](err); ok {
		fmt.Fprintln(stderr, "Try 'hvdd --help'.")
		return statusUsage
	}
	return statusFailure
}

// completion returns the command that prints completion scripts for shells.
func completion(root *cobra.Command) *cobra.Command {
	shells := map[string]func(io.Writer) error{
		"bash":       func(w io.Writer) error { return root.GenBashCompletionV2(w, true) },
		"zsh":        root.GenZshCompletion,
		"fish":       func(w io.Writer) error { return root.GenFishCompletion(w, true) },
		"powershell": root.GenPowerShellCompletionWithDesc,
	}
	return &cobra.Command{
		Use:       "completion SHELL",
		Short:     "Print a completion script for bash, zsh, fish or powershell",
		ValidArgs: []string{"bash", "zsh", "fish", "powershell"},
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) != 1 || shells[args[0]] == nil {
				return usagef("completion: got %q, want one of bash, zsh, fish and powershell", args)
			}
			return shells[args[0]](cmd.OutOrStdout())
		},
	}
}
