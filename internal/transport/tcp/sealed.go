package tcp

import (
	"net"
	"sync"

	"github.com/gohvd/gohvd/internal/secret"
)

// sealed is a TLS connection over a socket.
type sealed struct {
	net.Conn
	out *gather
}

// gatherBytes is the number of bytes of TLS records that are written in one system call. It may be exceeded
// by one record.
const gatherBytes = 64 << 10

// gather is the socket below TLS. After begin it keeps the bytes that TLS writes until flush. So one system
// call writes several records. More important, TLS never waits for the peer while it holds its lock. TLS also
// takes the lock in a read that finds tampered data, to send an alert; if a write waited with the lock, the
// read could not return its error before the peer had made room.
type gather struct {
	net.Conn

	mu    sync.Mutex
	begun bool
	held  []byte

	spare []byte // used only by flush

	// The fields below belong to the reader. While trying is set, Read does not wait. Read returns the bytes
	// that fill has read before it reads from the socket.
	trying bool
	ahead  []byte // bytes that fill has read, a part of room
	room   [recordBytes]byte
	failed error // the error that Read returns after ahead
}

// seal proves key over nc with by, which is its method Dial or Accept. It returns nc, or a *sealed if key is
// encrypted.
func seal(key secret.Secret, nc net.Conn, by func(secret.Secret, net.Conn, string) (net.Conn, error)) (net.Conn, error) {
	if !key.IsEncrypted() {
		return by(key, nc, purpose)
	}
	out := &gather{Conn: nc}
	over, err := by(key, out, purpose)
	if err != nil {
		return nil, err
	}
	return &sealed{over, out}, nil
}

// begin makes Write keep bytes until flush. It is called after the handshakes and before the first flush.
func (g *gather) begin() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.begun = true
}

func (g *gather) Read(b []byte) (int, error) {
	switch {
	case len(g.ahead) > 0:
		n := copy(b, g.ahead)
		g.ahead = g.ahead[n:]
		return n, nil
	case g.failed != nil:
		return 0, g.failed
	case g.trying:
		return 0, errWouldBlock
	}
	return g.Conn.Read(b)
}

// fill reads ahead without waiting, and reports whether there are bytes or an error to return from Read. It
// exists because a read through TLS that finds nothing allocates.
func (g *gather) fill(s *socket) bool {
	if len(g.ahead) == 0 && g.failed == nil {
		n, err := s.TryRead(g.room[:])
		if g.ahead = g.room[:n]; err != errWouldBlock {
			g.failed = err
		}
	}
	return len(g.ahead) > 0 || g.failed != nil
}

func (g *gather) Write(b []byte) (int, error) {
	g.mu.Lock()
	if g.begun {
		g.held = append(g.held, b...)
		g.mu.Unlock()
		return len(b), nil
	}
	g.mu.Unlock()
	return g.Conn.Write(b)
}

func (g *gather) full() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.held) >= gatherBytes
}

// flush writes the bytes that are kept, and waits for the socket. Only one goroutine calls it.
func (g *gather) flush() error {
	g.mu.Lock()
	b := g.held
	g.held = g.spare[:0]
	g.mu.Unlock()
	g.spare = b
	if len(b) == 0 {
		return nil
	}
	_, err := g.Conn.Write(b)
	return err
}
