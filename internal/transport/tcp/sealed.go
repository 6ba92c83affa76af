package tcp

import (
	"net"
	"sync"

	"github.com/gohvd/gohvd/internal/secret"
)

// sealed is a TLS connection over a socket.
type sealed struct {
	net.Conn
	out *recordBuffer
}

// maxUnwrittenBytes limits how many bytes of TLS records are collected for one system call. The last record
// may exceed the limit.
const maxUnwrittenBytes = 64 << 10

// recordBuffer is the connection below TLS. After begin, Write only stores the bytes that TLS produces, and
// flush writes them to the socket. So one system call writes several records.
//
// There is a more important reason: TLS holds a lock while it calls Write, and Write must not wait for the
// peer then. A read that finds tampered data acquires the same lock, to send an alert. If Write waited, the
// read could not return its error before the peer had made room.
type recordBuffer struct {
	net.Conn

	mu        sync.Mutex
	begun     bool
	unwritten []byte

	spare []byte // memory that flush will use for unwritten next; only flush uses it

	// The fields below belong to the reader. While trying is true, Read does not wait. Read first returns the
	// bytes that fill has read, and then reads from the socket.
	trying    bool
	readAhead []byte // bytes that fill has read; a slice of room
	room      [recordBytes]byte
	failed    error // error that Read returns after the bytes of readAhead
}

// seal makes both ends of nc prove that they know key. The function by does this for one side: it is
// secret.Secret.Dial or secret.Secret.Accept. If key is encrypted, seal returns a *sealed. Otherwise it
// returns nc.
func seal(key secret.Secret, nc net.Conn,
	by func(secret.Secret, net.Conn, string) (net.Conn, error)) (net.Conn, error) {
	if !key.IsEncrypted() {
		return by(key, nc, purpose)
	}
	out := &recordBuffer{Conn: nc}
	over, err := by(key, out, purpose)
	if err != nil {
		return nil, err
	}
	return &sealed{over, out}, nil
}

// begin makes Write store bytes until flush. It must be called after the handshakes and before the first
// flush.
func (r *recordBuffer) begin() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.begun = true
}

func (r *recordBuffer) Read(b []byte) (int, error) {
	switch {
	case len(r.readAhead) > 0:
		n := copy(b, r.readAhead)
		r.readAhead = r.readAhead[n:]
		return n, nil
	case r.failed != nil:
		return 0, r.failed
	case r.trying:
		return 0, errWouldBlock
	}
	return r.Conn.Read(b)
}

// fill reads ahead without waiting, and reports whether Read has bytes or an error to return. fill avoids a
// read through TLS when nothing has arrived, because such a read would allocate.
func (r *recordBuffer) fill(s *socket) bool {
	if len(r.readAhead) == 0 && r.failed == nil {
		n, err := s.TryRead(r.room[:])
		r.readAhead = r.room[:n]
		if err != errWouldBlock {
			r.failed = err
		}
	}
	return len(r.readAhead) > 0 || r.failed != nil
}

func (r *recordBuffer) Write(b []byte) (int, error) {
	r.mu.Lock()
	if r.begun {
		r.unwritten = append(r.unwritten, b...)
		r.mu.Unlock()
		return len(b), nil
	}
	r.mu.Unlock()
	return r.Conn.Write(b)
}

func (r *recordBuffer) full() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.unwritten) >= maxUnwrittenBytes
}

// flush writes the stored bytes and waits until all of them are in the socket. Only one goroutine may call
// it.
func (r *recordBuffer) flush() error {
	r.mu.Lock()
	b := r.unwritten
	r.unwritten = r.spare[:0]
	r.mu.Unlock()
	r.spare = b
	if len(b) == 0 {
		return nil
	}
	_, err := r.Conn.Write(b)
	return err
}
