package van

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/ps/pspb"
	"github.com/gohvd/gohvd/internal/secret"
)

const (
	// handshakeTimeout is the time limit for a peer to prove the secret and send its registration.
	handshakeTimeout = 10 * time.Second
	// maxPeers is the maximum number of connections that a node accepts.
	maxPeers = 1 << 16
)

// listen accepts connections of other nodes on addr.
func (v *Van) listen(addr string) (err error) {
	v.accepts, err = dial.Serve(addr, "ps: "+v.cfg.Role.String(), maxPeers, v.cfg.Log,
		dial.SameUser(v.cfg.Secret, v.cfg.Log, v.serve))
	return err
}

// shares reports whether a process may share memory with others.
func (c *Config) shares() bool {
	return c.HostID != "" && !c.Resend && !c.Secret.IsEncrypted()
}

// listenLocal accepts Unix connections of other nodes on this host.
func (v *Van) listenLocal() (err error) {
	v.local, err = dial.Serve(dial.UnixPrefix+"@gohvd-ps-"+rand.Text(), "ps: server", maxPeers, v.cfg.Log,
		dial.SameUser(v.cfg.Secret, v.cfg.Log, v.serve))
	if err == nil {
		v.members.self[0].Socket = v.local.Addr()
	}
	return err
}

// dialServer connects with a server: over its Unix socket if it is on this host and shares memory, or else
// over TCP.
func (v *Van) dialServer(ctx context.Context, n *pspb.Node) (net.Conn, *reader, error) {
	if v.cfg.shares() && n.HostId == v.cfg.HostID {
		conn, r, _, err := v.dial(ctx, dial.UnixPrefix+n.Socket, v.cfg.Secret, int(n.Id))
		if err == nil {
			return conn, r, nil
		}
		// The usual reason is that the socket is in another network namespace.
		v.log.Info("ps: a server on this host is not reachable over its Unix socket",
			zap.String("server", Name(int(n.Id))), zap.Error(err))
	}
	addr := net.JoinHostPort(n.Hostname, strconv.Itoa(int(n.Port)))
	conn, r, at, err := v.dial(ctx, addr, v.cfg.Secret, int(n.Id))
	if err == nil && (len(at) == 0 || at[0].Incarnation != n.Incarnation) {
		conn.Close()
		dial.Pause(ctx, newsTime, nil) // if the server has ended, connect ends ctx
		err = errors.New("another process listens there")
	}
	if err != nil {
		return nil, nil, fmt.Errorf("connect to %s at %s: %w", Name(int(n.Id)), addr, err)
	}
	return conn, r, nil
}

// dial connects to node id at addr with the secret s, and registers the nodes of this process there. It
// returns the reader of the connection and the nodes in the peer's answer.
func (v *Van) dial(ctx context.Context, addr string, s secret.Secret, id int) (net.Conn, *reader,
	[]*pspb.Node, error) {
	var conn net.Conn
	err := dial.Retry(ctx, func() (err error) {
		conn, err = dial.Greet(ctx, addr, s, magic, version)
		return err
	})
	if err != nil {
		if id == SchedulerID && isLate(ctx) {
			v.blames.blameAll([]Process{{ID: SchedulerID}}, err)
		}
		return nil, nil, nil, err
	}
	r, nodes, err := v.register(ctx, conn, id)
	if err != nil {
		conn.Close()
		return nil, nil, nil, err
	}
	return conn, r, nodes, nil
}

func writeMessage(conn net.Conn, m *Message) error {
	b, err := m.encode(nil)
	if err != nil {
		return err
	}
	_, err = conn.Write(b)
	return err
}

// join registers with the scheduler and returns the table of all nodes.
func (v *Van) join(ctx context.Context) ([]*pspb.Node, error) {
	conn, r, table, err := v.dial(ctx, v.cfg.Root, v.cfg.Secret.Encrypted(), SchedulerID)
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
	over, r, hello, err := v.accept(conn)
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
		answer.Header.Error = err.Error()
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

// accept does the handshake with a node that has dialed, and reads its registration.
func (v *Van) accept(conn net.Conn) (net.Conn, *reader, *pspb.Control, error) {
	if err := conn.SetDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		return nil, nil, nil, err
	}
	s := v.cfg.Secret
	if v.sched != nil {
		s = s.Encrypted() // so the table of the nodes' addresses is authentic
	}
	over, err := s.Accept(conn, magic)
	if err != nil {
		return nil, nil, nil, err
	}
	if _, err := dial.ReadGreeting(over, magic); err != nil {
		return nil, nil, nil, err
	}
	// A peer of another version closes the connection when it reads the greeting.
	if _, err := over.Write(dial.Greeting(magic, version)); err != nil {
		return nil, nil, nil, err
	}
	r := newReader(over)
	m, err := r.next()
	if err != nil {
		return nil, nil, nil, err
	}
	c := m.Header.Control
	if c.GetCommand() != pspb.Command_ADD_NODE || len(c.Nodes) == 0 {
		return nil, nil, nil, errors.New("malformed registration")
	}
	return over, r, c, conn.SetDeadline(time.Time{})
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
		"job, nor a server that has replicas of the same keys", Name(v.members.id), Name(int(hello.Nodes[0].Id)))
}
