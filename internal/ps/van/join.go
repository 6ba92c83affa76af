package van

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/ps/pspb"
)

// join registers with the scheduler and returns the table of all nodes.
func (v *Van) join(ctx context.Context) ([]*pspb.Node, error) {
	conn, r, table, err := v.endpoint.dial(ctx, v.cfg.Root, v.cfg.Secret.Encrypted(), SchedulerID)
	if err != nil {
		return nil, fmt.Errorf("register with the scheduler at %s: %w", v.cfg.Root, err)
	}
	if err := v.members.setTable(table); err != nil {
		conn.Close()
		return nil, err
	}
	l, err := v.addLink([]*pspb.Node{v.members.nodes[SchedulerID]}, conn, r)
	if err != nil {
		conn.Close()
		return nil, err
	}
	l.run(r)
	v.wg.Go(v.tick)
	return table, nil
}

// serve serves the connection of a node that has dialed. It returns when the connection has ended.
func (v *Van) serve(ctx context.Context, conn net.Conn, slot *dial.Slot) error {
	over, r, hello, err := v.endpoint.accept(conn)
	if !slot.Release() && err != nil {
		return fmt.Errorf("%w: %w", dial.ErrEvicted, err)
	}
	if err != nil {
		return err
	}
	answer := controlMessage(&pspb.Control{Command: pspb.Command_ADD_NODE})
	var l *link
	var nodes []*pspb.Node
	var a *applicant
	if v.sched == nil {
		nodes, err = v.admit(ctx, hello)
	} else {
		a = v.sched.watch(over, r)
		defer v.sched.told(a)
		nodes, err = v.sched.register(ctx, hello, a)
		a.endBeats()
	}
	if err == nil {
		v.supersede(processOf(nodes[0]))
		l, err = v.addLink(nodes, over, r)
	}
	if err != nil {
		if v.sched != nil && errors.Is(err, ErrStopped) {
			answer.Header.Control.Command = pspb.Command_TERMINATE
		} else {
			answer.Header.Error = err.Error()
		}
		if missing, ok := errors.AsType[*missingError](err); ok {
			answer.Header.Control.Nodes = missing.nodes
		}
		return errors.Join(err, writeMessage(over, answer))
	}
	answer.Header.Control.Nodes = v.members.self
	if v.sched != nil {
		v.sched.announce(nodes)
		answer.Header.Control.Nodes = v.members.table()
	}
	// If the write fails, the node has died after it registered, so the other nodes must be told.
	if err = writeMessage(l.conn, answer); err == nil {
		v.wg.Go(l.write)
		v.up(l)
		if a != nil {
			<-a.lost
			err = a.err
		}
		if err == nil {
			err = l.read(r)
		}
	}
	l.fail(err)
	return io.EOF // linkEnded reports errors
}

// admit decides about a registration with this server. It returns the nodes of the table that the peer has.
func (v *Van) admit(ctx context.Context, hello *pspb.Control) ([]*pspb.Node, error) {
	select {
	case <-v.members.ready:
	case <-ctx.Done():
		return nil, ErrStopped
	}
	if own := v.members.awaitPeer(ctx, hello.Nodes); own != nil {
		return own, nil
	}
	return nil, fmt.Errorf("%s got a connection from a node that says it is %s, but is not a worker of this "+
		"job, nor a server that has replicas of the same keys", Name(v.ID()), Name(int(hello.Nodes[0].Id)))
}
