// Package raw is the way into an engine for operations whose element type is known at run time only, and whose memory is the
// caller's: for a process that runs a rank for others. Programs use package hvd, which does the work here too; being internal
// keeps this out of their sight.
package raw

import (
	"context"
	"time"

	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/tensor"
)

// Door is an engine from inside.
type Door struct {
	// Begin starts an operation. An error says that it has not begun: then Done is not called. What was begun is noticed by
	// the next Drive.
	Begin func(*Operation) error
	// Drive runs the engine's loop until done reports true, or for a while after the last thing has happened.
	Drive func(ctx context.Context, done func() bool)
	// Shutdown is hvd's, with what is told to ranks that wait for this one; failed says that its program has failed.
	Shutdown func(ctx context.Context, reason string, failed bool) error
	// Close is a Shutdown without ceremony: if the job is not over the other ranks take this one for dead.
	Close func() error
	// StartTimeline and StopTimeline are as hvd's, without the words before the cause of an error. They may wait for a disk.
	StartTimeline func(path string, markCycles bool) error
	StopTimeline  func() error
}

// Operation is what to do, and then what has come of it. Its memory is the engine's from Begin to Done.
type Operation struct {
	Kind  message.Kind
	Set   int // ID of a process set
	Name  string
	DType tensor.DType
	// Op is the reduction of kinds that reduce, an average if it is none. Prescale and Postscale are 1 for none.
	Op                  tensor.ReduceOp
	Prescale, Postscale float64
	Wire                tensor.DType // Invalid for no compression
	Root                int
	// Splits are those of an alltoall, nil for even ones.
	Splits               []int64
	ErrorFeedback, Empty bool
	Timeout              time.Duration // 0 for that of the settings
	// Tensors are one, or with Grouped any number, or none where the kind takes none.
	Grouped bool
	Tensors []Tensor
	// Allocate makes the output of tensor i where it has none. Goroutines of the engine call it.
	Allocate func(i, numBytes int) ([]byte, error)
	// Done is called once, by whichever goroutine finishes the operation, and so must return soon and not wait. What follows is
	// there by then, if err is nil.
	Done func(err error)

	Received   []int64 // rows that an alltoall got from each member
	LastJoined int
}

// Tensor is one of an Operation.
type Tensor struct {
	// DType is the operation's, or in a group any; Invalid is the operation's.
	DType  tensor.DType
	Shape  tensor.Shape
	Input  []byte
	Output []byte // Input itself, or memory apart from it; nil to have it allocated
	// Result is the shape of what is in Output at the end.
	Result tensor.Shape
}
