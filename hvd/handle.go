package hvd

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/tensorqueue"
)

// operation is what all handles have.
type operation struct {
	kind  message.Kind
	flags atomic.Uint32
	name  string
	err   error // written before it is done
	// signal is nil until somebody asks for it, or the operation is done; then it is over.
	signal atomic.Pointer[signal]
	// engine is who does it; nil if there was nothing to do.
	engine *Engine
	// held is the name, which stays in use until the program has seen that the operation is done; nil if it has none of its
	// own. It is written before the operation is done, and read afterwards.
	held interface{ Release() }
}

// Flags of a handle.
const (
	doneAsked uint32 = 1 << iota // the program has the channel of Done
	doneSeen                     // it has seen that the operation is done: held is released
	gaveUp                       // a wait has ended with its context
)

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
	if err != nil && o.engine != nil {
		err = o.engine.abandoned.explain(err)
	}
	o.err = err
	s := o.signal.Swap(over)
	flags := o.flags.Load()
	if flags&gaveUp != 0 && !jobOver(err) {
		o.engine.abandoned.remove(o)
	}
	if s != nil {
		if flags&doneAsked != 0 {
			o.seen() // before the program can see it
		}
		close(s.c)
	}
}

// hold keeps the name of e, which is the operation's or the first of its group, in use until seen.
func (o *operation) hold(e *tensorqueue.Entry) {
	if n := e.Held(); n != nil {
		o.held = n
	}
}

// seen frees the name. The operation is done.
func (o *operation) seen() {
	if o.held != nil && o.flags.Load()&doneSeen == 0 && o.flags.Or(doneSeen)&doneSeen == 0 {
		o.held.Release()
	}
}

// start has the engine notice what submit has queued, some time. Who waits at once need not call it.
func (o *operation) start() {
	if o.engine != nil {
		o.engine.rank.Engine.NotifyLater()
	}
}

// started makes an operation that goes on while the caller does something else.
func started[H interface{ start() }](h H, err error) (H, error) {
	if err == nil {
		h.start()
	}
	return h, err
}

// Poll reports whether the operation is done, so that Wait returns at once; its name is then free. It flushes what was started.
func (o *operation) Poll() bool {
	if !o.ended() {
		o.hurry()
		return false
	}
	o.seen()
	return true
}

func (o *operation) ended() bool { return o.signal.Load() == over }

// hurry has the engine notice at once what submit has queued.
func (o *operation) hurry() {
	if o.engine != nil {
		o.engine.rank.Engine.Flush()
	}
}

// Done returns a channel that is closed when the operation is done; its name is free from then on, whether or not anybody
// receives from the channel. It flushes what was started.
func (o *operation) Done() <-chan struct{} {
	o.hurry()
	o.flags.Or(doneAsked)
	c := o.done()
	if o.ended() {
		o.seen()
	}
	return c
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

// wait waits for the operation, whose handle is h.
func (o *operation) wait(ctx context.Context, h Pending) error {
	if !o.ended() {
		o.await(ctx)
	}
	if o.ended() {
		o.seen()
		return o.err
	}
	err := ctx.Err()
	if cause := context.Cause(ctx); !errors.Is(cause, err) {
		err = fmt.Errorf("%w: %w", err, cause)
	}
	p := &PendingError{Op: o.kind.String(), Tensor: o.name, Handle: h, Err: err}
	o.engine.abandoned.add(o, p)
	return p
}

// await returns when the operation is done, or ctx has ended.
func (o *operation) await(ctx context.Context) {
	if ctx.Err() != nil {
		o.start() // it goes on without a wait
		return
	}
	if o.engine != nil {
		if o.engine.rank.Engine.Drive(ctx, o.ended); o.ended() {
			return
		}
	}
	select {
	case <-o.done():
	case <-ctx.Done():
	}
}

// Handle is an operation in flight that gives elements of T. Its methods are safe for concurrent use.
type Handle[T any] struct {
	operation
	slot     *slot // nil when it is done
	out      []T
	dims     [1]int64 // of a tensor of one dimension
	received *[]int64 // nil but after an alltoall
	group    *GroupHandle[T]
}

// Wait waits for the operation and gives its result. When ctx ends first the error is a *PendingError: the operation goes
// on, its name stays in use, and its slices too until it is done.
func (h *Handle[T]) Wait(ctx context.Context) ([]T, error) {
	if err := h.wait(ctx, h); err != nil {
		return nil, err
	}
	return h.out, nil
}

// Received is, after an alltoall, how many rows came from each member of the process set, in its order; else nil, and
// nil until it is done.
func (h *Handle[T]) Received() []int {
	if !h.ended() || h.received == nil {
		return nil
	}
	rows := make([]int, len(*h.received))
	for i, n := range *h.received {
		rows[i] = int(n)
	}
	return rows
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
	if err := g.wait(ctx, g); err != nil {
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
			rank.OnlyBools(p.Output)
		}
	}
	g.hold(e)
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
