package hvd

import (
	"context"
	"slices"
	"sync/atomic"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/meeting"
	"github.com/gohvd/gohvd/internal/raw"
	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/tensor"
	"github.com/gohvd/gohvd/tensorqueue"
	"github.com/gohvd/gohvd/topo"
)

// Door is for the sidecar, which runs operations for other processes. Programs have no use for it.
func (e *Engine) Door() raw.Door {
	return raw.Door{
		Begin: e.beginRaw, Drive: e.engine.Drive, Shutdown: e.shutdownRaw, Close: e.closeRaw,
		StartTimeline: e.watch.StartTimeline, StopTimeline: e.watch.StopTimeline,
	}
}

// ForSidecar is for the sidecar, whose client is a process of its own, and which is one rank in several epochs, as Init's
// engine is: met is where the ranks have met, if that cannot be done again.
func ForSidecar(met **meeting.Meeting) InitOption {
	return func(o *initOptions) {
		o.sidecar = true
		keeping(met)(o)
	}
}

// processes is how many processes of the job want a processor of a host where so many ranks are. That the other ranks are as
// this one is a guess, and need not be right: it decides how they wait.
func (o *initOptions) processes(ranks int) int {
	if o.sidecar {
		return 2 * ranks
	}
	return ranks
}

func (e *Engine) shutdownRaw(ctx context.Context, reason string, failed bool) error {
	return e.shutdown(ctx, engine.Departure{Reason: reason, Failed: failed})
}

func (e *Engine) closeRaw() error {
	e.engine.Close()
	return e.release()
}

// rawOperation is a raw.Operation in flight.
type rawOperation struct {
	*raw.Operation
	tensors []rawTensor
	group   *slot // of a group that is one request, which has no tensors; nil when it is done
	dims    [1]int64
	left    atomic.Int64
	// failed is why the first output could not be allocated.
	failed atomic.Pointer[error]
}

type rawTensor struct {
	Handle[byte]
	of *rawOperation
	i  int
	// What has come of it.
	output   []byte
	received []int64
	response *message.Response
}

// maxOptions is how many one operation can have.
const maxOptions = 12

func (e *Engine) beginRaw(o *raw.Operation) error {
	set := e.sets.find(o.Set)
	if set == nil {
		return &UsageError{Op: o.Kind.String(), Tensor: o.Name, Err: ErrNoProcessSet}
	}
	var few [maxOptions]Option
	c, err := prepare(o.Kind, o.DType, o.Grouped, rawOptions(few[:0], o, set))
	if err != nil {
		return err
	}
	c.hold = false // the client knows what its program has seen
	if o.Kind == message.Join {
		var entry tensorqueue.Entry
		return c.join(&entry, func(err error) {
			joining{c.set}.Release()
			if err == nil {
				o.LastJoined = int(entry.Response.Root)
			}
			o.Done(err)
		})
	}
	r := &rawOperation{Operation: o}
	if o.Grouped && o.Kind == message.Allreduce && len(o.Tensors) > 0 {
		return r.allreduceGroup(&c)
	}
	if err := r.prepare(&c); err != nil {
		return err
	}
	if len(r.tensors) == 0 {
		o.Done(nil)
		return nil
	}
	var one [1]*Handle[byte]
	handles := one[:0]
	for i := range r.tensors {
		handles = append(handles, &r.tensors[i].Handle)
	}
	return submit(&c, o.Grouped, handles...)
}

// rawOptions are the options of o, so that those that do not apply are refused as everywhere.
func rawOptions(opts []Option, o *raw.Operation, set *ProcessSet) []Option {
	opts = append(opts, Over(set))
	if o.Name != "" {
		opts = append(opts, Name(o.Name))
	}
	if o.Op != tensor.NoReduce {
		opts = append(opts, Op(o.Op))
	}
	if o.Prescale != 1 {
		opts = append(opts, Prescale(o.Prescale))
	}
	if o.Postscale != 1 {
		opts = append(opts, Postscale(o.Postscale))
	}
	if o.Wire != tensor.Invalid {
		opts = append(opts, Option{kind: optCompress, wire: o.Wire})
	}
	if o.ErrorFeedback {
		opts = append(opts, ErrorFeedback())
	}
	if o.Empty {
		opts = append(opts, Empty())
	}
	if o.Timeout != 0 {
		opts = append(opts, Timeout(o.Timeout))
	}
	return opts
}

// allreduceGroup queues r, which is one request.
func (r *rawOperation) allreduceGroup(c *call) error {
	r.group = take(&c.engine.slots.group, r)
	e := &r.group.entry
	c.fill(e)
	r.group.draft = r.group.draft[:0]
	for i := range r.Tensors {
		t := &r.Tensors[i]
		dt, err := fits(c, t)
		if err != nil {
			return err
		}
		out := t.Output
		if out == nil {
			if out, err = r.Allocate(i, len(t.Input)); err != nil {
				return err
			}
		}
		if len(out) != len(t.Input) {
			return c.misuse("the output has %d bytes, want %d", len(out), len(t.Input))
		}
		r.dims[0] += int64(len(t.Input) / dt.Size())
		e.Parts = append(e.Parts, tensorqueue.Part{Input: t.Input, Output: out})
		r.group.draft = r.group.draft.Append(dt, t.Shape)
	}
	q := &e.Request
	q.Shape, q.Parts = r.dims[:], r.group.drafted()
	q.DType = q.Parts.DType()
	return c.submitGroup(e)
}

// finished is told of the end of a group that is one request.
func (r *rawOperation) finished(err error) {
	e := &r.group.entry
	for i := range e.Parts {
		t := &r.Tensors[i]
		if t.Output = e.Parts[i].Output; err == nil {
			t.Result = t.Shape
			if t.DType == tensor.Bool || t.DType == tensor.Invalid && r.DType == tensor.Bool {
				onlyBools(t.Output)
			}
		}
	}
	r.group.free()
	r.group = nil
	r.Done(err)
}

// fits gives the element type of t. It is an error if the input has not the bytes of its shape.
func fits(c *call, t *raw.Tensor) (tensor.DType, error) {
	dt := t.DType
	if dt == tensor.Invalid {
		dt = c.dtype
	}
	n, err := t.Shape.NumElems()
	if err != nil {
		return dt, c.misuse("%w", err)
	}
	if size := int64(dt.Size()); n > int64(len(t.Input))/max(size, 1) || n*size != int64(len(t.Input)) {
		return dt, c.misuse("shape %v of %v in %d bytes", t.Shape, dt, len(t.Input))
	}
	return dt, nil
}

// prepare makes the handles of r.
func (r *rawOperation) prepare(c *call) error {
	switch n := len(r.Tensors); {
	case r.Kind == message.Barrier:
		if n != 0 || r.Grouped {
			return c.misuse("%d tensors, want none", n)
		}
		r.tensors = make([]rawTensor, 1) // without elements
	case !r.Kind.MovesData():
		return c.misuse("it is no operation on tensors")
	case r.Grouped && (r.Kind == message.Broadcast || r.Kind == message.Alltoall):
		return c.misuse("a group, which this operation does not have")
	case !r.Grouped && n != 1:
		return c.misuse("%d tensors, want one", n)
	default:
		r.tensors = make([]rawTensor, n)
	}
	r.left.Store(int64(len(r.tensors)))
	for i := range r.tensors {
		t := &r.tensors[i]
		if err := t.describe(c, i, 0); err != nil {
			return err
		}
		t.of, t.i = r, i
		t.slot.of, t.slot.entry.Request.Shape = t, nil
		if r.Kind != message.Barrier {
			if err := t.place(c, &r.Tensors[i]); err != nil {
				return err
			}
		}
	}
	return nil
}

// place gives t its memory.
func (t *rawTensor) place(c *call, of *raw.Tensor) error {
	dt, err := fits(c, of)
	if err != nil {
		return err
	}
	e := &t.slot.entry
	e.Request.DType, e.Request.Shape, e.Input, e.Output = dt, of.Shape, of.Input, of.Output
	e.InPlace = len(of.Input) > 0 && len(of.Input) == len(of.Output) && &of.Input[0] == &of.Output[0]
	numBytes := len(of.Input) // of the output
	switch r := t.of; c.kind {
	case message.Broadcast:
		if err := c.checkRoot(r.Root); err != nil {
			return err
		}
		e.Request.Root = topo.Rank(r.Root)
	case message.Reducescatter:
		if of.Result = slices.Clone(of.Shape); len(of.Shape) > 0 { // a scalar has no rows: the ranks are told together
			_, rows := tensor.Rows(of.Shape[0], c.set.Size(), c.set.Rank())
			numBytes = int(rows) * (len(of.Input) / max(int(of.Shape[0]), 1))
			of.Result[0] = rows
		}
	case message.Allgather:
		return t.later(of)
	case message.Alltoall:
		if len(of.Shape) > 0 {
			if e.Splits, err = c.splits(intsOf(r.Splits), of.Shape[0]); err != nil {
				return err
			}
		}
		return t.later(of)
	}
	if of.Output == nil {
		if e.Output, err = t.of.Allocate(t.i, numBytes); err != nil {
			return err
		}
	}
	if len(e.Output) != numBytes {
		return c.misuse("the output has %d bytes, want %d", len(e.Output), numBytes)
	}
	return nil
}

// later has the output made when its size is known.
func (t *rawTensor) later(of *raw.Tensor) error {
	if of.Output == nil {
		t.slot.entry.Allocate = t.allocate
	}
	return nil
}

func (t *rawTensor) allocate(numBytes int) []byte {
	b, err := t.of.Allocate(t.i, numBytes)
	if err != nil {
		t.of.failed.CompareAndSwap(nil, &err)
	}
	return b
}

// finished is told of the end of t's entry.
func (t *rawTensor) finished(err error) {
	e := &t.slot.entry
	if err == nil && e.Request.DType == tensor.Bool {
		onlyBools(e.Output)
	}
	t.output, t.response, t.received = e.Output, e.Response, e.Received
	t.slot.free()
	t.slot = nil
	t.err = err
	if t.of.left.Add(-1) == 0 {
		t.of.finish()
	}
}

// finish tells what has come of r.
func (r *rawOperation) finish() {
	for i := range r.tensors {
		if err := r.tensors[i].err; err != nil {
			if why := r.failed.Load(); why != nil {
				err = *why // the ranks could not tell more than that there is no room
			}
			r.Done(err)
			return
		}
	}
	for i := range r.Tensors {
		of, t := &r.Tensors[i], &r.tensors[i]
		of.Output = t.output
		switch r.Kind {
		case message.Allreduce, message.Broadcast:
			of.Result = of.Shape
		case message.Allgather:
			of.Result = rowsOf(of.Shape, t.response.FirstDims)
		case message.Alltoall:
			r.Received = t.received
			of.Result = rowsOf(of.Shape, t.received)
		}
	}
	r.Done(nil)
}

// rowsOf is shape with the sum of the rows.
func rowsOf(shape tensor.Shape, rows []int64) tensor.Shape {
	result := slices.Clone(shape)
	result[0] = 0
	for _, n := range rows {
		result[0] += n
	}
	return result
}

// find is the set of this ID, or nil.
func (t *setTable) find(id int) *ProcessSet {
	t.mu.Lock()
	defer t.mu.Unlock()
	i, ok := slices.BinarySearchFunc(t.all, id, func(p *ProcessSet, id int) int { return p.ID() - id })
	if !ok {
		return nil
	}
	return t.all[i]
}

func intsOf(given []int64) []int {
	if given == nil {
		return nil
	}
	ints := make([]int, len(given))
	for i, n := range given {
		ints[i] = int(n)
	}
	return ints
}
