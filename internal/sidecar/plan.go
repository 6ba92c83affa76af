package sidecar

import (
	"cmp"
	"fmt"
	"slices"
	"sync/atomic"
	"unsafe"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
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
