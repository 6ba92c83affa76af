package cuda

import (
	"context"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/hvd/internal/ondevice"
	"github.com/gohvd/gohvd/internal/message"
)

// Allreduce reduces in over all ranks as hvd.Allreduce does, and stores the result in out, which may be in.
func Allreduce[T hvd.Element](ctx context.Context, in, out Buffer[T], opts ...AllreduceOption) error {
	_, err := wait[struct{}](ctx, single(message.Allreduce, in, out), opts)
	return err
}

// AllreduceAsync submits an Allreduce and returns its handle without waiting.
func AllreduceAsync[T hvd.Element](in, out Buffer[T], opts ...AllreduceOption) (*hvd.Handle[struct{}],
	error) {
	return start[struct{}](single(message.Allreduce, in, out), opts)
}

// GroupedAllreduce reduces the tensors of a group as Allreduce does, and stores the result of ins[i] in
// outs[i], which may be ins[i]. If the ranks disagree about one of the tensors, none of them is reduced. All
// tensors of a rank must be on the same device. All ranks must pass the same tensors in the same order. A
// call with an empty group completes at once.
//
// Small tensors are packed into a buffer on the device, so that NCCL reduces many of them in one operation.
func GroupedAllreduce[T hvd.Element](ctx context.Context, ins, outs []Buffer[T],
	opts ...GroupedAllreduceOption) error {
	_, err := wait[struct{}](ctx, group(message.Allreduce, ins, outs), opts)
	return err
}

// GroupedAllreduceAsync submits a GroupedAllreduce and returns its handle without waiting.
func GroupedAllreduceAsync[T hvd.Element](ins, outs []Buffer[T],
	opts ...GroupedAllreduceOption) (*hvd.Handle[struct{}], error) {
	return start[struct{}](group(message.Allreduce, ins, outs), opts)
}

// Reduce reduces in over all ranks as hvd.Reduce does, and stores the result in the out of the rank root,
// which may be its in. The other ranks do not use out.
func Reduce[T hvd.Element](ctx context.Context, in, out Buffer[T], root int, opts ...ReduceOption) error {
	_, err := wait[struct{}](ctx, reduce(in, out, root), opts)
	return err
}

// ReduceAsync submits a Reduce and returns its handle without waiting.
func ReduceAsync[T hvd.Element](in, out Buffer[T], root int,
	opts ...ReduceOption) (*hvd.Handle[struct{}], error) {
	return start[struct{}](reduce(in, out, root), opts)
}

func reduce[T hvd.Element](in, out Buffer[T], root int) *ondevice.Operation {
	op := single(message.Reduce, in, out)
	op.Root = root
	return op
}

// Reducescatter reduces in over all ranks as hvd.Reducescatter does, and stores this rank's rows in out. out
// may be the part of in with these rows. It must not overlap in in any other way.
func Reducescatter[T hvd.Element](ctx context.Context, in, out Buffer[T], opts ...ReduceOption) error {
	_, err := wait[struct{}](ctx, single(message.Reducescatter, in, out), opts)
	return err
}

// ReducescatterAsync submits a Reducescatter and returns its handle without waiting.
func ReducescatterAsync[T hvd.Element](in, out Buffer[T], opts ...ReduceOption) (*hvd.Handle[struct{}],
	error) {
	return start[struct{}](single(message.Reducescatter, in, out), opts)
}

// GroupedReducescatter reduces and scatters the tensors of a group as Reducescatter does, and stores this
// rank's rows of ins[i] in outs[i]. Either all tensors succeed or all fail. The tensors get their names as in
// hvd.GroupedAllgather.
func GroupedReducescatter[T hvd.Element](ctx context.Context, ins, outs []Buffer[T],
	opts ...GroupedReduceOption) error {
	_, err := wait[struct{}](ctx, group(message.Reducescatter, ins, outs), opts)
	return err
}

// GroupedReducescatterAsync submits a GroupedReducescatter and returns its handle without waiting.
func GroupedReducescatterAsync[T hvd.Element](ins, outs []Buffer[T],
	opts ...GroupedReduceOption) (*hvd.Handle[struct{}], error) {
	return start[struct{}](group(message.Reducescatter, ins, outs), opts)
}

// Broadcast copies the in of the rank root to the out of every rank. The ranks other than root do not use in,
// except that it says where their tensor is. out may be in.
func Broadcast[T hvd.Element](ctx context.Context, in, out Buffer[T], root int, opts ...MoveOption) error {
	_, err := wait[struct{}](ctx, broadcast(in, out, root), opts)
	return err
}

// BroadcastAsync submits a Broadcast and returns its handle without waiting.
func BroadcastAsync[T hvd.Element](in, out Buffer[T], root int,
	opts ...MoveOption) (*hvd.Handle[struct{}], error) {
	return start[struct{}](broadcast(in, out, root), opts)
}

func broadcast[T hvd.Element](in, out Buffer[T], root int) *ondevice.Operation {
	op := single(message.Broadcast, in, out)
	op.Root = root
	return op
}

// Allgather concatenates the in of all ranks along the first dimension, in rank order, in out. If out has
// another length than the result, the operation fails at this rank. in may be the part of out that gets the
// rows of this rank. It must not overlap out in any other way.
func Allgather[T hvd.Element](ctx context.Context, in, out Buffer[T], opts ...MoveOption) error {
	_, err := wait[struct{}](ctx, single(message.Allgather, in, out), opts)
	return err
}

// AllgatherAsync submits an Allgather and returns its handle without waiting.
func AllgatherAsync[T hvd.Element](in, out Buffer[T], opts ...MoveOption) (*hvd.Handle[struct{}], error) {
	return start[struct{}](single(message.Allgather, in, out), opts)
}

// GroupedAllgather gathers the tensors of a group as Allgather does, and stores the result of ins[i] in
// outs[i]. It gathers either all of them or none. The tensors get their names as in hvd.GroupedAllgather.
func GroupedAllgather[T hvd.Element](ctx context.Context, ins, outs []Buffer[T],
	opts ...GroupedMoveOption) error {
	_, err := wait[struct{}](ctx, group(message.Allgather, ins, outs), opts)
	return err
}

// GroupedAllgatherAsync submits a GroupedAllgather and returns its handle without waiting.
func GroupedAllgatherAsync[T hvd.Element](ins, outs []Buffer[T],
	opts ...GroupedMoveOption) (*hvd.Handle[struct{}], error) {
	return start[struct{}](group(message.Allgather, ins, outs), opts)
}

// Alltoall sends rows of in to all ranks as hvd.Alltoall does, and stores the rows that this rank gets in
// out. It returns the number of rows that came from each member. If out has another length than these rows,
// the operation fails at this rank. in and out must not overlap.
func Alltoall[T hvd.Element](ctx context.Context, in, out Buffer[T], splits []int,
	opts ...MoveOption) (received []int, err error) {
	return wait[[]int](ctx, alltoall(in, out, splits), opts)
}

// AlltoallAsync submits an Alltoall and returns its handle without waiting.
func AlltoallAsync[T hvd.Element](in, out Buffer[T], splits []int,
	opts ...MoveOption) (*hvd.Handle[[]int], error) {
	return start[[]int](alltoall(in, out, splits), opts)
}

func alltoall[T hvd.Element](in, out Buffer[T], splits []int) *ondevice.Operation {
	op := single(message.Alltoall, in, out)
	op.Splits = splits
	return op
}

// Gather stores the rows of all ranks in the out of the rank root, as hvd.Gather returns them. There it
// returns the number of rows that came from each member. If out has another length than the result, the
// operation fails at the root. The other ranks do not use out. in and out must not overlap.
func Gather[T hvd.Element](ctx context.Context, in, out Buffer[T], root int,
	opts ...MoveOption) (received []int, err error) {
	return wait[[]int](ctx, gather(in, out, root), opts)
}

// GatherAsync submits a Gather and returns its handle without waiting.
func GatherAsync[T hvd.Element](in, out Buffer[T], root int,
	opts ...MoveOption) (*hvd.Handle[[]int], error) {
	return start[[]int](gather(in, out, root), opts)
}

func gather[T hvd.Element](in, out Buffer[T], root int) *ondevice.Operation {
	op := single(message.Gather, in, out)
	op.Root = root
	return op
}

// Scatter sends rows of the in of the rank root to all ranks, as hvd.Scatter does, and stores the rows that
// this rank gets in out. If out has another length than these rows, the operation fails at this rank. Only
// the root needs in, splits and the option hvd.Shape. in and out must not overlap.
func Scatter[T hvd.Element](ctx context.Context, in, out Buffer[T], splits []int, root int,
	opts ...MoveOption) error {
	_, err := wait[struct{}](ctx, scatter(in, out, splits, root), opts)
	return err
}

// ScatterAsync submits a Scatter and returns its handle without waiting.
func ScatterAsync[T hvd.Element](in, out Buffer[T], splits []int, root int,
	opts ...MoveOption) (*hvd.Handle[struct{}], error) {
	return start[struct{}](scatter(in, out, splits, root), opts)
}

func scatter[T hvd.Element](in, out Buffer[T], splits []int, root int) *ondevice.Operation {
	op := single(message.Scatter, in, out)
	op.Splits, op.Root = splits, root
	return op
}
