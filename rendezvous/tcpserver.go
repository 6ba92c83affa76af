package rendezvous

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"go.uber.org/zap"
)

// Bounds of a TCPServer.
const (
	maxClients        = 4096 // connections
	maxWaitsPerClient = 1024 // Gets and Watches of one connection
	serverIOTimeout   = 10 * time.Second
)

// TCPServer serves a HashStore to TCPStore clients.
//
// A client that breaks the protocol loses its connection, with the reason in the log; others do not notice. The
// server gives up a client that takes no bytes for 10 s, or says nothing for a minute (clients ping every 5 s), and
// with it the client's waits.
type TCPServer struct {
	store *HashStore
	log   *zap.Logger
	ln    net.Listener
	ctx   context.Context // ends in Close
	stop  context.CancelFunc
	wg    sync.WaitGroup
	close func() error

	mu    sync.Mutex
	conns map[net.Conn]struct{}
}

// Serve listens on addr, host:port with port 0 for any free one, and serves store until Close. The caller keeps
// store and closes it. log may be nil.
func Serve(addr string, store *HashStore, log *zap.Logger) (*TCPServer, error) {
	ln, err := listen(addr)
	if err != nil {
		return nil, fmt.Errorf("rendezvous: serve store: %w", err)
	}
	if log == nil {
		log = zap.NewNop()
	}
	s := &TCPServer{store: store, log: log, ln: ln, conns: make(map[net.Conn]struct{})}
	s.ctx, s.stop = context.WithCancel(context.Background())
	s.close = sync.OnceValue(s.closeOnce)
	s.wg.Go(s.accept)
	return s, nil
}

// Addr is the address that the server listens on.
func (s *TCPServer) Addr() string { return s.ln.Addr().String() }

// Close stops serving: clients lose their connections. It waits for the goroutines of the server.
func (s *TCPServer) Close() error { return s.close() }

func (s *TCPServer) closeOnce() error {
	s.stop()
	err := s.ln.Close()
	s.mu.Lock()
	for conn := range s.conns {
		conn.Close()
	}
	s.mu.Unlock()
	s.wg.Wait()
	return err
}

func (s *TCPServer) accept() {
	var wait backoff
	for {
		conn, err := s.ln.Accept()
		switch {
		case err == nil:
			wait = 0
		case s.ctx.Err() != nil:
			return
		default:
			// Out of file descriptors, as a rule. Connections that end give some back.
			s.log.Error("rendezvous: store server cannot accept", zap.Error(err))
			pause(s.ctx, wait.next(), nil)
			continue
		}
		s.mu.Lock()
		full := len(s.conns) >= maxClients
		if full || s.ctx.Err() != nil {
			conn.Close()
		} else {
			s.conns[conn] = struct{}{}
			s.wg.Go(func() { s.serve(conn) })
		}
		s.mu.Unlock()
		if full {
			s.log.Warn("rendezvous: store server refused a client: too many",
				zap.Stringer("client", conn.RemoteAddr()), zap.Int("clients", maxClients))
		}
	}
}

func (s *TCPServer) serve(conn net.Conn) {
	c := &serverConn{TCPServer: s, conn: conn, waits: make(map[uint64]context.CancelFunc)}
	c.ctx, c.gone = context.WithCancelCause(s.ctx)
	c.end(c.run())
	c.wg.Wait()
	s.mu.Lock()
	delete(s.conns, conn)
	s.mu.Unlock()
	if err := context.Cause(c.ctx); !errors.Is(err, io.EOF) && s.ctx.Err() == nil {
		s.log.Warn("rendezvous: store server closed a connection",
			zap.Stringer("client", conn.RemoteAddr()), zap.Error(err))
	}
}

// serverConn is the server's end of a connection. One goroutine reads and does what needs no waiting; each wait has
// a goroutine of its own.
type serverConn struct {
	*TCPServer
	conn net.Conn
	ctx  context.Context // ends with the connection
	gone context.CancelCauseFunc
	wg   sync.WaitGroup

	mu    sync.Mutex // never held together with TCPServer.mu
	waits map[uint64]context.CancelFunc

	writing sync.Mutex
}

// end closes the connection for the reason err. The first reason counts.
func (c *serverConn) end(err error) {
	c.gone(err)
	c.conn.Close()
}

// run serves requests until the connection ends and returns the reason, io.EOF if the client left between frames.
func (c *serverConn) run() error {
	in := bufio.NewReader(c.conn)
	c.conn.SetReadDeadline(time.Now().Add(serverIOTimeout))
	version, err := readGreeting(in, storeMagic)
	if err != nil {
		return err
	}
	if err := c.write(greeting(storeMagic, storeVersion)); err != nil {
		return err
	}
	if version != storeVersion {
		return fmt.Errorf("client speaks version %d of the store protocol, want %d", version, storeVersion)
	}
	for {
		c.conn.SetReadDeadline(time.Now().Add(clientSilence))
		body, err := readFrame(in, maxRequestBytes)
		if err != nil {
			return err
		}
		q, err := decodeRequest(body)
		if err != nil {
			return err
		}
		if err := c.handle(&q); err != nil {
			return err
		}
	}
}

func (c *serverConn) handle(q *request) error {
	r := reply{id: q.id}
	var err error
	switch q.op {
	case opPing:
	case opCancel:
		c.mu.Lock()
		if cancel := c.waits[q.id]; cancel != nil {
			cancel()
		}
		c.mu.Unlock()
		return nil
	case opSet:
		err = c.store.set(c.ctx, q.key, q.first)
	case opAdd:
		r.number, err = c.store.add(c.ctx, q.key, q.delta)
	case opCompareAndSet:
		r.value, r.ok, err = c.store.compareAndSet(c.ctx, q.key, q.first, q.second)
	case opDelete:
		r.ok, err = c.store.delete(c.ctx, q.key)
	case opGet, opWatch:
		if q.op == opGet {
			q.first = nil
		}
		var started bool
		if started, err = c.startWait(q); started {
			return nil
		}
	}
	if err != nil {
		r.fail(err)
	}
	return c.write(r.frame())
}

// startWait waits for a key and replies, in a goroutine of its own. The error, if it cannot, is for the client.
func (c *serverConn) startWait(q *request) (started bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.waits) >= maxWaitsPerClient {
		return false, &refusal{ErrLimit, fmt.Sprintf("the connection has %d waiting calls, the most it may", len(c.waits))}
	}
	if c.waits[q.id] != nil {
		return false, fmt.Errorf("request %d is already waiting", q.id)
	}
	ctx, cancel := context.WithCancel(c.ctx)
	c.waits[q.id] = cancel
	c.wg.Go(func() {
		defer cancel()
		value, err := c.store.wait(ctx, q.key, q.first)
		c.mu.Lock()
		delete(c.waits, q.id)
		c.mu.Unlock()
		if ctx.Err() != nil {
			return // cancelled by the client, who expects no reply
		}
		r := reply{id: q.id, value: value}
		if err != nil {
			r.fail(err)
		}
		if err := c.write(r.frame()); err != nil {
			c.end(err)
		}
	})
	return true, nil
}

func (c *serverConn) write(b []byte) error {
	c.writing.Lock()
	defer c.writing.Unlock()
	c.conn.SetWriteDeadline(time.Now().Add(serverIOTimeout))
	_, err := c.conn.Write(b)
	return err
}
