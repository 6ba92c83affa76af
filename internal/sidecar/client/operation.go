package client

import (
	"errors"
	"fmt"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/internal/sidecar/wire"
	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/tensor"
	"github.com/gohvd/gohvd/tensorqueue"
	"github.com/gohvd/gohvd/topo"
)

// operation is what one Queue has taken.
type operation struct {
	engine  *Engine
	entries []*tensorqueue.Entry // one, or a group
	parts   []part               // of operations that move data, one for each tensor
}

// part is where the sidecar finds a tensor.
type part struct {
	in, out spot
	// to is where the result goes, unless later.
	to []byte
	// later says that the sidecar makes room for the result.
	later bool
}

// place finds memory for the tensors that the sidecar has too, and copies into it what does not lie there.
func (o *operation) place() error {
	if !o.entries[0].Request.Kind.MovesData() {
		return nil
	}
	o.parts = make([]part, 0, o.weight())
	add := func(entry *tensorqueue.Entry, in, out []byte) error {
		o.parts = append(o.parts, part{to: out})
		return o.parts[len(o.parts)-1].place(o.engine, entry, in)
	}
	for _, entry := range o.entries {
		if len(entry.Parts) == 0 {
			if err := add(entry, entry.Input, entry.Output); err != nil {
				return err
			}
		}
		for _, t := range entry.Parts {
			if err := add(entry, t.Input, t.Output); err != nil {
				return err
			}
		}
	}
	return nil
}

func (p *part) place(e *Engine, entry *tensorqueue.Entry, in []byte) (err error) {
	kind := entry.Request.Kind
	same := sameMemory(in, p.to)
	// The sidecar knows memory that is one tensor's input and output, and refuses other overlaps.
	within := entry.InPlace && !same
	p.in, err = e.spot(in, within && kind == message.Allgather)
	if err != nil {
		return err
	}
	if p.in.staged {
		copy(p.in.bytes, in)
	}
	switch {
	case entry.Allocate != nil:
		p.later = true
	case same:
		p.out = p.in
	default:
		p.out, err = e.spot(p.to, within && kind == message.Reducescatter)
		if err == nil && p.out.staged && p.in.staged && len(in) == len(p.to) {
			e.stage.put(p.out.bytes)
			p.out = p.in // one copy serves both
		}
	}
	return err
}

// sameMemory reports whether a and b are one.
func sameMemory(a, b []byte) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}

// release gives the copies up.
func (o *operation) release() {
	for i := range o.parts {
		p := &o.parts[i]
		if p.in.staged {
			o.engine.stage.put(p.in.bytes)
		}
		if p.out.staged && !sameMemory(p.in.bytes, p.out.bytes) {
			o.engine.stage.put(p.out.bytes)
		}
	}
	o.parts = nil
}

// refused reports whether the sidecar has refused memory that o is placed in. The caller holds mu.
func (o *operation) refused() bool {
	for i := range o.parts {
		p := &o.parts[i]
		if p.in.share != nil && p.in.share.refused != nil || p.out.share != nil && p.out.share.refused != nil {
			return true
		}
	}
	return false
}

// replace places o anew.
func (o *operation) replace() error {
	o.release()
	return o.place()
}

// weight is what o counts for among those in flight.
func (o *operation) weight() (tensors int) {
	for _, entry := range o.entries {
		tensors += max(len(entry.Parts), 1)
	}
	return tensors
}

// request is o as the sidecar wants it. The caller holds mu.
func (o *operation) request(id uint64) *sidecarpb.Request {
	entry := o.entries[0]
	q := &entry.Request
	switch q.Kind {
	case message.AddProcessSet:
		add := &sidecarpb.AddProcessSet{TimeoutSeconds: entry.Timeout.Seconds()}
		for _, r := range q.Ranks {
			add.Ranks = append(add.Ranks, int32(r))
		}
		return &sidecarpb.Request{Id: id, What: &sidecarpb.Request_AddProcessSet{AddProcessSet: add}}
	case message.RemoveProcessSet:
		return &sidecarpb.Request{Id: id, What: &sidecarpb.Request_RemoveProcessSet{
			RemoveProcessSet: &sidecarpb.RemoveProcessSet{Id: int32(q.Set), TimeoutSeconds: entry.Timeout.Seconds()},
		}}
	}
	op := &sidecarpb.Operation{
		Kind: uint32(q.Kind), Name: q.Name, Dtype: uint32(q.DType), ReduceOp: uint32(q.Op),
		RootRank: int32(q.Root), ProcessSet: int32(entry.Set),
		WireDtype: uint32(q.Wire), ErrorFeedback: entry.ErrorFeedback, Empty: q.Empty,
		TimeoutSeconds: entry.Timeout.Seconds(), Splits: entry.Splits,
	}
	if q.Kind.Reduces() {
		op.Prescale, op.Postscale = factor(q.Prescale), factor(q.Postscale)
	}
	if q.Kind == message.Join {
		op.Name = "" // it has none to choose
	}
	if q.GroupSize > 0 {
		op.Name, op.Grouped = q.Group, true
	}
	shapes := make([]tensor.Shape, 0, len(o.parts))
	for _, entry := range o.entries {
		if len(entry.Parts) == 0 {
			shapes = append(shapes, entry.Request.Shape)
		}
		for _, shape := range entry.Request.Parts.All() {
			op.Grouped, shapes = true, append(shapes, shape)
		}
	}
	for i := range o.parts {
		p := &o.parts[i]
		t := &sidecarpb.Tensor{Shape: shapes[i], Input: p.in.memory()}
		if !p.later {
			t.Output = p.out.memory()
		}
		op.Tensors = append(op.Tensors, t)
	}
	return &sidecarpb.Request{Id: id, What: &sidecarpb.Request_Submit{Submit: &sidecarpb.Submit{Operation: op}}}
}

// factor is a scale factor as it is said: 1 goes without saying.
func factor(f float64) *float64 {
	if f == 1 {
		return nil
	}
	return &f
}

// answer implements call.
func (o *operation) answer(r *sidecarpb.Reply) error {
	o.landed()
	if r.Error != nil {
		o.finish(errorOf(r.Error, &o.entries[0].Request))
		return nil
	}
	err := o.results(r)
	if err == nil {
		o.finish(nil)
		return nil
	}
	o.refuse(err)
	if errors.Is(err, wire.ErrFrame) {
		return err
	}
	return nil
}

// fail implements call.
func (o *operation) fail(err error) {
	o.landed()
	o.refuse(err)
}

// landed notes that o is not in flight any more.
func (o *operation) landed() {
	e := o.engine
	e.mu.Lock()
	e.flying -= o.weight()
	e.send() // what had to wait
	e.mu.Unlock()
}

// results takes what has come of o. An error is wire.ErrFrame if it is a breach of the protocol.
func (o *operation) results(r *sidecarpb.Reply) error {
	entry := o.entries[0]
	q := &entry.Request
	granted := &message.Response{Kind: q.Kind, Name: q.Name, Set: q.Set}
	switch q.Kind {
	case message.AddProcessSet:
		if r.GetProcessSet() == nil {
			return fmt.Errorf("%w: %v is answered by none", wire.ErrFrame, q.Kind)
		}
		set := setOf(r.GetProcessSet())
		granted.Set, granted.Ranks = set.ID, set.Ranks
		o.engine.mu.Lock()
		o.engine.addSet(set)
		o.engine.mu.Unlock()
		entry.Response = granted
		return nil
	case message.RemoveProcessSet:
		o.engine.removeSet(q.Set)
		entry.Response = granted
		return nil
	}
	done := r.GetCompletion()
	if done == nil || len(done.Results) != len(o.parts) {
		return fmt.Errorf("%w: %v %q of %d tensors is answered by %d", wire.ErrFrame, q.Kind, q.Name, len(o.parts), len(done.GetResults()))
	}
	granted.Root = q.Root
	if q.Kind == message.Join {
		granted.Root = topo.Rank(done.LastJoined)
	}
	entry.Received = done.ReceivedSplits
	for i := range o.parts {
		e := entry
		if len(entry.Parts) == 0 {
			e = o.entries[i]
		}
		if err := o.parts[i].result(o.engine, e, done.Results[i].GetMemory()); err != nil {
			return err
		}
	}
	for _, e := range o.entries {
		e.Response = granted
	}
	return nil
}

// result puts the result of a tensor where it belongs. Errors are as those of results.
func (p *part) result(e *Engine, entry *tensorqueue.Entry, at *sidecarpb.Memory) error {
	if !p.later {
		if got := at.GetBytes(); got != uint64(len(p.to)) {
			return fmt.Errorf("%w: a result of %d bytes for an output of %d", wire.ErrFrame, got, len(p.to))
		}
		if p.out.staged {
			copy(p.to, p.out.bytes)
		}
		return nil
	}
	b, err := e.seen(at)
	if err != nil {
		return err
	}
	entry.Output = entry.Allocate(len(b))
	if len(entry.Output) != len(b) {
		err = fmt.Errorf("no room for a result of %d bytes", len(b))
	}
	copy(entry.Output, b)
	if len(b) > 0 {
		e.giveBack(at)
	}
	return err
}

// refuse finishes the entries of o with err, each as the error of its own tensor.
func (o *operation) refuse(err error) {
	o.end(func(q *message.Request) error { return opError(q, err) })
}

// finish finishes the entries of o, all with err.
func (o *operation) finish(err error) { o.end(func(*message.Request) error { return err }) }

// end finishes the entries of o, which nobody else has any more.
func (o *operation) end(err func(*message.Request) error) {
	o.release()
	for _, entry := range o.entries {
		entry.Finish(err(&entry.Request))
	}
	e := o.engine
	e.mu.Lock()
	e.open--
	e.rest()
	e.mu.Unlock()
}

// removeSet ends the queue of a set.
func (e *Engine) removeSet(id topo.ProcessSetID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if q := e.queues[id]; q != nil {
		q.Close(engine.ErrNoProcessSet)
		delete(e.queues, id)
	}
}
