package hvd

import (
	"context"
	"unsafe"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
)

// DeviceBuffer is a tensor in the memory of a CUDA device. Operations on it have the names, checks and
// options of operations on tensors in host memory, and all ranks must have the tensor on a device. They run
// on NCCL, which HOROVOD_GPU_OPERATIONS=nccl turns on (docs/nccl.md).
//
// The functions for device buffers take an input and an output, which are the same buffer or do not overlap.
// An operation begins on the device after the work that was enqueued on the input's Stream before the call.
// When the operation is done, the output is complete, and both buffers belong to the caller again.
type DeviceBuffer[T Element] struct {
	// Pointer is the address in the memory of the device. It must be aligned for T.
	Pointer uintptr
	// Len is the number of elements.
	Len int
	// Device is the number of the device, as the CUDA runtime of this process counts.
	Device int
	// Stream is the cudaStream_t on which the input is computed. 0 is the legacy default stream.
	Stream uintptr
}

// bytes returns the memory of b, which must not be read or written.
func (b *DeviceBuffer[T]) bytes() []byte {
	if b.Len == 0 {
		return nil
	}
	var z T
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&b.Pointer)), b.Len*int(unsafe.Sizeof(z)))
}

// DeviceHandle is an operation on device buffers in flight. Its methods are safe for concurrent use.
type DeviceHandle struct {
	operation
	slot     *slot
	dims     [1]int64
	received []int64
}

// Wait waits for the operation. If ctx ends first, the error is a *PendingError. Then the operation goes on,
// and its buffers stay in use.
func (h *DeviceHandle) Wait(ctx context.Context) error { return h.wait(ctx, h) }

// Received returns, after an alltoall, how many rows came from each member of the process set, in the order
// of the members. It returns nil for other operations, and while the operation is not done.
func (h *DeviceHandle) Received() []int {
	if !h.ended() || h.received == nil {
		return nil
	}
	rows := make([]int, len(h.received))
	for i, n := range h.received {
		rows[i] = int(n)
	}
	return rows
}

// finished completes h. The slot of h calls it when the operation has ended.
func (h *DeviceHandle) finished(err error) {
	e := &h.slot.entry
	h.received = e.Received
	h.hold(e)
	h.engine.rank.Devices.Release(e.Ready)
	h.slot.free()
	h.slot = nil
	h.complete(err)
}

// AllreduceDevice reduces in over all ranks as Allreduce does, and stores the result in out.
func AllreduceDevice[T Element](ctx context.Context, in, out DeviceBuffer[T], opts ...Option) error {
	h, err := allreduceDevice(in, out, opts)
	return awaitDevice(ctx, h, err)
}

// AllreduceDeviceAsync submits an AllreduceDevice and returns its handle without waiting.
func AllreduceDeviceAsync[T Element](in, out DeviceBuffer[T], opts ...Option) (*DeviceHandle, error) {
	return started(allreduceDevice(in, out, opts))
}

func allreduceDevice[T Element](in, out DeviceBuffer[T], opts []Option) (*DeviceHandle, error) {
	return onDevice(message.Allreduce, in, out, opts, sameLength(in, out))
}

// BroadcastDevice copies the in of the rank root to the out of every rank. The ranks other than root do not
// use in, except that it says where their tensor is.
func BroadcastDevice[T Element](ctx context.Context, in, out DeviceBuffer[T], root int,
	opts ...Option) error {
	h, err := broadcastDevice(in, out, root, opts)
	return awaitDevice(ctx, h, err)
}

// BroadcastDeviceAsync submits a BroadcastDevice and returns its handle without waiting.
func BroadcastDeviceAsync[T Element](in, out DeviceBuffer[T], root int,
	opts ...Option) (*DeviceHandle, error) {
	return started(broadcastDevice(in, out, root, opts))
}

func broadcastDevice[T Element](in, out DeviceBuffer[T], root int, opts []Option) (*DeviceHandle, error) {
	same := sameLength(in, out)
	return onDevice(message.Broadcast, in, out, opts, func(h *DeviceHandle, c *call) error {
		if err := c.CheckRoot(root); err != nil {
			return err
		}
		h.slot.entry.Request.Root = topo.Rank(root)
		return same(h, c)
	})
}

// AllgatherDevice concatenates the in of all ranks along the first dimension, in rank order, in out. If out
// has another length than the result, the operation fails at this rank.
func AllgatherDevice[T Element](ctx context.Context, in, out DeviceBuffer[T], opts ...Option) error {
	h, err := onDevice(message.Allgather, in, out, opts, nil)
	return awaitDevice(ctx, h, err)
}

// AllgatherDeviceAsync submits an AllgatherDevice and returns its handle without waiting.
func AllgatherDeviceAsync[T Element](in, out DeviceBuffer[T], opts ...Option) (*DeviceHandle, error) {
	return started(onDevice(message.Allgather, in, out, opts, nil))
}

// ReducescatterDevice reduces in over all ranks as Reducescatter does, and stores this rank's rows in out.
func ReducescatterDevice[T Element](ctx context.Context, in, out DeviceBuffer[T], opts ...Option) error {
	h, err := reducescatterDevice(in, out, opts)
	return awaitDevice(ctx, h, err)
}

// ReducescatterDeviceAsync submits a ReducescatterDevice and returns its handle without waiting.
func ReducescatterDeviceAsync[T Element](in, out DeviceBuffer[T], opts ...Option) (*DeviceHandle, error) {
	return started(reducescatterDevice(in, out, opts))
}

func reducescatterDevice[T Element](in, out DeviceBuffer[T], opts []Option) (*DeviceHandle, error) {
	return onDevice(message.Reducescatter, in, out, opts, func(h *DeviceHandle, c *call) error {
		shape := h.slot.entry.Request.Shape
		want := 0 // a scalar has no rows; the coordinator refuses it, so that all ranks get the error
		if len(shape) > 0 && shape[0] > 0 {
			_, rows := tensor.Rows(shape[0], c.Set.Size(), c.Set.Me)
			want = int(rows) * (in.Len / int(shape[0]))
		}
		if out.Len != want {
			return c.Misuse("the output has %d elements, want %d, the rows of this rank", out.Len, want)
		}
		return nil
	})
}

// sameLength returns a builder that compares the lengths of the buffers.
func sameLength[T Element](in, out DeviceBuffer[T]) func(*DeviceHandle, *call) error {
	return func(_ *DeviceHandle, c *call) error {
		if in.Len != out.Len {
			return c.Misuse("the output has %d elements, want %d as the input", out.Len, in.Len)
		}
		return nil
	}
}

// onDevice queues an operation on device buffers. It calls build, if it is not nil, to complete the handle.
func onDevice[T Element](kind message.Kind, in, out DeviceBuffer[T], opts []Option,
	build func(*DeviceHandle, *call) error) (*DeviceHandle, error) {
	c, err := prepare(kind, tensor.Of[T](), false, opts)
	if err != nil {
		return nil, err
	}
	switch {
	case in.Pointer == 0 && in.Len > 0, out.Pointer == 0 && out.Len > 0:
		return nil, c.Misuse("got a device buffer with the address 0")
	case in.Device < 0 || in.Device >= tensor.MaxCUDADevices:
		return nil, c.Misuse("got device %d, want 0 to %d", in.Device, tensor.MaxCUDADevices-1)
	case in.Device != out.Device:
		return nil, c.Misuse("the input is on device %d and the output is on device %d", in.Device,
			out.Device)
	}
	h := &DeviceHandle{}
	h.kind, h.engine = kind, c.engine
	h.slot = take(&c.engine.slots.single, h)
	e := &h.slot.entry
	c.Fill(e)
	e.Input, e.Output = in.bytes(), out.bytes()
	e.Request.Device = tensor.CUDA(in.Device)
	if h.dims[0] = int64(in.Len); c.shapes == nil {
		e.Request.Shape = h.dims[:]
	} else if e.Request.Shape, err = c.shape(0, in.Len); err != nil {
		return nil, err
	}
	if build != nil {
		if err := build(h, &c); err != nil {
			return nil, err
		}
	}
	if e.Ready, err = c.engine.rank.Devices.Mark(in.Device, in.Stream); err != nil {
		return nil, c.Misuse("%w", err)
	}
	if err := c.submitted(c.Submit(e)); err != nil {
		c.engine.rank.Devices.Release(e.Ready)
		return nil, err
	}
	h.name = c.Name
	return h, nil
}

func awaitDevice(ctx context.Context, h *DeviceHandle, err error) error {
	if err != nil {
		return err
	}
	return h.Wait(ctx)
}
