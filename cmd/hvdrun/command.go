package main

import (
	"fmt"
	"io"
	"slices"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/gohvd/gohvd/internal/config"
)

const configCommand = "config"

const long = `Hvdrun starts N processes of a command, which are the ranks of a job, and supervises them. The ranks run on this host,
or on the hosts that --hosts or --hostfile names. Hvdrun reaches other hosts by ssh.

Hvdrun prints each output line of a rank as "[rank]<stdout>:line" or "[rank]<stderr>:line", and changes nothing else in
it (docs/launchers.md). The standard input of the ranks is empty. When the command of a rank ends, hvdrun kills the
processes that it left in the background.

When a rank fails, the other ranks have 5 s to end by themselves. Then hvdrun sends them SIGTERM, and SIGKILL 5 s later.
If hvdrun gets SIGINT (Ctrl-C), it sends SIGINT to all ranks. If it gets SIGTERM or SIGHUP, it sends SIGTERM to all
ranks, and also if its output is a pipe that nobody reads any more. It sends SIGKILL 5 s later, or at once when it gets
a second such signal. On SIGQUIT (Ctrl-\) hvdrun prints a report on the operations that the ranks wait for
(docs/troubleshooting.md). It forwards a second SIGQUIT within 5 s, and every SIGUSR1 and SIGUSR2, to the ranks.

With --servers N and --workers M, hvdrun starts the nodes of a parameter server instead of ranks: a scheduler, N servers
and M workers. Each runs the command, and its environment says what it is (docs/ps.md). What is said here of ranks also
holds for nodes, whose output lines begin with [scheduler], [server R] or [worker R]. The scheduler runs on this host
and takes no slot. The reports are on the requests between nodes; one follows the end of the job unless a signal has
ended it. With --restarts N, a server or worker that fails is started again, up to N times, while the other nodes go on.

Exit status:
  0         all ranks ended with status 0
  1         hvdrun itself failed, or a host cannot be used
  2         wrong usage
  126, 127  the command cannot be run, or was not found
  128+n     signal n ended the job, or killed the rank that caused the failure; 141: nobody reads the output any more
  other     the exit status of the rank that caused the failure

A setting takes its value from the first of these that has one: its flag, the environment variable that is shown in
parentheses, the file that --config-file names, its default. The file overrides the flags before --config-file. The
flags after --config-file override the file.`

const usageLines = `
Usage:
  hvdrun -np N [flags] command [args...]
  hvdrun -H HOST:N,... [flags] command [args...]
  hvdrun --servers N --workers M [flags] command [args...]
  hvdrun config [flags]      show every setting and where its value comes from
  hvdrun doctor [flags]      check this machine and other hosts for problems
  hvdrun store [flags]       serve a store for ranks that another launcher starts
  hvdrun timeline FILE...    analyse timelines: which ranks were late, where time went
  hvdrun top [JOB]           show a running job: which ranks hold up others, what they wait for
  hvdrun view [JOB | FILE]   show a running job, or timelines, in a browser
  hvdrun completion SHELL    print a completion script

Examples:
  hvdrun -np 4 python train.py --lr 0.1
  hvdrun -np 2 -x HOROVOD_LOG_LEVEL=debug --output-filename logs go run ./train
  hvdrun -H h1:4,h2:4 --network-interfaces 10.0.0.0/8 ./train
  hvdrun --servers 2 --workers 4 ./train
`

// helpWidth is the width of the help in columns.
const helpWidth = 120

func (r *runner) command() *cobra.Command {
	root := &cobra.Command{
		Use:           "hvdrun",
		Short:         "Start and supervise the ranks of a job",
		Long:          long,
		Version:       config.VersionText(),
		Args:          cobra.ArbitraryArgs,
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE:          r.launch,
	}
	root.SetOut(r.stdout)
	root.SetErr(r.stderr)
	root.SetFlagErrorFunc(flagError)
	show := &cobra.Command{
		Use:     configCommand + " [flags]",
		Short:   "Show every setting of the ranks and where its value comes from",
		Version: root.Version,
		Args:    cobra.ArbitraryArgs, // any arguments, as when hvdrun launches a job
		RunE:    r.showSettings,

		DisableFlagsInUseLine: true,
	}
	root.AddCommand(show, r.doctor(), r.storeCommand(), r.timeline(), r.top(), r.view())

	groups := append([]group{r.jobFlags(), r.elasticFlags.group(), r.where.group(), r.mpi.group()},
		r.settingFlags()...)
	r.addFlags(root, groups)
	groups[0].flags.AddFlag(root.Flags().Lookup("version"))
	groups[0].flags.AddFlag(root.Flags().Lookup("help"))
	showGroups := slices.Insert(slices.Clone(groups), 0, r.showFlags())
	r.addFlags(show, showGroups)

	help := root.HelpFunc()
	root.SetHelpFunc(func(c *cobra.Command, args []string) {
		switch w := c.OutOrStdout(); c {
		case root:
			fmt.Fprintf(w, "%s\n%s", long, usageLines)
			printFlags(w, groups)
			printFlagless(w)
		case show:
			fmt.Fprintf(w, "%s.\n\nUsage:\n  %s\n", show.Short, show.UseLine())
			printFlags(w, showGroups)
		default:
			help(c, args)
		}
	})
	return root
}

// addFlags adds the flags of the groups to cmd. It also adds hidden flags, which hvdrun only rejects or
// ignores.
func (r *runner) addFlags(cmd *cobra.Command, groups []group) {
	f := cmd.Flags()
	f.SetInterspersed(false)
	f.SetNormalizeFunc(normalize)
	f.SortFlags = false
	for _, g := range groups {
		f.AddFlagSet(g.flags)
	}
	addAbsentFlags(f)
	cmd.InitDefaultHelpFlag()
	cmd.InitDefaultVersionFlag()
}

func printFlags(w io.Writer, groups []group) {
	for _, g := range groups {
		fmt.Fprintf(w, "\n%s:\n%s", g.title, g.flags.FlagUsagesWrapped(helpWidth))
	}
}

// printFlagless prints the settings that have no flag.
func printFlagless(w io.Writer) {
	fmt.Fprint(w, "\nSettings without a flag:\n")
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, s := range config.Settings() {
		if len(s.Flags) == 0 {
			fmt.Fprintf(table, "  %s\t%s (default: %s; %s)\n", s.Name, s.Doc, s.Fallback(), s.Scope)
		}
	}
	table.Flush()
}

// withFlags adds the flags of one group to a command and sets the command's help.
func withFlags(cmd *cobra.Command, g group, long, examples string) {
	f := cmd.Flags()
	f.SortFlags = false
	f.AddFlagSet(g.flags)
	cmd.InitDefaultHelpFlag()
	cmd.SetHelpFunc(func(c *cobra.Command, _ []string) {
		w := c.OutOrStdout()
		fmt.Fprintf(w, "%s\n\nUsage:\n  %s\n%s", long, c.UseLine(), examples)
		g.flags.AddFlag(f.Lookup("help"))
		printFlags(w, []group{g})
	})
}
