package main

import (
	"context"
	"fmt"
	"io"
	"os/signal"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/timeline/report"
)

const timelineCommand = "timeline"

const timelineLong = `Analyse the timelines of a job: which ranks were late, where the time went, and which settings could be changed.

FILE is usually the timeline of rank 0, such as t.json. The timelines of the other ranks (t.rank1.json, ...) and older
segments (t.1.json, ...) are found beside it. FILE can also be the timeline of another rank, or a folder whose files are
all read. Files may be compressed by gzip. A truncated or damaged file is reported, and used up to the damage.

The exit status is 0 if every FILE could be read, 1 if not, and 2 for wrong usage.`

const timelineExamples = `
Examples:
  hvdrun timeline t.json
  hvdrun timeline --json t.json t.rank3.json
  hvdrun timeline before/ --compare after/           do the steps take longer than before?
  hvdrun timeline --merge all.json.gz timelines/     then open all.json.gz in ui.perfetto.dev or chrome://tracing
`

// compareUsage is the help of --compare.
const compareUsage = "compare the steps and tensors with those of another run, whose FILE is `B`"

// timelineFlags holds the flags of hvdrun timeline.
type timelineFlags struct {
	asJSON  bool
	merge   string
	compare string
}

// timeline returns the command that analyses timelines.
func (r *runner) timeline() *cobra.Command {
	var given timelineFlags
	g := newGroup("Flags")
	g.flags.BoolVar(&given.asJSON, "json", false, "print the report as a JSON object")
	g.flags.StringVar(&given.merge, "merge", "",
		"also write a Chrome trace of all ranks to `OUT.json`, with all times on rank 0's clock. If the name ends in .gz, the trace is compressed")
	g.flags.StringVar(&given.compare, "compare", "", compareUsage)

	cmd := &cobra.Command{
		Use:   timelineCommand + " [flags] FILE...",
		Short: "Analyse timelines: which ranks were late, where time went, what to set",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usagef("timeline: got no FILE, want rank 0's timeline or a folder of timelines")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			return r.readTimelines(cmd.Context(), &given, args)
		},

		DisableFlagsInUseLine: true,
	}
	withFlags(cmd, g, timelineLong, timelineExamples)
	return cmd
}

// defaultOf returns the default of a numeric setting, or 0 if it has none.
func defaultOf(name string) int64 {
	s, _ := config.Lookup(name)
	n, err := strconv.ParseInt(s.Default, 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// defaultOptions returns options with the defaults of the settings.
func defaultOptions() report.Options {
	return report.Options{FusionThresholdBytes: defaultOf("HOROVOD_FUSION_THRESHOLD"),
		CacheCapacity: defaultOf("HOROVOD_CACHE_CAPACITY")}
}

// optionsOf returns options with the settings that the files of a job record, and the defaults of the others.
func optionsOf(job *report.Job) report.Options {
	options := defaultOptions()
	for name, to := range map[string]*int64{"HOROVOD_FUSION_THRESHOLD": &options.FusionThresholdBytes,
		"HOROVOD_CACHE_CAPACITY": &options.CacheCapacity} {
		if n, err := strconv.ParseInt(job.Setting(name), 10, 64); err == nil && n >= 0 {
			*to = n
		}
	}
	return options
}

// readTimelines prints a report about timelines. If --merge is given, it also merges them into one file.
func (r *runner) readTimelines(ctx context.Context, given *timelineFlags, paths []string) (err error) {
	if given.compare != "" && given.merge != "" {
		return usagef("timeline: got --compare and --merge, want at most one of them")
	}
	job, bad, err := report.Open(paths)
	if err != nil {
		return fmt.Errorf("timeline: %w", err)
	}
	if bad != nil {
		r.status = statusFailure
		fmt.Fprintf(r.stderr, "hvdrun: timeline: %v\n", bad)
	}
	result, err := job.Report(optionsOf(job))
	if err != nil {
		return fmt.Errorf("timeline: %w", err)
	}
	if given.merge != "" {
		// Until now nothing has to be removed, so a signal ends hvdrun at once.
		ctx, stop := signal.NotifyContext(ctx, unignored(unix.SIGINT, unix.SIGTERM, unix.SIGHUP)...)
		context.AfterFunc(ctx, stop) // the second signal ends hvdrun at once
		sum, err := job.Merge(ctx, given.merge)
		stop()
		if err != nil {
			return fmt.Errorf("timeline: merge to %s: %w", given.merge, err)
		}
		fmt.Fprintf(r.stderr, "hvdrun: merged %d events of %d ranks to %s\n", sum.Events, sum.Ranks,
			given.merge)
		if sum.LeftOut > 0 {
			fmt.Fprintf(r.stderr, "hvdrun: %d events were not merged, because they have no begin event or no tensor name\n",
				sum.LeftOut)
		}
	}
	var printed interface {
		WriteJSON(io.Writer) error
		WriteText(io.Writer) error
	} = result
	if given.compare != "" {
		var bad error
		printed, _, bad, err = compareWith(given.compare, result, strings.Join(paths, " "))
		if err != nil {
			return fmt.Errorf("timeline: --compare: %w", err)
		}
		if bad != nil {
			r.status = statusFailure
			fmt.Fprintf(r.stderr, "hvdrun: timeline: --compare: %v\n", bad)
		}
	}
	if given.asJSON {
		return printed.WriteJSON(r.stdout)
	}
	return printed.WriteText(r.stdout)
}

// compareWith compares the run whose timelines are at path with run a. title says what a is. job and bad are
// those of report.Open.
func compareWith(path string, a *report.Report, title string) (c *report.Comparison, job *report.Job,
	bad, err error) {
	job, bad, err = report.Open([]string{path})
	if err != nil {
		return nil, nil, nil, err
	}
	b, err := job.Report(report.Options{})
	if err != nil {
		return nil, nil, nil, err
	}
	return report.Compare(a, b, title, path), job, bad, nil
}
