package dial

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/testnet"
)

// connectVariable makes the test binary connect to an address, write "hello" and wait for the end of its
// input. If it begins with "close ", the binary closes the connection before, and if it begins with "reset ",
// it resets the connection. If it begins with "bound " and the name of an interface, the socket is bound to
// that.
const connectVariable = "GOHVD_TEST_CONNECT"

func TestMain(m *testing.M) {
	if addr := os.Getenv(connectVariable); addr != "" {
		os.Exit(connect(addr))
	}
	os.Exit(m.Run())
}

func connect(addr string) (status int) {
	addr, closes := strings.CutPrefix(addr, "close ")
	addr, resets := strings.CutPrefix(addr, "reset ")
	device := ""
	rest, bound := strings.CutPrefix(addr, "bound ")
	if bound {
		device, addr, _ = strings.Cut(rest, " ")
	}
	var conn net.Conn
	var err error
	if bound {
		d := net.Dialer{Control: func(_, _ string, c syscall.RawConn) (err error) {
			failed := c.Control(func(fd uintptr) { err = unix.BindToDevice(int(fd), device) })
			return errors.Join(failed, err)
		}}
		conn, err = d.Dial("tcp", addr)
	} else {
		conn, err = Connect(context.Background(), addr)
	}
	if err == nil {
		_, err = io.WriteString(conn, "hello")
	}
	if resets && err == nil {
		err = conn.(*net.TCPConn).SetLinger(0)
	}
	if err != nil {
		return 1
	}
	if closes || resets {
		conn.Close()
	}
	os.Stdout.WriteString("connected\n")
	io.Copy(io.Discard, os.Stdin)
	return 0
}

// visit starts a process of the user uid that connects to ln, and returns the accepted connection.
func visit(t *testing.T, ln net.Listener, uid uint32, prefix string) net.Conn {
	t.Helper()
	// Other users may not enter the folder of the test binary.
	binary := testnet.Self(t)
	file, err := os.Open(binary)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	cmd := exec.Command("/proc/self/fd/3")
	cmd.ExtraFiles = []*os.File{file}
	addr := ln.Addr().String()
	if ln.Addr().Network() == "unix" {
		addr = UnixPrefix + addr
	}
	cmd.Env = append(os.Environ(), connectVariable+"="+prefix+addr)
	cmd.Dir = "/"
	if uid != 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	})
	if _, err := io.ReadFull(out, make([]byte, len("connected\n"))); err != nil {
		t.Fatal(err)
	}
	conn, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// device returns the name of the interface that has the address of ln.
func device(t *testing.T, ln net.Listener) string {
	t.Helper()
	all, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	at := ln.Addr().(*net.TCPAddr)
	for _, i := range all {
		own, err := i.Addrs()
		if err != nil {
			t.Fatal(err)
		}
		if slices.ContainsFunc(own, func(a net.Addr) bool {
			ip, ok := a.(*net.IPNet)
			return ok && ip.IP.Equal(at.IP)
		}) {
			return i.Name
		}
	}
	return "lo"
}

// SameUser refuses processes of other users, and connections that the peer has closed, over both versions of
// IP and over Unix sockets.
func TestSameUser(t *testing.T) {
	errServed := errors.New("served")
	serve := SameUser(secret.Secret{}, nil, func(_ context.Context, _ net.Conn, slot *Slot) error {
		slot.Release()
		return errServed
	})
	var linkLocal []string
	addrs := []string{"127.0.0.1:0", "[::1]:0", "[::]:0", "unix:@gohvd-test-" + rand.Text()}
	own, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range own {
		if ip, ok := a.(*net.IPNet); ok && ip.IP.IsGlobalUnicast() {
			addrs = append(addrs, net.JoinHostPort(ip.IP.String(), "0"))
		}
	}
	all, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range all {
		own, err := i.Addrs()
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range own {
			if ip, ok := a.(*net.IPNet); ok && ip.IP.IsLinkLocalUnicast() && i.Flags&net.FlagUp != 0 {
				linkLocal = append(linkLocal, net.JoinHostPort(ip.IP.String()+"%"+i.Name, "0"))
			}
		}
	}
	for _, addr := range slices.Concat(addrs, linkLocal) {
		t.Run(addr, func(t *testing.T) {
			ln, err := Listen(addr)
			if err != nil {
				t.Skip(err)
			}
			defer ln.Close()
			check := func(uid uint32, prefix string) error {
				conn, slots := visit(t, ln, uid, prefix), NewLimiter(1)
				err := serve(t.Context(), conn, slots.Acquire(conn))
				if slots.slots.Len() > 0 {
					t.Error("the slot was not released")
				}
				return err
			}
			if slices.Contains(linkLocal, addr) {
				if err := check(0, "bound "+device(t, ln)+" "); err != errServed {
					testnet.WantError(t, err, errHidden.Error())
				}
				if os.Geteuid() == 0 {
					testnet.WantError(t, check(65534, "bound "+device(t, ln)+" "), "refused: the client")
				}
				return
			}
			if err := check(0, ""); err != errServed {
				t.Error(err)
			}
			if !strings.HasPrefix(addr, UnixPrefix) { // a Unix socket keeps its user
				for _, ending := range []string{"close ", "reset "} {
					if err := check(0, ending); !errors.Is(err, io.EOF) {
						t.Errorf("%s: got %v, want EOF", ending, err)
					}
				}
				if err := check(0, "bound "+device(t, ln)+" "); err != errServed {
					testnet.WantError(t, err, errHidden.Error())
				}
			}
			if os.Geteuid() != 0 {
				t.Skip("only root can start a process of another user")
			}
			testnet.WantError(t, check(65534, ""), "the client runs as user 65534, want 0 or root")
			if !strings.HasPrefix(addr, UnixPrefix) {
				testnet.WantError(t, check(65534, "bound "+device(t, ln)+" "), "refused: the client")
			}
		})
	}
}
