package shm

import (
	"context"

	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

// Memory provides what a Backend needs from the ranks' host: segments of each other's memory. The mesh of
// package transport/shm implements it.
type Memory interface {
	// Share makes this rank's segment for lane, numBytes of zeros, which the peers can read but not write. It
	// does not wait for them.
	Share(lane transport.Lane, numBytes int64, peers []topo.Rank) ([]byte, error)

	// Peer returns the segment that rank shared for lane. It waits until there is one, ctx ends, or the rank
	// or the lane is given up.
	Peer(ctx context.Context, lane transport.Lane, rank topo.Rank) ([]byte, error)

	// Arena returns a chunk of the allocator of rank's process. It waits as Peer does.
	Arena(ctx context.Context, rank topo.Rank, chunk uint32) ([]byte, error)

	// Err returns why waiting for rank on lane is useless, or nil. It is called often.
	Err(lane transport.Lane, rank topo.Rank) error
}

// A segment is one rank's memory for a lane. Only that rank writes it, and all members read it. It has these
// parts, each on cache lines of its own:
//
//	progressAt    u64  rounds that the rank has finished, over all operations (small ones not counted)
//	abortAt       u32  not 0: the rank has failed, and its buffers may change from now on
//	parkedAt      u32  not 0: the rank sleeps or is about to, so a rank that posts must wake it
//	tablesAt      two tables, used by operations in turn: where the rank's tensors lie
//	slotsAt       two slots, used by small operations in turn: u64 number of the operation, contribution of a few bytes
//	ringAt        ring buffer of the contributions of more bytes to small operations
//	stagingAt     stages × stageBytes: data that the peers cannot read in place
//
// Two of each are enough because an operation does not end before all ranks have begun it. A rank that writes
// a table or slot again has finished the operation in between. So all others have begun that one, and have
// finished the one before.
const (
	progressAt = 0
	abortAt    = 128
	parkedAt   = 256
	tablesAt   = 512
	slotsAt    = tablesAt + 2*tableBytes
	ringAt     = (slotsAt + 2*slotBytes + pageBytes - 1) / pageBytes * pageBytes
	stagingAt  = ringAt + ringBytes

	lineBytes = 64
	// pageBytes is the alignment of the large parts. Most buffers are aligned to a page too. If source and
	// destination of a copy are at different offsets in their pages, the processor takes some loads for
	// dependent on stores in flight.
	pageBytes  = 4096
	tableBytes = 64 << 10
	slotBytes  = lineBytes
	// smallBytes is the most that the other ranks together may contribute to a small operation, which every
	// rank reduces completely.
	smallBytes = 64 << 10
	// ringBytes is so large that a line of the ring has left the second-level caches of all processors before
	// it is written again: writing a line that another processor holds takes four times as long.
	ringBytes = 4 << 20
	// stages is the number of parts of the staging area. While a rank fills one, peers may still reduce from
	// the one before it and copy from the two before that.
	stages = 4
)

// segmentBytes returns the size of a segment.
func segmentBytes(stageBytes int64) int64 { return stagingAt + stages*stageBytes }
