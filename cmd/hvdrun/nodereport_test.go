package main

import (
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
		n.Operations = []trace.Operations{{Kind: message.Push, Durations: d}}
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
		{What: "barrier of group 4", Time: 100 * time.Millisecond, Waiting: []string{"worker 0"},
			Missing: []string{"worker 1", "worker 2"}},
		{What: "Clock", Time: 100*time.Millisecond - 1, Waiting: []string{"worker 0"}, Missing: []string{"worker 1"}},
	}
	all[4].Returned = true
	known := []string{"", "", "", "", "", "it was killed by SIGKILL"}
	const want = `hvdrun: SIGQUIT
Worker 2 did not answer: it was killed by SIGKILL.
Barrier of group 4: worker 0 has waited 100ms for worker 1 and worker 2.
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
