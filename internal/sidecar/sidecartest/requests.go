package sidecartest

import "github.com/gohvd/gohvd/internal/sidecar/sidecarpb"

// Init is a request.
func Init(settings map[string]string, sets ...*sidecarpb.Ranks) *sidecarpb.Request {
	return &sidecarpb.Request{What: &sidecarpb.Request_Init{Init: &sidecarpb.Init{Settings: settings, ProcessSets: sets}}}
}

// Shutdown is a request.
func Shutdown() *sidecarpb.Request {
	return &sidecarpb.Request{What: &sidecarpb.Request_Shutdown{Shutdown: &sidecarpb.Shutdown{}}}
}

// Status is a request.
func Status() *sidecarpb.Request {
	return &sidecarpb.Request{What: &sidecarpb.Request_Status{Status: &sidecarpb.Status{}}}
}

// StartTimeline asks for a timeline.
func StartTimeline(path string, markCycles bool) *sidecarpb.Request {
	return &sidecarpb.Request{What: &sidecarpb.Request_StartTimeline{
		StartTimeline: &sidecarpb.StartTimeline{Path: path, MarkCycles: markCycles},
	}}
}

// StopTimeline asks for its end.
func StopTimeline() *sidecarpb.Request {
	return &sidecarpb.Request{What: &sidecarpb.Request_StopTimeline{StopTimeline: new(sidecarpb.StopTimeline)}}
}

// Arena is a request.
func Arena(number uint32, numBytes int64) *sidecarpb.Request {
	return &sidecarpb.Request{What: &sidecarpb.Request_Arena{Arena: &sidecarpb.Arena{Arena: number, Bytes: uint64(numBytes)}}}
}

// DropArena is a request.
func DropArena(number uint32) *sidecarpb.Request {
	return &sidecarpb.Request{What: &sidecarpb.Request_DropArena{DropArena: &sidecarpb.DropArena{Arena: number}}}
}

// Ring is a request.
func Ring(numBytes uint64) *sidecarpb.Request {
	return &sidecarpb.Request{What: &sidecarpb.Request_Ring{Ring: &sidecarpb.Ring{Bytes: numBytes}}}
}

// Prepare is a request.
func Prepare(slot uint32, o *sidecarpb.Operation) *sidecarpb.Request {
	return &sidecarpb.Request{What: &sidecarpb.Request_Prepare{Prepare: &sidecarpb.Prepare{Slot: slot, Operation: o}}}
}

// Free is a request.
func Free(arena uint32, offset uint64) *sidecarpb.Request {
	return &sidecarpb.Request{What: &sidecarpb.Request_Free{Free: &sidecarpb.Free{Arena: arena, Offset: offset}}}
}

// Sum is a sum of floats in place.
func Sum(name string, arena uint32, offset uint64, numElems int64) *sidecarpb.Operation {
	at := &sidecarpb.Memory{Arena: arena, Offset: offset, Bytes: uint64(4 * numElems)}
	return &sidecarpb.Operation{
		Kind: 1, Name: name, Dtype: 9, ReduceOp: 2,
		Tensors: []*sidecarpb.Tensor{{Shape: []int64{numElems}, Input: at, Output: at}},
	}
}
