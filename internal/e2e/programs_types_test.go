package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/gohvd/gohvd/hvd"
)

// checkTypes checks every kind of operation with every element type and every reduction, over all ranks or,
// in odd rounds, over a process set with all ranks except one.
func checkTypes(ctx context.Context, round, me, n int) error {
	p := participants{ranks: all(n), me: me, numElems: []int{3, 1000, 30011}[round%3], salt: round % 11}
	if round%2 == 0 {
		return p.checkTypes(ctx)
	}
	p.ranks = slices.DeleteFunc(p.ranks, func(r int) bool { return r == round%n })
	set, err := hvd.AddProcessSet(ctx, p.ranks)
	if err != nil {
		return err
	}
	p.options = []hvd.Option{hvd.Over(set)}
	if set.Included() {
		p.me = slices.Index(p.ranks, me)
		if err := p.checkTypes(ctx); err != nil {
			return fmt.Errorf("%v: %w", set, err)
		}
	}
	return hvd.RemoveProcessSet(ctx, set)
}

// participants are the ranks of a set whose operations are checked.
type participants struct {
	ranks    []int
	me       int // the index of this rank in ranks
	numElems int // the number of elements of a tensor
	salt     int // changes the values from round to round
	options  []hvd.Option
}

// checkTypes checks all element types at the same time.
func (p *participants) checkTypes(ctx context.Context) error {
	checks := []func() error{
		func() error { return checkType(ctx, p, "uint8", func(v int) uint8 { return uint8(v) }) },
		func() error { return checkType(ctx, p, "int8", func(v int) int8 { return int8(v) }) },
		func() error { return checkType(ctx, p, "uint16", func(v int) uint16 { return uint16(v) }) },
		func() error { return checkType(ctx, p, "int16", func(v int) int16 { return int16(v) }) },
		func() error { return checkType(ctx, p, "int32", func(v int) int32 { return int32(v) }) },
		func() error { return checkType(ctx, p, "int64", func(v int) int64 { return int64(v) }) },
		func() error { return checkFloat(ctx, p, "float32", func(v int) float32 { return float32(v) }) },
		func() error { return checkFloat(ctx, p, "float64", func(v int) float64 { return float64(v) }) },
		func() error {
			return checkFloat(ctx, p, "float16", func(v int) hvd.Float16 {
				return hvd.Float16FromFloat32(float32(v))
			})
		},
		func() error {
			return checkFloat(ctx, p, "bfloat16", func(v int) hvd.BFloat16 {
				return hvd.BFloat16FromFloat32(float32(v))
			})
		},
		func() error { return checkBools(ctx, p) },
		func() error { return checkCompressed[float32](ctx, p, "float32") },
		func() error { return checkCompressed[float64](ctx, p, "float64") },
	}
	errs := make([]error, len(checks))
	var wg sync.WaitGroup
	for i, check := range checks {
		wg.Go(func() { errs[i] = check() })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// named returns the options of an operation with the given name.
func (p *participants) named(name string, more ...hvd.Option) []hvd.Option {
	return slices.Concat(p.options, more, []hvd.Option{hvd.Name(name)})
}

// value returns element k of the contribution of member m. All values and all results are small integers,
// which every type can represent.
func (p *participants) value(m, k int) int { return 1 + (m+k+p.salt)%2 }

// evenValue is like value, and the average over all members is an integer.
func (p *participants) evenValue(m, k int) int { return 2*m + (k+p.salt)%5 }

// tensorOf returns a tensor with a value for each index.
func tensorOf[T any](p *participants, convert func(int) T, value func(k int) int) []T {
	x := make([]T, p.numElems)
	for k := range x {
		x[k] = convert(value(k))
	}
	return x
}

// reductionCase is a reduction with the values that the members contribute, and the result.
type reductionCase struct {
	op    hvd.ReduceOp
	value func(m, k int) int
	want  func(k int) int
}

// fold combines the values of all members.
func (p *participants) fold(combine func(a, b int) int) func(k int) int {
	return func(k int) int {
		v := p.value(0, k)
		for m := 1; m < len(p.ranks); m++ {
			v = combine(v, p.value(m, k))
		}
		return v
	}
}

func (p *participants) reductions() []reductionCase {
	average := func(k int) int { return len(p.ranks) - 1 + (k+p.salt)%5 }
	return []reductionCase{
		{hvd.Sum, p.value, p.fold(func(a, b int) int { return a + b })},
		{hvd.Product, p.value, p.fold(func(a, b int) int { return a * b })},
		{hvd.Min, p.value, p.fold(func(a, b int) int { return min(a, b) })},
		{hvd.Max, p.value, p.fold(func(a, b int) int { return max(a, b) })},
		{hvd.Average, p.evenValue, average},
		{hvd.AverageActive, p.evenValue, average},
	}
}

// checkType checks all operations on numbers of one type.
func checkType[T hvd.Element](ctx context.Context, p *participants, dt string, convert func(int) T) error {
	for _, c := range p.reductions() {
		if err := checkReduction(ctx, p, dt, convert, c); err != nil {
			return err
		}
	}
	x := tensorOf(p, convert, func(k int) int { return 2 * p.value(p.me, k) })
	got, err := hvd.Allreduce(ctx, x, p.named(dt+" scaled", hvd.Op(hvd.Sum), hvd.Prescale(0.5),
		hvd.Postscale(3))...)
	sum := p.reductions()[0].want
	want := tensorOf(p, convert, func(k int) int { return 3 * sum(k) })
	if err := check("allreduce of scaled "+dt, got, want, err); err != nil {
		return err
	}
	return checkMoves(ctx, p, dt, convert)
}

// checkReduction checks an allreduce and a reducescatter.
func checkReduction[T hvd.Element](ctx context.Context, p *participants, dt string, convert func(int) T,
	c reductionCase) error {
	x := tensorOf(p, convert, func(k int) int { return c.value(p.me, k) })
	want := tensorOf(p, convert, c.want)
	what := fmt.Sprint(" ", c.op, " of ", dt)
	got, err := hvd.Allreduce(ctx, x, p.named("allreduce"+what, hvd.Op(c.op))...)
	if err := check("allreduce"+what, got, want, err); err != nil {
		return err
	}
	got, err = hvd.Reducescatter(ctx, x, p.named("reducescatter"+what, hvd.Op(c.op))...)
	return check("reducescatter"+what, got, dealt(want, p.me, len(p.ranks)), err)
}

// checkMoves checks the operations that move elements without reducing them.
func checkMoves[T hvd.Element](ctx context.Context, p *participants, dt string, convert func(int) T) error {
	from := func(m int) []T { return tensorOf(p, convert, func(k int) int { return p.evenValue(m, k) }) }
	n := len(p.ranks)
	var gathered, received []T
	for m := range n {
		gathered = append(gathered, from(m)[:p.numElems*m/n]...) // the members contribute different numbers
		received = append(received, from(m)[:p.numElems/n]...)
	}
	got, err := hvd.Allgather(ctx, from(p.me)[:p.numElems*p.me/n], p.named("allgather of "+dt)...)
	if err := check("allgather of "+dt, got, gathered, err); err != nil {
		return err
	}
	root := p.salt % n
	got, err = hvd.Broadcast(ctx, from(p.me), p.ranks[root], p.named("broadcast of "+dt)...)
	if err := check("broadcast of "+dt, got, from(root), err); err != nil {
		return err
	}
	got, _, err = hvd.Alltoall(ctx, slices.Repeat(from(p.me)[:p.numElems/n], n), nil,
		p.named("alltoall of "+dt)...)
	return check("alltoall of "+dt, got, received, err)
}

// checkFloat checks all operations on floats of one type.
func checkFloat[T hvd.Element](ctx context.Context, p *participants, dt string, convert func(int) T) error {
	// Adasum of equal vectors is this vector.
	x := tensorOf(p, convert, func(k int) int { return 1 + (k+p.salt)%7 })
	got, err := hvd.Allreduce(ctx, x, p.named("adasum of "+dt, hvd.Op(hvd.Adasum))...)
	if err := check("adasum of "+dt, got, x, err); err != nil {
		return err
	}
	return checkType(ctx, p, dt, convert)
}

// checkBools checks all operations on bools. Only the minimum and the maximum reduce bools.
func checkBools(ctx context.Context, p *participants) error {
	convert := func(v int) bool { return v > 1 }
	for _, c := range p.reductions() {
		if c.op == hvd.Min || c.op == hvd.Max {
			if err := checkReduction(ctx, p, "bool", convert, c); err != nil {
				return err
			}
		}
	}
	return checkMoves(ctx, p, "bool", convert)
}

// checkCompressed checks allreduces that are compressed to 16-bit floats.
func checkCompressed[T float32 | float64](ctx context.Context, p *participants, dt string) error {
	for i, compress := range []hvd.Option{hvd.CompressFP16(), hvd.CompressBF16()} {
		for _, c := range p.reductions() {
			convert := func(v int) T { return T(v) }
			x := tensorOf(p, convert, func(k int) int { return c.value(p.me, k) })
			what := fmt.Sprintf("compressed allreduce %v of %s, %d", c.op, dt, i)
			got, err := hvd.Allreduce(ctx, x, p.named(what, hvd.Op(c.op), compress)...)
			if err := check(what, got, tensorOf(p, convert, c.want), err); err != nil {
				return err
			}
		}
	}
	return nil
}
