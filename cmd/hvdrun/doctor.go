package main

import (
	"context"
	"errors"
	"os/signal"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/doctor"
	"github.com/gohvd/gohvd/internal/launch"
)

const (
	doctorCommand = "doctor"
	// doctorLimit is the time limit for all checks together, and for --check-build.
	doctorLimit = 8 * time.Second
)

const doctorLong = `Check this machine, and other hosts, for problems that would slow down or break a job.

Each line of the result begins with ok, warn (a problem may make jobs slower or break some jobs) or fail (a problem
breaks jobs). After a line with warn or fail, the next line says how to fix the problem. All checks together take at
most 8 s.
The exit status is 0 if no check failed, 1 if one failed, and 2 for wrong usage.`

const doctorExamples = `
Examples:
  hvdrun doctor
  hvdrun doctor --hosts h1,h2 --json
  hvdrun doctor --python venv/bin/python
  hvdrun doctor --hosts h1 --ssh-port 2222
  hvdrun doctor --hosts pod1 --agent "kubectl exec -i {host} --"
`

// doctorFlags holds the flags of hvdrun doctor.
type doctorFlags struct {
	asJSON bool
	python string
	where  hostFlags
}

// doctor returns the command that checks this machine and other hosts for problems.
func (r *runner) doctor() *cobra.Command {
	// The timeout of ssh is shorter than the time limit of the checks, so that ssh itself can report that its
	// connection timed out.
	given := doctorFlags{where: hostFlags{sshOptions: []string{"-o", "ConnectTimeout=5"}}}
	g := newGroup("Flags")
	g.flags.StringVarP(&given.where.list, "hosts", "H", "",
		"also check whether the hosts in `LIST`, separated by commas, can be reached. Slots, as in h1:2, are ignored")
	given.where.addReach(g.flags)
	g.flags.StringVar(&given.python, "python", doctor.AnyPython, "check the Python interpreter `FILE` and its packages")
	g.flags.BoolVar(&given.asJSON, "json", false,
		"print the findings as a JSON array of objects with the fields section, name, status, text and fix")

	cmd := &cobra.Command{
		Use:   doctorCommand + " [flags]",
		Short: "Check this machine and other hosts for problems",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usagef("doctor: got %q, want only flags", args[0])
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := given.where.check(cmd.Flags()); err != nil {
				return err
			}
			return r.runDoctor(&given)
		},

		DisableFlagsInUseLine: true,
	}
	withFlags(cmd, g, doctorLong, doctorExamples)
	return cmd
}

// runDoctor runs the checks and prints their findings.
func (r *runner) runDoctor(given *doctorFlags) error {
	s := doctor.Here(r.env)
	s.Python = given.python
	hosts, err := given.where.hosts()
	if err != nil {
		return err
	}
	for _, h := range hosts {
		if !launch.IsThisHost(h.Name) { // a job needs no agent here
			s.Hosts = append(s.Hosts, h.Name)
		}
	}
	s.Agent = given.where.reach

	ends := unignored(unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
	ctx, stop := signal.NotifyContext(context.Background(), ends...)
	defer stop()
	lines := doctor.Run(ctx, s, doctor.Checks(), doctorLimit)
	if ctx.Err() != nil {
		return errors.New("doctor: interrupted")
	}
	write := doctor.WriteText
	if given.asJSON {
		write = doctor.WriteJSON
	}
	if doctor.Count(lines, doctor.Fail) > 0 {
		r.status = statusFailure
	}
	return write(r.stdout, lines)
}
