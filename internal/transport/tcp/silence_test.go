package tcp

import (
	"bytes"
	"errors"
	"io"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

// livingMeshes returns the meshes of ranks 0 and 1, with the given limit of silence.
func livingMeshes(t *testing.T, key secret.Secret, limit time.Duration) (zero, one *Mesh) {
	t.Helper()
	cfg := Config{Secret: key, LivenessTimeout: limit}
	endpoints := []*Endpoint{listen(t, cfg), listen(t, cfg)}
	addrs := addrsOf(endpoints...)
	return join(t, endpoints[0], Epoch{Rank: 0, Addrs: addrs}),
		join(t, endpoints[1], Epoch{Rank: 1, Addrs: addrs})
}

// cutConn makes all packets that arrive at c be lost.
func cutConn(t *testing.T, c *conn) {
	t.Helper()
	local, remote := c.sock.LocalAddr().String(), c.sock.RemoteAddr().String()
	n, err := testnet.Cut(func(o testnet.Connection) bool {
		return o.Local.String() == local && o.Remote.String() == remote
	})
	if err != nil || n != 1 {
		t.Fatalf("cut %d connections: %v", n, err)
	}
}

// TestSilentCut cuts connections, so that packets are lost without an error. Calls at both ends that wait for
// such a connection must fail, whatever they wait for. Other connections must not fail.
func TestSilentCut(t *testing.T) { overBoth(t, testSilentCut) }

func testSilentCut(t *testing.T, key secret.Secret) {
	t.Parallel()
	read := func(c *conn) error {
		_, err := io.Copy(io.Discard, c)
		return err
	}
	poll := func(c *conn) error { // as a backend that does not wait in the kernel
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for range tick.C {
			if _, err := c.TryRead(make([]byte, 1)); err != nil {
				return err
			}
		}
		return nil
	}
	zero, one := livingMeshes(t, key, time.Second)
	control, controlled := pair(t, zero, one, transport.Control)
	other, otherEnd := pair(t, zero, one, 100)
	type result struct {
		what string
		lane transport.Lane
		peer topo.Rank
		err  error
	}
	failed := make(chan result, 12)
	calls := 0
	for i, c := range []struct {
		name          string
		before        int // bytes that rank 0 sends before the cut
		after         int // bytes that rank 0 sends after the cut
		oneWay        bool
		atZero, atOne func(c *conn) error
	}{
		{"idle", 0, 0, false, read, read},
		{"data in flight", 0, 1, false, read, read},
		{"one direction is cut", 0, 1, true, read, read},
		{"polled", 0, 1, false, poll, poll},
		{"a long queue", 0, 32 << 20, false, (*conn).Flush, read},
		{"the window is closed", 32 << 20, 0, false, (*conn).Flush, read},
	} {
		lane := transport.Lane(1 + i)
		a, b := pair(t, zero, one, lane)
		if err := a.Send(make([]byte, c.before)); err != nil {
			t.Fatal(err)
		}
		cutConn(t, a)
		if !c.oneWay {
			cutConn(t, b)
		}
		if err := a.Send(make([]byte, c.after)); err != nil {
			t.Fatal(err)
		}
		go func() { failed <- result{c.name, lane, 1, c.atZero(a)} }()
		go func() { failed <- result{c.name, lane, 0, c.atOne(b)} }()
		calls += 2
	}
	for late := time.After(hangTimeout); calls > 0; calls-- {
		select {
		case r := <-failed:
			wantPeer(t, r.err, r.lane, r.peer)
			if _, ok := errors.AsType[*dial.SilenceError](r.err); !ok {
				t.Errorf("%s: the connection to rank %d has failed with %v, want a SilenceError", r.what,
					r.peer, r.err)
			}
		case <-late:
			t.Fatalf("%d calls wait forever", calls)
		}
	}
	pass(t, other, otherEnd)
	pass(t, control, controlled)
}

// TestPeerThatDoesNotRead checks that a connection to a living rank that does not read for several limits
// does not fail, and loses nothing.
func TestPeerThatDoesNotRead(t *testing.T) { overBoth(t, testPeerThatDoesNotRead) }

func testPeerThatDoesNotRead(t *testing.T, key secret.Secret) {
	t.Parallel()
	const limit = time.Second
	zero, one := livingMeshes(t, key, limit)
	a, b := pair(t, zero, one, 1)
	want := bytes.Repeat([]byte("0123456789abcdef"), 2<<20)
	if err := a.Send(want); err != nil {
		t.Fatal(err)
	}
	time.Sleep(4 * limit) // the kernel counts this time, so a test cannot fake it
	got, buf := 0, make([]byte, 1<<20)
	for got < len(want) {
		n, err := b.Read(buf)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(buf[:n], want[got:got+n]) {
			t.Fatalf("the bytes from %d on have changed", got)
		}
		got += n
	}
	if err := a.Flush(); err != nil {
		t.Error(err)
	}
}
