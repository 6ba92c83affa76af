package engine

import (
	"context"
	"fmt"

	"github.com/gohvd/gohvd/fusion"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/tensorqueue"
)

// scratch holds memory that a lane keeps between operations.
type scratch struct {
	fused  fusion.Buffer // what travels, where that is not a caller's buffer
	counts []int64       // bytes by rank, or by tensor
	// tensors are those of a backend that takes them where they lie.
	tensors []ops.Tensor
	wide    fusion.Buffer // of compression
	back    fusion.Buffer
	losses  []loss
	types   []tensor.DType // of a group
	// residuals is what compression lost of the last tensor of a name.
	residuals map[loss]*residual
}

// execution holds how far a lane has come with a piece of work. The work is done in parts, one after the other: mostly there is
// one, but each type of a group is reduced by itself, and so is what does not fit into the fusion buffer together.
type execution struct {
	work    *work
	backend ops.Backend
	lists   bool          // the backend takes tensors where they lie
	op      ops.Operation // of the part
	one     [1]ops.Tensor // its tensor if there is one only

	buf []byte // what travels, if that is to be copied to the outputs
	reduction
}

// execute does the work, or goes on with it if it was started before, and waits for other ranks. On error all tensors belong to the
// caller still.
func (l *lane) execute(ctx context.Context, w *work) error {
	if !w.started {
		l.observer.begin(w, l.observer.since())
		if err := l.start(w); err != nil {
			return err
		}
	}
	for {
		if p, err := l.step(ctx, true); err != nil || p == ops.Finished {
			return err
		}
	}
}

// answer answers the tensors of work that has been done.
func (l *lane) answer(w *work) {
	l.observer.ended(l.set.ID, w, nil)
	for i, e := range w.entries {
		var err error
		if i < len(w.refused) {
			err = w.refused[i]
		}
		l.finish(e, err)
	}
}

// finish answers an entry.
func (l *lane) finish(e *tensorqueue.Entry, err error) {
	if err != nil {
		err = opError(&e.Request, err)
	}
	e.Finish(err)
}

// start starts the first part of the work. It does not wait.
func (l *lane) start(w *work) (err error) {
	x := &l.execution
	*x = execution{work: w}
	w.started = true
	kind := w.grant.Responses[0].Kind
	if kind == message.Error {
		for i, e := range w.entries {
			w.refuse(i, &MismatchError{Tensor: e.Request.Name, Text: w.grant.Responses[i].Text})
		}
	}
	if !kind.MovesData() {
		return nil
	}
	if x.backend, x.lists, err = l.manager.Get(w.grant.Backend); err != nil {
		return err
	}
	x.op = ops.Operation{Kind: kind, Algorithm: w.grant.Algorithm}
	switch kind {
	case message.Allreduce:
		err = l.startAllreduce()
	case message.Allgather:
		err = l.startAllgather()
	case message.Broadcast:
		l.startBroadcast()
	case message.Alltoall:
		l.startAlltoall()
	case message.Reducescatter:
		err = l.startReducescatter()
	default:
		err = fmt.Errorf("engine: granted operation %v is unknown", kind)
	}
	if err != nil {
		return err
	}
	return l.exchange()
}

// exchange hands a part that is prepared to the backend.
func (l *lane) exchange() error {
	x := &l.execution
	x.work.enter(exchanging)
	return x.backend.Start(x.op)
}

// step does the next step of the work, waiting for other ranks or not. After Finished its tensors can be answered.
func (l *lane) step(ctx context.Context, wait bool) (ops.Progress, error) {
	x := &l.execution
	if x.backend == nil {
		return ops.Finished, nil
	}
	p, err := x.backend.Step(ctx, wait)
	if err != nil || p != ops.Finished {
		return p, err
	}
	if x.op.Kind == message.Allreduce {
		if err := l.finishPart(); err != nil {
			return ops.Waiting, err
		}
		if x.hasParts() {
			if err := l.nextPart(); err != nil {
				return ops.Waiting, err
			}
			return ops.Moving, l.exchange()
		}
	} else if !x.work.absent && x.buf != nil {
		x.work.enter(unpacking)
		if err := l.unpack(); err != nil {
			return ops.Waiting, err
		}
	}
	clear(l.scratch.tensors)
	*x = execution{}
	return ops.Finished, nil
}

// unpack copies what was exchanged to the outputs.
func (l *lane) unpack() error {
	x := &l.execution
	switch x.op.Kind {
	case message.Allgather:
		l.ungather(x.work, x.buf)
	case message.Broadcast:
		buf := x.buf
		for _, e := range x.work.entries {
			buf = buf[copy(e.Output, buf):]
		}
	case message.Alltoall:
		l.unpackAlltoall()
	case message.Reducescatter:
		return l.unpackReducescatter()
	}
	return nil
}

// Bounds on an operation that is done in turns of the loop. BackgroundThreadLoop has others to serve: it does not copy much, nor have
// a backend exchange much in one go. A goroutine that takes turns while it waits for the operation may do more. For what is larger,
// to wake the lane costs little.
const (
	maxLoopBytes  = 64 << 10
	maxDriveBytes = 4 << 20
)

// isBrief reports whether turns of the loop may do the work, steps of it at a time. waitedFor says that the goroutine that takes
// them waits for it.
func (l *lane) isBrief(w *work, waitedFor bool) bool {
	r := w.grant.Responses[0]
	numBytes := total(w)
	if r.Kind == message.Alltoall && !w.absent {
		numBytes = int64(len(w.entries[0].Input)) // what others give is not known
	}
	if !waitedFor {
		return r.Kind == message.Allreduce && numBytes*int64(max(len(l.set.Ranks)-1, 1)) <= maxLoopBytes
	}
	if numBytes <= maxDriveBytes {
		return true
	}
	// What is not copied before can be of any size, if the backend does it in many steps.
	if _, lists, _ := l.manager.Get(w.grant.Backend); !lists {
		return false
	}
	switch r.Kind {
	case message.Allreduce:
		return r.DType.Valid() && len(w.grant.Absent) == 0 && r.Op != tensor.Adasum && !r.Wire.Valid()
	case message.Allgather, message.Broadcast:
		return len(w.entries) == 1
	}
	return false
}

// checkResult refuses a result that would be allocated here because another rank says so, and cannot be.
func (l *lane) checkResult(k message.Kind, numBytes int64) error {
	if k.Ragged() && numBytes > l.maxResultBytes {
		return fmt.Errorf("the result has %d bytes, want at most %d, the memory of the host", numBytes, l.maxResultBytes)
	}
	return nil
}

// output returns where the result of e goes, allocated if nobody knew its size before. It is nil if e has a place for a
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
