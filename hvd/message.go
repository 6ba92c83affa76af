package hvd

import (
	"context"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/p2p"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/tensor"
)

// AnySource is the source of a Recv that takes a message of any member of the process set.
const AnySource = int(p2p.AnySource)

// MessageHandle is a Send or a Recv in flight.
type MessageHandle[T any] struct {
	operation
	op p2p.Op
	x  []T
}

// Wait waits for the operation and returns the tensor that was passed to it. Until the operation is done the
// tensor stays in use, even if ctx ends.
func (h *MessageHandle[T]) Wait(ctx context.Context) ([]T, error) {
	if err := h.wait(ctx, h); err != nil {
		return nil, err
	}
	return h.x, nil
}

// Source returns the rank that has sent the message of a Recv. It means something only when a Recv is done
// without an error.
func (h *MessageHandle[T]) Source() int { return int(h.op.Source) }

// Send sends x to the rank dst, which must receive it with Recv, with the same tag, type and number of
// elements. tag is from 0 to 2^31-1. A dst that is this rank or no member, or another tag, is a *UsageError.
// Messages are not negotiated: other ranks take no part. Messages to one rank with one tag are received in
// the order in which they were sent. A message has no Name: errors name its ranks and its tag.
//
// A tensor of up to 64 KiB is copied, and Send returns at once, unless tensors with 1 MiB in total wait for
// dst to receive them. A larger one is sent when dst calls Recv, and Send returns when x may be changed. The
// bytes are sent once.
func Send[T Element](ctx context.Context, x []T, dst, tag int, opts ...Option) error {
	h, err := post(message.Send, x, dst, tag, opts)
	if err != nil {
		return err
	}
	_, err = h.Wait(ctx)
	return err
}

// SendAsync begins a Send and returns its handle without waiting.
func SendAsync[T Element](x []T, dst, tag int, opts ...Option) (*MessageHandle[T], error) {
	return post(message.Send, x, dst, tag, opts)
}

// Recv receives a message that the rank src has sent with the given tag into x, and returns the rank that has
// sent it, or 0 with an error. With AnySource as src, it takes the message that has arrived first. A message
// of another type or number of elements is dropped, and the error is a *MismatchError. A src or tag that Send
// would refuse is a *UsageError.
func Recv[T Element](ctx context.Context, x []T, src, tag int, opts ...Option) (source int, err error) {
	h, err := post(message.Recv, x, src, tag, opts)
	if err != nil {
		return 0, err
	}
	if _, err := h.Wait(ctx); err != nil {
		return 0, err
	}
	return h.Source(), nil
}

// RecvAsync begins a Recv and returns its handle without waiting.
func RecvAsync[T Element](x []T, src, tag int, opts ...Option) (*MessageHandle[T], error) {
	return post(message.Recv, x, src, tag, opts)
}

// post begins a Send or a Recv.
func post[T Element](kind message.Kind, x []T, peer, tag int, opts []Option) (*MessageHandle[T], error) {
	c, err := prepare(kind, tensor.Of[T](), false, opts)
	if err != nil {
		return nil, err
	}
	h := &MessageHandle[T]{x: x}
	h.kind, h.engine, h.apart = kind, c.engine, true
	h.op = p2p.Op{Buf: tensor.Bytes(x), Done: h.finished}
	if err := c.submitted(c.Post(&h.op, peer, tag)); err != nil {
		return nil, err
	}
	h.name = c.Name
	return h, nil
}

// finished completes h. err is the error of the operation, or nil.
func (h *MessageHandle[T]) finished(err error) {
	if err == nil && h.kind == message.Recv && h.op.DType == tensor.Bool {
		rank.OnlyBools(h.op.Buf)
	}
	h.complete(err)
}
