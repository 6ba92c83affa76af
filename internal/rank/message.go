package rank

import (
	"errors"
	"fmt"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/p2p"
	"github.com/gohvd/gohvd/internal/topo"
)

// Post begins the message o to or from the rank peer. c is the Send or Recv, which Check has checked. The
// caller has set Buf and Done of o. Post sets the other fields, and the name of c. If Post returns an error,
// nothing has begun, and Done is never called.
func (c *Call) Post(o *p2p.Op, peer, tag int) error {
	if tag < 0 || tag > p2p.MaxTag {
		return c.Misuse("got tag %d, want 0 to %d", tag, p2p.MaxTag)
	}
	if peer == int(c.Set.Ranks[c.Set.Me]) {
		return c.Misuse("got rank %d, which is this rank, want another rank of %v", peer, c.Set)
	}
	if c.Set.Size() == 1 {
		return c.Misuse("got %v, want a process set with another rank", c.Set)
	}
	if peer != int(p2p.AnySource) || c.Kind != message.Recv {
		if err := c.CheckMember(peer, "rank"); err != nil {
			return err
		}
	}
	o.Peer, o.Tag, o.DType, o.Timeout = topo.Rank(peer), uint32(tag), c.DType, c.Timeout
	from, to := c.Set.Ranks[c.Set.Me], o.Peer
	if c.Kind == message.Recv {
		from, to = to, from
	}
	c.Name = p2p.Name(from, to, o.Tag)
	kind, name, done := c.Kind, c.Name, o.Done
	o.Done = func(err error) { done(messageError(kind, name, err)) }
	err := c.Rank.post(c.Set.ID, o, kind == message.Recv)
	if errors.Is(err, engine.ErrNoProcessSet) {
		return c.Misuse("%w", err)
	}
	return messageError(kind, name, err)
}

// messageError adds the operation to err, which is nil if there is no error.
func messageError(kind message.Kind, name string, err error) error {
	if err == nil {
		return nil
	}
	if _, complete := errors.AsType[*engine.MismatchError](err); complete { // it is that of another process
		return err
	}
	if size, ok := errors.AsType[*p2p.SizeError](err); ok {
		return &engine.MismatchError{Tensor: name, Text: fmt.Sprintf("hvd: %v %q: %v", kind, name, size)}
	}
	return &engine.OpError{Op: kind.String(), Tensor: name, Err: err}
}
