package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gohvd/gohvd/internal/analysis"
	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/joblink"
	"github.com/gohvd/gohvd/internal/launch"
	"github.com/gohvd/gohvd/internal/logs"
	"github.com/gohvd/gohvd/internal/recorder"
	"github.com/gohvd/gohvd/internal/trace"
)

// answerTime is how long a node that others blame may take to answer hvdrun. They have waited for it for
// the heartbeat timeout, or for the time limit of Start.
const answerTime = time.Second

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

// text returns a report about the states of nodes. known says what is known about the process of each node,
// and atEnd that the job has ended.
func (r *nodeReporter) text(title string, all map[int]*trace.Node, known []string, atEnd bool,
	err error) string {
	var b strings.Builder
	fmt.Fprintf(&b, "hvdrun: %s\n", title)
	absent := "did not answer"
	if atEnd {
		absent = "did not report at its end"
	}
	var nodes []*trace.Node
	for process := range r.size {
		n, name := all[process], r.nodes.Name(process)
		if n != nil {
			nodes = append(nodes, n)
		}
		if n == nil || atEnd && !n.Final {
			fmt.Fprintf(&b, "%s %s: %s", strings.ToUpper(name[:1])+name[1:], absent, known[process])
			if n != nil {
				fmt.Fprintf(&b, "; the table has its state %v after its start", n.Up.Round(time.Millisecond))
			}
			b.WriteString(".\n")
		}
	}
	b.WriteString(analysis.AnalyseNodes(nodes).Text())
	if r.dir != "" {
		_, failed := recorder.WriteText(r.dir, "report.txt", []byte(b.String()))
		err = errors.Join(err, failed)
	}
	return r.framed(b.String(), err)
}
