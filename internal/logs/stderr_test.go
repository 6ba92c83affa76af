package logs

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// TestStderr writes to standard error, and again when nobody reads it any more. That must not end this
// process.
func TestStderr(t *testing.T) {
	saved, err := unix.FcntlInt(2, unix.F_DUPFD_CLOEXEC, 10)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(saved)
	defer unix.Dup3(saved, 2, 0)
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Dup3(int(write.Fd()), 2, 0); err != nil {
		t.Fatal(err)
	}
	write.Close()
	if n, err := (Stderr{}).Write([]byte("line\n")); n != 5 || err != nil {
		t.Errorf("wrote %d bytes, error %v", n, err)
	}
	b := make([]byte, 10)
	if n, err := read.Read(b); string(b[:n]) != "line\n" || err != nil {
		t.Errorf("read %q, error %v", b[:n], err)
	}
	read.Close()
	if n, err := (Stderr{}).Write([]byte("line\n")); n != 0 || !errors.Is(err, unix.EPIPE) {
		t.Errorf("wrote %d bytes, error %v, want EPIPE", n, err)
	}
}
