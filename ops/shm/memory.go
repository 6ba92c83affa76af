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

// A segment is one rank's part of a lane: written by it alone, read by all members. In it lie, each on cache lines of
// its own:
//
//	progressAt    u64  rounds that the rank has finished, over all operations (small ones not counted)
//	abortAt       u32  not 0: the rank has failed, and its callers' buffers may change from now on
//	restAt        u32  not 0: the rank sleeps, or is about to: who posts must wake
//	tablesAt      two tables, for operations in turn: where the rank's tensors lie
//	slotsAt       two slots, for small operations in turn: u64 number of the operation, contribution of a few bytes
//	ringAt        contributions of more bytes to small operations, one behind the other, round and round
//	stagingAt     stages × stageBytes: what the peers cannot read where it lies
//
// Two of each are enough because an operation does not end before all ranks have begun it: who fills a table or slot
// anew has seen all others come to the operation between, so they are through with the one before.
const (
	progressAt = 0
	abortAt    = 128
	restAt     = 256
	tablesAt   = 512
	slotsAt    = tablesAt + 2*tableBytes
	ringAt     = (slotsAt + 2*slotBytes + pageBytes - 1) / pageBytes * pageBytes
	stagingAt  = ringAt + ringBytes

	lineBytes = 64
	// pageBytes is where the large parts begin. Buffers mostly begin on a page too: a copy whose ends lie differently in
	// theirs takes some loads for dependent on stores that are in flight.
	pageBytes  = 4096
	tableBytes = 64 << 10
	slotBytes  = lineBytes
	// smallBytes is the most that the other ranks together give to a rank at once, to be reduced by everyone for himself.
	smallBytes = 64 << 10
	// ringBytes is so much that what was written there is in nobody's second-level cache any more when its place is written
	// anew: to write a line that another processor holds takes four times as long.
	ringBytes = 4 << 20
	// stages is the number of parts of the staging area. While a rank fills one, peers may still reduce from the one
	// before it and copy from the two before that.
	stages = 4
)

// segmentBytes returns the size of a segment.
func segmentBytes(stageBytes int64) int64 { return stagingAt + stages*stageBytes }
