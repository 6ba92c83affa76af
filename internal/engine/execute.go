package engine

import (
	"context"
	"fmt"

	"github.com/gohvd/gohvd/fusion"
	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/tensorqueue"
)

// scratch holds memory that a lane keeps between operations.
type scratch struct {
	fused  fusion.Buffer // memory for data that is not in a caller's buffer
	counts []int64       // numbers of bytes, by rank or by tensor
	// tensors lists the tensors of an operation that the backend reads and writes in place.
	tensors []ops.Tensor
	wide    fusion.Buffer // wide and back are memory for compression
	back    fusion.Buffer
	ready   []*cuda.Event // when the tensors on a device can be read
	losses  []lossKey
	types   []tensor.DType // the element types of a group
	// residuals are the accumulated compression losses of tensors with error feedback.
	residuals map[lossKey]*residual
}

// execution is the state of the operation that a lane executes. An operation runs in parts, one after
// another. Most operations have one part. An allreduce of a group has at least one part for each element
// type. It has more if the tensors do not fit into the fusion buffer together.
type execution struct {
	work    *work
	backend ops.Backend
	lists   bool          // whether the backend reads and writes tensors in place
	op      ops.Operation // the operation of the current part
	one     [1]ops.Tensor // the tensor of the current part, if there is only one

	buf []byte // the data that is copied to the outputs at the end
	reduction
}

// execute runs the operation of w to its end. If the operation was started before, execute continues it. It
// waits for other ranks until ctx ends. If it returns an error, it has reported no result, and the caller
// must report the error for every tensor of w.
func (l *lane) execute(ctx context.Context, w *work) error {
	if !w.started {
		l.observer.begin(w, l.observer.since())
		if err := l.copyIn(ctx, w); err != nil {
			return err
		}
		if err := l.start(w); err != nil {
			return err
		}
	}
	for {
		switch p, err := l.step(ctx, true); {
		case err != nil:
			return err
		case p == ops.Finished:
			return l.copyOut(ctx, w)
		}
	}
}

// answer reports the results of the tensors of w, which has been executed. A refused tensor ends with the
// error in w.refused, and every other tensor ends without an error.
func (l *lane) answer(w *work) {
	l.observer.ended(w, nil)
	for i, e := range w.entries {
		var err error
		if i < len(w.refused) {
			err = w.refused[i]
		}
		l.finish(e, err)
	}
}

// finish ends an entry with err. If err is not nil, finish adds to it the operation and the name of the
// tensor.
func (l *lane) finish(e *tensorqueue.Entry, err error) {
	if err != nil {
		err = opError(&e.Request, err)
	}
	e.Finish(err)
}

// start prepares the first part of w and starts the backend on it. It does not block.
func (l *lane) start(w *work) (err error) {
	x := &l.execution // the last operation has left nothing in it but its work
	x.work = w
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
	if x.backend, x.lists, err = l.manager.Get(w.grant.Backend, kind, w.grant.Algorithm); err != nil {
		return err
	}
	x.op = ops.Operation{Kind: kind, Algorithm: w.grant.Algorithm, SegmentBytes: w.grant.SegmentBytes}
	if kind.HasRoot() {
		x.op.Root = l.root(w)
	}
	if w.onDevices() {
		x.op.Devices = w.grant.Responses[0].Devices
		if x.op.Ready, x.op.Order = l.ready(w), w.order; w.watched {
			x.op.Enter = w.enter
		}
		l.completeEarly(w)
	}
	switch {
	case kind == message.Allreduce || kind == message.Reduce:
		err = l.startAllreduce()
	case x.op.Devices != nil:
		err = l.startOnDevices()
	default:
		err = l.startInHostMemory()
	}
	if err != nil && x.op.Devices == nil {
		return err
	}
	x.op.Err = err
	return l.exchange()
}

// startInHostMemory prepares an operation other than an allreduce or a reduce on tensors in host memory.
func (l *lane) startInHostMemory() (err error) {
	switch kind := l.execution.op.Kind; kind {
	case message.Allgather:
		err = l.startAllgather()
	case message.Broadcast:
		l.startBroadcast()
	case message.Alltoall, message.Gather, message.Scatter:
		l.startAlltoall()
	case message.Reducescatter:
		err = l.startReducescatter()
	default:
		err = fmt.Errorf("engine: rank 0 granted an operation of the unknown kind %v", kind)
	}
	return err
}

// exchange starts the backend on the part that the caller has prepared.
func (l *lane) exchange() error {
	x := &l.execution
	if x.op.Devices == nil {
		x.work.enter(ops.Exchanging)
	}
	return x.backend.Start(x.op)
}

// step executes the next step of the operation. If wait is set, it waits for the ranks that the step needs.
// When step returns Finished, the results of the tensors can be reported.
func (l *lane) step(ctx context.Context, wait bool) (ops.Progress, error) {
	x := &l.execution
	if x.backend == nil {
		return ops.Finished, nil
	}
	p, err := x.backend.Step(ctx, wait)
	if err != nil || p != ops.Finished {
		return p, err
	}
	if x.op.Kind == message.Allreduce || x.op.Kind == message.Reduce {
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
		x.work.enter(ops.Unpacking)
		if err := l.unpack(); err != nil {
			return ops.Waiting, err
		}
	}
	clear(l.scratch.tensors)
	*x = execution{}
	return ops.Finished, nil
}

// unpack copies the exchanged data to the outputs.
func (l *lane) unpack() error {
	x := &l.execution
	switch x.op.Kind {
	case message.Allgather:
		l.unpackAllgather(x.work, x.buf)
	case message.Broadcast:
		buf := x.buf
		for _, e := range x.work.entries {
			buf = buf[copy(e.Output, buf):]
		}
	case message.Alltoall, message.Gather, message.Scatter:
		l.unpackAlltoall()
	case message.Reducescatter:
		return l.unpackReducescatter()
	}
	return nil
}

// These limits bound the size of an operation that is executed in turns of the loop. BackgroundThreadLoop
// also serves other operations, so in its turns an operation may move only maxLoopBytes. A goroutine that
// runs turns while it waits for the operation may move more (maxDriveBytes). For larger operations, the cost
// of waking the lane is comparatively small.
const (
	maxLoopBytes  = 64 << 10
	maxDriveBytes = 4 << 20
)

// fitsInTurn reports whether turns of the loop may execute w, a few steps in each turn. waitedFor is set if
// the goroutine that runs the turns waits for w.
func (l *lane) fitsInTurn(w *work, waitedFor bool) bool {
	r := w.grant.Responses[0]
	if w.copied() {
		return false // the lane waits for the copies
	}
	numBytes := total(w)
	if r.Kind.SendsRows() && !w.absent {
		numBytes = int64(len(w.entries[0].Input)) // this rank does not know yet how many bytes it receives
	}
	if !waitedFor {
		return (r.Kind == message.Allreduce || r.Kind == message.Reduce) &&
			numBytes*int64(max(len(l.set.Ranks)-1, 1)) <= maxLoopBytes
	}
	if numBytes <= maxDriveBytes {
		return true
	}
	// Work that is not copied to a buffer first may have any size if the backend divides it into many steps.
	if _, lists, _ := l.manager.Get(w.grant.Backend, r.Kind, w.grant.Algorithm); !lists {
		return false
	}
	switch r.Kind {
	case message.Allreduce, message.Reduce:
		return r.DType.Valid() && len(w.grant.Absent) == 0 && r.Op != tensor.Adasum && !r.Wire.Valid()
	case message.Allgather, message.Broadcast:
		return len(w.entries) == 1
	}
	return false
}

// checkResult returns an error if other ranks determine the size of the result and the result is larger than
// maxResultBytes. In this case the caller must not allocate the result.
func (l *lane) checkResult(k message.Kind, numBytes int64) error {
	if k.Ragged() && numBytes > l.maxResultBytes {
		return fmt.Errorf("the result has %d bytes, want at most %d, the memory size of the host", numBytes,
			l.maxResultBytes)
	}
	return nil
}

// output returns the buffer for the result of e. If e has no buffer yet because the size of the result was
// unknown, output allocates one. It returns nil if e has a buffer of another size. That happens with an
// operation in place if other ranks contribute more or less than this rank expects.
func output(e *tensorqueue.Entry, numBytes int) []byte {
	if e.Allocate != nil && e.Output == nil {
		e.Output = e.Allocate(numBytes)
	}
	if len(e.Output) != numBytes {
		return nil
	}
	return e.Output
}

// refuseSize refuses tensor i of w because the output of the tensor cannot hold a result of numBytes.
func refuseSize(w *work, i int, numBytes int) {
	e := w.entries[i]
	place := "the output, which is also the input,"
	if !e.InPlace {
		place = "the output"
	}
	text := fmt.Sprintf(
		"%v %q: the result has %d bytes, but %s has %d bytes: not all ranks contributed as many rows as this rank",
		e.Request.Kind, e.Request.Name, numBytes, place, len(e.Output))
	if rows := w.grant.Responses[i].FirstDims; rows != nil {
		text += fmt.Sprintf(": rows by rank %v", rows)
	} else if len(e.Received) > 0 {
		text += fmt.Sprintf(": rows received by sender %v", e.Received)
	}
	w.refuse(i, &MismatchError{Tensor: e.Request.Name, Text: text})
}

func copyUnlessSame(dst, src []byte) {
	if len(dst) > 0 && len(src) > 0 && &dst[0] != &src[0] {
		copy(dst, src)
	}
}
