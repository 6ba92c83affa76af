package engine

import (
	"testing"

	"github.com/gohvd/gohvd/transport"
)

// pipe takes what it is given, and says that it has sent it when it is told to.
type pipe struct {
	transport.Conn
	taken, sent uint64
}

func (p *pipe) Send(b []byte) error {
	p.taken += uint64(len(b))
	return nil
}

func (p *pipe) Sent() uint64 { return p.sent }

// What frames were in is used again, but a connection keeps neither large buffers nor many.
func TestLinkKeepsLittle(t *testing.T) {
	p := new(pipe)
	l := &link{conn: p}
	send := func(numBytes int) {
		if err := l.send(make([]byte, numBytes)); err != nil {
			t.Fatal(err)
		}
	}
	send(2 * maxKept)
	for range 2 * mostKept {
		send(100)
	}
	p.sent = p.taken
	send(100)
	if n := len(l.free); n != mostKept-1 { // one is used again
		t.Errorf("keeps %d buffers, want %d", n, mostKept-1)
	}
	for _, b := range l.free {
		if cap(b) > maxKept {
			t.Errorf("keeps a buffer of %d bytes", cap(b))
		}
	}
}
