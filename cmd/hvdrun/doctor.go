package main

import (
	"context"
	"errors"
	"os/signal"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/doctor"
)

const (
	doctorCommand = "doctor"
	// doctorLimit is the time limit of all checks together.
	doctorLimit = 8 * time.Second
)

const doctorLong = `Look at this machine, and at other hosts, for what stands in the way of a job.

Each line is ok, warn (what may cost speed, or break some jobs) or fail (what breaks jobs), with a fix on the next line.
It takes 8 s at most, whatever hangs. The exit status is 1 if anything failed, else 0; 2 for wrong usage.`

const doctorExamples = `
Examples:
  hvdrun doctor
  hvdrun doctor --hosts h1,h2 --json
  hvdrun doctor --hosts h1 --ssh-port 2222
  hvdrun doctor --hosts pod1 --agent "kubectl exec -i {host} --"
`

// doctorFlags holds the flags of hvdrun doctor.
type doctorFlags struct {
	asJSON bool
	where  hostFlags
}

// doctor returns the command that checks this machine and other hosts for problems.
func (r *runner) doctor() *cobra.Command {
	// The timeout of ssh is shorter than the limit of all checks, so that ssh can print which connection
	// timed out.
	given := doctorFlags{where: hostFlags{sshOptions: []string{"-o", "ConnectTimeout=5"}}}
	g := newGroup("What is looked at and how it is shown")
	g.flags.StringVarP(&given.where.list, "hosts", "H", "",
		"also reach these hosts: `LIST`, with commas between them; a number of slots, as in h1:2, is left out")
	given.where.addReach(g.flags)
	g.flags.BoolVar(&given.asJSON, "json", false, "print an array of objects with section, name, status, text and fix")

	cmd := &cobra.Command{
		Use:   doctorCommand + " [flags]",
		Short: "Look for what stands in the way of a job",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usagef("doctor: got %q, want flags alone", args[0])
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := given.where.check(cmd.Flags()); err != nil {
				return err
			}
			return r.examine(&given)
		},

		DisableFlagsInUseLine: true,
	}
	withFlags(cmd, g, doctorLong, doctorExamples)
	return cmd
}

// examine runs the checks and prints their findings.
func (r *runner) examine(given *doctorFlags) error {
	s := doctor.Here(r.env)
	hosts, err := given.where.hosts()
	if err != nil {
		return err
	}
	for _, h := range hosts {
		s.Hosts = append(s.Hosts, h.Name)
	}
	s.Agent = given.where.reach

	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
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
