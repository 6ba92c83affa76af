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
// must report the error for every tensor of w. If it reports that w was launched, w goes on on a device and
// belongs to the backend, which calls the lane's method ended.
func (m *machine) execute(ctx context.Context, w *Work) (launched bool, err error) {
	if !w.started {
		w.begin(m.cfg.Observer.Since(), m.cfg.Observer)
		if err := m.copyIn(ctx, w); err != nil {
			return false, err
		}
		if err := m.start(w); err != nil {
			return false, err
		}
	}
	for {
		switch p, err := m.step(ctx, true); {
		case err != nil:
			return false, err
		case p == ops.Launched:
			return true, nil
		case p == ops.Finished:
			return false, m.copyOut(ctx, w)
		}
	}
}

// start prepares the first part of w and starts the backend on it. It does not block.
func (m *machine) start(w *Work) (err error) {
	x := &m.execution // the last operation has left nothing in it but its work
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
	if x.backend, x.lists, err = m.manager.Get(w.Grant.Backend, kind, w.Grant.Algorithm); err != nil {
		return err
	}
	x.op = ops.Operation{Kind: kind, Algorithm: w.Grant.Algorithm, SegmentBytes: w.Grant.SegmentBytes}
	if kind.HasRoot() {
		x.op.Root = m.root(w)
	}
	if w.OnDevices() {
		x.op.Device = &x.device
		x.device.Devices = w.Grant.Responses[0].Devices
		x.device.Order = w.Order
		x.device.Name = w.Grant.Responses[0].Name
		if w.watching != nil {
			x.device.Enter = w.enter
		}
		w.on = m
		x.device.Follower, x.device.Streams = (*follower)(w), m.streams(w)
	}
	switch {
	case kind == message.Allreduce || kind == message.Reduce:
		err = m.startAllreduce()
	case x.op.Device != nil:
		err = m.startOnDevices()
	default:
		err = m.startInHostMemory()
	}
	if err != nil && x.op.Device == nil {
		return err
	}
	x.device.Err = err
	if x.op.Device != nil {
		x.device.Ready = m.ready(w) // also for outputs that were allocated just now
	}
	return m.exchange()
}

// startInHostMemory prepares an operation other than an allreduce or a reduce on tensors in host memory.
func (m *machine) startInHostMemory() (err error) {
	switch kind := m.execution.op.Kind; kind {
	case message.Allgather:
		err = m.startAllgather()
	case message.Broadcast:
		m.startBroadcast()
	case message.Alltoall, message.Gather, message.Scatter:
		m.startAlltoall()
	case message.Reducescatter:
		err = m.startReducescatter()
	default:
		err = fmt.Errorf("engine: rank 0 granted an operation of the unknown kind %v", kind)
	}
	return err
}

// exchange starts the backend on the part that the caller has prepared.
func (m *machine) exchange() error {
	x := &m.execution
	if x.op.Device == nil {
		x.work.enter(ops.Exchanging)
	}
	return x.backend.Start(x.op)
}

// step executes the next step of the operation. If wait is set, it waits for the ranks that the step needs.
// When step returns Finished, the results of the tensors can be reported. When it returns Launched, the work
// may have ended already.
func (m *machine) step(ctx context.Context, wait bool) (ops.Progress, error) {
	x := &m.execution
	if x.backend == nil {
		return ops.Finished, nil
	}
	p, err := x.backend.Step(ctx, wait)
	if p == ops.Launched && err == nil {
		clear(m.scratch.tensors)
		*x = execution{}
		return p, nil
	}
	if err != nil || p != ops.Finished {
		return p, err
	}
	if x.op.Kind == message.Allreduce || x.op.Kind == message.Reduce {
		if err := m.finishPart(); err != nil {
			return ops.Waiting, err
		}
		if x.hasParts() {
			if err := m.nextPart(); err != nil {
				return ops.Waiting, err
			}
			return ops.Moving, m.exchange()
		}
	} else if !x.work.Absent && x.buf != nil {
		x.work.enter(ops.Unpacking)
		if err := m.unpack(); err != nil {
			return ops.Waiting, err
		}
	}
	clear(m.scratch.tensors)
	*x = execution{}
	return ops.Finished, nil
}

// unpack copies the exchanged data to the outputs.
func (m *machine) unpack() error {
	x := &m.execution
	switch x.op.Kind {
	case message.Allgather:
		m.unpackAllgather(x.work, x.buf)
	case message.Broadcast:
		buf := x.buf
		for _, e := range x.work.Entries {
			buf = buf[copy(e.Output, buf):]
		}
	case message.Alltoall, message.Gather, message.Scatter:
		m.unpackAlltoall()
	case message.Reducescatter:
		return m.unpackReducescatter()
	}
	return nil
}
