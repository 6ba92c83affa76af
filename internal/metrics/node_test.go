package metrics_test

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/metrics"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/trace"
)

// someNode returns statistics of a node in which every metric has another value.
func someNode() trace.Node {
	return trace.Node{Name: "server 1", Role: "server", Operations: []trace.Operations{
		{Kind: message.Pull, Durations: histogramOf(time.Millisecond, 3*time.Millisecond)},
	}, Peers: []trace.Peer{
		{Name: "scheduler", Requests: 1, SentBytes: 100},
		{Name: "worker 0", Requests: 20, Waiting: 3, SentBytes: 4000, ReceivedBytes: 5000, Resent: 6,
			Duplicates: 7, LagMessages: 8, LagBytes: 9000, Responses: 11,
			ResponseTime: 12 * time.Second, HeldUp: 13 * time.Second},
	}, Unreplicated: 10}
}

// TestNode checks the metrics of a node of a parameter server, and that Prometheus's linter accepts them.
func TestNode(t *testing.T) {
	text, err := metrics.NodeText(someNode)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "hvd_ps_") && !strings.Contains(line, "_bucket") {
			got = append(got, line)
		}
	}
	const want = `hvd_ps_duplicate_messages_total{peer="scheduler"} 0
hvd_ps_duplicate_messages_total{peer="worker 0"} 7
hvd_ps_held_up_seconds_total{peer="scheduler"} 0
hvd_ps_held_up_seconds_total{peer="worker 0"} 13
hvd_ps_node_info{node="server 1"} 1
hvd_ps_received_bytes_total{peer="scheduler"} 0
hvd_ps_received_bytes_total{peer="worker 0"} 5000
hvd_ps_replication_lag_bytes{peer="scheduler"} 0
hvd_ps_replication_lag_bytes{peer="worker 0"} 9000
hvd_ps_replication_lag_messages{peer="scheduler"} 0
hvd_ps_replication_lag_messages{peer="worker 0"} 8
hvd_ps_request_duration_seconds_sum{kind="pull",role="server"} 0.004
hvd_ps_request_duration_seconds_count{kind="pull",role="server"} 2
hvd_ps_requests_total{peer="scheduler"} 1
hvd_ps_requests_total{peer="worker 0"} 20
hvd_ps_resent_messages_total{peer="scheduler"} 0
hvd_ps_resent_messages_total{peer="worker 0"} 6
hvd_ps_response_seconds_total{peer="scheduler"} 0
hvd_ps_response_seconds_total{peer="worker 0"} 12
hvd_ps_responses_total{peer="scheduler"} 0
hvd_ps_responses_total{peer="worker 0"} 11
hvd_ps_sent_bytes_total{peer="scheduler"} 100
hvd_ps_sent_bytes_total{peer="worker 0"} 4000
hvd_ps_unreplicated_ranges 10
hvd_ps_waiting_requests{peer="scheduler"} 0
hvd_ps_waiting_requests{peer="worker 0"} 3
`
	if s := strings.Join(got, ""); s != want {
		t.Errorf("got\n%s\nwant\n%s", s, want)
	}
	if out, content := testnet.Promtool(t, "", string(text), "check", "metrics"); !content || out != "" {
		t.Errorf("promtool: %s", out)
	}
	body := request(metrics.NodeHandler(someNode), "/metrics").Body.String()
	if line, _, _ := strings.Cut(want, "\n"); !strings.Contains(body, line) {
		t.Errorf("the handler serves %s", body)
	}
}

// The metrics of a node with as many peers as hvdrun can start, with large values, are not refused.
func TestNodeWithManyPeers(t *testing.T) {
	n := trace.Node{Name: "scheduler", Role: "scheduler"}
	for i := range 4095 { // launch.MaxRanks - 1
		const most = math.MaxInt64
		n.Peers = append(n.Peers, trace.Peer{Name: fmt.Sprint("worker ", i), Requests: most, Waiting: most,
			SentBytes: most, ReceivedBytes: most, Resent: most, Duplicates: most, LagMessages: most,
			LagBytes: most, Responses: most, ResponseTime: most, HeldUp: most})
	}
	text, err := metrics.NodeText(func() trace.Node { return n })
	if err != nil || len(text) > metrics.MaxText {
		t.Errorf("got %d bytes, %v, want at most %d", len(text), err, metrics.MaxText)
	}
	t.Logf("%d bytes", len(text))
}
