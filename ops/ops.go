// Package ops runs granted responses. As in Horovod's operation manager, backends are tried in a fixed order,
// and a response runs on the first backend that can run it.
package ops

import (
	"context"
	"fmt"
	"runtime"

	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
)

// Backend runs collectives among the members of one process set on one lane, one after another. All members
// must start the same operations in the same order with matching arguments. The methods must not be called
// concurrently. In this package a rank is an index into the process set, from 0 to n-1.
//
// An operation runs from Start until Step returns Finished or an error. After that the backend no longer
// reads or writes the buffers of the operation. After an error, the contents of the buffers are undefined.
// The backend must then not be used any more, because its connections may have been left in the middle of a
// message.
type Backend interface {
	// Start begins op. It does not wait for other ranks.
	Start(op Operation) error

	// Step runs the next step of the operation. If wait is set, Step waits for other ranks until ctx ends,
	// and may run all remaining steps. If wait is not set, Step ignores ctx, and returns Waiting or Blocked
	// instead of waiting. A backend that cannot poll returns Blocked while wait is not set, and runs the
	// whole operation in the first step with wait set.
	Step(ctx context.Context, wait bool) (Progress, error)

	// Close releases the resources of the backend. An operation that has not ended is abandoned.
	Close()
}

// Progress is the result of Step.
type Progress uint8

const (
	// Waiting means that the step was not done because another rank is not ready for it. The caller may try
	// the step again.
	Waiting Progress = iota
	// Blocked means that the step was not done, and that only a call of Step with wait set can do it.
	Blocked
	// Moving means that the step was done and that other steps remain.
	Moving
	// Finished means that the last step was done and the operation has ended.
	Finished
	// Launched means that the last step was done and the operation goes on on a device. The backend can start
	// the next one. Its Follower learns when it has ended. Without a Follower, Step returns Finished instead.
	Launched
)

// Activity is a phase of an operation that a timeline shows. It ends when the next one begins.
type Activity uint8

const (
	// Connecting means that the ranks make a communicator.
	Connecting Activity = iota
	// AwaitingData means that the device does the work that the operation has to wait for.
	AwaitingData
	// Packing means that tensors are copied to the fusion buffer.
	Packing
	// Exchanging means that data moves between the ranks.
	Exchanging
	// Unpacking means that results are copied from the fusion buffer.
	Unpacking
	// CopyingIn means that tensors on devices are copied to host memory.
	CopyingIn
	// CopyingOut means that results are copied from host memory to devices.
	CopyingOut
)

// Operation describes a collective and this rank's buffers for it. Kind decides which of the other fields are
// used.
type Operation struct {
	// Kind is a kind that moves data.
	Kind      message.Kind
	Algorithm message.Algorithm

	// SegmentBytes is the size of the segments into which a backend cuts the data, if the backend's segments
	// can have different sizes. 0 selects the default of the backend.
	SegmentBytes int

	// DType is the type of the elements that are reduced. Op is the reduction: Sum, Min, Max or Product, or
	// for an Allreduce also Adasum. There is no Average: it is a Sum with a Scaling.
	DType tensor.DType
	Op    tensor.ReduceOp

	// Device has what only a backend for devices uses. It is nil if the buffers are in host memory.
	Device *DevicePart

	// Tensors are the tensors that an Allreduce or a Reduce reduces, as if they were concatenated. The number
	// of tensors and their lengths may differ between ranks, but the total length must be the same. After an
	// Allreduce all ranks hold the same bits. In a Reduce only Root gets the result. At the other ranks a
	// backend with Lists neither reads nor writes Out, which may be nil, and any other backend leaves the
	// tensor undefined. If Lists does not report true for the operation, there is exactly one tensor, whose
	// In and Out are the same memory, and the backend ignores Scaling.
	Tensors []Tensor
	Scaling Scaling

	// Buf is the buffer of the kinds other than Allreduce and Reduce:
	//
	//   - An Allgather fills Buf with the blocks of all ranks in order. The caller has stored this rank's
	//     block in its place.
	//   - A Broadcast copies the Buf of Root to the Buf of all other ranks.
	//   - A Reducescatter reduces Buf and leaves the result in this rank's block. The other blocks are then
	//     undefined. If Lists reports true for the operation in host memory, the backend applies Scaling,
	//     and if Result is not nil it puts the result there and does not change Buf.
	//   - An Alltoall sends block i of Buf to rank i. A Gather does the same, but only the block for Root has
	//     bytes, and in a Scatter only the blocks of Root have bytes.
	Buf []byte

	// Result is the memory for the result of a Reducescatter. It is nil if that is this rank's block of Buf.
	Result []byte

	// Counts are the sizes of the blocks of Buf in bytes, one for each rank. In an Adasum, Counts are instead
	// the sizes in bytes of the tensors that are concatenated in Tensors[0]. Each of these tensors is
	// combined separately.
	Counts []int64

	// Root is the rank whose Buf is broadcast or scattered, or the rank that gets the result of a Reduce or
	// of a Gather.
	Root int

	// Allocate returns the output buffer of an Alltoall, a Gather or a Scatter, which receives the blocks for
	// this rank in the order of the ranks that send them. The backend calls Allocate once, when it has
	// learned the sizes of these blocks: counts[i] is the number of bytes from rank i. The slice counts is
	// valid only during the call. An error from Allocate ends the operation.
	Allocate func(counts []int64) ([]byte, error)
}

// DevicePart is the part of an Operation on CUDA devices. It is valid only during the calls of Start, which
// copies it, and of Allocate, which sets Ready again.
type DevicePart struct {
	// Devices are the CUDA devices on which the ranks have their buffers, in the order of the set. For a rank
	// that has joined, it is the device of its last tensor, or tensor.Host if no tensor was on a device.
	//
	// Only the backend can read memory of a device (package internal/cuda). So it gets the tensors as they
	// are, in Tensors, and neither Buf nor a fusion buffer. There is one tensor, except in an Allreduce and
	// in a Reduce. In an Allgather, In is this rank's block and Out is the whole. In a Reducescatter, In is
	// the whole and Out is this rank's block. If Out is nil, this rank does not need the result, and the
	// backend uses memory of its own. Allocate returns memory of the device, or nil if this rank does not
	// need the result.
	//
	// If this rank has joined, Tensors is empty. The backend then contributes neutral elements. NumBytes is
	// the number of bytes of the tensors together, each of them Padded if there are several, where a tensor
	// of an Allgather is the whole.
	//
	// HostBuf is set in an Alltoall, a Gather or a Scatter whose rows have no elements. The ranks then
	// exchange only numbers of rows, which are in host memory: Buf and Allocate are used as in an operation
	// in host memory.
	Devices  []tensor.Device
	NumBytes int64
	HostBuf  bool
	// Order is the number of the operation among those of this rank on devices, from 0. All ranks begin the
	// operations that they have in common in the same order, also those of different process sets. More is
	// set if the next operation of the backend is another part of the same operation, with the same Order.
	Order uint64
	More  bool
	// Name is the name of the first response of the operation, for tools that show what the device does.
	Name string
	// Err is set if this rank cannot run the operation on devices. Start then returns an error with this
	// cause, and operations that come later in Order fail instead of waiting for this one.
	Err error
	// Ready are events of this rank's device for which the operation waits before it reads or writes the
	// tensors. After Allocate, they include those for the memory that it has returned.
	Ready []*cuda.Event
	// Follower learns what happens to an operation that has been launched, if it is not nil. If the operation
	// has several parts, this applies to the last one.
	Follower Follower
	// Streams are streams of this rank's device, as cudaStream_t, that the backend makes wait on the device
	// for the end of the operation. If there are some, it then calls Launched of the Follower.
	Streams []uintptr
	// If Enter is not nil, the backend calls it from Step when an activity of an operation on devices begins.
	// It learns when the device begins one only by asking events, so Enter is nil without a timeline.
	Enter func(Activity)
}

// Follower learns what happens to an operation on a device after its launch.
type Follower interface {
	// Launched is called from Step, once, when the Streams wait for the operation.
	Launched()
	// Ended is called once if Step returns Launched, perhaps earlier and from another goroutine. The device
	// no longer uses the buffers of the operation then, unless err is an *InUseError.
	Ended(err error)
}

// Tensor has this rank's input and output buffers for one tensor of an allreduce or of a reduce.
type Tensor struct {
	// In is the rank's contribution, and Out receives the result. Both have the same length and the alignment
	// of the element type. They are either the same memory or do not overlap.
	In, Out []byte
}

// Padded returns n rounded up to a multiple of 16. If a backend for devices packs several tensors, each
// begins at such a multiple, because copies to and from other places take longer.
func Padded(n int64) int64 { return (n + 15) &^ 15 }

// Scaling describes how the elements are scaled before and after a reduction. All contributions are
// multiplied by Pre. The result is divided by Divisor (integer types only; 0 and 1 do nothing) and then
// multiplied by Post. The products are rounded as in kernel.Scale.
type Scaling struct {
	Pre, Post float64
	Divisor   int64
}

// Oversubscribed reports whether there are more processes than processors on which they may run, so that a
// waiting rank must soon yield its core. If GOMAXPROCS is less than the number of this process's processors,
// for example because of a quota, it limits the number of processors.
func Oversubscribed(processes, processors int) bool {
	if threads := runtime.GOMAXPROCS(0); threads < runtime.NumCPU() {
		processors = min(processors, threads)
	}
	return processes > processors
}

// CheckRoot returns an error if the operation needs a root and its root is not one of the ranks 0 to ranks-1.
func (op *Operation) CheckRoot(ranks int) error {
	if op.Kind.HasRoot() && (op.Root < 0 || op.Root >= ranks) {
		return fmt.Errorf("got root %d, want 0 to %d", op.Root, ranks-1)
	}
	return nil
}

// Sends reports whether rank from sends a block to rank to in an Alltoall, a Gather or a Scatter.
func (op *Operation) Sends(from, to int) bool {
	return (op.Kind != message.Gather || to == op.Root) && (op.Kind != message.Scatter || from == op.Root)
}

// Run starts op and waits until it has ended.
func Run(ctx context.Context, b Backend, op Operation) error {
	if err := b.Start(op); err != nil {
		return err
	}
	for {
		if p, err := b.Step(ctx, true); err != nil || p == Finished {
			return err
		}
	}
}
