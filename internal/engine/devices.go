package engine

import (
	"fmt"
	"unsafe"

	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/ops"
)

// startOnDevices prepares an operation other than an allreduce or a reduce on a tensor that is on CUDA
// devices. The engine cannot read such a tensor, so the backend gets it as it is.
func (l *lane) startOnDevices() error {
	x := &l.execution
	w := x.work
	r := w.grant.Responses[0]
	t := &x.one[0]
	*t = ops.Tensor{}
	x.op.NumBytes = r.NumBytes()
	if !w.absent {
		t.In, t.Out = w.entries[0].Input, w.entries[0].Output
		x.op.Tensors = x.one[:]
	}
	switch x.op.Kind {
	case message.Broadcast:
	case message.Allgather:
		out, counts, err := l.gathered(w)
		if err != nil {
			return err
		}
		if t.Out, x.op.Counts = out, counts; !w.absent {
			l.checkGathered(t)
		}
	case message.Reducescatter:
		x.scaling = scalingOf(r, r.DType, l.averageOver(w))
		x.op.DType, x.op.Op, x.op.Scaling = r.DType, r.Op.Base(), x.scaling.ops()
		x.op.Counts = l.scatterCounts(w)
	case message.Alltoall, message.Gather, message.Scatter:
		l.startAlltoall()
		if x.op.HostBuf = rowBytes(r) == 0; !x.op.HostBuf {
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
func (l *lane) checkGathered(t *ops.Tensor) {
	w, counts := l.execution.work, l.execution.op.Counts
	want := sum(counts[:l.me])
	switch at := int64(uintptr(unsafe.Pointer(unsafe.SliceData(t.In))) -
		uintptr(unsafe.Pointer(unsafe.SliceData(t.Out)))); {
	case int64(len(w.entries[0].Output)) != sum(counts):
		refuseSize(w, 0, int(sum(counts)))
	case len(t.In) > 0 && at >= 0 && at < int64(len(t.Out)) && at != want:
		w.refuse(0, fmt.Errorf("the input begins at byte %d of the output, want byte %d, where the rows of this "+
			"rank are, or an input that does not overlap the output", at, want))
		t.Out = nil
	}
}

// ready returns the events after which the tensors of w can be used. The slice belongs to the lane, and the
// next call overwrites it.
func (l *lane) ready(w *work) []*cuda.Event {
	ready := l.scratch.ready[:0]
	for _, e := range w.entries {
		ready = append(ready, e.Ready...)
	}
	l.scratch.ready = ready
	return ready
}

// onDevices reports whether the tensors of w are on CUDA devices.
func (w *work) onDevices() bool { return w.grant.Responses[0].Devices != nil }
