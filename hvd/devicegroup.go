package hvd

import (
	"context"
	"slices"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/tensorqueue"
)

// GroupedAllreduceDevice reduces the tensors of a group as AllreduceDevice does, and stores the result of
// ins[i] in outs[i], which may be ins[i]. If the ranks disagree about one of the tensors, none of them is
// reduced. All tensors of a rank must be on the same device. All ranks must pass the same tensors in the same
// order. A call with an empty group completes at once.
//
// Small tensors are packed into a buffer on the device, so that NCCL reduces many of them in one operation.
func GroupedAllreduceDevice[T Element](ctx context.Context, ins, outs []DeviceBuffer[T],
	opts ...Option) error {
	h, err := allreduceDeviceGroup(ins, outs, opts)
	return awaitDevice(ctx, h, err)
}

// GroupedAllreduceDeviceAsync submits a GroupedAllreduceDevice and returns its handle without waiting.
func GroupedAllreduceDeviceAsync[T Element](ins, outs []DeviceBuffer[T],
	opts ...Option) (*DeviceHandle, error) {
	return started(allreduceDeviceGroup(ins, outs, opts))
}

// allreduceDeviceGroup queues an allreduce of a group. The whole group is one request.
func allreduceDeviceGroup[T Element](ins, outs []DeviceBuffer[T], opts []Option) (*DeviceHandle, error) {
	c, h, err := prepareDeviceGroup(message.Allreduce, ins, outs, opts)
	if err != nil || len(ins) == 0 {
		return h, err
	}
	h.slot = take(&c.engine.slots.group, h)
	e := &h.slot.entry
	c.Fill(e)
	h.slot.draft = h.slot.draft[:0]
	for i, in := range ins {
		device, err := deviceOf(&c, in, outs[i])
		if err == nil {
			err = checkSame(&c, in, outs[i])
		}
		if err != nil {
			return nil, err
		}
		if e.Request.Device != device && i > 0 {
			return nil, c.Misuse("tensor %d is on %v and tensor 0 is on %v, want the same device", i, device,
				e.Request.Device)
		}
		e.Request.Device = device
		shape := tensor.Shape{int64(in.Len)}
		if c.shapes != nil {
			if shape, err = c.shape(i, in.Len); err != nil {
				return nil, err
			}
		}
		h.dims[0] += int64(in.Len)
		h.slot.draft = h.slot.draft.Append(c.DType, shape)
		e.Parts = append(e.Parts, tensorqueue.Part{Input: in.bytes(), Output: outs[i].bytes()})
	}
	e.Request.Shape, e.Request.Parts = h.dims[:], h.slot.drafted()
	if err := mark(h, &c, slices.Concat(ins, outs)...); err != nil {
		return nil, err
	}
	if err := c.submitted(c.Submit(e)); err != nil {
		h.release()
		return nil, err
	}
	h.name = c.Name
	return h, nil
}

// GroupedAllgatherDevice gathers the tensors of a group as AllgatherDevice does, and stores the result of
// ins[i] in outs[i]. It gathers either all of them or none. The tensors get their names as in
// GroupedAllgather.
func GroupedAllgatherDevice[T Element](ctx context.Context, ins, outs []DeviceBuffer[T],
	opts ...Option) error {
	h, err := manyOnDevice(message.Allgather, ins, outs, opts, allgatherBuffer[T])
	return awaitDevice(ctx, h, err)
}

// GroupedAllgatherDeviceAsync submits a GroupedAllgatherDevice and returns its handle without waiting.
func GroupedAllgatherDeviceAsync[T Element](ins, outs []DeviceBuffer[T],
	opts ...Option) (*DeviceHandle, error) {
	return started(manyOnDevice(message.Allgather, ins, outs, opts, allgatherBuffer[T]))
}

// GroupedReducescatterDevice reduces and scatters the tensors of a group as ReducescatterDevice does, and
// stores this rank's rows of ins[i] in outs[i]. Either all tensors succeed or all fail. The tensors get their
// names as in GroupedAllgather.
func GroupedReducescatterDevice[T Element](ctx context.Context, ins, outs []DeviceBuffer[T],
	opts ...Option) error {
	h, err := manyOnDevice(message.Reducescatter, ins, outs, opts, reducescatterBuffer[T])
	return awaitDevice(ctx, h, err)
}

// GroupedReducescatterDeviceAsync submits a GroupedReducescatterDevice and returns its handle without
// waiting.
func GroupedReducescatterDeviceAsync[T Element](ins, outs []DeviceBuffer[T],
	opts ...Option) (*DeviceHandle, error) {
	return started(manyOnDevice(message.Reducescatter, ins, outs, opts, reducescatterBuffer[T]))
}

// prepareDeviceGroup applies the options of an operation on a group and returns the handle of the group. If
// the group is empty, the handle is complete.
func prepareDeviceGroup[T Element](kind message.Kind, ins, outs []DeviceBuffer[T],
	opts []Option) (call, *DeviceHandle, error) {
	c, err := prepareGroup[T](kind, len(ins), opts)
	if err == nil {
		err = checkDeviceOptions(&c)
	}
	if err == nil && len(ins) != len(outs) {
		err = c.Misuse("got %d outputs, want one for each of %d inputs", len(outs), len(ins))
	}
	if err != nil {
		return c, nil, err
	}
	h := &DeviceHandle{}
	if h.kind, h.name = kind, c.Name; len(ins) == 0 {
		h.complete(nil)
	} else {
		h.engine = c.engine
	}
	return c, h, nil
}

// manyOnDevice queues an operation on each tensor of a group. It calls build to complete and check the handle
// of each tensor.
func manyOnDevice[T Element](kind message.Kind, ins, outs []DeviceBuffer[T], opts []Option,
	build deviceBuilder[T]) (*DeviceHandle, error) {
	c, g, err := prepareDeviceGroup(kind, ins, outs, opts)
	if err != nil || len(ins) == 0 {
		return g, err
	}
	g.left.Store(int64(len(ins)))
	entries := make([]*tensorqueue.Entry, len(ins))
	for i, in := range ins {
		h := &DeviceHandle{group: g}
		if err = fill(h, &c, i, in, outs[i], build); err == nil {
			err = mark(h, &c, in, outs[i])
		}
		if err != nil {
			break
		}
		g.tensors, entries[i] = append(g.tensors, h), &h.slot.entry
	}
	if err == nil {
		err = c.submitted(c.SubmitMembers(entries))
	}
	if err != nil {
		for _, h := range g.tensors {
			h.release()
		}
		return nil, err
	}
	g.name = c.Name
	return g, nil
}

// completeGroup completes a group whose tensors are all done.
func (h *DeviceHandle) completeGroup() {
	for _, t := range h.tensors {
		if t.err != nil {
			h.complete(t.err)
			return
		}
	}
	h.complete(nil)
}
