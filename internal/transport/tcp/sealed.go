package tcp

import (
	"net"
	"sync"

	"github.com/gohvd/gohvd/internal/secret"
)

// sealed is TLS over a socket.
type sealed struct {
	net.Conn
	out *gather
}

// gatherBytes is how much of what TLS writes goes into one system call, a record more or less.
const gatherBytes = 64 << 10

// gather is the socket under TLS. From begin on it keeps what TLS writes until flush. One system call then takes several records,
// and, what matters more, TLS never waits for the peer with its lock held: it wants the lock also where it reads what was
// tampered with, to say so, and would fail to tell its caller before the peer had made room.
type gather struct {
	net.Conn

	mu    sync.Mutex
	begun bool
	held  []byte

	spare []byte // of who flushes

	// What follows belongs to whoever reads. While trying is set nothing waits, and what fill has read comes first.
	trying bool
	ahead  []byte // of room
	room   [recordBytes]byte
	failed error // after ahead
}

// seal proves key over nc by one of its Dial and Accept. The connection is nc or a *sealed.
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

// begin comes after the handshakes and before anybody waits in flush.
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

// fill reads ahead without waiting, and reports whether there is something to read. TLS would allocate to find that there is not.
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

// flush writes what is held, and waits for the socket. One goroutine calls it.
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
