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

const long = `Hvdrun starts N processes of a command, the ranks of a job, and supervises them: on this host, or on those of --hosts,
which it reaches by ssh.

Each line that a rank prints comes out as "[rank]<stdout>:line". Standard input of the ranks is empty. When a rank
fails the others have 5 s to end by themselves; then they get SIGTERM, and SIGKILL 5 s later. Ctrl-C, SIGTERM and
SIGHUP end all ranks likewise; a second Ctrl-C kills them at once. SIGQUIT (Ctrl-\) prints what all ranks are at, and who
waits for whom (docs/troubleshooting.md); once more within 5 s it is passed on, as SIGUSR1 and SIGUSR2 are.
When the command of a rank has ended, processes that it left in the background are killed.

The exit status is 0 if all ranks end with 0. Otherwise it is that of the rank that caused the failure, 128+n for
signal n: if signal n ended the job, or the rank; 2 for wrong usage, 126 and 127 if the command cannot be run or
found, 1 if hvdrun itself fails or a host cannot be used.

A setting comes from a flag, else from the environment, by the name in brackets, else from the file, else it has its
default. The file overrides flags before --config-file and is overridden by those after it.`

const usageLines = `
Usage:
  hvdrun -np N [flags] command [args...]
  hvdrun -H HOST:N,... [flags] command [args...]
  hvdrun config [flags]      show every setting and where its value comes from
  hvdrun doctor [flags]      look for what stands in the way of a job
  hvdrun store [flags]       serve a store alone
  hvdrun timeline FILE...    read timelines: who was late, where time went
  hvdrun completion SHELL    print a completion script

Examples:
  hvdrun -np 4 python train.py --lr 0.1
  hvdrun -np 2 -x HOROVOD_LOG_LEVEL=debug --output-filename logs go run ./train
  hvdrun -H h1:4,h2:4 --network-interfaces 10.0.0.0/8 ./train
`

// helpWidth is the width of the help, in columns.
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
	root.SetVersionTemplate("hvdrun {{.Version}}\n")
	root.SetFlagErrorFunc(flagError)
	show := &cobra.Command{
		Use:     configCommand + " [flags]",
		Short:   "Show every setting of the ranks and where its value comes from",
		Version: root.Version,
		Args:    cobra.ArbitraryArgs, // a command line to launch with config in front
		RunE:    r.showSettings,

		DisableFlagsInUseLine: true,
	}
	root.AddCommand(show, r.doctor(), r.storeCommand(), r.timeline())

	groups := append([]group{r.jobFlags(), r.where.group()}, r.settingFlags()...)
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

// addFlags adds the flags of the groups to cmd, and the hidden flags that hvdrun knows only to reject or
// ignore them.
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

// withFlags adds the flags of one group to a command, and sets its help.
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
