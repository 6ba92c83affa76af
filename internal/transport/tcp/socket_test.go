package tcp

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/transport"
)

// TestCallsAreBounded checks that one system call copies at most maxRawBytes.
func TestCallsAreBounded(t *testing.T) {
	// A file in memory holds more than a socket does.
	file, err := unix.MemfdCreate("data", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(file)
	p := make([]byte, 2*maxRawBytes)
	if err := unix.Ftruncate(file, int64(len(p))); err != nil {
		t.Fatal(err)
	}
	if n, err := readNow(file, p); n != maxRawBytes || err != nil {
		t.Errorf("read %d bytes and got %v, want %d bytes", n, err, maxRawBytes)
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pair[0])
	defer unix.Close(pair[1])
	if err := unix.SetsockoptInt(pair[0], unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 8*maxRawBytes); err != nil {
		t.Skipf("the size of the socket's buffer is limited: %v", err)
	}
	if n, err := writeNow(pair[0], p); n != maxRawBytes || err != nil {
		t.Errorf("wrote %d bytes and got %v, want %d bytes", n, err, maxRawBytes)
	}
}

// TestPollWithoutDescriptors reads from a channel without waiting after a read that has waited, while the
// process has no free descriptor. A descriptor that is not needed must not end the channel.
func TestPollWithoutDescriptors(t *testing.T) {
	zero, one := twoRanks(t, secret.Secret{})
	for _, lane := range []transport.Lane{transport.Control, 1} {
		a, b := pair(t, zero, one, lane)
		if _, err := b.sock.enter(); err != nil { // as Read does before it waits
			t.Fatal(err)
		}
		b.sock.waiters.Add(-1)
		restore := testnet.LimitDescriptors(t, 1)
		_, err := b.TryRead(make([]byte, 1))
		restore()
		if err != nil || !b.sock.canLeave() {
			t.Errorf("lane %d: got error %v; want none, and the socket in the runtime's poller", lane, err)
		}
		pass(t, a, b)
		if _, err := b.TryRead(make([]byte, 1)); err != nil || b.sock.canLeave() {
			t.Errorf("lane %d: got error %v; want none, and the socket no longer in the runtime's poller", lane, err)
		}
	}
}

// A socket that the runtime's poller refuses fails with an error each time it has to wait.
func TestPollerRefusesSocket(t *testing.T) {
	file, err := unix.MemfdCreate("not pollable", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	s := &socket{fd: file}
	for range 2 {
		if raw, err := s.enter(); err == nil {
			t.Errorf("got %v, want an error", raw)
		}
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}
