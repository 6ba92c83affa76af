package main

import (
	"context"
	"fmt"

	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/tensor"
)

// alone runs operations on the backend, with nothing above it.
type alone struct {
	backend *rawBackend
	// fusionBytes is the most that one fused operation holds, as in the engine.
	fusionBytes int64
}

func (p *alone) Rank() int      { return p.backend.rank }
func (p *alone) Size() int      { return p.backend.size }
func (p *alone) String() string { return "raw" }

// plan asks the backend for its algorithm.
func (p *alone) plan(s shot) (message.Algorithm, error) {
	if s.op.IsAverage() {
		return 0, errNotHere{"a backend has no averages: the engine makes them of sums"}
	}
	r := &message.Response{Kind: s.kind, DType: s.dt, Op: s.op, Shape: tensor.Shape{s.count * parts(s.kind, p.Size())}, Prescale: 1, Postscale: 1}
	alg, err := p.backend.Plan(r, s.numBytes(p.Size()))
	if err != nil {
		return 0, errNotHere{fmt.Sprintf("%v: %v", p.backend.ID(), err)}
	}
	return alg, nil
}

func (p *alone) prepare(s shot, _ string, buf []byte) (*action, error) {
	if s.kind == message.Barrier {
		return p.barrier()
	}
	alg, err := p.plan(s)
	if err != nil {
		return nil, err
	}
	each := s.count * int64(s.dt.Size())
	counts := make([]int64, p.Size())
	for i := range counts {
		counts[i] = each
	}
	own := func(b []byte) []byte { return b[int64(p.Rank())*each : int64(p.Rank()+1)*each] }
	b := p.backend.Backend
	out := buf
	a := &action{result: func() []byte { return out }}
	switch s.kind {
	case message.Allreduce:
		if s.inPlace {
			a.run = func(ctx context.Context) error { return b.Allreduce(ctx, alg, s.dt, s.op, buf) }
			return a, nil
		}
		fuser, ok := b.(ops.Fuser)
		if !ok {
			return nil, errNotHere{fmt.Sprintf("the %v backend works in place", b.ID())}
		}
		out = make([]byte, len(buf))
		tensors := []ops.Tensor{{In: buf, Out: out}}
		a.run = func(ctx context.Context) error {
			return fuser.AllreduceFused(ctx, alg, s.dt, s.op, ops.Scaling{Pre: 1, Post: 1}, tensors)
		}
		return a, nil
	case message.Alltoall:
		if s.inPlace {
			return nil, errNotHere{"a backend has no alltoall in place"}
		}
		out = make([]byte, len(buf))
		allocate := func([]int64) ([]byte, error) { return out, nil }
		a.run = func(ctx context.Context) error { return b.Alltoall(ctx, alg, buf, counts, allocate) }
		return a, nil
	}
	if !s.inPlace {
		return nil, errNotHere{fmt.Sprintf("a backend has %v in place alone", s.kind)}
	}
	switch s.kind {
	case message.Allgather:
		a.run = func(ctx context.Context) error { return b.Allgather(ctx, alg, buf, counts) }
	case message.Broadcast:
		a.run = func(ctx context.Context) error { return b.Broadcast(ctx, alg, s.root, buf) }
	case message.Reducescatter:
		out = own(buf)
		a.run = func(ctx context.Context) error { return b.Reducescatter(ctx, alg, s.dt, s.op, buf, counts) }
	default:
		return nil, errNotHere{fmt.Sprintf("no measurement of %v", s.kind)}
	}
	return a, nil
}

// barrier is an allreduce of one byte: a backend has no barrier, which to the engine is negotiation alone.
func (p *alone) barrier() (*action, error) {
	return p.prepare(shot{kind: message.Allreduce, dt: tensor.Uint8, op: tensor.Max, count: 1, inPlace: true}, "", make([]byte, 1))
}

// step reduces the tensors as the engine would after a negotiation that found all of them ready: together if mode says
// so and the backend can fuse, in its order.
func (p *alone) step(mode stepMode, dt tensor.DType, tensors, _ []named) (func(ctx context.Context) error, error) {
	s := shot{kind: message.Allreduce, dt: dt, op: tensor.Sum, inPlace: true}
	fuser, ok := p.backend.Backend.(ops.Fuser)
	if mode == bucketed {
		return nil, errNotHere{"buckets are made by those who negotiate"}
	}
	if mode == perTensor || !ok {
		algs := make([]message.Algorithm, len(tensors))
		for i, t := range tensors {
			var err error
			s.count = int64(len(t.buf) / dt.Size())
			if algs[i], err = p.plan(s); err != nil {
				return nil, err
			}
		}
		return func(ctx context.Context) error {
			for i, t := range tensors {
				if err := p.backend.Allreduce(ctx, algs[i], dt, tensor.Sum, t.buf); err != nil {
					return err
				}
			}
			return nil
		}, nil
	}
	groups := p.fuse(tensors)
	algs := make([]message.Algorithm, len(groups))
	for i, g := range groups {
		s.count = 0
		for _, t := range g {
			s.count += int64(len(t.In) / dt.Size())
		}
		var err error
		if algs[i], err = p.plan(s); err != nil {
			return nil, err
		}
	}
	return func(ctx context.Context) error {
		for i, g := range groups {
			if err := fuser.AllreduceFused(ctx, algs[i], dt, tensor.Sum, ops.Scaling{Pre: 1, Post: 1}, g); err != nil {
				return err
			}
		}
		return nil
	}, nil
}

// fuse groups neighbours up to the fusion threshold.
func (p *alone) fuse(tensors []named) [][]ops.Tensor {
	var groups [][]ops.Tensor
	have := int64(0)
	for _, t := range tensors {
		if len(groups) == 0 || have+int64(len(t.buf)) > p.fusionBytes {
			groups, have = append(groups, nil), 0
		}
		last := &groups[len(groups)-1]
		*last = append(*last, ops.Tensor{In: t.buf, Out: t.buf})
		have += int64(len(t.buf))
	}
	return groups
}
