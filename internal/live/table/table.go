// Package table makes the rows of hvdrun top from the states of a job, and changes what they show when a key
// is pressed. It knows no terminal: its results are lines of text in which parts have a style.
//
// All texts of a job, such as names of tensors and hosts, are escaped (logs.Plain). So none of them can
// control the terminal.
package table

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gohvd/gohvd/internal/analysis"
	"github.com/gohvd/gohvd/internal/live"
	"github.com/gohvd/gohvd/internal/logs"
	"github.com/gohvd/gohvd/internal/trace"
)

// Style says how a part of a line looks.
type Style uint8

// The styles. Each also differs in its text, because a terminal may have no colours.
const (
	Normal  Style = iota
	Strong        // titles
	Faint         // less important
	Warning       // a rank that others wait for
	Alarm         // a stall, or a job that has failed
	Picked        // the selected row
)

// Span is a part of a line.
type Span struct {
	Text  string
	Style Style
}

// Line is a line of the screen, without a line end.
type Line []Span

// String returns the text of the line.
func (l Line) String() string {
	var b strings.Builder
	for _, s := range l {
		b.WriteString(s.Text)
	}
	return b.String()
}

// States are the states of a job that rows are made of.
type States struct {
	// Now is the newest state, or nil if there is none yet. Before is an earlier one, or nil; the rates are
	// those since then. Last is the newest state that is not the end of the job.
	Now, Before, Last *live.Job
	// Steps are the last steps.
	Steps live.StepSummary
	// Epochs says when the ranks have changed, the newest change first.
	Epochs []Epoch
	// Note is a sentence about the connection to the job, or "".
	Note string
	// At is the time of the newest state or, while none arrives, the time at which Note was made.
	At time.Time
}

const (
	// period is the time over which rates are measured.
	period = 5 * time.Second
	// maxSteps is the number of steps over which is counted how often a rank was late.
	maxSteps = 100
)

// History keeps the states of the last period and the last steps.
type History struct {
	past  []*live.Job
	steps []trace.Step
	// The last epoch that was seen has so many ranks. epochs has those after the first one, the newest first.
	epoch  uint64
	size   int
	epochs []Epoch
}

// Epoch is an epoch that has begun while the job was watched, such as a generation of an elastic job.
type Epoch struct {
	// Number is the number of the epoch, and Seen when it was first seen.
	Number uint64
	Seen   time.Time
	// Size and Before are the numbers of ranks in it and in the epoch before.
	Size, Before int
}

// Text returns a sentence about the epoch.
func (e *Epoch) Text() string {
	return fmt.Sprintf("Since %s: %d ranks (epoch %d), before %d.", e.Seen.Format("15:04:05"), e.Size, e.Number,
		e.Before)
}

// maxEpochs is the number of epochs that are kept.
const maxEpochs = 8

// noteEpoch adds the epoch of a state if it is a new one.
func (h *History) noteEpoch(j *live.Job) {
	n := epochOf(j)
	if n == 0 {
		return // no rank has answered
	}
	if h.epoch > 0 && n != h.epoch {
		h.epochs = append([]Epoch{{n, j.Time, j.Size, h.size}}, h.epochs[:min(len(h.epochs), maxEpochs-1)]...)
	}
	h.epoch, h.size = n, j.Size
}

// Add adds a state and returns the states to show.
func (h *History) Add(j *live.Job) States {
	s := States{Now: j, Last: j, At: j.Time}
	if j.End == nil {
		h.noteEpoch(j)
		if n := len(h.past); n > 0 && epochOf(h.past[n-1]) != epochOf(j) {
			h.past = nil // the counters begin with 0 in each epoch
		}
		h.past = append(h.past, j)
		for len(h.past) > 2 && j.Time.Sub(h.past[1].Time) >= period-period/10 {
			h.past = h.past[1:]
		}
	}
	if len(j.Steps) > 0 {
		if n := len(h.steps); n > 0 && j.Steps[0].Sequence <= h.steps[n-1].Sequence {
			h.steps = nil // those of an earlier epoch
		}
		h.steps = append(h.steps, j.Steps...)
		h.steps = h.steps[max(len(h.steps)-maxSteps, 0):]
	}
	s.Steps, s.Epochs = live.Summarize(h.steps), h.epochs
	if n := len(h.past); n > 0 {
		s.Last = h.past[n-1]
		if n > 1 {
			s.Before = h.past[0]
		}
	}
	return s
}

// epochOf returns the epoch of a job, or 0 if it is not known.
func epochOf(j *live.Job) (newest uint64) {
	for i := range j.Processes {
		newest = max(newest, j.Processes[i].Epoch)
	}
	return newest
}

// row is a process, or with View.ByHost the processes of a host.
type row struct {
	name, host string
	number     int
	pid        int
	processes  int
	state      state
	held       float64 // of a host, the sum
	// Of a host, these shares are means.
	heldUp, waiting, communicating float64
	operations                     float64
	bytes                          float64
	steps                          uint64 // of a host, those of the process with the fewest
	late                           int    // of a host, those of the process that was late most often
	pending                        int
	failed                         uint64
	doing                          string
}

// state is what a process does, in the order in which it needs attention.
type state int

const (
	up      state = iota // a node without a request that waits for a response
	outside              // no operation is pending
	running
	queued
	waiting
	silent  // it has not answered
	missing // others wait for it
)

func (s state) String() string {
	return [...]string{"up", "outside", "running", "queued", "waiting", "silent", "MISSING"}[s]
}

func (s state) style() Style {
	switch s {
	case missing:
		return Alarm
	case silent:
		return Warning
	}
	return Normal
}

// rows returns the rows of a state, in the order of the processes.
func (s *States) rows() []row {
	j := s.Last
	if j == nil {
		return nil
	}
	rates := j.Since(s.Before)
	late := make(map[int]bool)
	for _, p := range j.Problems {
		for _, r := range p.Missing {
			late[r] = true
		}
	}
	states := make(map[int]*analysis.Rank)
	if j.Findings != nil {
		for i := range j.Findings.Ranks {
			states[j.Findings.Ranks[i].Rank] = &j.Findings.Ranks[i]
		}
	}
	rows := make([]row, len(j.Processes))
	for i := range j.Processes {
		p := &j.Processes[i]
		k := &rows[i]
		*k = row{name: logs.Plain(p.Name), host: logs.Plain(p.Host), number: i, pid: p.PID, processes: 1,
			held: rates[i].Held, heldUp: rates[i].HeldUp,
			waiting: rates[i].Waiting, communicating: rates[i].Communicating, operations: rates[i].Operations,
			bytes: rates[i].Bytes, steps: p.Marked, pending: p.Pending, failed: p.Failed}
		if i < len(s.Steps.Late) {
			k.late = s.Steps.Late[i]
		}
		switch f := states[p.Rank]; {
		case !p.Answered:
			k.state, k.doing = silent, "no answer: "+logs.Plain(cmp.Or(p.Known, "nothing is known about it"))
		case f != nil:
			k.state, k.doing = doing(f)
		case p.Pending > 0:
			k.state, k.doing = waiting, fmt.Sprintf("%d requests without a response", p.Pending)
		}
		if p.Answered && late[i] {
			k.state = missing
		}
	}
	return rows
}

// Cells returns the titles of all columns, and the row of each process in their order, without styles.
func (s *States) Cells() (titles []string, rows [][]string) {
	if s.Last == nil {
		return nil, nil
	}
	columns := columnsOf(s.Last.What, false, 1<<10)
	for _, c := range columns {
		titles = append(titles, c.title)
	}
	for _, k := range s.rows() {
		var row []string
		for _, c := range columns {
			row = append(row, c.text(&k))
		}
		rows = append(rows, row)
	}
	return titles, rows
}

// doing says what a rank does.
func doing(r *analysis.Rank) (state, string) {
	if r.First == nil {
		switch {
		case r.Off:
			return outside, "no operation"
		case r.Last == nil:
			return outside, "no operation yet"
		}
		return outside, fmt.Sprintf("%s since %v %s", short(r.Ago), r.Last.Kind, name(r.Last.Name))
	}
	st := waiting
	switch {
	case r.First.Begun > 0:
		st = running
	case r.First.Granted > 0:
		st = queued
	}
	return st, fmt.Sprintf("%s %v %s", short(r.Waited), r.First.Kind, name(r.First.Name))
}

// name returns the name of a tensor, quoted and escaped.
func name(s string) string { return `"` + logs.Plain(s) + `"` }

// byHost joins the rows of each host.
func byHost(rows []row) (hosts []row) {
	at := make(map[string]int)
	for _, k := range rows {
		i, is := at[k.host]
		if !is {
			i = len(hosts)
			at[k.host] = i
			k.number, k.pid = i, 0
			if k.doing != "" {
				k.doing = k.name + ": " + k.doing
			}
			hosts = append(hosts, k)
			continue
		}
		h := &hosts[i]
		if k.state > h.state && k.doing != "" {
			h.doing = k.name + ": " + k.doing
		}
		h.state = max(h.state, k.state)
		h.processes++
		h.held, h.heldUp = h.held+k.held, h.heldUp+k.heldUp
		h.waiting, h.communicating = h.waiting+k.waiting, h.communicating+k.communicating
		h.operations, h.bytes = h.operations+k.operations, h.bytes+k.bytes
		h.steps, h.late = min(h.steps, k.steps), max(h.late, k.late)
		h.pending, h.failed = h.pending+k.pending, h.failed+k.failed
	}
	for i := range hosts {
		h := &hosts[i]
		n := float64(h.processes)
		h.heldUp, h.waiting, h.communicating = h.heldUp/n, h.waiting/n, h.communicating/n
		h.name = fmt.Sprint(h.processes)
	}
	return hosts
}

// column is a column of the table.
type column struct {
	title string
	width int
	right bool // aligned to the right
	rank  int  // a column with a greater rank is left out first if the screen is narrow
	text  func(k *row) string
	// order compares two rows so that the one that comes first by default is less.
	order func(a, b *row) int
}

// ofRanks are the titles of the columns that a job of nodes does not have.
var ofRanks = []string{"STEP", "LATE", "WAIT", "COMM"}

// columnsOf returns the columns that a screen has room for. byHost says that the rows are hosts.
func columnsOf(what string, byHost bool, width int) []column {
	first := column{"RANK", 6, false, 0, func(k *row) string { return strings.TrimPrefix(k.name, "rank ") },
		func(a, b *row) int { return cmp.Compare(a.number, b.number) }}
	if what == live.Nodes {
		first.title, first.width = "NODE", 12
	}
	if byHost {
		first.title = strings.ToUpper(what)
	}
	more := func(value func(k *row) float64) func(a, b *row) int {
		return func(a, b *row) int { return cmp.Compare(value(b), value(a)) }
	}
	held, heldUp := func(k *row) float64 { return k.held }, func(k *row) float64 { return k.heldUp }
	operations, bytes := func(k *row) float64 { return k.operations }, func(k *row) float64 { return k.bytes }
	all := []column{
		first,
		{"HOST", 12, false, 3, func(k *row) string { return k.host },
			func(a, b *row) int { return cmp.Compare(a.host, b.host) }},
		{"PID", 8, true, 6, func(k *row) string { return number(uint64(k.pid)) },
			func(a, b *row) int { return cmp.Compare(a.pid, b.pid) }},
		{"STATE", 7, false, 0, func(k *row) string { return k.state.String() },
			func(a, b *row) int { return cmp.Compare(b.state, a.state) }},
		{"STEP", 7, true, 2, func(k *row) string { return number(k.steps) },
			func(a, b *row) int { return cmp.Compare(a.steps, b.steps) }},
		{"LATE", 4, true, 5, func(k *row) string { return number(uint64(k.late)) },
			func(a, b *row) int { return cmp.Compare(b.late, a.late) }},
		{"HELD", 5, true, 1, func(k *row) string { return percent(k.held) }, more(held)},
		{"WAIT", 4, true, 2, func(k *row) string { return percent(k.waiting) },
			more(func(k *row) float64 { return k.waiting })},
		{"COMM", 4, true, 2, func(k *row) string { return percent(k.communicating) },
			more(func(k *row) float64 { return k.communicating })},
		{"HELD UP", 7, true, 4, func(k *row) string { return percent(k.heldUp) }, more(heldUp)},
		{"OPS/S", 7, true, 4, func(k *row) string { return amount(k.operations) }, more(operations)},
		{"BYTES/S", 7, true, 4, func(k *row) string { return amount(k.bytes) }, more(bytes)},
		{"PENDING", 7, true, 5, func(k *row) string { return number(uint64(k.pending)) },
			func(a, b *row) int { return cmp.Compare(b.pending, a.pending) }},
		{"FAILED", 6, true, 6, func(k *row) string { return number(k.failed) },
			func(a, b *row) int { return cmp.Compare(b.failed, a.failed) }},
		{"DOING", 0, false, 0, func(k *row) string { return k.doing },
			func(a, b *row) int { return cmp.Compare(a.doing, b.doing) }},
	}
	if what == live.Nodes {
		all = slices.DeleteFunc(all, func(c column) bool { return slices.Contains(ofRanks, c.title) })
	}
	for drop := 6; drop > 0; drop-- {
		used := leastDoing
		for _, c := range all {
			used += c.width + 1
		}
		if used <= width {
			break
		}
		all = slices.DeleteFunc(all, func(c column) bool { return c.rank == drop })
	}
	return all
}

// leastDoing is the width of the last column without which other columns are left out.
const leastDoing = 24

// percent returns a share as it is in the table, in which 0 is -.
func percent(f float64) string {
	if f < 0.0005 {
		return "-"
	}
	if f < 0.0995 {
		return fmt.Sprintf("%.1f%%", 100*f)
	}
	return fmt.Sprintf("%.0f%%", 100*min(f, 1))
}

// number returns a count as it is in the table.
func number(n uint64) string {
	if n == 0 {
		return "-"
	}
	return fmt.Sprint(n)
}

// amount returns an amount with about two digits, as it is in the table.
func amount(f float64) string {
	if f < 0.05 {
		return "-"
	}
	for _, unit := range []string{"", "k", "M", "G", "T"} {
		switch {
		case f < 9.95 && unit != "":
			return fmt.Sprintf("%.1f%s", f, unit)
		case f < 999.5:
			return fmt.Sprintf("%.0f%s", f, unit)
		}
		f /= 1000
	}
	return fmt.Sprintf("%.0fP", f)
}

// total returns an amount as it is in a sentence.
func total(f float64) string {
	if text := amount(f); text != "-" {
		return text
	}
	return "0"
}

// short returns a duration in seconds, minutes or hours.
func short(d time.Duration) string {
	switch {
	case d < 0:
		return "0 s"
	case d < 100*time.Millisecond:
		return fmt.Sprintf("%.1f ms", float64(d)/float64(time.Millisecond))
	case d < 100*time.Second:
		return fmt.Sprintf("%.1f s", d.Seconds())
	}
	return d.Round(time.Second).String()
}

// Verdict returns a sentence that says which processes have held up the others, or how the job has ended.
func (s *States) Verdict() Span {
	switch j := s.Now; {
	case j == nil:
		return Span{Text: "Waiting for the first answer of the job."}
	case j.End != nil && j.End.Status == 0:
		return Span{fmt.Sprintf("The job has ended after %s: %s.", short(s.At.Sub(j.Started)),
			logs.Plain(j.End.Text)), Strong}
	case j.End != nil && j.End.Status < 0:
		return Span{logs.Plain(j.End.Text), Alarm}
	case j.End != nil:
		return Span{fmt.Sprintf("The job has ended with exit status %d after %s: %s", j.End.Status,
			short(s.At.Sub(j.Started)), logs.Plain(j.End.Text)), Alarm}
	case s.Before == nil:
		return Span{Text: "Measuring for 5 s."}
	}
	rates, since := s.Now.Since(s.Before), s.Now.Time.Sub(s.Before.Time)
	suspects := s.Now.Suspects(rates, since)
	switch {
	case len(suspects) > 0:
	case len(s.Now.Problems) > 0:
		return Span{} // a wait counts for a rank when it has ended, so the problems say more
	default:
		return Span{Text: "In the last " + short(since) + ", no process held up all others for long."}
	}
	var names []string
	held := 0.0
	for _, i := range suspects {
		names, held = append(names, s.Now.Processes[i].Name), held+rates[i].Held
	}
	text := strings.Join(names, " and ")
	text = strings.ToUpper(text[:1]) + text[1:]
	return Span{fmt.Sprintf("%s held up all others for %s of the last %s.", text,
		percent(held), short(since)), Warning}
}

// steps returns a sentence about the last steps, or "" if the program marks none.
func (s *States) steps() string {
	if s.Steps.Steps == 0 || s.Now == nil || s.Now.End != nil {
		return ""
	}
	return fmt.Sprintf("The last %d steps took %s (median) and %s (p99).", s.Steps.Steps, short(s.Steps.Median),
		short(s.Steps.P99))
}

// Problems returns the sentences about what is wrong at the moment.
func (s *States) Problems() (all []Span) {
	if s.Note != "" {
		all = append(all, Span{logs.Plain(s.Note), Warning})
	}
	if s.Now == nil {
		return all
	}
	for _, p := range s.Now.Problems {
		text, style := logs.Plain(p.Text), Warning
		if p.Stalled {
			text, style = "STALLED: "+text, Alarm
		}
		all = append(all, Span{text, style})
	}
	return all
}

// Writers returns how many ranks write a timeline.
func (s *States) Writers() (n int) {
	if s.Last != nil {
		for i := range s.Last.Processes {
			if s.Last.Processes[i].Timeline != "" {
				n++
			}
		}
	}
	return n
}

// Timelines returns a sentence about the timelines that the ranks write, or "" if they write none or the job
// has ended.
func (s *States) Timelines() string {
	n := s.Writers()
	if n == 0 || s.Now.End != nil {
		return ""
	}
	first := slices.IndexFunc(s.Last.Processes, func(p live.Process) bool { return p.Timeline != "" })
	p := &s.Last.Processes[first]
	return fmt.Sprintf("%d of %d ranks write a timeline: %s to %s", n, s.Last.Size, p.Name, logs.Plain(p.Timeline))
}

// answered returns how many processes have answered.
func answered(j *live.Job) (n int) {
	for i := range j.Processes {
		if j.Processes[i].Answered {
			n++
		}
	}
	return n
}

// totals returns the operations and bytes of all processes together, in each second.
func (s *States) totals() (operations, bytes float64, pending int) {
	for _, k := range s.rows() {
		operations, bytes, pending = max(operations, k.operations), bytes+k.bytes, pending+k.pending
	}
	return operations, bytes, pending
}

// Text returns the state in one line, for an output that is no terminal.
func (s *States) Text() string {
	at := s.At.Format("15:04:05 ")
	if s.Now == nil || s.Now.End != nil {
		return at + s.Verdict().Text
	}
	operations, bytes, pending := s.totals()
	text := fmt.Sprintf("%s%d of %d %s, %s ops/s, %sB/s, %d pending.", at, answered(s.Now),
		s.Now.Size, s.Now.What, total(operations), total(bytes), pending)
	for _, sentence := range []string{s.Verdict().Text, s.steps()} {
		if sentence != "" {
			text += " " + sentence
		}
	}
	for _, p := range s.Problems() {
		text += " " + p.Text
	}
	return text
}
