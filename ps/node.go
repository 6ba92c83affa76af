package ps

import (
	"context"
	"fmt"
	"log/slog"
	"slices"

	"github.com/gohvd/gohvd/internal/ps/van"
)

// Role is what a node does in the job. DMLC_ROLE has the same values.
type Role string

// These are the roles. A job has one scheduler, which counts the nodes and notices which of them have died,
// and any numbers of servers, which have the values, and of workers, which push and pull them.
const (
	Scheduler Role = "scheduler"
	Server    Role = "server"
	Worker    Role = "worker"
)

// NodeID is the id of a node, or a group of nodes. The scheduler has the id 1, the server with rank r the id
// 8+2r, and the worker with rank r the id 9+2r. If a call takes a group, the id of a node stands for the
// group of this node only.
type NodeID int

// These are the groups. A sum of groups is their union: ServerGroup+WorkerGroup has all servers and workers.
const (
	SchedulerGroup NodeID = 1
	ServerGroup    NodeID = 2
	WorkerGroup    NodeID = 4
	AllGroup       NodeID = SchedulerGroup + ServerGroup + WorkerGroup
)

// String returns a name of the node, such as "worker 3", or of the group, such as "group 6".
func (id NodeID) String() string {
	if id > AllGroup || id == SchedulerGroup {
		return van.Name(int(id))
	}
	return fmt.Sprintf("group %d", int(id))
}

// Config configures Join. The zero Config takes all settings from the environment.
type Config struct {
	// Settings maps the names of settings, such as DMLC_ROLE, to values. They override the environment.
	Settings map[string]string
	// Customers is the number of workers in this process, 1 if it is 0. Each counts for DMLC_NUM_WORKER.
	Customers int
	// Async makes Join return when this process is connected, without waiting for the other nodes (StartAsync
	// of ps-lite).
	Async bool
	// Logger receives the log. If it is nil, the log goes to stderr.
	Logger *slog.Logger

	faults func(from, to van.Process, m *van.Message, deliver func(*van.Message) error) error
}

// Node is a node of a job. If a process has several workers (Config.Customers), each is a Node. The methods
// whose documentation says "this process" act for all of them. The methods of a Node are safe for concurrent
// use.
type Node struct {
	*postoffice
	customer int
}

// Join joins the job that the settings describe, and returns the node of this process, or its first one if it
// has several. It waits until all nodes of the job have joined, unless Config.Async is set. If a process of
// the job has ended, Join takes its place and its ids, and does not wait for the others. A process may join
// again after it has left, and may take part in several jobs or several times in the same one: each call of
// Join makes a node of its own.
//
// If a node ends before all have joined, Join waits HVD_RECOVERY_SECONDS for its return, and fails if it does
// not return.
//
// The program must call Finalize, Close or Fail in the end.
func Join(ctx context.Context, cfg Config) (*Node, error) {
	p, err := start(ctx, cfg)
	if err != nil {
		return nil, err
	}
	if cfg.Async || p.IsRecovery() {
		return p.nodes[0], nil // the barrier of the start is over for a process that returns
	}
	if err := p.meet(func(c int) error { return p.meetAll(ctx, c) }); err != nil {
		p.stop()
		return nil, fmt.Errorf("ps: join: %w", public(err))
	}
	return p.nodes[0], nil
}

// Customers returns the nodes of this process, Config.Customers of them. The first is the one that Join has
// returned.
func (n *Node) Customers() []*Node { return slices.Clone(n.nodes) }

// ID returns the id of this node.
func (n *Node) ID() NodeID { return NodeID(n.van.IDs()[n.customer]) }

// Rank returns the rank of this node among the nodes of its role.
func (n *Node) Rank() int { return van.Rank(int(n.ID())) }

// Barrier waits until every node of the group has called Barrier for it, until ctx ends, or until
// HVD_OPERATION_TIMEOUT_SECONDS have passed. If a node of the group dies or has left the job, the error is a
// *NodeError. A node can be in each barrier once: a second call meanwhile returns a *UsageError.
func (n *Node) Barrier(ctx context.Context, group NodeID) error {
	if limit := n.set.OperationTimeout; limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, limit, errTimeout)
		defer cancel()
	}
	if err := n.barrier(ctx, n.customer, int(group)); err != nil {
		return fmt.Errorf("ps: %w", public(err))
	}
	return nil
}
