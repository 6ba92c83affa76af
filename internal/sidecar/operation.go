package sidecar

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/raw"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/tensor"
)

// maxTensors bounds those of a group.
const maxTensors = maxInFlight

// plan is an operation as a client has described it, and good for any number of runs.
type plan struct {
	raw.Operation
	places []place // two for each tensor: input and output
	makes  bool    // the sidecar is to make some output
	wrong  error   // why it cannot be run
}

// place is where a tensor is.
type place struct {
	arena            uint32
	offset, numBytes uint64
	none             bool // an output that the sidecar is to make
	// to is the memory, for one run.
	to []byte
}

// newPlan checks what can be checked before the operation is run. What is wrong then is a usage error.
func newPlan(o *sidecarpb.Operation) *plan {
	kind := message.Kind(min(o.GetKind(), math.MaxUint8))
	misuse := func(format string, args ...any) *plan {
		return &plan{wrong: usage(kind.String(), o.GetName(), fmt.Errorf(format, args...))}
	}
	if kind < message.Allreduce || kind > message.Join {
		return misuse("operation %d, want one from %d to %d", o.GetKind(), message.Allreduce, message.Join)
	}
	p := &plan{Operation: raw.Operation{
		Kind: kind, Set: int(o.ProcessSet), Name: o.Name,
		DType: tensor.DType(min(o.Dtype, math.MaxUint8)), Op: tensor.ReduceOp(min(o.ReduceOp, math.MaxUint8)),
		Prescale: orOne(o.Prescale), Postscale: orOne(o.Postscale), Wire: tensor.DType(min(o.WireDtype, math.MaxUint8)),
		Root: int(o.RootRank), ErrorFeedback: o.ErrorFeedback, Empty: o.Empty, Grouped: o.Grouped,
	}}
	timeout, err := timeoutOf(o.TimeoutSeconds)
	p.Timeout = timeout
	switch {
	case kind.MovesData() && !p.DType.Valid():
		return misuse("element type %d is unknown", o.Dtype)
	case p.Op != tensor.NoReduce && !p.Op.Valid():
		return misuse("reduction %d is unknown", o.ReduceOp)
	case p.Wire != tensor.Invalid && !p.Wire.IsHalf():
		return misuse("compression to element type %d, want float16 or bfloat16", o.WireDtype)
	case err != nil:
		return misuse("%w", err)
	case len(o.Tensors) > maxTensors:
		return misuse("%d tensors, want at most %d", len(o.Tensors), maxTensors)
	case !kind.MovesData() && len(o.Tensors) > 0:
		return misuse("%d tensors, want none", len(o.Tensors))
	}
	if len(o.Splits) > 0 {
		p.Splits = o.Splits
	}
	for i, t := range o.Tensors {
		if err := p.add(t); err != nil {
			return misuse("tensor %d: %w", i, err)
		}
	}
	if err := p.overlaps(); err != nil {
		return misuse("%w", err)
	}
	return p
}

// timeoutOf is a timeout as clients say it, 0 for that of the settings.
func timeoutOf(seconds float64) (time.Duration, error) {
	if seconds != 0 && !(seconds >= 1e-9 && seconds < math.MaxInt64/1e9) {
		return 0, fmt.Errorf("a timeout of %v s", seconds)
	}
	return time.Duration(seconds * float64(time.Second)), nil
}

// orOne is f, or 1 where that is not given.
func orOne(f *float64) float64 {
	if f == nil {
		return 1
	}
	return *f
}

// add adds a tensor.
func (p *plan) add(t *sidecarpb.Tensor) error {
	shape := tensor.Shape(t.GetShape())
	n, err := shape.NumElems()
	if err != nil {
		return err
	}
	in := place{arena: t.GetInput().GetArena(), offset: t.GetInput().GetOffset(), numBytes: t.GetInput().GetBytes()}
	out := place{arena: t.GetOutput().GetArena(), offset: t.GetOutput().GetOffset(), numBytes: t.GetOutput().GetBytes(), none: t.GetOutput() == nil}
	dt := tensor.DType(min(t.GetDtype(), math.MaxUint8))
	if dt == tensor.Invalid {
		dt = p.DType
	}
	if !dt.Valid() {
		return fmt.Errorf("element type %d is unknown", t.GetDtype())
	}
	size := uint64(dt.Size())
	switch {
	case dt != p.DType && !p.Grouped:
		return fmt.Errorf("element type %v in an operation on %v, want a group", dt, p.DType)
	case uint64(n) > in.numBytes/size || uint64(n)*size != in.numBytes:
		return fmt.Errorf("shape %v of %v in %d bytes", shape, dt, in.numBytes)
	case in.offset%size != 0 || out.offset%size != 0 || out.numBytes%size != 0:
		return fmt.Errorf("input at byte %d, output at byte %d with %d bytes, want multiples of %d", in.offset, out.offset, out.numBytes, size)
	}
	p.Tensors = append(p.Tensors, raw.Tensor{DType: dt, Shape: shape})
	p.places = append(p.places, in, out)
	p.makes = p.makes || out.none
	return nil
}

// overlaps is an error if something is written that is also something else's.
func (p *plan) overlaps() error {
	type stretch struct {
		*place
		tensor int
		output bool
	}
	all := make([]stretch, 0, len(p.places))
	for i := range p.places {
		at := stretch{&p.places[i], i / 2, i%2 == 1}
		if at.numBytes == 0 || at.output && at.same(&p.places[i-1]) {
			continue // in place: the input stands for both
		}
		all = append(all, at)
	}
	written := func(s stretch) bool { return s.output || s.same(&p.places[2*s.tensor+1]) }
	slices.SortFunc(all, func(a, b stretch) int {
		return cmp.Or(cmp.Compare(a.arena, b.arena), cmp.Compare(a.offset, b.offset))
	})
	// Of those so far in an arena: which reaches farthest, and which that is written.
	var reads, writes stretch
	for i, s := range all {
		if i == 0 || s.arena != all[i-1].arena {
			reads, writes = stretch{}, stretch{}
		}
		for _, before := range []stretch{reads, writes} {
			if before.place != nil && before.end() > s.offset && (written(s) || written(before)) {
				return fmt.Errorf("tensors %d and %d overlap in arena %d at byte %d, and are no input and output in place", before.tensor, s.tensor, s.arena, s.offset)
			}
		}
		if reads.place == nil || s.end() > reads.end() {
			reads = s
		}
		if written(s) && (writes.place == nil || s.end() > writes.end()) {
			writes = s
		}
	}
	return nil
}

// end is where p ends. If that is more than 2^64 it is no place in any arena.
func (p *place) end() uint64 {
	if p.offset > math.MaxUint64-p.numBytes {
		return math.MaxUint64
	}
	return p.offset + p.numBytes
}

func (p *place) same(q *place) bool {
	return p.arena == q.arena && p.offset == q.offset && p.numBytes == q.numBytes && p.none == q.none
}

// weight is what p counts for among those in flight.
func (p *plan) weight() int { return max(len(p.Tensors), 1) }

// operation is a run of a plan.
type operation struct {
	raw.Operation
	plan *plan
	conn *conn
	id   uint64
	uses []*given

	mu   sync.Mutex
	made [][]byte // outputs that were allocated, by tensor; nil if none was
}

// newOperation begins to use the memory of p. With an error it uses none.
func (c *conn) newOperation(p *plan, id uint64) (*operation, error) {
	o := &operation{Operation: p.Operation, plan: p, conn: c, id: id}
	if p.wrong != nil {
		return o, p.wrong
	}
	o.Allocate, o.Done = o.allocate, o.done
	var err error
	if o.uses, err = c.server.memory.use(c, p.places, make([]*given, 0, len(p.places))); err != nil {
		return o, usage(p.Kind.String(), p.Name, err)
	}
	o.Tensors = slices.Clone(p.Tensors)
	for i := range o.Tensors {
		o.Tensors[i].Input, o.Tensors[i].Output = p.places[2*i].to, p.places[2*i+1].to
	}
	return o, nil
}

// allocate makes the output of a tensor.
func (o *operation) allocate(i, numBytes int) ([]byte, error) {
	if numBytes == 0 {
		return []byte{}, nil
	}
	b, err := arena.Alloc(numBytes)
	if err != nil {
		return nil, err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.made == nil {
		o.made = make([][]byte, len(o.Tensors))
	}
	o.made[i] = b
	return b, nil
}

// forget frees what was allocated.
func (o *operation) forget() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, b := range o.made {
		if b != nil {
			o.conn.server.check(arena.Free(b))
		}
	}
	o.made = nil
}

// plain reports whether a client knows all that has come of o when it knows that it has succeeded. Of an output that the
// sidecar was to make it has to be told the shape, also if that has no bytes and nothing was allocated.
func (o *operation) plain() bool {
	return !o.plan.makes && o.Kind != message.Alltoall && o.Kind != message.Join
}

// completion is the answer of an operation that has succeeded. A result of no bytes that the sidecar made is nowhere.
func (o *operation) completion() *sidecarpb.Completion {
	a := &sidecarpb.Completion{ReceivedSplits: o.Received, LastJoined: int32(o.LastJoined)}
	for i := range o.Tensors {
		t := &o.Tensors[i]
		at := &sidecarpb.Memory{Bytes: uint64(len(t.Output))}
		switch given := o.plan.places[2*i+1]; {
		case !given.none:
			at.Arena, at.Offset = given.arena, given.offset
		case len(t.Output) > 0:
			ref, _ := arena.Find(t.Output)
			at.Arena, at.Offset = ownArenas+ref.Chunk, uint64(ref.Offset)
		}
		a.Results = append(a.Results, &sidecarpb.Result{Shape: t.Result, Memory: at})
	}
	return a
}
