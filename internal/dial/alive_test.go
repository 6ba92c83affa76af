package dial_test

import (
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/testnet"
)

// TestSilence checks on real connections that a Silence finds a connection whose packets are lost, and that
// it never finds one whose peer lives and does not read.
func TestSilence(t *testing.T) {
	const limit = 500 * time.Millisecond
	for _, c := range []struct {
		name string
		fill bool // whether the window of the far end is full before the cut
		send bool // whether the near end sends after the cut
		cut  bool
	}{
		{"alive and idle", false, false, false}, {"alive and full", true, false, false},
		{"cut and idle", false, false, true}, {"cut and full", true, false, true},
		{"cut while sending", false, true, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			near, far := connected(t)
			if c.fill {
				fill(t, near)
			}
			if c.cut {
				for _, end := range []*net.TCPConn{near, far} {
					cut(t, end)
				}
			}
			if c.send {
				if _, err := near.Write([]byte("lost")); err != nil {
					t.Fatal(err)
				}
			}
			raw, err := near.SyscallConn()
			if err != nil {
				t.Fatal(err)
			}
			s := dial.NewSilence(limit, zap.NewNop())
			ticker := time.NewTicker(dial.CheckPeriod(limit))
			defer ticker.Stop()
			late := time.After(time.Minute)
			// The kernel first probes an idle connection after a second, so 3 s are enough for three limits.
			for n := time.Duration(0); c.cut || n*dial.CheckPeriod(limit) < 3*time.Second; n++ {
				var now time.Time
				select {
				case now = <-ticker.C:
				case <-late:
					t.Fatal("the loss was not found within a minute")
				}
				var lost error
				if err := raw.Control(func(fd uintptr) { lost = s.Check(int(fd), now) }); err != nil {
					t.Fatal(err)
				}
				if _, ok := errors.AsType[*dial.SilenceError](lost); ok && c.cut {
					return
				}
				if lost != nil {
					t.Fatalf("after %d checks: %v", n, lost)
				}
			}
			near.Close()
			if _, err := io.Copy(io.Discard, far); err != nil {
				t.Errorf("the connection has failed: %v", err)
			}
		})
	}
}

// TestSilenceProbes checks that Check makes the kernel probe an idle connection, that it warns once if the
// kernel refuses, and that it reports errors of other system calls.
func TestSilenceProbes(t *testing.T) {
	near, _ := connected(t)
	raw, err := near.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		limit           time.Duration
		idle, intervals int
	}{
		{time.Second, 1, 1}, {10 * time.Second, 3, 2}, {time.Minute, 5, 8}, {1 << 62, 5, 32767},
	} {
		s := dial.NewSilence(c.limit, zap.NewNop())
		if err := raw.Control(func(fd uintptr) {
			if err := s.Check(int(fd), time.Now()); err != nil {
				t.Error(err)
			}
			for option, want := range map[int]int{unix.TCP_KEEPIDLE: c.idle,
				unix.TCP_KEEPINTVL: c.intervals} {
				got, err := unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, option)
				if err != nil || got != want {
					t.Errorf("with the limit %v, option %d is %d, %v, want %d", c.limit, option, got, err,
						want)
				}
			}
			on, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_KEEPALIVE)
			if err != nil || on != 1 {
				t.Errorf("keep-alives are %d, %v", on, err)
			}
		}); err != nil {
			t.Fatal(err)
		}
	}
	none := dial.NewSilence(time.Second, zap.NewNop())
	if err := none.Check(-1, time.Now()); !errors.Is(err, syscall.EBADF) {
		t.Errorf("without a descriptor: got %v", err)
	}
	// A UDP socket refuses the options of TCP, like a kernel that does not have them.
	udp, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer udp.Close()
	if raw, err = udp.SyscallConn(); err != nil {
		t.Fatal(err)
	}
	core, logged := observer.New(zap.WarnLevel)
	s := dial.NewSilence(time.Second, zap.New(core))
	for range 2 {
		if err := raw.Control(func(fd uintptr) { err = s.Check(int(fd), time.Now()) }); err != nil {
			t.Fatal(err)
		}
		if !errors.Is(err, syscall.EOPNOTSUPP) {
			t.Errorf("over UDP: got %v", err)
		}
	}
	if n := logged.FilterMessageSnippet("does not probe").Len(); n != 1 {
		t.Errorf("got %d warnings about probes in two checks, want 1", n)
	}
}

// connected returns both ends of a TCP connection.
func connected(t *testing.T) (near, far *net.TCPConn) {
	t.Helper()
	ln := testnet.Listen(t)
	defer ln.Close()
	a, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close() })
	b, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	return a.(*net.TCPConn), b.(*net.TCPConn)
}

// fill writes until the peer's window and the send buffer are full.
func fill(t *testing.T, c *net.TCPConn) {
	t.Helper()
	block := make([]byte, 1<<20)
	for {
		if err := c.SetWriteDeadline(time.Now().Add(300 * time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write(block); errors.Is(err, os.ErrDeadlineExceeded) {
			return
		} else if err != nil {
			t.Fatal(err)
		}
	}
}

// cut makes all packets that arrive at c be lost.
func cut(t *testing.T, c *net.TCPConn) {
	t.Helper()
	local, remote := c.LocalAddr().(*net.TCPAddr).AddrPort(), c.RemoteAddr().(*net.TCPAddr).AddrPort()
	n, err := testnet.Cut(func(o testnet.Connection) bool { return o.Local == local && o.Remote == remote })
	if err != nil || n != 1 {
		t.Fatalf("cut %d connections: %v", n, err)
	}
}
