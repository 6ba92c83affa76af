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

// DialTimeout is Dial with another time for the first answer.
var DialTimeout = dialStore

// ServeBytes serves a client that sends in and leaves.
func ServeBytes(s *store.HashStore, in []byte) error {
	return (&Server{store: s}).serve(context.Background(), byteConn{bytes.NewReader(in)})
}

// byteConn is a connection over which certain bytes come, and all that is sent is taken.
type byteConn struct{ io.Reader }

func (byteConn) Write(b []byte) (int, error)      { return len(b), nil }
func (byteConn) Close() error                     { return nil }
func (byteConn) LocalAddr() net.Addr              { return nil }
func (byteConn) RemoteAddr() net.Addr             { return nil }
func (byteConn) SetDeadline(time.Time) error      { return nil }
func (byteConn) SetReadDeadline(time.Time) error  { return nil }
func (byteConn) SetWriteDeadline(time.Time) error { return nil }

// ClientOf is a Store whose only connection has a server that answers in, whatever it is asked, and is gone
// then.
func ClientOf(in []byte) *Store {
	s := &Store{dialect: Modern, busy: make(map[*conn]struct{})}
	over := byteConn{bytes.NewReader(in)}
	s.idle = []*conn{{Conn: over, in: reader{Reader: bufio.NewReader(over)}}}
	return s
}
