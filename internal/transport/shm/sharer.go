package shm

import (
	"context"

	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

// Sharer is a transport.Mesh through which the ranks of a host share memory. Connect returns a Sharer.
//
// No rank can write to the memory of another rank, because memory of peers is mapped read-only. All slices
// stay valid until the lane is released or the mesh is closed, even if their owner dies. The methods are safe
// for concurrent use.
type Sharer interface {
	transport.Mesh

	// Group returns the ranks that share memory with this rank, including this rank, in ascending order. It
	// never changes.
	Group() []topo.Rank

	// UnsharedReason returns the reason why the ranks of this host do not share memory. It names the ranks
	// that are the cause. It is "" if the ranks share memory, or if this rank is the only rank of its host.
	UnsharedReason() string

	// UnsharedRanks returns the ranks that UnsharedReason names, in ascending order.
	UnsharedRanks() []topo.Rank

	// Share makes this rank's segment for lane and gives it to peers. The segment has numBytes bytes, rounded
	// up to whole pages, all zero. peers must be ranks of the group; this rank is ignored in peers. Share may
	// be called once for a lane. It does not wait for the peers. If there is not enough memory, the error is
	// a *shmem.NoMemoryError. If the lane has failed, Share returns the same error as Err.
	Share(lane transport.Lane, numBytes int64, peers []topo.Rank) ([]byte, error)

	// Peer returns the segment that rank has shared for lane, mapped read-only. It waits until the segment
	// has arrived. If ctx ends first, the error wraps ctx.Err(). If Err returns an error for lane and rank,
	// so does Peer. If rank is this rank, Peer returns what Share has returned.
	Peer(ctx context.Context, lane transport.Lane, rank topo.Rank) ([]byte, error)

	// Arena returns chunk id of package arena in rank's process, mapped read-only. It waits until the chunk
	// has arrived. It fails if ctx ends, the mesh is closed, rank's process has gone, or rank is this rank.
	// When the chunk has arrived, a call costs one lookup without a lock. When rank's process has withdrawn
	// the chunk, Arena returns an error, and the mapped memory reads as zeros.
	Arena(ctx context.Context, rank topo.Rank, id uint32) ([]byte, error)

	// Err returns the reason why waiting for rank on lane cannot succeed any more, or nil:
	//
	//   - transport.ErrReleased if the lane was released,
	//   - transport.ErrClosed if the mesh was closed,
	//   - the error of Abort if the lane was aborted,
	//   - a *transport.PeerError if rank's process has gone.
	//
	// For a lane that is in use, Err takes a few ns and allocates nothing.
	Err(lane transport.Lane, rank topo.Rank) error
}
