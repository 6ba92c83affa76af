package trace

import (
	"encoding/json"
	"fmt"
	"time"
)

// Node is the state of a node of a parameter server at one moment. Its counters begin with 0 when the node
// starts.
type Node struct {
	// Name is the node's role and rank, such as "server 1". Role is the role.
	Name, Role string
	// Returned says that the node has taken the place of one that has ended.
	Returned bool
	// Up is the time since the node was started. Final says that the node has left the job.
	Up    time.Duration
	Final bool
	// Operations has an element for each kind of pushes and pulls that the node has ended: at a worker with
	// the times from the call to the completion, at a server with those from the arrival to the response.
	Operations []Operations
	// Peers has the processes with which the node is or was connected, sorted by id.
	Peers []Peer
	// Unreplicated is the number of ranges of keys that the node serves, counted for each app, and that no
	// other server has, in a job with replicas.
	Unreplicated int
	// Waits has what is waited for at this moment: at the scheduler in each barrier and in Clock, at a worker
	// in the push or pull that has waited longest.
	Waits []NodeWait
}

// Encode returns the state as a node sends it to hvdrun.
func (n *Node) Encode() ([]byte, error) { return json.Marshal(n) }

// DecodeNode decodes what Encode has returned.
func DecodeNode(text []byte) (*Node, error) {
	n := new(Node)
	if err := json.Unmarshal(text, n); err != nil {
		return nil, fmt.Errorf("malformed state of a node: %w", err)
	}
	if n.Name == "" || n.Up < 0 {
		return nil, fmt.Errorf("malformed state of a node: it has the name %.64q and was started %v ago", n.Name,
			n.Up)
	}
	for i := range n.Waits {
		if n.Waits[i].What == "" {
			return nil, fmt.Errorf("malformed state of a node: %s waits in a call without a name", n.Name)
		}
	}
	return n, nil
}

// NodeWait describes that nodes wait for other nodes.
type NodeWait struct {
	// The text What names the call in which the nodes wait, such as "barrier of group 7". Time is how long
	// the first of them has waited.
	What string
	Time time.Duration
	// Waiting are the names of the nodes that wait, and Missing of those that they wait for.
	Waiting, Missing []string
}

// Peer is what a node of a parameter server has exchanged with another process.
type Peer struct {
	// ID and Name are the id and the name of the first node of the process.
	ID   int
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
	// Responses is the number of responses of the peer to pushes and pulls of a worker. ResponseTime is the
	// sum of the times from a call to the response.
	Responses    uint64
	ResponseTime time.Duration
	// HeldUp is how long others have waited in barriers and in Clock only for the peer, as the scheduler
	// knows.
	HeldUp time.Duration
}
