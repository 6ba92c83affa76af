package tcp

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// socket is a TCP connection that can be polled without the runtime's poller. While a socket is in the
// runtime's poller, arriving data wakes a thread of the process even if no goroutine waits for the data. So a
// call puts the socket into the runtime's poller only if the call has to wait, and polling takes the socket
// out again.
//
// One goroutine may read while another one writes.
type socket struct {
	local, remote net.Addr
	inode         int // its place in inodes

	// mu is held for reading while fd is used, and for writing while the fields below change.
	mu              sync.RWMutex
	fd              int
	file            *os.File        // owns fd from enter to leave, otherwise nil
	raw             syscall.RawConn // set while the socket is in the runtime's poller
	reads, writes   time.Time       // deadlines
	closed          bool
	waiters         atomic.Int32 // number of calls that wait in the runtime's poller
	reader, writer  transfer
	inRuntimePoller atomic.Bool
}

// transfer is the state of a read or write that waits. The function try is created once for each socket,
// because reading and writing must not allocate.
type transfer struct {
	p   []byte
	n   int
	err error
	try func(fd uintptr) bool
}

// errWouldBlock reports that a call would have to wait but must not. To TLS it looks like a timeout, after
// which the caller may read again.
var errWouldBlock error = wouldBlock{}

// wouldBlock is the type of errWouldBlock. It implements net.Error.
type wouldBlock struct{}

func (wouldBlock) Error() string   { return "tcp: the operation would block" }
func (wouldBlock) Timeout() bool   { return true }
func (wouldBlock) Temporary() bool { return true }

// newSocket makes a socket with a duplicate of nc's descriptor, and closes nc.
func newSocket(nc net.Conn) (*socket, error) {
	s := &socket{fd: -1, local: nc.LocalAddr(), remote: nc.RemoteAddr()}
	err := s.takeOver(nc)
	if err == nil {
		s.inode, err = inodes.add(s.fd) // before nc leaves the runtime's poller
	}
	if err = errors.Join(err, nc.Close()); err != nil {
		if s.fd >= 0 {
			err = errors.Join(err, unix.Close(s.fd))
		}
		inodes.remove(s.inode)
		return nil, fmt.Errorf("set up a connection: %w", err)
	}
	s.reader.try = func(fd uintptr) bool {
		s.reader.n, s.reader.err = readNow(int(fd), s.reader.p)
		return s.reader.err != errWouldBlock
	}
	s.writer.try = func(fd uintptr) bool {
		s.writer.n, s.writer.err = writeNow(int(fd), s.writer.p)
		return s.writer.err != errWouldBlock
	}
	return s, nil
}

func (s *socket) takeOver(nc net.Conn) error {
	tc, ok := nc.(syscall.Conn)
	if !ok {
		return fmt.Errorf("got a %T, want a *net.TCPConn", nc)
	}
	raw, err := tc.SyscallConn()
	if err != nil {
		return err
	}
	if ctl := raw.Control(func(fd uintptr) { s.fd, err = duplicate(int(fd)) }); ctl != nil {
		return ctl
	}
	return err
}

func duplicate(fd int) (int, error) {
	fd, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	return fd, os.NewSyscallError("fcntl", err)
}

// maxRawBytes is the maximum number of bytes that one system call copies. While a system call runs of which
// the Go scheduler is not told, the thread can run no other goroutine, and garbage collection cannot start.
const maxRawBytes = 1 << 20

// readNow calls read(2) without waiting. It returns errWouldBlock if nothing has arrived. The Go scheduler is
// not told of the system calls of readNow and writeNow, because they are short. If it is told, it may give
// the goroutines of the thread to another thread during the call, and its monitor thread wakes more often.
func readNow(fd int, p []byte) (int, error) {
	for {
		n, _, err := unix.RawSyscall(unix.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(p))),
			uintptr(min(len(p), maxRawBytes)))
		switch {
		case err == unix.EINTR:
		case err == unix.EAGAIN:
			return 0, errWouldBlock
		case err != 0:
			return 0, os.NewSyscallError("read", err)
		case n == 0 && len(p) > 0:
			return 0, io.EOF
		default:
			noteRead(p[:n])
			return int(n), nil
		}
	}
}

// writeNow calls sendto(2) without waiting. It returns errWouldBlock if the socket has no room.
func writeNow(fd int, p []byte) (int, error) {
	p = p[:min(len(p), maxRawBytes)]
	noteWrite(p)
	for {
		n, _, err := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd),
			uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)), unix.MSG_NOSIGNAL, 0, 0)
		switch {
		case err == unix.EINTR:
		case err == unix.EAGAIN:
			return 0, errWouldBlock
		case err != 0:
			return 0, os.NewSyscallError("sendto", err)
		default:
			return int(n), nil
		}
	}
}

// now calls f with the descriptor and p. If the socket is closed, now returns net.ErrClosed.
func (s *socket) now(f func(fd int, p []byte) (int, error), p []byte) (int, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.closed {
		return 0, net.ErrClosed
	}
	return f(s.fd, p)
}

// TryRead is like Read, but returns errWouldBlock instead of waiting. It ignores deadlines.
func (s *socket) TryRead(p []byte) (int, error) { return s.now(readNow, p) }

// TryWrite is like Write, but returns errWouldBlock instead of waiting, and may write only a part of p. It
// ignores deadlines.
func (s *socket) TryWrite(p []byte) (int, error) { return s.now(writeNow, p) }

// Read implements net.Conn.
func (s *socket) Read(p []byte) (int, error) {
	if n, err := s.TryRead(p); err != errWouldBlock {
		return n, err
	}
	return s.wait(&s.reader, p, syscall.RawConn.Read)
}

// WriteSome is like Write, but may write only a part of p.
func (s *socket) WriteSome(p []byte) (int, error) {
	if n, err := s.TryWrite(p); err != errWouldBlock {
		return n, err
	}
	return s.wait(&s.writer, p, syscall.RawConn.Write)
}

// Write implements net.Conn.
func (s *socket) Write(p []byte) (total int, err error) {
	for len(p) > 0 && err == nil {
		var n int
		n, err = s.WriteSome(p)
		total += n
		p = p[n:]
	}
	return total, err
}

// wait does the transfer t with the bytes p. It waits in the runtime's poller until the socket is ready.
func (s *socket) wait(t *transfer, p []byte,
	by func(syscall.RawConn, func(uintptr) bool) error) (int, error) {
	raw, err := s.enter()
	if err != nil {
		return 0, err
	}
	defer s.waiters.Add(-1)
	t.p = p
	err = by(raw, t.try)
	t.p = nil
	if err != nil {
		return 0, err
	}
	return t.n, t.err
}

// enter puts the socket into the runtime's poller, for a call that has to wait.
func (s *socket) enter() (syscall.RawConn, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, net.ErrClosed
	}
	if s.raw == nil {
		if s.file == nil {
			s.file = os.NewFile(uintptr(s.fd), "socket")
		}
		raw, err := s.file.SyscallConn()
		if err = errors.Join(err, s.file.SetReadDeadline(s.reads),
			s.file.SetWriteDeadline(s.writes)); err != nil {
			return nil, fmt.Errorf("tcp: wait for the socket: %w", err)
		}
		s.raw = raw
		s.inRuntimePoller.Store(true)
	}
	s.waiters.Add(1)
	return s.raw, nil
}

// leave takes the socket out of the runtime's poller, unless a call waits there or the socket is closed. From
// then on the socket uses fd, a duplicate of its descriptor. Otherwise leave closes fd.
func (s *socket) leave(fd int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.raw == nil || s.waiters.Load() > 0 {
		return unix.Close(fd)
	}
	file := s.file
	s.fd, s.file, s.raw = fd, nil, nil
	s.inRuntimePoller.Store(false)
	return file.Close()
}

// canLeave reports whether the socket is in the runtime's poller and no call waits there. Then leave would
// take it out.
func (s *socket) canLeave() bool { return s.inRuntimePoller.Load() && s.waiters.Load() == 0 }

// Close implements net.Conn.
func (s *socket) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return net.ErrClosed
	}
	s.closed = true
	defer inodes.remove(s.inode)
	if s.file != nil {
		return s.file.Close()
	}
	return unix.Close(s.fd)
}

// hungUp reports whether the peer has ended its stream, or the connection is broken.
func (s *socket) hungUp() bool {
	// If the call fails, n is not positive, and later calls fail too.
	n, _ := s.now(func(fd int, _ []byte) (int, error) {
		return unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}, 0)
	}, nil)
	return n > 0
}

// CloseWrite ends the outgoing stream. The peer reads the end of the stream after the bytes that were sent.
func (s *socket) CloseWrite() error {
	_, err := s.now(func(fd int, _ []byte) (int, error) { return 0, unix.Shutdown(fd, unix.SHUT_WR) }, nil)
	return err
}

// LocalAddr implements net.Conn.
func (s *socket) LocalAddr() net.Addr { return s.local }

// RemoteAddr implements net.Conn.
func (s *socket) RemoteAddr() net.Addr { return s.remote }

// SetDeadline implements net.Conn. It affects only calls that wait.
func (s *socket) SetDeadline(t time.Time) error {
	return errors.Join(s.SetReadDeadline(t), s.SetWriteDeadline(t))
}

// SetReadDeadline implements net.Conn.
func (s *socket) SetReadDeadline(t time.Time) error {
	return s.setDeadline(&s.reads, t, (*os.File).SetReadDeadline)
}

// SetWriteDeadline implements net.Conn.
func (s *socket) SetWriteDeadline(t time.Time) error {
	return s.setDeadline(&s.writes, t, (*os.File).SetWriteDeadline)
}

func (s *socket) setDeadline(own *time.Time, t time.Time, set func(*os.File, time.Time) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return net.ErrClosed
	}
	*own = t
	if s.file != nil {
		return set(s.file, t)
	}
	return nil
}
