package sidecar

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/sidecar/wire"
)

// accept authenticates a new client and reads its greeting. It returns the socket in blocking mode, the
// process ID of the client, and a pidfd of the client's process. It fails if ctx ends, or after the timeout.
// It closes conn. The caller must send the greeting of the sidecar.
func accept(ctx context.Context, conn *net.UnixConn, timeout time.Duration) (fd, pid int, pidfd *os.File,
	err error) {
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	fail := func(err error) (int, int, *os.File, error) {
		if pidfd != nil {
			err = errors.Join(err, pidfd.Close())
		}
		return -1, pid, nil, fmt.Errorf("sidecar: client process %d: %w", pid, err)
	}
	if pid, pidfd, err = peer(conn); err != nil {
		return fail(err)
	}
	if err := conn.SetDeadline(time.Now().Add(timeout)); err != nil {
		return fail(err)
	}
	got, err := dial.ReadGreeting(conn, wire.Magic)
	if err != nil {
		return fail(err)
	}
	if got != wire.Version {
		_, err := conn.Write(dial.Greeting(wire.Magic, wire.Version))
		return fail(errors.Join(fmt.Errorf("got protocol version %d, want %d", got, wire.Version), err))
	}
	if fd, err = dial.RawSocket(conn); err != nil {
		return fail(err)
	}
	return fd, pid, pidfd, nil
}

// peer returns the process ID and a pidfd of the process at the other end of conn. If this process belongs to
// another user, peer returns an error. If the kernel does not support pidfds, pidfd is nil.
func peer(conn *net.UnixConn) (pid int, pidfd *os.File, err error) {
	control, err := conn.SyscallConn()
	if err != nil {
		return 0, nil, err
	}
	var failed error
	err = control.Control(func(fd uintptr) {
		var cred *unix.Ucred
		if cred, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); failed != nil {
			return
		}
		if pid = int(cred.Pid); int(cred.Uid) != os.Geteuid() {
			failed = fmt.Errorf("refused: the client runs as user %d, want %d", cred.Uid, os.Geteuid())
			return
		}
		pidfd, failed = openPidfd(int(fd), pid)
	})
	return pid, pidfd, errors.Join(err, failed)
}

// openPidfd returns a pidfd for the process at the other end of the socket fd. If the kernel supports no
// pidfds, it returns nil. If the kernel can return the pidfd from the socket, openPidfd uses that one,
// because it is correct even if the process ID pid was reused.
func openPidfd(fd, pid int) (*os.File, error) {
	p, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PEERPIDFD)
	if err == unix.ENOPROTOOPT { // the kernel is older than Linux 6.5
		p, err = unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	}
	switch {
	case err == unix.ENOSYS || err == unix.EPERM || err == unix.EINVAL && pid == 0:
		// Without a pidfd, the sidecar notices the end of the process only by the end of the connection.
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("open a pidfd of the client: %w", err)
	}
	if err := unix.SetNonblock(p, true); err != nil {
		return nil, errors.Join(err, unix.Close(p))
	}
	return os.NewFile(uintptr(p), "pidfd"), nil
}
