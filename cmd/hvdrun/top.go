package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os/signal"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/live/table"
	"github.com/gohvd/gohvd/internal/logs"
)

const topCommand = "top"

const topLong = `Show what the ranks of a running job are doing, or the nodes of a parameter server: which ones hold up the others, what
they wait for, and how much they move.

JOB is the number of the process of hvdrun. Without it, the only job of this user on this host is shown or, if there
are several, a list of them. hvdrun top runs on the host of hvdrun and as the same user. A rank answers after Init.

On a terminal, hvdrun top is a screen, on which ? explains the keys and columns. It stays when the job ends. Elsewhere it
prints a line for each interval and ends with the job. The job is asked only while hvdrun top runs.

The key t, --start-timeline and --stop-timeline switch the timelines of the ranks on and off while the job runs.

The exit status is 0 if the end of the job was shown or the user has quit, 1 if hvdrun was lost, and 2 for wrong usage or
if there is no such job.`

const topExamples = `
Examples:
  hvdrun top
  hvdrun top 4711
  hvdrun top --plain --interval 10 | tee job.log
  hvdrun top --json | jq .problems
  hvdrun top --start-timeline t.json 4711
`

// topFlags holds the flags of hvdrun top.
type topFlags struct {
	plain, asJSON bool
	interval      float64
	// start is the file of the timelines to start. stop says that the timelines are to be stopped.
	start string
	stop  bool
}

// top returns the command that shows a running job.
func (r *runner) top() *cobra.Command {
	var given topFlags
	g := newGroup("Flags")
	g.flags.Float64Var(&given.interval, "interval", 1, "time between two updates in `SECONDS`, from 0.1 to 3600")
	g.flags.BoolVar(&given.plain, "plain", false, "print a line for each update, also on a terminal")
	g.flags.BoolVar(&given.asJSON, "json", false,
		"print each state as a JSON object in a line (docs/timeline.md)")
	g.flags.StringVar(&given.start, "start-timeline", "", "make the ranks write timelines, rank 0 to `FILE` in its working directory, say so, and end")
	g.flags.BoolVar(&given.stop, "stop-timeline", false, "make the ranks end their timelines, say so, and end")
	cmd := &cobra.Command{
		Use:   topCommand + " [flags] [JOB]",
		Short: "Show a running job",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 1 {
				return usagef("top: got %d arguments, want at most one JOB", len(args))
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error {
			if c.Flags().Changed("start-timeline") && given.start == "" {
				return usagef("top: --start-timeline: got an empty file name")
			}
			for _, name := range []string{"plain", "json", "interval"} {
				if (given.start != "" || given.stop) && c.Flags().Changed(name) {
					return usagef("top: --%s cannot be used with --start-timeline and --stop-timeline", name)
				}
			}
			return r.runTop(&given, args)
		},
		ValidArgsFunction: func(*cobra.Command, []string, string) (pids []cobra.Completion,
			_ cobra.ShellCompDirective) {
			jobs, err := runningJobs(r.variable(xdgVariable))
			if err != nil {
				return nil, cobra.ShellCompDirectiveError
			}
			for _, j := range jobs {
				pids = append(pids, cobra.CompletionWithDesc(strconv.Itoa(j.pid), j.describe()))
			}
			return pids, cobra.ShellCompDirectiveNoFileComp
		},

		DisableFlagsInUseLine: true,
	}
	withFlags(cmd, g, topLong, topExamples)
	return cmd
}

// runTop finds the job and shows it.
func (r *runner) runTop(given *topFlags, args []string) error {
	every := time.Duration(given.interval * float64(time.Second))
	switch {
	case !(given.interval >= leastInterval.Seconds() && given.interval <= mostInterval.Seconds()):
		return usagef("top: --interval: got %g, want %g to %g seconds", given.interval, leastInterval.Seconds(),
			mostInterval.Seconds())
	case given.plain && given.asJSON:
		return usagef("top: --plain and --json cannot be used together")
	case given.start != "" && given.stop:
		return usagef("top: --start-timeline and --stop-timeline cannot be used together")
	}
	j, err := r.chooseJob(topCommand, args)
	if err != nil || j == nil {
		return err
	}
	ends := unignored(unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
	ctx, stop := signal.NotifyContext(context.Background(), ends...)
	defer stop()
	switch {
	case given.start != "" || given.stop:
		return r.switchOnce(ctx, j, switching{given.start != "", given.start})
	case given.asJSON:
		return r.topJSON(ctx, j, every)
	case given.plain || !logs.IsTerminal(r.stdout) || r.variable("TERM") == "dumb":
		return r.topPlain(ctx, j, every)
	}
	return r.topScreen(ctx, j, every)
}

// chooseJob returns the job that the arguments name or, without arguments, the only job. If there are
// several, it prints a list of them and returns nil. command is the subcommand.
func (r *runner) chooseJob(command string, args []string) (*jobAddress, error) {
	jobs, err := runningJobs(r.variable(xdgVariable))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", command, err)
	}
	if len(args) == 1 {
		pid, err := strconv.Atoi(args[0])
		if err != nil {
			return nil, usagef("%s: JOB: got %.80q, want the number of the process of hvdrun. hvdrun %[1]s shows only jobs that "+
				"hvdrun runs; of others there are files, which hvdrun timeline FILE reads", command, logs.Plain(args[0]))
		}
		for i := range jobs {
			if jobs[i].pid == pid {
				return &jobs[i], nil
			}
		}
		return nil, usagef("%s: no hvdrun of this user with the process number %d runs a job on this host (%s)", command,
			pid, listOf(jobs))
	}
	switch len(jobs) {
	case 0:
		return nil, usagef("%s: no hvdrun of this user runs a job on this host. hvdrun %[1]s must run on the host of "+
			"hvdrun, with the same user. A job that another launcher has started can be seen only in its files, which "+
			"hvdrun timeline FILE reads", command)
	case 1:
		return &jobs[0], nil
	}
	r.status = statusUsage
	fmt.Fprintf(r.stderr, "hvdrun: %s: this user runs %d jobs on this host. To see one of them, type:\n", command, len(jobs))
	list := tabwriter.NewWriter(r.stderr, 0, 0, 2, ' ', 0)
	for i := range jobs {
		fmt.Fprintf(list, "  hvdrun %s %d\t%s\n", command, jobs[i].pid, jobs[i].describe())
	}
	return nil, list.Flush()
}

// listOf returns the numbers of the jobs in a sentence.
func listOf(jobs []jobAddress) string {
	if len(jobs) == 0 {
		return "it runs none"
	}
	var pids []string
	for _, j := range jobs {
		pids = append(pids, strconv.Itoa(j.pid))
	}
	return "there are " + strings.Join(pids, ", ")
}

// describe says which job it is, in one line.
func (a *jobAddress) describe() string {
	about, err := a.about()
	if err != nil {
		return "hvdrun does not answer; it may have been stopped"
	}
	return fmt.Sprintf("%d %s since %s: %s", about.Size, about.What, about.Started.Format("15:04:05"),
		logs.Plain(strings.Join(about.Command, " ")))
}

// topPlain prints a line for each update until the job has ended.
func (r *runner) topPlain(ctx context.Context, j *jobAddress, every time.Duration) (err error) {
	var history table.History
	var now table.States
	j.follow(ctx, every, func(u update) bool {
		now.Note = u.note
		if u.job != nil {
			now = history.Add(u.job)
		} else {
			now.At = time.Now()
		}
		r.noteEnd(u)
		_, err = fmt.Fprintln(r.stdout, now.Text())
		return err == nil
	})
	return err
}

// topJSON prints each state as JSON until the job has ended.
func (r *runner) topJSON(ctx context.Context, j *jobAddress, every time.Duration) (err error) {
	j.follow(ctx, every, func(u update) bool {
		if u.job == nil {
			return true
		}
		r.noteEnd(u)
		text := u.text
		if text == nil {
			if text, err = json.Marshal(u.job); err != nil {
				return false
			}
		}
		_, err = fmt.Fprintf(r.stdout, "%s\n", text)
		return err == nil
	})
	return err
}

// noteEnd sets the exit status if hvdrun has ended without saying how.
func (r *runner) noteEnd(u update) {
	if u.job != nil && u.job.End != nil && u.job.End.Status < 0 {
		r.status = statusFailure
	}
}
