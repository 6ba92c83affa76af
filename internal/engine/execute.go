package engine

import (
	"context"
	"fmt"

	"github.com/gohvd/gohvd/fusion"
	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/tensorqueue"
)

// scratch is memory that a lane keeps between operations.
type scratch struct {
	fused  fusion.Buffer // what travels, where that is not a caller's buffer
	counts []int64       // bytes by rank, or by tensor
	// tensors are those of a backend that takes them where they lie.
	tensors []ops.Tensor
	wide    fusion.Buffer // of compression
	back    fusion.Buffer
	losses  []loss
	// residuals is what compression lost of the last tensor of a name.
	residuals map[loss]*residual
}

// execute runs w and answers its tensors. On error none is answered and all belong to the caller still.
func (l *lane) execute(ctx context.Context, w *work) error {
	if err := l.collective(ctx, w); err != nil {
		return err
	}
	l.rest()
	l.observer.ended(l.set.ID, w, nil)
	for i, e := range w.entries {
		var err error
		if i < len(w.refused) {
			err = w.refused[i]
		}
		l.finish(e, err)
	}
	return nil
}

// finish answers an entry.
func (l *lane) finish(e *tensorqueue.Entry, err error) {
	if err != nil {
		err = opError(&e.Request, err)
	}
	e.Finish(err)
}

// collective moves the data of w.
func (l *lane) collective(ctx context.Context, w *work) error {
	kind := w.grant.Responses[0].Kind
	if kind == message.Error {
		for i, e := range w.entries {
			w.refuse(i, &MismatchError{Tensor: e.Request.Name, Text: w.grant.Responses[i].Text})
		}
	}
	if !kind.MovesData() {
		return nil
	}
	backend, err := l.manager.Get(w.grant.Backend)
	if err != nil {
		return err
	}
	if w.started {
		return backend.(ops.Starter).Finish(ctx)
	}
	switch kind {
	case message.Allreduce:
		return l.allreduce(ctx, backend, w)
	case message.Allgather:
		return l.allgather(ctx, backend, w)
	case message.Broadcast:
		return l.broadcast(ctx, backend, w)
	case message.Alltoall:
		return l.alltoall(ctx, backend, w)
	case message.Reducescatter:
		return l.reducescatter(ctx, backend, w)
	}
	return fmt.Errorf("engine: granted operation %v is unknown", kind)
}

// start begins the operation of w, if that can be done step by step; long says that it may be more than one step.
func (l *lane) start(w *work, long bool) (started bool, err error) {
	backend, err := l.manager.Get(w.grant.Backend)
	if err != nil {
		return false, err
	}
	s, ok := backend.(ops.Starter)
	if !ok {
		return false, nil
	}
	switch kind := w.grant.Responses[0].Kind; {
	case kind == message.Allreduce:
		return l.startAllreduce(s, w, long)
	case !long || w.absent || len(w.entries) > 1:
		return false, nil
	case kind == message.Allgather:
		return l.startAllgather(s, w)
	case kind == message.Broadcast:
		w.enter(exchanging)
		return s.StartBroadcast(w.grant.Algorithm, l.root(w), l.offer(w))
	}
	return false, nil
}

// tryFinish does the next step of what start has begun, if that is possible without waiting.
func (l *lane) tryFinish(w *work) (ops.Progress, error) {
	backend, err := l.manager.Get(w.grant.Backend)
	if err != nil {
		return ops.Waiting, err
	}
	return backend.(ops.Starter).TryFinish()
}

// checkResult refuses a result that would be allocated here because another rank says so, and cannot be.
func (l *lane) checkResult(k message.Kind, numBytes int64) error {
	if k.Ragged() && numBytes > l.maxResultBytes {
		return fmt.Errorf("the result has %d bytes, want at most %d, the memory of the host", numBytes, l.maxResultBytes)
	}
	return nil
}

// output is where the result of e goes, allocated if nobody knew its size before. It is nil if e has a place for a
// result of another size, as an operation in place that other ranks contribute more or less to than expected.
func output(e *tensorqueue.Entry, numBytes int) []byte {
	if e.Allocate != nil && e.Output == nil {
		e.Output = e.Allocate(numBytes)
	}
	if len(e.Output) != numBytes {
		return nil
	}
	return e.Output
}

// refuseSize answers tensor i, for which this rank has no room.
func refuseSize(w *work, i int, numBytes int) {
	e := w.entries[i]
	place := "in place"
	if !e.InPlace {
		place = "in the output"
	}
	text := fmt.Sprintf("%v %q: the result has %d bytes, %s there is room for %d: not all ranks contributed as much as this one",
		e.Request.Kind, e.Request.Name, numBytes, place, len(e.Output))
	if rows := w.grant.Responses[i].FirstDims; rows != nil {
		text += fmt.Sprintf(", but %v rows", rows)
	}
	w.refuse(i, &MismatchError{Tensor: e.Request.Name, Text: text})
}

func copyUnlessSame(dst, src []byte) {
	if len(dst) > 0 && len(src) > 0 && &dst[0] != &src[0] {
		copy(dst, src)
	}
}
