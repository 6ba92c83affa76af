package hvd

import (
	"context"
	"slices"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/tensorqueue"
)

// GroupedAllreduce reduces the tensors of a group as Allreduce does. If the ranks disagree about one of the
// tensors, none of them is reduced. All ranks must pass the same tensors in the same order. The results share
// one allocation unless InPlace is given. A call with an empty group completes at once.
//
// The ranks negotiate the whole group under its name and not each tensor, so a group of many small tensors
// costs little more than one tensor with as many elements.
func GroupedAllreduce[T Element](ctx context.Context, xs [][]T, opts ...GroupedAllreduceOption) ([][]T,
	error) {
	h, err := allreduceGroup(xs, opts)
	return await(ctx, h, err)
}

// GroupedAllreduceAsync submits a GroupedAllreduce and returns its handle without waiting.
func GroupedAllreduceAsync[T Element](xs [][]T, opts ...GroupedAllreduceOption) (*Handle[[][]T], error) {
	return started(allreduceGroup(xs, opts))
}

// allreduceGroup queues an allreduce of a group. The whole group is one request.
func allreduceGroup[T Element](xs [][]T, opts []GroupedAllreduceOption) (*Handle[[][]T], error) {
	c, err := prepareGroup[T](message.Allreduce, len(xs), opts)
	if err != nil {
		return nil, err
	}
	g := new(groupOp[T])
	g.kind, g.name, g.result = c.Kind, c.Name, slices.Clone(xs)
	if len(xs) == 0 {
		g.complete(nil)
		return &g.Handle, nil
	}
	for _, x := range xs {
		g.dims[0] += int64(len(x))
	}
	if !c.InPlace {
		room := make([]T, g.dims[0])
		for i, x := range xs {
			g.result[i], room = room[:len(x):len(x)], room[len(x):]
		}
	}
	g.slot = take(&c.engine.slots.group, g)
	e := &g.slot.entry
	c.Fill(e)
	g.slot.draft = g.slot.draft[:0]
	for i, x := range xs {
		e.Parts = append(e.Parts, tensorqueue.Part{Input: tensor.Bytes(x), Output: tensor.Bytes(g.result[i])})
		if c.shapes == nil {
			g.slot.draft = append(g.slot.draft, int64(c.DType), 1, int64(len(x)))
			continue
		}
		shape, err := c.shape(i, len(x))
		if err != nil {
			return nil, err
		}
		g.slot.draft = g.slot.draft.Append(c.DType, shape)
	}
	q := &e.Request
	q.Shape, q.Parts = g.dims[:], g.slot.drafted()
	g.engine = c.engine
	if err := c.submitted(c.Submit(e)); err != nil {
		return nil, err
	}
	g.name = c.Name
	return &g.Handle, nil
}

// prepareGroup applies the options of an operation on a group of n tensors.
func prepareGroup[T Element, O any](kind message.Kind, n int, opts []O) (call, error) {
	c, err := prepare(kind, tensor.Of[T](), opts)
	if err == nil {
		err = c.checkShapes(n)
	}
	return c, err
}

// checkShapes returns an error unless there is one shape for each of n tensors, or there are no shapes.
func (c *call) checkShapes(n int) error {
	if c.shapes != nil && len(c.shapes) != n {
		return c.Misuse("got %d shapes, want one for each of %d tensors", len(c.shapes), n)
	}
	return nil
}

// GroupedAllgather gathers the tensors of a group as Allgather does. It gathers either all of them or none.
// Tensor i of n has the name "<name>_<i>of<n>", where i counts from 1. All ranks must pass the same tensors
// in the same order. If a rank passes more or fewer tensors than the other ranks, its tensors have other
// names. Then the ranks wait for each other, as they do if they submit different tensors. A call with an
// empty group completes at once.
func GroupedAllgather[T Element](ctx context.Context, xs [][]T, opts ...GroupedMoveOption) ([][]T, error) {
	h, err := many(message.Allgather, xs, opts, allgatherTensor)
	return await(ctx, h, err)
}

// GroupedAllgatherAsync submits a GroupedAllgather and returns its handle without waiting.
func GroupedAllgatherAsync[T Element](xs [][]T, opts ...GroupedMoveOption) (*Handle[[][]T], error) {
	return started(many(message.Allgather, xs, opts, allgatherTensor))
}

// GroupedReducescatter reduces and scatters the tensors of a group as Reducescatter does. Either all tensors
// succeed or all fail. The tensors get their names, and an empty group completes, as in GroupedAllgather.
func GroupedReducescatter[T Element](ctx context.Context, xs [][]T, opts ...GroupedReduceOption) ([][]T,
	error) {
	h, err := many(message.Reducescatter, xs, opts, reducescatterTensor)
	return await(ctx, h, err)
}

// GroupedReducescatterAsync submits a GroupedReducescatter and returns its handle without waiting.
func GroupedReducescatterAsync[T Element](xs [][]T, opts ...GroupedReduceOption) (*Handle[[][]T], error) {
	return started(many(message.Reducescatter, xs, opts, reducescatterTensor))
}

// many queues an operation on each tensor of a group. It calls build to fill in the operation of each tensor.
func many[T Element, O any](kind message.Kind, xs [][]T, opts []O,
	build builder[T, []T]) (*Handle[[][]T], error) {
	c, err := prepareGroup[T](kind, len(xs), opts)
	if err != nil {
		return nil, err
	}
	g := &groupOp[T]{tensors: make([]*tensorOp[T, []T], len(xs))}
	g.kind, g.name, g.engine = kind, c.Name, c.engine
	g.left.Store(int64(len(xs)))
	all := make([]tensorOp[T, []T], len(xs)) // one allocation for all operations, because g keeps all
	for i, x := range xs {
		o := &all[i]
		o.out = &o.result
		if err := build(o, c, i, x); err != nil {
			return nil, err
		}
		g.tensors[i], o.group = o, g
	}
	if len(xs) == 0 {
		g.result = [][]T{}
		g.complete(nil)
		return &g.Handle, nil
	}
	entries := make([]*tensorqueue.Entry, len(xs))
	for i, o := range g.tensors {
		entries[i] = &o.slot.entry
	}
	if err := c.submitted(c.SubmitMembers(entries)); err != nil {
		return nil, err
	}
	g.name = c.Name
	return &g.Handle, nil
}
