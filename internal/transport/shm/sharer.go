package shm

import (
	"context"

	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

// Sharer is a transport.Mesh whose ranks of one host share memory. Connect returns one.
//
// No rank can write the memory of another: memory of peers is mapped read-only. All slices stay valid until
// the lane is released or the mesh is closed, also if their owner dies. The methods are safe for concurrent
// use.
type Sharer interface {
	transport.Mesh

	// Group returns the ranks that share memory with this rank, including itself, in ascending order. It
	// never changes.
	Group() []topo.Rank

	// UnsharedReason returns the reason why the ranks of this host do not share memory, with the ranks that
	// caused it. It is "" if they share memory, or if this rank is the only one of its host.
	UnsharedReason() string

	// UnsharedRanks returns the ranks that UnsharedReason names, in ascending order.
	UnsharedRanks() []topo.Rank

	// Share makes this rank's segment for lane, of numBytes rounded up to whole pages, zeroed, and gives it
	// to peers, which are ranks of the group (this rank among them is ignored). It is called once for a lane
	// and does not wait for the peers. The error is a *shmem.NoMemoryError if there is no memory, or the
	// error that Err returns for the lane.
	Share(lane transport.Lane, numBytes int64, peers []topo.Rank) ([]byte, error)

	// Peer returns the segment that rank shared for lane, mapped read-only. It waits until the segment has
	// come, ctx ends (the error wraps ctx.Err()), or Err says that it cannot come. If rank is this rank it
	// returns what Share returned.
	Peer(ctx context.Context, lane transport.Lane, rank topo.Rank) ([]byte, error)

	// Arena returns chunk id of package arena in rank's process, mapped read-only. It waits until the chunk
	// has come, ctx ends, the mesh is closed or the process has gone. Once the chunk has come, a call costs
	// one lookup without a lock. After rank's process has given up the chunk, Arena returns an error, and the
	// mapped memory reads as zeros. It returns an error if rank is this rank.
	Arena(ctx context.Context, rank topo.Rank, id uint32) ([]byte, error)

	// Err returns the reason why rank will not come on lane any more, or nil: the lane was released
	// (transport.ErrReleased), the mesh closed (transport.ErrClosed), the lane aborted (the error of Abort),
	// or rank's process has gone (*transport.PeerError). It costs a few ns and allocates nothing for a lane
	// that is in use.
	Err(lane transport.Lane, rank topo.Rank) error
}
