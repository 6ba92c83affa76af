// Package ondevice connects hvd/cuda with hvd: hvd executes operations on device buffers for hvd/cuda,
// without an exported function for them.
package ondevice

import (
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
)

// Buffer is a cuda.Buffer without the type of its elements.
type Buffer struct {
	Pointer uintptr
	Len     int
	Device  int
	Stream  uintptr
}

// Operation describes an operation on device buffers.
type Operation struct {
	Kind  message.Kind
	DType tensor.DType
	// In and Out hold the buffers of each tensor of a group. Without Group, they hold one buffer each.
	In, Out []Buffer
	Group   bool
	Root    int
	Splits  []int
	// Rows is set if the handle is to return the number of rows that came from each member.
	Rows bool
	// Waits is set if the caller waits for the operation at once.
	Waits bool
}

// Start queues an operation with the given options, which are options of hvd. It returns the handle: a
// *hvd.Handle[[]int] if op.Rows is set, and otherwise a *hvd.Handle[struct{}]. Package hvd sets Start when it
// is initialized, and nothing changes it afterwards.
var Start func(op *Operation, options []any) (any, error)
