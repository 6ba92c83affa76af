package launch

import (
	"fmt"
	"strings"
	"time"

	"github.com/gohvd/gohvd/internal/elastic"
)

// maxChangeLines caps how many changes are printed at the end of the job.
const maxChangeLines = 50

// changes prints how the ranks of an elastic job change, and keeps the lines for the end of the job.
type changes struct {
	console *console
	lines   []string
}

// addRoster prints a line about the new ranks.
func (c *changes) addRoster(r *elastic.Roster) {
	line := fmt.Sprintf("generation %d: %d ranks", r.Generation, len(r.Members))
	if len(r.Members) == 1 {
		line = fmt.Sprintf("generation %d: 1 rank", r.Generation)
	}
	if r.Reason != "" {
		line += ": " + r.Reason
	}
	c.console.note("%s", line)
	if r.Generation > 1 {
		c.lines = append(c.lines, fmt.Sprintf("  %s %s", time.Now().Format(clock), line))
	}
}

// addResume prints a line about the end of a stop, and adds it to the line about the change.
func (c *changes) addResume(s *elastic.Resume) {
	text := fmt.Sprintf("%.3f s", s.Stopped.Seconds())
	c.console.note("generation %d: trains after a stop of %s", s.Generation, text)
	if last := len(c.lines) - 1; last >= 0 {
		c.lines[last] += "; stopped for " + text
	}
}

// report returns a text about the last changes, or "" if there were none.
func (c *changes) report() string {
	if len(c.lines) == 0 {
		return ""
	}
	var b strings.Builder
	fmt.Fprintf(&b, "hvdrun: changes of the ranks: %d\n", len(c.lines))
	last := c.lines[max(0, len(c.lines)-maxChangeLines):]
	if more := len(c.lines) - len(last); more > 0 {
		fmt.Fprintf(&b, "  (%d earlier ones are not shown)\n", more)
	}
	for _, line := range last {
		fmt.Fprintln(&b, line)
	}
	return b.String()
}
