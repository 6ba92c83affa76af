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
func GroupedAllreduce[T Element](ctx context.Context, xs [][]T, opts ...Option) ([][]T, error) {
	g, err := allreduceGroup(xs, opts)
	return awaitGroup(ctx, g, err)
}

// GroupedAllreduceAsync submits a GroupedAllreduce and returns its handle without waiting.
func GroupedAllreduceAsync[T Element](xs [][]T, opts ...Option) (*GroupHandle[T], error) {
	return started(allreduceGroup(xs, opts))
}

// allreduceGroup queues an allreduce of a group. The whole group is one request.
func allreduceGroup[T Element](xs [][]T, opts []Option) (*GroupHandle[T], error) {
	c, err := prepareGroup[T](message.Allreduce, len(xs), opts)
	if err != nil {
		return nil, err
	}
	g := &GroupHandle[T]{operation: operation{kind: c.Kind, name: c.Name}, outs: slices.Clone(xs)}
	if len(xs) == 0 {
		g.complete(nil)
		return g, nil
	}
	for _, x := range xs {
		g.dims[0] += int64(len(x))
	}
	if !c.InPlace {
		room := make([]T, g.dims[0])
		for i, x := range xs {
			g.outs[i], room = room[:len(x):len(x)], room[len(x):]
		}
	}
	g.slot = take(&c.engine.slots.group, g)
	e := &g.slot.entry
	c.Fill(e)
	g.slot.draft = g.slot.draft[:0]
	for i, x := range xs {
		e.Parts = append(e.Parts, tensorqueue.Part{Input: tensor.Bytes(x), Output: tensor.Bytes(g.outs[i])})
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
	return g, nil
}

// prepareGroup applies the options of an operation on a group of n tensors.
func prepareGroup[T Element](kind message.Kind, n int, opts []Option) (call, error) {
	c, err := prepare(kind, tensor.Of[T](), true, opts)
	if err == nil && c.shapes != nil && len(c.shapes) != n {
		return c, c.Misuse("got %d shapes, want one for each of %d tensors", len(c.shapes), n)
	}
	return c, err
}

// GroupedAllgather gathers the tensors of a group as Allgather does. It gathers either all of them or none.
// Tensor i of n has the name "<name>_<i>of<n>", where i counts from 1. All ranks must pass the same tensors
// in the same order. If a rank passes more or fewer tensors than the other ranks, its tensors have other
// names. Then the ranks wait for each other, as they do if they submit different tensors. A call with an
// empty group completes at once.
func GroupedAllgather[T Element](ctx context.Context, xs [][]T, opts ...Option) ([][]T, error) {
	g, err := many(message.Allgather, xs, opts, allgatherTensor)
	return awaitGroup(ctx, g, err)
}

// GroupedAllgatherAsync submits a GroupedAllgather and returns its handle without waiting.
func GroupedAllgatherAsync[T Element](xs [][]T, opts ...Option) (*GroupHandle[T], error) {
	return started(many(message.Allgather, xs, opts, allgatherTensor))
}

// GroupedReducescatter reduces and scatters the tensors of a group as Reducescatter does. Either all tensors
// succeed or all fail. The tensors get their names, and an empty group completes, as in GroupedAllgather.
func GroupedReducescatter[T Element](ctx context.Context, xs [][]T, opts ...Option) ([][]T, error) {
	g, err := many(message.Reducescatter, xs, opts, reducescatterTensor)
	return awaitGroup(ctx, g, err)
}

// GroupedReducescatterAsync submits a GroupedReducescatter and returns its handle without waiting.
func GroupedReducescatterAsync[T Element](xs [][]T, opts ...Option) (*GroupHandle[T], error) {
	return started(many(message.Reducescatter, xs, opts, reducescatterTensor))
}

func awaitGroup[T any](ctx context.Context, g *GroupHandle[T], err error) ([][]T, error) {
	if err != nil {
		return nil, err
	}
	return g.Wait(ctx)
}

// many queues an operation on each tensor of a group. It calls build to fill the handle of each tensor.
func many[T Element](kind message.Kind, xs [][]T, opts []Option, build builder[T]) (*GroupHandle[T], error) {
	c, err := prepareGroup[T](kind, len(xs), opts)
	if err != nil {
		return nil, err
	}
	g := &GroupHandle[T]{operation: operation{kind: kind, name: c.Name, engine: c.engine},
		tensors: make([]*Handle[T], len(xs))}
	g.left.Store(int64(len(xs)))
	handles := make([]Handle[T], len(xs)) // one allocation for all handles, because g keeps all
	for i, x := range xs {
		h := &handles[i]
		if err := build(h, c, i, x); err != nil {
			return nil, err
		}
		g.tensors[i], h.group = h, g
	}
	if len(xs) == 0 {
		g.complete(nil)
		return g, nil
	}
	entries := make([]*tensorqueue.Entry, len(xs))
	for i, h := range g.tensors {
		entries[i] = &h.slot.entry
	}
	if err := c.submitted(c.SubmitMembers(entries)); err != nil {
		return nil, err
	}
	g.name = c.Name
	return g, nil
}
