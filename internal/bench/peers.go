package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/tensor"
)

// Matrix is what the harness in bench/peers asks every library for, by its BENCH_ variables.
type Matrix struct {
	NP       int    // must be the size of the job; 0 may be any
	Peer     string // the name to print
	Shapes   string // folder with the lists of the workloads; empty takes those that are built in
	Ops      []string
	MaxBytes int64 // of an allreduce
	// Small and Large are how long a case up to 1 MiB, or above, is to be timed; Hard is the most.
	Small, Large, Hard time.Duration
	Variants           []Variant
}

// Variant is a path and where its tensors are.
type Variant struct {
	Raw, Arena bool
}

// suffix is what the variant adds to the name of the peer.
func (v Variant) suffix() string {
	s := ""
	if v.Arena {
		s += "-arena"
	}
	if v.Raw {
		s += "-raw"
	}
	return s
}

var variants = []struct {
	name string
	Variant
}{
	{"slices", Variant{}}, {"arena", Variant{Arena: true}}, {"raw", Variant{Raw: true}}, {"arena-raw", Variant{Raw: true, Arena: true}},
}

// MatrixOps are the names that BENCH_OPS may have.
var MatrixOps = []string{"barrier", "allreduce", "allgather", "broadcast", "resnet50", "gpt2"}

// ReadMatrix reads the BENCH_ variables of an environment, NAME=value. variantNames override BENCH_VARIANTS unless empty.
func ReadMatrix(environ []string, variantNames string) (Matrix, error) {
	m := Matrix{
		Peer: "ours", Ops: MatrixOps, MaxBytes: 256 << 20,
		Small: 400 * time.Millisecond, Large: 800 * time.Millisecond, Hard: 3 * time.Second,
	}
	chosen := variantNames
	for _, e := range environ {
		name, value, _ := strings.Cut(e, "=")
		if value == "" {
			continue
		}
		var err error
		switch name {
		case "BENCH_NP":
			m.NP, err = strconv.Atoi(value)
		case "BENCH_PEER":
			m.Peer = value
		case "BENCH_SHAPES":
			m.Shapes = value
		case "BENCH_OPS":
			m.Ops = strings.Split(value, ",")
			for _, op := range m.Ops {
				if !slices.Contains(MatrixOps, op) {
					err = fmt.Errorf("%q is none of %s", op, strings.Join(MatrixOps, ", "))
				}
			}
		case "BENCH_MAX_BYTES":
			var f float64
			f, err = strconv.ParseFloat(value, 64)
			m.MaxBytes = int64(f)
		case "BENCH_SMALL_S":
			m.Small, err = seconds(value)
		case "BENCH_LARGE_S":
			m.Large, err = seconds(value)
		case "BENCH_HARD_S":
			m.Hard, err = seconds(value)
		case "BENCH_VARIANTS":
			if chosen == "" {
				chosen = value
			}
		}
		if err != nil {
			return m, fmt.Errorf("%s is %q: %w", name, value, err)
		}
	}
	for _, v := range variants {
		if chosen == "" || slices.Contains(strings.Split(chosen, ","), v.name) {
			m.Variants = append(m.Variants, v.Variant)
		}
	}
	if n := strings.Count(chosen, ",") + 1; chosen != "" && n != len(m.Variants) {
		return m, fmt.Errorf("variants are %q, want some of slices, arena, raw and arena-raw", chosen)
	}
	return m, nil
}

func seconds(text string) (time.Duration, error) {
	f, err := strconv.ParseFloat(text, 64)
	if err != nil || f < 0 || f > math.MaxInt64/1e9 {
		return 0, errors.New("want a number of seconds")
	}
	return time.Duration(f * 1e9), nil
}

// Sizes of the matrix in bytes: of allreduces, and of allgathers (their output) and broadcasts.
var (
	matrixSizes    = []int64{4, 64, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20}
	matrixSizesFew = []int64{64 << 10, 4 << 20, 64 << 20}
)

// RunMatrix measures the matrix. Rank 0 prints its rows on s.Out:
//
//	peer,op,np,bytes,iters,median_us,min_us,algbw_GBps,busbw_GBps
//	# extra,peer,op,np,bytes,mean_us=..,p95_us=..,max_us=..
func RunMatrix(ctx context.Context, m Matrix, at Place, s Streams) error {
	raw := slices.ContainsFunc(m.Variants, func(v Variant) bool { return v.Raw })
	negotiate := slices.ContainsFunc(m.Variants, func(v Variant) bool { return !v.Raw })
	j, err := join(ctx, at, negotiate, raw)
	if err != nil {
		return err
	}
	if j.any().Rank() != 0 {
		s.Out = io.Discard
	}
	err = func() error {
		if n := j.any().Size(); m.NP != 0 && m.NP != n {
			return fmt.Errorf("BENCH_NP is %d, but the job has %d ranks", m.NP, n)
		}
		sink := &sink{w: s.Out}
		for _, v := range m.Variants {
			c := &column{Matrix: m, Variant: v, team: j.negotiated, memory: &j.memory, out: sink, log: s.Err}
			if v.Raw {
				c.team = j.raw
			}
			if err := c.all(ctx); err != nil {
				return fmt.Errorf("%s: %w", m.Peer+v.suffix(), err)
			}
		}
		if sink.err != nil {
			return fmt.Errorf("writing the results: %w", sink.err)
		}
		return j.any().barrier(ctx)
	}()
	return errors.Join(err, j.leave(ctx))
}

// column is one variant of the matrix.
type column struct {
	Matrix
	Variant
	team   *team
	memory *memory
	out    *sink
	log    io.Writer
}

func (c *column) peer() string { return c.Peer + c.suffix() }

func (c *column) wants(op string) bool { return slices.Contains(c.Ops, op) }

func (c *column) all(ctx context.Context) error {
	if c.wants("barrier") && !c.Arena { // it has no tensor
		if err := c.time(ctx, "barrier", 0, c.team.meet.run, false); err != nil {
			return err
		}
	}
	for _, size := range matrixSizes {
		if c.wants("allreduce") && size <= c.MaxBytes {
			if err := c.one(ctx, shot{kind: message.Allreduce, op: tensor.Sum, count: size / 4}, size); err != nil {
				return err
			}
		}
	}
	for _, size := range matrixSizesFew {
		if c.wants("allgather") {
			if err := c.one(ctx, shot{kind: message.Allgather, count: size / 4 / int64(c.team.Size())}, size); err != nil {
				return err
			}
		}
		if c.wants("broadcast") {
			if err := c.one(ctx, shot{kind: message.Broadcast, count: size / 4}, size); err != nil {
				return err
			}
		}
	}
	for _, name := range WorkloadNames() {
		if c.wants(name) {
			if err := c.workload(ctx, name); err != nil {
				return err
			}
		}
	}
	return nil
}

// one measures a collective in place, verified before and after.
func (c *column) one(ctx context.Context, s shot, numBytes int64) error {
	s.dt, s.inPlace = tensor.Float32, true
	buf, err := c.memory.alloc(s.bufferBytes(c.team.Size()), c.Arena)
	if err != nil {
		return err
	}
	op := s.kind.String()
	a, err := c.team.prepare(s, fmt.Sprintf("%s.%d", op, numBytes), buf)
	if err != nil {
		return err
	}
	verify := func() error {
		want := prepareInput(s, c.team.Rank(), c.team.Size(), buf)
		if err := a.run(ctx); err != nil {
			return err
		}
		n, first := wrongBlocks(a.result(), want)
		return c.verdict(ctx, fmt.Sprintf("%s of %d bytes", op, numBytes), n, first)
	}
	if err := verify(); err != nil {
		return err
	}
	clear(buf)
	if err := c.time(ctx, op, numBytes, a.run, s.kind == message.Broadcast); err != nil {
		return err
	}
	if err := verify(); err != nil {
		return err
	}
	return c.memory.free(buf, c.Arena)
}

// verdict makes every rank fail if one has found wrong elements.
func (c *column) verdict(ctx context.Context, what string, wrong int64, first string) error {
	if wrong > 0 {
		fmt.Fprintf(c.log, "hvdbench: rank %d: %s: %d elements are wrong: %s\n", c.team.Rank(), what, wrong, first)
	}
	all, err := c.team.total(ctx, wrong)
	if err == nil && all > 0 {
		err = fmt.Errorf("%s: %w", what, &WrongError{all})
	}
	return err
}

// workload measures the steps of a list of gradients.
func (c *column) workload(ctx context.Context, name string) error {
	w, err := openWorkload(name, c.Shapes)
	if err != nil {
		return err
	}
	g, err := c.memory.allocate(w, tensor.Float32, c.Arena)
	if err != nil {
		return err
	}
	for _, mode := range []stepMode{perTensor, asynchronous, bucketed} {
		if mode == bucketed && c.Raw {
			continue
		}
		run, free, err := g.step(c.team, mode)
		if err != nil {
			return err
		}
		op := name + "_" + mode.String()
		verify := func() error {
			want := g.fill(c.team.Rank(), c.team.Size())
			if err := run(ctx); err != nil {
				return err
			}
			n, first := g.wrong(want)
			return c.verdict(ctx, op, n, first)
		}
		if err := verify(); err != nil {
			return err
		}
		g.clear()
		if err := c.time(ctx, op, g.numBytes(), run, false); err != nil {
			return err
		}
		if err := verify(); err != nil {
			return err
		}
		if err := free(); err != nil {
			return err
		}
	}
	return g.free()
}

// warmups is how many untimed calls give the estimate.
func warmups(numBytes int64) int {
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

// iterations is how many calls are timed if one takes about estimate microseconds: enough to fill the time, at least
// 20 and at most 20000; if 20 take too long as many as fit, at least 5, or 3 above 64 MiB.
func (m *Matrix) iterations(numBytes int64, estimate float64) int {
	budget := m.Large
	if numBytes <= 1<<20 {
		budget = m.Small
	}
	want := min(max(float64(budget)/1000/estimate, 20), 20000)
	if hard := float64(m.Hard) / 1000; want*estimate > hard {
		least := 5.0
		if numBytes > 64<<20 {
			least = 3
		}
		want = max(hard/estimate, least)
	}
	return int(want)
}

// time measures calls of run: of rank 0, or where the ranks need not wait for each other (apart), after a barrier before
// each, the longest of all ranks.
func (c *column) time(ctx context.Context, op string, numBytes int64, run func(ctx context.Context) error, apart bool) error {
	t := c.team
	if err := errors.Join(t.barrier(ctx), run(ctx), t.barrier(ctx)); err != nil { // connections are made
		return err
	}
	warm := warmups(numBytes)
	start := time.Now()
	for range warm {
		if err := run(ctx); err != nil {
			return err
		}
	}
	estimates, err := t.gather(ctx, []float64{float64(time.Since(start)) / 1000 / float64(warm)})
	if err != nil {
		return err
	}
	estimate := estimates[0][0]
	for _, e := range estimates {
		if apart {
			estimate = max(estimate, e[0])
		}
	}
	times := make([]float64, c.iterations(numBytes, estimate))
	before := func() error { return nil }
	if apart {
		before = func() error { return t.barrier(ctx) }
	}
	runtime.GC() // what the verification has left
	if err := t.barrier(ctx); err != nil {
		return err
	}
	if err := loop(ctx, times, before, run); err != nil {
		return err
	}
	if apart {
		byRank, err := t.gather(ctx, times)
		if err != nil {
			return err
		}
		times = combine(byRank, OfMax)
	}
	c.emit(op, numBytes, times)
	return nil
}

// emit prints a row.
func (c *column) emit(op string, numBytes int64, times []float64) {
	n := len(times)
	s := summarize(times)
	factor := 2 * float64(c.team.Size()-1) / float64(c.team.Size())
	for _, k := range kinds {
		if k.String() == op {
			factor = busFactor(k, c.team.Size())
		}
	}
	bw := gbps(numBytes, s.p50)
	fmt.Fprintf(c.out, "%s,%s,%d,%d,%d,%.3f,%.3f,%.4f,%.4f\n", c.peer(), op, c.team.Size(), numBytes, n, s.p50, s.min, bw, bw*factor)
	fmt.Fprintf(c.out, "# extra,%s,%s,%d,%d,mean_us=%.3f,p95_us=%.3f,max_us=%.3f\n", c.peer(), op, c.team.Size(), numBytes,
		s.mean, times[int(0.95*float64(n-1))], s.max)
}
