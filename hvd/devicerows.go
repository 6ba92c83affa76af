package hvd

import (
	"context"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/topo"
)

// AlltoallDevice sends rows of in to all ranks as Alltoall does, and stores the rows that this rank gets in
// out. It returns the number of rows that came from each member. If out has another length than these rows,
// the operation fails at this rank. in and out must not overlap.
func AlltoallDevice[T Element](ctx context.Context, in, out DeviceBuffer[T], splits []int,
	opts ...Option) ([]int, error) {
	h, err := alltoallDevice(in, out, splits, opts)
	return awaitRows(ctx, h, err)
}

// AlltoallDeviceAsync submits an AlltoallDevice and returns its handle without waiting. The method Received
// of the handle returns the number of rows that came from each member.
func AlltoallDeviceAsync[T Element](in, out DeviceBuffer[T], splits []int,
	opts ...Option) (*DeviceHandle, error) {
	return started(alltoallDevice(in, out, splits, opts))
}

func alltoallDevice[T Element](in, out DeviceBuffer[T], splits []int, opts []Option) (*DeviceHandle, error) {
	return onDevice(message.Alltoall, in, out, opts, func(h *DeviceHandle, c *call, i int,
		in, out DeviceBuffer[T]) (err error) {
		if err := h.describe(c, i, in.Len); err != nil {
			return err
		}
		e := &h.slot.entry
		// A scalar has no rows. The coordinator refuses it, so that all ranks get the error.
		if shape := e.Request.Shape; len(shape) > 0 {
			if e.Splits, err = rank.Splits(&c.Call, splits, shape[0]); err != nil {
				return err
			}
		}
		return checkApart(c, in, out)
	})
}

// GatherDevice stores the rows of all ranks in the out of the rank root, as Gather returns them. There it
// returns the number of rows that came from each member. If out has another length than the result, the
// operation fails at the root. The other ranks do not use out. in and out must not overlap.
func GatherDevice[T Element](ctx context.Context, in, out DeviceBuffer[T], root int,
	opts ...Option) ([]int, error) {
	h, err := gatherDevice(in, out, root, opts)
	return awaitRows(ctx, h, err)
}

// GatherDeviceAsync submits a GatherDevice and returns its handle without waiting. The method Received of the
// handle returns the number of rows that came from each member.
func GatherDeviceAsync[T Element](in, out DeviceBuffer[T], root int, opts ...Option) (*DeviceHandle, error) {
	return started(gatherDevice(in, out, root, opts))
}

func gatherDevice[T Element](in, out DeviceBuffer[T], root int, opts []Option) (*DeviceHandle, error) {
	return onDevice(message.Gather, in, out, opts, func(h *DeviceHandle, c *call, i int,
		in, out DeviceBuffer[T]) error {
		if err := c.CheckRoot(root); err != nil {
			return err
		}
		if err := h.describe(c, i, in.Len); err != nil {
			return err
		}
		e := &h.slot.entry
		e.Request.Root = topo.Rank(root)
		// A scalar has no rows. The coordinator refuses it, so that all ranks get the error.
		if shape := e.Request.Shape; len(shape) > 0 {
			e.Splits = rank.SplitsTo(&c.Call, root, shape[0])
		}
		if !c.Set.IsRoot(root) {
			e.Output = nil
			return nil
		}
		return checkApart(c, in, out)
	})
}

// ScatterDevice sends rows of the in of the rank root to all ranks, as Scatter does, and stores the rows that
// this rank gets in out. If out has another length than these rows, the operation fails at this rank. Only
// the root needs in, splits and the option Shape. in and out must not overlap.
func ScatterDevice[T Element](ctx context.Context, in, out DeviceBuffer[T], splits []int, root int,
	opts ...Option) error {
	h, err := scatterDevice(in, out, splits, root, opts)
	return awaitDevice(ctx, h, err)
}

// ScatterDeviceAsync submits a ScatterDevice and returns its handle without waiting.
func ScatterDeviceAsync[T Element](in, out DeviceBuffer[T], splits []int, root int,
	opts ...Option) (*DeviceHandle, error) {
	return started(scatterDevice(in, out, splits, root, opts))
}

func scatterDevice[T Element](in, out DeviceBuffer[T], splits []int, root int,
	opts []Option) (*DeviceHandle, error) {
	return onDevice(message.Scatter, in, out, opts, func(h *DeviceHandle, c *call, i int,
		in, out DeviceBuffer[T]) error {
		if err := c.CheckRoot(root); err != nil {
			return err
		}
		e := &h.slot.entry
		if !c.Set.IsRoot(root) {
			in.Len, c.shapes, e.Input = 0, nil, nil
		}
		if err := h.describe(c, i, in.Len); err != nil {
			return err
		}
		e.Request.Root = topo.Rank(root)
		if err := rank.PrepareScatter(&c.Call, e, splits); err != nil {
			return err
		}
		return checkApart(c, in, out)
	})
}

// checkApart returns an error if the input and the output overlap.
func checkApart[T Element](c *call, in, out DeviceBuffer[T]) error {
	if overlap(in, out) {
		return c.Misuse("the output overlaps the input")
	}
	return nil
}

// awaitRows waits for the operation and returns the number of rows that came from each member.
func awaitRows(ctx context.Context, h *DeviceHandle, err error) ([]int, error) {
	if err := awaitDevice(ctx, h, err); err != nil {
		return nil, err
	}
	return h.Received(), nil
}
