package van

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
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

// endpoint listens for connections of other nodes, dials them, and does the handshake and the registration on
// both. It knows no links.
type endpoint struct {
	cfg     *Config
	log     *zap.Logger
	timing  timing
	members *members
	ctx     context.Context // ends when the van is stopped or has failed
	accepts *dial.Acceptor  // nil at a worker
	local   *dial.Acceptor  // accepts Unix connections; nil except at a server that shares memory
}

// listen accepts connections of other nodes on addr, which serve handles.
func (e *endpoint) listen(addr string, serve dial.Handler) (err error) {
	e.accepts, err = dial.Serve(addr, "ps: "+e.cfg.Role.String(), maxPeers, e.cfg.Log,
		dial.SameUser(e.cfg.Secret, e.cfg.Log, serve))
	return err
}

// listenAsServer accepts connections on the address of the configuration, and Unix connections of other nodes
// on this host if this process shares memory. The registration says where.
func (e *endpoint) listenAsServer(serve dial.Handler) error {
	if err := e.listen(e.cfg.Listen, serve); err != nil {
		return err
	}
	_, port, err := net.SplitHostPort(e.accepts.Addr())
	if err != nil {
		return err
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return err
	}
	own := e.members.self[0]
	own.Port = int32(n)
	if !e.cfg.shares() {
		return nil
	}
	e.local, err = dial.Serve(dial.UnixPrefix+"@gohvd-ps-"+rand.Text(), "ps: server", maxPeers, e.cfg.Log,
		dial.SameUser(e.cfg.Secret, e.cfg.Log, serve))
	if err == nil {
		own.Socket = e.local.Addr()
	}
	return err
}

// close ends listening, and waits for the connections that were accepted.
func (e *endpoint) close() {
	for _, a := range []*dial.Acceptor{e.accepts, e.local} {
		if a != nil {
			a.Close()
		}
	}
}

// dialServer connects with a server: over its Unix socket if it is on this host and shares memory, or else
// over TCP.
func (e *endpoint) dialServer(ctx context.Context, n *pspb.Node) (net.Conn, *reader, error) {
	if e.cfg.shares() && n.HostId == e.cfg.HostID {
		conn, r, _, err := e.dial(ctx, dial.UnixPrefix+n.Socket, e.cfg.Secret, int(n.Id))
		if err == nil {
			return conn, r, nil
		}
		// The usual reason is that the socket is in another network namespace.
		e.log.Info("ps: a server on this host is not reachable over its Unix socket",
			zap.String("server", Name(int(n.Id))), zap.Error(err))
	}
	addr := net.JoinHostPort(n.Hostname, strconv.Itoa(int(n.Port)))
	conn, r, at, err := e.dial(ctx, addr, e.cfg.Secret, int(n.Id))
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
func (e *endpoint) dial(ctx context.Context, addr string, s secret.Secret, id int) (net.Conn, *reader,
	[]*pspb.Node, error) {
	var conn net.Conn
	err := dial.Retry(ctx, func() (err error) {
		conn, err = dial.Greet(ctx, addr, s, magic, version)
		return err
	})
	if err != nil {
		if id == SchedulerID && isLate(ctx) {
			e.members.blames.blameAll([]Process{{ID: SchedulerID}}, err)
		}
		return nil, nil, nil, err
	}
	r, nodes, err := e.register(ctx, conn, id)
	if err != nil {
		conn.Close()
		return nil, nil, nil, err
	}
	return conn, r, nodes, nil
}

// accept does the handshake with a node that has dialed, and reads its registration.
func (e *endpoint) accept(conn net.Conn) (net.Conn, *reader, *pspb.Control, error) {
	if err := conn.SetDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		return nil, nil, nil, err
	}
	s := e.cfg.Secret
	if e.cfg.Role == Scheduler {
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

func writeMessage(conn net.Conn, m *Message) error {
	b, err := m.encode(nil)
	if err != nil {
		return err
	}
	_, err = conn.Write(b)
	return err
}
