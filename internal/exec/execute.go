package exec

import (
	"context"
	"fmt"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/outcome"
	"github.com/gohvd/gohvd/ops"
)

// execute runs the operation of w to its end. If the operation was started before, execute continues it. It
// waits for other ranks until ctx ends. If it returns an error, it has reported no result, and the caller
// must report the error for every tensor of w.
func (l *Lane) execute(ctx context.Context, w *Work) error {
	if !w.started {
		w.begin(l.cfg.Observer.Since(), l.cfg.Observer)
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

// start prepares the first part of w and starts the backend on it. It does not block.
func (l *Lane) start(w *Work) (err error) {
	x := &l.execution // the last operation has left nothing in it but its work
	x.work = w
	w.started = true
	kind := w.Grant.Responses[0].Kind
	if kind == message.Error {
		for i, e := range w.Entries {
			w.refuse(i, &outcome.MismatchError{Tensor: e.Request.Name, Text: w.Grant.Responses[i].Text})
		}
	}
	if !kind.MovesData() {
		return nil
	}
	if x.backend, x.lists, err = l.manager.Get(w.Grant.Backend, kind, w.Grant.Algorithm); err != nil {
		return err
	}
	x.op = ops.Operation{Kind: kind, Algorithm: w.Grant.Algorithm, SegmentBytes: w.Grant.SegmentBytes}
	if kind.HasRoot() {
		x.op.Root = l.root(w)
	}
	if w.OnDevices() {
		x.op.Devices = w.Grant.Responses[0].Devices
		if x.op.Ready, x.op.Order = l.ready(w), w.Order; w.watching != nil {
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
func (l *Lane) startInHostMemory() (err error) {
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
func (l *Lane) exchange() error {
	x := &l.execution
	if x.op.Devices == nil {
		x.work.enter(ops.Exchanging)
	}
	return x.backend.Start(x.op)
}

// step executes the next step of the operation. If wait is set, it waits for the ranks that the step needs.
// When step returns Finished, the results of the tensors can be reported.
func (l *Lane) step(ctx context.Context, wait bool) (ops.Progress, error) {
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
	} else if !x.work.Absent && x.buf != nil {
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
func (l *Lane) unpack() error {
	x := &l.execution
	switch x.op.Kind {
	case message.Allgather:
		l.unpackAllgather(x.work, x.buf)
	case message.Broadcast:
		buf := x.buf
		for _, e := range x.work.Entries {
			buf = buf[copy(e.Output, buf):]
		}
	case message.Alltoall, message.Gather, message.Scatter:
		l.unpackAlltoall()
	case message.Reducescatter:
		return l.unpackReducescatter()
	}
	return nil
}
