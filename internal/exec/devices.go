package exec

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"unsafe"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/ops"
)

// startOnDevices prepares an operation other than an allreduce or a reduce on a tensor that is on CUDA
// devices. The engine cannot read such a tensor, so the backend gets it as it is.
func (m *machine) startOnDevices() error {
	x := &m.execution
	w := x.work
	r := w.Grant.Responses[0]
	t := &x.one[0]
	*t = ops.Tensor{}
	x.device.NumBytes = r.NumBytes()
	if !w.Absent {
		t.In, t.Out = w.Entries[0].Input, w.Entries[0].Output
		x.op.Tensors = x.one[:]
	}
	switch x.op.Kind {
	case message.Broadcast:
	case message.Allgather:
		out, counts, err := m.gathered(w)
		if err != nil {
			return err
		}
		t.Out, x.op.Counts = out, counts
		if !w.Absent {
			m.checkGathered(t)
		}
	case message.Reducescatter:
		x.scaling = scalingOf(r, r.DType, m.averageOver(w))
		x.op.DType, x.op.Op, x.op.Scaling = r.DType, r.Op.Base(), x.scaling.ops()
		x.op.Counts = m.scatterCounts(w)
	case message.Alltoall, message.Gather, message.Scatter:
		m.startAlltoall()
		x.device.HostBuf = rowBytes(r) == 0
		if !x.device.HostBuf {
			t.In, x.op.Buf = x.op.Buf, nil
		}
	default:
		return fmt.Errorf("engine: rank 0 granted an operation of the unknown kind %v", x.op.Kind)
	}
	return nil
}

// checkGathered refuses the tensor t of an allgather if its output has another size than the result, or if it
// overlaps the input, unless the input is where the result has this rank's rows. The other ranks run the
// operation anyway, so the backend then stores the result in memory of its own.
func (m *machine) checkGathered(t *ops.Tensor) {
	w, counts := m.execution.work, m.execution.op.Counts
	want := sum(counts[:m.me])
	switch at := int64(uintptr(unsafe.Pointer(unsafe.SliceData(t.In))) -
		uintptr(unsafe.Pointer(unsafe.SliceData(t.Out)))); {
	case int64(len(w.Entries[0].Output)) != sum(counts):
		refuseSize(w, 0, int(sum(counts)))
	case len(t.In) > 0 && at >= 0 && at < int64(len(t.Out)) && at != want:
		w.refuse(0, fmt.Errorf("the input begins at byte %d of the output, want byte %d, where the rows of this "+
			"rank are, or an input that does not overlap the output", at, want))
		t.Out = nil
	}
}

// ready returns the events after which the tensors of w can be used, one for each stream of the program. The
// slice belongs to the lane, and the next call overwrites it.
func (m *machine) ready(w *Work) []*cuda.Event {
	ready := m.scratch.ready[:0]
	for _, e := range w.Entries {
		if part, ok := e.Device.(*cuda.DevicePart); ok {
			ready = append(ready, part.Ready...)
		}
	}
	m.scratch.ready = ready
	return cuda.Latest(ready)
}

// streams returns the streams that wait on the device for the operation of w. If there are some, its entries
// complete when they do, and it goes on without them. There are none if the program waits for the end of one
// of the entries. A timeline needs the times of the device, so with a timeline the entries complete at the
// end. The slice belongs to the lane, and the next call overwrites it.
func (m *machine) streams(w *Work) []uintptr {
	if w.watching != nil || w.Absent {
		return nil
	}
	streams := m.scratch.streams[:0]
	for _, e := range w.Entries {
		part, ok := e.Device.(*cuda.DevicePart)
		if !ok || len(part.Streams) == 0 {
			return nil
		}
		for _, s := range part.Streams {
			if !slices.Contains(streams, s) {
				streams = append(streams, s)
			}
		}
	}
	m.scratch.streams = streams
	return streams
}

// launched completes the entries of w, whose operation goes on. The first of their deadlines becomes that of
// the operation.
func (m *machine) launched(w *Work) {
	var first limit
	for _, e := range w.Entries {
		if due := e.Times.Submitted + min(e.Timeout, controller.Never-e.Times.Submitted); e.Timeout > 0 &&
			(first.timeout == 0 || due < first.due) {
			first = limit{e.Request.Name, e.Timeout, due}
		}
	}
	// Set the limit before the entries leave the queue, so that the loop finds the deadline in one of them.
	if first.timeout > 0 {
		m.setLimit(w, first)
	}
	m.finish(w, nil)
	clear(w.Entries) // they may be used again
	w.Entries = w.Entries[:0]
}

// copyIn copies the tensors of w to host memory if the backend needs them there. Then the entries have the
// copies instead of the tensors until releaseCopies. It waits for the device until ctx ends.
func (m *machine) copyIn(ctx context.Context, w *Work) (err error) {
	if !w.copied() || w.Absent {
		return nil
	}
	if m.cfg.Devices == nil {
		return errors.New("rank 0 granted an operation on CUDA devices, but this rank has not loaded CUDA: set " +
			"HOROVOD_GPU_OPERATIONS to the same value at all ranks")
	}
	m.warnInHost(w.Grant.Responses[0])
	w.enter(ops.CopyingIn)
	h, size := &w.inHost, 0
	each := func(i int, in, out *[]byte) {
		h.inputs, h.outputs = append(h.inputs, cuda.Copy{From: *in}), append(h.outputs, cuda.Copy{To: *out})
		h.of = append(h.of, i)
		size += aligned(len(*in))
		if !same(*in, *out) {
			size += aligned(len(*out))
		}
	}
	w.buffers(each)
	h.device, _ = w.Grant.Responses[0].Devices[m.me].CUDA()
	if h.memory, err = m.cfg.Devices.Borrow(h.device, size); err != nil {
		return err
	}
	room, next := h.memory, 0
	take := func(n int) []byte {
		taken := room[:n:n]
		room = room[aligned(n):]
		return taken
	}
	w.buffers(func(_ int, in, out *[]byte) {
		h.inputs[next].To = take(len(*in))
		h.outputs[next].From = h.inputs[next].To
		if !same(*in, *out) {
			h.outputs[next].From = take(len(*out))
		}
		*in, *out = h.inputs[next].To, h.outputs[next].From
		next++
	})
	for i, e := range w.Entries {
		if e.Allocate != nil && len(e.Output) == 0 {
			m.allocateTwice(w, i)
		}
	}
	return m.copy(ctx, w, m.ready(w), h.inputs)
}

// allocateTwice makes Allocate of an entry, whose output does not exist yet, return host memory for the
// output besides that on the device.
func (m *machine) allocateTwice(w *Work, i int) {
	h, e := &w.inHost, w.Entries[i]
	o, allocate := madeOutput{entry: i}, e.Allocate
	e.Output = nil
	e.Allocate = func(numBytes int) []byte {
		o.made = allocate(numBytes)
		if len(o.made) != numBytes || numBytes == 0 {
			return o.made
		}
		var err error
		if o.memory, err = m.cfg.Devices.Borrow(h.device, numBytes); err != nil {
			m.cfg.Log.Warn("no host memory for the result of an operation on a device", zap.Error(err))
			return nil
		}
		h.made = append(h.made, o)
		return o.memory
	}
}

// copyOut copies the results of w to the devices if they are in host memory. It does not copy those of
// refused tensors.
func (m *machine) copyOut(ctx context.Context, w *Work) error {
	h := &w.inHost
	if h.memory == nil {
		return nil
	}
	w.enter(ops.CopyingOut)
	var outputs []cuda.Copy
	for i, c := range h.outputs {
		if e := h.of[i]; e >= len(w.Refused) || w.Refused[e] == nil {
			outputs = append(outputs, c)
		}
	}
	var after []*cuda.Event
	for _, o := range h.made {
		if o.entry >= len(w.Refused) || w.Refused[o.entry] == nil {
			outputs, after = append(outputs, cuda.Copy{To: o.made, From: o.memory}), m.ready(w)
		}
	}
	err := m.copy(ctx, w, after, outputs)
	m.releaseCopies(w)
	return err
}

// copy copies between the host and the device of w. If the device may still use the memory afterwards, the
// error is an *ops.InUseError.
func (m *machine) copy(ctx context.Context, w *Work, after []*cuda.Event, copies []cuda.Copy) error {
	h := &w.inHost
	pending, err := m.cfg.Devices.Copy(ctx, h.device, after, copies...)
	if pending {
		h.memory, h.made = nil, nil
		err = &ops.InUseError{Err: fmt.Errorf(
			"device %d may still use the buffers of the operation, which must not be used again: %w", h.device,
			err)}
	}
	return err
}

// releaseCopies gives back the host memory of w. The entries have their tensors on the device again.
func (m *machine) releaseCopies(w *Work) {
	h, next := &w.inHost, 0
	if h.memory != nil {
		m.cfg.Devices.GiveBack(h.device, h.memory)
	}
	if len(h.inputs) > 0 {
		w.buffers(func(_ int, in, out *[]byte) {
			*in, *out = h.inputs[next].From, h.outputs[next].To
			next++
		})
	}
	for _, o := range h.made {
		w.Entries[o.entry].Output = o.made
		m.cfg.Devices.GiveBack(h.device, o.memory)
	}
	w.inHost = inHost{}
}

// same reports whether a and b are the same memory.
func same(a, b []byte) bool {
	return len(a) == len(b) && unsafe.SliceData(a) == unsafe.SliceData(b)
}

// aligned returns n rounded up to a multiple of 64.
func aligned(n int) int { return (n + 63) &^ 63 }

// warnInHost logs why tensors on devices are copied to host memory, once for each reason.
func (m *machine) warnInHost(r *message.Response) {
	one := *r
	if len(r.Parts) > 0 && !r.DType.Valid() {
		for one.DType = range r.Parts.Types() {
			if m.cfg.Backends.WhyInHost(m.set.Ranks, &one) != nil {
				break
			}
		}
	}
	why := m.cfg.Backends.WhyInHost(m.set.Ranks, &one)
	if why == nil {
		return
	}
	if _, known := m.warned.LoadOrStore(why.Error(), true); !known {
		m.cfg.Log.Warn("tensors on CUDA devices are copied to host memory, which is slow, because NCCL does not "+
			"run the operation", zap.Stringer("operation", r.Kind), zap.String("tensor", r.Name), zap.Error(why))
	}
}
