package van

import (
	"context"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/secret"
)

// Config is the configuration of a Van.
type Config struct {
	// Role is the role of this process. NumWorkers and NumServers are the size of the job, which must be the
	// same at all nodes.
	Role                   Role
	NumWorkers, NumServers int
	// Customers is the number of workers in this process. It is at least 1, and 1 for other roles.
	Customers int
	// Rank is the rank that the first node of this process wants, or -1.
	Rank int
	// Root is the address of the scheduler, host:port. The scheduler listens there, or on Listen if that is
	// not empty.
	Root string
	// Host is the name or address under which other hosts reach a server. Listen is the address on which a
	// server listens, host:port.
	Host, Listen string
	// Staleness is the number of iterations by which a worker may be ahead of the slowest one, or -1 if there
	// is no bound. It must be the same at all nodes.
	Staleness int
	// Meets says that the caller enters a barrier of all nodes next, unless IsRecovery is true.
	Meets bool
	// Replicas is the number of further servers that have the values of each key, 0 or 1. It must be the same
	// at all nodes.
	Replicas int
	// Secret is the secret of the job.
	Secret secret.Secret
	// StartTimeout is the time limit of Start.
	StartTimeout time.Duration
	// HeartbeatInterval is the time between two heartbeats, and HeartbeatTimeout the time without a message
	// after which a node is dead. HeartbeatTimeout is also the time without an acknowledgement after which
	// the connection between a worker and a server has failed. If either is 0, no node dies of silence.
	HeartbeatInterval, HeartbeatTimeout time.Duration
	// Resend makes the van send messages again that were not acknowledged for ResendTimeout.
	Resend        bool
	ResendTimeout time.Duration
	// HostID identifies the memory of this host. A worker and a server with the same HostID use a Unix
	// connection and shared memory. They do not if it is empty, or with encryption or Resend.
	HostID string
	// WaterMark is the maximum number of unanswered requests to a node.
	WaterMark int
	// Verbose is 1 to log connections, and 2 to log every message.
	Verbose int
	// Log receives the log. It may be nil.
	Log *zap.Logger
	// Faults injects faults, for tests. For each message from a node it calls deliver any number of times. It
	// is called by one goroutine for each pair of processes.
	Faults func(from, to Process, m *Message, deliver func(*Message) error) error
}

// LimitStart returns a context that ends when StartTimeout has passed.
func (c *Config) LimitStart(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, c.StartTimeout,
		fmt.Errorf("the time limit of %v has passed", c.StartTimeout))
}

// shares reports whether a process may share memory with others.
func (c *Config) shares() bool {
	return c.HostID != "" && !c.Resend && !c.Secret.IsEncrypted()
}

// Process identifies a process of the job, or a connection with it. A process that takes the place of another
// one has the same id and another incarnation.
type Process struct {
	// ID is the id of the process's first node.
	ID          int
	Incarnation uint64
	// Generation is higher than that of the processes that have had the same ids before.
	Generation uint64
	// Connection is the number of a connection of this process with the process, or 0 for any connection. The
	// sender of a message and the receiver of a request have a number, others do not.
	Connection uint64
}

// Whole returns the process with any connection.
func (p Process) Whole() Process {
	p.Connection = 0
	return p
}

// Handler receives what happens at a node. Its methods must not wait for messages of other nodes.
type Handler interface {
	// Receive handles a message of the process from, which belongs to the handler from then on. There is one
	// call at a time for each process.
	Receive(from Process, m *Message)
	// Blame handles the failure of a node: it has died, or has left while nodes wait for it in a barrier or
	// have requests to it, or before such a request. It is called once, for the first such node, and the
	// calls that fail because of it return only after that. If the job does not start because nodes have not
	// registered, failed has these nodes, whose incarnations are not known.
	Blame(failed []Process, err error)
	// Lost handles the end of a node, which has died or left. It is called once for each process, and before
	// another process takes its place.
	Lost(id int, err error)
	// Restored is called when the connection with a process that had ended for this one works again.
	Restored(p Process)
	// News is called when a connection has been made or has ended, or a process has ended.
	News()
	// Tick is called regularly.
	Tick(now time.Time)
}
