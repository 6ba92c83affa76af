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

// operation is the common part of all handles.
type operation struct {
	kind  message.Kind
	flags atomic.Uint32
	name  string
	err   error // set before the operation is done
	// signal is nil until a caller needs a channel to wait on. Once the operation is done, it is
	// closedSignal.
	signal atomic.Pointer[signal]
	// engine executes the operation. It is nil if there is nothing to execute.
	engine *Engine
	// held keeps the name (for a join, the process set) in use until the program has observed that the
	// operation is done. It is nil if the name was generated. It is written before the operation is done and
	// read afterwards.
	held interface{ Release() }
	// apart is set if turns of the loop do not execute the operation, so waiting does not drive the loop.
	apart bool
}

// Bits of operation.flags.
const (
	doneAsked uint32 = 1 << iota // the program has called Done and holds its channel
	doneSeen                     // the program has observed that the operation is done, and held is released
	gaveUp                       // a wait ended because its context ended
)

// signal holds a channel that is closed when an operation is done. Most operations are done before a caller
// needs the channel, so they never get one.
type signal struct{ c chan struct{} }

// closedSignal is the signal of every operation that is done. Its channel is closed.
var closedSignal = func() *signal {
	s := &signal{make(chan struct{})}
	close(s.c)
	return s
}()

// complete marks the operation as done and wakes the goroutines that wait for it. err is the error of the
// operation, or nil.
func (o *operation) complete(err error) {
	if err != nil && o.engine != nil {
		err = o.engine.abandoned.explain(err)
	}
	o.err = err
	s := o.signal.Swap(closedSignal)
	flags := o.flags.Load()
	if flags&gaveUp != 0 && !jobOver(err) {
		o.engine.abandoned.remove(o)
	}
	if s != nil {
		if flags&doneAsked != 0 {
			o.seen() // call seen before close, so that the name is free when the program receives
		}
		close(s.c)
	}
}

// hold keeps the name of e in use until seen is called. e is the entry of the operation or the first entry of
// its group.
func (o *operation) hold(e *tensorqueue.Entry) {
	if n := e.Held(); n != nil {
		o.held = n
	}
}

// seen frees the name, because the program has observed that the operation is done. The operation must be
// done.
func (o *operation) seen() {
	if o.held != nil && o.flags.Load()&doneSeen == 0 && o.flags.Or(doneSeen)&doneSeen == 0 {
		o.held.Release()
	}
}

// start makes the engine notice the queued operation within a bounded time. A caller that waits for the
// operation right away need not call start, because the wait itself drives the loop.
func (o *operation) start() {
	if o.engine != nil && !o.apart {
		o.engine.rank.Engine.NotifyLater()
	}
}

// started returns h without waiting for its operation, and makes the engine notice the operation.
func started[H interface{ start() }](h H, err error) (H, error) {
	if err == nil {
		h.start()
	}
	return h, err
}

// Poll reports whether the operation is done. If it is, the name of the operation is free, and Wait returns
// at once. Otherwise Poll makes the engine notice all queued operations at once.
func (o *operation) Poll() bool {
	if !o.ended() {
		o.flush()
		return false
	}
	o.seen()
	return true
}

func (o *operation) ended() bool { return o.signal.Load() == closedSignal }

// flush makes the engine notice the queued operations at once.
func (o *operation) flush() {
	if o.engine != nil && !o.apart {
		o.engine.rank.Engine.Flush()
	}
}

// Done returns a channel that is closed when the operation is done. The name is free from then on, even if
// nothing receives from the channel. Done makes the engine notice all queued operations at once.
func (o *operation) Done() <-chan struct{} {
	o.flush()
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

// Name returns the name of the tensor or group, or of a message, such as "rank 2 to rank 0, tag 7".
func (o *operation) Name() string { return o.name }

// wait waits for the operation. If ctx ends first, it returns a *PendingError whose Handle is h.
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

// await returns when the operation is done or ctx has ended.
func (o *operation) await(ctx context.Context) {
	if ctx.Err() != nil {
		o.start() // no caller drives the loop for this operation, so start must make the engine notice it
		return
	}
	if o.engine != nil && !o.apart {
		if o.engine.rank.Engine.Drive(ctx, o.ended); o.ended() {
			return
		}
	}
	select {
	case <-o.done():
	case <-ctx.Done():
	}
}

// Handle is an operation in flight whose result has elements of type T.
type Handle[T any] struct {
	operation
	slot     *slot // nil once the operation is done
	out      []T
	dims     [1]int64 // backs the shape of a tensor with one dimension
	received *[]int64 // set by an alltoall; else nil
	group    *GroupHandle[T]
}

// Wait waits for the operation and returns its result.
func (h *Handle[T]) Wait(ctx context.Context) ([]T, error) {
	if err := h.wait(ctx, h); err != nil {
		return nil, err
	}
	return h.out, nil
}

// Received returns, after an alltoall, a gather or a scatter, how many rows came from each member of the
// process set, in the order of the members. It returns nil for other operations, and while the operation is
// not done.
func (h *Handle[T]) Received() []int {
	if !h.ended() || h.received == nil {
		return nil
	}
	return ints(*h.received)
}

// ints converts numbers of rows. It returns nil for nil.
func ints(received []int64) (rows []int) {
	for _, n := range received {
		rows = append(rows, int(n))
	}
	return rows
}

// GroupHandle is a group of operations in flight.
type GroupHandle[T any] struct {
	operation
	// If the whole group is one request, slot holds its entry, outs its results and dims its shape. Otherwise
	// tensors holds one handle for each tensor, and the counter left is the number of tensors that are not
	// done.
	slot    *slot // nil once the operation is done
	outs    [][]T
	dims    [1]int64
	tensors []*Handle[T]
	left    atomic.Int64
}

// Wait waits for all tensors of the group and returns their results in the order of the call. If some tensors
// failed, Wait returns the error of the failed tensor that comes first in the call.
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

// finished completes g. The slot of g calls it when the operation has ended. err is the error of the
// operation, or nil.
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

// oneFinished is called each time a tensor of the group is done. The call for the last one completes the
// group.
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
