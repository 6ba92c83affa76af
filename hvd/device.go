package hvd

import (
	"slices"
	"sync/atomic"
	"unsafe"

	"github.com/gohvd/gohvd/hvd/internal/ondevice"
	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/tensorqueue"
)

func init() {
	ondevice.Start = func(op *ondevice.Operation, options []any) (any, error) {
		if op.Rows {
			return startOnDevice[[]int](op, options)
		}
		return startOnDevice[struct{}](op, options)
	}
}

// startOnDevice implements ondevice.Start.
func startOnDevice[R any](op *ondevice.Operation, options []any) (*Handle[R], error) {
	h, err := onDevice[R](op, options)
	if err != nil || !op.Waits {
		return started(h, err)
	}
	return h, nil
}

// deviceOp is an operation on device buffers, with its handle. R is []int if the result is the number of rows
// that came from each member, and otherwise struct{}.
type deviceOp[R any] struct {
	Handle[R]
	slot    *slot // nil once the operation is done
	dims    [1]int64
	ready   [2]*cuda.Event // backs the events of part
	streams [2]uintptr     // backs the streams of these events
	part    cuda.DevicePart
	// If the operation is a group with one request for each tensor, tensors holds their operations, the
	// counter left is the number of tensors that are not done, and group is the group in each of them.
	tensors []*deviceOp[R]
	left    atomic.Int64
	group   *deviceOp[R]
}

// finished completes o. The slot of o calls it when the operation has ended.
func (o *deviceOp[R]) finished(err error) {
	e := &o.slot.entry
	if received, ok := any(&o.result).(*[]int); ok {
		*received = ints(e.Received)
	}
	if g := o.group; g == nil {
		o.hold(e)
	} else if g.tensors[0] == o {
		g.hold(e)
	}
	o.release()
	o.slot.free()
	o.slot = nil
	o.complete(err)
	if g := o.group; g != nil && g.left.Add(-1) == 0 {
		g.completeGroup()
	}
}

// completeGroup completes a group whose tensors are all done.
func (o *deviceOp[R]) completeGroup() {
	for _, t := range o.tensors {
		if t.err != nil {
			o.complete(t.err)
			return
		}
	}
	o.complete(nil)
}

// onDevice queues op and returns its handle.
func onDevice[R any](op *ondevice.Operation, options []any) (*Handle[R], error) {
	c, err := prepare(op.Kind, op.DType, options)
	if err != nil {
		return nil, err
	}
	o := new(deviceOp[R])
	o.kind, o.name = op.Kind, c.Name
	if op.Group {
		err = checkGroup(&c, op)
		if err == nil && len(op.In) == 0 {
			o.complete(nil)
			return &o.Handle, nil
		}
	}
	o.engine = c.engine
	switch {
	case err != nil:
	case !op.Group:
		err = o.queue(&c, op)
	case op.Kind == message.Allreduce:
		err = o.queueOneRequest(&c, op)
	default:
		err = o.queueMembers(&c, op)
	}
	if err != nil {
		return nil, err
	}
	o.name = c.Name
	return &o.Handle, nil
}

func checkGroup(c *call, op *ondevice.Operation) error {
	if err := c.checkShapes(len(op.In)); err != nil {
		return err
	}
	if len(op.In) != len(op.Out) {
		return c.Misuse("got %d outputs, want one for each of %d inputs", len(op.Out), len(op.In))
	}
	return nil
}

// queue queues an operation on one tensor.
func (o *deviceOp[R]) queue(c *call, op *ondevice.Operation) error {
	if err := o.fill(c, op, 0); err != nil {
		return err
	}
	if err := c.submitted(c.Submit(&o.slot.entry)); err != nil {
		o.release()
		return err
	}
	return nil
}

// queueOneRequest queues an allreduce of a group. The whole group is one request.
func (o *deviceOp[R]) queueOneRequest(c *call, op *ondevice.Operation) error {
	o.slot = take(&c.engine.slots.group, o)
	e := &o.slot.entry
	c.Fill(e)
	o.slot.draft = o.slot.draft[:0]
	for i, in := range op.In {
		out := op.Out[i]
		device, err := deviceOf(c, in, out)
		if err == nil {
			err = checkSame(c, in, out)
		}
		if err != nil {
			return err
		}
		if e.Request.Device != device && i > 0 {
			return c.Misuse("tensor %d is on %v and tensor 0 is on %v, want the same device", i, device,
				e.Request.Device)
		}
		e.Request.Device = device
		shape := tensor.Shape{int64(in.Len)}
		if c.shapes != nil {
			if shape, err = c.shape(i, in.Len); err != nil {
				return err
			}
		}
		o.dims[0] += int64(in.Len)
		o.slot.draft = o.slot.draft.Append(c.DType, shape)
		e.Parts = append(e.Parts, tensorqueue.Part{Input: c.memory(in), Output: c.memory(out)})
	}
	e.Request.Shape, e.Request.Parts = o.dims[:], o.slot.drafted()
	if err := o.mark(c, slices.Concat(op.In, op.Out)...); err != nil {
		return err
	}
	if err := c.submitted(c.Submit(e)); err != nil {
		o.release()
		return err
	}
	return nil
}

// queueMembers queues a group that has one request for each tensor.
func (o *deviceOp[R]) queueMembers(c *call, op *ondevice.Operation) error {
	o.left.Store(int64(len(op.In)))
	entries := make([]*tensorqueue.Entry, len(op.In))
	var err error
	for i := range op.In {
		t := &deviceOp[R]{group: o}
		if err = t.fill(c, op, i); err != nil {
			break
		}
		o.tensors, entries[i] = append(o.tensors, t), &t.slot.entry
	}
	if err == nil {
		err = c.submitted(c.SubmitMembers(entries))
	}
	if err != nil {
		for _, t := range o.tensors {
			t.release()
		}
	}
	return err
}

// fill fills in the empty o for tensor i of op, checks it, and makes it wait for the streams of its buffers.
func (o *deviceOp[R]) fill(c *call, op *ondevice.Operation, i int) error {
	in, out := op.In[i], op.Out[i]
	device, err := deviceOf(c, in, out)
	if err != nil {
		return err
	}
	o.kind, o.engine = c.Kind, c.engine
	o.slot = take(&c.engine.slots.single, o)
	e := &o.slot.entry
	c.Fill(e)
	e.Input, e.Output = c.memory(in), c.memory(out)
	e.Request.Device = device
	if err := o.describe(c, op, i); err != nil {
		return err
	}
	return o.mark(c, in, out)
}

// describe completes and checks the entry of tensor i of op.
func (o *deviceOp[R]) describe(c *call, op *ondevice.Operation, i int) error {
	e, in, out, atRoot := &o.slot.entry, op.In[i], op.Out[i], true
	switch op.Kind {
	case message.Reduce, message.Broadcast, message.Gather, message.Scatter:
		if err := c.CheckRoot(op.Root); err != nil {
			return err
		}
		e.Request.Root, atRoot = topo.Rank(op.Root), c.Set.IsRoot(op.Root)
	}
	if op.Kind == message.Scatter && !atRoot {
		in.Len, c.shapes, e.Input = 0, nil, nil
	}
	if err := o.setShape(c, i, in.Len); err != nil {
		return err
	}
	// A scalar has no rows. The coordinator refuses it, so that all ranks get the error.
	shape := e.Request.Shape
	hasRows := len(shape) > 0
	switch op.Kind {
	case message.Allgather:
		// The place of this rank's rows is known when the ranks have agreed, and the engine checks it then.
		if c.overlap(in, out) && (in.Pointer < out.Pointer || c.end(in) > c.end(out)) {
			return c.Misuse("the input overlaps the output, but is no part of it")
		}
		return nil
	case message.Reducescatter:
		return checkRows(c, in, out, shape)
	case message.Alltoall:
		if hasRows {
			var err error
			if e.Splits, err = rank.Splits(&c.Call, op.Splits, shape[0]); err != nil {
				return err
			}
		}
		return checkApart(c, in, out)
	case message.Gather:
		if hasRows {
			e.Splits = rank.SplitsTo(&c.Call, op.Root, shape[0])
		}
		if !atRoot {
			e.Output = nil
			return nil
		}
		return checkApart(c, in, out)
	case message.Scatter:
		if err := rank.PrepareScatter(&c.Call, e, op.Splits); err != nil {
			return err
		}
		return checkApart(c, in, out)
	}
	if !atRoot && op.Kind == message.Reduce {
		e.Output = nil
		return nil
	}
	return checkSame(c, in, out)
}

// setShape sets the shape of tensor i of the call c, which has numElems elements.
func (o *deviceOp[R]) setShape(c *call, i, numElems int) (err error) {
	o.dims[0] = int64(numElems)
	o.slot.entry.Request.Shape = o.dims[:]
	if c.shapes != nil {
		o.slot.entry.Request.Shape, err = c.shape(i, numElems)
	}
	return err
}

// perThread is the cudaStream_t that names the default stream of the calling thread.
const perThread = 2

// mark makes the operation wait for the work that is on the streams of the buffers now. The buffers are on
// the same device.
func (o *deviceOp[R]) mark(c *call, buffers ...ondevice.Buffer) error {
	e := &o.slot.entry
	e.Device, o.part = &o.part, cuda.DevicePart{Ready: o.ready[:0]}
	marked := o.streams[:0]
	for _, b := range buffers {
		if b.Len == 0 || slices.Contains(marked, b.Stream) {
			continue
		}
		event, err := o.engine.rank.Mark(b.Device, b.Stream)
		if err != nil {
			o.release()
			return c.OnDevice(&o.engine.rank, err)
		}
		o.part.Ready, marked = append(o.part.Ready, event), append(marked, b.Stream)
	}
	if o.engine.rank.AsyncCompletion {
		o.part.Streams = marked
	}
	return nil
}

// release gives the events of mark back.
func (o *deviceOp[R]) release() {
	for _, e := range o.part.Ready {
		o.engine.rank.Devices.Release(e)
	}
	clear(o.part.Ready)
}

// memory returns the memory of b, which must not be read or written.
func (c *call) memory(b ondevice.Buffer) []byte {
	if b.Len == 0 {
		return nil
	}
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&b.Pointer)), b.Len*c.DType.Size())
}

// end returns the address after the last element of b.
func (c *call) end(b ondevice.Buffer) uintptr { return b.Pointer + uintptr(b.Len*c.DType.Size()) }

func (c *call) overlap(a, b ondevice.Buffer) bool {
	return a.Pointer < c.end(b) && b.Pointer < c.end(a)
}

// deviceOf checks the buffers of a tensor and returns the device on which they are.
func deviceOf(c *call, in, out ondevice.Buffer) (tensor.Device, error) {
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

// checkRows returns an error if out does not fit this rank's rows of a reducescatter of in, which has the
// given shape.
func checkRows(c *call, in, out ondevice.Buffer, shape tensor.Shape) error {
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

// checkPlace returns an error if out overlaps in, unless out begins at the element of in with the given
// index.
func checkPlace(c *call, in, out ondevice.Buffer, index int) error {
	at := in
	at.Len = index
	if c.overlap(in, out) && out.Pointer != c.end(at) {
		return c.Misuse("the output overlaps the input, want an output that begins at element %d of the input "+
			"or does not overlap it", index)
	}
	return nil
}

// checkSame returns an error unless out is in, or has the same length and does not overlap it.
func checkSame(c *call, in, out ondevice.Buffer) error {
	if in.Len != out.Len {
		return c.Misuse("the output has %d elements, want %d as the input", out.Len, in.Len)
	}
	return checkPlace(c, in, out, 0)
}

// checkApart returns an error if the input and the output overlap.
func checkApart(c *call, in, out ondevice.Buffer) error {
	if c.overlap(in, out) {
		return c.Misuse("the output overlaps the input")
	}
	return nil
}
