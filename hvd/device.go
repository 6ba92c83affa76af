package hvd

import (
	"context"
	"slices"
	"sync/atomic"
	"unsafe"

	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
)

// DeviceBuffer is a tensor in the memory of a CUDA device. Operations on it have the names, checks and
// options of operations on tensors in host memory, except InPlace, and all ranks must have the tensor on a
// device.
//
// The program must be built with cgo and the tag nccl; otherwise the operations fail with a *UsageError, as
// they do if HOROVOD_GPU_OPERATIONS is none, its default. With HOROVOD_GPU_OPERATIONS=nccl they run on NCCL.
// Tensors of operations that NCCL cannot run, and with HOROVOD_GPU_OPERATIONS=host all tensors, are copied
// through host memory (docs/nccl.md).
//
// The functions for device buffers take an input and an output, which do not overlap, except where a function
// says how it can run in place. An operation begins on the device after the work that was enqueued on the
// Streams of both buffers before the call. When the operation is done, the output is complete, and both
// buffers belong to the caller again, unless the operation fails with an *InUseError.
//
// With HOROVOD_ENABLE_ASYNC_COMPLETION=1, an operation that runs on NCCL is done when it has been launched.
// By then the Streams of both buffers wait for it on the device, so work that the program enqueues on them
// comes after the operation. If the operation fails later, the streams go on, its output is undefined, and
// the next operation, Err and Shutdown return the error.
type DeviceBuffer[T Element] struct {
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

// bytes returns the memory of b, which must not be read or written.
func (b *DeviceBuffer[T]) bytes() []byte {
	if b.Len == 0 {
		return nil
	}
	var z T
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&b.Pointer)), b.Len*int(unsafe.Sizeof(z)))
}

// DeviceHandle is an operation on device buffers, or a group of such operations, in flight.
type DeviceHandle struct {
	operation
	slot     *slot // nil once the operation is done
	dims     [1]int64
	ready    [2]*cuda.Event // backs the events of part
	part     cuda.DevicePart
	received []int64
	// If h is a group with one request for each tensor, tensors holds their handles, the counter left is the
	// number of tensors that are not done, and group is h in each of the handles.
	tensors []*DeviceHandle
	left    atomic.Int64
	group   *DeviceHandle
}

// Wait waits for the operation. If it is a group and some tensors failed, Wait returns the error of the
// failed tensor that comes first in the call.
func (h *DeviceHandle) Wait(ctx context.Context) error { return h.wait(ctx, h) }

// Received returns, after an alltoall, a gather or a scatter, how many rows came from each member of the
// process set, in the order of the members. It returns nil for other operations, and while the operation is
// not done.
func (h *DeviceHandle) Received() []int {
	if !h.ended() {
		return nil
	}
	return ints(h.received)
}

// finished completes h. The slot of h calls it when the operation has ended.
func (h *DeviceHandle) finished(err error) {
	e := &h.slot.entry
	h.received = e.Received
	if g := h.group; g == nil {
		h.hold(e)
	} else if g.tensors[0] == h {
		g.hold(e)
	}
	h.release()
	h.slot.free()
	h.slot = nil
	h.complete(err)
	if g := h.group; g != nil && g.left.Add(-1) == 0 {
		g.completeGroup()
	}
}

// AllreduceDevice reduces in over all ranks as Allreduce does, and stores the result in out, which may be in.
func AllreduceDevice[T Element](ctx context.Context, in, out DeviceBuffer[T], opts ...Option) error {
	h, err := allreduceDevice(in, out, opts)
	return awaitDevice(ctx, h, err)
}

// AllreduceDeviceAsync submits an AllreduceDevice and returns its handle without waiting.
func AllreduceDeviceAsync[T Element](in, out DeviceBuffer[T], opts ...Option) (*DeviceHandle, error) {
	return started(allreduceDevice(in, out, opts))
}

func allreduceDevice[T Element](in, out DeviceBuffer[T], opts []Option) (*DeviceHandle, error) {
	return onDevice(message.Allreduce, in, out, opts, sameLength[T])
}

// ReduceDevice reduces in over all ranks as Reduce does, and stores the result in the out of the rank root,
// which may be its in. The other ranks do not use out.
func ReduceDevice[T Element](ctx context.Context, in, out DeviceBuffer[T], root int, opts ...Option) error {
	h, err := reduceDevice(in, out, root, opts)
	return awaitDevice(ctx, h, err)
}

// ReduceDeviceAsync submits a ReduceDevice and returns its handle without waiting.
func ReduceDeviceAsync[T Element](in, out DeviceBuffer[T], root int, opts ...Option) (*DeviceHandle, error) {
	return started(reduceDevice(in, out, root, opts))
}

func reduceDevice[T Element](in, out DeviceBuffer[T], root int, opts []Option) (*DeviceHandle, error) {
	return onDevice(message.Reduce, in, out, opts, func(h *DeviceHandle, c *call, i int,
		in, out DeviceBuffer[T]) error {
		if err := c.CheckRoot(root); err != nil {
			return err
		}
		h.slot.entry.Request.Root = topo.Rank(root)
		if !c.Set.IsRoot(root) {
			h.slot.entry.Output = nil
			return h.describe(c, i, in.Len)
		}
		return sameLength(h, c, i, in, out)
	})
}

// BroadcastDevice copies the in of the rank root to the out of every rank. The ranks other than root do not
// use in, except that it says where their tensor is. out may be in.
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
	return onDevice(message.Broadcast, in, out, opts, func(h *DeviceHandle, c *call, i int,
		in, out DeviceBuffer[T]) error {
		if err := c.CheckRoot(root); err != nil {
			return err
		}
		h.slot.entry.Request.Root = topo.Rank(root)
		return sameLength(h, c, i, in, out)
	})
}

// AllgatherDevice concatenates the in of all ranks along the first dimension, in rank order, in out. If out
// has another length than the result, the operation fails at this rank. in may be the part of out that gets
// the rows of this rank. It must not overlap out in any other way.
func AllgatherDevice[T Element](ctx context.Context, in, out DeviceBuffer[T], opts ...Option) error {
	h, err := allgatherDevice(in, out, opts)
	return awaitDevice(ctx, h, err)
}

// AllgatherDeviceAsync submits an AllgatherDevice and returns its handle without waiting.
func AllgatherDeviceAsync[T Element](in, out DeviceBuffer[T], opts ...Option) (*DeviceHandle, error) {
	return started(allgatherDevice(in, out, opts))
}

func allgatherDevice[T Element](in, out DeviceBuffer[T], opts []Option) (*DeviceHandle, error) {
	return onDevice(message.Allgather, in, out, opts, allgatherBuffer[T])
}

func allgatherBuffer[T Element](h *DeviceHandle, c *call, i int, in, out DeviceBuffer[T]) error {
	if err := h.describe(c, i, in.Len); err != nil {
		return err
	}
	// The place of this rank's rows is known when the ranks have agreed, and the engine checks it then.
	if end := in.end(); overlap(in, out) && (in.Pointer < out.Pointer || end > out.end()) {
		return c.Misuse("the input overlaps the output, but is no part of it")
	}
	return nil
}

// ReducescatterDevice reduces in over all ranks as Reducescatter does, and stores this rank's rows in out.
// out may be the part of in with these rows. It must not overlap in in any other way.
func ReducescatterDevice[T Element](ctx context.Context, in, out DeviceBuffer[T], opts ...Option) error {
	h, err := reducescatterDevice(in, out, opts)
	return awaitDevice(ctx, h, err)
}

// ReducescatterDeviceAsync submits a ReducescatterDevice and returns its handle without waiting.
func ReducescatterDeviceAsync[T Element](in, out DeviceBuffer[T], opts ...Option) (*DeviceHandle, error) {
	return started(reducescatterDevice(in, out, opts))
}

func reducescatterDevice[T Element](in, out DeviceBuffer[T], opts []Option) (*DeviceHandle, error) {
	return onDevice(message.Reducescatter, in, out, opts, reducescatterBuffer[T])
}

func reducescatterBuffer[T Element](h *DeviceHandle, c *call, i int, in, out DeviceBuffer[T]) error {
	if err := h.describe(c, i, in.Len); err != nil {
		return err
	}
	shape := h.slot.entry.Request.Shape
	// A scalar has no rows. The coordinator refuses it, so that all ranks get the error.
	from, want := 0, 0
	if len(shape) > 0 && shape[0] > 0 {
		first, rows := tensor.Rows(shape[0], c.Set.Size(), c.Set.Me)
		row := in.Len / int(shape[0])
		from, want = int(first)*row, int(rows)*row
	}
	if out.Len != want {
		return c.Misuse("the output has %d elements, want %d, the rows of this rank", out.Len, want)
	}
	return checkPlace(c, in, out, from)
}

// end returns the address after the last element of b.
func (b *DeviceBuffer[T]) end() uintptr { return b.Pointer + uintptr(len(b.bytes())) }

func overlap[T Element](a, b DeviceBuffer[T]) bool { return a.Pointer < b.end() && b.Pointer < a.end() }

// checkPlace returns an error if out overlaps in, unless out begins at the element of in with the given
// index.
func checkPlace[T Element](c *call, in, out DeviceBuffer[T], index int) error {
	at := in
	at.Len = index
	if overlap(in, out) && out.Pointer != at.end() {
		return c.Misuse("the output overlaps the input, want an output that begins at element %d of the input "+
			"or does not overlap it", index)
	}
	return nil
}

// sameLength implements deviceBuilder for operations whose output has the length of the input, and may be the
// input.
func sameLength[T Element](h *DeviceHandle, c *call, i int, in, out DeviceBuffer[T]) error {
	if err := checkSame(c, in, out); err != nil {
		return err
	}
	return h.describe(c, i, in.Len)
}

// checkSame returns an error unless out is in, or has the same length and does not overlap it.
func checkSame[T Element](c *call, in, out DeviceBuffer[T]) error {
	if in.Len != out.Len {
		return c.Misuse("the output has %d elements, want %d as the input", out.Len, in.Len)
	}
	return checkPlace(c, in, out, 0)
}

// A deviceBuilder completes and checks the handle h of tensor i of the call c, whose buffers are in and out.
type deviceBuilder[T Element] func(h *DeviceHandle, c *call, i int, in, out DeviceBuffer[T]) error

// onDevice queues an operation on device buffers. It calls build to complete and check the handle.
func onDevice[T Element](kind message.Kind, in, out DeviceBuffer[T], opts []Option,
	build deviceBuilder[T]) (*DeviceHandle, error) {
	c, err := prepare(kind, tensor.Of[T](), false, opts)
	if err == nil {
		err = checkDeviceOptions(&c)
	}
	if err != nil {
		return nil, err
	}
	h := &DeviceHandle{}
	if err := fill(h, &c, 0, in, out, build); err != nil {
		return nil, err
	}
	if err := mark(h, &c, in, out); err != nil {
		return nil, err
	}
	if err := c.submitted(c.Submit(&h.slot.entry)); err != nil {
		h.release()
		return nil, err
	}
	h.name = c.Name
	return h, nil
}

// checkDeviceOptions returns an error if the call has an option that does not apply to device buffers.
func checkDeviceOptions(c *call) error {
	if c.InPlace {
		return c.Misuse("option InPlace does not apply to device buffers")
	}
	return nil
}

// fill fills in the empty handle h for tensor i of the call c. It calls build to complete and check it.
func fill[T Element](h *DeviceHandle, c *call, i int, in, out DeviceBuffer[T], build deviceBuilder[T]) error {
	device, err := deviceOf(c, in, out)
	if err != nil {
		return err
	}
	h.kind, h.engine = c.Kind, c.engine
	h.slot = take(&c.engine.slots.single, h)
	e := &h.slot.entry
	c.Fill(e)
	e.Input, e.Output = in.bytes(), out.bytes()
	e.Request.Device = device
	return build(h, c, i, in, out)
}

// deviceOf checks the buffers of a tensor and returns the device on which they are.
func deviceOf[T Element](c *call, in, out DeviceBuffer[T]) (tensor.Device, error) {
	on := in
	if in.Len == 0 && out.Len > 0 {
		on = out
	}
	switch {
	case in.Pointer == 0 && in.Len > 0, out.Pointer == 0 && out.Len > 0:
		return 0, c.Misuse("got a device buffer with the address 0")
	case on.Device < 0 || on.Device >= tensor.MaxCUDADevices:
		return 0, c.Misuse("got device %d, want 0 to %d", on.Device, tensor.MaxCUDADevices-1)
	case on.Device != out.Device && out.Len > 0:
		return 0, c.Misuse("the input is on device %d and the output is on device %d", in.Device, out.Device)
	case in.Stream == perThread || out.Stream == perThread:
		return 0, c.Misuse("got stream %d, which is another stream in each thread", perThread)
	}
	return tensor.CUDA(on.Device), nil
}

// describe sets the shape of tensor i of the call c, which has numElems elements.
func (h *DeviceHandle) describe(c *call, i, numElems int) (err error) {
	h.dims[0] = int64(numElems)
	if h.slot.entry.Request.Shape = h.dims[:]; c.shapes != nil {
		h.slot.entry.Request.Shape, err = c.shape(i, numElems)
	}
	return err
}

// perThread is the cudaStream_t that names the default stream of the calling thread.
const perThread = 2

// mark makes the operation wait for the work that is on the streams of the buffers now. The buffers are on
// the same device.
func mark[T Element](h *DeviceHandle, c *call, buffers ...DeviceBuffer[T]) error {
	e := &h.slot.entry
	e.Device, h.part = &h.part, cuda.DevicePart{Ready: h.ready[:0]}
	marked := make([]uintptr, 0, len(h.ready))
	for _, b := range buffers {
		if b.Len == 0 || slices.Contains(marked, b.Stream) {
			continue
		}
		event, err := h.engine.rank.Devices.Mark(b.Device, b.Stream)
		if err != nil {
			h.release()
			return c.Misuse("%w", err)
		}
		h.part.Ready, marked = append(h.part.Ready, event), append(marked, b.Stream)
	}
	if h.engine.rank.AsyncCompletion {
		h.part.Streams = marked
	}
	return nil
}

// release gives the events of mark back.
func (h *DeviceHandle) release() {
	for _, e := range h.part.Ready {
		h.engine.rank.Devices.Release(e)
	}
	clear(h.part.Ready)
}

func awaitDevice(ctx context.Context, h *DeviceHandle, err error) error {
	if err != nil {
		return err
	}
	return h.Wait(ctx)
}
