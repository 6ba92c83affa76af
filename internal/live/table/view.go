package table

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/gohvd/gohvd/internal/live"
	"github.com/gohvd/gohvd/internal/logs"
)

// View is what the user has chosen to see. The zero value shows all processes in their order.
type View struct {
	// Width and Height are the size of the screen in columns and lines.
	Width, Height int
	// Sort is the title of the column by which the rows are sorted, or "". Reverse inverts the order.
	Sort    string
	Reverse bool
	// ByHost shows one row for each host.
	ByHost bool
	// Filter keeps only the rows that contain it. Typing says that the user is typing it.
	Filter string
	Typing bool
	// Selected is the name of the selected row, which stays selected when the order changes, or "". first is
	// the first row on the screen.
	Selected string
	first    int
	Help     bool
	// Paused says that new states are not shown.
	Paused bool
	// Asked says that the user has to confirm that the timelines are to be started or stopped. Switch is
	// called if the user does. Switched is the sentence that says what became of it. start says which of the
	// two the user was asked.
	Asked    bool
	start    bool
	Switch   func(start bool)
	Switched string
}

// maxFilter is the maximum length of the filter.
const maxFilter = 64

// help explains the keys and columns.
var help = []string{
	"Keys",
	"  q, F10, Ctrl-C   quit; the job goes on",
	"  Up, Down, PgUp, PgDn, Home, End   choose a row; it stays chosen when the order changes",
	"  < and >, F6      sort by the column to the left or right     I   invert the order",
	"  / or F4          show only rows that contain a text; Enter keeps it, Esc shows all rows",
	"  h                one row for each host, or for each process",
	"  Space            stop and continue the updates",
	"  t                start timelines at all ranks, or stop them, after a question",
	"  ? or F1          this help",
	"",
	"Columns, over the last 5 s",
	"  STATE      outside (in the program), waiting (for other ranks), queued, running, silent (it does",
	"             not answer), MISSING (others have waited for it for 1 s or longer)",
	"  STEP       training steps that it has marked",
	"  LATE       in how many of the last 100 steps it held up all others for 5 % of the step or more",
	"  HELD       share of the time for which it held up all others",
	"  WAIT, COMM share of the time in which it waited for other ranks, or moved data",
	"  HELD UP    share of the time for which another one held up it and all others",
	"  OPS/S, BYTES/S, PENDING, FAILED   operations that ended, their input, tensors in flight, and",
	"             tensors that have failed",
	"  DOING      the operation that it has waited for longest, and for how long; if STATE is outside,",
	"             the time since the end of the last operation",
	"",
	"A red line names a stalled tensor. A yellow one names a rank that is late or does not answer.",
}

// Key handles a key, which has the name that bubbletea gives it. It returns false if the user quits.
func (v *View) Key(key string, s *States) bool {
	if v.Typing {
		v.typed(key)
		return key != "ctrl+c"
	}
	if v.Asked {
		v.Asked = false
		if key == "y" || key == "Y" {
			v.Switched = "Waiting for the ranks."
			v.Switch(v.start)
			return true
		}
	}
	switch key {
	case "q", "Q", "f10", "ctrl+c":
		return false
	case "t", "T":
		v.Help, v.Switched = false, ""
		v.Asked = s.Last != nil && s.Last.What == live.Ranks && s.Now.End == nil
		v.start = s.Writers() == 0
	case "?", "f1":
		v.Help = !v.Help
	case "esc":
		v.Help, v.Filter, v.Switched = false, "", ""
	case "/", "f4", "\\":
		v.Help, v.Typing = false, true
	case "h", "H":
		v.ByHost, v.Selected = !v.ByHost, ""
	case "space", " ":
		v.Paused = !v.Paused
	case "I", "i":
		v.Reverse = !v.Reverse
	case "<", ",":
		v.sortBy(s, -1)
	case ">", ".", "f6":
		v.sortBy(s, +1)
	case "up", "k":
		v.move(s, -1)
	case "down", "j":
		v.move(s, +1)
	case "pgup":
		v.move(s, -max(v.Height/2, 1))
	case "pgdown":
		v.move(s, max(v.Height/2, 1))
	case "home", "g":
		v.move(s, -1<<20)
	case "end", "G":
		v.move(s, 1<<20)
	}
	return true
}

// typed handles a key of the filter.
func (v *View) typed(key string) {
	switch {
	case key == "enter":
		v.Typing = false
	case key == "esc":
		v.Typing, v.Filter = false, ""
	case key == "backspace":
		_, n := utf8.DecodeLastRuneInString(v.Filter)
		v.Filter = v.Filter[:len(v.Filter)-n]
	case key == "space":
		v.typed(" ")
	case utf8.RuneCountInString(key) == 1 && len(v.Filter) < maxFilter:
		v.Filter += logs.Plain(key)
	}
}

// sortBy sorts by another column, which is so many columns to the right of the present one.
func (v *View) sortBy(s *States, by int) {
	columns := v.columns(s)
	at := max(slices.IndexFunc(columns, func(c column) bool { return c.title == v.Sort }), 0)
	v.Sort = columns[(at+by+len(columns))%len(columns)].title
	v.Reverse = false
}

func (v *View) columns(s *States) []column {
	what := live.Ranks
	if s.Last != nil {
		what = s.Last.What
	}
	return columnsOf(what, v.ByHost, v.Width)
}

// rows returns the rows in the order of the screen.
func (v *View) rows(s *States) []row {
	rows := s.rows()
	if v.ByHost {
		rows = byHost(rows)
	}
	if v.Filter != "" {
		rows = slices.DeleteFunc(rows, func(k row) bool { return !contains(&k, v.Filter) })
	}
	for _, c := range v.columns(s) {
		if c.title != v.Sort {
			continue
		}
		slices.SortStableFunc(rows, func(a, b row) int { return c.order(&a, &b) })
	}
	if v.Reverse {
		slices.Reverse(rows)
	}
	return rows
}

// contains reports whether a text of the row contains the filter.
func contains(k *row, filter string) bool {
	for _, text := range []string{k.name, k.host, k.state.String(), k.doing} {
		if strings.Contains(strings.ToLower(text), strings.ToLower(filter)) {
			return true
		}
	}
	return false
}

// id identifies a row while the order changes.
func (v *View) id(k *row) string {
	if v.ByHost {
		return k.host
	}
	return k.name
}

// move selects another row, which is so many rows further down.
func (v *View) move(s *States, by int) {
	rows := v.rows(s)
	if len(rows) == 0 {
		return
	}
	at := slices.IndexFunc(rows, func(k row) bool { return v.id(&k) == v.Selected })
	if at < 0 {
		at, by = 0, max(by, 0)
		if by == 1 {
			by = 0
		}
	}
	at = min(max(at+by, 0), len(rows)-1)
	v.Selected = v.id(&rows[at])
}

// Lines returns the screen, which has at most Height lines of at most Width columns.
func (v *View) Lines(s *States) []Line {
	lines := v.head(s)
	if v.Help {
		for _, text := range help {
			lines = append(lines, Line{{text, Normal}})
		}
		return v.fit(append(lines, v.foot(s)))
	}
	for i, p := range s.Problems() {
		if i == maxProblems {
			lines = append(lines, Line{{fmt.Sprintf("... and %d more", len(s.Problems())-i), Warning}})
			break
		}
		for _, text := range wrap(p.Text, v.Width, maxWrapped) {
			lines = append(lines, Line{{text, p.Style}})
		}
	}
	for _, text := range []string{s.Timelines(), v.Switched} {
		for _, text := range wrap(logs.Plain(text), v.Width, maxWrapped) {
			lines = append(lines, Line{{text, Normal}})
		}
	}
	columns := v.columns(s)
	lines = append(lines, v.title(columns))
	rows := v.rows(s)
	room := max(v.Height-len(lines)-1, 1)
	at := max(slices.IndexFunc(rows, func(k row) bool { return v.id(&k) == v.Selected }), 0)
	v.first = min(v.first, max(len(rows)-room, 0), at)
	v.first = max(v.first, at-room+1)
	shown := rows[v.first:min(v.first+room, len(rows))]
	for i := range shown {
		lines = append(lines, v.line(columns, &shown[i]))
	}
	if len(rows) == 0 && v.Filter != "" {
		lines = append(lines, Line{{fmt.Sprintf("No row contains %q. Esc shows all rows.", v.Filter), Faint}})
	}
	for len(lines) < v.Height-1 {
		lines = append(lines, nil)
	}
	return v.fit(append(lines, v.foot(s)))
}

const (
	// maxProblems is how many problems the screen shows, and maxWrapped in how many lines each.
	maxProblems = 4
	maxWrapped  = 3
)

// head returns the first lines: which job it is, and the verdict.
func (v *View) head(s *States) []Line {
	first := Line{{"hvdrun top", Strong}}
	if j := s.Now; j != nil {
		text := fmt.Sprintf("  %s  up %s", s.At.Format("15:04:05"), short(s.At.Sub(j.Started)))
		if s.Last != nil && j.End == nil {
			operations, bytes, pending := s.totals()
			text += fmt.Sprintf("  %d of %d %s  %s ops/s  %sB/s  %d pending", answered(s.Last), j.Size,
				j.What, total(operations), total(bytes), pending)
		}
		first = append(first, Span{text, Normal})
		if v.Paused {
			first = append(first, Span{"  PAUSED", Warning})
		}
	}
	lines := []Line{first}
	if j := s.Now; j != nil {
		lines = append(lines, Line{{fmt.Sprintf("process %d on %s: %s", j.PID, logs.Plain(j.Host),
			logs.Plain(strings.Join(j.Command, " "))), Faint}})
	}
	verdict := s.Verdict()
	verdict.Text = strings.TrimSpace(verdict.Text + " " + s.steps())
	for _, text := range wrap(verdict.Text, v.Width, maxWrapped) {
		lines = append(lines, Line{{text, verdict.Style}})
	}
	if len(s.Epochs) > 0 {
		lines = append(lines, Line{{s.Epochs[0].Text(), Faint}})
	}
	return lines
}

// title returns the line with the titles of the columns. The column by which the rows are sorted has a mark.
func (v *View) title(columns []column) Line {
	var l Line
	for i, c := range columns {
		text := c.title
		style := Strong
		if c.title == v.Sort {
			style = Picked
		}
		l = append(l, Span{pad(text, c.width, c.right), style})
		if i < len(columns)-1 {
			l = append(l, Span{" ", Strong})
		}
	}
	return l
}

// line returns the line of a row.
func (v *View) line(columns []column, k *row) Line {
	style := k.state.style()
	if v.Selected != "" && v.id(k) == v.Selected {
		style = Picked
	}
	var b strings.Builder
	for i, c := range columns {
		if i > 0 {
			b.WriteString(" ")
		}
		b.WriteString(pad(c.text(k), c.width, c.right))
	}
	text := b.String()
	if style == Picked {
		text = pad(text, v.Width, false)
	}
	return Line{{text, style}}
}

// foot returns the last line.
func (v *View) foot(s *States) Line {
	if v.Typing {
		return Line{{"Filter: " + v.Filter + "_", Strong}}
	}
	if v.Asked {
		what := "stop"
		if v.start {
			what = "start"
		}
		return Line{{"Press y to " + what + " the timelines of all ranks, or another key to leave them.", Strong}}
	}
	text := "q quit  ? help  / filter  < > sort  I invert  h hosts  t timelines  Space pause"
	if v.Filter != "" {
		text = fmt.Sprintf("filter %q (Esc: all)  ", v.Filter) + text
	}
	return Line{{text, Faint}}
}

// fit cuts lines to the screen. The last line stays.
func (v *View) fit(lines []Line) []Line {
	if over := len(lines) - v.Height; over > 0 && v.Height > 0 {
		lines = slices.Delete(lines, len(lines)-1-over, len(lines)-1)
	}
	for i, l := range lines {
		room := v.Width
		for k := range l {
			l[k].Text = cut(l[k].Text, room)
			room -= utf8.RuneCountInString(l[k].Text)
		}
		lines[i] = l
	}
	return lines
}

// cut shortens a text to so many characters.
func cut(text string, width int) string {
	if utf8.RuneCountInString(text) <= width {
		return text
	}
	if width <= 0 {
		return ""
	}
	runes := []rune(text)
	if width < 4 {
		return string(runes[:width])
	}
	return string(runes[:width-3]) + "..."
}

// pad makes a text so many characters wide. The width 0 leaves it as it is.
func pad(text string, width int, right bool) string {
	if width == 0 {
		return text
	}
	text = cut(text, width)
	fill := strings.Repeat(" ", width-utf8.RuneCountInString(text))
	if right {
		return fill + text
	}
	return text + fill
}

// wrap breaks a text into at most so many lines of the width, between words if that is possible.
func wrap(text string, width, most int) (lines []string) {
	width = cmp.Or(max(width, 0), 80)
	for rest := []rune(text); len(rest) > 0; {
		if len(rest) <= width || len(lines) == most-1 {
			return append(lines, cut(string(rest), width))
		}
		at := width
		for at > width/2 && rest[at] != ' ' {
			at--
		}
		if rest[at] != ' ' {
			at = width
		}
		lines = append(lines, string(rest[:at]))
		if rest = rest[at:]; rest[0] == ' ' {
			rest = rest[1:]
		}
	}
	return lines
}
