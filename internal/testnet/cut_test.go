package testnet_test

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/testnet"
)

// TestCut checks that a cut connection loses what arrives, and that other connections do not.
func TestCut(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	var near, far [2]net.Conn
	for i := range near {
		if near[i], err = net.Dial("tcp", ln.Addr().String()); err != nil {
			t.Fatal(err)
		}
		defer near[i].Close()
		if far[i], err = ln.Accept(); err != nil {
			t.Fatal(err)
		}
		defer far[i].Close()
	}
	again, err := near[0].(*net.TCPConn).File() // a second descriptor of the same connection
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	port := func(a net.Addr) netip.AddrPort { return a.(*net.TCPAddr).AddrPort() }
	for i := range near {
		for _, c := range []net.Conn{near[i], far[i]} {
			is := func(o testnet.Connection) bool {
				return o.Local == port(c.LocalAddr()) && o.Remote == port(c.RemoteAddr())
			}
			if all, err := testnet.Connections(); err != nil || !slices.ContainsFunc(all, is) {
				t.Errorf("the connections %v, %v lack %v", all, err, c)
			}
			if i == 0 {
				if n, err := testnet.Cut(is); n != 1 || err != nil {
					t.Fatalf("cut %d connections, %v", n, err)
				}
			}
		}
	}
	got := make([]byte, 4)
	for i := range near {
		if _, err := near[i].Write([]byte("data")); err != nil {
			t.Error(err)
		}
	}
	if _, err := far[1].Read(got); err != nil || string(got) != "data" {
		t.Errorf("the other connection: got %q, %v", got, err)
	}
	near[0].Close() // the end of the stream does not arrive either
	if err := far[0].SetReadDeadline(time.Now().Add(100 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if n, err := far[0].Read(got); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the cut connection: got %d bytes, %v", n, err)
	}
}
