package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
)

// gradients holds the tensors of a workload at this rank.
type gradients struct {
	workload
	dt      tensor.DType
	tensors []named
	arena   bool
	memory  *memory
}

// allocate allocates the tensors of w and fills them with zeros.
func (m *memory) allocate(w workload, dt tensor.DType, inArena bool) (*gradients, error) {
	g := &gradients{workload: w, dt: dt, arena: inArena, memory: m}
	for _, t := range w.gradients {
		buf, err := m.alloc(t.numElems*int64(dt.Size()), inArena)
		if err != nil {
			return nil, errors.Join(err, g.free())
		}
		g.tensors = append(g.tensors, named{w.name + "/" + t.name, buf})
	}
	return g, nil
}

// free frees the tensors.
func (g *gradients) free() error {
	var errs []error
	for _, t := range g.tensors {
		errs = append(errs, g.memory.free(t.buf, g.arena))
	}
	return errors.Join(errs...)
}

func (g *gradients) numBytes() int64 { return g.numElems() * int64(g.dt.Size()) }

// buckets allocates the buckets into which a bucketed step copies the tensors of g.
func (g *gradients) buckets() (*gradients, error) {
	first := buckets(g.tensors)
	w := workload{name: g.name + ".buckets"}
	for b := range len(first) - 1 {
		n := 0
		for _, t := range g.tensors[first[b]:first[b+1]] {
			n += len(t.buf)
		}
		w.gradients = append(w.gradients, gradient{fmt.Sprint(b), int64(n / g.dt.Size())})
	}
	return g.memory.allocate(w, g.dt, g.arena)
}

// step prepares a step over g in the given mode. It returns the step, and a function that frees the memory of
// the step.
func (g *gradients) step(p path, mode stepMode) (step *action, free func() error, err error) {
	free = func() error { return nil }
	var flats []named
	if mode == bucketed {
		b, err := g.buckets()
		if err != nil {
			return nil, nil, err
		}
		flats, free = b.tensors, b.free
	}
	step, err = p.step(mode, g.dt, g.tensors, flats)
	if err != nil {
		return nil, nil, errors.Join(err, free())
	}
	return step, free, nil
}

// fill fills each tensor with the input of rank r, one of n ranks. It returns the pattern that each tensor
// must have after a step.
func (g *gradients) fill(r, n int) (want pattern) {
	in := inputs{g.dt, tensor.Sum, n}
	for _, t := range g.tensors {
		in.of(r).fill(t.buf)
	}
	return in.reduced()
}

// wrong returns how many elements differ from the pattern want, and a description of the first wrong element.
func (g *gradients) wrong(want pattern) (count int64, first string) {
	for _, t := range g.tensors {
		n, text := want.wrong(t.buf)
		if count == 0 && n > 0 {
			first = fmt.Sprintf("%q: %s", t.name, text)
		}
		count += n
	}
	return count, first
}

// buffers returns the memory of all tensors.
func (g *gradients) buffers() [][]byte {
	var all [][]byte
	for _, t := range g.tensors {
		all = append(all, t.buf)
	}
	return all
}

// workloads measures steps over the tensors of a workload, for every type and in every mode.
func (b *benchmark) workloads(ctx context.Context) error {
	for _, dt := range b.types {
		if err := tensor.CheckReduce(tensor.Sum, dt); err != nil {
			if len(b.types) == 1 {
				return err
			}
			continue
		}
		var w workload
		var err error
		if b.many.count > 0 {
			w, err = manyTensors(b.many, dt)
		} else {
			w, err = openWorkload(b.workload)
		}
		if err != nil {
			return err
		}
		g, err := b.job.memory.allocate(w, dt, b.arena)
		if err != nil {
			return err
		}
		if err := b.steps(ctx, g); err != nil {
			return err
		}
		if err := g.free(); err != nil {
			return err
		}
	}
	return nil
}

// steps measures steps over g in every mode.
func (b *benchmark) steps(ctx context.Context, g *gradients) error {
	for _, mode := range b.modes {
		step, free, err := g.step(b.team, mode)
		var absent errUnsupported
		if errors.As(err, &absent) && len(b.modes) > 1 {
			b.skip(g.name+"_"+mode.String(), err)
			continue
		}
		if err != nil {
			return err
		}
		r := b.newResult(g.name+"_"+mode.String(), g.dt, tensor.Sum, true)
		r.bytes, r.count, r.root = g.numBytes(), g.numElems(), -1
		w := work{
			action: step, buffers: g.buffers(), kind: message.Allreduce,
			check: func() error { return b.checkStep(ctx, g, step.run, r) },
		}
		if err := b.measure(ctx, w, r); err != nil {
			return err
		}
		if err := free(); err != nil {
			return err
		}
		b.out.note(fmt.Sprintf("%s: %d tensors per step", r.collective, len(g.tensors)))
		b.add(line{in: r})
	}
	return nil
}

// checkStep runs a step on values with a known result, and counts the wrong elements at all ranks.
func (b *benchmark) checkStep(ctx context.Context, g *gradients, run func(ctx context.Context) error,
	r *result) error {
	want := g.fill(b.team.Rank(), b.team.Size())
	if err := run(ctx); err != nil {
		return err
	}
	n, first := g.wrong(want)
	return b.count(ctx, r, n, first)
}
