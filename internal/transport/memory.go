package transport

import (
	"context"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/topo"
)

// Memory is the memory that a rank shares with other ranks of its host. The mesh of package transport/shm
// implements it.
//
// No rank can write to the memory of another rank, because memory of peers is mapped read-only. Every slice
// stays valid until its lane is released or the mesh is closed, even if the owner of the memory dies. The
// methods are safe for concurrent use.
type Memory interface {
	// Share makes this rank's segment for the lane and shares it with the given peers. The segment has
	// numBytes bytes, rounded up to whole pages, all zero. All peers must share memory with
	// this rank. If this rank is among them, Share ignores it. Share may be called once for a lane. It does
	// not wait for the peers. If there is not enough memory, the error is a *shmem.NoMemoryError. If the lane
	// has failed, Share returns the same error as Err.
	Share(lane Lane, numBytes int64, peers []topo.Rank) ([]byte, error)

	// Peer returns the segment that the given rank has shared for the lane, mapped read-only. It waits until
	// the segment has arrived. If ctx ends first, the error wraps ctx.Err(). If Err returns an error for this
	// lane and rank, Peer returns the same error. If the given rank is this rank, Peer returns the segment
	// that Share has returned.
	Peer(ctx context.Context, lane Lane, rank topo.Rank) ([]byte, error)

	// Find returns the place of b in the arenas of this process. It returns false for memory outside of
	// arenas and in a chunk that this rank could not share.
	Find(b []byte) (arena.Ref, bool)

	// Arena returns a chunk of package arena in the process of the given rank, mapped read-only. id is the ID
	// of the chunk there. Arena waits until the chunk has arrived. It fails if ctx ends, the mesh is closed,
	// the process has gone, or the given rank is this rank. Once the chunk has arrived, a call costs one
	// lookup without a lock. Once the process has withdrawn the chunk, Arena returns an error, and the mapped
	// memory reads as zeros.
	Arena(ctx context.Context, rank topo.Rank, id uint32) ([]byte, error)

	// Err returns the reason why this rank must no longer wait for the given rank on the lane. If there is no
	// such reason, it returns nil. The reasons are:
	//
	//   - ErrReleased if the lane was released,
	//   - ErrClosed if the mesh was closed,
	//   - the error of Abort if the lane was aborted,
	//   - a *PeerError if the process of the rank has gone.
	//
	// For a lane that is in use, Err takes a few ns and allocates nothing.
	Err(lane Lane, rank topo.Rank) error
}
