package testnet

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// Connection is an established TCP connection of this process.
type Connection struct {
	Local, Remote netip.AddrPort
	// Bytes is the number of bytes that the peer has acknowledged, plus those that have arrived.
	Bytes uint64
}

// Connections returns all established TCP connections of this process.
func Connections() (all []Connection, err error) {
	err = eachConnection(func(_ int, c Connection) error {
		all = append(all, c)
		return nil
	})
	return all, err
}

// Cut cuts the connections of this process for which the function match returns true: from now on, all
// packets that arrive for them are lost without an error, also acknowledgements and the end of the stream.
// Other connections between the same processes go on. To cut both directions, the process at the other end
// must call Cut too. Cut needs no privileges. It returns the number of connections that it has cut.
func Cut(match func(c Connection) bool) (n int, err error) {
	err = eachConnection(func(fd int, c Connection) error {
		if !match(c) {
			return nil
		}
		n++
		return cut(fd)
	})
	return n, err
}

// cut makes the kernel drop all segments that arrive at a socket. The kernel runs the filter of a TCP socket
// before it looks at acknowledgements.
func cut(fd int) error {
	drop := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K} // keep the first 0 bytes
	if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
		&unix.SockFprog{Len: 1, Filter: &drop}); err != nil {
		return fmt.Errorf("testnet: cut a connection: %w", os.NewSyscallError("setsockopt", err))
	}
	return nil
}

// eachConnection calls f once for each established TCP connection of this process, even if several
// descriptors refer to it. fd is a descriptor of it that is valid during the call.
func eachConnection(f func(fd int, c Connection) error) error {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return fmt.Errorf("testnet: list the connections: %w", err)
	}
	var errs []error
	seen := make(map[uint64]bool) // by inode
	for _, e := range entries {
		n, err := strconv.Atoi(e.Name())
		if err != nil {
			return fmt.Errorf("testnet: list the connections: %w", err)
		}
		// Use a duplicate, because another goroutine may close the descriptor and its number be used again.
		fd, err := unix.FcntlInt(uintptr(n), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			continue // it was closed in the meantime
		}
		var stat unix.Stat_t
		if c, ok := connectionOf(fd); ok && unix.Fstat(fd, &stat) == nil && !seen[stat.Ino] {
			seen[stat.Ino] = true
			errs = append(errs, f(fd, c))
		}
		errs = append(errs, unix.Close(fd))
	}
	return errors.Join(errs...)
}

// connectionOf describes the socket fd. It returns false if fd is not an established TCP connection.
func connectionOf(fd int) (c Connection, ok bool) {
	const established = 1 // TCP_ESTABLISHED in tcp_states.h
	info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil || info.State != established {
		return c, false
	}
	local, err := unix.Getsockname(fd)
	if err != nil {
		return c, false
	}
	remote, err := unix.Getpeername(fd)
	if err != nil {
		return c, false // it has just ended
	}
	return Connection{addrPort(local), addrPort(remote), info.Bytes_acked + info.Bytes_received}, true
}

// addrPort returns the address and the port of a TCP socket.
func addrPort(a unix.Sockaddr) netip.AddrPort {
	switch a := a.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(a.Addr).Unmap(), uint16(a.Port))
	}
	return netip.AddrPort{}
}
