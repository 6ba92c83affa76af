package dial_test

import (
	"context"
	"crypto/rand"
	"net"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/secret"
)

// TestUnix serves and dials a Unix socket in the abstract namespace.
func TestUnix(t *testing.T) {
	name := "@gohvd-test-" + rand.Text()
	serve := func(_ context.Context, conn net.Conn, slot *dial.Slot) error {
		slot.Release()
		if _, err := dial.ReadGreeting(conn, "GHVX"); err != nil {
			return err
		}
		_, err := conn.Write(dial.Greeting("GHVX", 1))
		return err
	}
	a, err := dial.Serve(dial.UnixPrefix+name, "test", 1, nil, serve)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	if a.Addr() != name {
		t.Errorf("the address is %q, want %q", a.Addr(), name)
	}
	conn, err := dial.Greet(t.Context(), dial.UnixPrefix+a.Addr(), secret.Secret{}, "GHVX", 1)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if network := conn.RemoteAddr().Network(); !strings.HasPrefix(network, "unix") {
		t.Errorf("the network is %q", network)
	}
}
