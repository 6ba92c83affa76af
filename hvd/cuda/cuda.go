// Package cuda provides the operations of package hvd on tensors in the memory of CUDA devices. They have the
// names, checks and options of the operations on tensors in host memory, except InPlace, and all ranks must
// have the tensor on a device.
//
// The program must be built with cgo and the tag nccl; otherwise the operations fail with a *hvd.UsageError,
// as they do if HOROVOD_GPU_OPERATIONS is none. With HOROVOD_GPU_OPERATIONS=nccl, or without this setting if
// all ranks have NCCL and a device, they run on NCCL. Tensors of operations that NCCL cannot run, and with
// HOROVOD_GPU_OPERATIONS=host all tensors, are copied through host memory (docs/nccl.md).
//
// An operation takes an input and an output, which do not overlap, except where the operation says how it can
// run in place. An operation begins on the device after the work that was enqueued on the Streams of both
// buffers before the call. When the operation is done, the output is complete, and both buffers belong to the
// caller again, unless the operation fails with a *hvd.InUseError.
//
// With HOROVOD_ENABLE_ASYNC_COMPLETION=1, an operation that runs on NCCL is done when it has been launched.
// By then the Streams of both buffers wait for it on the device, so work that the program enqueues on them
// comes after the operation. If the operation fails later, the streams go on, its output is undefined, and
// the next operation, Err and Shutdown of package hvd return the error.
package cuda

import (
	"context"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/hvd/internal/ondevice"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
)

// Buffer is a tensor in the memory of a CUDA device.
type Buffer[T hvd.Element] struct {
	// Pointer is the address in the memory of the device. It must be aligned for T.
	Pointer uintptr
	// Len is the number of elements.
	Len int
	// Device is the number of the device, as the CUDA runtime of this process counts.
	Device int
	// Stream is the cudaStream_t whose work may still write or read the buffer. It must exist until the
	// operation is done. 0 is the legacy default stream. 2, the default stream of the calling thread, is
	// refused, because a goroutine has no thread of its own.
	Stream uintptr
}

// These are the options of the operations. They are those of package hvd, without InPlace.
type (
	// An AllreduceOption is an option of Allreduce.
	AllreduceOption interface {
		hvd.AllreduceOption
		hvd.DeviceOption
	}
	// A ReduceOption is an option of Reduce and Reducescatter.
	ReduceOption interface {
		hvd.ReduceOption
		hvd.DeviceOption
	}
	// A MoveOption is an option of Allgather, Broadcast, Alltoall, Gather and Scatter.
	MoveOption interface {
		hvd.MoveOption
		hvd.DeviceOption
	}
	// A GroupedAllreduceOption is an option of GroupedAllreduce.
	GroupedAllreduceOption interface {
		hvd.GroupedAllreduceOption
		hvd.DeviceOption
	}
	// A GroupedReduceOption is an option of GroupedReducescatter.
	GroupedReduceOption interface {
		hvd.GroupedReduceOption
		hvd.DeviceOption
	}
	// A GroupedMoveOption is an option of GroupedAllgather.
	GroupedMoveOption interface {
		hvd.GroupedMoveOption
		hvd.DeviceOption
	}
)

// single returns an operation on one tensor.
func single[T hvd.Element](kind message.Kind, in, out Buffer[T]) *ondevice.Operation {
	o := &struct {
		ondevice.Operation
		buffers [2]ondevice.Buffer
	}{ondevice.Operation{Kind: kind, DType: tensor.Of[T]()}, [2]ondevice.Buffer{ondevice.Buffer(in),
		ondevice.Buffer(out)}}
	o.In, o.Out = o.buffers[:1:1], o.buffers[1:]
	return &o.Operation
}

// group returns an operation on a group of tensors.
func group[T hvd.Element](kind message.Kind, ins, outs []Buffer[T]) *ondevice.Operation {
	return &ondevice.Operation{Kind: kind, DType: tensor.Of[T](), In: untyped(ins), Out: untyped(outs),
		Group: true}
}

func untyped[T hvd.Element](typed []Buffer[T]) []ondevice.Buffer {
	all := make([]ondevice.Buffer, len(typed))
	for i, b := range typed {
		all[i] = ondevice.Buffer(b)
	}
	return all
}

// start submits op and returns its handle without waiting.
func start[R, O any](op *ondevice.Operation, opts []O) (*hvd.Handle[R], error) {
	options := make([]any, len(opts))
	for i, o := range opts {
		options[i] = o
	}
	_, op.Rows = any((*R)(nil)).(*[]int)
	h, err := ondevice.Start(op, options)
	if err != nil {
		return nil, err
	}
	return h.(*hvd.Handle[R]), nil
}

// wait submits op and waits for it.
func wait[R, O any](ctx context.Context, op *ondevice.Operation, opts []O) (R, error) {
	op.Waits = true
	h, err := start[R](op, opts)
	if err != nil {
		var none R
		return none, err
	}
	return h.Wait(ctx)
}
