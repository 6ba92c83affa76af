package hvd

import (
	"context"
	"errors"
	"fmt"

	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/tensor"
	"github.com/gohvd/gohvd/tensorqueue"
	"github.com/gohvd/gohvd/topo"
)

// Handle is an operation in flight that gives elements of T. Its methods are safe for concurrent use.
type Handle[T any] struct {
	kind message.Kind
	name string
	done chan struct{}
	// out and err are written before done is closed.
	out []T
	err error
}

// Poll reports whether the operation is done, so that Wait returns at once.
func (h *Handle[T]) Poll() bool {
	select {
	case <-h.done:
		return true
	default:
		return false
	}
}

// Done is closed when the operation is done.
func (h *Handle[T]) Done() <-chan struct{} { return h.done }

// Name is the tensor's name.
func (h *Handle[T]) Name() string { return h.name }

// Wait waits for the operation and gives its result. When ctx ends first the operation goes on, and the slices
// stay in use until Done.
func (h *Handle[T]) Wait(ctx context.Context) ([]T, error) {
	select {
	case <-h.done:
		return h.out, h.err
	default:
	}
	select {
	case <-h.done:
		return h.out, h.err
	case <-ctx.Done():
		err := ctx.Err()
		if cause := context.Cause(ctx); !errors.Is(cause, err) {
			err = fmt.Errorf("%w: %w", err, cause)
		}
		return nil, fmt.Errorf("hvd: %v %q: gave up waiting, while the operation goes on: %w", h.kind, h.name, err)
	}
}

// submit starts the operation of c. result, if not nil, gives the elements once it is there.
func submit[T any](c *call, input, output []byte, allocate func(int) []byte, result func() []T) (*Handle[T], error) {
	if c.request.Name == "" {
		// A call that fails at this rank alone must not shift the numbers of those that follow.
		probe := c.request
		probe.Name = "without a name"
		if err := probe.Check(); err != nil {
			return nil, fmt.Errorf("hvd: %w", err)
		}
		c.request.Name = fmt.Sprintf("%v.noname.%d", c.request.Kind, c.engine.unnamed.Add(1))
	}
	h := &Handle[T]{kind: c.request.Kind, name: c.request.Name, done: make(chan struct{})}
	err := c.engine.engine.Submit(&tensorqueue.Entry{
		Set: topo.Global, Request: c.request,
		Input: input, Output: output, Allocate: allocate,
		Done: func(err error) {
			if h.err = err; err == nil && result != nil {
				h.out = result()
			}
			close(h.done)
		},
	})
	if err != nil {
		return nil, err
	}
	return h, nil
}

// await turns the asynchronous form into the synchronous.
func await[T any](ctx context.Context, h *Handle[T], err error) ([]T, error) {
	if err != nil {
		return nil, err
	}
	return h.Wait(ctx)
}

// Allreduce reduces x over all ranks, element by element, and gives all of them the same result, bit by bit: the
// average unless Op says otherwise. x must have the same shape and type everywhere; it may be empty. The result is
// a new slice unless InPlace.
//
// Small tensors that are ready together travel as one. Each rank sends about 2(n-1)/n times the bytes of x.
func Allreduce[T Element](ctx context.Context, x []T, opts ...Option) ([]T, error) {
	h, err := AllreduceAsync(x, opts...)
	return await(ctx, h, err)
}

// AllreduceAsync is Allreduce without the wait.
func AllreduceAsync[T Element](x []T, opts ...Option) (*Handle[T], error) {
	c, err := prepare(message.Allreduce, tensor.Of[T](), len(x), opts)
	if err != nil {
		return nil, err
	}
	out := x
	if !c.inPlace {
		out = make([]T, len(x))
	}
	return submit(&c, tensor.Bytes(x), tensor.Bytes(out), nil, func() []T { return out })
}

// Allgather joins the x of all ranks along the first dimension, in rank order. The first dimensions may differ, the
// others and the type must not. The result is always a new slice.
//
// Each rank sends the sum of all others' bytes.
func Allgather[T Element](ctx context.Context, x []T, opts ...Option) ([]T, error) {
	h, err := AllgatherAsync(x, opts...)
	return await(ctx, h, err)
}

// AllgatherAsync is Allgather without the wait.
func AllgatherAsync[T Element](x []T, opts ...Option) (*Handle[T], error) {
	c, err := prepare(message.Allgather, tensor.Of[T](), len(x), opts)
	if err != nil {
		return nil, err
	}
	var out []T
	return submit(&c, tensor.Bytes(x), nil, func(numBytes int) []byte {
		out = make([]T, numBytes/c.request.DType.Size())
		return tensor.Bytes(out)
	}, func() []T { return out })
}

// Broadcast gives every rank the x of rank root. Shape and type must be the same everywhere. The result is a new
// slice unless InPlace.
//
// The bytes go down a tree: no rank sends more than log2(n) times the bytes of x.
func Broadcast[T Element](ctx context.Context, x []T, root int, opts ...Option) ([]T, error) {
	h, err := BroadcastAsync(x, root, opts...)
	return await(ctx, h, err)
}

// BroadcastAsync is Broadcast without the wait.
func BroadcastAsync[T Element](x []T, root int, opts ...Option) (*Handle[T], error) {
	c, err := prepare(message.Broadcast, tensor.Of[T](), len(x), opts)
	if err != nil {
		return nil, err
	}
	if root < 0 || root >= c.engine.Size() {
		return nil, fmt.Errorf("hvd: %s: root rank is %d, want 0 to %d", c.label(), root, c.engine.Size()-1)
	}
	c.request.Root = topo.Rank(root)
	out := x
	if !c.inPlace {
		out = make([]T, len(x))
	}
	return submit(&c, tensor.Bytes(x), tensor.Bytes(out), nil, func() []T { return out })
}

// Barrier waits until every rank has called it.
func Barrier(ctx context.Context, opts ...Option) error {
	h, err := BarrierAsync(opts...)
	_, err = await(ctx, h, err)
	return err
}

// BarrierAsync is Barrier without the wait. Its handle gives no elements.
func BarrierAsync(opts ...Option) (*Handle[struct{}], error) {
	c, err := prepare(message.Barrier, tensor.Invalid, 0, opts)
	if err != nil {
		return nil, err
	}
	return submit[struct{}](&c, nil, nil, nil, nil)
}
