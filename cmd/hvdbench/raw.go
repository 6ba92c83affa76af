package main

import (
	"context"
	"fmt"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/ops"
)

// rawPath implements the interface path. It runs operations directly on a backend, without negotiation. The
// backend is the one on which an engine would run the operation.
type rawPath struct {
	backend *rawBackend
	// fusionBytes is the maximum size of a fused operation, as in the engine.
	fusionBytes int64
}

func (p *rawPath) Rank() int      { return p.backend.rank }
func (p *rawPath) Size() int      { return p.backend.size }
func (p *rawPath) String() string { return "raw" }

// rawPlan says how an operation runs.
type rawPlan struct {
	ops.Backend
	id        message.Backend
	lists     bool // whether the backend accepts lists of tensors
	algorithm message.Algorithm
}

// way returns the names of the backend and of the algorithm.
func (p rawPlan) way() string {
	if p.algorithm == message.NoAlgorithm {
		return p.id.String()
	}
	return p.id.String() + " " + p.algorithm.String()
}

// plan chooses the backend and the algorithm for s. If no backend supports s, the error is errUnsupported.
func (p *rawPath) plan(s opSpec) (to rawPlan, err error) {
	if s.op.IsAverage() {
		return to, errUnsupported{"a backend has no averages; the engine computes them from sums"}
	}
	r := &message.Response{Kind: s.kind, DType: s.dt, Op: s.op,
		Shape: tensor.Shape{s.count * parts(s.kind, p.Size())}, Prescale: 1, Postscale: 1}
	to.id, to.algorithm, err = p.backend.registry.Plan(topo.UpTo(p.Size()), r,
		s.numBytes(p.Size()), nil)
	if err != nil {
		return to, errUnsupported{err.Error()}
	}
	to.Backend, to.lists, err = p.backend.manager.Get(to.id, s.kind, to.algorithm)
	return to, err
}

func (p *rawPath) prepare(s opSpec, _ string, buf []byte) (*action, error) {
	if s.kind == message.Barrier {
		return p.barrier()
	}
	to, err := p.plan(s)
	if err != nil {
		return nil, err
	}
	each := s.count * int64(s.dt.Size())
	counts := make([]int64, p.Size())
	for i := range counts {
		counts[i] = each
	}
	op := ops.Operation{Kind: s.kind, Algorithm: to.algorithm, DType: s.dt, Op: s.op,
		Scaling: ops.Scaling{Pre: 1, Post: 1}, Buf: buf, Counts: counts, Root: s.root}
	out := buf
	switch {
	case s.kind == message.Allreduce:
		if !s.inPlace {
			if !to.lists {
				return nil, errUnsupported{fmt.Sprintf("the %v backend has allreduce only in place", to.id)}
			}
			out = make([]byte, len(buf))
		}
		op.Tensors = []ops.Tensor{{In: buf, Out: out}}
	case s.kind == message.Alltoall:
		if s.inPlace {
			return nil, errUnsupported{"a backend has no alltoall in place"}
		}
		out = make([]byte, len(buf))
		op.Allocate = func([]int64) ([]byte, error) { return out, nil }
	case !s.inPlace:
		return nil, errUnsupported{fmt.Sprintf("a backend has %v only in place", s.kind)}
	case s.kind == message.Reducescatter:
		out = buf[int64(p.Rank())*each : int64(p.Rank()+1)*each]
	case s.kind != message.Allgather && s.kind != message.Broadcast:
		return nil, errUnsupported{fmt.Sprintf("hvdbench does not measure %v", s.kind)}
	}
	return &action{
		run:    func(ctx context.Context) error { return ops.Run(ctx, to, op) },
		result: func() []byte { return out },
		ran:    func() (ways, error) { return ways{to.way()}, nil },
	}, nil
}

// barrier prepares an allreduce of one byte, which serves as a barrier. A backend has no barrier of its own,
// because the engine implements a barrier by negotiation only.
func (p *rawPath) barrier() (*action, error) {
	return p.prepare(opSpec{kind: message.Allreduce, dt: tensor.Uint8, op: tensor.Max, count: 1,
		inPlace: true}, "", make([]byte, 1))
}

// step prepares a step that reduces the tensors in their order. It fuses them as the engine would if all of
// them were ready at the same time. If mode is perTensor, step does not fuse them.
func (p *rawPath) step(mode stepMode, dt tensor.DType, tensors,
	_ []named) (*action, error) {
	if mode == bucketed {
		return nil, errUnsupported{"buckets need negotiation, which a backend does not have"}
	}
	most := p.fusionBytes
	if mode == perTensor {
		most = 0
	}
	var steps []rawStep
	for _, g := range fuse(tensors, most) {
		some, err := p.reduce(dt, g)
		if err != nil {
			return nil, err
		}
		steps = append(steps, some...)
	}
	return &action{
		run: func(ctx context.Context) error {
			for _, s := range steps {
				if err := ops.Run(ctx, s.plan, s.op); err != nil {
					return err
				}
			}
			return nil
		},
		ran: func() (ran ways, _ error) {
			for _, s := range steps {
				ran = ran.add(s.plan.way())
			}
			return ran, nil
		},
	}, nil
}

// rawStep is one operation of a step.
type rawStep struct {
	plan rawPlan
	op   ops.Operation
}

// reduce returns the operations that reduce a group of tensors: one, or one for each tensor if the backend
// cannot reduce fused tensors.
func (p *rawPath) reduce(dt tensor.DType, group []ops.Tensor) (steps []rawStep, err error) {
	s := opSpec{kind: message.Allreduce, dt: dt, op: tensor.Sum, inPlace: true}
	for _, t := range group {
		s.count += int64(len(t.In) / dt.Size())
	}
	to, err := p.plan(s)
	if err != nil {
		return nil, err
	}
	if len(group) > 1 && !to.lists {
		for _, t := range group {
			one, err := p.reduce(dt, []ops.Tensor{t})
			if err != nil {
				return nil, err
			}
			steps = append(steps, one...)
		}
		return steps, nil
	}
	return []rawStep{{to, ops.Operation{Kind: message.Allreduce, Algorithm: to.algorithm, DType: dt,
		Op: tensor.Sum, Tensors: group, Scaling: ops.Scaling{Pre: 1, Post: 1}}}}, nil
}

// fuse groups consecutive tensors. A group has at most as many bytes as the parameter most says. A larger
// tensor is a group by itself.
func fuse(tensors []named, most int64) [][]ops.Tensor {
	var groups [][]ops.Tensor
	have := int64(0)
	for _, t := range tensors {
		if len(groups) == 0 || have+int64(len(t.buf)) > most {
			groups, have = append(groups, nil), 0
		}
		last := &groups[len(groups)-1]
		*last = append(*last, ops.Tensor{In: t.buf, Out: t.buf})
		have += int64(len(t.buf))
	}
	return groups
}
