package trace

import "github.com/gohvd/gohvd/internal/message"

// Node is the state of a node of a parameter server at one moment. Its counters begin with 0 when the node
// starts.
type Node struct {
	// Name is the node's role and rank, such as "server 1". Role is the role.
	Name, Role string
	// Operations has an element for each kind of pushes and pulls that the node has ended.
	Operations []NodeOperations
	// Peers has the processes with which the node is or was connected, sorted by id.
	Peers []Peer
	// Unreplicated is the number of ranges of keys that the node serves, counted for each app, and that no
	// other server has, in a job with replicas.
	Unreplicated int
}

// NodeOperations counts the pushes or pulls of a kind. Durations has the time of each: at a worker from the
// call to the completion, at a server from the arrival to the response.
type NodeOperations struct {
	Kind      message.Kind
	Durations Histogram
}

// Peer is what a node of a parameter server has exchanged with another process.
type Peer struct {
	// Name is the name of the first node of the process.
	Name string
	// Requests is the number of requests to the peer. Waiting is how many of them are not answered yet.
	Requests uint64
	Waiting  int
	// SentBytes and ReceivedBytes are the sizes of messages, including values in shared memory.
	SentBytes, ReceivedBytes uint64
	// Resent is the number of messages that were sent again. Duplicates is the number of messages that
	// arrived again.
	Resent, Duplicates uint64
	// LagMessages and LagBytes are the number and the size of the messages for the replicas of the peer that
	// it has not applied yet.
	LagMessages, LagBytes int
}
