package tcp

import (
	"bytes"
	"errors"
	"io"
	"net"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

// unattachedConns returns the number of connections that are not channels. Their handshake is not complete,
// or their lane was released.
func unattachedConns(e *Endpoint) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.unattached)
}

// TestReleaseWithoutReset checks that after Release all bytes that are already in the kernel still arrive.
// They must arrive even if the peer's socket cannot hold them all, if the rank that released has not read the
// peer's bytes, and if the peer sends more before it reads.
func TestReleaseWithoutReset(t *testing.T) { overBoth(t, testReleaseWithoutReset) }

func testReleaseWithoutReset(t *testing.T, key secret.Secret) {
	zero, one := twoRanks(t, key)
	a, b := pair(t, zero, one, 1)
	if err := errors.Join(b.Send([]byte("unread")), b.Flush()); err != nil {
		t.Fatal(err)
	}
	data := bytes.Repeat([]byte("0123456789"), 8<<20)
	if err := a.Send(data); err != nil {
		t.Fatal(err)
	}
	testnet.Eventually(t, "the kernel has taken something", func() bool { return a.Sent() > 1<<20 })
	zero.Release(1)
	if err := a.Flush(); !errors.Is(err, transport.ErrReleased) {
		t.Fatalf("flush: got error %v, want %v", err, transport.ErrReleased)
	}
	sent := int(a.Sent())
	if sent == len(data) {
		t.Fatalf("the kernel took all %d bytes", sent)
	}
	if err := errors.Join(b.Send(make([]byte, 1<<20)), b.Flush()); err != nil {
		t.Fatalf("send to a rank that released: %v", err)
	}
	got := make([]byte, len(data))
	n, err := io.ReadFull(b, got)
	// With encryption, the kernel may already have records that Sent does not count yet.
	if n < sent || key.IsZero() && n > sent || n > sent+2*maxUnwrittenBytes {
		t.Fatalf("got %d bytes, %v, and %d were sent", n, err, sent)
	}
	if !bytes.Equal(got[:n], data[:n]) {
		t.Error("wrong bytes")
	}
	_, err = b.Read(got)
	wantPeer(t, err, 1, 0)
	if !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("got error %v, want %v", err, io.ErrUnexpectedEOF)
	}
}

// TestReleaseKeepsNothing releases many lanes. The mesh must remember their numbers as a single run and keep
// nothing else. This must also hold for lanes on which the peer calls Conn only after this rank has released
// them.
func TestReleaseKeepsNothing(t *testing.T) { overBoth(t, testReleaseKeepsNothing) }

func testReleaseKeepsNothing(t *testing.T, key secret.Secret) {
	const lanes = 200
	zero, one := twoRanks(t, key)
	pair(t, zero, one, transport.Control)
	for id := transport.Lane(1); id <= lanes; id++ {
		if id%3 == 0 {
			one.Release(id) // rank 0 then connects after this release
		}
		c, err := zero.Conn(testnet.Context(t), id, 1)
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Send([]byte("x")); err != nil {
			t.Fatal(err)
		}
		one.Release(id)
		zero.Release(id)
	}
	for r, m := range []*Mesh{zero.(*Mesh), one.(*Mesh)} {
		testnet.Eventually(t, "all connections are closed", func() bool { return unattachedConns(m.e) == 0 })
		m.e.mu.Lock()
		if len(m.lanes) != 1 || m.lanes[transport.Control] == nil {
			t.Errorf("rank %d still has %d lanes, want the control lane only", r, len(m.lanes))
		}
		m.e.mu.Unlock()
	}
}

// TestLingerExpires releases a lane that the peer does not release. The connection must stay open until the
// linger timeout and must then be closed. If the peer only reads, it must receive all bytes and then the end
// of the stream.
func TestLingerExpires(t *testing.T) { overBoth(t, testLingerExpires) }

func testLingerExpires(t *testing.T, key secret.Secret) {
	e0, e1 := listen(t, Config{Secret: key, LingerTimeout: 20 * time.Millisecond}),
		listen(t, Config{Secret: key})
	zero := join(t, e0, Epoch{Addrs: addrsOf(e0, e1)})
	one := join(t, e1, Epoch{Rank: 1, Addrs: addrsOf(e0, e1)})
	a, b := pair(t, zero, one, 1)
	if err := errors.Join(a.Send([]byte("last words")), a.Flush()); err != nil {
		t.Fatal(err)
	}
	zero.Release(1)
	testnet.Eventually(t, "the connection is closed", func() bool { return unattachedConns(e0) == 0 })
	got := make([]byte, len("last words"))
	if _, err := io.ReadFull(b, got); err != nil || string(got) != "last words" {
		t.Errorf("got %q, %v", got, err)
	}
	_, err := b.Read(got)
	wantPeer(t, err, 1, 0)
	if !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("got error %v, want %v", err, io.ErrUnexpectedEOF)
	}
}

// TestCloseEndsLinger checks that Close does not wait for peers that have not released a lane, even if the
// linger timeout is an hour.
func TestCloseEndsLinger(t *testing.T) { overBoth(t, testCloseEndsLinger) }

func testCloseEndsLinger(t *testing.T, key secret.Secret) {
	e0, e1 := listen(t, Config{Secret: key, LingerTimeout: time.Hour}), listen(t, Config{Secret: key})
	zero := join(t, e0, Epoch{Addrs: addrsOf(e0, e1)})
	one := join(t, e1, Epoch{Rank: 1, Addrs: addrsOf(e0, e1)})
	pair(t, zero, one, 1)
	zero.Release(1)
	if got := unattachedConns(e0); got != 1 {
		t.Errorf("%d connections linger, want 1", got)
	}
	done := make(chan error, 1)
	go func() { done <- zero.Close() }()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-testnet.Context(t).Done():
		t.Fatal("close hangs")
	}
}

// TestReleaseEndsDial releases a lane while Conn waits for the peer to listen. Conn must return at once, and
// there must be no further attempt.
func TestReleaseEndsDial(t *testing.T) {
	log, book := newLog()
	e, gone := listen(t, Config{Log: log, DialTimeout: time.Hour}), listen(t, Config{})
	if err := gone.Close(); err != nil {
		t.Fatal(err)
	}
	m := join(t, e, Epoch{Addrs: addrsOf(e, gone)})
	before := runtime.NumGoroutine()
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, err := m.Conn(testnet.Context(t), 1, 1); !errors.Is(err, transport.ErrReleased) {
			t.Errorf("got error %v, want %v", err, transport.ErrReleased)
		}
	})
	book.wait(t, "tcp: connect failed", "error", "refused")
	m.Release(1)
	wg.Wait()
	testnet.Eventually(t, "the dial ends", func() bool { return runtime.NumGoroutine() <= before })
}

// TestReleaseDuringHandshake releases a lane during a handshake. The handshake must be completed, and then
// the connection must end gracefully.
func TestReleaseDuringHandshake(t *testing.T) {
	ln := testnet.Listen(t)
	defer ln.Close()
	e := listen(t, Config{})
	m := join(t, e, Epoch{Addrs: []string{e.Addr(), ln.Addr().String()}})
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		if _, err := m.Conn(testnet.Context(t), 7, 1); !errors.Is(err, transport.ErrReleased) {
			t.Errorf("got error %v, want %v", err, transport.ErrReleased)
		}
	})
	nc, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer hangUp(nc)
	if err := nc.SetDeadline(time.Now().Add(hangTimeout)); err != nil {
		t.Fatal(err)
	}
	if h, err := readHello(nc); err != nil || h != goodHello(7) {
		t.Fatalf("got hello %+v, %v, want %+v", h, err, goodHello(7))
	}
	m.Release(7)
	if _, err := nc.Write(append(encodeAnswer(accepted), "early data"...)); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(nc); err != nil || len(got) != 0 {
		t.Errorf("got %q, %v, want the end of the stream", got, err)
	}
	hangUp(nc)
	testnet.Eventually(t, "the connection is closed", func() bool { return unattachedConns(e) == 0 })
}

// TestReleaseOfReserved releases a lane during a handshake. The connection must belong to the released lane.
// It must not become a channel of the lane with the same number that is reserved after Release.
func TestReleaseOfReserved(t *testing.T) {
	e := listen(t, Config{})
	m := join(t, e, Epoch{Rank: 1, Addrs: addrsOf(e, e)})
	before, err := m.reserve(goodHello(3))
	if err != nil {
		t.Fatal(err)
	}
	m.Release(3)
	after, err := m.reserve(goodHello(3)) // it must be possible to reserve a released lane
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range []*lane{before, after} {
		ln, dialed := tcpPair(t)
		sock, err := newSocket(ln)
		if err != nil {
			t.Fatal(err)
		}
		if err := m.publish(l, newConn(&e.wg, l.id, topo.Rank(0), sock, sock)); err != nil {
			t.Fatal(err)
		}
		if got := untilClosed(t, dialed); len(got) != 0 {
			t.Errorf("got %q, want the end of the stream", got)
		}
		hangUp(dialed)
	}
	testnet.Eventually(t, "both connections are closed", func() bool { return unattachedConns(e) == 0 })
	if len(m.lanes) != 0 {
		t.Errorf("%d lanes are left, want none", len(m.lanes))
	}
}

// tcpPair returns the two ends of a TCP connection on loopback.
func tcpPair(t *testing.T) (accepted, dialed net.Conn) {
	t.Helper()
	ln := testnet.Listen(t)
	defer ln.Close()
	dialed = dialRaw(t, ln.Addr().String(), nil)
	accepted, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	return accepted, dialed
}
