package sidecartest

import "github.com/gohvd/gohvd/internal/sidecar/sidecarpb"

// Init returns a request to join the job with the given settings and process sets.
func Init(settings map[string]string, sets ...*sidecarpb.Ranks) *sidecarpb.Request {
	return &sidecarpb.Request{What: &sidecarpb.Request_Init{Init: &sidecarpb.Init{Settings: settings,
		ProcessSets: sets}}}
}

// NewUniqueID returns a request to make a unique id.
func NewUniqueID() *sidecarpb.Request {
	return &sidecarpb.Request{What: &sidecarpb.Request_NewUniqueId{
		NewUniqueId: new(sidecarpb.NewUniqueID)}}
}

// Shutdown returns a request to leave the job.
func Shutdown() *sidecarpb.Request {
	return &sidecarpb.Request{What: &sidecarpb.Request_Shutdown{Shutdown: &sidecarpb.Shutdown{}}}
}

// StartTimeline returns a request to write a timeline to the file at path.
func StartTimeline(path string, markCycles bool) *sidecarpb.Request {
	return &sidecarpb.Request{What: &sidecarpb.Request_StartTimeline{
		StartTimeline: &sidecarpb.StartTimeline{Path: path, MarkCycles: markCycles},
	}}
}

// StopTimeline returns a request to stop writing the timeline.
func StopTimeline() *sidecarpb.Request {
	return &sidecarpb.Request{What: &sidecarpb.Request_StopTimeline{
		StopTimeline: new(sidecarpb.StopTimeline)}}
}

// Arena returns a request that gives the sidecar access to an arena of the client. The client must send the
// descriptor of the arena with it.
func Arena(number uint32, numBytes int64) *sidecarpb.Request {
	return &sidecarpb.Request{What: &sidecarpb.Request_Arena{Arena: &sidecarpb.Arena{Arena: number,
		Bytes: uint64(numBytes)}}}
}

// DropArena returns a request to unmap an arena of the client.
func DropArena(number uint32) *sidecarpb.Request {
	return &sidecarpb.Request{What: &sidecarpb.Request_DropArena{
		DropArena: &sidecarpb.DropArena{Arena: number}}}
}

// Ring returns a request that gives the sidecar access to a ring. The client must send the descriptor of the
// ring with it.
func Ring(numBytes uint64) *sidecarpb.Request {
	return &sidecarpb.Request{What: &sidecarpb.Request_Ring{Ring: &sidecarpb.Ring{Bytes: numBytes}}}
}

// Prepare returns a request to prepare an operation in a slot. Submissions in the ring refer to the slot.
func Prepare(slot uint32, o *sidecarpb.Operation) *sidecarpb.Request {
	return &sidecarpb.Request{What: &sidecarpb.Request_Prepare{Prepare: &sidecarpb.Prepare{Slot: slot,
		Operation: o}}}
}

// Free returns a request to free the result at offset in an arena of the sidecar.
func Free(arena uint32, offset uint64) *sidecarpb.Request {
	return &sidecarpb.Request{What: &sidecarpb.Request_Free{Free: &sidecarpb.Free{Arena: arena,
		Offset: offset}}}
}

// Sum returns an allreduce operation. It sums numElems float32 elements in place, at the given offset in the
// arena.
func Sum(name string, arena uint32, offset uint64, numElems int64) *sidecarpb.Operation {
	at := &sidecarpb.Memory{Arena: arena, Offset: offset, Bytes: uint64(4 * numElems)}
	return &sidecarpb.Operation{
		Kind: 1, Name: name, Dtype: 9, ReduceOp: 2,
		Tensors: []*sidecarpb.Tensor{{Shape: []int64{numElems}, Input: at, Output: at}},
	}
}
