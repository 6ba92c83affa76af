package doctor

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"unicode/utf8"
)

// Count returns how many lines have the status.
func Count(lines []Line, status Status) int {
	n := 0
	for _, l := range lines {
		if l.Status == status {
			n++
		}
	}
	return n
}

// WriteText writes the lines as text, grouped by section. At the end it writes how many lines have each
// status.
func WriteText(w io.Writer, lines []Line) error {
	out := bufio.NewWriter(w)
	for rest := lines; len(rest) > 0; {
		n, width := 0, 0
		for n < len(rest) && rest[n].Section == rest[0].Section {
			width = max(width, utf8.RuneCountInString(rest[n].Name))
			n++
		}
		fmt.Fprintf(out, "%s\n", rest[0].Section)
		for _, l := range rest[:n] {
			fmt.Fprintf(out, "  %-4s  %-*s  %s\n", l.Status, width, l.Name, l.Text)
			if l.Fix != "" {
				fmt.Fprintf(out, "        %-*s  fix: %s\n", width, "", l.Fix)
			}
		}
		rest = rest[n:]
	}
	fmt.Fprintf(out, "%d ok, %d warn, %d fail\n", Count(lines, OK), Count(lines, Warn), Count(lines, Fail))
	return out.Flush()
}

// WriteJSON writes the lines as a JSON array of objects.
func WriteJSON(w io.Writer, lines []Line) error {
	if lines == nil {
		lines = []Line{}
	}
	out := json.NewEncoder(w)
	out.SetEscapeHTML(false)
	out.SetIndent("", "  ")
	return out.Encode(lines)
}
