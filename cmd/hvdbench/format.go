package main

import (
	"encoding/csv"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// line holds the results for one size, out of place and in place. One of the two may be nil.
type line struct{ out, in *result }

func (l line) results() []*result {
	var all []*result
	for _, r := range []*result{l.out, l.in} {
		if r != nil {
			all = append(all, r)
		}
	}
	return all
}

// formats holds the values of --format. nccl prints the table of nccl-tests with two more columns, the median
// and the 99th percentile. csv prints rows for bench/plot.py and bench/report.py.
var formats = []string{"nccl", "csv"}

// printer prints results as they arrive. If the writer returns an error, the printer keeps the error and
// prints nothing more.
type printer struct {
	w   io.Writer
	csv bool
	err error

	ran    string  // how the operations of the last line in the table have run
	busBW  float64 // sum of the bus bandwidths in the table
	numBus int
}

func (p *printer) printf(format string, args ...any) {
	if p.err == nil {
		_, p.err = fmt.Fprintf(p.w, format, args...)
	}
}

// begin prints the heading of the output. The heading contains the title.
func (p *printer) begin(title string) {
	p.printf("# %s\n", title)
	if p.csv {
		p.printf("%s\n", strings.Join(csvColumns, ","))
		return
	}
	p.printf("#\n#%54s %-34s %-34s %-21s %s\n", "", "            out-of-place", "              in-place",
		"    out-of-place", "      in-place")
	head := strings.Repeat(fmt.Sprintf(" %9s %8s %8s %6s", "time", "algbw", "busbw", "#wrong"), 2)
	unit := strings.Repeat(fmt.Sprintf(" %9s %8s %8s %6s", "(us)", "(GB/s)", "(GB/s)", ""), 2)
	p.printf("# %11s %13s %9s %7s %7s%s%s\n", "size", "count", "type", "redop", "root", head,
		strings.Repeat(fmt.Sprintf(" %10s %10s", "p50", "p99"), 2))
	p.printf("# %11s %13s %9s %7s %7s%s%s\n", "(B)", "(elements)", "", "", "", unit,
		strings.Repeat(fmt.Sprintf(" %10s %10s", "(us)", "(us)"), 2))
}

// line prints the results for one size.
func (p *printer) line(l line) {
	if p.csv {
		for _, r := range l.results() {
			var record strings.Builder
			w := csv.NewWriter(&record) // a csv.Writer, because the name of a workload file may need quotes
			_ = w.Write(r.fields())     // a strings.Builder returns no error
			w.Flush()
			p.printf("%s", record.String())
		}
	} else {
		p.tableLine(l)
	}
}

// ran returns how the operations of the line have run.
func (l line) ran() string {
	var all ways
	for _, r := range l.results() {
		for _, way := range r.ran {
			all = all.add(way)
		}
	}
	return all.String()
}

// tableLine prints a row of the table. A comment before the row says how its operations have run, if that
// differs from the row before.
func (p *printer) tableLine(l line) {
	if ran := l.ran(); ran != p.ran {
		p.note("ran: " + ran)
		p.ran = ran
	}
	r := l.results()[0]
	p.printf("  %11d %13d %9s %7s %7d", r.bytes, r.count, ncclType(r.dt), ncclOp(r.op), r.root)
	both := []*result{l.out, l.in}
	for _, r := range both {
		if r == nil {
			p.printf(" %9s %8s %8s %6s", "-", "-", "-", "-")
			continue
		}
		wrong := strconv.FormatInt(r.wrong, 10)
		if r.wrong == unchecked {
			wrong = "N/A"
		}
		p.printf(" %9s %8.2f %8.2f %6s", micros(r.mean), r.algBW, r.busBW, wrong)
		p.busBW += r.busBW
		p.numBus++
	}
	for _, r := range both {
		if r == nil {
			p.printf(" %10s %10s", "-", "-")
			continue
		}
		p.printf(" %10s %10s", micros(r.p50), micros(r.p99))
	}
	p.printf("\n")
}

// copied prints the result for a plain copy of a tensor. In the table it is a comment.
func (p *printer) copied(r *result) {
	if p.csv {
		p.line(line{out: r})
		return
	}
	p.note(fmt.Sprintf("copy of %d bytes: %s us, %.2f GB/s", r.bytes, micros(r.mean), r.algBW))
}

// note prints text as a comment.
func (p *printer) note(text string) { p.printf("# %s\n", text) }

// end prints the end of the table: how many elements were wrong, and the average bus bandwidth.
func (p *printer) end(wrong int64) {
	if p.csv {
		return
	}
	state := "OK"
	if wrong > 0 {
		state = "FAILED"
	}
	p.printf("# Out of bounds values : %d %s\n", wrong, state)
	if p.numBus > 0 {
		p.printf("# Avg bus bandwidth    : %.4f\n", p.busBW/float64(p.numBus))
	}
}

// micros formats a time in microseconds. The longer the time, the fewer decimals it has.
func micros(us float64) string {
	switch {
	case us < 100:
		return fmt.Sprintf("%.2f", us)
	case us < 10000:
		return fmt.Sprintf("%.1f", us)
	}
	return fmt.Sprintf("%.0f", us)
}

var csvColumns = []string{
	"collective", "path", "memory", "touch", "ranks", "bytes", "count", "type", "redop", "root", "placement",
	"iters",
	"mean_us", "p50_us", "p99_us", "min_us", "max_us", "least_mean_us", "greatest_mean_us", "algbw_GBps",
	"busbw_GBps", "wrong", "ran",
}

// fields returns the fields of r for the columns in csvColumns.
func (r *result) fields() []string {
	dt := "none"
	if r.dt.Valid() {
		dt = r.dt.String()
	}
	number := func(v float64) string { return strconv.FormatFloat(v, 'f', 4, 64) }
	return []string{
		r.collective, r.path, r.memory, strconv.FormatBool(r.touch), strconv.Itoa(r.ranks),
		strconv.FormatInt(r.bytes, 10),
		strconv.FormatInt(r.count, 10), dt, ncclOp(r.op), strconv.Itoa(r.root), r.placement,
		strconv.Itoa(r.iters),
		number(r.mean), number(r.p50), number(r.p99), number(r.min), number(r.max), number(r.leastMean),
		number(r.greatestMean),
		number(r.algBW), number(r.busBW), strconv.FormatInt(r.wrong, 10),
		r.ran.String(),
	}
}
