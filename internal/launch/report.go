package launch

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/gohvd/gohvd/internal/logs"
	"github.com/gohvd/gohvd/internal/topo"
)

// reporter describes ranks for the user. It only reads.
type reporter struct {
	spec  *spec
	ranks []*rank
}

const clock = "15:04:05.000"

// failure returns the report of a failure, which looks similar to the report of torchrun. It returns "" if no
// rank failed.
func (p reporter) failure(res Result) string {
	if len(res.Roots) == 0 {
		return ""
	}
	var b strings.Builder
	rule := strings.Repeat("-", 72)
	fmt.Fprintf(&b, "%s\nhvdrun: the job failed with exit status %d\n", rule, res.Status)
	if named(res.Verdict, res.Roots[0]) || p.spec.o.Starter != "" && res.Verdict != nil {
		fmt.Fprintf(&b, "Root cause (found by the surviving %s): %s\n", p.spec.o.processes(),
			logs.Escape(res.Verdict.Reason))
	} else {
		b.WriteString("Root cause (first observed failure):\n")
	}
	p.alike(&b, res.Roots, func(r int) string {
		return fmt.Sprintf("%s%s %q", res.Ranks[r].Describe(), p.ranks[r].restarted(),
			p.ranks[r].lastLines())
	}, func(r int) {
		e := res.Ranks[r]
		fmt.Fprintf(&b, "  %s: %s%s\n    host: %s\n%s    time: %s\n",
			p.ranks[r].title, e.Describe(), p.ranks[r].restarted(), e.Host, pid("    pid:  %d\n", e),
			e.At.Format("2006-01-02 "+clock))
		lines := p.ranks[r].lastLines()
		if len(lines) == 0 {
			b.WriteString("    nothing on stderr\n")
			return
		}
		b.WriteString("    last lines on stderr:\n")
		for _, l := range lines {
			fmt.Fprintf(&b, "      %s\n", l)
		}
	})
	var others []int
	for r, e := range res.Ranks {
		if e.Status() != 0 && !slices.Contains(res.Roots, r) {
			others = append(others, r)
		}
	}
	if len(others) > 0 {
		b.WriteString("Other " + p.spec.o.processes() + " that failed:\n")
	}
	again := func(r int) string {
		if res.Ranks[r].Restarting {
			return ", was to be started again"
		}
		return ""
	}
	p.alike(&b, others, func(r int) string { return res.Ranks[r].Describe() + again(r) }, func(r int) {
		e, host := res.Ranks[r], ""
		if p.spec.several {
			host = " on " + e.Host
		}
		fmt.Fprintf(&b, "  %s: %s%s%s, at %s%s\n", p.ranks[r].title, e.Describe(), pid(", pid %d", e), host,
			e.At.Format(clock), again(r))
	})
	b.WriteString(rule + "\n")
	return b.String()
}

// pid formats the process ID of e, or returns "" if there is none.
func pid(format string, e Exit) string {
	if e.PID == 0 {
		return ""
	}
	return fmt.Sprintf(format, e.PID)
}

// maxAlike is the maximum number of processes of which the report says the same, each on its own. If there
// are more, it describes only the first of them and lists the others.
const maxAlike = 3

// alike calls describe for ranks in ascending order. same returns what must be equal for two ranks to
// be alike.
func (p reporter) alike(b *strings.Builder, ranks []int, same func(r int) string, describe func(r int)) {
	alike := make(map[string][]int)
	for _, r := range ranks {
		alike[same(r)] = append(alike[same(r)], r)
	}
	for _, r := range ranks {
		all := alike[same(r)]
		switch {
		case len(all) <= maxAlike:
			describe(r)
		case r == all[0]:
			describe(r)
			fmt.Fprintf(b, "  and %d more in the same way: %s\n", len(all)-1, p.titles(all[1:]))
		}
	}
}

// maxTitles is the maximum number of processes that titles names, if they are no ranks of a fixed number.
const maxTitles = 10

// titles returns the names of processes, such as "ranks 1-3" or "server 0, worker 2".
func (p reporter) titles(ranks []int) string {
	if p.spec.o.Nodes == nil && p.spec.o.Elastic == nil {
		return topo.FormatRanks(ranks)
	}
	var all []string
	for _, r := range ranks[:min(len(ranks), maxTitles)] {
		all = append(all, p.ranks[r].title)
	}
	text := strings.Join(all, ", ")
	if more := len(ranks) - len(all); more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

// restarts returns a text about the last restarts, or "" if there were none.
func (p reporter) restarts(all []Restart) string {
	if len(all) == 0 {
		return ""
	}
	var b strings.Builder
	fmt.Fprintf(&b, "hvdrun: restarts of nodes: %d\n", len(all))
	last := all[max(0, len(all)-maxRestartLines):]
	if more := len(all) - len(last); more > 0 {
		fmt.Fprintf(&b, "  (%d earlier ones are not shown)\n", more)
	}
	for _, r := range last {
		where := ""
		if p.spec.several {
			where = " on " + r.Exit.Host
		}
		fmt.Fprintf(&b, "  %s at %s: %s, pid %d%s, at %s\n", p.ranks[r.Rank].title, r.At.Format(clock),
			r.Exit.Describe(), r.Exit.PID, where, r.Exit.At.Format(clock))
	}
	return b.String()
}

// left returns the names of the processes that have not ended.
func (p reporter) left() string {
	var ranks []int
	for _, k := range p.ranks {
		if !k.gone {
			ranks = append(ranks, k.number)
		}
	}
	return p.titles(ranks)
}

// processes returns a clause for each rank that says what the launcher knows about its process.
func (p reporter) processes() []string {
	known := make([]string, len(p.ranks))
	for r, k := range p.ranks {
		where := ""
		if p.spec.several {
			where = " on host " + k.exit.Host
		}
		switch e := &k.exit; {
		case k.ended:
			known[r] = fmt.Sprintf("%s, at %s%s", e.Describe(), e.At.Format(clock), k.restarted())
		case e.PID == 0:
			known[r] = "its command has not been started yet" + where
		case !k.conn.local:
			known[r] = fmt.Sprintf("process %d%s has not ended", e.PID, where)
		default:
			known[r] = fmt.Sprintf("process %d%s %s%s", e.PID, where, activity(e.PID), k.restarted())
		}
	}
	return known
}

// activity returns a clause that says what a process on this host is doing according to the kernel.
func activity(pid int) string {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	// The state follows the name, which may contain any character (proc_pid_stat(5)).
	at := bytes.LastIndexByte(stat, ')')
	if err != nil || at < 0 || at+2 >= len(stat) {
		return "has just ended"
	}
	switch stat[at+2] {
	case 'T':
		return "is stopped by a signal"
	case 't':
		return "is stopped by a debugger"
	case 'D':
		return "is blocked in the kernel, on a disk or a network file system"
	case 'Z', 'X':
		return "has just ended"
	case 'R':
		return "is running"
	}
	return "is sleeping"
}
