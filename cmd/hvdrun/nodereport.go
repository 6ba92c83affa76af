package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/joblink"
	"github.com/gohvd/gohvd/internal/launch"
	"github.com/gohvd/gohvd/internal/logs"
	"github.com/gohvd/gohvd/internal/recorder"
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
	// A node is late if it has held up the others for heldUpTime and a heldUpShare-th of the job's time.
	heldUpTime  = 100 * time.Millisecond
	heldUpShare = 20
	// answerTime is how long a node that others blame may take to answer hvdrun. They have waited for it for
	// the heartbeat timeout, or for the time limit of Start.
	answerTime = time.Second
	// waitTime is the time from which on a report shows that a node waits.
	waitTime = 100 * time.Millisecond
)

// nodeReporter makes reports about the nodes of a parameter server, for launch.Inquiry.
type nodeReporter struct {
	*reporter
	nodes *launch.Nodes
}

func (r *nodeReporter) inquiry() *launch.Inquiry {
	return &launch.Inquiry{Survey: r.survey, Epilogue: r.epilogue}
}

// restarted forgets what the ended process of a rank has sent.
func (r *reporter) restarted(rank int) {
	r.ranks.Restarted(rank)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.kept -= len(r.failures[rank])
	delete(r.failures, rank)
}

// hung implements launch.Options.Hung. If the nodes that others blame answer, and still do a second later,
// they have not failed, and the verdict counts only until there is another one. The network may drop the
// packets between two nodes.
func (r *nodeReporter) hung(ctx context.Context) (nodes []int, v joblink.Verdict) {
	answered := time.Time{} // time of the last verdict that names only nodes that have answered
	for {
		v, ok := r.ranks.Accusation(ctx)
		if !ok {
			return nil, v
		}
		ask, cancel := context.WithTimeout(ctx, answerTime)
		_, missing, err := r.ranks.Ask(ask, joblink.Node, v.Ranks...)
		if err == nil && len(missing) == 0 {
			dial.Pause(ask, answerTime, nil)
		}
		cancel()
		switch {
		case ctx.Err() != nil || err != nil:
			return nil, v
		case len(missing) > 0 && slices.Equal(r.ranks.Accused(), v.Ranks): // nobody has taken it back
			return missing, v
		case answered.Equal(v.At):
			r.ranks.Doubt(v)
		}
		answered = v.At
	}
}

// accused implements launch.Options.Accused.
func (r *nodeReporter) accused() (nodes []int) {
	for _, rank := range r.ranks.Accused() {
		nodes = append(nodes, int(rank))
	}
	return nodes
}

// survey asks all nodes for their state and returns a report about it.
func (r *nodeReporter) survey(ctx context.Context, why string, known []string) string {
	ctx, cancel := context.WithTimeout(ctx, surveyTime)
	defer cancel()
	begun := time.Now()
	answers, _, err := r.ranks.Ask(ctx, joblink.Node)
	all := r.read(answers)
	title := fmt.Sprintf("%s: %d of %d nodes answered, in %v", logs.Plain(why), len(all), r.size,
		time.Since(begun).Round(time.Millisecond))
	return r.text(title, all, known, false, err)
}

// epilogue returns a report about the states that the nodes have sent at their end, or "" if there are none.
func (r *nodeReporter) epilogue(known []string, _ []int, _ bool) string {
	r.close()
	r.mu.Lock()
	defer r.mu.Unlock()
	all := r.read(r.failures)
	if len(all) == 0 {
		return ""
	}
	final := 0
	for _, n := range all {
		if n.Final {
			final++
		}
	}
	title := fmt.Sprintf("the nodes of the job, of which %d of %d have reported at their end", final, r.size)
	return r.text(title, all, known, true, r.ranks.Err())
}

// read decodes the states of nodes, by the number of the process. A malformed state is left out.
func (r *nodeReporter) read(bodies map[int][]byte) map[int]*trace.Node {
	all := make(map[int]*trace.Node)
	for process := range r.size {
		// A node that has not joined the job yet has a role but no rank.
		name := r.nodes.Name(process)
		role, _, _ := strings.Cut(name, " ")
		n, err := trace.DecodeNode(bodies[process])
		if err == nil && (n.Name == name || n.Name == role) {
			all[process] = n
		}
	}
	return all
}

// nodeLine is what a report shows of a node.
type nodeLine struct {
	name           string
	returned       bool
	requests       uint64        // pushes and pulls that the node has made or handled
	time           time.Duration // sum of their times
	responses      uint64        // of a server to workers
	response       time.Duration // sum of the times that the workers waited for them
	sent, received uint64
	resent         uint64
	heldUp         time.Duration
}

// lineOf returns what a report shows of a node. all has all nodes.
func lineOf(n *trace.Node, all map[int]*trace.Node) *nodeLine {
	l := &nodeLine{name: n.Name, returned: n.Returned}
	for i := range n.Operations {
		d := &n.Operations[i].Durations
		l.requests += d.Count()
		l.time += d.Sum
	}
	for i := range n.Peers {
		p := &n.Peers[i]
		l.sent, l.received, l.resent = l.sent+p.SentBytes, l.received+p.ReceivedBytes, l.resent+p.Resent
	}
	for _, other := range all {
		for i := range other.Peers {
			if p := &other.Peers[i]; p.Name == n.Name {
				l.responses, l.response = l.responses+p.Responses, l.response+p.ResponseTime
				l.heldUp += p.HeldUp
			}
		}
	}
	return l
}

// mean returns the mean of n durations, or 0 if there are none.
func mean(sum time.Duration, n uint64) time.Duration { return short(sum / time.Duration(max(n, 1))) }

// bytes returns the mean size of a request and its response.
func (l *nodeLine) bytes() uint64 { return (l.sent + l.received) / max(l.requests, 1) }

// lateness returns in which ways the node was late, compared with the other nodes of its role. up is the time
// of the job.
func (l *nodeLine) lateness(role []*nodeLine, up time.Duration) (late []string) {
	var rest nodeLine
	for _, o := range role {
		if o != l {
			rest.requests, rest.time = rest.requests+o.requests, rest.time+o.time
			rest.responses, rest.response = rest.responses+o.responses, rest.response+o.response
			rest.sent, rest.received = rest.sent+o.sent, rest.received+o.received
		}
	}
	own, others := mean(l.response, l.responses), mean(rest.response, rest.responses)
	larger := max(1, float64(l.bytes())/float64(max(rest.bytes(), 1)))
	if rest.responses > 0 && own-others >= lateTime && float64(own) >= lateFactor*larger*float64(others) {
		late = append(late, fmt.Sprintf("workers waited %v for its responses on average, and %v for those of other "+
			"servers (it handled a request in %v, they in %v; a request and its response had %s, theirs %s; it sent "+
			"%d messages again)", own, others, mean(l.time, l.requests), mean(rest.time, rest.requests),
			size(l.bytes()), size(rest.bytes()), l.resent))
	}
	if l.heldUp < max(heldUpTime, up/heldUpShare) {
		return late
	}
	text := fmt.Sprintf("others waited %v only for it, in barriers or in Clock", short(l.heldUp))
	if rest.requests > 0 && l.requests > 0 && l.responses == 0 {
		text += fmt.Sprintf(" (its pushes and pulls took %v on average, those of other workers %v)",
			mean(l.time, l.requests), mean(rest.time, rest.requests))
	}
	return append(late, text)
}

// text returns a report. known says what is known about the process of each node, and atEnd that the job has
// ended.
func (r *nodeReporter) text(title string, all map[int]*trace.Node, known []string, atEnd bool,
	err error) string {
	var b strings.Builder
	fmt.Fprintf(&b, "hvdrun: %s\n", title)
	r.writeProblems(&b, all, known, atEnd)
	columns := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(columns, "node\trequests\tmean time\tresponse\treceived\tsent\tsent again\theld up others")
	for _, role := range r.roles(all) {
		for _, l := range shown(role) {
			name := l.name
			if l.returned {
				name += " (restarted)"
			}
			fmt.Fprintf(columns, "%s\t%d\t%s\t%s\t%s\t%s\t%d\t%s\n", name, l.requests,
				cell(mean(l.time, l.requests)), cell(mean(l.response, l.responses)), size(l.received),
				size(l.sent), l.resent, cell(short(l.heldUp)))
		}
		if more := len(role) - maxNodeLines; more > 0 {
			fmt.Fprintf(columns, "... and %d more\n", more)
		}
	}
	columns.Flush() //nolint:errcheck // a strings.Builder returns no errors
	if r.dir != "" {
		_, failed := recorder.WriteText(r.dir, "report.txt", []byte(b.String()))
		err = errors.Join(err, failed)
	}
	return r.framed(b.String(), err)
}

// roles returns what a report shows of the scheduler, the servers and the workers.
func (r *nodeReporter) roles(all map[int]*trace.Node) (roles [3][]*nodeLine) {
	for process := range r.size {
		if n := all[process]; n != nil {
			role := min(process, 1)
			if process > r.nodes.Servers {
				role = 2
			}
			roles[role] = append(roles[role], lineOf(n, all))
		}
	}
	return roles
}

// shown returns the nodes of a role that a report shows: of too many, those that took longest.
func shown(role []*nodeLine) []*nodeLine {
	if len(role) <= maxNodeLines {
		return role
	}
	role = slices.Clone(role)
	slices.SortStableFunc(role, func(a, b *nodeLine) int {
		return cmp.Or(cmp.Compare(b.heldUp, a.heldUp), cmp.Compare(b.response, a.response),
			cmp.Compare(b.time, a.time))
	})
	return role[:maxNodeLines]
}

// writeProblems writes which nodes have sent no state, which ones wait, and which ones are late.
func (r *nodeReporter) writeProblems(b *strings.Builder, all map[int]*trace.Node, known []string,
	atEnd bool) {
	absent := "did not answer"
	if atEnd {
		absent = "did not report at its end"
	}
	var up time.Duration
	for process := range r.size {
		n := all[process]
		if n == nil || atEnd && !n.Final {
			fmt.Fprintf(b, "%s %s: %s", capital(r.nodes.Name(process)), absent, known[process])
			if n == nil {
				b.WriteString(".\n")
				continue
			}
			fmt.Fprintf(b, "; the table has its state %v after its start.\n", short(n.Up))
		}
		up = max(up, n.Up)
		for _, w := range n.Waits {
			if w.Time < waitTime {
				continue
			}
			have := "has"
			if len(w.Waiting) > 1 {
				have = "have"
			}
			fmt.Fprintf(b, "%s: %s %s waited %s for %s.\n", capital(logs.Plain(w.What)), listed(w.Waiting), have,
				short(w.Time), listed(w.Missing))
		}
	}
	for _, role := range r.roles(all) {
		for _, l := range role {
			for _, text := range l.lateness(role, up) {
				fmt.Fprintf(b, "%s was late: %s.\n", capital(l.name), text)
			}
		}
	}
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

func capital(text string) string { return strings.ToUpper(text[:1]) + text[1:] }

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
