package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/gohvd/gohvd/internal/trace"
)

// These labels name the node of a parameter server whose metric it is, and the node at the other end.
const (
	labelNode = "node"
	labelPeer = "peer"
	labelRole = "role"
)

var nodeInfo = desc("hvd_ps_node_info",
	"1, with the role and rank of the node of a parameter server, to be joined with its other metrics.",
	labelNode)

var nodeDuration = desc("hvd_ps_request_duration_seconds",
	"Time of pushes and pulls: at a worker from the call to the completion, at a server from the arrival to the "+
		"response.", labelRole, "kind")

var nodeUnreplicated = desc("hvd_ps_unreplicated_ranges",
	"Ranges of keys, counted for each app, that this server serves and no other server has, in a job with replicas.")

// exchanged has the metrics of a node that there are for each peer.
var exchanged = []struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(*trace.Peer) float64
}{
	{desc("hvd_ps_requests_total", "Requests that this node has sent to the peer.", labelPeer),
		prometheus.CounterValue, func(p *trace.Peer) float64 { return float64(p.Requests) }},
	{desc("hvd_ps_waiting_requests", "Requests to the peer that are queued or not answered.", labelPeer),
		prometheus.GaugeValue, func(p *trace.Peer) float64 { return float64(p.Waiting) }},
	{desc("hvd_ps_sent_bytes_total", "Bytes of messages to the peer, including values in shared memory.",
		labelPeer), prometheus.CounterValue, func(p *trace.Peer) float64 { return float64(p.SentBytes) }},
	{desc("hvd_ps_received_bytes_total",
		"Bytes of messages from the peer, including values in shared memory.", labelPeer),
		prometheus.CounterValue, func(p *trace.Peer) float64 { return float64(p.ReceivedBytes) }},
	{desc("hvd_ps_resent_messages_total",
		"Messages that were sent to the peer again, because it had not acknowledged them.", labelPeer),
		prometheus.CounterValue, func(p *trace.Peer) float64 { return float64(p.Resent) }},
	{desc("hvd_ps_duplicate_messages_total", "Messages from the peer that had arrived before.", labelPeer),
		prometheus.CounterValue, func(p *trace.Peer) float64 { return float64(p.Duplicates) }},
	{desc("hvd_ps_responses_total", "Responses of the peer to pushes and pulls of this node.", labelPeer),
		prometheus.CounterValue, func(p *trace.Peer) float64 { return float64(p.Responses) }},
	{desc("hvd_ps_response_seconds_total",
		"Sum of the times from the calls of pushes and pulls to the responses of the peer.", labelPeer),
		prometheus.CounterValue, func(p *trace.Peer) float64 { return p.ResponseTime.Seconds() }},
	{desc("hvd_ps_held_up_seconds_total",
		"Time during which nodes have waited in barriers or in Clock only for the peer. Only the scheduler knows it.",
		labelPeer), prometheus.CounterValue, func(p *trace.Peer) float64 { return p.HeldUp.Seconds() }},
	{desc("hvd_ps_replication_lag_messages", "Messages for the replicas of the peer that it has not applied yet.",
		labelPeer), prometheus.GaugeValue, func(p *trace.Peer) float64 { return float64(p.LagMessages) }},
	{desc("hvd_ps_replication_lag_bytes", "Bytes of messages for the replicas of the peer that it has not applied yet.",
		labelPeer), prometheus.GaugeValue, func(p *trace.Peer) float64 { return float64(p.LagBytes) }},
}

// nodeCollector collects the metrics of a node of a parameter server. It returns the node's statistics.
type nodeCollector func() trace.Node

func (c nodeCollector) Describe(to chan<- *prometheus.Desc) {
	to <- nodeInfo
	to <- nodeDuration
	to <- nodeUnreplicated
	for _, m := range exchanged {
		to <- m.desc
	}
}

func (c nodeCollector) Collect(to chan<- prometheus.Metric) {
	s := c()
	to <- prometheus.MustNewConstMetric(nodeInfo, prometheus.GaugeValue, 1, s.Name)
	to <- prometheus.MustNewConstMetric(nodeUnreplicated, prometheus.GaugeValue, float64(s.Unreplicated))
	for i := range s.Operations {
		op := &s.Operations[i]
		to <- newHistogram(nodeDuration, &op.Durations, s.Role, op.Kind.String())
	}
	for i := range s.Peers {
		for _, m := range exchanged {
			to <- prometheus.MustNewConstMetric(m.desc, m.kind, m.value(&s.Peers[i]), s.Peers[i].Name)
		}
	}
}
