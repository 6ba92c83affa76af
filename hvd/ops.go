package hvd

import (
	"context"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
)

// describe fills in the empty operation o for tensor i of the call c. The tensor has numElems elements. The
// caller of describe sets the buffers.
func (o *tensorOp[T, R]) describe(c *call, i, numElems int) (err error) {
	o.kind, o.engine = c.Kind, c.engine
	o.slot = take(&c.engine.slots.single, o)
	c.Fill(&o.slot.entry)
	q := &o.slot.entry.Request
	if c.shapes == nil {
		o.dims[0] = int64(numElems)
		q.Shape = o.dims[:]
		return nil
	}
	q.Shape, err = c.shape(i, numElems)
	return err
}

// submitted takes the result of a submission, an error or nil, and returns it. If the error says that the job
// is over, submitted adds to it the operations for which this rank had given up waiting.
func (c *call) submitted(err error) error {
	if err == nil {
		return nil
	}
	return c.engine.abandoned.explain(err)
}

// Allreduce reduces x over all ranks, element by element. All ranks get the same result, bit by bit. The
// reduction is Average unless Op chooses another. x must have the same shape and type at all ranks. It may be
// empty.
//
// Small tensors that are ready together are fused into one operation. With n ranks, each rank sends about
// 2(n-1)/n times the bytes of x (ring allreduce; Patarasuk and Yuan, 2009).
func Allreduce[T Element](ctx context.Context, x []T, opts ...AllreduceOption) ([]T, error) {
	h, err := one(message.Allreduce, newTensorOp[T](), x, opts, allreduceTensor)
	return await(ctx, h, err)
}

// AllreduceAsync submits an Allreduce and returns its handle without waiting.
func AllreduceAsync[T Element](x []T, opts ...AllreduceOption) (*Handle[[]T], error) {
	return started(one(message.Allreduce, newTensorOp[T](), x, opts, allreduceTensor))
}

// A builder fills in the empty operation o for tensor i of the call c. The slice x is the argument for that
// tensor. A builder gets c by value because a pointer would move c to the heap.
type builder[T, R any] func(o *tensorOp[T, R], c call, i int, x []T) error

// one queues the empty operation o on the tensor x and returns its handle. It calls build to fill in o.
func one[T Element, R, O any](kind message.Kind, o *tensorOp[T, R], x []T, opts []O,
	build builder[T, R]) (*Handle[R], error) {
	c, err := prepare(kind, tensor.Of[T](), opts)
	if err != nil {
		return nil, err
	}
	if err := build(o, c, 0, x); err != nil {
		return nil, err
	}
	if err := c.submitted(c.Submit(&o.slot.entry)); err != nil {
		return nil, err
	}
	o.name = c.Name
	return &o.Handle, nil
}

func allreduceTensor[T Element](o *tensorOp[T, []T], c call, i int, x []T) error {
	if err := o.describe(&c, i, len(x)); err != nil {
		return err
	}
	*o.out = x
	if !c.InPlace {
		*o.out = make([]T, len(x))
	}
	o.slot.entry.Input, o.slot.entry.Output = tensor.Bytes(x), tensor.Bytes(*o.out)
	return nil
}

// Allgather concatenates the tensors of all ranks along the first dimension, in rank order. The first
// dimension may differ between ranks. The other dimensions and the type must be equal. The result does not
// tell how many rows each rank has contributed; those of Gather and Alltoall do.
//
// Each rank sends about as many bytes as the other ranks contribute together.
func Allgather[T Element](ctx context.Context, x []T, opts ...MoveOption) ([]T, error) {
	h, err := one(message.Allgather, newTensorOp[T](), x, opts, allgatherTensor)
	return await(ctx, h, err)
}

// AllgatherAsync submits an Allgather and returns its handle without waiting.
func AllgatherAsync[T Element](x []T, opts ...MoveOption) (*Handle[[]T], error) {
	return started(one(message.Allgather, newTensorOp[T](), x, opts, allgatherTensor))
}

func allgatherTensor[T Element](o *tensorOp[T, []T], c call, i int, x []T) error {
	mine := x
	if c.InPlace {
		n := c.Set.Size()
		if len(x)%n != 0 {
			return c.Misuse("got %d elements in place, want a multiple of the number of ranks, %d", len(x), n)
		}
		each := len(x) / n
		mine = x[c.Set.Me*each : (c.Set.Me+1)*each]
	}
	if err := o.describe(&c, i, len(mine)); err != nil {
		return err
	}
	o.slot.entry.Input = tensor.Bytes(mine)
	if c.InPlace {
		*o.out, o.slot.entry.Output = x, tensor.Bytes(x)
	} else {
		allocates(o)
	}
	return nil
}

// allocates makes the engine allocate the output of o as soon as its size is known.
func allocates[T Element, R any](o *tensorOp[T, R]) {
	o.slot.entry.Allocate = func(numBytes int) []byte {
		*o.out = make([]T, numBytes/o.slot.entry.Request.DType.Size())
		return tensor.Bytes(*o.out)
	}
}

// Broadcast returns at every rank the tensor that rank root passes as x. Shape and type of x must be the same
// at all ranks.
//
// The data goes down a tree: with n ranks, no rank sends more than ceil(log2(n)) times the bytes of x.
func Broadcast[T Element](ctx context.Context, x []T, root int, opts ...MoveOption) ([]T, error) {
	h, err := broadcast(x, root, opts)
	return await(ctx, h, err)
}

// BroadcastAsync submits a Broadcast and returns its handle without waiting.
func BroadcastAsync[T Element](x []T, root int, opts ...MoveOption) (*Handle[[]T], error) {
	return started(broadcast(x, root, opts))
}

func broadcast[T Element](x []T, root int, opts []MoveOption) (*Handle[[]T], error) {
	return one(message.Broadcast, newTensorOp[T](), x, opts, func(o *tensorOp[T, []T],
		c call, i int, x []T) error {
		if err := c.CheckRoot(root); err != nil {
			return err
		}
		if err := allreduceTensor(o, c, i, x); err != nil { // the buffers are those of an allreduce
			return err
		}
		o.slot.entry.Request.Root = topo.Rank(root)
		return nil
	})
}

// Reduce reduces x over all ranks as Allreduce does, and returns the result at the rank root. The other ranks
// get nil, and their x is not changed.
//
// With n ranks over TCP, each rank sends the bytes of x once. The root receives (n-1) times the bytes of x if
// these are at most 64 KiB. Otherwise it receives 2(n-1)/n times the bytes of x.
func Reduce[T Element](ctx context.Context, x []T, root int, opts ...ReduceOption) ([]T, error) {
	h, err := reduce(x, root, opts)
	return await(ctx, h, err)
}

// ReduceAsync submits a Reduce and returns its handle without waiting.
func ReduceAsync[T Element](x []T, root int, opts ...ReduceOption) (*Handle[[]T], error) {
	return started(reduce(x, root, opts))
}

func reduce[T Element](x []T, root int, opts []ReduceOption) (*Handle[[]T], error) {
	return one(message.Reduce, newTensorOp[T](), x, opts, func(o *tensorOp[T, []T],
		c call, i int, x []T) error {
		if err := c.CheckRoot(root); err != nil {
			return err
		}
		if c.Set.IsRoot(root) {
			if err := allreduceTensor(o, c, i, x); err != nil { // the buffers are those of an allreduce
				return err
			}
		} else {
			if err := o.describe(&c, i, len(x)); err != nil {
				return err
			}
			o.slot.entry.Input = tensor.Bytes(x)
		}
		o.slot.entry.Request.Root = topo.Rank(root)
		return nil
	})
}

// Reducescatter reduces x over all ranks as Allreduce does and returns to each rank its part of the rows. The
// rows are divided as evenly as possible. If that leaves a remainder, each of the first ranks gets one row
// more.
//
// With n ranks, each rank sends about (n-1)/n times the bytes of x.
func Reducescatter[T Element](ctx context.Context, x []T, opts ...ReduceOption) ([]T, error) {
	h, err := one(message.Reducescatter, newTensorOp[T](), x, opts, reducescatterTensor)
	return await(ctx, h, err)
}

// ReducescatterAsync submits a Reducescatter and returns its handle without waiting.
func ReducescatterAsync[T Element](x []T, opts ...ReduceOption) (*Handle[[]T], error) {
	return started(one(message.Reducescatter, newTensorOp[T](), x, opts, reducescatterTensor))
}

func reducescatterTensor[T Element](o *tensorOp[T, []T], c call, i int, x []T) error {
	if err := o.describe(&c, i, len(x)); err != nil {
		return err
	}
	shape := o.slot.entry.Request.Shape
	from, to := 0, 0 // a scalar has no rows; the coordinator refuses it, so that all ranks get the error
	if len(shape) > 0 && shape[0] > 0 {
		first, rows := tensor.Rows(shape[0], c.Set.Size(), c.Set.Me)
		row := len(x) / int(shape[0])
		from, to = int(first)*row, int(first+rows)*row
	}
	*o.out = x[from:to:to]
	if !c.InPlace {
		*o.out = make([]T, to-from)
	}
	o.slot.entry.Input, o.slot.entry.Output = tensor.Bytes(x), tensor.Bytes(*o.out)
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
	opts ...MoveOption) (out []T, received []int, err error) {
	h, err := alltoall(x, splits, opts)
	rows, err := await(ctx, h, err)
	return rows.Data, rows.Received, err
}

// AlltoallAsync submits an Alltoall and returns its handle without waiting.
func AlltoallAsync[T Element](x []T, splits []int, opts ...MoveOption) (*Handle[Rows[T]], error) {
	return started(alltoall(x, splits, opts))
}

func alltoall[T Element](x []T, splits []int, opts []MoveOption) (*Handle[Rows[T]], error) {
	return one(message.Alltoall, newRowsOp[T](), x, opts, func(o *tensorOp[T, Rows[T]],
		c call, i int, x []T) (err error) {
		if err := o.describe(&c, i, len(x)); err != nil {
			return err
		}
		// A scalar has no rows. The coordinator refuses it, so that all ranks get the error.
		if shape := o.slot.entry.Request.Shape; len(shape) > 0 {
			if o.slot.entry.Splits, err = rank.Splits(&c.Call, splits, shape[0]); err != nil {
				return err
			}
		}
		o.slot.entry.Input = tensor.Bytes(x)
		if c.InPlace {
			*o.out, o.slot.entry.Output = x, o.slot.entry.Input
		} else {
			allocates(o)
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
	opts ...GatherOption) (out []T, rows []int, err error) {
	h, err := gather(x, root, opts)
	all, err := await(ctx, h, err)
	return all.Data, all.Received, err
}

// GatherAsync submits a Gather and returns its handle without waiting.
func GatherAsync[T Element](x []T, root int, opts ...GatherOption) (*Handle[Rows[T]], error) {
	return started(gather(x, root, opts))
}

func gather[T Element](x []T, root int, opts []GatherOption) (*Handle[Rows[T]], error) {
	return one(message.Gather, newRowsOp[T](), x, opts, func(o *tensorOp[T, Rows[T]],
		c call, i int, x []T) error {
		if err := c.CheckRoot(root); err != nil {
			return err
		}
		if err := o.describe(&c, i, len(x)); err != nil {
			return err
		}
		e := &o.slot.entry
		e.Request.Root = topo.Rank(root)
		// A scalar has no rows. The coordinator refuses it, so that all ranks get the error.
		if shape := e.Request.Shape; len(shape) > 0 {
			e.Splits = rank.SplitsTo(&c.Call, root, shape[0])
		}
		e.Input = tensor.Bytes(x)
		if c.Set.IsRoot(root) {
			allocates(o)
		} else {
			o.received = nil
		}
		return nil
	})
}

// Scatter sends rows of the tensor that the rank root passes as x to all ranks, as Alltoall does, with the
// same rules for splits. It returns the rows that this rank has received. Only the root needs x, splits and
// the option Shape; the other ranks' values are ignored.
//
// The root sends each row once, directly to its destination.
func Scatter[T Element](ctx context.Context, x []T, splits []int, root int, opts ...GatherOption) ([]T,
	error) {
	h, err := scatter(x, splits, root, opts)
	return await(ctx, h, err)
}

// ScatterAsync submits a Scatter and returns its handle without waiting.
func ScatterAsync[T Element](x []T, splits []int, root int, opts ...GatherOption) (*Handle[[]T], error) {
	return started(scatter(x, splits, root, opts))
}

func scatter[T Element](x []T, splits []int, root int, opts []GatherOption) (*Handle[[]T], error) {
	return one(message.Scatter, newTensorOp[T](), x, opts, func(o *tensorOp[T, []T],
		c call, i int, x []T) (err error) {
		if err := c.CheckRoot(root); err != nil {
			return err
		}
		if !c.Set.IsRoot(root) {
			x, c.shapes = nil, nil
		}
		if err := o.describe(&c, i, len(x)); err != nil {
			return err
		}
		e := &o.slot.entry
		e.Request.Root = topo.Rank(root)
		if err := rank.PrepareScatter(&c.Call, e, splits); err != nil {
			return err
		}
		e.Input = tensor.Bytes(x)
		allocates(o)
		return nil
	})
}

// Barrier waits until every rank has called Barrier or has joined.
func Barrier(ctx context.Context, opts ...BarrierOption) error {
	h, err := barrier(opts)
	_, err = await(ctx, h, err)
	return err
}

// BarrierAsync submits a Barrier and returns its handle without waiting.
func BarrierAsync(opts ...BarrierOption) (*Handle[struct{}], error) { return started(barrier(opts)) }

func barrier(opts []BarrierOption) (*Handle[struct{}], error) {
	c, err := prepare(message.Barrier, tensor.Invalid, opts)
	if err != nil {
		return nil, err
	}
	o := new(tensorOp[struct{}, struct{}])
	if err := o.describe(&c, 0, 0); err != nil {
		return nil, err
	}
	o.slot.entry.Request.Shape = nil
	if err := c.submitted(c.Submit(&o.slot.entry)); err != nil {
		return nil, err
	}
	o.name = c.Name
	return &o.Handle, nil
}
