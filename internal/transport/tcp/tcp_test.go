package tcp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/internal/transport/transporttest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// hangTimeout is the time after which a test concludes that a call hangs, and fails. A test that passes never
// waits so long.
const hangTimeout = time.Minute

// overBoth runs the function test twice: with plain connections without a secret, and with encrypted
// connections.
func overBoth(t *testing.T, test func(*testing.T, secret.Secret)) {
	t.Run("plain", func(t *testing.T) { test(t, secret.Secret{}) })
	t.Run("TLS", func(t *testing.T) { test(t, encrypted()) })
}

func encrypted() secret.Secret {
	key, _ := secret.New()
	return key.Encrypted()
}

// meshes returns one mesh for each of size ranks, which are connected over loopback.
func meshes(tb testing.TB, size int) []transport.Mesh { return meshesOf(tb, size, secret.Secret{}) }

// sealedMeshes is like meshes, but the connections use TLS.
func sealedMeshes(tb testing.TB, size int) []transport.Mesh { return meshesOf(tb, size, encrypted()) }

func meshesOf(tb testing.TB, size int, key secret.Secret) []transport.Mesh {
	endpoints := make([]*Endpoint, size)
	for r := range endpoints {
		endpoints[r] = listen(tb, Config{Secret: key})
	}
	all := make([]transport.Mesh, size)
	for r := range endpoints {
		all[r] = join(tb, endpoints[r], Epoch{Rank: topo.Rank(r), Addrs: addrsOf(endpoints...)})
	}
	return all
}

// listen opens an Endpoint on loopback. It is closed when the test ends.
func listen(tb testing.TB, cfg Config) *Endpoint {
	tb.Helper()
	if cfg.ListenAddr == "" {
		cfg.ListenAddr = "127.0.0.1:0"
	}
	e, err := Listen(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := e.Close(); err != nil {
			tb.Error(err)
		}
	})
	return e
}

func addrsOf(endpoints ...*Endpoint) []string {
	var addrs []string
	for _, e := range endpoints {
		addrs = append(addrs, e.Addr())
	}
	return addrs
}

// join calls Connect with ep and returns the Mesh. Fields of ep that are empty get default values.
func join(tb testing.TB, e *Endpoint, ep Epoch) *Mesh {
	tb.Helper()
	if ep.Job == "" {
		ep.Job = "test"
	}
	if ep.Epoch == 0 {
		ep.Epoch = 1
	}
	m, err := e.Connect(ep)
	if err != nil {
		tb.Fatal(err)
	}
	return m
}

// goodHello returns the hello with which rank 0 connects to rank 1 on the given lane, in the default epoch.
func goodHello(lane transport.Lane) hello {
	return hello{version: version, job: hashJob("test"), epoch: 1, from: 0, to: 1, lane: lane}
}

// pair connects ranks 0 and 1 on the given lane and returns both ends.
func pair(t *testing.T, zero, one transport.Mesh, lane transport.Lane) (a, b *conn) {
	t.Helper()
	x, err := zero.Conn(testnet.Context(t), lane, 1)
	if err != nil {
		t.Fatal(err)
	}
	y, err := one.Conn(testnet.Context(t), lane, 0)
	if err != nil {
		t.Fatal(err)
	}
	return x.(*conn), y.(*conn)
}

// pass sends a text at a and checks that it arrives at b.
func pass(t *testing.T, a, b transport.Conn) {
	t.Helper()
	if err := a.Send([]byte("still here")); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len("still here"))
	if _, err := io.ReadFull(b, got); err != nil || string(got) != "still here" {
		t.Fatalf("got %q, %v", got, err)
	}
}

// dialRaw opens a connection without a handshake and writes b to it.
func dialRaw(t *testing.T, addr string, b []byte) net.Conn {
	t.Helper()
	nc, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { hangUp(nc) })
	if err := nc.SetDeadline(time.Now().Add(hangTimeout)); err != nil {
		t.Fatal(err)
	}
	return sendAs(t, secret.Secret{}, nc, b)
}

// sendAs proves to the other end of nc that it knows key, and writes b. The other end may close the
// connection before it has read all of b.
func sendAs(t *testing.T, key secret.Secret, nc net.Conn, b []byte) net.Conn {
	t.Helper()
	over, err := key.Dial(nc, purpose)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := over.Write(b); err != nil && !errors.Is(err, syscall.EPIPE) &&
		!errors.Is(err, syscall.ECONNRESET) {
		t.Fatal(err)
	}
	return over
}

// untilClosed returns all bytes that arrive on nc before the other end closes it.
func untilClosed(t *testing.T, nc net.Conn) []byte {
	t.Helper()
	b, err := io.ReadAll(nc)
	if err != nil && !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("connection was not closed: %v", err)
	}
	return b
}

// patiently calls f with longer and longer timeouts until it returns nil, because on a busy machine a short
// timeout may end too early.
func patiently(t *testing.T, shortest time.Duration, f func(timeout time.Duration) error) {
	t.Helper()
	err := errors.New("no try")
	for timeout := shortest; err != nil && timeout < hangTimeout; timeout *= 4 {
		err = f(timeout)
	}
	if err != nil {
		t.Error(err)
	}
}

// logBook records log entries and lets a test wait for an entry.
type logBook struct {
	*observer.ObservedLogs
	mu    sync.Mutex
	wrote chan struct{} // closed and replaced when an entry is logged
}

func newLog() (*zap.Logger, *logBook) {
	core, logs := observer.New(zap.DebugLevel)
	book := &logBook{ObservedLogs: logs, wrote: make(chan struct{})}
	return zap.New(core, zap.Hooks(func(zapcore.Entry) error {
		book.mu.Lock()
		defer book.mu.Unlock()
		close(book.wrote)
		book.wrote = make(chan struct{})
		return nil
	})), book
}

// wait waits for an entry with the given message. The entry must have a field with the given name whose value
// contains text. wait returns all fields of the entry.
func (b *logBook) wait(t *testing.T, message, field, text string) map[string]any {
	t.Helper()
	for {
		b.mu.Lock()
		wrote := b.wrote
		b.mu.Unlock()
		for _, e := range b.FilterMessage(message).All() {
			if got, _ := e.ContextMap()[field].(string); strings.Contains(got, text) {
				return e.ContextMap()
			}
		}
		select {
		case <-wrote:
		case <-testnet.Context(t).Done():
			t.Fatalf("log has no %q with %q in %s: %v", message, text, field, b.All())
		}
	}
}

func TestContract(t *testing.T) {
	t.Run("plain", func(t *testing.T) { transporttest.Run(t, meshes) })
	t.Run("TLS", func(t *testing.T) { transporttest.Run(t, sealedMeshes) })
}

// TestRefusals connects processes that send something other than a good hello. Each must get the right
// answer, and the reason must be logged. Connections of real ranks must not be affected.
func TestRefusals(t *testing.T) { overBoth(t, testRefusals) }

func testRefusals(t *testing.T, key secret.Secret) {
	patiently(t, time.Second, func(timeout time.Duration) error { return tryRefusals(t, key, timeout) })
}

func tryRefusals(t *testing.T, key secret.Secret, timeout time.Duration) error {
	log, book := newLog()
	// The silent connections stay open for the timeout. During this time the deadlines of the handshakes of
	// the real ranks pass too. (The dialer's deadline is twice its timeout.) So the test fails if these
	// deadlines are still set after the handshake.
	e0 := listen(t, Config{Secret: key, HandshakeTimeout: timeout * 9 / 20})
	e1 := listen(t, Config{Secret: key, Log: log, HandshakeTimeout: timeout})
	zero := join(t, e0, Epoch{Rank: 0, Addrs: addrsOf(e0, e1)})
	one := join(t, e1, Epoch{Rank: 1, Addrs: addrsOf(e0, e1)})
	a, b := pair(t, zero, one, 1)

	but := func(change func(*hello)) []byte {
		h := goodHello(7)
		change(&h)
		return h.encode()
	}
	half := goodHello(7).encode()[:helloSize/2]
	cases := []struct {
		name   string
		sent   []byte
		finish bool    // end the outgoing stream after the bytes in sent
		answer Refusal // expected answer; accepted means no answer
		reason string
	}{
		{"garbage", bytes.Repeat([]byte("garbage!"), 1<<17), false, accepted,
			"begins with 0x67617262, want 0x67687664"},
		{"all ones", bytes.Repeat([]byte{0xff}, helloSize), false, accepted,
			"does not use the protocol of gohvd ranks"},
		{"magic then all ones", append(goodHello(7).encode()[:4], bytes.Repeat([]byte{0xff}, 1<<20)...),
			false, WrongVersion, "got 4294967295, want 1"},
		{"wrong version", but(func(h *hello) { h.version = 2 }), false, WrongVersion, "got 2, want 1"},
		{"wrong job", but(func(h *hello) { h.job = hashJob("another") }), false, WrongJob, "wrong job"},
		{"older epoch", but(func(h *hello) { h.epoch = 0 }), false, StaleEpoch,
			"rank 0 is in epoch 0, but this rank is in epoch 1"},
		{"newer epoch", but(func(h *hello) { h.epoch = 1 << 63 }), false, StaleEpoch,
			"rank 0 is in epoch 9223372036854775808, but this rank is in epoch 1"},
		{"to another rank", but(func(h *hello) { h.to = 0 }), false, NotMe,
			"rank 0 tried to connect to rank 0, but this is rank 1"},
		{"to a huge rank", but(func(h *hello) { h.to = -1 }), false, NotMe, "tried to connect to rank -1"},
		{"from oneself", but(func(h *hello) { h.from = 1 }), false, UnknownRank,
			"got rank 1, want a rank below 1"},
		{"from a rank beyond the size", but(func(h *hello) { h.from = 2 }), false, UnknownRank,
			"got rank 2, want a rank below 1"},
		{"from a huge rank", but(func(h *hello) { h.from = -1 }), false, UnknownRank,
			"got rank -1, want a rank below 1"},
		{"duplicate", goodHello(1).encode(), false, DuplicateChannel,
			"rank 0 is already connected on lane 1"},
		{"silent", nil, false, accepted, "0 of the 4 bytes that begin a message"},
		{"gone", nil, true, accepted, "0 of the 4 bytes that begin a message: EOF"},
		{"half a hello", half, false, accepted, "22 of the 44 bytes of the hello: i/o timeout"},
		{"half a hello, then gone", half, true, accepted, "22 of the 44 bytes of the hello: unexpected EOF"},
	}
	conns := make([]net.Conn, len(cases))
	for i, c := range cases {
		raw := dialRaw(t, e1.Addr(), nil)
		over, err := key.Dial(raw, purpose)
		if err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
		_, _ = over.Write(c.sent) // the other end may close the connection before it has read all bytes
		conns[i] = over
		if c.finish {
			if err := raw.(*net.TCPConn).CloseWrite(); err != nil {
				return fmt.Errorf("%s: %w", c.name, err)
			}
		}
	}
	pass(t, a, b) // the real ranks must communicate while the silent connections are open
	for i, c := range cases {
		var want []byte
		if c.answer != accepted {
			want = encodeAnswer(c.answer)
		}
		if got := untilClosed(t, conns[i]); !bytes.Equal(got, want) {
			return fmt.Errorf("%s: got answer %x, want %x", c.name, got, want)
		}
		entry := book.wait(t, "tcp: refused a connection", "remote", conns[i].LocalAddr().String())
		if got := entry["error"].(string); !strings.Contains(got, c.reason) {
			return fmt.Errorf("%s: got reason %q, want %q", c.name, got, c.reason)
		}
	}
	pass(t, a, b)
	pass(t, b, a)
	a, b = pair(t, zero, one, 2)
	pass(t, b, a)
	if got := book.FilterMessage("tcp: refused a connection").Len(); got != len(cases) {
		return fmt.Errorf("%d connections were refused, want %d", got, len(cases))
	}
	return nil
}

// costOfRefusal returns how many bytes this process allocates for a connection of another process that sends
// the given bytes and is refused. They include those of the other end, and of the log.
func costOfRefusal(t *testing.T, key secret.Secret, sent []byte) uint64 {
	t.Helper()
	const peers = 16 // if there were more connections, not all of them would be logged
	log, book := newLog()
	e := listen(t, Config{Log: log, Secret: key})
	join(t, e, Epoch{Rank: 1, Addrs: addrsOf(e, e)})
	refuse := func() {
		nc := dialRaw(t, e.Addr(), sent)
		hangUp(nc)
		book.wait(t, "tcp: refused a connection", "remote", nc.LocalAddr().String())
		book.TakeAll()
	}
	refuse() // the first line of the log makes the counters that bound the others
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range peers {
		refuse()
	}
	runtime.ReadMemStats(&after)
	return (after.TotalAlloc - before.TotalAlloc) / peers
}

// TestUnauthenticatedPeersCostLittle lets processes that do not belong to the job send a lot of data. This
// process must allocate only the memory for a handshake. With a secret, such a process may use TLS, or send
// bytes that look like TLS.
func TestUnauthenticatedPeersCostLittle(t *testing.T) {
	large := make([]byte, 1<<20)
	other := append(hello{version: version, job: hashJob("another")}.encode(), large...)
	record := append([]byte{22, 3, 1, 0x40, 0, 1, 0, 0xff, 0xff}, large...)
	for name, c := range map[string]struct {
		key   secret.Secret
		sent  []byte
		limit uint64
	}{
		"another job":  {secret.Secret{}, other, 16 << 10},
		"garbage":      {encrypted(), bytes.Repeat([]byte("garbage!"), 1<<17), 64 << 10},
		"a length":     {encrypted(), record[:5], 64 << 10},
		"a long hello": {encrypted(), record, 64 << 10},
		"none":         {encrypted(), nil, 64 << 10},
		"plain":        {encrypted(), goodHello(7).encode(), 64 << 10},
		"a proof":      {encrypted(), []byte(secret.Magic + "\x01\x00\x00\x00"), 64 << 10},
	} {
		if got := costOfRefusal(t, c.key, c.sent); got > c.limit {
			t.Errorf("%s: %d bytes were allocated for each connection, want at most %d", name, got, c.limit)
		} else {
			t.Logf("%s: %d bytes were allocated for each connection", name, got)
		}
	}
}

// TestDialRefused lets a peer refuse a connection. Conn of the dialer must return the reason and must not
// retry.
func TestDialRefused(t *testing.T) { overBoth(t, testDialRefused) }

func testDialRefused(t *testing.T, key secret.Secret) {
	for _, c := range []struct {
		name string
		zero Epoch
		to   topo.Rank
		want Refusal
	}{
		{"job", Epoch{Job: "another"}, 1, WrongJob},
		{"epoch", Epoch{Epoch: 2}, 1, StaleEpoch},
		{"rank", Epoch{}, 2, NotMe},
	} {
		t.Run(c.name, func(t *testing.T) {
			e0, e1 := listen(t, Config{Secret: key}), listen(t, Config{Secret: key})
			c.zero.Addrs = addrsOf(e0, e1, e1)
			zero := join(t, e0, c.zero)
			join(t, e1, Epoch{Rank: 1, Addrs: addrsOf(e0, e1, e1)})
			for range 2 {
				_, err := zero.Conn(testnet.Context(t), 5, c.to)
				wantPeer(t, err, 5, c.to)
				if !errors.Is(err, c.want) {
					t.Errorf("got error %v, want %v", err, c.want)
				}
			}
		})
	}
}

func wantPeer(t *testing.T, err error, lane transport.Lane, peer topo.Rank) {
	t.Helper()
	var pe *transport.PeerError
	if !errors.As(err, &pe) || pe.Lane != lane || pe.Peer != peer {
		t.Errorf("got error %v, want a *PeerError for lane %d to rank %d", err, lane, peer)
	}
}

func TestDialNotOurs(t *testing.T) {
	ln := testnet.Listen(t)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer ln.Close()
	wg.Go(func() {
		nc, err := ln.Accept()
		if err != nil {
			t.Error(err)
			return
		}
		defer hangUp(nc)
		if _, err := io.ReadFull(nc, make([]byte, helloSize)); err != nil {
			t.Error(err)
		}
		if _, err := io.WriteString(nc, "HTTP/1.1 400 Bad Request\r\n\r\n"); err != nil {
			t.Error(err)
		}
	})
	e := listen(t, Config{})
	m := join(t, e, Epoch{Addrs: []string{e.Addr(), ln.Addr().String()}})
	_, err := m.Conn(testnet.Context(t), 0, 1)
	wantPeer(t, err, 0, 1)
	if !errors.Is(err, errNotOurs) {
		t.Errorf("got error %v, want %v", err, errNotOurs)
	}
}

// TestDialRetries dials a peer that does not listen yet. The dialer must retry until the peer listens.
func TestDialRetries(t *testing.T) {
	log, book := newLog()
	e0 := listen(t, Config{Log: log})
	gone := listen(t, Config{})
	addrs := addrsOf(e0, gone)
	if err := gone.Close(); err != nil {
		t.Fatal(err)
	}
	zero := join(t, e0, Epoch{Addrs: addrs})
	errs := make(chan error, 1)
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		_, err := zero.Conn(testnet.Context(t), 0, 1)
		errs <- err
	})
	book.wait(t, "tcp: connect failed", "error", "refused")
	one := join(t, listen(t, Config{ListenAddr: addrs[1]}), Epoch{Rank: 1, Addrs: addrs})
	if err := <-errs; err != nil {
		t.Fatal(err)
	}
	a, b := pair(t, zero, one, 0)
	pass(t, a, b)
}

func TestDialTimeout(t *testing.T) {
	patiently(t, 500*time.Millisecond, func(timeout time.Duration) error { // at least one attempt is refused
		e0, gone := listen(t, Config{DialTimeout: timeout}), listen(t, Config{})
		if err := gone.Close(); err != nil {
			t.Fatal(err)
		}
		zero := join(t, e0, Epoch{Addrs: addrsOf(e0, gone)})
		for range 2 { // the second call must dial again
			_, err := zero.Conn(testnet.Context(t), 1, 1)
			wantPeer(t, err, 1, 1)
			if !errors.Is(err, syscall.ECONNREFUSED) || !strings.Contains(err.Error(), timeout.String()) {
				return fmt.Errorf("got error %w, want one that says how long and why", err)
			}
		}
		return nil
	})
}

// A rank that is dialed waits for its peer for longer than the time limit for dialing.
func TestAcceptorHasNoTimeout(t *testing.T) {
	e0, e1 := listen(t, Config{}), listen(t, Config{DialTimeout: time.Millisecond})
	zero := join(t, e0, Epoch{Addrs: addrsOf(e0, e1)})
	one := join(t, e1, Epoch{Rank: 1, Addrs: addrsOf(e0, e1)})
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := one.Conn(ctx, 1, 0); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("got error %v, want that of the context", err)
	}
	a, b := pair(t, zero, one, 1)
	pass(t, a, b)
}

func TestContextEndSaysWhatFailed(t *testing.T) {
	log, book := newLog()
	// The dial timeout is an hour, so that the test sees whether Close waits for it. It must not.
	e, gone := listen(t, Config{Log: log, DialTimeout: time.Hour}), listen(t, Config{})
	if err := gone.Close(); err != nil {
		t.Fatal(err)
	}
	m := join(t, e, Epoch{Addrs: addrsOf(e, gone)})
	early, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := m.Conn(early, 0, 1); !errors.Is(err, context.Canceled) {
		t.Errorf("got error %v, want %v", err, context.Canceled)
	}
	book.wait(t, "tcp: connect failed", "error", "refused")
	if _, err := m.Conn(early, 0, 1); !errors.Is(err, context.Canceled) ||
		!errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("got error %v, want %v and %v", err, context.Canceled, syscall.ECONNREFUSED)
	}
}

// TestDialOutlivesContext lets the context of Conn end. The attempt to dial must continue, and a later call
// of Conn must get its connection. The peer may already have accepted this connection, and would refuse
// another one as a duplicate.
func TestDialOutlivesContext(t *testing.T) {
	ln := testnet.Listen(t)
	defer ln.Close()
	e := listen(t, Config{})
	m := join(t, e, Epoch{Addrs: []string{e.Addr(), ln.Addr().String()}})
	early, cancel := context.WithCancel(t.Context())
	errs := make(chan error, 1)
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		_, err := m.Conn(early, 7, 1)
		errs <- err
	})
	nc, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer hangUp(nc)
	h, err := readHello(nc)
	if err != nil || h != goodHello(7) {
		t.Fatalf("got hello %+v, %v, want %+v", h, err, goodHello(7))
	}
	cancel()
	if err := <-errs; !errors.Is(err, context.Canceled) {
		t.Fatalf("got error %v, want %v", err, context.Canceled)
	}
	if _, err := nc.Write(encodeAnswer(accepted)); err != nil {
		t.Fatal(err)
	}
	c, err := m.Conn(testnet.Context(t), 7, 1)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Send([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(nc, make([]byte, 1)); err != nil {
		t.Errorf("the first connection was given up: %v", err)
	}
}

// TestEarlyConnection lets a faster peer connect and send data before this rank calls Connect. Its connection
// must become a channel of the epoch. A connection from another job must be refused.
func TestEarlyConnection(t *testing.T) { overBoth(t, testEarlyConnection) }

func testEarlyConnection(t *testing.T, key secret.Secret) {
	log, book := newLog()
	e0, e1 := listen(t, Config{Secret: key}), listen(t, Config{Secret: key, Log: log})
	nc := sendAs(t, key, dialRaw(t, e1.Addr(), nil), append(goodHello(3).encode(), "early data"...))
	otherJob := sendAs(t, key, dialRaw(t, e1.Addr(), nil), hello{version: version, job: hashJob("another"),
		to: 1}.encode())
	one := join(t, e1, Epoch{Rank: 1, Addrs: addrsOf(e0, e1)})
	c, err := one.Conn(testnet.Context(t), 3, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := readAnswer(nc); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len("early data"))
	if _, err := io.ReadFull(c, got); err != nil || string(got) != "early data" {
		t.Errorf("got %q, %v", got, err)
	}
	book.wait(t, "tcp: refused a connection", "error", "wrong job")
	if got, want := untilClosed(t, otherJob), encodeAnswer(WrongJob); !bytes.Equal(got, want) {
		t.Errorf("otherJob's answer: got %x, want %x", got, want)
	}
}

// TestDialerHasGone lets a dialer give up its connection before this rank calls Connect, as it does if this
// process does not run for long. The dialer's next connection must become the channel.
func TestDialerHasGone(t *testing.T) {
	log, book := newLog()
	e := listen(t, Config{Log: log, HandshakeTimeout: hangTimeout})
	first := dialRaw(t, e.Addr(), goodHello(3).encode()).(*net.TCPConn)
	// Close returns when the end of the stream has arrived.
	if err := errors.Join(first.SetLinger(int(hangTimeout.Seconds())), first.Close()); err != nil {
		t.Fatal(err)
	}
	join(t, e, Epoch{Rank: 1, Addrs: addrsOf(e, e)})
	book.wait(t, "tcp: refused a connection", "error", "has already closed the connection")
	if err := readAnswer(dialRaw(t, e.Addr(), goodHello(3).encode())); err != nil {
		t.Error(err)
	}
}

// TestReserve checks that a channel cannot be reserved again while its handshake runs, and that it can be
// reserved again after the handshake has failed.
func TestReserve(t *testing.T) {
	e := listen(t, Config{})
	m := join(t, e, Epoch{Rank: 1, Addrs: addrsOf(e, e)})
	l, err := m.reserve(goodHello(3))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.reserve(goodHello(3)); !errors.Is(err, DuplicateChannel) {
		t.Errorf("got error %v, want %v", err, DuplicateChannel)
	}
	if _, err := m.reserve(goodHello(4)); err != nil {
		t.Errorf("another lane: %v", err)
	}
	m.unreserve(l, 0)
	if _, err := m.reserve(goodHello(3)); err != nil {
		t.Error(err)
	}
}

func TestEarlyConnectionExpires(t *testing.T) {
	patiently(t, 50*time.Millisecond, func(timeout time.Duration) error {
		log, book := newLog()
		e := listen(t, Config{Log: log, HandshakeTimeout: timeout})
		nc := dialRaw(t, e.Addr(), goodHello(3).encode())
		if got := untilClosed(t, nc); len(got) != 0 {
			t.Errorf("got answer %x, want none", got)
		}
		entry := book.wait(t, "tcp: refused a connection", "remote", nc.LocalAddr().String())
		if got, want := entry["error"].(string), "has not joined an epoch within "+timeout.String(); !strings.Contains(
			got, want) {
			return fmt.Errorf("got error %q, want %q", got, want)
		}
		return nil
	})
}

// TestTooManyHandshakes opens too many connections that send nothing. The oldest must be closed, so that real
// ranks can connect. Close must close all of them.
func TestTooManyHandshakes(t *testing.T) { overBoth(t, testTooManyHandshakes) }

func testTooManyHandshakes(t *testing.T, key secret.Secret) {
	log, book := newLog()
	e0, e1 := listen(t, Config{Secret: key, Log: log}),
		listen(t, Config{Secret: key, Log: log, HandshakeTimeout: time.Hour})
	silent := make([]net.Conn, maxHandshakes+1)
	for i := range silent {
		silent[i] = dialRaw(t, e1.Addr(), nil)
	}
	book.wait(t, "tcp: refused a connection", "error", dial.ErrEvicted.Error())
	zero := join(t, e0, Epoch{Addrs: addrsOf(e0, e1)})
	one := join(t, e1, Epoch{Rank: 1, Addrs: addrsOf(e0, e1)})
	c, b := pair(t, zero, one, 0)
	pass(t, c, b)
	if err := e1.Close(); err != nil {
		t.Error(err)
	}
	for _, nc := range silent[1:] {
		untilClosed(t, nc)
	}
}

// TestEvictedBeforeHandshake closes a connection for newer ones before its handshake begins. The error must
// give this reason.
func TestEvictedBeforeHandshake(t *testing.T) {
	e := listen(t, Config{})
	ln := testnet.Listen(t)
	defer ln.Close()
	dialRaw(t, ln.Addr().String(), nil)
	nc, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	s, err := newSocket(nc)
	if err != nil {
		t.Fatal(err)
	}
	limiter := dial.NewLimiter(1)
	slot := limiter.Acquire(s)
	limiter.Acquire(e.ln) // closes s
	if err := e.handshake(s, slot); !errors.Is(err, dial.ErrEvicted) {
		t.Errorf("got error %v, want %v", err, dial.ErrEvicted)
	}
}

// failingListener is a listener whose first calls of Accept return EMFILE. failures is the number of these
// calls. If last is set, these calls take the last descriptor instead, so that it cannot be duplicated.
type failingListener struct {
	net.Listener
	failures int
	last     bool
}

// lastConn is a connection whose descriptor cannot be duplicated.
type lastConn struct{ net.Conn }

func (lastConn) SyscallConn() (syscall.RawConn, error) {
	return nil, os.NewSyscallError("fcntl", syscall.EMFILE)
}

func (l *failingListener) Accept() (net.Conn, error) {
	if l.failures > 0 {
		l.failures--
		if l.last {
			nc, _ := net.Pipe()
			return lastConn{nc}, nil
		}
		return nil, &net.OpError{Op: "accept", Net: "tcp", Err: os.NewSyscallError("accept4", syscall.EMFILE)}
	}
	return l.Listener.Accept()
}

func TestAcceptFailureIsNotTheEnd(t *testing.T) {
	ln := testnet.Listen(t)
	log, book := newLog()
	e0, e1 := listen(t, Config{}), newEndpoint(Config{Log: log}, &failingListener{ln, 3, false})
	t.Cleanup(func() {
		if err := e1.Close(); err != nil {
			t.Error(err)
		}
	})
	a, b := pair(t, join(t, e0, Epoch{Addrs: addrsOf(e0, e1)}),
		join(t, e1, Epoch{Rank: 1, Addrs: addrsOf(e0, e1)}), 0)
	pass(t, a, b)
	var pauses []time.Duration
	for _, entry := range book.FilterMessage("tcp: accept failed").All() {
		pauses = append(pauses, entry.ContextMap()["pause"].(time.Duration))
	}
	if want := []time.Duration{firstPause, 2 * firstPause, 4 * firstPause}; !slices.Equal(pauses, want) {
		t.Errorf("pauses: got %v, want %v", pauses, want)
	}
}

// TestAcceptWithoutDescriptors checks that Conn fails at once if its rank has no file descriptor left to
// accept a peer's connection. The error must not blame the peer.
func TestAcceptWithoutDescriptors(t *testing.T) {
	for _, last := range []bool{false, true} {
		ln := testnet.Listen(t)
		e0, e1 := listen(t, Config{}), newEndpoint(Config{}, &failingListener{ln, math.MaxInt, last})
		t.Cleanup(func() {
			if err := e1.Close(); err != nil {
				t.Error(err)
			}
		})
		m := join(t, e1, Epoch{Rank: 1, Addrs: addrsOf(e0, e1)})
		_, err := m.Conn(testnet.Context(t), transport.Control, 0)
		if peer, ok := errors.AsType[*transport.PeerError](err); ok || !errors.Is(err, syscall.EMFILE) ||
			!strings.Contains(err.Error(), "ulimit -n") || strings.Contains(err.Error(), ": tcp:") {
			t.Errorf("last %t: got %v (%v), want that this process has no descriptors", last, err, peer)
		}
	}
}

func TestConnectChecksEpoch(t *testing.T) {
	e := listen(t, Config{})
	for _, ep := range []Epoch{
		{Job: "", Rank: 0, Addrs: addrsOf(e)},
		{Job: strings.Repeat("j", maxJobBytes+1), Rank: 0, Addrs: addrsOf(e)},
		{Job: "j", Rank: 0},
		{Job: "j", Rank: 1, Addrs: addrsOf(e)},
		{Job: "j", Rank: -1, Addrs: addrsOf(e)},
		{Job: "j", Rank: 0, Addrs: []string{"", "host"}},
	} {
		if m, err := e.Connect(ep); err == nil || m != nil {
			t.Errorf("%+v was accepted", ep)
		}
	}
	join(t, e, Epoch{Addrs: []string{""}})
	if _, err := e.Connect(Epoch{Job: "j", Epoch: 2, Addrs: []string{""}}); err == nil {
		t.Error("an endpoint served two epochs")
	}
	if err := e.Close(); err != nil {
		t.Error(err)
	}
	e = listen(t, Config{})
	if err := e.Close(); err != nil {
		t.Error(err)
	}
	if _, err := e.Connect(Epoch{Job: "j", Addrs: []string{""}}); !errors.Is(err, transport.ErrClosed) {
		t.Errorf("got error %v, want %v", err, transport.ErrClosed)
	}
}

func TestListenFails(t *testing.T) {
	e := listen(t, Config{})
	if _, err := Listen(Config{ListenAddr: e.Addr()}); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("got error %v, want %v", err, syscall.EADDRINUSE)
	}
}

func twoRanks(t *testing.T, key secret.Secret) (zero, one transport.Mesh) {
	m := meshesOf(t, 2, key)
	return m[0], m[1]
}

// TestDataBeforeClose checks that the bytes that are already in the kernel still arrive if the sender closes
// its mesh.
func TestDataBeforeClose(t *testing.T) { overBoth(t, testDataBeforeClose) }

func testDataBeforeClose(t *testing.T, key secret.Secret) {
	zero, one := twoRanks(t, key)
	a, b := pair(t, zero, one, 1)
	if err := errors.Join(a.Send(make([]byte, 1000)), a.Flush(), zero.Close()); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(b, make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	_, err := b.Read(make([]byte, 1))
	wantPeer(t, err, 1, 0)
	if !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("got error %v, want %v", err, io.ErrUnexpectedEOF)
	}
}

func TestReset(t *testing.T) { overBoth(t, testReset) }

func testReset(t *testing.T, key secret.Secret) {
	zero, one := twoRanks(t, key)
	a, b := pair(t, zero, one, 1)
	if _, err := a.sock.now(func(fd int, _ []byte) (int, error) {
		return 0, unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	}, nil); err != nil {
		t.Fatal(err)
	}
	if err := zero.Close(); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		_, err := b.Read(make([]byte, 1))
		wantPeer(t, err, 1, 0)
		if !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("got error %v, want %v", err, syscall.ECONNRESET)
		}
	}
}

func TestSocketOptions(t *testing.T) {
	zero, one := twoRanks(t, secret.Secret{})
	a, b := pair(t, zero, one, 1)
	for name, c := range map[string]*conn{"dialed": a, "accepted": b} {
		for _, o := range []struct {
			name       string
			level, opt int
		}{
			{"TCP_NODELAY", syscall.IPPROTO_TCP, syscall.TCP_NODELAY},
			{"SO_KEEPALIVE", syscall.SOL_SOCKET, syscall.SO_KEEPALIVE},
		} {
			got, err := c.sock.now(func(fd int, _ []byte) (int, error) {
				return unix.GetsockoptInt(fd, o.level, o.opt)
			}, nil)
			if err != nil || got == 0 {
				t.Errorf("%s connection: %s is %d, %v, want it on", name, o.name, got, err)
			}
		}
	}
}

func TestSteadyStateAllocatesNothing(t *testing.T) {
	zero, one := twoRanks(t, secret.Secret{})
	a, b := pair(t, zero, one, 1)
	t.Run("inline", func(t *testing.T) {
		buf, got := make([]byte, 1000), make([]byte, 1000)
		if n := testing.AllocsPerRun(1000, func() {
			if err := a.Send(buf); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(b, got); err != nil {
				t.Fatal(err)
			}
		}); n != 0 {
			t.Errorf("%v allocations per message", n)
		}
	})
	for _, c := range []struct {
		name               string
		pieces, pieceBytes int
	}{
		{"queued small", 20_000, 1000},
		{"queued large", 64, 1 << 20},
	} {
		t.Run(c.name, func(t *testing.T) {
			buf := make([]byte, c.pieceBytes)
			// The receiver begins only when all bytes were sent, so that most of the bytes are queued.
			start := make(chan struct{})
			var wg sync.WaitGroup
			defer wg.Wait()
			wg.Go(func() {
				got := make([]byte, c.pieces*c.pieceBytes)
				for range start {
					if _, err := io.ReadFull(b, got); err != nil {
						t.Error(err)
						return
					}
				}
			})
			defer close(start)
			// Goroutines of earlier tests may still allocate during some of the runs, so the test uses the
			// minimum of all runs. If sending a message allocates, it does so in all runs.
			least := math.Inf(1)
			for range 5 {
				least = min(least, testing.AllocsPerRun(1, func() {
					for range c.pieces {
						if err := a.Send(buf); err != nil {
							t.Fatal(err)
						}
					}
					start <- struct{}{}
					if err := a.Flush(); err != nil {
						t.Fatal(err)
					}
				}))
			}
			if least != 0 {
				t.Errorf("%v allocations per %d messages", least, c.pieces)
			}
		})
	}
}

func BenchmarkPingPong(b *testing.B)    { transporttest.PingPong(b, meshes) }
func BenchmarkStream(b *testing.B)      { transporttest.Stream(b, meshes) }
func BenchmarkPingPongTLS(b *testing.B) { transporttest.PingPong(b, sealedMeshes) }
func BenchmarkStreamTLS(b *testing.B)   { transporttest.Stream(b, sealedMeshes) }

// BenchmarkDrain measures how fast a queue of messages is emptied when the receiver begins to read.
func BenchmarkDrain(b *testing.B) {
	const total = 32 << 20
	for _, size := range []int{64, 1 << 10, 16 << 10} {
		b.Run(fmt.Sprintf("%dB", size), func(b *testing.B) {
			m := meshes(b, 2)
			zero, err := m[0].Conn(b.Context(), 1, 1)
			if err != nil {
				b.Fatal(err)
			}
			one, err := m[1].Conn(b.Context(), 1, 0)
			if err != nil {
				b.Fatal(err)
			}
			start := make(chan struct{})
			var wg sync.WaitGroup
			defer wg.Wait()
			wg.Go(func() {
				buf := make([]byte, 1<<20)
				for range start {
					for range total / len(buf) {
						if _, err := io.ReadFull(one, buf); err != nil {
							b.Error(err)
							return
						}
					}
				}
			})
			defer close(start)
			buf := make([]byte, size)
			b.SetBytes(total)
			for b.Loop() {
				b.StopTimer()
				for range total / size {
					if err := zero.Send(buf); err != nil {
						b.Fatal(err)
					}
				}
				b.StartTimer()
				start <- struct{}{}
				if err := zero.Flush(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
