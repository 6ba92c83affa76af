package hvd

import (
	"context"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/tensorqueue"
)

// Join declares that this rank has no more tensors, while other ranks may still have some. Until all ranks
// have joined, this rank takes part in the allreduces of the other ranks with neutral elements: 0 for sums, 1
// for products, the smallest value for Max, the largest for Min. When all ranks have joined, Join returns the
// rank that joined last. Tensors that this rank submitted before Join still count with their data. Until the
// program has observed that the join is done, this rank must not submit other operations on the process set:
// they fail with a *UsageError.
//
// While some ranks have joined and others have not, Average still divides by the number of all ranks, and
// AverageActive divides by the number of ranks that have not joined. While this rank has joined, an
// allgather, broadcast, alltoall, reducescatter, gather or scatter of the other ranks fails with a
// *MismatchError, unless this rank has passed Empty to Join. An operation whose root has joined always fails,
// and so do additions and removals of process sets.
func Join(ctx context.Context, opts ...Option) (last int, err error) {
	h, err := join(opts)
	if err != nil {
		return 0, err
	}
	return h.Wait(ctx)
}

// JoinAsync submits a Join and returns its handle without waiting.
func JoinAsync(opts ...Option) (*JoinHandle, error) { return started(join(opts)) }

func join(opts []Option) (*JoinHandle, error) {
	c, err := prepare(message.Join, tensor.Invalid, false, opts)
	if err != nil {
		return nil, err
	}
	h := &JoinHandle{operation: operation{kind: c.Kind, name: rank.JoinName, engine: c.engine, held: c.Set}}
	if err := c.submitted(c.Join(&h.entry, h.complete)); err != nil {
		return nil, err
	}
	return h, nil
}

// JoinHandle is a join in flight.
type JoinHandle struct {
	operation
	entry tensorqueue.Entry
}

// Wait waits until all ranks have joined and returns the rank that joined last.
func (h *JoinHandle) Wait(ctx context.Context) (last int, err error) {
	if err := h.wait(ctx, h); err != nil {
		return 0, err
	}
	return int(h.entry.Response.Root), nil
}
