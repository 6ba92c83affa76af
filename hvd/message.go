package hvd

import (
	"context"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/p2p"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/tensor"
)

// AnySource is the source of a Recv that takes a message of any member of the process set.
const AnySource = -1

// The compiler refuses this index if AnySource differs from the source of the engine.
var _ = [1]struct{}{}[AnySource-int(p2p.AnySource)]

// messageOp is a Send or a Recv, with its handle.
type messageOp[R any] struct {
	Handle[R]
	op     p2p.Op
	source *int // the result of a Recv; nil for a Send
}

// Send sends x to the rank dst, which must receive it with Recv, with the same tag, type and number of
// elements. tag is from 0 to 2^31-1. A dst that is this rank or no member, or another tag, is a *UsageError.
// Messages are not negotiated: other ranks take no part. Messages to one rank with one tag are received in
// the order in which they were sent. A message has no Name: errors name its ranks and its tag.
//
// A tensor of up to 64 KiB is copied, and Send returns at once, unless tensors with 1 MiB in total wait for
// dst to receive them. A larger one is sent when dst calls Recv, and Send returns when x may be changed. The
// bytes are sent once.
func Send[T Element](ctx context.Context, x []T, dst, tag int, opts ...MessageOption) error {
	o := new(messageOp[struct{}])
	_, err := await(ctx, &o.Handle, post(o, message.Send, x, dst, tag, opts))
	return err
}

// SendAsync begins a Send and returns its handle without waiting.
func SendAsync[T Element](x []T, dst, tag int, opts ...MessageOption) (*Handle[struct{}], error) {
	o := new(messageOp[struct{}])
	return started(&o.Handle, post(o, message.Send, x, dst, tag, opts))
}

// Recv receives a message that the rank src has sent with the given tag into x, and returns the rank that has
// sent it, or 0 with an error. With AnySource as src, it takes the message that has arrived first. A message
// of another type or number of elements is dropped, and the error is a *MismatchError. A src or tag that Send
// would refuse is a *UsageError.
func Recv[T Element](ctx context.Context, x []T, src, tag int, opts ...MessageOption) (source int,
	err error) {
	o := newRecv()
	return await(ctx, &o.Handle, post(o, message.Recv, x, src, tag, opts))
}

// RecvAsync begins a Recv and returns its handle without waiting. The result is the rank that has sent the
// message.
func RecvAsync[T Element](x []T, src, tag int, opts ...MessageOption) (*Handle[int], error) {
	o := newRecv()
	return started(&o.Handle, post(o, message.Recv, x, src, tag, opts))
}

func newRecv() *messageOp[int] {
	o := new(messageOp[int])
	o.source = &o.result
	return o
}

// post fills in the empty o and begins it, which is a Send or a Recv.
func post[R any, T Element](o *messageOp[R], kind message.Kind, x []T, peer, tag int,
	opts []MessageOption) error {
	c, err := prepare(kind, tensor.Of[T](), opts)
	if err != nil {
		return err
	}
	o.kind, o.engine, o.apart = kind, c.engine, true
	o.op = p2p.Op{Buf: tensor.Bytes(x), Done: o.finished}
	if err := c.submitted(c.Post(&o.op, peer, tag)); err != nil {
		return err
	}
	o.name = c.Name
	return nil
}

// finished completes o. err is the error of the operation, or nil.
func (o *messageOp[R]) finished(err error) {
	if o.source != nil {
		*o.source = int(o.op.Source)
		if err == nil && o.op.DType == tensor.Bool {
			rank.OnlyBools(o.op.Buf)
		}
	}
	o.complete(err)
}
