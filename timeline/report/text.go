package report

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/gohvd/gohvd/internal/topo"
)

// mostRanks is the maximum number of ranks in a table.
const mostRanks = 32

// WriteText writes the report as text for a terminal.
func (r *Report) WriteText(w io.Writer) error {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	// The cells of a row are right-aligned in columns. The parameter text is the end of the row, after the
	// last column, and is not aligned.
	table := func(columns, text string, rows func(row func(text string, cells ...any))) {
		t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
		put := func(text string, cells []any) {
			for _, c := range cells {
				fmt.Fprintf(t, "%v\t", c)
			}
			if text != "" {
				fmt.Fprintf(t, "  %s", text)
			}
			fmt.Fprintln(t)
		}
		var head []any
		for c := range strings.SplitSeq(columns, "|") {
			head = append(head, c)
		}
		put(text, head)
		rows(func(text string, cells ...any) { put(text, cells) })
		t.Flush() //nolint:errcheck // a strings.Builder returns no errors
	}

	what := "files of " + topo.FormatRanks(r.Files)
	if r.Horovod {
		what = "Horovod's file of rank 0"
	} else if r.Size > 0 {
		what += fmt.Sprintf(" of %d", r.Size)
	}
	line("%s: %s, %d operations on %d tensors, %d errors", what, duration(r.DurationUS), r.Operations,
		r.Tensors, r.Errors)
	if r.Steps > 0 {
		line("%d steps of %s (median) after the start-up; a step begins when a tensor name occurs again",
			r.Steps, duration(r.StepUS))
	} else {
		line("no steps: no tensor name occurs more than once")
	}
	switch {
	case r.ClockErrorUS > 0:
		line("clocks are aligned to rank 0's clock within %s", duration(r.ClockErrorUS))
	case len(r.Files) > 1 && len(r.Unaligned) == 0:
		line("all ranks use the same clock")
	}
	for _, p := range r.Problems {
		line("note: %s", printable(p))
	}

	line("\nLate ranks\n  %s", r.Lateness.Verdict)
	if r.Lateness.Startup != "" {
		line("  %s", r.Lateness.Startup)
	}
	if l := &r.Lateness; len(l.Ranks) > 0 && l.Compared > 0 {
		source := "the times at which ranks submitted"
		if l.Arrivals {
			source += ", or at which their requests arrived at rank 0"
		}
		line("  %d operations compared, by %s; all ranks together waited for %s", l.Compared, source,
			duration(l.WaitedUS))
		shown := l.shown()
		table("rank|held up all|per step|last|caused|share|late p50|p90|p99|max", "",
			func(row func(string, ...any)) {
				for _, s := range shown {
					perStep := "-"
					if r.Steps > 0 {
						perStep = duration(s.HeldPerStepUS)
					}
					row("", s.Rank, duration(s.HeldUS), perStep, s.Last, duration(s.CausedUS),
						percent(s.Share),
						duration(s.P50US), duration(s.P90US), duration(s.P99US), duration(s.MaxUS))
				}
			})
		if hidden := len(l.Ranks) - len(shown); hidden > 0 {
			line("  and %d more ranks, which held up the others for less time", hidden)
		}
	}

	line("\nTime in phases, %s (time with at least one operation in the phase; phases overlap)", r.per())
	if r.Lateness.Compared == 0 {
		line("  negotiation includes waiting for other ranks, because the files have the submissions of only one rank")
	}
	if o := &r.Outside; o.StepUS > 0 {
		text := fmt.Sprintf("  outside gohvd: %s of %s %s (%s)", duration(o.US), duration(o.StepUS), r.per(),
			percent(o.Share))
		if len(r.Phases) > 1 {
			text += " or more at every rank"
		}
		if o.Share >= most {
			text += ": the program takes this time, not communication"
		}
		line("%s", text)
	}
	table("rank|step|"+outside+"|"+strings.Join(phaseNames[:], "|"), "", func(row func(string, ...any)) {
		for _, p := range r.Phases[:min(len(r.Phases), mostRanks)] {
			steps, step := max(float64(p.Steps), 1), "-"
			if p.Steps > 0 {
				step = duration(p.StepUS)
			}
			cells := []any{p.Rank, step}
			cells = append(cells, duration(p.US[outside]/steps))
			for _, name := range phaseNames {
				cells = append(cells, duration(p.US[name]/steps))
			}
			row("", cells...)
		}
	})
	if hidden := len(r.Phases) - mostRanks; hidden > 0 {
		line("  and %d more ranks", hidden)
	}

	line("\nFusion and cache")
	if f := &r.Fusion; f.Responses > 0 {
		fill := ""
		if f.ThresholdBytes > 0 {
			fill = fmt.Sprintf("; on average %s of the fusion threshold of %s", percent(f.Fill),
				size(float64(f.ThresholdBytes)))
		}
		line("  a response had %s tensors (median %d, at most %d) and %s (median %s, at most %s)%s",
			places(f.MeanTensors), f.P50Tensors,
			f.MaxTensors, size(f.MeanBytes), size(float64(f.P50Bytes)), size(float64(f.MaxBytes)), fill)
	} else if r.Horovod {
		line("  Horovod's file does not say which tensors were fused")
	} else {
		line("  the files have no operations that can be fused")
	}
	if c := &r.Cache; c.Hits+c.Misses > 0 {
		text := fmt.Sprintf("  %s of the requests were cached",
			percent(float64(c.Hits)/float64(c.Hits+c.Misses)))
		if n := c.SteadyHits + c.SteadyMisses; n > 0 {
			text += fmt.Sprintf(", and %s of those whose name had occurred before",
				percent(float64(c.SteadyHits)/float64(n)))
		}
		line("%s", text)
	}

	tensors := func(title string, all []Tensor) {
		if len(all) == 0 {
			return
		}
		line("\n%s", title)
		table("total|mean|p99|max|times|bytes|errors", "tensor", func(row func(string, ...any)) {
			for _, t := range all {
				name := printable(t.Name)
				if t.DType != "" {
					name += " " + printable(t.DType) + printable(t.Shape)
				}
				row(name, duration(t.TotalUS), duration(t.MeanUS), duration(t.P99US), duration(t.MaxUS),
					t.Count, size(float64(t.Bytes)), t.Errors)
			}
		})
	}
	tensors("Slowest tensors, from submission to end, over all ranks", r.Slowest)
	tensors("Largest tensors", r.Largest)

	line("\nSuggestions")
	if len(r.Suggestions) == 0 {
		line("  none: the files show no reason to change a setting or the program")
	}
	for _, s := range r.Suggestions {
		if s.Setting != "" {
			line("  %s: %s", s.Setting, s.Do)
		} else {
			line("  %s", s.Do)
		}
		line("    because %s", s.Because)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// shown returns the ranks to show in the table. If there are too many ranks, these are the ranks that held up
// the others longest.
func (l *Lateness) shown() []LateRank {
	if len(l.Ranks) <= mostRanks {
		return l.Ranks
	}
	shown := slices.Clone(l.Ranks)
	slices.SortStableFunc(shown, func(a, b LateRank) int {
		return cmp.Or(cmp.Compare(b.HeldUS, a.HeldUS), cmp.Compare(b.CausedUS, a.CausedUS))
	})
	return shown[:mostRanks]
}
