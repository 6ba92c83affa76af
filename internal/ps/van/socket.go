package van

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/dial"
)

// maxRawBytes is the maximum number of bytes that a system call of a socket copies.
const maxRawBytes = 256 << 10

// socket reads and writes a TCP or Unix connection with system calls that never wait. The Go scheduler is not
// told of these calls: it would wake its monitor thread at the first one after the process was idle, which
// takes longer than the call. One goroutine may read while another one writes.
//
// A socket keeps the descriptors that arrive over a Unix connection until the messages that name them are
// read.
type socket struct {
	raw syscall.RawConn
	fds []int // descriptors that have arrived

	reading, writing call
	msg              unix.Msghdr
	part             unix.Iovec
	rights           []byte // memory for descriptors that arrive; empty unless the connection may pass them
}

// call is a system call in progress.
type call struct {
	do    func(fd uintptr) bool // does the call; a field, so that a call allocates nothing
	p     []byte
	n     int
	errno syscall.Errno
}

// newSocket returns the socket of a connection, or nil if it has none, for example because it is encrypted.
func newSocket(conn any) *socket {
	sc, ok := conn.(syscall.Conn)
	if !ok {
		return nil
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return nil // the connection is closed, which the next call reports
	}
	s := &socket{raw: raw}
	if _, ok := conn.(*net.UnixConn); ok {
		s.rights = make([]byte, unix.CmsgSpace(4*(maxFDs+1)))
	}
	s.reading.do, s.writing.do = s.receive, s.write
	return s
}

// passes reports whether the connection may pass descriptors.
func (s *socket) passes() bool { return len(s.rights) > 0 }

// receive calls recvmsg. It returns false if nothing has arrived.
func (s *socket) receive(fd uintptr) bool {
	c := &s.reading
	s.part.Base = unsafe.SliceData(c.p)
	s.part.SetLen(len(c.p))
	s.msg = unix.Msghdr{Iov: &s.part}
	s.msg.SetIovlen(1)
	if len(s.rights) > 0 {
		s.msg.Control = unsafe.SliceData(s.rights)
		s.msg.SetControllen(len(s.rights))
	}
	for {
		n, _, errno := unix.RawSyscall(unix.SYS_RECVMSG, fd, uintptr(unsafe.Pointer(&s.msg)),
			unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
		c.n, c.errno = int(n), errno
		if errno != unix.EINTR {
			return errno != unix.EAGAIN
		}
		// The poller would not report again what has arrived already.
	}
}

// write calls sendto.
func (s *socket) write(fd uintptr) bool {
	c := &s.writing
	n, _, errno := unix.RawSyscall6(unix.SYS_SENDTO, fd, uintptr(unsafe.Pointer(unsafe.SliceData(c.p))),
		uintptr(len(c.p)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, 0, 0)
	c.n, c.errno = int(n), errno
	return true // do not wait
}

// TryWrite writes as much of p as the connection takes without waiting, and returns the number of bytes.
func (s *socket) TryWrite(p []byte) (int, error) {
	c := &s.writing
	c.p = p[:min(len(p), maxRawBytes)]
	err := s.raw.Write(c.do)
	c.p = nil
	switch {
	case err != nil:
		return 0, err
	case c.errno == unix.EAGAIN || c.errno == unix.EINTR:
		return 0, nil
	case c.errno != 0:
		return 0, os.NewSyscallError("sendto", c.errno)
	}
	return c.n, nil
}

// pass writes at least one byte of p, together with descriptors. It waits for room.
func (s *socket) pass(p []byte, fds []int) (n int, err error) {
	rights := unix.UnixRights(fds...)
	if waited := s.raw.Write(func(fd uintptr) bool {
		n, err = unix.SendmsgN(int(fd), p, rights, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		for err == unix.EINTR {
			n, err = unix.SendmsgN(int(fd), p, rights, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		}
		return err != unix.EAGAIN
	}); waited != nil {
		return 0, waited
	}
	return n, os.NewSyscallError("sendmsg", err)
}

// Read reads at least one byte. It waits for it in the poller of the Go runtime. With an error it returns no
// bytes, so that a reader does not keep the error until it has handled the bytes.
func (s *socket) Read(p []byte) (int, error) {
	c := &s.reading
	c.p = p[:min(len(p), maxRawBytes)]
	err := s.raw.Read(c.do)
	c.p = nil
	switch {
	case err != nil:
		return 0, err
	case c.errno != 0:
		return 0, os.NewSyscallError("recvmsg", c.errno)
	}
	if err := s.keep(); err != nil {
		return 0, err
	}
	if c.n == 0 && len(p) > 0 {
		return 0, io.EOF
	}
	return c.n, nil
}

// hungUp reports whether the peer has closed the connection, even if bytes of it were not read yet. A peer
// that leaves the job first closes only the direction to this process, which does not count.
func (s *socket) hungUp() (yes bool) {
	err := s.raw.Control(func(fd uintptr) { yes = hasEvent(fd, 0) })
	return yes || err != nil
}

// hasEvent reports whether a descriptor has one of the given events, POLLHUP or POLLERR.
func hasEvent(fd uintptr, events int16) bool {
	p := []unix.PollFd{{Fd: int32(fd), Events: events}}
	n, err := unix.Poll(p, 0)
	for err == unix.EINTR { // the runtime sends signals to its threads
		n, err = unix.Poll(p, 0)
	}
	return n != 0
}

// keep keeps the descriptors that the last call of receive has got.
func (s *socket) keep() error {
	got := int(s.msg.Controllen)
	var err error
	if got > 0 {
		parts, parseErr := unix.ParseSocketControlMessage(s.rights[:got])
		for i := range parts {
			fds, err := unix.ParseUnixRights(&parts[i])
			s.fds, parseErr = append(s.fds, fds...), errors.Join(parseErr, err)
		}
		err = parseErr
	}
	switch {
	case got > 0 && got == len(s.rights) || len(s.fds) > maxBlocks:
		err = errors.Join(err, errors.New("malformed message: it has too many descriptors"))
	case s.msg.Flags&unix.MSG_CTRUNC != 0: // there was room in rights, so this process may open no more files
		err = errors.Join(err,
			fmt.Errorf("receive a descriptor of shared memory: %w", dial.ExplainLimit(unix.EMFILE)))
	}
	return err
}

// takeDescriptor returns the oldest descriptor, which the caller must close.
func (s *socket) takeDescriptor() (int, error) {
	if len(s.fds) == 0 {
		return -1, errors.New("malformed message: the descriptor of a block is missing")
	}
	fd := s.fds[0]
	s.fds = s.fds[1:]
	return fd, nil
}

// close closes the descriptors that no message has named.
func (s *socket) close() {
	for _, fd := range s.fds {
		_ = unix.Close(fd) // nothing was written through fd
	}
	s.fds = nil
}
