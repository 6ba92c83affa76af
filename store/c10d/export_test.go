package c10d

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net"
	"time"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/store"
)

// DialTimeout is Dial with one more parameter: how long the first attempt waits for an answer.
var DialTimeout = dialStore

// ServeWithin is Serve with two more parameters: how much memory the requests and the answers of all clients
// may take.
func ServeWithin(addr string, s *store.HashStore, cfg Config, maxCallsBytes,
	maxAnswersBytes int64) (*Server, error) {
	return newServer(s, cfg, maxCallsBytes, maxAnswersBytes).listen(addr)
}

// ServeBytes serves s to a client that sends the bytes in and then closes the connection.
func ServeBytes(s *store.HashStore, in []byte) error {
	return serveOver(s, byteConn{bytes.NewReader(in)})
}

func serveOver(s *store.HashStore, conn net.Conn) error {
	return ServeEach(s, maxCallsBytes)(conn)
}

// ServeEach returns a function that serves s over a connection. The requests of all connections may take
// maxCallsBytes.
func ServeEach(s *store.HashStore, maxCallsBytes int64) func(net.Conn) error {
	server := newServer(s, Config{}, maxCallsBytes, maxAnswersBytes)
	return func(conn net.Conn) error {
		return server.serve(context.Background(), conn, dial.NewLimiter(1).Acquire(nil))
	}
}

// WriteDeadlines is like ServeBytes, and returns how often the server sets the deadline for its answers.
func WriteDeadlines(s *store.HashStore, in []byte) (n int, err error) {
	err = serveOver(s, deadlineConn{byteConn{bytes.NewReader(in)}, &n})
	return n, err
}

// deadlineConn counts the write deadlines.
type deadlineConn struct {
	byteConn
	deadlines *int
}

func (c deadlineConn) SetWriteDeadline(time.Time) error {
	*c.deadlines++
	return nil
}

// byteConn is a connection that reads from a Reader. It discards all bytes that are written to it.
type byteConn struct{ io.Reader }

func (byteConn) Write(b []byte) (int, error)      { return len(b), nil }
func (byteConn) Close() error                     { return nil }
func (byteConn) LocalAddr() net.Addr              { return nil }
func (byteConn) RemoteAddr() net.Addr             { return nil }
func (byteConn) SetDeadline(time.Time) error      { return nil }
func (byteConn) SetReadDeadline(time.Time) error  { return nil }
func (byteConn) SetWriteDeadline(time.Time) error { return nil }

// ClientOf returns a Store with a single connection. The server at its other end ignores all requests, sends
// the bytes in, and closes the connection.
func ClientOf(in []byte) *Store {
	s := &Store{dialect: Modern, busy: make(map[*conn]struct{})}
	over := byteConn{bytes.NewReader(in)}
	s.idle = []*conn{{Conn: over, in: reader{Reader: bufio.NewReader(over)}}}
	return s
}
