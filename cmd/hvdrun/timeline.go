package main

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/timeline/report"
)

const timelineCommand = "timeline"

const timelineLong = `Read the timelines of a job's ranks and say who was late, where the time went and what could be set otherwise.

FILE is rank 0's timeline, beside which those of the other ranks are found (t.json, t.rank1.json, ...), with their older
segments (t.1.json); or another rank's; or a folder, of which all files are read; or - for standard input. Files may be
packed by gzip. Horovod's own timelines are read too. What is cut off or damaged is used up to there, and said.

The exit status is 0 if all that was named could be read, else 1; 2 for wrong usage.`

const timelineExamples = `
Examples:
  hvdrun timeline t.json
  hvdrun timeline --json t.json t.rank3.json
  hvdrun timeline --merge all.json.gz timelines/     then open all.json.gz in ui.perfetto.dev or chrome://tracing
  ssh h1 cat /tmp/t.json | hvdrun timeline -
`

// timelineFlags holds the flags of hvdrun timeline.
type timelineFlags struct {
	asJSON      bool
	merge       string
	thresholdMB int64
	capacity    int64
}

// timeline returns the command that analyses timelines.
func (r *runner) timeline() *cobra.Command {
	var given timelineFlags
	g := newGroup("What is made of the files")
	g.flags.BoolVar(&given.asJSON, "json", false, "print the report as a JSON object")
	g.flags.StringVar(&given.merge, "merge", "",
		"also write one Chrome trace of all ranks, on rank 0's clock, to `OUT.json`; packed if it ends in .gz")
	g.flags.Int64Var(&given.thresholdMB, "fusion-threshold-mb", defaultOf("HOROVOD_FUSION_THRESHOLD")>>20,
		"HOROVOD_FUSION_THRESHOLD of the job, in `MIB`, which the files do not tell")
	g.flags.Int64Var(&given.capacity, "cache-capacity", defaultOf("HOROVOD_CACHE_CAPACITY"),
		"HOROVOD_CACHE_CAPACITY of the job, `N` responses")

	cmd := &cobra.Command{
		Use:   timelineCommand + " [flags] FILE...",
		Short: "Read timelines: who was late, where time went, what to set",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usagef("timeline: got no FILE, want rank 0's timeline, a folder of timelines or -")
			}
			return nil
		},
		RunE: func(_ *cobra.Command, args []string) error { return r.readTimelines(&given, args) },

		DisableFlagsInUseLine: true,
	}
	withFlags(cmd, g, timelineLong, timelineExamples)
	return cmd
}

// defaultOf returns the default of a numeric setting; 0 if it has none.
func defaultOf(name string) int64 {
	s, _ := config.Lookup(name)
	n, err := strconv.ParseInt(s.Default, 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// readTimelines prints the report of timelines, and merges the files if --merge is given.
func (r *runner) readTimelines(given *timelineFlags, paths []string) (err error) {
	if given.thresholdMB < 0 || given.thresholdMB > 1<<40 || given.capacity < 0 {
		return usagef("timeline: got --fusion-threshold-mb %d and --cache-capacity %d, want 0 or more", given.thresholdMB, given.capacity)
	}
	job, bad, err := report.Open(paths, os.Stdin)
	if err != nil {
		return fmt.Errorf("timeline: %w", err)
	}
	defer func() { err = errors.Join(err, job.Close()) }()
	if bad != nil {
		r.status = statusFailure
		fmt.Fprintf(r.stderr, "hvdrun: timeline: %v\n", bad)
	}
	result, err := job.Report(report.Options{FusionThresholdBytes: given.thresholdMB << 20, CacheCapacity: given.capacity})
	if err != nil {
		return fmt.Errorf("timeline: %w", err)
	}
	if given.merge != "" {
		sum, err := job.Merge(given.merge)
		if err != nil {
			return fmt.Errorf("timeline: merge to %s: %w", given.merge, err)
		}
		fmt.Fprintf(r.stderr, "hvdrun: merged %d events of %d ranks to %s\n", sum.Events, sum.Ranks, given.merge)
		if sum.LeftOut > 0 {
			fmt.Fprintf(r.stderr, "hvdrun: left out %d events without a beginning, or without a tensor's name\n", sum.LeftOut)
		}
	}
	if given.asJSON {
		return result.WriteJSON(r.stdout)
	}
	return result.WriteText(r.stdout)
}
