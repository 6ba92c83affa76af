package hvd

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/trace"
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

// started returns h without waiting for its operation, and makes the engine notice the operation. If err is
// not nil, the call has failed.
func started[R any](h *Handle[R], err error) (*Handle[R], error) {
	if err != nil {
		return nil, public(err)
	}
	h.start()
	return h, nil
}

// await turns an asynchronous call into a synchronous one: if err is nil, it waits for h. Otherwise the call
// has failed, and await returns err.
func await[R any](ctx context.Context, h *Handle[R], err error) (R, error) {
	if err != nil {
		var none R
		return none, public(err)
	}
	return h.Wait(ctx)
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
		begun := o.beginWait()
		o.await(ctx)
		o.endWait(begun)
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

// beginWait returns the time at which a wait begins, for endWait, or 0 if no timeline shows it.
func (o *operation) beginWait() time.Duration {
	if o.engine == nil {
		return 0
	}
	return o.engine.rank.Engine.Observer().BeginSpan()
}

// endWait shows in the timeline that the program has waited from begun, unless that is 0, until now.
func (o *operation) endWait(begun time.Duration) {
	if begun != 0 {
		o.engine.rank.Engine.Observer().EndSpan(trace.Wait, o.name, begun)
	}
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

// Handle is an operation in flight with a result of type R. R is struct{} if the operation has no result. The
// arguments of the call belong to the engine until the operation is done.
type Handle[R any] struct {
	operation
	result R // set before the operation is done
}

// Wait waits for the operation and returns its result. Further calls return the same. If ctx ends first, Wait
// returns a *PendingError, and the operation goes on. If the operation is a group and some of its tensors
// failed, Wait returns the error of the failed tensor that comes first in the call.
func (h *Handle[R]) Wait(ctx context.Context) (R, error) {
	if err := h.wait(ctx, h); err != nil {
		var none R
		return none, err
	}
	return h.result, nil
}

// Rows is the result of an AlltoallAsync or a GatherAsync. In a gather it is empty at all ranks but the root.
type Rows[T any] struct {
	// Data holds the rows that this rank has received, in the order of their senders.
	Data []T
	// Received is the number of rows that came from each member of the process set, in the order of the
	// members.
	Received []int
}

// ints converts numbers of rows. It returns nil for nil.
func ints(received []int64) (rows []int) {
	for _, n := range received {
		rows = append(rows, int(n))
	}
	return rows
}

// tensorOp is an operation on one tensor with elements of type T, with its handle.
type tensorOp[T, R any] struct {
	Handle[R]
	slot *slot // nil once the operation is done
	// out is the part of the result that has the elements. received is the part that has the numbers of rows,
	// or nil if the result has none.
	out      *[]T
	received *[]int
	dims     [1]int64 // backs the shape of a tensor with one dimension
	group    *groupOp[T]
}

// newTensorOp returns an operation whose result is a tensor.
func newTensorOp[T any]() *tensorOp[T, []T] {
	o := new(tensorOp[T, []T])
	o.out = &o.result
	return o
}

// newRowsOp returns an operation whose result has numbers of rows.
func newRowsOp[T any]() *tensorOp[T, Rows[T]] {
	o := new(tensorOp[T, Rows[T]])
	o.out, o.received = &o.result.Data, &o.result.Received
	return o
}

// finished completes o. The slot of o calls it when the operation has ended. err is the error of the
// operation, or nil.
func (o *tensorOp[T, R]) finished(err error) {
	e := &o.slot.entry
	if err == nil && e.Request.DType == tensor.Bool {
		rank.OnlyBools(e.Output)
	}
	if o.received != nil {
		*o.received = ints(e.Received)
	}
	if g := o.group; g == nil {
		o.hold(e)
	} else if &g.tensors[0].operation == &o.operation {
		g.hold(e)
	}
	o.slot.free()
	o.slot = nil
	o.complete(err)
	if o.group != nil {
		o.group.oneFinished()
	}
}

// groupOp is an operation on a group of tensors, with its handle. If the whole group is one request, slot
// holds its entry and dims its shape. Otherwise tensors holds one operation for each tensor, and the counter
// left is the number of tensors that are not done.
type groupOp[T any] struct {
	Handle[[][]T]
	slot    *slot // nil once the operation is done
	dims    [1]int64
	tensors []*tensorOp[T, []T]
	left    atomic.Int64
}

// finished completes g. The slot of g calls it when the operation has ended. err is the error of the
// operation, or nil.
func (g *groupOp[T]) finished(err error) {
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
func (g *groupOp[T]) oneFinished() {
	if g.left.Add(-1) > 0 {
		return
	}
	var err error
	g.result = make([][]T, len(g.tensors))
	for i, o := range g.tensors {
		g.result[i] = o.result
		if err == nil {
			err = o.err
		}
	}
	g.complete(err)
}
