package c10d

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net"
	"time"

	"github.com/gohvd/gohvd/store"
)

// DialTimeout is like Dial, but the caller sets how long it waits for the first answer.
var DialTimeout = dialStore

// ServeBytes serves a client that sends in and closes the connection.
func ServeBytes(s *store.HashStore, in []byte) error {
	return (&Server{store: s}).serve(context.Background(), byteConn{bytes.NewReader(in)})
}

// byteConn is a connection that reads from a Reader and discards what is written.
type byteConn struct{ io.Reader }

func (byteConn) Write(b []byte) (int, error)      { return len(b), nil }
func (byteConn) Close() error                     { return nil }
func (byteConn) LocalAddr() net.Addr              { return nil }
func (byteConn) RemoteAddr() net.Addr             { return nil }
func (byteConn) SetDeadline(time.Time) error      { return nil }
func (byteConn) SetReadDeadline(time.Time) error  { return nil }
func (byteConn) SetWriteDeadline(time.Time) error { return nil }

// ClientOf returns a Store whose only connection has a server that sends in, whatever the requests are, and
// then closes the connection.
func ClientOf(in []byte) *Store {
	s := &Store{dialect: Modern, busy: make(map[*conn]struct{})}
	over := byteConn{bytes.NewReader(in)}
	s.idle = []*conn{{Conn: over, in: reader{Reader: bufio.NewReader(over)}}}
	return s
}
