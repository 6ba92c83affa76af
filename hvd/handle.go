package hvd

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/tensor"
)

// operation is what all handles have.
type operation struct {
	kind message.Kind
	name string
	err  error // written before it is done
	// signal is nil until somebody asks for it, or the operation is done; then it is over.
	signal atomic.Pointer[signal]
	// engine is who does it; nil if there was nothing to do.
	engine *runner
}

// signal is closed when an operation is done. Most are, before anybody asks.
type signal struct{ c chan struct{} }

// over is the signal of all operations that are done.
var over = func() *signal {
	s := &signal{make(chan struct{})}
	close(s.c)
	return s
}()

// complete ends the operation.
func (o *operation) complete(err error) {
	o.err = err
	if s := o.signal.Swap(over); s != nil {
		close(s.c)
	}
}

// start has the engine notice what submit has queued, some time. Who waits at once need not call it.
func (o *operation) start() {
	if o.engine != nil {
		o.engine.RingSoon()
	}
}

// started makes an operation that goes on while the caller does something else.
func started[H interface{ start() }](h H, err error) (H, error) {
	if err == nil {
		h.start()
	}
	return h, err
}

// Poll reports whether the operation is done, so that Wait returns at once. Who asks has what was started noticed without delay.
func (o *operation) Poll() bool {
	done := o.ended()
	if !done {
		o.hurry()
	}
	return done
}

func (o *operation) ended() bool { return o.signal.Load() == over }

// hurry has the engine notice at once what submit has queued.
func (o *operation) hurry() {
	if o.engine != nil {
		o.engine.Hurry()
	}
}

// Done is closed when the operation is done. It has what was started noticed without delay.
func (o *operation) Done() <-chan struct{} {
	o.hurry()
	return o.done()
}

func (o *operation) done() <-chan struct{} {
	s := o.signal.Load()
	if s == nil {
		if s = (&signal{make(chan struct{})}); !o.signal.CompareAndSwap(nil, s) {
			s = o.signal.Load()
		}
	}
	return s.c
}

// Name is the tensor's name, or the group's.
func (o *operation) Name() string { return o.name }

func (o *operation) wait(ctx context.Context) error {
	if o.ended() {
		return o.err
	}
	if ctx.Err() != nil {
		o.start() // it goes on without a wait
		return o.gaveUp(ctx)
	}
	if o.engine != nil {
		if o.engine.Help(ctx, o.ended); o.ended() {
			return o.err
		}
	}
	select {
	case <-o.done():
		return o.err
	case <-ctx.Done():
		return o.gaveUp(ctx)
	}
}

// gaveUp is the error of a wait whose context has ended.
func (o *operation) gaveUp(ctx context.Context) error {
	err := ctx.Err()
	if cause := context.Cause(ctx); !errors.Is(cause, err) {
		err = fmt.Errorf("%w: %w", err, cause)
	}
	return fmt.Errorf("hvd: %v %q: gave up waiting, while the operation goes on: %w", o.kind, o.name, err)
}

// Handle is an operation in flight that gives elements of T. Its methods are safe for concurrent use.
type Handle[T any] struct {
	operation
	slot     *slot // nil when it is done
	out      []T
	dims     [1]int64 // of a tensor of one dimension
	received []int64
	group    *GroupHandle[T]
}

// Wait waits for the operation and gives its result. When ctx ends first the operation goes on, and the slices
// stay in use until Done.
func (h *Handle[T]) Wait(ctx context.Context) ([]T, error) {
	if err := h.wait(ctx); err != nil {
		return nil, err
	}
	return h.out, nil
}

// Received is, after an alltoall, how many rows came from each member of the process set, in its order; else nil, and
// nil until it is done.
func (h *Handle[T]) Received() []int {
	if !h.ended() {
		return nil
	}
	return intsOf(h.received)
}

// GroupHandle is a group of operations in flight. Its methods are safe for concurrent use.
type GroupHandle[T any] struct {
	operation
	// A group that is one request has its entry and its results here, others have a handle for each tensor.
	slot    *slot // nil when it is done
	outs    [][]T
	dims    [1]int64
	tensors []*Handle[T]
	left    atomic.Int64
}

// Wait waits for all tensors of the group and gives their results, in the order of the call. If one failed the error is
// the first.
func (g *GroupHandle[T]) Wait(ctx context.Context) ([][]T, error) {
	if err := g.wait(ctx); err != nil {
		return nil, err
	}
	if g.outs != nil {
		return g.outs, nil
	}
	outs := make([][]T, len(g.tensors))
	for i, h := range g.tensors {
		outs[i] = h.out
	}
	return outs, nil
}

// finished is told of the end of g's entry.
func (g *GroupHandle[T]) finished(err error) {
	e := &g.slot.entry
	if err == nil && e.Request.DType == tensor.Bool {
		for _, p := range e.Parts {
			onlyBools(p.Output)
		}
	}
	g.slot.free()
	g.slot = nil
	g.complete(err)
}

// oneFinished is told that one more tensor is done; the last ends the group.
func (g *GroupHandle[T]) oneFinished() {
	if g.left.Add(-1) > 0 {
		return
	}
	var err error
	for _, h := range g.tensors {
		if h.err != nil {
			err = h.err
			break
		}
	}
	g.complete(err)
}
