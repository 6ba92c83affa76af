package logs

import (
	"os"

	"golang.org/x/sys/unix"
)

// Stderr writes to the standard error output. If nobody reads that any more, a write fails. A write to
// os.Stderr would end the program by SIGPIPE then, also a program in another language that ignores this
// signal.
type Stderr struct{}

// Write implements io.Writer.
func (Stderr) Write(b []byte) (n int, err error) {
	conn, err := os.Stderr.SyscallConn()
	if err != nil {
		return 0, err
	}
	failed := conn.Write(func(fd uintptr) bool {
		for n < len(b) {
			var m int
			if m, err = unix.Write(int(fd), b[n:]); m > 0 {
				n += m
			}
			if err == unix.EAGAIN {
				return false // the caller waits until there is space
			}
			if err != nil && err != unix.EINTR {
				return true
			}
		}
		err = nil
		return true
	})
	if err == nil {
		err = failed
	}
	return n, err
}
