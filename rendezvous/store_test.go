package rendezvous

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
)

// testContext ends after a minute, so that what hangs fails.
func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// eventually waits for what another goroutine does without saying so.
func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	ctx := testContext(t)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !cond() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("%s: not within a minute", what)
		}
	}
}

// logs returns a logger and what it was given.
func logs() (*zap.Logger, *observer.ObservedLogs) {
	core, entries := observer.New(zapcore.DebugLevel)
	return zap.New(core), entries
}

// logged reports whether an entry has all parts, in its message or fields.
func logged(entries *observer.ObservedLogs, parts ...string) bool {
	for _, e := range entries.All() {
		text := fmt.Sprint(e.Message, e.ContextMap())
		found := true
		for _, part := range parts {
			found = found && strings.Contains(text, part)
		}
		if found {
			return true
		}
	}
	return false
}

func wantError(t *testing.T, err error, parts ...string) {
	t.Helper()
	if err == nil {
		t.Errorf("got no error, want one with %q", parts)
		return
	}
	for _, part := range parts {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("got error %q, want %q in it", err, part)
		}
	}
}

func (s *HashStore) waiting() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.waits)
}

func TestHashStoreTotals(t *testing.T) {
	ctx := t.Context()
	s := NewHashStore(Limits{Keys: 2, Bytes: 10})
	defer s.Close()
	for _, step := range []struct {
		key, value string // value "" deletes
		refused    string
	}{
		{"a", "1234", ""},        // 5 bytes
		{"b", "12345", "6 more"}, // 11
		{"b", "1234", ""},        // 10
		{"a", "12345", "1 more"}, // 11
		{"a", "123", ""},         // 9
		{"c", "1", "has 2 keys"},
		{"b", "", ""},      // 4
		{"c", "12345", ""}, // 10
	} {
		var err error
		if step.value == "" {
			_, err = s.Delete(ctx, step.key)
		} else {
			err = s.Set(ctx, step.key, []byte(step.value))
		}
		if step.refused == "" {
			if err != nil {
				t.Fatalf("%+v: %v", step, err)
			}
			continue
		}
		wantError(t, err, step.refused)
		if !errors.Is(err, ErrLimit) {
			t.Errorf("%+v: %v is not ErrLimit", step, err)
		}
	}
}

func TestHashStoreForgetsWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewHashStore(Limits{})
		start := time.Now()
		var wg sync.WaitGroup
		for i := range 6 {
			wg.Go(func() {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(1+i%3)*time.Hour)
				defer cancel()
				_, err := s.Get(ctx, fmt.Sprint("k", i%2))
				if (err == nil) != (i == 5) {
					t.Errorf("get %d: %v", i, err)
				}
			})
		}
		synctest.Wait()
		if n := s.waiting(); n != 2 {
			t.Errorf("%d keys are waited for, want 2", n)
		}
		// Get 5 waits for k1 longer than the others that do.
		time.Sleep(2*time.Hour + time.Minute)
		if err := s.Set(t.Context(), "k1", nil); err != nil {
			t.Error(err)
		}
		wg.Wait()
		if n := s.waiting(); n != 0 {
			t.Errorf("%d keys are waited for at the end, want 0", n)
		}
		if d := time.Since(start); d != 3*time.Hour {
			t.Errorf("the waits took %v, want 3h", d)
		}
	})
}

// serveStore returns a server over an empty store.
func serveStore(t *testing.T, log *zap.Logger) (*TCPServer, *HashStore) {
	t.Helper()
	hash := NewHashStore(Limits{})
	server, err := Serve("127.0.0.1:0", hash, log)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { server.Close() })
	return server, hash
}

func dialStore(t *testing.T, addr string) *TCPStore {
	t.Helper()
	s, err := DialTCP(testContext(t), addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func TestServerGivesUpWaits(t *testing.T) {
	for name, leave := range map[string]func(cancel func(), s *TCPStore){
		"context ends":  func(cancel func(), _ *TCPStore) { cancel() },
		"client closes": func(_ func(), s *TCPStore) { s.Close() },
		"client dies":   func(_ func(), s *TCPStore) { s.conn.(*net.TCPConn).SetLinger(0); s.conn.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			server, hash := serveStore(t, nil)
			client, other := dialStore(t, server.Addr()), dialStore(t, server.Addr())
			ctx, cancel := context.WithCancel(testContext(t))
			defer cancel()
			var wg sync.WaitGroup
			for _, key := range []string{"a", "b", "c"} {
				wg.Go(func() {
					if v, err := client.Get(ctx, key); err == nil {
						t.Errorf("get %s: got %q, want an error", key, v)
					}
				})
			}
			eventually(t, "three waits", func() bool { return hash.waiting() == 3 })
			leave(cancel, client)
			wg.Wait()
			eventually(t, "no waits", func() bool { return hash.waiting() == 0 })
			if err := other.Set(testContext(t), "k", nil); err != nil {
				t.Error(err)
			}
			if name != "context ends" {
				return
			}
			if _, err := client.Get(testContext(t), "k"); err != nil {
				t.Errorf("the client's next call: %v", err)
			}
		})
	}
}

func TestServerBoundsWaits(t *testing.T) {
	server, hash := serveStore(t, nil)
	client := dialStore(t, server.Addr())
	ctx, cancel := context.WithCancel(testContext(t))
	defer cancel()
	errs := make(chan error)
	for i := range maxWaitsPerClient + 1 {
		go func() {
			_, err := client.Get(ctx, fmt.Sprint("k", i))
			errs <- err
		}()
	}
	if err := <-errs; !errors.Is(err, ErrLimit) {
		t.Errorf("got %v, want ErrLimit", err)
	}
	eventually(t, "the other waits", func() bool { return hash.waiting() == maxWaitsPerClient })
	cancel()
	for range maxWaitsPerClient {
		if err := <-errs; !errors.Is(err, context.Canceled) {
			t.Errorf("got %v, want that the context ended", err)
		}
	}
}

func TestServerDeath(t *testing.T) {
	server, hash := serveStore(t, nil)
	client := dialStore(t, server.Addr())
	ctx := testContext(t)
	errs := make(chan error)
	go func() {
		_, err := client.Get(ctx, "k")
		errs <- err
	}()
	eventually(t, "the wait", func() bool { return hash.waiting() == 1 })
	if err := server.Close(); err != nil {
		t.Error(err)
	}
	wantError(t, <-errs, `rendezvous: get "k"`, server.Addr())
	_, err := client.Add(ctx, "n", 1)
	wantError(t, err, `rendezvous: add "n"`, server.Addr())
}

func TestStoreOfServerCloses(t *testing.T) {
	server, hash := serveStore(t, nil)
	client := dialStore(t, server.Addr())
	hash.Close()
	_, err := client.Add(testContext(t), "n", 1)
	if !errors.Is(err, ErrClosed) {
		t.Errorf("got %v, want ErrClosed", err)
	}
}

// fakeServer accepts one connection after the other and hands each to serve.
func fakeServer(t *testing.T, serve func(net.Conn)) (addr string) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer conn.Close()
				conn.SetDeadline(time.Now().Add(time.Minute))
				serve(conn)
			})
		}
	})
	t.Cleanup(func() {
		ln.Close()
		wg.Wait()
	})
	return ln.Addr().String()
}

func TestSilentServer(t *testing.T) {
	pings := make(chan opcode, 100)
	addr := fakeServer(t, func(conn net.Conn) {
		readGreeting(conn, storeMagic)
		conn.Write(greeting(storeMagic, storeVersion))
		for {
			body, err := readFrame(conn, maxRequestBytes)
			if err != nil {
				return
			}
			q, err := decodeRequest(body)
			if err != nil {
				t.Error(err)
			}
			pings <- q.op
		}
	})
	client, err := dialTCP(testContext(t), addr, 10*time.Millisecond, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	_, err = client.Get(testContext(t), "k")
	wantError(t, err, `get "k"`, addr, "silent for 1s")
	for i := range 3 {
		if op := <-pings; op != opPing && (i > 1 || op != opGet) {
			t.Errorf("the silent server got %v, want pings", op)
		}
	}
}

func TestServerAnswersPing(t *testing.T) {
	server, _ := serveStore(t, nil)
	conn := rawDial(t, server.Addr(), greeting(storeMagic, storeVersion), (&request{op: opPing, id: 7}).frame())
	if _, err := readGreeting(conn, storeMagic); err != nil {
		t.Fatal(err)
	}
	body, err := readFrame(conn, maxReplyBytes)
	if err != nil {
		t.Fatal(err)
	}
	if r, err := decodeReply(body); err != nil || r.id != 7 || r.status != statusOK {
		t.Errorf("got reply %+v, %v", r, err)
	}
}

func TestDialTCP(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := ln.Addr().String()
	ln.Close()

	t.Run("refused", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		_, err := DialTCP(ctx, addr)
		if !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("got %v, want that dials were refused until the deadline", err)
		}
		wantError(t, err, addr)
	})
	t.Run("server comes later", func(t *testing.T) {
		got := make(chan error)
		go func() {
			s, err := DialTCP(testContext(t), addr)
			if err == nil {
				err = s.Set(testContext(t), "k", nil)
				s.Close()
			}
			got <- err
		}()
		server, err := Serve(addr, NewHashStore(Limits{}), nil)
		if err != nil {
			t.Skip("another process took the port: ", err)
		}
		defer server.Close()
		if err := <-got; err != nil {
			t.Error(err)
		}
	})
	t.Run("no port", func(t *testing.T) {
		_, err := DialTCP(testContext(t), "127.0.0.1")
		wantError(t, err, "missing port")
	})
	t.Run("not a store", func(t *testing.T) {
		_, err := DialTCP(testContext(t), fakeServer(t, func(conn net.Conn) { io.WriteString(conn, "HTTP/1.1 400 Bad Request\r\n") }))
		wantError(t, err, `greeting is "HTTP", want "GHVS"`)
	})
	t.Run("another version", func(t *testing.T) {
		_, err := DialTCP(testContext(t), fakeServer(t, func(conn net.Conn) {
			readGreeting(conn, storeMagic)
			conn.Write(greeting(storeMagic, 9))
		}))
		wantError(t, err, "version 9 of the protocol, want 1")
	})
}

// rawDial connects and sends parts.
func rawDial(t *testing.T, addr string, parts ...[]byte) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	conn.SetDeadline(time.Now().Add(time.Minute))
	if _, err := conn.Write(bytes.Join(parts, nil)); err != nil {
		t.Fatal(err)
	}
	return conn
}

func frameOf(body ...byte) []byte { return sealFrame(append(newFrame(0), body...)) }

func TestGarbageToServer(t *testing.T) {
	hello := greeting(storeMagic, storeVersion)
	get := (&request{op: opGet, id: 1, key: "missing"}).frame()
	unknown := (&request{op: numOps, id: 1, key: "k"}).frame()
	for _, test := range []struct {
		name   string
		parts  [][]byte
		reason string
	}{
		{"no greeting", [][]byte{[]byte("GET / HTTP/1.1\r\n\r\n")}, `greeting is \"GET \"`},
		{"old version", [][]byte{greeting(storeMagic, 0)}, "version 0"},
		{"oversized", [][]byte{hello, {0xff, 0xff, 0xff, 0xff}}, "frame of 4294967295 bytes"},
		{"just oversized", [][]byte{hello, {0, 0x20, 4, 0x1e}}, "frame of 2098206 bytes"},
		{"empty frame", [][]byte{hello, frameOf()}, "malformed"},
		{"short frame", [][]byte{hello, frameOf(2, 0, 0)}, "malformed"},
		{"long frame", [][]byte{hello, frameOf(append(get[frameHeader:], 0)...)}, "malformed"},
		{"unknown operation", [][]byte{hello, unknown}, "unknown operation 8"},
	} {
		t.Run(test.name, func(t *testing.T) {
			log, entries := logs()
			server, _ := serveStore(t, log)
			client := dialStore(t, server.Addr())
			conn := rawDial(t, server.Addr(), test.parts...)
			if _, err := io.Copy(io.Discard, conn); errors.Is(err, context.DeadlineExceeded) {
				t.Error(err)
			}
			eventually(t, "the reason", func() bool {
				return logged(entries, "closed a connection", strings.ReplaceAll(test.reason, `\"`, `"`))
			})
			if err := client.Set(testContext(t), "k", []byte("v")); err != nil {
				t.Errorf("another client: %v", err)
			}
		})
	}
	if maxRequestBytes != 0x20041d {
		t.Errorf("the largest request has %#x bytes; correct the row of the frame that is just too large", maxRequestBytes)
	}
}

func TestDuplicateWait(t *testing.T) {
	server, hash := serveStore(t, nil)
	get := (&request{op: opGet, id: 1, key: "missing"}).frame()
	conn := rawDial(t, server.Addr(), greeting(storeMagic, storeVersion), get, get)
	readGreeting(conn, storeMagic)
	body, err := readFrame(conn, maxReplyBytes)
	if err != nil {
		t.Fatal(err)
	}
	r, err := decodeReply(body)
	if err != nil {
		t.Fatal(err)
	}
	wantError(t, r.err(), "request 1 is already waiting")
	if n := hash.waiting(); n > 1 {
		t.Errorf("%d waits, want 1", n)
	}
}

func TestReadFrame(t *testing.T) {
	for _, n := range []int{0, 1, frameStep - 1, frameStep, frameStep + 1, 3*frameStep + 7, 100 * frameStep} {
		body := bytes.Repeat([]byte{'x'}, n)
		frame := sealFrame(append(newFrame(n), body...))
		got, err := readFrame(bytes.NewReader(frame), n)
		if err != nil || !bytes.Equal(got, body) {
			t.Errorf("frame of %d bytes: got %d, %v", n, len(got), err)
		}
		if n == 0 {
			continue
		}
		_, err = readFrame(bytes.NewReader(frame), n-1)
		wantError(t, err, fmt.Sprintf("frame of %d bytes, want at most %d", n, n-1))
		for _, cut := range []int{frameHeader, frameHeader + n/2, frameHeader + n - 1} {
			if _, err := readFrame(bytes.NewReader(frame[:cut]), n); err != io.ErrUnexpectedEOF {
				t.Errorf("frame of %d bytes cut at %d: got %v", n, cut, err)
			}
		}
	}
	if _, err := readFrame(bytes.NewReader(nil), 1); err != io.EOF {
		t.Errorf("at the end: got %v, want EOF", err)
	}
}

func TestReadFrameTrustsNoLength(t *testing.T) {
	const frames = 100
	large := make([]byte, frameHeader+5*frameStep)
	binary.BigEndian.PutUint32(large, maxRequestBytes)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range frames {
		if _, err := readFrame(bytes.NewReader(large), maxRequestBytes); err != io.ErrUnexpectedEOF {
			t.Fatalf("got %v", err)
		}
	}
	runtime.ReadMemStats(&after)
	// All pieces that were outgrown count here, hence more than the twofold of what is held at once.
	if got, most := (after.TotalAlloc-before.TotalAlloc)/frames, uint64(8*len(large)); got > most {
		t.Errorf("a frame of %d bytes, %d of them there, allocates %d, want at most %d", maxRequestBytes, len(large), got, most)
	}
}

func FuzzReadFrame(f *testing.F) {
	f.Add([]byte{}, 10)
	f.Add([]byte{0, 0, 0, 3, 1, 2, 3}, 3)
	f.Add([]byte{255, 255, 255, 255, 1}, 1<<20)
	f.Fuzz(func(t *testing.T, in []byte, limit int) {
		limit = min(max(limit, 0), maxRequestBytes)
		body, err := readFrame(bytes.NewReader(in), limit)
		if err != nil {
			return
		}
		if len(body) > limit {
			t.Fatalf("got %d bytes, limit %d", len(body), limit)
		}
		if out := frameOf(body...); !bytes.HasPrefix(in, out) {
			t.Fatalf("%x was read as %x", in, out)
		}
	})
}

func FuzzDecodeRequest(f *testing.F) {
	for _, q := range []request{
		{}, {op: opCancel, id: 1}, {op: opAdd, id: 1 << 63, key: "n", delta: -1}, {op: opSet, id: 2, key: "k", first: []byte("v")},
		{op: opCompareAndSet, id: 3, key: "k", second: []byte{}}, {op: opWatch, id: 4, key: strings.Repeat("k", 1024), first: []byte{}},
	} {
		f.Add(q.frame()[frameHeader:])
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		q, err := decodeRequest(body)
		if err != nil {
			return
		}
		if out := q.frame()[frameHeader:]; !bytes.Equal(out, body) {
			t.Fatalf("%x is encoded again as %x", body, out)
		}
	})
}

func FuzzDecodeReply(f *testing.F) {
	for _, r := range []reply{
		{}, {id: 1, ok: true, value: []byte{}}, {id: 2, number: -1, value: []byte("v")}, {id: 3, status: statusLimit, value: []byte("too much")},
	} {
		f.Add(r.frame()[frameHeader:])
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		r, err := decodeReply(body)
		if err != nil {
			return
		}
		if (r.err() == nil) != (r.status == statusOK) {
			t.Fatalf("status %d gives error %v", r.status, r.err())
		}
		if out := r.frame()[frameHeader:]; !bytes.Equal(out, body) {
			t.Fatalf("%x is encoded again as %x", body, out)
		}
	})
}
