package tcp

import (
	"testing"

	"golang.org/x/sys/unix"
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
