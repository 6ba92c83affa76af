package main

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"runtime"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
)

// wrongError reports that a benchmark computed wrong results. count is the number of wrong elements.
type wrongError struct{ count int64 }

func (e *wrongError) Error() string { return fmt.Sprintf("%d elements are wrong", e.count) }

// streams holds the standard output and the standard error of a benchmark.
type streams struct{ out, err io.Writer }

// measure runs the benchmark of o together with the other ranks of the job. Rank 0 prints the results on
// s.out. If results were wrong, the error is a *wrongError. If ctx ends, measure prints the results that it
// has. Before and after the results, it prints what the function cores says of the cores of this host. cores
// may be nil.
//
// The rules of a measurement:
//
//  1. Every case is verified before and after it is timed, at all ranks, against values from a formula.
//  2. Timed calls follow each other without a pause. They run on zeros, because sums of zeros do not grow
//     into infinities or denormals. A barrier precedes each broadcast, because a root could run ahead.
//  3. Between the two readings of the clock nothing happens but the operation. The loop around it does not
//     print, send or allocate anything.
//  4. GB is 10^9 bytes. busbw is as nccl-tests defines it (doc/PERFORMANCE.md there; busFactor here).
func measure(ctx context.Context, o options, at jobPlace, s streams,
	cores func(context.Context) (distance, error)) error {
	j, err := join(ctx, at, o.raw, o.gpu)
	if err != nil {
		return err
	}
	b := &benchmark{options: o, job: j, team: j.team, log: s.err,
		out: &printer{w: s.out, csv: o.format == "csv"}}
	if b.team.Rank() != 0 {
		b.out.w = io.Discard
	} else if b.team.Size() > 1 {
		b.cores = cores
	}
	err = b.all(ctx)
	return errors.Join(err, j.leave(ctx))
}

// benchmark is the state of one call of the function measure.
type benchmark struct {
	options
	job        *job
	team       *team
	cores      func(context.Context) (distance, error) // nil if this rank does not measure them
	log        io.Writer
	out        *printer
	numResults int
	wrong      int64
}

// agree returns an error if ranks have different options, because such ranks would wait for each other
// forever.
func (b *benchmark) agree(ctx context.Context) error {
	h := fnv.New32a()
	fmt.Fprintf(h, "%+v", b.options)
	all, err := b.team.gather(ctx, []float64{float64(h.Sum32())})
	if err != nil {
		return err
	}
	for rank, v := range all {
		if v[0] != all[0][0] {
			return fmt.Errorf("the options of rank %d differ from the options of rank 0: start all ranks with the same flags",
				rank)
		}
	}
	return nil
}

// all checks that the ranks have the same options, and runs all measurements.
func (b *benchmark) all(ctx context.Context) error {
	if err := b.agree(ctx); err != nil {
		return err
	}
	b.job.memory.offset = b.offset
	touched := ""
	if b.touch {
		touched = ", written before every call"
	}
	calls := fmt.Sprintf("%d timed calls after %d untimed calls", b.iters, b.warmup)
	if b.seconds > 0 {
		calls = fmt.Sprintf("3 to 20000 timed calls, for about %g s if that many suffice", b.seconds)
	}
	title := fmt.Sprintf("hvdbench: %v of %d ranks, %s, %s%s, %s", b.kind, b.team.Size(), b.team, b.memoryName(),
		touched, calls)
	before, knownBefore := b.distance(ctx, "before")
	b.out.begin(title)
	var err error
	switch {
	case b.workload != "" || b.many.count > 0:
		err = b.workloads(ctx)
	default:
		err = b.sweep(ctx)
	}
	if after, known := b.distance(ctx, "after"); known && knownBefore && !after.sameState(before) {
		b.out.note("the cores were " + before.state() + " before and are " + after.state() +
			" after: compare times only of one state")
	}
	b.out.end(b.wrong)
	if err == nil {
		err = b.team.barrier(ctx) // so that no rank leaves while others still work
	}
	switch {
	case err != nil:
		return err
	case b.out.err != nil:
		return fmt.Errorf("write the results: %w", b.out.err)
	case b.wrong > 0:
		return &wrongError{b.wrong}
	}
	return nil
}

// distance measures and prints how far apart the cores of this host are. It reports whether that is known.
// The other ranks wait meanwhile.
func (b *benchmark) distance(ctx context.Context, when string) (d distance, known bool) {
	if b.cores == nil {
		return distance{}, false
	}
	d, err := b.cores(ctx)
	if err != nil {
		b.out.note(fmt.Sprintf("%s: the state of the cores is unknown: %v", when, err))
		return distance{}, false
	}
	b.out.note(when + ": " + d.String())
	return d, true
}

// add prints the results of a line and counts them.
func (b *benchmark) add(l line) {
	for _, r := range l.results() {
		b.numResults++
		b.wrong += max(0, r.wrong)
	}
	b.out.line(l)
}

// skip prints on standard error why a case is not measured.
func (b *benchmark) skip(what string, err error) {
	if b.team.Rank() == 0 {
		fmt.Fprintf(b.log, "hvdbench: skipped %s: %v\n", what, err)
	}
}

// sweep measures a collective for each combination of sizes, types, reductions and roots.
func (b *benchmark) sweep(ctx context.Context) error {
	sizes, types, ops, roots := b.sizes(), b.types, b.ops, []int{-1}
	switch {
	case b.kind == message.Barrier:
		sizes, types, ops = []int64{0}, []tensor.DType{tensor.Invalid}, []tensor.ReduceOp{tensor.NoReduce}
	case b.kind == message.Broadcast:
		roots = b.roots
		for rank := 0; b.roots == nil && rank < b.team.Size(); rank++ {
			roots = append(roots, rank)
		}
	}
	if !b.kind.Reduces() {
		ops = []tensor.ReduceOp{tensor.NoReduce}
	}
	var none error // error for the last combination that is not supported
	for _, dt := range types {
		for _, op := range ops {
			if b.kind.Reduces() {
				if err := tensor.CheckReduce(op, dt); err != nil {
					none = err
					continue // "all" means all supported combinations
				}
			}
			err := b.lines(ctx, opSpec{kind: b.kind, dt: dt, op: op}, roots, sizes)
			var absent errUnsupported
			switch {
			case errors.As(err, &absent) && len(types)*len(ops) > 1:
				none = err
				b.skip(fmt.Sprintf("%v of %s %s", b.kind, ncclType(dt), ncclOp(op)), err)
			case err != nil:
				return err
			}
		}
	}
	if b.numResults == 0 {
		return none
	}
	return nil
}

// lines measures s for each root and each size, in place and out of place as the options say. If s is
// supported in neither placement, the error is an errUnsupported.
func (b *benchmark) lines(ctx context.Context, s opSpec, roots []int, sizes []int64) error {
	placements := b.placements
	if s.kind == message.Barrier {
		placements = []bool{true}
	}
	for _, s.root = range roots {
		for _, size := range sizes {
			s.count = 0
			if size > 0 {
				s.count = size / int64(s.dt.Size()) / parts(s.kind, b.team.Size())
			}
			var l line
			var none error
			for _, s.inPlace = range placements {
				r, err := b.shoot(ctx, s)
				var absent errUnsupported
				switch {
				case errors.As(err, &absent):
					none = err
				case err != nil:
					return err
				case s.inPlace:
					l.in = r
				default:
					l.out = r
				}
			}
			if len(l.results()) == 0 {
				return none
			}
			b.add(l)
			if of, ok := b.team.path.(copier); ok {
				if err := b.shootCopy(ctx, of, s); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// newResult returns a result that describes the case and has no measurements yet.
func (b *benchmark) newResult(collective string, dt tensor.DType, op tensor.ReduceOp, inPlace bool) *result {
	return &result{
		collective: collective, path: b.team.String(), memory: b.memoryName(), touch: b.touch,
		ranks: b.team.Size(),
		dt:    dt, op: op, placement: placement(inPlace), wrong: unchecked,
	}
}

// shoot verifies and measures the operation s and returns the result.
func (b *benchmark) shoot(ctx context.Context, s opSpec) (*result, error) {
	n := b.team.Size()
	buf, err := b.job.memory.alloc(s.bufferBytes(n), b.arena)
	if err != nil {
		return nil, err
	}
	name := fmt.Sprintf("hvdbench.%v.%v.%v.%d.%d.%v", s.kind, s.dt, s.op, s.root, len(buf), s.inPlace)
	a, err := b.team.prepare(s, name, buf)
	if err != nil {
		return nil, errors.Join(err, b.job.memory.free(buf, b.arena))
	}
	r := b.newResult(s.kind.String(), s.dt, s.op, s.inPlace)
	r.bytes, r.count, r.root = s.numBytes(n), s.count, s.root
	w := work{action: a, buffers: [][]byte{buf}, kind: s.kind}
	if s.kind != message.Barrier {
		w.check = func() error {
			want := prepareInput(s, b.team.Rank(), n, buf)
			if err := a.verified(ctx); err != nil {
				return err
			}
			wrong, first := wrongBlocks(a.result(), want, int(s.count)*s.dt.Size())
			return b.count(ctx, r, wrong, first)
		}
	}
	if err := b.measure(ctx, w, r); err != nil {
		return nil, err // buf is not freed, because an operation may still use it
	}
	return r, errors.Join(a.free(), b.job.memory.free(buf, b.arena))
}

// shootCopy measures a plain copy of a tensor and prints the result.
func (b *benchmark) shootCopy(ctx context.Context, of copier, s opSpec) error {
	a, err := of.prepareCopy(s.numBytes(b.team.Size()))
	if err != nil {
		return err
	}
	r := b.newResult("copy", s.dt, tensor.NoReduce, false)
	r.bytes, r.count, r.root = s.numBytes(b.team.Size()), s.count, s.root
	if err := b.measure(ctx, work{action: a, kind: message.Send}, r); err != nil {
		return err
	}
	b.out.copied(r)
	return a.free()
}

// count is called at all ranks after a verification. It prints how many elements are wrong at this rank, and
// adds the number of wrong elements at all ranks to r.
func (b *benchmark) count(ctx context.Context, r *result, wrong int64, first string) error {
	if wrong > 0 {
		fmt.Fprintf(b.log, "hvdbench: rank %d: %s of %d bytes: %d elements of the result are wrong: %s\n", b.team.Rank(),
			r.collective, r.bytes, wrong, first)
	}
	all, err := b.team.gather(ctx, []float64{float64(wrong)})
	r.wrong = max(0, r.wrong)
	for _, v := range all {
		r.wrong += int64(v[0])
	}
	return err
}

// work is an operation to time.
type work struct {
	*action
	kind    message.Kind // determines how times are combined and how busbw is computed
	buffers [][]byte     // buffers to touch
	check   func() error // runs the operation once and verifies it; may be nil
}

// measure times w at all ranks and stores the times in r. Rank 0, which prints r, also stores how w has run.
func (b *benchmark) measure(ctx context.Context, w work, r *result) error {
	t := b.team
	if w.check != nil {
		for range b.checks {
			if err := w.check(); err != nil {
				return err
			}
		}
	}
	pattern := uint64(touchNumbers)
	if r.dt == tensor.Bool {
		pattern = touchBools
	}
	for _, buf := range w.buffers {
		clear(buf)
	}
	if err := w.load(); err != nil {
		return err
	}
	before := func() error {
		if w.kind == message.Broadcast {
			if err := t.barrier(ctx); err != nil {
				return err
			}
		}
		// Buffers are touched last, so that their bytes are still in the caches when the operation begins.
		if b.touch {
			for _, buf := range w.buffers {
				touch(buf, pattern)
			}
		}
		return nil
	}
	if err := t.barrier(ctx); err != nil {
		return err
	}
	how := b.average.resolve(w.kind, b.touch)
	if err := b.warmUp(ctx, r, how, before, w.run); err != nil {
		return err
	}
	runtime.GC() // so that garbage from the checks is not collected during the timed calls
	times := make([]float64, r.iters)
	if err := t.barrier(ctx); err != nil {
		return err
	}
	if err := loop(ctx, times, before, w.run); err != nil {
		return err
	}
	byRank, err := t.gather(ctx, times)
	if err != nil {
		return err
	}
	r.setTimes(byRank, how, busFactor(w.kind, t.Size()))
	if t.Rank() == 0 {
		if r.ran, err = w.ran(); err != nil {
			return err
		}
	}
	if w.check != nil && b.checks > 0 {
		return w.check()
	}
	return nil
}

// warmUp makes the untimed calls and sets r.iters, the number of timed calls. That is the value of --iters
// or, if --seconds is given, the number of calls that fit in this time.
func (b *benchmark) warmUp(ctx context.Context, r *result, how average, before func() error,
	run func(ctx context.Context) error) error {
	n := b.warmup
	if b.seconds > 0 {
		n = max(n, warmUps(r.bytes))
	}
	times := make([]float64, n)
	if err := loop(ctx, times, before, run); err != nil {
		return err
	}
	r.iters = b.iters
	if b.seconds > 0 {
		byRank, err := b.team.gather(ctx, times)
		if err != nil {
			return err
		}
		r.iters = b.calls(r.bytes, mean(combine(byRank, how)))
	}
	return nil
}

// warmUps returns how many calls of this size are made before the timed calls, to estimate how long a call
// takes.
func warmUps(numBytes int64) int {
	switch {
	case numBytes <= 64<<10:
		return 50
	case numBytes <= 4<<20:
		return 6
	case numBytes <= 64<<20:
		return 2
	}
	return 1
}

// calls returns the number of timed calls. micros is how long one call takes, in microseconds. The calls fill
// o.seconds, but there are at least 20 and at most 20000. If 20 calls would take longer than o.maxSeconds,
// there are only as many calls as fit, but at least 5, or at least 3 if numBytes is more than 64 MiB.
// bench/peers/bench.h has the same rule.
func (o *options) calls(numBytes int64, micros float64) int {
	n := min(max(o.seconds*1e6/micros, 20), 20000)
	if limit := o.maxSeconds * 1e6; n*micros > limit {
		least := 5.0
		if numBytes > 64<<20 {
			least = 3
		}
		n = max(limit/micros, least)
	}
	return int(n)
}

// loop calls the function before and then the function run, once for each element of times. It stores in the
// element how long run took, in microseconds.
func loop(ctx context.Context, times []float64, before func() error,
	run func(ctx context.Context) error) error {
	for i := range times {
		if err := before(); err != nil {
			return err
		}
		start := time.Now()
		err := run(ctx)
		times[i] = float64(time.Since(start)) / 1000
		if err != nil {
			return err
		}
	}
	return nil
}
