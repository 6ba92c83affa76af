package hvd

import (
	"context"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/tensorqueue"
)

// Join says that this rank has no more tensors, while others may have: it stands in for itself with neutral elements in
// their allreduces (0 for sums, 1 for products, the largest or smallest value for min and max) until all ranks have
// joined. It then gives the rank that joined last. What this rank submitted before still counts with its data; until it has
// seen that the join is done it may submit nothing to the process set.
//
// Average goes on dividing by the number of all ranks, AverageActive by those that take part. Allgather, broadcast,
// alltoall and reducescatter are errors at the others meanwhile, unless Empty.
func Join(ctx context.Context, opts ...Option) (last int, err error) {
	h, err := join(opts)
	if err != nil {
		return 0, err
	}
	return h.Wait(ctx)
}

// JoinAsync is Join without the wait.
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

// JoinHandle is a join in flight. Its methods are safe for concurrent use.
type JoinHandle struct {
	operation
	entry tensorqueue.Entry
}

// Wait waits until all members have joined and gives the one that joined last.
func (h *JoinHandle) Wait(ctx context.Context) (last int, err error) {
	if err := h.wait(ctx, h); err != nil {
		return 0, err
	}
	return int(h.entry.Response.Root), nil
}
