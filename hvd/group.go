package hvd

import (
	"context"

	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/tensor"
)

// GroupedAllreduce reduces the tensors of a group as Allreduce does, all of them in one cycle or, if the ranks disagree
// about one, none. Tensor i of n has the name "<name>_<i>of<n>", counted from 1. Ranks must give the same tensors in the
// same order: those that give more or fewer have other names for theirs, and wait for each other as ranks do that submit
// different tensors. A group of none is done at once.
func GroupedAllreduce[T Element](ctx context.Context, xs [][]T, opts ...Option) ([][]T, error) {
	g, err := many(message.Allreduce, xs, opts, allreduceTensor)
	return awaitGroup(ctx, g, err)
}

// GroupedAllreduceAsync is GroupedAllreduce without the wait.
func GroupedAllreduceAsync[T Element](xs [][]T, opts ...Option) (*GroupHandle[T], error) {
	return started(many(message.Allreduce, xs, opts, allreduceTensor))
}

// GroupedAllgather gathers the tensors of a group as Allgather does, all or none.
func GroupedAllgather[T Element](ctx context.Context, xs [][]T, opts ...Option) ([][]T, error) {
	g, err := many(message.Allgather, xs, opts, allgatherTensor)
	return awaitGroup(ctx, g, err)
}

// GroupedAllgatherAsync is GroupedAllgather without the wait.
func GroupedAllgatherAsync[T Element](xs [][]T, opts ...Option) (*GroupHandle[T], error) {
	return started(many(message.Allgather, xs, opts, allgatherTensor))
}

// GroupedReducescatter reduces and scatters the tensors of a group as Reducescatter does, all or none.
func GroupedReducescatter[T Element](ctx context.Context, xs [][]T, opts ...Option) ([][]T, error) {
	g, err := many(message.Reducescatter, xs, opts, reducescatterTensor)
	return awaitGroup(ctx, g, err)
}

// GroupedReducescatterAsync is GroupedReducescatter without the wait.
func GroupedReducescatterAsync[T Element](xs [][]T, opts ...Option) (*GroupHandle[T], error) {
	return started(many(message.Reducescatter, xs, opts, reducescatterTensor))
}

func awaitGroup[T any](ctx context.Context, g *GroupHandle[T], err error) ([][]T, error) {
	if err != nil {
		return nil, err
	}
	return g.Wait(ctx)
}

// many queues an operation on a group of tensors, for each of which build makes the handle.
func many[T Element](kind message.Kind, xs [][]T, opts []Option, build builder[T]) (*GroupHandle[T], error) {
	c, err := prepare(kind, tensor.Of[T](), true, opts)
	if err != nil {
		return nil, err
	}
	if c.shapes != nil && len(c.shapes) != len(xs) {
		return nil, c.misuse("%d shapes, want one for each of %d tensors", len(c.shapes), len(xs))
	}
	g := &GroupHandle[T]{operation: operation{kind: kind, name: c.name}, tensors: make([]*Handle[T], len(xs))}
	g.left.Store(int64(len(xs)))
	handles := make([]Handle[T], len(xs)) // g keeps all of them anyway
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
	if err := submit(&c, true, g.tensors...); err != nil {
		return nil, err
	}
	g.name, g.engine = c.name, c.engine.engine
	return g, nil
}
