package hvd

import (
	"context"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/tensorqueue"
)

// Join declares that this rank has no more tensors, while other ranks may still have some. Until all ranks
// have joined, this rank takes part in the allreduces and reduces of the other ranks with neutral elements: 0
// for sums, 1 for products, the smallest value for Max, the largest for Min. It takes part in their barriers
// too. When all ranks have joined, Join returns the rank that joined last, which is the same at all ranks.
// This rank gets no results of these operations: after a Join, programs broadcast the model from the rank
// that joined last. Tensors that this rank submitted before Join still count with their data. Until the
// program has observed that the join is done, this rank must not submit other operations on the process set:
// they fail with a *UsageError.
//
// While some ranks have joined and others have not, Average still divides by the number of all ranks.
// AverageActive divides by the number of ranks that have not joined, which is what training needs. While this
// rank has joined, an allgather, broadcast, alltoall, reducescatter, gather or scatter of the other ranks
// fails with a *MismatchError, unless this rank has passed Empty to Join. An operation whose root has joined
// always fails, and so do additions and removals of process sets.
func Join(ctx context.Context, opts ...JoinOption) (last int, err error) {
	h, err := join(opts)
	return await(ctx, h, err)
}

// JoinAsync submits a Join and returns its handle without waiting. The result is the rank that joined
// last.
func JoinAsync(opts ...JoinOption) (*Handle[int], error) { return started(join(opts)) }

func join(opts []JoinOption) (*Handle[int], error) {
	c, err := prepare(message.Join, tensor.Invalid, opts)
	if err != nil {
		return nil, err
	}
	o := new(joinOp)
	o.kind, o.name, o.engine, o.held = c.Kind, rank.JoinName, c.engine, c.Set
	if err := c.submitted(c.Join(&o.entry, o.finished)); err != nil {
		return nil, err
	}
	return &o.Handle, nil
}

// joinOp is a join, with its handle.
type joinOp struct {
	Handle[int]
	entry tensorqueue.Entry
}

// finished completes o. err is the error of the join, or nil.
func (o *joinOp) finished(err error) {
	if err == nil {
		o.result = int(o.entry.Response.Root)
	}
	o.complete(err)
}
