package hvd

import (
	"context"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
)

// describe fills in the empty handle h for tensor i of the call c. The tensor has numElems elements. The
// caller of describe sets the buffers.
func (h *Handle[T]) describe(c *call, i, numElems int) (err error) {
	h.kind, h.engine = c.Kind, c.engine
	h.slot = take(&c.engine.slots.single, h)
	c.Fill(&h.slot.entry)
	q := &h.slot.entry.Request
	if c.shapes == nil {
		h.dims[0] = int64(numElems)
		q.Shape = h.dims[:]
		return nil
	}
	q.Shape, err = c.shape(i, numElems)
	return err
}

// finished completes h. The slot of h calls it when the operation has ended. err is the error of the
// operation, or nil.
func (h *Handle[T]) finished(err error) {
	e := &h.slot.entry
	if err == nil && e.Request.DType == tensor.Bool {
		rank.OnlyBools(e.Output)
	}
	if e.Received != nil {
		received := e.Received
		h.received = &received
	}
	if g := h.group; g == nil {
		h.hold(e)
	} else if g.tensors[0] == h {
		g.hold(e)
	}
	h.slot.free()
	h.slot = nil
	h.complete(err)
	if h.group != nil {
		h.group.oneFinished()
	}
}

// submitted takes the result of a submission, an error or nil, and returns it. If the error says that the job
// is over, submitted adds to it the operations for which this rank had given up waiting.
func (c *call) submitted(err error) error {
	if err == nil {
		return nil
	}
	return c.engine.abandoned.explain(err)
}

// await turns an asynchronous call into a synchronous one: if err is nil, it waits for h. Otherwise the call
// has failed, and await returns err.
func await[T any](ctx context.Context, h *Handle[T], err error) ([]T, error) {
	if err != nil {
		return nil, err
	}
	return h.Wait(ctx)
}

// Allreduce reduces x over all ranks, element by element. All ranks get the same result, bit by bit. The
// reduction is Average unless Op chooses another. x must have the same shape and type at all ranks. It may be
// empty.
//
// Small tensors that are ready together are fused into one operation. With n ranks, each rank sends about
// 2(n-1)/n times the bytes of x (ring allreduce; Patarasuk and Yuan, 2009).
func Allreduce[T Element](ctx context.Context, x []T, opts ...Option) ([]T, error) {
	h, err := one(message.Allreduce, x, opts, allreduceTensor)
	return await(ctx, h, err)
}

// AllreduceAsync submits an Allreduce and returns its handle without waiting.
func AllreduceAsync[T Element](x []T, opts ...Option) (*Handle[T], error) {
	return started(one(message.Allreduce, x, opts, allreduceTensor))
}

// A builder fills in the empty handle h for tensor i of the call c. The slice x is the argument for that
// tensor. A builder gets c by value because a pointer would move c to the heap.
type builder[T any] func(h *Handle[T], c call, i int, x []T) error

// one queues an operation on the tensor x and returns its handle. It calls build to fill in the handle.
func one[T Element](kind message.Kind, x []T, opts []Option, build builder[T]) (*Handle[T], error) {
	c, err := prepare(kind, tensor.Of[T](), false, opts)
	if err != nil {
		return nil, err
	}
	h := new(Handle[T])
	if err := build(h, c, 0, x); err != nil {
		return nil, err
	}
	if err := c.submitted(c.Submit(&h.slot.entry)); err != nil {
		return nil, err
	}
	h.name = c.Name
	return h, nil
}

func allreduceTensor[T Element](h *Handle[T], c call, i int, x []T) error {
	if err := h.describe(&c, i, len(x)); err != nil {
		return err
	}
	h.out = x
	if !c.InPlace {
		h.out = make([]T, len(x))
	}
	h.slot.entry.Input, h.slot.entry.Output = tensor.Bytes(x), tensor.Bytes(h.out)
	return nil
}

// Allgather concatenates the tensors of all ranks along the first dimension, in rank order. The first
// dimension may differ between ranks. The other dimensions and the type must be equal.
//
// Each rank sends about as many bytes as the other ranks contribute together.
func Allgather[T Element](ctx context.Context, x []T, opts ...Option) ([]T, error) {
	h, err := one(message.Allgather, x, opts, allgatherTensor)
	return await(ctx, h, err)
}

// AllgatherAsync submits an Allgather and returns its handle without waiting.
func AllgatherAsync[T Element](x []T, opts ...Option) (*Handle[T], error) {
	return started(one(message.Allgather, x, opts, allgatherTensor))
}

func allgatherTensor[T Element](h *Handle[T], c call, i int, x []T) error {
	mine := x
	if c.InPlace {
		n := c.Set.Size()
		if len(x)%n != 0 {
			return c.Misuse("got %d elements in place, want a multiple of the number of ranks, %d", len(x), n)
		}
		each := len(x) / n
		mine = x[c.Set.Me*each : (c.Set.Me+1)*each]
	}
	if err := h.describe(&c, i, len(mine)); err != nil {
		return err
	}
	h.slot.entry.Input = tensor.Bytes(mine)
	if c.InPlace {
		h.out, h.slot.entry.Output = x, tensor.Bytes(x)
	} else {
		allocates(h)
	}
	return nil
}

// allocates makes the engine allocate the output of h as soon as its size is known.
func allocates[T Element](h *Handle[T]) {
	h.slot.entry.Allocate = func(numBytes int) []byte {
		h.out = make([]T, numBytes/h.slot.entry.Request.DType.Size())
		return tensor.Bytes(h.out)
	}
}

// Broadcast returns at every rank the tensor that rank root passes as x. Shape and type of x must be the same
// at all ranks.
//
// The data goes down a tree: with n ranks, no rank sends more than ceil(log2(n)) times the bytes of x.
func Broadcast[T Element](ctx context.Context, x []T, root int, opts ...Option) ([]T, error) {
	h, err := broadcast(x, root, opts)
	return await(ctx, h, err)
}

// BroadcastAsync submits a Broadcast and returns its handle without waiting.
func BroadcastAsync[T Element](x []T, root int, opts ...Option) (*Handle[T], error) {
	return started(broadcast(x, root, opts))
}

func broadcast[T Element](x []T, root int, opts []Option) (*Handle[T], error) {
	return one(message.Broadcast, x, opts, func(h *Handle[T], c call, i int, x []T) error {
		if err := c.CheckRoot(root); err != nil {
			return err
		}
		if err := allreduceTensor(h, c, i, x); err != nil { // the buffers are those of an allreduce
			return err
		}
		h.slot.entry.Request.Root = topo.Rank(root)
		return nil
	})
}

// Reduce reduces x over all ranks as Allreduce does, and returns the result at the rank root. The other ranks
// get nil, and their x is not changed.
//
// With n ranks over TCP, each rank sends the bytes of x once. The root receives (n-1) times the bytes of x if
// these are at most 64 KiB. Otherwise it receives 2(n-1)/n times the bytes of x.
func Reduce[T Element](ctx context.Context, x []T, root int, opts ...Option) ([]T, error) {
	h, err := reduce(x, root, opts)
	return await(ctx, h, err)
}

// ReduceAsync submits a Reduce and returns its handle without waiting.
func ReduceAsync[T Element](x []T, root int, opts ...Option) (*Handle[T], error) {
	return started(reduce(x, root, opts))
}

func reduce[T Element](x []T, root int, opts []Option) (*Handle[T], error) {
	return one(message.Reduce, x, opts, func(h *Handle[T], c call, i int, x []T) error {
		if err := c.CheckRoot(root); err != nil {
			return err
		}
		if c.Set.IsRoot(root) {
			if err := allreduceTensor(h, c, i, x); err != nil { // the buffers are those of an allreduce
				return err
			}
		} else {
			if err := h.describe(&c, i, len(x)); err != nil {
				return err
			}
			h.slot.entry.Input = tensor.Bytes(x)
		}
		h.slot.entry.Request.Root = topo.Rank(root)
		return nil
	})
}

// Reducescatter reduces x over all ranks as Allreduce does and returns to each rank its part of the rows. The
// rows are divided as evenly as possible. If that leaves a remainder, each of the first ranks gets one row
// more.
//
// With n ranks, each rank sends about (n-1)/n times the bytes of x.
func Reducescatter[T Element](ctx context.Context, x []T, opts ...Option) ([]T, error) {
	h, err := one(message.Reducescatter, x, opts, reducescatterTensor)
	return await(ctx, h, err)
}

// ReducescatterAsync submits a Reducescatter and returns its handle without waiting.
func ReducescatterAsync[T Element](x []T, opts ...Option) (*Handle[T], error) {
	return started(one(message.Reducescatter, x, opts, reducescatterTensor))
}

func reducescatterTensor[T Element](h *Handle[T], c call, i int, x []T) error {
	if err := h.describe(&c, i, len(x)); err != nil {
		return err
	}
	shape := h.slot.entry.Request.Shape
	from, to := 0, 0 // a scalar has no rows; the coordinator refuses it, so that all ranks get the error
	if len(shape) > 0 && shape[0] > 0 {
		first, rows := tensor.Rows(shape[0], c.Set.Size(), c.Set.Me)
		row := len(x) / int(shape[0])
		from, to = int(first)*row, int(first+rows)*row
	}
	h.out = x[from:to:to]
	if !c.InPlace {
		h.out = make([]T, to-from)
	}
	h.slot.entry.Input, h.slot.entry.Output = tensor.Bytes(x), tensor.Bytes(h.out)
	return nil
}

// Alltoall sends rows of x to all ranks. A row is a slice of x along the first dimension. The first splits[0]
// rows go to the first member of the process set, the next splits[1] rows to the second, and so on. Rows
// beyond the sum of the splits are not sent. If splits is nil, every member gets the same number of rows. It
// is a *UsageError if the number of splits is not that of the members, if one is negative, if their sum is
// larger than the number of rows, or if splits is nil and the rows cannot be divided evenly. Alltoall returns
// the rows that this rank has received, in the order of their senders, and the number of rows that came from
// each member.
//
// Each rank sends each row once, directly to its destination.
func Alltoall[T Element](ctx context.Context, x []T, splits []int,
	opts ...Option) (out []T, received []int, err error) {
	h, err := alltoall(x, splits, opts)
	if out, err = await(ctx, h, err); err != nil {
		return nil, nil, err
	}
	return out, h.Received(), nil
}

// AlltoallAsync submits an Alltoall and returns its handle without waiting. The method Received of the handle
// returns the number of rows that came from each member.
func AlltoallAsync[T Element](x []T, splits []int, opts ...Option) (*Handle[T], error) {
	return started(alltoall(x, splits, opts))
}

func alltoall[T Element](x []T, splits []int, opts []Option) (*Handle[T], error) {
	return one(message.Alltoall, x, opts, func(h *Handle[T], c call, i int, x []T) (err error) {
		if err := h.describe(&c, i, len(x)); err != nil {
			return err
		}
		// A scalar has no rows. The coordinator refuses it, so that all ranks get the error.
		if shape := h.slot.entry.Request.Shape; len(shape) > 0 {
			if h.slot.entry.Splits, err = rank.Splits(&c.Call, splits, shape[0]); err != nil {
				return err
			}
		}
		h.slot.entry.Input = tensor.Bytes(x)
		if c.InPlace {
			h.out, h.slot.entry.Output = x, h.slot.entry.Input
		} else {
			allocates(h)
		}
		return nil
	})
}

// Gather concatenates the tensors of all ranks along the first dimension at the rank root, in rank order. It
// returns the result and the number of rows that came from each member. At the other ranks it returns nil for
// both. The first dimension may differ between ranks. The other dimensions and the type must be equal.
//
// Each rank sends its rows once, directly to the root.
func Gather[T Element](ctx context.Context, x []T, root int,
	opts ...Option) (out []T, rows []int, err error) {
	h, err := gather(x, root, opts)
	if out, err = await(ctx, h, err); out == nil {
		return nil, nil, err
	}
	return out, h.Received(), nil
}

// GatherAsync submits a Gather and returns its handle without waiting. The method Received of the handle
// returns the number of rows that came from each member.
func GatherAsync[T Element](x []T, root int, opts ...Option) (*Handle[T], error) {
	return started(gather(x, root, opts))
}

func gather[T Element](x []T, root int, opts []Option) (*Handle[T], error) {
	return one(message.Gather, x, opts, func(h *Handle[T], c call, i int, x []T) error {
		if err := c.CheckRoot(root); err != nil {
			return err
		}
		if err := h.describe(&c, i, len(x)); err != nil {
			return err
		}
		e := &h.slot.entry
		e.Request.Root = topo.Rank(root)
		// A scalar has no rows. The coordinator refuses it, so that all ranks get the error.
		if shape := e.Request.Shape; len(shape) > 0 {
			e.Splits = rank.SplitsTo(&c.Call, root, shape[0])
		}
		e.Input = tensor.Bytes(x)
		if c.Set.IsRoot(root) {
			allocates(h)
		}
		return nil
	})
}

// Scatter sends rows of the tensor that the rank root passes as x to all ranks, as Alltoall does, with the
// same rules for splits. It returns the rows that this rank has received. Only the root needs x, splits and
// the option Shape; the other ranks' values are ignored.
//
// The root sends each row once, directly to its destination.
func Scatter[T Element](ctx context.Context, x []T, splits []int, root int, opts ...Option) ([]T, error) {
	h, err := scatter(x, splits, root, opts)
	return await(ctx, h, err)
}

// ScatterAsync submits a Scatter and returns its handle without waiting.
func ScatterAsync[T Element](x []T, splits []int, root int, opts ...Option) (*Handle[T], error) {
	return started(scatter(x, splits, root, opts))
}

func scatter[T Element](x []T, splits []int, root int, opts []Option) (*Handle[T], error) {
	return one(message.Scatter, x, opts, func(h *Handle[T], c call, i int, x []T) (err error) {
		if err := c.CheckRoot(root); err != nil {
			return err
		}
		if !c.Set.IsRoot(root) {
			x, c.shapes = nil, nil
		}
		if err := h.describe(&c, i, len(x)); err != nil {
			return err
		}
		e := &h.slot.entry
		e.Request.Root = topo.Rank(root)
		if err := rank.PrepareScatter(&c.Call, e, splits); err != nil {
			return err
		}
		e.Input = tensor.Bytes(x)
		allocates(h)
		return nil
	})
}

// Barrier waits until every rank has called Barrier.
func Barrier(ctx context.Context, opts ...Option) error {
	h, err := barrier(opts)
	_, err = await(ctx, h, err)
	return err
}

// BarrierAsync submits a Barrier and returns its handle without waiting. The result has no elements.
func BarrierAsync(opts ...Option) (*Handle[struct{}], error) { return started(barrier(opts)) }

func barrier(opts []Option) (*Handle[struct{}], error) {
	c, err := prepare(message.Barrier, tensor.Invalid, false, opts)
	if err != nil {
		return nil, err
	}
	h := new(Handle[struct{}])
	if err := h.describe(&c, 0, 0); err != nil {
		return nil, err
	}
	h.slot.entry.Request.Shape = nil
	if err := c.submitted(c.Submit(&h.slot.entry)); err != nil {
		return nil, err
	}
	h.name = c.Name
	return h, nil
}
