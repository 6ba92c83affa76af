package tcp

import (
	"bytes"
	"errors"
	"io"
	"net"
	"runtime"
	"slices"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

// tappedListener is a listener that records all bytes that it receives from dialers. If spoil is set, it also
// changes some of them.
type tappedListener struct {
	net.Listener
	mu    sync.Mutex
	heard []byte
	spoil bool
}

func (l *tappedListener) Accept() (net.Conn, error) {
	nc, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	inner, outer, err := socketPair()
	if err != nil {
		return nil, err
	}
	go l.forward(outer, nc)
	go func() {
		io.Copy(nc, outer)
		hangUp(nc)
	}()
	return inner, nil
}

func (l *tappedListener) forward(to, from net.Conn) {
	defer hangUp(to)
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		if err != nil {
			return
		}
		l.mu.Lock()
		l.heard = append(l.heard, buf[:n]...)
		if l.spoil {
			buf[n-1] ^= 1
		}
		l.mu.Unlock()
		if _, err := to.Write(buf[:n]); err != nil {
			return
		}
	}
}

// socketPair returns the two ends of a TCP connection on loopback.
func socketPair() (a, b net.Conn, err error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, nil, err
	}
	defer ln.Close()
	if a, err = net.Dial("tcp", ln.Addr().String()); err != nil {
		return nil, nil, err
	}
	b, err = ln.Accept()
	return a, b, err
}

// TestWire checks that the bytes of a tensor appear on the wire of a plain connection, but not on the wire of
// an encrypted connection. A message may be sent in one piece, in many pieces, or in a batch of the writer.
// If a byte is changed on the way, the receiver of an encrypted connection must get an error.
func TestWire(t *testing.T) {
	const pattern = "-0123456789abcdef-" // every message repeats this pattern
	overBoth(t, func(t *testing.T, key secret.Secret) {
		ln := testnet.Listen(t)
		tap := &tappedListener{Listener: ln}
		e0, e1 := listen(t, Config{Secret: key}), newEndpoint(Config{Secret: key}, tap)
		t.Cleanup(func() { e1.Close() })
		a, b := pair(t, join(t, e0, Epoch{Addrs: addrsOf(e0, e1)}),
			join(t, e1, Epoch{Rank: 1, Addrs: addrsOf(e0, e1)}), 1)
		var want []byte
		for _, n := range []int{1, 100, recordBytes / 18, recordBytes/18 + 1, 3 * recordBytes / 18,
			maxBatchBytes / 18, 2 * maxBatchBytes / 18} {
			p := bytes.Repeat([]byte(pattern), n)
			for range 3 {
				want = append(want, p...)
				if err := a.Send(p); err != nil {
					t.Fatal(err)
				}
			}
		}
		got := make([]byte, len(want))
		if _, err := io.ReadFull(b, got); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("the bytes that arrived differ from those that were sent: %v", err)
		}
		if err := a.Flush(); err != nil || a.Sent() != uint64(len(want)) {
			t.Errorf("%d bytes are sent, %v, want %d", a.Sent(), err, len(want))
		}
		tap.mu.Lock()
		if found := bytes.Contains(tap.heard, []byte(pattern)); found != key.IsZero() {
			t.Errorf("%d bytes were heard, with the pattern: %v", len(tap.heard), found)
		}
		tap.spoil = true
		tap.mu.Unlock()
		if err := errors.Join(a.Send([]byte(pattern)), a.Flush()); err != nil {
			t.Fatal(err)
		}
		_, err := io.ReadFull(b, got[:len(pattern)])
		if key.IsZero() {
			return
		}
		wantPeer(t, err, 1, 0)
		_, again := b.Read(got)
		wantPeer(t, again, 1, 0)
	})
}

// TestRecordsAreShared checks that several small messages share one TLS record. Otherwise each message would
// need a system call of its own.
func TestRecordsAreShared(t *testing.T) {
	for _, test := range []struct {
		pieces  []int
		records []int
	}{
		{[]int{10}, []int{10}},
		{[]int{10, 20, 30}, []int{60}},
		{[]int{recordBytes}, []int{recordBytes}},
		{[]int{recordBytes + 1}, []int{recordBytes, 1}},
		{[]int{recordBytes - 1, 2}, []int{recordBytes, 1}},
		{[]int{1, 2 * recordBytes}, []int{recordBytes, recordBytes, 1}},
		{[]int{3, recordBytes - 3, 5}, []int{recordBytes, 5}},
	} {
		w := new(recorder)
		c := &conn{over: w, out: new(recordBuffer), record: make([]byte, 0, recordBytes)}
		var want []byte
		for _, n := range test.pieces {
			p := bytes.Repeat([]byte{byte(n)}, n)
			c.batch, want = append(c.batch, p), append(want, p...)
		}
		if err := c.writeRecords(); err != nil {
			t.Fatal(err)
		}
		var got []int
		for _, r := range w.records {
			if len(r) > 0 {
				got = append(got, len(r))
			}
		}
		if !slices.Equal(got, test.records) || !bytes.Equal(bytes.Join(w.records, nil), want) ||
			c.Sent() != uint64(len(want)) {
			t.Errorf("pieces of %v: got records of %v, want %v; sent %d", test.pieces, got, test.records,
				c.Sent())
		}
	}
}

type recorder struct {
	net.Conn // nil, because the test calls only Write
	records  [][]byte
}

func (r *recorder) Write(b []byte) (int, error) {
	r.records = append(r.records, bytes.Clone(b))
	return len(b), nil
}

// TestEncryptedSendDoesNotWait checks that Send does not wait if a peer does not read or has not completed
// the handshake. The count of Sent must rise while a large buffer is being written.
func TestEncryptedSendDoesNotWait(t *testing.T) {
	zero, one := twoRanks(t, encrypted())
	a, b := pair(t, zero, one, 1)
	large := make([]byte, 64<<20)
	if err := a.Send(large); err != nil {
		t.Fatal(err)
	}
	testnet.Eventually(t, "the socket takes a part", func() bool { return a.Sent() > 0 })
	if got := a.Sent(); got == uint64(len(large)) {
		t.Fatalf("the kernel took all %d bytes", got)
	}
	if _, err := io.CopyN(io.Discard, b, 32<<20); err != nil {
		t.Fatal(err)
	}
	testnet.Eventually(t, "the socket takes more", func() bool { return a.Sent() >= 32<<20 })
	zero.Abort(1, errors.New("enough"))
	if err := a.Flush(); err == nil || err.Error() != "enough" {
		t.Errorf("flush got %v", err)
	}
}

// TestEncryptedSteadyState checks that with encryption this package allocates nothing for a message once the
// first messages were sent.
func TestEncryptedSteadyState(t *testing.T) {
	zero, one := twoRanks(t, encrypted())
	a, b := pair(t, zero, one, 1)
	buf, got := make([]byte, 100<<10), make([]byte, 100<<10)
	if n := testing.AllocsPerRun(500, func() {
		if err := a.Send(buf); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(b, got); err != nil {
			t.Fatal(err)
		}
		if err := a.Flush(); err != nil {
			t.Fatal(err)
		}
	}); n > 10 { // crypto/tls itself allocates once for each record
		t.Errorf("%v allocations per message of 7 records", n)
	} else {
		t.Logf("%v allocations per message", n)
	}
}

// underTLS returns an encrypted channel of rank 1, and rank 0's end of the connection below TLS.
func underTLS(t *testing.T) (c transport.Conn, raw net.Conn) {
	t.Helper()
	key := encrypted()
	e0, e1 := listen(t, Config{Secret: key}), listen(t, Config{Secret: key})
	raw = dialRaw(t, e1.Addr(), nil)
	over := sendAs(t, key, raw, goodHello(1).encode())
	one := join(t, e1, Epoch{Rank: 1, Addrs: addrsOf(e0, e1)})
	c, err := one.Conn(testnet.Context(t), 1, topo.Rank(0))
	if err != nil {
		t.Fatal(err)
	}
	if err := readAnswer(over); err != nil {
		t.Fatal(err)
	}
	return c, raw
}

// TestCutInARecord lets a peer that knows the secret close its connection in the middle of a record. Read
// must report a lost peer, not the end of the stream.
func TestCutInARecord(t *testing.T) {
	c, raw := underTLS(t)
	if _, err := raw.Write([]byte{23, 3, 3, 0x40, 0, 1, 2, 3}); err != nil {
		t.Fatal(err)
	}
	hangUp(raw)
	var first error
	for range 2 {
		_, err := c.Read(make([]byte, 1))
		wantPeer(t, err, 1, 0)
		if !errors.Is(err, io.ErrUnexpectedEOF) || first != nil && err != first {
			t.Errorf("got %v, want %v each time", err, io.ErrUnexpectedEOF)
		}
		first = err
	}
}

// TestTamperingIsSeenWhileSending lets a rank read bytes that were changed on the way. The rank must get an
// error at once, even while its own bytes wait for a peer that does not read.
func TestTamperingIsSeenWhileSending(t *testing.T) {
	c, raw := underTLS(t)
	if err := c.Send(make([]byte, 64<<20)); err != nil {
		t.Fatal(err)
	}
	last := uint64(0)
	testnet.Eventually(t, "the writer waits", func() bool {
		before := last
		last = c.Sent()
		runtime.Gosched()
		return last > 1<<20 && last == before
	})
	if _, err := raw.Write(append([]byte{23, 3, 3, 0, 32}, make([]byte, 32)...)); err != nil {
		t.Fatal(err)
	}
	read := make(chan error, 1)
	go func() {
		_, err := c.Read(make([]byte, 1))
		read <- err
	}()
	select {
	case err := <-read:
		wantPeer(t, err, 1, 0)
	case <-testnet.Context(t).Done():
		t.Error("read waits for the peer")
	}
}

// TestTryReadEmptiesTheSocket checks that one TryRead returns the bytes of all records that have arrived,
// because a caller that gets fewer bytes than it has room for takes the channel for empty.
func TestTryReadEmptiesTheSocket(t *testing.T) {
	overBoth(t, func(t *testing.T, key secret.Secret) {
		zero, one := twoRanks(t, key)
		a, b := pair(t, zero, one, transport.Control)
		const messages = 3
		arrived := messages
		if !key.IsZero() {
			arrived *= 5 + 1 + 1 + 16 // of a record: header, message, type and tag
		}
		for i := range messages {
			if err := errors.Join(a.Send([]byte{byte(i)}), a.Flush()); err != nil {
				t.Fatal(err)
			}
		}
		testnet.Eventually(t, "the messages arrive", func() bool {
			n, err := b.sock.now(func(fd int, _ []byte) (int, error) {
				return unix.IoctlGetInt(fd, unix.TIOCINQ)
			}, nil)
			return err == nil && n >= arrived
		})
		got := make([]byte, 100)
		if n, err := b.TryRead(got); n != messages || err != nil {
			t.Errorf("got %d bytes, %v, want %d", n, err, messages)
		}
	})
}
