package main

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/launch"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/trace"
)

// nodeState returns the state of a node that has ended requests, which took the given time each.
func nodeState(name string, requests int, each time.Duration, peers ...trace.Peer) *trace.Node {
	role, _, _ := strings.Cut(name, " ")
	n := &trace.Node{Name: name, Role: role, Up: 20 * time.Second, Final: true, Peers: peers}
	var d trace.Histogram
	for range requests {
		d.Add(each)
	}
	if requests > 0 {
		n.Operations = []trace.NodeOperations{{Kind: message.Push, Durations: d}}
	}
	return n
}

// answers returns what a worker has counted about a server that has answered 3 requests.
func answers(server string, each time.Duration, bytes uint64) trace.Peer {
	return trace.Peer{Name: server, Responses: 3, ResponseTime: 3 * each, SentBytes: bytes, Resent: 1}
}

// TestNodeReport checks the report on made states: who waits for whom, which nodes are late, and the table.
func TestNodeReport(t *testing.T) {
	r := &nodeReporter{reporter: &reporter{size: 6}, nodes: &launch.Nodes{Servers: 2, Workers: 3}}
	all := map[int]*trace.Node{
		0: nodeState("scheduler", 0, 0, trace.Peer{Name: "worker 1", HeldUp: 2 * time.Second},
			trace.Peer{Name: "server 1", HeldUp: 264 * time.Microsecond}),
		1: nodeState("server 0", 6, time.Millisecond, trace.Peer{Name: "worker 0", SentBytes: 600}),
		2: nodeState("server 1", 6, 300*time.Millisecond, trace.Peer{Name: "worker 0", SentBytes: 600, Resent: 2}),
		3: nodeState("worker 0", 3, 400*time.Millisecond, answers("server 0", 2*time.Millisecond, 300),
			answers("server 1", 400*time.Millisecond, 300)),
		4: nodeState("worker 1", 3, 900*time.Millisecond, answers("server 0", 4*time.Millisecond, 300),
			answers("server 1", 900*time.Millisecond, 300)),
	}
	all[0].Waits = []trace.NodeWait{
		{What: "barrier of group 4", Time: waitTime, Waiting: []string{"worker 0"},
			Missing: []string{"worker 1", "worker 2"}},
		{What: "Clock", Time: waitTime - 1, Waiting: []string{"worker 0"}, Missing: []string{"worker 1"}},
	}
	all[4].Returned = true
	known := []string{"", "", "", "", "", "it was killed by SIGKILL"}
	const want = `hvdrun: SIGQUIT
Barrier of group 4: worker 0 has waited 100ms for worker 1 and worker 2.
Worker 2 did not answer: it was killed by SIGKILL.
Server 1 was late: workers waited 650ms for its responses on average, and 3ms for those of other servers ` +
		`(it handled a request in 300ms, they in 1ms; a request and its response had 100 B, theirs 100 B; it ` +
		`sent 2 messages again).
Worker 1 was late: others waited 2s only for it, in barriers or in Clock (its pushes and pulls took 900ms on ` +
		`average, those of other workers 400ms).
node                  requests  mean time  response  received  sent   sent again  held up others
scheduler             0         -          -         0 B       0 B    0           -
server 0              6         1ms        3ms       0 B       600 B  0           -
server 1              6         300ms      650ms     0 B       600 B  2           264µs
worker 0              3         400ms      -         0 B       600 B  2           -
worker 1 (restarted)  3         900ms      -         0 B       600 B  2           2s
`
	rule := strings.Repeat("-", 72) + "\n"
	if got := r.text("SIGQUIT", all, known, false, nil); got != rule+want+rule {
		t.Errorf("got the report\n%s\nwant\n%s", got, rule+want+rule)
	}
}

// TestLateness checks from which times on a node is late.
func TestLateness(t *testing.T) {
	const up = 20 * time.Second
	server := func(response time.Duration, bytes uint64) *nodeLine {
		return &nodeLine{requests: 1, responses: 1, response: response, sent: bytes}
	}
	worker := func(heldUp time.Duration) *nodeLine { return &nodeLine{requests: 1, heldUp: heldUp} }
	for _, c := range []struct {
		name   string
		node   *nodeLine
		others []*nodeLine
		late   bool
	}{
		{"twice", server(2*time.Second, 10), []*nodeLine{server(time.Second, 10)}, true},
		{"less than twice", server(2*time.Second-time.Millisecond*10, 10), []*nodeLine{server(time.Second, 10)}, false},
		{"three times the size", server(2*time.Second, 30), []*nodeLine{server(time.Second, 10)}, false},
		{"six times for three times the size", server(6*time.Second, 30), []*nodeLine{server(time.Second, 10)}, true},
		{"a third of the size", server(time.Second, 10), []*nodeLine{server(700*time.Millisecond, 30)}, false},
		{"lateTime", server(lateTime+time.Microsecond, 10), []*nodeLine{server(time.Microsecond, 10)}, true},
		{"less than lateTime", server(lateTime, 10), []*nodeLine{server(time.Microsecond, 10)}, false},
		{"the mean of others", server(2*time.Second, 10),
			[]*nodeLine{server(time.Second, 10), server(2*time.Second, 10)}, false},
		{"the only one", server(time.Hour, 10), nil, false},
		{"share", worker(time.Second), []*nodeLine{worker(0)}, true},
		{"less than the share", worker(time.Second - 1), []*nodeLine{worker(0)}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := c.node.lateness(slices.Concat([]*nodeLine{c.node}, c.others), up)
			if (len(got) > 0) != c.late {
				t.Errorf("got %q, want late: %v", got, c.late)
			}
		})
	}
	// At the start of a job, heldUpTime is more than the share.
	for heldUp, late := range map[time.Duration]bool{heldUpTime - 1: false, heldUpTime: true} {
		if got := worker(heldUp).lateness(nil, time.Second); (len(got) > 0) != late {
			t.Errorf("others waited %v: got %q, want late: %v", heldUp, got, late)
		}
	}
}
