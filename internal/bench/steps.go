package bench

import (
	"context"
	"errors"
	"fmt"

	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/tensor"
)

// gradients are the tensors of a workload at this rank.
type gradients struct {
	workload
	dt      tensor.DType
	tensors []named
	arena   bool
	memory  *memory
}

// allocate makes the tensors of w, zeroed.
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

func (g *gradients) free() error {
	var errs []error
	for _, t := range g.tensors {
		errs = append(errs, g.memory.free(t.buf, g.arena))
	}
	return errors.Join(errs...)
}

func (g *gradients) numBytes() int64 { return g.numElems() * int64(g.dt.Size()) }

// buckets makes the buckets of g.
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

// step makes ready a step, and says how to free what it needs.
func (g *gradients) step(p path, mode stepMode) (run func(ctx context.Context) error, free func() error, err error) {
	free = func() error { return nil }
	var flats []named
	if mode == bucketed {
		b, err := g.buckets()
		if err != nil {
			return nil, nil, err
		}
		flats, free = b.tensors, b.free
	}
	run, err = p.step(mode, g.dt, g.tensors, flats)
	if err != nil {
		return nil, nil, errors.Join(err, free())
	}
	return run, free, nil
}

// fill gives each tensor the input of rank r of n, and says what all should be after a step.
func (g *gradients) fill(r, n int) (want pattern) {
	in := inputs{g.dt, tensor.Sum, n}
	for _, t := range g.tensors {
		in.of(r).fill(t.buf)
	}
	return in.reduced()
}

// wrong counts the elements that are not as want says.
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

func (g *gradients) clear() {
	for _, t := range g.tensors {
		clear(t.buf)
	}
}

func (g *gradients) buffers() [][]byte {
	var all [][]byte
	for _, t := range g.tensors {
		all = append(all, t.buf)
	}
	return all
}

// workloads measures steps over the tensors of a workload, in every mode, for every type.
func (r *run) workloads(ctx context.Context) error {
	for _, dt := range r.Types {
		if err := tensor.CheckReduce(tensor.Sum, dt); err != nil {
			if len(r.Types) == 1 {
				return err
			}
			continue
		}
		w, err := r.open(dt)
		if err != nil {
			return err
		}
		g, err := r.job.memory.allocate(w, dt, r.Arena)
		if err != nil {
			return err
		}
		if r.Negotiation > 0 {
			err = r.compare(ctx, g)
		} else {
			err = r.steps(ctx, g)
		}
		if err != nil {
			return err
		}
		if err := g.free(); err != nil {
			return err
		}
	}
	return nil
}

func (r *run) open(dt tensor.DType) (workload, error) {
	if r.Many.Count > 0 {
		return manyTensors(r.Many, dt)
	}
	return openWorkload(r.Workload, "")
}

func (r *run) steps(ctx context.Context, g *gradients) error {
	for _, name := range r.Modes {
		mode, err := parseMode(name)
		if err != nil {
			return err
		}
		r.progress.show("%s, %d tensors, %s", g.name, len(g.tensors), name)
		run, free, err := g.step(r.team, mode)
		if err != nil {
			return err
		}
		row := &Row{
			Collective: g.name + "_" + name, Path: r.team.String(), Memory: memoryName(r.Arena), Touch: r.Touch, Ranks: r.team.Size(),
			Bytes: g.numBytes(), Count: g.numElems(), Type: g.dt.String(), Op: ncclOp(tensor.Sum), Root: -1, Placement: placement(true),
			Iters: r.Iters, Wrong: unchecked,
		}
		for range r.Checks {
			if err := r.checkStep(ctx, g, run, row); err != nil {
				return err
			}
		}
		g.clear()
		w := work{run: run, buffers: g.buffers(), dt: g.dt}
		if err := r.measure(ctx, w, row, r.Average.resolve(message.Allreduce, r.Touch), busFactor(message.Allreduce, r.team.Size())); err != nil {
			return err
		}
		if r.Checks > 0 {
			if err := r.checkStep(ctx, g, run, row); err != nil {
				return err
			}
		}
		if err := free(); err != nil {
			return err
		}
		r.note(fmt.Sprintf("%s: %d tensors a step", row.Collective, len(g.tensors)))
		r.add(line{in: row})
	}
	return nil
}

func (r *run) checkStep(ctx context.Context, g *gradients, run func(ctx context.Context) error, row *Row) error {
	want := g.fill(r.team.Rank(), r.team.Size())
	if err := run(ctx); err != nil {
		return err
	}
	n, first := g.wrong(want)
	if n > 0 {
		fmt.Fprintf(r.log, "hvdbench: rank %d: %s: %d elements are wrong: %s\n", r.team.Rank(), row.Collective, n, first)
	}
	all, err := r.team.total(ctx, n)
	row.Wrong = max(0, row.Wrong) + all
	return err
}
