package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/signal"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/doctor"
	"github.com/gohvd/gohvd/internal/hostlist"
)

const (
	doctorCommand = "doctor"
	// doctorLimit bounds all checks together.
	doctorLimit = 8 * time.Second
)

const doctorLong = `Look at this machine, and at other hosts, for what stands in the way of a job.

Each line is ok, warn (what may cost speed, or break some jobs) or fail (what breaks jobs), with a fix on the next line.
It takes 8 s at most, whatever hangs. The exit status is 1 if anything failed, else 0; 2 for wrong usage.`

const doctorExamples = `
Examples:
  hvdrun doctor
  hvdrun doctor --hosts h1,h2 --json
  hvdrun doctor --hosts h1 --agent "ssh -o BatchMode=yes -p 2222"
`

// doctorFlags are those of hvdrun doctor.
type doctorFlags struct {
	asJSON bool
	hosts  string
	agent  string
}

// doctor makes the command that looks at the machine.
func (r *runner) doctor() *cobra.Command {
	var given doctorFlags
	g := newGroup("What is looked at and how it is shown")
	g.flags.StringVarP(&given.hosts, "hosts", "H", "",
		"also reach these hosts: `LIST`, with commas between them; a number of slots, as in h1:2, is left out")
	g.flags.StringVar(&given.agent, "agent", doctor.DefaultAgent,
		"`COMMAND` whose words are run with a host and a command behind them, without input")
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
		RunE: func(*cobra.Command, []string) error { return r.examine(given) },

		DisableFlagsInUseLine: true,
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.AddFlagSet(g.flags)
	cmd.InitDefaultHelpFlag()
	cmd.SetHelpFunc(func(c *cobra.Command, _ []string) {
		w := c.OutOrStdout()
		fmt.Fprintf(w, "%s\n\nUsage:\n  %s\n%s", doctorLong, c.UseLine(), doctorExamples)
		g.flags.AddFlag(f.Lookup("help"))
		printFlags(w, []group{g})
	})
	return cmd
}

// examine runs the checks and prints what they found.
func (r *runner) examine(given doctorFlags) error {
	s := doctor.Here()
	s.Environ = r.env
	s.Build.Version = versionText()
	var err error
	if s.Build.Parts, err = builtParts(); err != nil {
		return err
	}
	if cpu, known := config.Lookup("HOROVOD_CPU_OPERATIONS"); known {
		s.Build.CPUOperations = cpu.Want()
	}
	if s.Hosts, err = parseHosts(given.hosts); err != nil {
		return err
	}
	if s.Agent = strings.Fields(given.agent); len(s.Agent) == 0 {
		return usagef("--agent: got %q, want a command", given.agent)
	}

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

// parseHosts reads a list as hvdrun --hosts does, and leaves the slots out.
func parseHosts(list string) (names []string, err error) {
	if list == "" {
		return nil, nil
	}
	hosts, err := hostlist.Parse(list)
	if err != nil {
		return nil, usagef("--hosts: %w", err)
	}
	for _, h := range hosts {
		names = append(names, h.Name)
	}
	return names, nil
}

// builtParts reads what --check-build prints, so that there is one list of what is built.
func builtParts() ([]doctor.Part, error) {
	var block bytes.Buffer
	if err := (&runner{stdout: &block}).printBuild(); err != nil {
		return nil, err
	}
	var (
		parts []doctor.Part
		kind  string
	)
	for line := range strings.Lines(block.String()) {
		line = strings.TrimSpace(line)
		if title, is := strings.CutPrefix(strings.TrimSuffix(line, ":"), "Available "); is {
			kind = strings.ToLower(title)
		} else if name, is := strings.CutPrefix(line, "[X] "); is {
			parts = append(parts, doctor.Part{Kind: kind, Name: name, Built: true})
		} else if name, is := strings.CutPrefix(line, "[ ] "); is {
			parts = append(parts, doctor.Part{Kind: kind, Name: name})
		}
	}
	return parts, nil
}
