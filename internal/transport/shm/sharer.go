package shm

import (
	"context"

	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

// Sharer is a transport.Mesh through which the ranks of a host share memory. Connect returns a Sharer.
//
// No rank can write to the memory of another rank, because memory of peers is mapped read-only. Every slice
// stays valid until its lane is released or the mesh is closed, even if the owner of the memory dies. The
// methods are safe for concurrent use.
type Sharer interface {
	transport.Mesh

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

	// Share makes this rank's segment for the lane and shares it with the given peers. The segment has
	// numBytes bytes, rounded up to whole pages, all zero. All peers must be ranks of the group. If this rank
	// is among them, Share ignores it. Share may be called once for a lane. It does not wait for the peers.
	// If there is not enough memory, the error is a *shmem.NoMemoryError. If the lane has failed, Share
	// returns the same error as Err.
	Share(lane transport.Lane, numBytes int64, peers []topo.Rank) ([]byte, error)

	// Peer returns the segment that the given rank has shared for the lane, mapped read-only. It waits until
	// the segment has arrived. If ctx ends first, the error wraps ctx.Err(). If Err returns an error for this
	// lane and rank, Peer returns the same error. If the given rank is this rank, Peer returns the segment
	// that Share has returned.
	Peer(ctx context.Context, lane transport.Lane, rank topo.Rank) ([]byte, error)

	// Arena returns a chunk of package arena in the process of the given rank, mapped read-only. id is the ID
	// of the chunk there. Arena waits until the chunk has arrived. It fails if ctx ends, the mesh is closed,
	// the process has gone, or the given rank is this rank. Once the chunk has arrived, a call costs one
	// lookup without a lock. Once the process has withdrawn the chunk, Arena returns an error, and the mapped
	// memory reads as zeros.
	Arena(ctx context.Context, rank topo.Rank, id uint32) ([]byte, error)

	// Err returns the reason why this rank must no longer wait for the given rank on the lane. If there is no
	// such reason, it returns nil. The reasons are:
	//
	//   - transport.ErrReleased if the lane was released,
	//   - transport.ErrClosed if the mesh was closed,
	//   - the error of Abort if the lane was aborted,
	//   - a *transport.PeerError if the process of the rank has gone.
	//
	// For a lane that is in use, Err takes a few ns and allocates nothing.
	Err(lane transport.Lane, rank topo.Rank) error
}
