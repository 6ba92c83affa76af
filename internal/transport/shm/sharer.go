package shm

import (
	"context"

	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

// Sharer is a transport.Mesh whose ranks of one host share memory. What Connect returns is one.
//
// No rank can write another's memory: what comes from a peer is mapped to read. All slices last until the lane is
// released or the mesh closed, whichever is first, also when their owner dies; after that they must not be touched.
// Its methods are safe for concurrent use.
type Sharer interface {
	transport.Mesh

	// Group are the ranks that share memory with this rank, and itself, ascending. It never changes.
	Group() []topo.Rank

	// Why says why the ranks of this host share no memory though they could, naming the ranks that are the reason. It is
	// "" if they do, or this rank is alone on its host.
	Why() string

	// Unable are the ranks that Why names, ascending.
	Unable() []topo.Rank

	// Share makes this rank's segment for lane, of numBytes rounded up to whole pages, zeroed, and gives it to peers, ranks
	// of the group (this rank among them is ignored). It is called once for a lane and does not wait for the peers. The
	// error is a *shmem.NoMemoryError if there is no memory, or what Err says of the lane.
	Share(lane transport.Lane, numBytes int64, peers []topo.Rank) ([]byte, error)

	// Peer is the segment that rank shared for lane, mapped to read. It waits until it has come, ctx ends (the error wraps
	// ctx.Err()), or Err says that waiting is in vain. It is what Share returned if rank is this rank.
	Peer(ctx context.Context, lane transport.Lane, rank topo.Rank) ([]byte, error)

	// Arena is chunk id of package arena in rank's process, mapped to read. It waits as Peer does, for rank and no lane.
	// When it has come, it costs one lookup without a lock. Once rank's process has given the chunk up, it is an error to
	// ask for it, and what was mapped reads as zeros. For this rank it is an error.
	Arena(ctx context.Context, rank topo.Rank, id uint32) ([]byte, error)

	// Err is why waiting for rank on lane is in vain, nil if it is not: the lane was released (transport.ErrReleased), the
	// mesh closed (transport.ErrClosed), the lane aborted (the error of Abort), or rank's process has gone
	// (*transport.PeerError). It costs a few ns and allocates nothing for a lane that is in use.
	Err(lane transport.Lane, rank topo.Rank) error
}
