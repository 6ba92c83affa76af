package shm

// A segment is one rank's memory for a lane. Only that rank writes to it, and all members read it. It has
// these parts, each on its own cache lines:
//
//	progressAt    u64  rounds that the rank has finished in all operations except small ones
//	abortAt       u32  not 0: the rank has failed, and its buffers may change from now on
//	parkedAt      u32  not 0: the rank sleeps or is about to, so a rank that posts must wake it
//	tablesAt      two tables that operations use in turn: where the rank's tensors lie
//	slotsAt       two slots that small operations use in turn: u64 number of the operation, then short data
//	ringAt        ring buffer for the longer data of small operations
//	stagingAt     stages × stageBytes: data that the peers cannot read in place
//
// Two tables and two slots are enough. Operations k and k+2 use the same table or slot. When a rank begins
// operation k+2, it has finished operation k+1. No operation ends before all ranks have begun it, so all
// ranks have begun operation k+1. So all ranks have finished operation k and no longer read the table or
// slot.
const (
	progressAt = 0
	abortAt    = 128
	parkedAt   = 256
	tablesAt   = 512
	slotsAt    = tablesAt + 2*tableBytes
	ringAt     = (slotsAt + 2*slotBytes + pageBytes - 1) / pageBytes * pageBytes
	stagingAt  = ringAt + ringBytes

	lineBytes = 64
	// pageBytes is the alignment of the large parts. Most buffers of callers are aligned to a page too. If
	// source and destination of a copy have different offsets in their pages, the copy is slower: the
	// processor then assumes that some loads depend on stores in flight.
	pageBytes  = 4096
	tableBytes = 64 << 10
	slotBytes  = lineBytes
	// smallBytes is the upper limit of Config.SmallBytes. That field limits the number of bytes that all
	// other ranks together contribute to a small operation.
	smallBytes = 64 << 10
	// ringBytes is so large that a line of the ring has left the second-level caches of all processors before
	// the line is written again. Writing a line that another processor holds takes four times as long.
	ringBytes = 4 << 20
	// stages is the number of parts of the staging area. While a rank fills one part, peers may still reduce
	// from the previous part, and copy from the two parts before the previous one.
	stages = 4
)

// segmentBytes returns the size of a segment if each of its stages has stageBytes bytes.
func segmentBytes(stageBytes int64) int64 { return stagingAt + stages*stageBytes }
