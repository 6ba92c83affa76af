package dial

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"syscall"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/logs"
	"github.com/gohvd/gohvd/internal/secret"
)

// SameUser returns a Handler that calls handle. If s is zero, so that clients cannot prove a secret, the
// Handler refuses processes of other users of this host, except root. It does not refuse clients on other
// hosts. If the kernel cannot tell the user of a client, the Handler logs a warning and serves the client.
func SameUser(s secret.Secret, log *zap.Logger, handle Handler) Handler {
	if !s.IsZero() {
		return handle
	}
	log = logs.Quiet(log)
	return func(ctx context.Context, conn net.Conn, slot *Slot) error {
		uid, known, err := user(conn)
		switch me := os.Geteuid(); {
		case errors.Is(err, errUserUnknown):
			log.Warn("a server without a secret also serves processes of other users of this host", zap.Error(err))
		case err != nil:
			slot.Release()
			return err
		case known && uid != 0 && int64(uid) != int64(me):
			slot.Release()
			return fmt.Errorf("refused: the client runs as user %d, want %d or root", uid, me)
		}
		return handle(ctx, conn, slot)
	}
}

var (
	// errUserUnknown reports that the kernel cannot tell the user of a socket.
	errUserUnknown = errors.New("the kernel does not tell the user of a client")
	// errClosed reports that the peer of a connection has closed its socket, so that its user is unknown.
	errClosed = fmt.Errorf("refused: the client has already closed the connection: %w", io.EOF)
	// errHidden reports that the kernel does not find the socket of a process of this host. A process hides
	// its socket if it binds it to a network interface.
	errHidden = errors.New("refused: the client is a process of this host, and the kernel does not tell its user")
)

// user returns the user of the process at the other end of a connection, if the process is on this host.
// Otherwise known is false.
func user(conn net.Conn) (uid uint32, known bool, err error) {
	if u, ok := conn.(*net.UnixConn); ok {
		uid, err = unixUser(u)
		return uid, true, err
	}
	own, ok := addrPort(conn.LocalAddr())
	peer, isTCP := addrPort(conn.RemoteAddr())
	if !ok || !isTCP {
		return 0, false, nil
	}
	uid, known, err = socketUser(peer, own)
	if err != nil || known {
		return uid, known, err
	}
	if here, err := isHere(peer.Addr()); err != nil || !here {
		return 0, false, err
	}
	state, err := tcpState(conn)
	switch {
	case err != nil:
		return 0, false, err
	case state == unix.BPF_TCP_CLOSE || state == unix.BPF_TCP_CLOSE_WAIT:
		return 0, false, errClosed
	case peer.Addr().IsLinkLocalUnicast(): // the kernel finds neither end
		return 0, false, errHidden
	}
	if _, known, err = socketUser(own, peer); err == nil && !known {
		return 0, false, fmt.Errorf("%w: it does not find this end of the connection either", errUserUnknown)
	}
	return 0, false, errors.Join(errHidden, err)
}

// isHere reports whether a is an address of this host.
func isHere(a netip.Addr) (bool, error) {
	if a.IsLoopback() {
		return true, nil
	}
	all, err := net.InterfaceAddrs()
	if err != nil {
		return false, fmt.Errorf("find out whether the client is on this host: %w", err)
	}
	return slices.ContainsFunc(all, func(own net.Addr) bool {
		ip, ok := own.(*net.IPNet)
		return ok && ip.IP.Equal(a.WithZone("").AsSlice())
	}), nil
}

// tcpState returns the state of a TCP connection.
func tcpState(conn net.Conn) (state uint8, err error) {
	c, ok := conn.(syscall.Conn)
	if !ok {
		return 0, fmt.Errorf("get the state of a connection: it is a %T", conn)
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	var info *unix.TCPInfo
	failed := raw.Control(func(fd uintptr) {
		info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
	})
	if err = errors.Join(failed, err); err != nil {
		return 0, fmt.Errorf("get the state of a connection: %w", err)
	}
	return info.State, nil
}

// diagError returns the error of a system call of sock_diag. It wraps errUserUnknown only if this kernel
// never tells the user of a socket, or not to this process. So a client is not served because this process
// has no descriptors or no memory left at the moment.
func diagError(call string, err error) error {
	for _, never := range []error{unix.EPROTONOSUPPORT, unix.EAFNOSUPPORT, unix.EPERM, unix.EACCES,
		unix.EOPNOTSUPP, unix.ENOSYS} {
		if errors.Is(err, never) {
			return fmt.Errorf("%w: %w", errUserUnknown, os.NewSyscallError(call, err))
		}
	}
	return fmt.Errorf("refused: the user of the client cannot be found out: %w", os.NewSyscallError(call, err))
}

// CheckUser returns an error if the process at the other end of a Unix connection runs as another user than
// this process. The end that has dialed learns the user of the process that listens.
func CheckUser(conn *net.UnixConn) error { return checkUser(conn, false) }

// CheckUserOrRoot is like CheckUser, but root may run the process too.
func CheckUserOrRoot(conn *net.UnixConn) error { return checkUser(conn, true) }

func checkUser(conn *net.UnixConn, orRoot bool) error {
	uid, err := unixUser(conn)
	if err != nil {
		return fmt.Errorf("get the user of the peer process: %w", err)
	}
	if own := uint32(os.Geteuid()); uid != own && !(orRoot && uid == 0) {
		return fmt.Errorf("the peer process runs as user %d, want user %d, the user of this process", uid, own)
	}
	return nil
}

func unixUser(conn *net.UnixConn) (uid uint32, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	failed := raw.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err = errors.Join(failed, err); err != nil {
		return 0, err
	}
	return cred.Uid, nil
}

// RawSocket returns a descriptor for the socket of conn in blocking mode, which Go's poller does not watch.
// It closes conn, also after an error.
func RawSocket(conn *net.UnixConn) (int, error) {
	fd, failed := -1, error(nil)
	control, err := conn.SyscallConn()
	if err == nil {
		err = control.Control(func(of uintptr) { fd, failed = unix.FcntlInt(of, unix.F_DUPFD_CLOEXEC, 0) })
	}
	// conn and fd share the blocking mode. So conn is closed, which removes the socket from the poller,
	// before the mode is changed.
	if err = errors.Join(err, failed, conn.Close()); err == nil {
		err = unix.SetNonblock(fd, false)
	}
	if err != nil && fd >= 0 {
		err = errors.Join(err, unix.Close(fd))
	}
	return fd, err
}

// addrPort returns the address in a, if it is a TCP address.
func addrPort(a net.Addr) (netip.AddrPort, bool) {
	tcp, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.AddrPort{}, false
	}
	p := tcp.AddrPort()
	return netip.AddrPortFrom(p.Addr().Unmap(), p.Port()), true
}

// These constants describe the messages of sock_diag for TCP sockets: struct inet_diag_req_v2 and struct
// inet_diag_msg of linux/inet_diag.h, each after a struct nlmsghdr.
const (
	diagByFamily   = 20
	diagRequest    = unix.SizeofNlMsghdr + 56
	diagRequestID  = unix.SizeofNlMsghdr + 8
	diagReply      = unix.SizeofNlMsghdr + 72
	diagReplyUser  = unix.SizeofNlMsghdr + 64
	diagReplyInode = unix.SizeofNlMsghdr + 68
)

// socketUser returns the user of the TCP socket of this host with the address own that is connected to peer.
// If there is no such socket, known is false. If the process of the socket has closed it, the error wraps
// errClosed.
func socketUser(own, peer netip.AddrPort) (uid uint32, known bool, err error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return 0, false, diagError("socket", err)
	}
	defer unix.Close(fd)
	q := make([]byte, diagRequest)
	binary.NativeEndian.PutUint32(q, diagRequest)
	binary.NativeEndian.PutUint16(q[4:], diagByFamily)
	binary.NativeEndian.PutUint16(q[6:], unix.NLM_F_REQUEST)
	q[unix.SizeofNlMsghdr], q[unix.SizeofNlMsghdr+1] = unix.AF_INET6, unix.IPPROTO_TCP
	if own.Addr().Is4() {
		q[unix.SizeofNlMsghdr] = unix.AF_INET
	}
	binary.NativeEndian.PutUint32(q[unix.SizeofNlMsghdr+4:], ^uint32(0)) // any state
	id := q[diagRequestID:]
	binary.BigEndian.PutUint16(id, own.Port())
	binary.BigEndian.PutUint16(id[2:], peer.Port())
	copy(id[4:20], own.Addr().AsSlice())
	copy(id[20:36], peer.Addr().AsSlice())
	binary.NativeEndian.PutUint64(id[40:], ^uint64(0)) // any cookie
	if err := unix.Sendto(fd, q, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return 0, false, diagError("sendto", err)
	}
	// The kernel has put the answer into the socket before sendto returned.
	var a [1024]byte
	n, _, err := unix.Recvfrom(fd, a[:], unix.MSG_DONTWAIT)
	if err != nil {
		return 0, false, diagError("recvfrom", err)
	}
	switch kind := binary.NativeEndian.Uint16(a[4:]); {
	case kind == unix.NLMSG_ERROR && n >= unix.SizeofNlMsghdr+4:
		err := unix.Errno(-int32(binary.NativeEndian.Uint32(a[unix.SizeofNlMsghdr:])))
		if err != unix.ENOENT {
			return 0, false, diagError("sock_diag", err)
		}
		return 0, false, nil
	case kind != diagByFamily || n < diagReply:
		return 0, false, fmt.Errorf("%w: got a message of type %d with %d bytes", errUserUnknown, kind, n)
	case binary.NativeEndian.Uint32(a[diagReplyInode:]) == 0:
		return 0, false, errClosed // the kernel gives user 0 to a socket that no process has
	}
	return binary.NativeEndian.Uint32(a[diagReplyUser:]), true, nil
}
