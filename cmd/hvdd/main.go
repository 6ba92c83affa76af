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
	statusFailure = 1 // also if the rank has failed
	statusUsage   = 2
)

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

// usageError is an error in the user's command line.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

const long = `hvdd runs one rank of a job for another program, which communicates with hvdd over a Unix socket and
shared memory. hvdd reads its place in the job from its environment, as a rank does (see hvdrun --help).

With --fd, the program at the other end of that descriptor is the only client, and hvdd exits when that program
exits. With --socket, hvdd listens at a path for clients of its own user, of which it serves one at a time. Without --fd
and --socket, hvdd uses the socket that systemd passes (LISTEN_FDS). If the client ends during a job, the rank has
failed and hvdd exits with status 1.

SIGTERM shuts down the job, for all ranks, and ends hvdd. SIGINT does the same, except with --fd: then hvdd ignores
SIGINT, because the program itself handles Ctrl-C. A second signal ends hvdd at once. Under systemd (Type=notify) hvdd
reports its state and sends watchdog messages.

The exit status is 0 after an orderly end, also by one signal, 1 if the rank has failed, hvdd cannot serve clients, or
a second signal has ended it, and 2 for wrong usage.`

// run runs hvdd and returns its exit status.
func run(args []string, stdout, stderr io.Writer) int {
	d := &daemon{stderr: stderr}
	cmd := &cobra.Command{
		Use:   "hvdd [--fd N | --socket PATH] [flags]",
		Short: "Run one rank of a job for another program",
		Long:  long,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usagef("got argument %q, want only flags: hvdd starts no program; start the program, whose init starts hvdd",
					args[0])
			}
			return nil
		},
		Version:       config.VersionText(),
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE: func(*cobra.Command, []string) error {
			return d.run()
		},

		DisableFlagsInUseLine: true,
	}
	d.version = cmd.Version
	cmd.SetOut(stdout)
	cmd.SetErr(stderr)
	cmd.SetArgs(args)
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	f := cmd.Flags()
	f.SortFlags = false
	f.IntVar(&d.fd, "fd", -1, "file descriptor `N` of a Unix socket that is already connected to the only client of hvdd")
	f.StringVar(&d.socket, "socket", "", "`PATH` of the Unix socket at which hvdd listens for clients")
	f.StringVar(&d.health, "health", "",
		"address `ADDR`, as HOST:PORT or PORT, at which hvdd serves /healthz over HTTP; the default host is 127.0.0.1")
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
