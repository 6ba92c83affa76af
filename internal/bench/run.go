package bench

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"runtime"
	"time"

	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/tensor"
)

// WrongError is that elements were not what they should be.
type WrongError struct{ Count int64 }

func (e *WrongError) Error() string { return fmt.Sprintf("%d elements are wrong", e.Count) }

// Streams are where a benchmark writes.
type Streams struct{ Out, Err io.Writer }

// Run measures what o says, together with the other ranks of the job. Rank 0 shows the results on s.Out. The error is a
// *WrongError if they were wrong. If ctx ends, what was measured until then is shown.
func Run(ctx context.Context, o Options, at Place, s Streams) error {
	if err := o.Check(); err != nil {
		return err
	}
	j, err := join(ctx, at, !o.Raw, o.Raw || o.Negotiation > 0)
	if err != nil {
		return err
	}
	r := &run{Options: o, job: j, team: j.any(), log: s.Err}
	if r.team.Rank() != 0 {
		s.Out = io.Discard
	} else if o.Progress || o.Terminal {
		r.progress = progress{s.Err, o.Terminal}
	}
	r.sink = &sink{w: s.Out}
	r.out = newOutput(o.Format, r.sink)
	err = r.all(ctx)
	return errors.Join(err, j.leave(ctx))
}

// run is one call of Run.
type run struct {
	Options
	job      *job
	team     *team
	log      io.Writer
	sink     *sink
	out      output
	progress progress
	rows     []*Row
	wrong    int64
	cost     *Negotiation
}

// agree makes sure that all ranks measure the same: else they would wait for each other's operations for ever. Nor do
// they begin if rank 0 cannot write what it shall draw, which drawErr says there.
func (r *run) agree(ctx context.Context, drawErr error) error {
	o := r.Options
	o.Format, o.Plot, o.Progress, o.Terminal = "", "", false, false // of rank 0 alone
	h := fnv.New32a()
	fmt.Fprintf(h, "%+v", o)
	mine := []float64{float64(h.Sum32()), 0}
	if drawErr != nil {
		mine[1] = 1
	}
	all, err := r.team.gather(ctx, mine)
	switch {
	case err != nil || drawErr != nil:
		return errors.Join(drawErr, err)
	case all[0][1] != 0:
		return fmt.Errorf("rank 0 cannot write its --plot")
	}
	for rank, v := range all {
		if v[0] != all[0][0] {
			return fmt.Errorf("rank %d was given other options than rank 0", rank)
		}
	}
	return nil
}

func (r *run) all(ctx context.Context) (err error) {
	var plot *drawing
	if r.Plot != "" && r.team.Rank() == 0 {
		plot, err = openDrawing(r.Plot)
	}
	if err := r.agree(ctx, err); err != nil {
		return errors.Join(err, plot.close())
	}
	defer func() { err = errors.Join(err, plot.close()) }()
	r.out.begin(r.title())
	if r.Workload != "" || r.Many.Count > 0 {
		err = r.workloads(ctx)
	} else {
		err = r.sweep(ctx)
	}
	v := verdict{wrong: r.wrong, cost: r.cost}
	if err == nil && r.Memory {
		v.memory, err = r.memory(ctx)
	}
	r.progress.clear()
	r.out.end(v)
	if err == nil {
		err = r.team.barrier(ctx) // nobody leaves while others work
	}
	var drawErr error
	if err == nil && plot != nil {
		drawErr = plot.draw(points(r.rows), PlotOptions{}) // its failure is this rank's alone
	}
	switch {
	case err != nil:
		return err
	case drawErr != nil:
		return drawErr
	case r.sink.err != nil:
		return fmt.Errorf("writing the results: %w", r.sink.err)
	case r.wrong > 0:
		return &WrongError{r.wrong}
	}
	return nil
}

func (r *run) title() string {
	touched := ""
	if r.Touch {
		touched = ", written before every call"
	}
	return fmt.Sprintf("hvdbench: %s of %d ranks, %s, %s%s, %d iterations after %d", r.Collective, r.team.Size(), r.team, memoryName(r.Arena), touched, r.Iters, r.Warmup)
}

func (r *run) note(text string) {
	r.progress.clear()
	r.out.note(text)
}

func (r *run) add(l line) {
	for _, row := range l.rows() {
		r.rows = append(r.rows, row)
		r.wrong += max(0, row.Wrong)
	}
	r.progress.clear()
	r.out.line(l)
}

// sweep measures a collective over sizes, types, reductions and roots.
func (r *run) sweep(ctx context.Context) error {
	kind := kindOf(r.Collective)
	sizes, types, ops, roots := r.sizes(), r.Types, r.Ops, []int{-1}
	switch {
	case kind == message.Barrier:
		sizes, types, ops = []int64{0}, []tensor.DType{tensor.Invalid}, []tensor.ReduceOp{tensor.NoReduce}
	case kind == message.Broadcast:
		roots = r.Roots
		for rank := 0; r.Roots == nil && rank < r.team.Size(); rank++ {
			roots = append(roots, rank)
		}
	}
	if !kind.Reduces() {
		ops = []tensor.ReduceOp{tensor.NoReduce}
	}
	var none error // why the last case that is not here is not
	for _, dt := range types {
		for _, op := range ops {
			if kind.Reduces() {
				if err := tensor.CheckReduce(op, dt); err != nil {
					none = err
					continue // all of all is all that there is
				}
			}
			err := r.lines(ctx, shot{kind: kind, dt: dt, op: op}, roots, sizes)
			var absent errNotHere
			switch {
			case errors.As(err, &absent) && len(types)*len(ops) > 1:
				none = err
				if r.team.Rank() == 0 {
					r.progress.clear()
					fmt.Fprintf(r.log, "hvdbench: no %s of %s %s: %v\n", r.Collective, ncclType(dt), ncclOp(op), err)
				}
			case err != nil:
				return err
			}
		}
	}
	if len(r.rows) == 0 {
		return none
	}
	return nil
}

// lines measures s over roots and sizes.
func (r *run) lines(ctx context.Context, s shot, roots []int, sizes []int64) error {
	for _, s.root = range roots {
		for _, size := range sizes {
			s.count = 0
			if size > 0 {
				s.count = size / int64(s.dt.Size()) / parts(s.kind, r.team.Size())
			}
			if err := r.point(ctx, s); err != nil {
				return err
			}
		}
	}
	return nil
}

// point measures one line of the table. The error is errNotHere if no placement is.
func (r *run) point(ctx context.Context, s shot) error {
	var l line
	var none error
	placements := r.Placements
	if s.kind == message.Barrier {
		placements = []bool{true}
	}
	for _, inPlace := range placements {
		s.inPlace = inPlace
		r.progress.show("%s, %s, %s %s, %s", r.Collective, FormatSize(s.numBytes(r.team.Size())), ncclType(s.dt), ncclOp(s.op), placement(inPlace))
		row, err := r.shoot(ctx, s)
		var absent errNotHere
		switch {
		case errors.As(err, &absent):
			none = err
		case err != nil:
			return err
		case inPlace:
			l.in = row
		default:
			l.out = row
		}
	}
	if len(l.rows()) == 0 {
		return none
	}
	r.add(l)
	return nil
}

// shoot measures one operation.
func (r *run) shoot(ctx context.Context, s shot) (*Row, error) {
	t := r.team
	numBytes := s.bufferBytes(t.Size())
	buf, err := r.job.memory.alloc(numBytes, r.Arena)
	if err != nil {
		return nil, err
	}
	free := func(err error) error { return errors.Join(err, r.job.memory.free(buf, r.Arena)) }
	name := fmt.Sprintf("hvdbench.%v.%v.%v.%d.%d.%v", s.kind, s.dt, s.op, s.root, numBytes, s.inPlace)
	a, err := t.prepare(s, name, buf)
	if err != nil {
		return nil, free(err)
	}
	row := &Row{
		Collective: s.kind.String(), Path: t.String(), Memory: memoryName(r.Arena), Touch: r.Touch, Ranks: t.Size(),
		Bytes: s.numBytes(t.Size()), Count: s.count, Type: ncclOurs(s.dt), Op: ncclOp(s.op), Root: s.root, Placement: placement(s.inPlace),
		Iters: r.Iters, Wrong: unchecked,
	}
	check := func() error {
		if s.kind == message.Barrier {
			return nil
		}
		n, err := r.check(ctx, a, s, buf)
		row.Wrong = max(0, row.Wrong) + n
		return err
	}
	for range r.Checks {
		if err := check(); err != nil {
			return nil, err // an operation may still use the buffer
		}
	}
	clear(buf)
	w := work{run: a.run, buffers: [][]byte{buf}, dt: s.dt, barriers: s.kind == message.Broadcast}
	if err := r.measure(ctx, w, row, r.Average.resolve(s.kind, r.Touch), busFactor(s.kind, t.Size())); err != nil {
		return nil, err
	}
	if r.Checks > 0 {
		if err := check(); err != nil {
			return nil, err
		}
	}
	return row, free(nil)
}

// ncclOurs is our name of dt.
func ncclOurs(dt tensor.DType) string {
	if !dt.Valid() {
		return "none"
	}
	return dt.String()
}

// check runs an operation once on values whose result is known, and counts what is wrong at all ranks.
func (r *run) check(ctx context.Context, a *action, s shot, buf []byte) (int64, error) {
	want := prepareInput(s, r.team.Rank(), r.team.Size(), buf)
	if err := a.run(ctx); err != nil {
		return 0, err
	}
	return r.count(ctx, fmt.Sprintf("%v of %d bytes", s.kind, len(buf)), a.result(), want)
}

// count tells of what is wrong here and adds up what is wrong everywhere.
func (r *run) count(ctx context.Context, what string, got []byte, want []pattern) (int64, error) {
	n, first := wrongBlocks(got, want)
	if n > 0 {
		fmt.Fprintf(r.log, "hvdbench: rank %d: %s: %d elements are wrong: %s\n", r.team.Rank(), what, n, first)
	}
	return r.team.total(ctx, n)
}

// work is what is timed.
type work struct {
	run      func(ctx context.Context) error
	buffers  [][]byte // to touch
	dt       tensor.DType
	barriers bool // one before each call
}

// measure times w at all ranks and fills in row.
func (r *run) measure(ctx context.Context, w work, row *Row, how Average, factor float64) error {
	t := r.team
	pattern := uint64(touchNumbers)
	if w.dt == tensor.Bool {
		pattern = touchBools
	}
	before := func() error {
		if w.barriers {
			if err := t.barrier(ctx); err != nil {
				return err
			}
		}
		// Touching comes last, so that nothing puts the bytes in another place before the operation finds them.
		if r.Touch {
			for _, b := range w.buffers {
				touch(b, pattern)
			}
		}
		return nil
	}
	if err := t.barrier(ctx); err != nil {
		return err
	}
	for range r.Warmup {
		if err := before(); err != nil {
			return err
		}
		if err := w.run(ctx); err != nil {
			return err
		}
	}
	runtime.GC() // what the checks have left
	times := make([]float64, row.Iters)
	if err := t.barrier(ctx); err != nil {
		return err
	}
	used, err := cpuUsed()
	if err != nil {
		return err
	}
	start := time.Now()
	if err := loop(ctx, times, before, w.run); err != nil {
		return err
	}
	wall := time.Since(start)
	after, err := cpuUsed()
	if err != nil {
		return err
	}
	byRank, err := t.gather(ctx, times)
	if err != nil {
		return err
	}
	row.setTimes(byRank, how, factor)
	if !r.CPU {
		return nil
	}
	used = after.since(used)
	all, err := t.gather(ctx, []float64{wall.Seconds(), used.user.Seconds(), used.system.Seconds()})
	for _, v := range all {
		row.CPU = append(row.CPU, RankCPU{v[0], v[1], v[2]})
	}
	return err
}

// loop calls run once for each of times and stores what it took, in microseconds. before is not counted.
func loop(ctx context.Context, times []float64, before func() error, run func(ctx context.Context) error) error {
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

// memory gathers what the ranks have used until now.
func (r *run) memory(ctx context.Context) ([]RankMemory, error) {
	m, err := memoryUsed()
	if err != nil {
		return nil, err
	}
	all, err := r.team.gather(ctx, []float64{m.peak, m.shared, float64(r.job.memory.peak)})
	var ranks []RankMemory
	for _, v := range all {
		ranks = append(ranks, RankMemory{v[0], v[1], v[2]})
	}
	return ranks, err
}
