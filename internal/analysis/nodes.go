package analysis

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/gohvd/gohvd/internal/logs"
	"github.com/gohvd/gohvd/internal/trace"
)

const (
	// maxNodeLines is the maximum number of nodes of a role in a report. Of more nodes, it shows those that
	// took longest.
	maxNodeLines = 32
	// A server is late if the workers wait for its responses lateFactor times as long as for those of the
	// other servers, in relation to their size if they are larger, and at least lateTime longer.
	lateFactor = 2
	lateTime   = 100 * time.Microsecond
	// leastHeld is the shortest time for which a node that has held up others is late. A job may be shorter
	// than the time by which its nodes start one after the other.
	leastHeld = 100 * time.Millisecond
	// leastWait is the time from which on a report shows that a node waits.
	leastWait = 100 * time.Millisecond
)

// NodeFindings is the result of comparing the states of the nodes of a parameter server: which nodes wait for
// which other nodes, and which ones were late.
type NodeFindings struct {
	up    time.Duration // of the job
	roles [][]*NodeTotals
	waits []trace.NodeWait
}

// NodeTotals has the statistics of a node since its start.
type NodeTotals struct {
	Name     string
	Returned bool // the node has taken the place of one that has ended
	// Requests is the number of pushes and pulls that the node has made or handled, and Time the sum of their
	// times.
	Requests uint64
	Time     time.Duration
	// Responses is the number of responses of a server to workers, and Response the sum of the times that the
	// workers waited for them.
	Responses uint64
	Response  time.Duration
	// Sent and Received are numbers of bytes. Resent is the number of messages that were sent again.
	Sent, Received uint64
	Resent         uint64
	// HeldUp is how long others have waited only for the node.
	HeldUp time.Duration
}

// Waits returns which nodes wait for which nodes.
func (f *NodeFindings) Waits() []trace.NodeWait { return f.waits }

// Nodes returns the statistics of all nodes.
func (f *NodeFindings) Nodes() []*NodeTotals { return slices.Concat(f.roles...) }

// AnalyseNodes compares the states of nodes. Nodes of one role follow each other.
func AnalyseNodes(nodes []*trace.Node) *NodeFindings {
	f, role := new(NodeFindings), ""
	lines := make(map[string]*NodeTotals)
	for _, n := range nodes {
		f.up = max(f.up, n.Up)
		f.waits = append(f.waits, n.Waits...)
		l := &NodeTotals{Name: n.Name, Returned: n.Returned}
		lines[n.Name] = l
		if len(f.roles) == 0 || n.Role != role {
			f.roles, role = append(f.roles, nil), n.Role
		}
		last := &f.roles[len(f.roles)-1]
		*last = append(*last, l)
		for i := range n.Operations {
			d := &n.Operations[i].Durations
			l.Requests += d.Count()
			l.Time += d.Sum
		}
		for i := range n.Peers {
			p := &n.Peers[i]
			l.Sent, l.Received, l.Resent = l.Sent+p.SentBytes, l.Received+p.ReceivedBytes, l.Resent+p.Resent
		}
	}
	for _, n := range nodes {
		for i := range n.Peers {
			p := &n.Peers[i]
			if l := lines[p.Name]; l != nil {
				l.Responses, l.Response = l.Responses+p.Responses, l.Response+p.ResponseTime
				l.HeldUp += p.HeldUp
			}
		}
	}
	return f
}

// mean returns the mean of n durations, or 0 if there are none.
func mean(sum time.Duration, n uint64) time.Duration { return short(sum / time.Duration(max(n, 1))) }

// bytes returns the mean size of a request and its response.
func (l *NodeTotals) bytes() uint64 { return (l.Sent + l.Received) / max(l.Requests, 1) }

// lateness returns in which ways the node was late, compared with the other nodes of its role. up is the time
// of the job.
func (l *NodeTotals) lateness(role []*NodeTotals, up time.Duration) (late []string) {
	var rest NodeTotals
	for _, o := range role {
		if o != l {
			rest.Requests, rest.Time = rest.Requests+o.Requests, rest.Time+o.Time
			rest.Responses, rest.Response = rest.Responses+o.Responses, rest.Response+o.Response
			rest.Sent, rest.Received = rest.Sent+o.Sent, rest.Received+o.Received
		}
	}
	own, others := mean(l.Response, l.Responses), mean(rest.Response, rest.Responses)
	larger := max(1, float64(l.bytes())/float64(max(rest.bytes(), 1)))
	if rest.Responses > 0 && own-others >= lateTime && float64(own) >= lateFactor*larger*float64(others) {
		late = append(late, fmt.Sprintf("workers waited %v for its responses on average, and %v for those of other "+
			"servers (it handled a request in %v, they in %v; a request and its response had %s, theirs %s; it sent "+
			"%d messages again)", own, others, mean(l.Time, l.Requests), mean(rest.Time, rest.Requests),
			size(l.bytes()), size(rest.bytes()), l.Resent))
	}
	if l.HeldUp < leastHeld || !(Span{Time: up}).Long(l.HeldUp) {
		return late
	}
	text := fmt.Sprintf("others waited %v only for it, in barriers or in Clock", short(l.HeldUp))
	if rest.Requests > 0 && l.Requests > 0 && l.Responses == 0 {
		text += fmt.Sprintf(" (its pushes and pulls took %v on average, those of other workers %v)",
			mean(l.Time, l.Requests), mean(rest.Time, rest.Requests))
	}
	return append(late, text)
}

// Text returns the report as text for people: which nodes wait, which ones were late, and a table of all
// nodes.
func (f *NodeFindings) Text() string {
	var b strings.Builder
	for _, w := range f.waits {
		if w.Time < leastWait {
			continue
		}
		fmt.Fprintln(&b, NodeWaitText(&w))
	}
	for _, role := range f.roles {
		for _, l := range role {
			for _, text := range l.lateness(role, f.up) {
				fmt.Fprintf(&b, "%s was late: %s.\n", capital(l.Name), text)
			}
		}
	}
	columns := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(columns, "node\trequests\tmean time\tresponse\treceived\tsent\tsent again\theld up others")
	for _, role := range f.roles {
		for _, l := range longest(role) {
			name := l.Name
			if l.Returned {
				name += " (restarted)"
			}
			fmt.Fprintf(columns, "%s\t%d\t%s\t%s\t%s\t%s\t%d\t%s\n", name, l.Requests,
				cell(mean(l.Time, l.Requests)), cell(mean(l.Response, l.Responses)), size(l.Received),
				size(l.Sent), l.Resent, cell(short(l.HeldUp)))
		}
		if more := len(role) - maxNodeLines; more > 0 {
			fmt.Fprintf(columns, "... and %d more\n", more)
		}
	}
	columns.Flush() //nolint:errcheck // a strings.Builder returns no errors
	return b.String()
}

// NodeWaitText returns a sentence that says which nodes wait for which nodes.
func NodeWaitText(w *trace.NodeWait) string {
	have := "has"
	if len(w.Waiting) > 1 {
		have = "have"
	}
	return fmt.Sprintf("%s: %s %s waited %s for %s.", capital(logs.Plain(w.What)), listed(w.Waiting), have,
		short(w.Time), listed(w.Missing))
}

// longest returns the nodes of a role that a report shows: of too many, those that took longest.
func longest(role []*NodeTotals) []*NodeTotals {
	if len(role) <= maxNodeLines {
		return role
	}
	role = slices.Clone(role)
	slices.SortStableFunc(role, func(a, b *NodeTotals) int {
		return cmp.Or(cmp.Compare(b.HeldUp, a.HeldUp), cmp.Compare(b.Response, a.Response),
			cmp.Compare(b.Time, a.Time))
	})
	return role[:maxNodeLines]
}

// listed returns names in a sentence. Of many, it returns only some.
func listed(names []string) string {
	const most = 8
	if more := len(names) - most; more > 0 {
		names = append(slices.Clone(names[:most]), fmt.Sprintf("%d more", more))
	}
	text := logs.Plain(strings.Join(names, ", "))
	if at := strings.LastIndex(text, ", "); at >= 0 {
		return text[:at] + " and" + text[at+1:]
	}
	return text
}

// short rounds a duration to about three digits.
func short(d time.Duration) time.Duration {
	unit := time.Duration(1)
	for d/unit >= 1000 {
		unit *= 10
	}
	return d.Round(unit)
}

// cell returns the text of a duration in a table.
func cell(d time.Duration) string {
	if d == 0 {
		return "-"
	}
	return d.String()
}

// size returns a number of bytes with about three digits.
func size(n uint64) string {
	for i, unit := range []string{"B", "kB", "MB", "GB", "TB"} {
		f := float64(n) / math.Pow(1000, float64(i))
		if f < 1000 || unit == "TB" {
			return fmt.Sprintf("%.3g %s", f, unit)
		}
	}
	return ""
}
