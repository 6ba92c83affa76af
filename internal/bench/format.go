package bench

import (
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
)

// line is what was measured of one size: out of place and in place. Either may be nil.
type line struct{ out, in *Row }

func (l line) rows() []*Row {
	var rows []*Row
	for _, r := range []*Row{l.out, l.in} {
		if r != nil {
			rows = append(rows, r)
		}
	}
	return rows
}

// verdict is what there is to say at the end.
type verdict struct {
	wrong  int64
	memory []RankMemory // by rank, if it was asked for
	cost   *Negotiation // if it was asked for
}

// output shows results as they come.
type output interface {
	begin(title string)
	line(l line)
	note(text string) // on a line of its own, where the form allows for it
	end(v verdict)
}

// newOutput is that of a form of Formats. Errors of w are kept by w.
func newOutput(format string, w *sink) output {
	switch format {
	case "osu":
		return &osuOutput{w: w}
	case "csv":
		return &csvOutput{w: w}
	case "json":
		return &jsonOutput{w: w}
	}
	return &ncclOutput{w: w}
}

// sink is a writer that keeps its first error and drops what comes after it.
type sink struct {
	w   io.Writer
	err error
}

func (s *sink) Write(p []byte) (int, error) {
	if s.err == nil {
		_, s.err = s.w.Write(p)
	}
	return len(p), nil
}

// comments are the lines of a verdict for forms in which # begins a comment.
func comments(w io.Writer, v verdict) {
	for r, m := range v.memory {
		const mib = 1 << 20
		fmt.Fprintf(w, "# memory of rank %d: peak RSS %.1f MiB, of that its tensors %.1f MiB; shared with other ranks %.1f MiB\n",
			r, m.PeakRSS/mib, m.Tensors/mib, m.Shared/mib)
	}
	if v.cost != nil {
		fmt.Fprintf(w, "# %s\n", v.cost)
	}
}

// cpuComments are the lines on the CPU time of one row.
func cpuComments(w io.Writer, r *Row) {
	for rank, c := range r.CPU {
		fmt.Fprintf(w, "# cpu of rank %d, %s: wall %.3f s, user %.3f s, system %.3f s, %.0f%% of a core\n",
			rank, r.Placement, c.Wall, c.User, c.System, 100*(c.User+c.System)/c.Wall)
	}
}

// ncclOutput is the table of nccl-tests, with the median and the 99th percentile behind it.
type ncclOutput struct {
	w       *sink
	sum     float64
	numRows int
}

func (o *ncclOutput) begin(title string) {
	fmt.Fprintf(o.w, "# %s\n#\n", title)
	fmt.Fprintf(o.w, "#%54s %-34s %-34s %-21s %s\n", "", "            out-of-place", "              in-place", "    out-of-place", "      in-place")
	head := strings.Repeat(fmt.Sprintf(" %9s %8s %8s %6s", "time", "algbw", "busbw", "#wrong"), 2)
	unit := strings.Repeat(fmt.Sprintf(" %9s %8s %8s %6s", "(us)", "(GB/s)", "(GB/s)", ""), 2)
	fmt.Fprintf(o.w, "# %11s %13s %9s %7s %7s%s%s\n", "size", "count", "type", "redop", "root", head, strings.Repeat(fmt.Sprintf(" %10s %10s", "p50", "p99"), 2))
	fmt.Fprintf(o.w, "# %11s %13s %9s %7s %7s%s%s\n", "(B)", "(elements)", "", "", "", unit, strings.Repeat(fmt.Sprintf(" %10s %10s", "(us)", "(us)"), 2))
}

func (o *ncclOutput) line(l line) {
	rows := l.rows()
	if len(rows) == 0 {
		return
	}
	r := rows[0]
	root := r.Root
	fmt.Fprintf(o.w, "  %11d %13d %9s %7s %7d", r.Bytes, r.Count, r.ncclType(), r.Op, root)
	for _, r := range []*Row{l.out, l.in} {
		if r == nil {
			fmt.Fprintf(o.w, " %9s %8s %8s %6s", "-", "-", "-", "-")
			continue
		}
		fmt.Fprintf(o.w, " %9s %8.2f %8.2f %6s", micros(r.Mean), r.AlgBW, r.BusBW, r.wrongText())
		o.sum += r.BusBW
		o.numRows++
	}
	for _, r := range []*Row{l.out, l.in} {
		if r == nil {
			fmt.Fprintf(o.w, " %10s %10s", "-", "-")
			continue
		}
		fmt.Fprintf(o.w, " %10s %10s", micros(r.P50), micros(r.P99))
	}
	fmt.Fprintf(o.w, "\n")
	for _, r := range rows {
		cpuComments(o.w, r)
	}
}

func (o *ncclOutput) note(text string) { fmt.Fprintf(o.w, "# %s\n", text) }

func (o *ncclOutput) end(v verdict) {
	comments(o.w, v)
	state := "OK"
	if v.wrong > 0 {
		state = "FAILED"
	}
	fmt.Fprintf(o.w, "# Out of bounds values : %d %s\n", v.wrong, state)
	if o.numRows > 0 {
		fmt.Fprintf(o.w, "# Avg bus bandwidth    : %.4f\n", o.sum/float64(o.numRows))
	}
}

func (r *Row) ncclType() string {
	for dt, name := range ncclTypes {
		if dt.String() == r.Type {
			return name
		}
	}
	return r.Type
}

func (r *Row) wrongText() string {
	if r.Wrong == unchecked {
		return "N/A"
	}
	return strconv.FormatInt(r.Wrong, 10)
}

// micros has digits as they mean something.
func micros(us float64) string {
	switch {
	case us < 100:
		return fmt.Sprintf("%.2f", us)
	case us < 10000:
		return fmt.Sprintf("%.1f", us)
	}
	return fmt.Sprintf("%.0f", us)
}

// osuOutput has the columns of osu_allreduce -f. What they do not show stands above each table.
type osuOutput struct {
	w    *sink
	last string
	held []*Row // in place, until the table of the same out of place ends
}

func (o *osuOutput) begin(title string) { fmt.Fprintf(o.w, "# %s\n", title) }

func (o *osuOutput) line(l line) {
	rows := l.rows()
	if len(rows) > 0 && len(o.held) > 0 && rows[0].caseName() != o.held[0].caseName() {
		o.flush()
	}
	for _, r := range rows {
		if r == l.in && (l.out != nil || len(o.held) > 0) {
			o.held = append(o.held, r)
		} else {
			o.row(r)
		}
	}
}

func (r *Row) caseName() string {
	return fmt.Sprintf("%s, %s, %s, root %d", r.Collective, r.Type, r.Op, r.Root)
}

func (o *osuOutput) row(r *Row) {
	if of := r.caseName() + ", " + r.Placement; of != o.last {
		o.last = of
		fmt.Fprintf(o.w, "# %s\n%-10s %18s %18s %18s %12s\n", of, "# Size", "Avg Latency(us)", "Min Latency(us)", "Max Latency(us)", "Iterations")
	}
	fmt.Fprintf(o.w, "%-10d %18.2f %18.2f %18.2f %12d\n", r.Bytes, r.Mean, r.LeastMean, r.GreatestMean, r.Iters)
	cpuComments(o.w, r)
}

func (o *osuOutput) flush() {
	for _, r := range o.held {
		o.row(r)
	}
	o.held = nil
}

func (o *osuOutput) note(text string) { fmt.Fprintf(o.w, "# %s\n", text) }

func (o *osuOutput) end(v verdict) {
	o.flush()
	comments(o.w, v)
	if v.wrong > 0 {
		fmt.Fprintf(o.w, "# FAILED: %d elements are wrong\n", v.wrong)
	}
}

// csvColumns are those of csvOutput.
var csvColumns = []string{
	"collective", "path", "memory", "touch", "ranks", "bytes", "count", "type", "redop", "root", "placement", "iters",
	"mean_us", "p50_us", "p99_us", "min_us", "max_us", "least_mean_us", "greatest_mean_us", "algbw_GBps", "busbw_GBps", "wrong",
}

func (r *Row) fields() []string {
	number := func(v float64) string { return strconv.FormatFloat(v, 'f', 4, 64) }
	return []string{
		r.Collective, r.Path, r.Memory, strconv.FormatBool(r.Touch), strconv.Itoa(r.Ranks), strconv.FormatInt(r.Bytes, 10),
		strconv.FormatInt(r.Count, 10), r.Type, r.Op, strconv.Itoa(r.Root), r.Placement, strconv.Itoa(r.Iters),
		number(r.Mean), number(r.P50), number(r.P99), number(r.Min), number(r.Max), number(r.LeastMean), number(r.GreatestMean),
		number(r.AlgBW), number(r.BusBW), strconv.FormatInt(r.Wrong, 10),
	}
}

type csvOutput struct{ w *sink }

func (o *csvOutput) begin(title string) {
	fmt.Fprintf(o.w, "# %s\n%s\n", title, strings.Join(csvColumns, ","))
}

func (o *csvOutput) line(l line) {
	for _, r := range l.rows() {
		w := csv.NewWriter(o.w) // a workload's file may have any name
		_ = w.Write(r.fields()) // the sink keeps the error
		w.Flush()
		cpuComments(o.w, r)
	}
}

func (o *csvOutput) note(text string) { fmt.Fprintf(o.w, "# %s\n", text) }
func (o *csvOutput) end(v verdict)    { comments(o.w, v) }

// jsonOutput is one document at the end.
type jsonOutput struct {
	w     *sink
	title string
	rows  []*Row
	notes []string
}

func (o *jsonOutput) begin(title string) { o.title = title }
func (o *jsonOutput) line(l line)        { o.rows = append(o.rows, l.rows()...) }
func (o *jsonOutput) note(text string)   { o.notes = append(o.notes, text) }

func (o *jsonOutput) end(v verdict) {
	document := struct {
		Title       string       `json:"title"`
		Rows        []*Row       `json:"rows"`
		Notes       []string     `json:"notes,omitempty"`
		Memory      []RankMemory `json:"memory,omitempty"`
		Negotiation *Negotiation `json:"negotiation,omitempty"`
		Wrong       int64        `json:"wrong"`
	}{o.title, o.rows, o.notes, v.memory, v.cost, v.wrong}
	if document.Rows == nil {
		document.Rows = []*Row{}
	}
	for _, r := range document.Rows { // JSON has no infinities
		for _, f := range []*float64{&r.AlgBW, &r.BusBW, &r.Mean, &r.LeastMean} {
			if math.IsInf(*f, 0) || math.IsNaN(*f) {
				*f = 0
			}
		}
	}
	e := json.NewEncoder(o.w)
	e.SetIndent("", "  ")
	_ = e.Encode(document) // the sink keeps the error
}

// progress says on standard error what is going on.
type progress struct {
	w        io.Writer // nil says nothing
	terminal bool
}

// show replaces what was said before, where a terminal allows it.
func (p *progress) show(format string, args ...any) {
	switch {
	case p.w == nil:
	case p.terminal:
		fmt.Fprintf(p.w, "\r\033[K"+format, args...)
	default:
		fmt.Fprintf(p.w, "hvdbench: "+format+"\n", args...)
	}
}

// clear makes room for output.
func (p *progress) clear() {
	if p.w != nil && p.terminal {
		fmt.Fprint(p.w, "\r\033[K")
	}
}
