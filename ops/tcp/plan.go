package tcp

import (
	"fmt"
	"slices"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
)

// planner chooses the algorithms of operations by a Config.
type planner struct {
	deterministic bool
	table         Table
	forced        Forced
}

func newPlanner(cfg Config) *planner {
	p := &planner{deterministic: cfg.Deterministic, table: cfg.Table, forced: cfg.Forced}
	if p.table == nil {
		p.table = DefaultTable
	}
	return p
}

// plan implements ops.Planner. It chooses the algorithm that the user has forced, or else the algorithm that
// was tuned, or else the algorithm of the first rule of the table that applies.
func (p *planner) plan(members []topo.Rank, r *message.Response, numBytes int64,
	t *message.Tuning) (message.Algorithm, error) {
	all := algorithms[r.Kind]
	if all == nil {
		return message.NoAlgorithm, fmt.Errorf("%v is not supported", r.Kind)
	}
	if r.Kind.Reduces() {
		if err := tensor.CheckReduce(r.Op, r.WireType()); err != nil {
			return message.NoAlgorithm, err
		}
		if op := r.Op.Base(); op == tensor.Adasum {
			if r.Kind != message.Allreduce {
				return message.NoAlgorithm, fmt.Errorf("%v with %v is not supported", r.Kind, op)
			}
			return message.HalvingDoubling, nil
		}
	}
	can := func(a message.Algorithm) bool { return keepsOrder(a) || !p.needsOrder(r, len(members)) }
	if alg := p.forced[r.Kind]; alg != message.NoAlgorithm {
		if can(alg) {
			return alg, nil
		}
		return message.NoAlgorithm, fmt.Errorf(
			"%v=%v cannot be forced for a %v of %v, which is computed in the order of the ranks and rounded once: %s can",
			r.Kind, alg, r.Op, r.WireType(), list(slices.DeleteFunc(slices.Clone(all),
				func(a message.Algorithm) bool { return !can(a) })))
	}
	if t != nil && r.Kind == message.Allreduce && t.Allreduce != message.NoAlgorithm && can(t.Allreduce) {
		return t.Allreduce, nil
	}
	for i := range p.table {
		if rule := &p.table[i]; rule.applies(r.Kind, len(members), numBytes) && can(rule.Algorithm) {
			return rule.Algorithm, nil
		}
	}
	return all[slices.IndexFunc(all, can)], nil
}

// needsOrder reports whether a reduction over n ranks must be computed in the order of the ranks, in full
// precision: sums and products of half-precision types, and in deterministic mode of all floating-point
// types, over more than two ranks. The order cannot change any other result.
func (p *planner) needsOrder(r *message.Response, n int) bool {
	dt := r.WireType()
	op := r.Op.Base()
	return n > 2 && r.Kind.Reduces() && dt.IsFloat() && op != tensor.Min && op != tensor.Max &&
		(dt.IsHalf() || p.deterministic)
}

// keepsOrder reports whether the algorithm computes reductions in the order of the ranks.
func keepsOrder(a message.Algorithm) bool {
	return a == message.Direct || a == message.Exchange
}
