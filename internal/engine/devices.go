package engine

import (
	"fmt"

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
		if t.Out, x.op.Counts = out, counts; !w.absent && int64(len(w.entries[0].Output)) != sum(counts) {
			refuseSize(w, 0, int(sum(counts)))
		}
	case message.Reducescatter:
		x.scaling = scalingOf(r, r.DType, l.averageOver(w))
		x.op.DType, x.op.Op, x.op.Scaling = r.DType, r.Op.Base(), x.scaling.ops()
		x.op.Counts = l.scatterCounts(w)
	case message.Alltoall, message.Gather, message.Scatter:
		l.startAlltoall()
		t.In, x.op.Buf = x.op.Buf, nil
	default:
		return fmt.Errorf("engine: rank 0 granted an operation of the unknown kind %v", x.op.Kind)
	}
	return nil
}

// ready returns the events after which the tensors of w can be read. The slice belongs to the lane, and the
// next call overwrites it.
func (l *lane) ready(w *work) []*cuda.Event {
	ready := l.scratch.ready[:0]
	for _, e := range w.entries {
		ready = append(ready, e.Ready)
	}
	l.scratch.ready = ready
	return ready
}

// onDevices reports whether the tensors of w are on CUDA devices.
func (w *work) onDevices() bool { return w.grant.Responses[0].Devices != nil }
