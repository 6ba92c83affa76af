package sidecar

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"sync/atomic"
	"unsafe"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/p2p"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/internal/sidecar/wire"
)

// plan is an operation as a client has described it. It can be executed any number of times.
type plan struct {
	rank.Operation
	places []location // for each tensor, the location of its input followed by the location of its output
	makes  bool       // the sidecar allocates at least one output
	wrong  error      // why the plan cannot be executed; nil if it can be executed

	bytes   int64        // size of the plan, once a slot has it
	holders atomic.Int32 // number of slots and operations that have the plan
}

// size returns about how many bytes of memory a plan takes.
func (p *plan) size() int64 {
	n := int(unsafe.Sizeof(*p)) + len(p.Name) + 8*cap(p.Splits) +
		cap(p.Tensors)*int(unsafe.Sizeof(rank.Tensor{})) + cap(p.places)*int(unsafe.Sizeof(location{}))
	for i := range p.Tensors {
		n += 16 * cap(p.Tensors[i].Shape) // the shape, and its description in a group
	}
	if p.wrong != nil {
		n += 2 * len(p.wrong.Error())
	}
	return int64(n)
}

// location is the position of an input or an output in an arena of the client.
type location struct {
	arena            uint32
	offset, numBytes uint64
	none             bool // this is an output that the sidecar allocates, so it has no location
	// The field to is the memory at this location. It is set again for each execution.
	to []byte
}

// newPlan returns the plan for the operation that a client describes. It makes the checks that are possible
// before the operation is executed. If a check fails, newPlan sets the field wrong of the plan to a usage
// error.
func newPlan(o *sidecarpb.Operation) *plan {
	if o == nil {
		o = new(sidecarpb.Operation) // it has kind 0, so it is refused
	}
	p := new(plan)
	spec := rank.Spec{
		Kind: o.Kind, DType: o.Dtype, ReduceOp: o.ReduceOp, Wire: o.WireDtype, Name: o.Name,
		Prescale: orOne(o.Prescale), Postscale: orOne(o.Postscale), TimeoutSeconds: o.TimeoutSeconds,
		Set: int(o.ProcessSet), Root: int(o.RootRank), Peer: int(o.Peer), Tag: int(o.Tag), Splits: o.Splits,
		ErrorFeedback: o.ErrorFeedback, Empty: o.Empty, Grouped: o.Grouped,
	}
	for _, t := range o.Tensors {
		spec.Tensors = append(spec.Tensors, rank.TensorSpec{DType: t.GetDtype(), Shape: t.GetShape()})
	}
	if err := p.Describe(&spec); err != nil {
		return &plan{wrong: err}
	}
	for i, t := range o.Tensors {
		if err := p.locate(&p.Tensors[i], t); err != nil {
			return &plan{wrong: p.Misuse("tensor %d: %w", i, err)}
		}
	}
	if err := p.overlaps(); err != nil {
		return &plan{wrong: p.Misuse("%w", err)}
	}
	return p
}

// orOne returns *f, or 1 if f is nil.
func orOne(f *float64) float64 {
	if f == nil {
		return 1
	}
	return *f
}

// locate checks the locations of the tensor d and adds them to the plan.
func (p *plan) locate(d *rank.Tensor, t *sidecarpb.Tensor) error {
	in := location{arena: t.GetInput().GetArena(), offset: t.GetInput().GetOffset(),
		numBytes: t.GetInput().GetBytes()}
	out := location{arena: t.GetOutput().GetArena(), offset: t.GetOutput().GetOffset(),
		numBytes: t.GetOutput().GetBytes(), none: t.GetOutput() == nil}
	size := uint64(d.DType.Size())
	switch {
	case uint64(d.NumBytes) != in.numBytes:
		return fmt.Errorf("got an input of %d bytes, which does not match shape %v and element type %v",
			in.numBytes, d.Shape, d.DType)
	case in.offset%size != 0 || out.offset%size != 0 || out.numBytes%size != 0:
		return fmt.Errorf("got an input at byte %d and an output of %d bytes at byte %d, want multiples of %d",
			in.offset, out.numBytes, out.offset, size)
	}
	p.places = append(p.places, in, out)
	p.makes = p.makes || out.none && p.Kind != message.Send
	return nil
}

// overlaps returns an error if memory that the operation writes overlaps other memory that it uses. Inputs
// may overlap each other, and the output of a tensor may be the same memory as its input.
func (p *plan) overlaps() error {
	type stretch struct {
		*location
		tensor int
		output bool
	}
	all := make([]stretch, 0, len(p.places))
	for i := range p.places {
		at := stretch{&p.places[i], i / 2, i%2 == 1}
		if at.numBytes == 0 || at.output && at.same(&p.places[i-1]) {
			// The location is empty, or it is an output in the same memory as its input. The input itself is
			// checked.
			continue
		}
		all = append(all, at)
	}
	written := func(s stretch) bool { return s.output || s.same(&p.places[2*s.tensor+1]) }
	slices.SortFunc(all, func(a, b stretch) int {
		return cmp.Or(cmp.Compare(a.arena, b.arena), cmp.Compare(a.offset, b.offset))
	})
	// Both variables describe the stretches that the loop has seen in the current arena. reads is the one
	// with the greatest end. writes is the one with the greatest end among those that the operation writes.
	var reads, writes stretch
	for i, s := range all {
		if i == 0 || s.arena != all[i-1].arena {
			reads, writes = stretch{}, stretch{}
		}
		for _, before := range []stretch{reads, writes} {
			if before.location != nil && before.end() > s.offset && (written(s) || written(before)) {
				return fmt.Errorf("tensors %d and %d overlap in arena %d at byte %d; only the output of a tensor may be the same memory as its input", before.tensor, s.tensor, s.arena, s.offset)
			}
		}
		if reads.location == nil || s.end() > reads.end() {
			reads = s
		}
		if written(s) && (writes.location == nil || s.end() > writes.end()) {
			writes = s
		}
	}
	return nil
}

// end returns the offset in the arena at which p ends. If that offset does not fit in 64 bits, end returns
// 2^64-1, which is outside every arena.
func (p *location) end() uint64 {
	if p.offset > math.MaxUint64-p.numBytes {
		return math.MaxUint64
	}
	return p.offset + p.numBytes
}

// same reports whether p and q are the same location.
func (p *location) same(q *location) bool {
	return p.arena == q.arena && p.offset == q.offset && p.numBytes == q.numBytes && p.none == q.none
}

// operation is one execution of a plan.
type operation struct {
	rank.Execution
	plan *plan
	conn *conn
	id   uint64
	uses []*clientArena
	// allocated[i] is the output that the sidecar has allocated for tensor i. If the client provides all
	// outputs, allocated is nil.
	allocated [][]byte
}

// newOperation returns an operation that executes p for the submission s, and marks its memory as in use
// until answer is called. If newOperation returns an error, it has marked nothing, and the caller must not
// call any method of the operation except answer.
func (c *conn) newOperation(p *plan, s submission) (*operation, error) {
	o := &operation{plan: p, conn: c, id: s.id}
	o.Operation, o.Number, o.Owner = &p.Operation, s.call, o
	if p.wrong != nil {
		return o, p.wrong
	}
	var err error
	if o.uses, err = c.memory.use(p.places, make([]*clientArena, 0, len(p.places))); err != nil {
		return o, usage(p.Kind.String(), p.Name, err)
	}
	if p.makes {
		o.allocated = make([][]byte, len(p.Tensors))
	}
	o.Buffers = make([]rank.Buffer, len(p.Tensors))
	for i := range o.Buffers {
		o.Buffers[i] = rank.Buffer{In: p.places[2*i].to, Out: p.places[2*i+1].to}
	}
	return o, nil
}

// rankRunner runs operations on a rank. It implements runner.
type rankRunner struct{ *rank.Rank }

// Drive implements runner.
func (r rankRunner) Drive(ctx context.Context, done func() bool) { r.Engine.Drive(ctx, done) }

// Notify implements runner.
func (r rankRunner) Notify() { r.Engine.Notify() }

// Begin implements runner. It submits o to the engine.
func (r rankRunner) Begin(o *operation) error {
	o.Rank = r.Rank
	return o.Begin()
}

// Allocate implements rank.Owner. It allocates the output of tensor i in an arena of the sidecar.
func (o *operation) Allocate(i, numBytes int) ([]byte, error) {
	if numBytes == 0 {
		return []byte{}, nil
	}
	b, err := arena.Alloc(numBytes)
	if err == nil {
		o.allocated[i] = b
	}
	return b, err
}

// freeOutputs frees the outputs that the sidecar has allocated.
func (o *operation) freeOutputs() {
	for _, b := range o.allocated {
		if b != nil {
			o.conn.server.check(arena.Free(b))
		}
	}
	o.allocated = nil
}

// plain reports whether a client needs to know no more about o than that it has succeeded. It is false if the
// sidecar provides an output, even an empty output, because the client then needs the shape of the output.
func (o *operation) plain() bool {
	p := o.plan
	return !p.makes && !p.Kind.SendsRows() && p.Kind != message.Join &&
		(p.Kind != message.Recv || p.Peer != int(p2p.AnySource))
}

// completion returns the answer to an operation that has succeeded. For an empty output that the sidecar
// provides, the answer has arena 0.
func (o *operation) completion() *sidecarpb.Completion {
	a := &sidecarpb.Completion{ReceivedSplits: o.Received()}
	switch o.Kind {
	case message.Join:
		a.LastJoined = int32(o.LastJoined())
	case message.Recv:
		a.Source = int32(o.Source())
	}
	for i, b := range o.Buffers {
		at := &sidecarpb.Memory{Bytes: uint64(len(b.Out))}
		switch given := o.plan.places[2*i+1]; {
		case !given.none:
			at.Arena, at.Offset = given.arena, given.offset
		case len(b.Out) > 0:
			ref, _ := arena.Find(b.Out)
			at.Arena, at.Offset = wire.OwnArenas+ref.Chunk, uint64(ref.Offset)
		}
		a.Results = append(a.Results, &sidecarpb.Result{Shape: o.Shape(i), Memory: at})
	}
	return a
}

// usage returns err as an error that the client has caused. It has the same type as errors of this kind in
// package hvd.
func usage(op, tensor string, err error) error {
	return &engine.UsageError{Op: op, Tensor: tensor, Err: err}
}
