package shm

import (
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

// Sharer is a transport.Mesh through which the ranks of a host share memory. Connect returns a Sharer. The
// methods are safe for concurrent use.
type Sharer interface {
	transport.Mesh
	transport.Memory

	// Group returns the ranks that share memory with this rank, including this rank, in ascending order. It
	// never changes.
	Group() []topo.Rank

	// Groups returns, for each rank of the job, the lowest rank of the group in which the rank shares memory.
	// A rank that shares no memory is the only rank of its group. The result is the same at all ranks.
	Groups() []topo.Rank

	// UnsharedReason returns the reason why the ranks of this host do not share memory. It names the ranks
	// that are the cause. If the ranks share memory, or if this rank is alone on its host, UnsharedReason
	// returns "".
	UnsharedReason() string

	// UnsharedRanks returns the ranks that UnsharedReason names, in ascending order.
	UnsharedRanks() []topo.Rank
}
