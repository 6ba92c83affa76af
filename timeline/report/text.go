package report

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/gohvd/gohvd/internal/logs"
	"github.com/gohvd/gohvd/internal/topo"
)

// mostRanks is the maximum number of ranks in a table.
const mostRanks = 32

// WriteText writes the report as text for a terminal.
func (r *Report) WriteText(w io.Writer) error {
	t := &textWriter{Report: r}
	t.head()
	t.pending()
	t.lateRanks()
	t.phases()
	t.fusion()
	t.tensors("Slowest tensors, from submission to end, over all ranks", r.Slowest)
	t.tensors("Largest tensors", r.Largest)
	t.suggestions()
	_, err := io.WriteString(w, t.b.String())
	return err
}

// textWriter writes the sections of a report.
type textWriter struct {
	*Report
	b strings.Builder
}

func (t *textWriter) line(format string, args ...any) { fmt.Fprintf(&t.b, format+"\n", args...) }

// table writes a table. columns are its headings, separated by |. The function rows calls row for each row.
// The cells of a row are right-aligned in columns. text is the end of a row, after the last column, and is
// not aligned.
func (t *textWriter) table(columns, text string, rows func(row func(text string, cells ...any))) {
	out := tabwriter.NewWriter(&t.b, 0, 0, 2, ' ', tabwriter.AlignRight)
	put := func(text string, cells ...any) {
		for _, c := range cells {
			fmt.Fprintf(out, "%v\t", c)
		}
		if text != "" {
			fmt.Fprintf(out, "  %s", text)
		}
		fmt.Fprintln(out)
	}
	var head []any
	for c := range strings.SplitSeq(columns, "|") {
		head = append(head, c)
	}
	put(text, head...)
	rows(put)
	out.Flush() //nolint:errcheck // a strings.Builder returns no errors
}

func (t *textWriter) head() {
	what := "files of " + topo.FormatRanks(t.Files)
	if t.Size > 0 {
		what += fmt.Sprintf(" of %d", t.Size)
	}
	t.line("%s: %s, %d operations on %d tensors, %d errors", what, duration(t.DurationUS), t.Operations,
		t.Tensors, t.Errors)
	if t.StepsMarked {
		t.line("%d steps of %s (median) after the start-up; the program has marked them", t.Steps,
			duration(t.StepUS))
	} else if t.Steps > 0 {
		t.line("%d steps of %s (median) after the start-up; a step begins when a tensor name occurs again",
			t.Steps, duration(t.StepUS))
	} else {
		t.line("no steps: no tensor name occurs more than once")
	}
	switch {
	case t.ClockErrorUS > 0:
		t.line("clocks are aligned to rank 0's clock within %s", duration(t.ClockErrorUS))
	case len(t.Files) > 1 && len(t.Unaligned) == 0:
		t.line("all ranks use the same clock")
	}
	for _, p := range t.Problems {
		t.line("note: %s", logs.Plain(p))
	}
}

// shownPending is the maximum number of pending operations in the text.
const shownPending = 10

func (t *textWriter) pending() {
	if len(t.Pending) == 0 {
		return
	}
	t.line("\nPending when the timelines ended")
	for _, p := range t.Pending[:min(len(t.Pending), shownPending)] {
		t.line("  %s", logs.Plain(p.describe()))
	}
	if hidden := len(t.Pending) - shownPending; hidden > 0 {
		t.line("  and %d more operations", hidden)
	}
}

func (t *textWriter) lateRanks() {
	t.line("\nLate ranks\n  %s", t.Lateness.Verdict)
	if t.Lateness.Startup != "" {
		t.line("  %s", t.Lateness.Startup)
	}
	if l := &t.Lateness; len(l.Ranks) > 0 && l.Compared > 0 {
		source := "the times at which ranks submitted"
		if l.Arrivals {
			source += ", or at which their requests arrived at rank 0"
		}
		t.line("  %d operations compared, by %s; all ranks together waited for %s", l.Compared, source,
			duration(l.WaitedUS))
		shown := l.shown()
		t.table("rank|held up all|per step|last|caused|share|late p50|p90|p99|max", "",
			func(row func(string, ...any)) {
				for _, s := range shown {
					perStep := "-"
					if t.Steps > 0 {
						perStep = duration(s.HeldPerStepUS)
					}
					row("", s.Rank, duration(s.HeldUS), perStep, s.Last, duration(s.CausedUS),
						percent(s.Share),
						duration(s.P50US), duration(s.P90US), duration(s.P99US), duration(s.MaxUS))
				}
			})
		if hidden := len(l.Ranks) - len(shown); hidden > 0 {
			t.line("  and %d more ranks, which held up the others for less time", hidden)
		}
		for _, s := range shown {
			if s.HeldShare >= minDoing && len(s.Doing) > 0 {
				t.line("  while rank %d held up all others, it was %s", s.Rank, logs.Plain(doing(s.Doing)))
			}
		}
	}
}

const (
	// minDoing is the smallest share of the time for which ranks held up all others of a rank for which the
	// text says what the rank did.
	minDoing = 0.1
	// mostDoing is the maximum number of ranges in the text.
	mostDoing = 3
)

// doing returns a clause that says in which ranges a rank was.
func doing(all []Doing) string {
	var texts []string
	for _, d := range all[:min(len(all), mostDoing)] {
		in := "in no range"
		if d.Range != "" {
			in = "in " + strconv.Quote(d.Range)
		}
		texts = append(texts, in+" for "+percent(d.Share)+" of the time")
	}
	return strings.Join(texts, ", ")
}

func (t *textWriter) phases() {
	t.line("\nTime in phases, %s (time with at least one operation in the phase; phases overlap)", t.per())
	if t.Lateness.Compared == 0 {
		t.line("  negotiation includes waiting for other ranks, because the files have the submissions of only one rank")
	}
	if o := &t.Outside; o.StepUS > 0 {
		text := fmt.Sprintf("  outside gohvd: %s of %s %s (%s)", duration(o.US), duration(o.StepUS), t.per(),
			percent(o.Share))
		if len(t.Phases) > 1 {
			text += " or more at every rank"
		}
		if o.Share >= most {
			text += ": the program takes this time, not communication"
		}
		t.line("%s", text)
	}
	if e := &t.Exposed; e.Known && e.InFlightUS > 0 {
		t.line("  exposed: the program waited for results for %s %s, %s of the %s in which operations were in flight, on average over the ranks", duration(e.US), t.per(), percent(e.Share), duration(e.InFlightUS))
	}
	t.table("rank|step|"+idle+"|"+strings.Join(phaseNames[:], "|"), "", func(row func(string, ...any)) {
		for _, p := range t.Phases[:min(len(t.Phases), mostRanks)] {
			steps, step := max(float64(p.Steps), 1), "-"
			if p.Steps > 0 {
				step = duration(p.StepUS)
			}
			cells := []any{p.Rank, step}
			cells = append(cells, duration(p.US[idle]/steps))
			for _, name := range phaseNames {
				cells = append(cells, duration(p.US[name]/steps))
			}
			row("", cells...)
		}
	})
	if hidden := len(t.Phases) - mostRanks; hidden > 0 {
		t.line("  and %d more ranks", hidden)
	}
}

// fusion writes the section about fusion and the cache.
func (t *textWriter) fusion() {
	t.line("\nFusion and cache")
	if f := &t.Fusion; f.Responses > 0 {
		fill := ""
		if f.ThresholdBytes > 0 {
			fill = fmt.Sprintf("; on average %s of the fusion threshold of %s", percent(f.Fill),
				size(float64(f.ThresholdBytes)))
		}
		t.line("  a response had %s tensors (median %d, at most %d) and %s (median %s, at most %s)%s",
			places(f.MeanTensors), f.P50Tensors,
			f.MaxTensors, size(f.MeanBytes), size(float64(f.P50Bytes)), size(float64(f.MaxBytes)), fill)
	} else {
		t.line("  the files have no operations that can be fused")
	}
	if c := &t.Cache; c.Hits+c.Misses > 0 {
		text := fmt.Sprintf("  %s of the requests were cached",
			percent(float64(c.Hits)/float64(c.Hits+c.Misses)))
		if n := c.SteadyHits + c.SteadyMisses; n > 0 {
			text += fmt.Sprintf(", and %s of those whose name had occurred before",
				percent(float64(c.SteadyHits)/float64(n)))
		}
		t.line("%s", text)
	}
}

func (t *textWriter) tensors(title string, all []Tensor) {
	if len(all) == 0 {
		return
	}
	t.line("\n%s", title)
	t.table("total|mean|p99|max|times|bytes|errors", "tensor", func(row func(string, ...any)) {
		for _, x := range all {
			name := logs.Plain(x.Name)
			if x.DType != "" {
				name += " " + logs.Plain(x.DType) + logs.Plain(x.Shape)
			}
			row(name, duration(x.TotalUS), duration(x.MeanUS), duration(x.P99US), duration(x.MaxUS),
				x.Count, size(float64(x.Bytes)), x.Errors)
		}
	})
}

func (t *textWriter) suggestions() {
	t.line("\nSuggestions")
	if len(t.Suggestions) == 0 {
		t.line("  none: the files show no reason to change a setting or the program")
	}
	for _, s := range t.Suggestions {
		if s.Setting != "" {
			t.line("  %s: %s", s.Setting, s.Do)
		} else {
			t.line("  %s", s.Do)
		}
		t.line("    because %s", s.Because)
	}
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
