package store

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/testnet"
)

func TestHashStoreTotals(t *testing.T) {
	ctx := t.Context()
	s := NewHashStore(Limits{Keys: 2, Bytes: 10})
	defer s.Close()
	for _, step := range []struct {
		key, value string // an empty value deletes the key
		refused    string
	}{
		{"a", "1234", ""},        // 5 bytes in the store
		{"b", "12345", "6 more"}, // 11 bytes
		{"b", "1234", ""},        // 10 bytes
		{"a", "12345", "1 more"}, // 11 bytes
		{"a", "123", ""},         // 9 bytes
		{"c", "1", "has 2 keys"},
		{"b", "", ""},      // 4 bytes
		{"c", "12345", ""}, // 10 bytes
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
		testnet.WantError(t, err, step.refused)
		if !errors.Is(err, ErrLimit) {
			t.Errorf("%+v: %v is not ErrLimit", step, err)
		}
	}
}

// Without a secret, a server refuses processes of other users of this host. With a secret, it serves all that
// know the secret.
func TestServerRefusesOtherUsers(t *testing.T) {
	key, _ := secret.New()
	for _, s := range []Secret{{}, key} {
		server, _ := serveStore(t, Config{Secret: s})
		for _, uid := range []uint32{uint32(os.Geteuid()), 65534} {
			// With a secret, the server sends its part of the proof first.
			answer := testnet.AskAs(t, uid, server.Addr(), dial.Greeting(storeMagic, storeVersion))
			if want := uid != 65534 || !s.IsZero(); want != (len(answer) == 1) {
				t.Errorf("user %d, no secret: %v: got %d bytes, want an answer: %v", uid, s.IsZero(), len(answer), want)
			}
		}
	}
}

// If the process of a server may open only 1024 descriptors, more connections than that keep no client out.
func TestFloodOfServer(t *testing.T) {
	testnet.LimitDescriptors(t, 1024)
	key, _ := secret.New()
	log, entries := testnet.Logs()
	server, _ := serveStore(t, Config{Secret: key, Log: log})
	testnet.Flood(t, server.Addr(), 3000)
	if err := dialStore(t, server.Addr(), key).Set(testnet.Context(t), "k", nil); err != nil {
		t.Error(err)
	}
	if testnet.Logged(entries, "too many open files") {
		t.Error("the server had no descriptor left")
	}
}

// The keys for which a client waits take most of the memory for requests of all clients. So there is no room
// for the long request of another client, until the first client ends its wait.
func TestRequestsShareMemory(t *testing.T) {
	t.Parallel() // the server waits for 10 s until it refuses the request
	ctx := testnet.Context(t)
	log, entries := testnet.Logs()
	server, hash := serveStore(t, Config{Log: log, maxCallsBytes: mostMemory(83000)})
	open := func() *Client { return dialStore(t, server.Addr(), secret.Secret{}) }
	var keys []string
	for i := range 8 {
		keys = append(keys, strings.Repeat(strconv.Itoa(i), MaxKeyBytes-1))
	}
	first := open()
	waiting, stop := context.WithCancel(ctx)
	waited := make(chan error, 1)
	go func() { waited <- first.Wait(waiting, keys...) }()
	testnet.Eventually(t, "the wait", func() bool { return hash.Waits() == 1 })
	long := make([]byte, 80<<10)
	if err := open().Set(ctx, "k", long); err == nil {
		t.Error("the second long request has room")
	}
	testnet.Eventually(t, "the reason", func() bool {
		return testnet.Logged(entries, "closed a connection", "all clients together hold", "for their requests")
	})
	if err := open().Set(ctx, "k", long[:100]); err != nil {
		t.Errorf("a short request: %v", err)
	}
	stop()
	if err := <-waited; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if err := open().Set(ctx, "k", long); err != nil {
		t.Errorf("the long request, when there is room: %v", err)
	}
}

// A short request counts too if it waits, or if its list takes much memory. If there is no room, only this
// request fails.
func TestShortRequestsShareMemory(t *testing.T) {
	ctx := testnet.Context(t)
	server, hash := serveStore(t, Config{maxCallsBytes: 16 << 10})
	c := dialStore(t, server.Addr(), secret.Secret{})
	var keys []string // take 14 KiB
	for i := range 260 {
		keys = append(keys, strconv.Itoa(i))
	}
	for range 2 { // the second time shows that all of the memory is free again
		testnet.Eventually(t, "room for the list", func() bool {
			_, err := c.Check(ctx, keys...)
			return err == nil
		})
		waiting, stop := context.WithCancel(ctx)
		waited := make(chan error, 5)
		for i := range 5 {
			go func() {
				_, err := c.Get(waiting, strings.Repeat(strconv.Itoa(i), 3000))
				waited <- err
			}()
		}
		testnet.Eventually(t, "the waits", func() bool { return hash.Waits() == 5 })
		if _, err := c.Get(ctx, strings.Repeat("k", 3000)); !errors.Is(err, ErrLimit) {
			t.Errorf("a sixth wait: got %v, want ErrLimit", err)
		}
		if _, err := c.Check(ctx, keys...); !errors.Is(err, ErrLimit) {
			t.Errorf("the list beside the waits: got %v, want ErrLimit", err)
		}
		stop()
		for range 5 {
			if err := <-waited; !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		}
	}
}

// The key of a queue counts as long as the queue is not empty, and once.
func TestHashStoreTotalsOfQueues(t *testing.T) {
	ctx := t.Context()
	key := strings.Repeat("k", MaxKeyBytes)
	s := NewHashStore(Limits{Keys: 1, Bytes: MaxKeyBytes + 200})
	defer s.Close()
	for range 3 {
		for _, v := range []string{"1", "2"} {
			if err := s.Push(ctx, key, []byte(v)); err != nil {
				t.Fatal(err)
			}
		}
		testnet.WantError(t, s.Push(ctx, "another", nil), "has 1 keys")
		testnet.WantError(t, s.Push(ctx, key, make([]byte, 100)), "bytes")
		for range 2 {
			if _, err := s.Pop(ctx, key); err != nil {
				t.Fatal(err)
			}
		}
	}
	small := NewHashStore(Limits{Bytes: MaxKeyBytes})
	defer small.Close()
	testnet.WantError(t, small.Push(ctx, key, nil), "of at most 8192 bytes")
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
		if n := s.Waits(); n != 2 {
			t.Errorf("%d keys are waited for, want 2", n)
		}
		// Two hours later, all waits have timed out except Get of key 5.
		time.Sleep(2*time.Hour + time.Minute)
		if err := s.Set(t.Context(), "k1", nil); err != nil {
			t.Error(err)
		}
		wg.Wait()
		if n := s.Waits(); n != 0 {
			t.Errorf("%d keys are waited for at the end, want 0", n)
		}
		if d := time.Since(start); d != 3*time.Hour {
			t.Errorf("the waits took %v, want 3h", d)
		}
	})
}

// serveStore starts a server. It returns the server and the empty store that it serves.
func serveStore(t *testing.T, cfg Config) (*Server, *HashStore) {
	t.Helper()
	hash := NewHashStore(Limits{})
	server, err := Serve("127.0.0.1:0", hash, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(server.Close(), hash.Close()); err != nil {
			t.Error(err)
		}
	})
	return server, hash
}

func dialStore(t *testing.T, addr string, key secret.Secret) *Client {
	t.Helper()
	s, err := Dial(testnet.Context(t), addr, Config{Secret: key})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func TestServerGivesUpWaits(t *testing.T) {
	for name, leave := range map[string]func(cancel func(), s *Client){
		"context ends":  func(cancel func(), _ *Client) { cancel() },
		"client closes": func(_ func(), s *Client) { s.Close() },
		"client dies":   func(_ func(), s *Client) { s.conn.(*net.TCPConn).SetLinger(0); s.conn.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			server, hash := serveStore(t, Config{})
			client, other := dialStore(t, server.Addr(), secret.Secret{}),
				dialStore(t, server.Addr(), secret.Secret{})
			ctx, cancel := context.WithCancel(testnet.Context(t))
			defer cancel()
			var wg sync.WaitGroup
			for _, key := range []string{"a", "b", "c"} {
				wg.Go(func() {
					if v, err := client.Get(ctx, key); err == nil {
						t.Errorf("get %s: got %q, want an error", key, v)
					}
				})
			}
			testnet.Eventually(t, "three waits", func() bool { return hash.Waits() == 3 })
			leave(cancel, client)
			wg.Wait()
			testnet.Eventually(t, "no waits", func() bool { return hash.Waits() == 0 })
			if err := other.Set(testnet.Context(t), "k", nil); err != nil {
				t.Error(err)
			}
			if name != "context ends" {
				return
			}
			if _, err := client.Get(testnet.Context(t), "k"); err != nil {
				t.Errorf("the client's next call: %v", err)
			}
		})
	}
}

func TestServerBoundsWaits(t *testing.T) {
	server, hash := serveStore(t, Config{})
	client := dialStore(t, server.Addr(), secret.Secret{})
	ctx, cancel := context.WithCancel(testnet.Context(t))
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
	testnet.Eventually(t, "the other waits", func() bool { return hash.Waits() == maxWaitsPerClient })
	cancel()
	for range maxWaitsPerClient {
		if err := <-errs; !errors.Is(err, context.Canceled) {
			t.Errorf("got %v, want that the context ended", err)
		}
	}
}

func TestServerDeath(t *testing.T) {
	server, hash := serveStore(t, Config{})
	client := dialStore(t, server.Addr(), secret.Secret{})
	ctx := testnet.Context(t)
	errs := make(chan error)
	go func() {
		_, err := client.Get(ctx, "k")
		errs <- err
	}()
	testnet.Eventually(t, "the wait", func() bool { return hash.Waits() == 1 })
	if err := server.Close(); err != nil {
		t.Error(err)
	}
	testnet.WantError(t, <-errs, `store: get "k"`, server.Addr())
	_, err := client.Add(ctx, "n", 1)
	testnet.WantError(t, err, `store: add "n"`, server.Addr())
}

func TestStoreOfServerCloses(t *testing.T) {
	server, hash := serveStore(t, Config{})
	client := dialStore(t, server.Addr(), secret.Secret{})
	hash.Close()
	_, err := client.Add(testnet.Context(t), "n", 1)
	if !errors.Is(err, ErrClosed) {
		t.Errorf("got %v, want ErrClosed", err)
	}
}

func TestSilentServer(t *testing.T) {
	pings := make(chan opcode, 100)
	addr := testnet.FakeServer(t, func(conn net.Conn) {
		dial.ReadGreeting(conn, storeMagic)
		conn.Write(dial.Greeting(storeMagic, storeVersion))
		for {
			body, err := dial.ReadFrame(conn, maxRequestBytes)
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
	client, err := connect(testnet.Context(t), addr, Config{}, 10*time.Millisecond, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	_, err = client.Get(testnet.Context(t), "k")
	testnet.WantError(t, err, `get "k"`, addr, "the server sent no data for 1s")
	for i := range 3 {
		if op := <-pings; op != opPing && (i > 1 || op != opGet) {
			t.Errorf("the silent server got %v, want pings", op)
		}
	}
}

// stoppedVariable makes TestStopped the process that is stopped.
const stoppedVariable = "GOHVD_STORE_TEST_STOPPED"

// TestStopped checks that a client and a server work on when their process was stopped for longer than the
// other one may be silent.
func TestStopped(t *testing.T) {
	if os.Getenv(stoppedVariable) != "" {
		callWhenContinued(t)
		return
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestStopped$")
	cmd.Env = append(os.Environ(), stoppedVariable+"=1")
	in, err := cmd.StdinPipe()
	out, err2 := cmd.StdoutPipe()
	if err := errors.Join(err, err2); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() }) // has no effect after Wait
	lines := bufio.NewReader(out)
	if _, err := lines.ReadString('\n'); err != nil {
		t.Error(err)
	}
	err = cmd.Process.Signal(syscall.SIGSTOP)
	time.Sleep(5 * time.Second)
	if err := errors.Join(err, cmd.Process.Signal(syscall.SIGCONT), in.Close()); err != nil {
		t.Error(err)
	}
	rest, _ := io.ReadAll(lines)
	if err := cmd.Wait(); err != nil {
		t.Errorf("%v\n%s", err, rest)
	}
}

// callWhenContinued is the process that TestStopped stops. It has a client, a call of which waits meanwhile,
// and its server.
func callWhenContinued(t *testing.T) {
	const silence = 4 * time.Second
	server, hash := serveStore(t, Config{silence: silence})
	ctx := testnet.Context(t)
	client, err := connect(ctx, server.Addr(), Config{}, 50*time.Millisecond, silence)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	got := make(chan error)
	go func() {
		_, err := client.Get(ctx, "k")
		got <- err
	}()
	testnet.Eventually(t, "the wait", func() bool { return hash.Waits() == 1 })
	fmt.Println("ready")
	io.ReadAll(os.Stdin) // ends when the process was stopped and goes on
	if err := hash.Set(ctx, "k", nil); err != nil {
		t.Error(err)
	}
	if err := <-got; err != nil {
		t.Error(err)
	}
	if _, _, err := client.TryGet(ctx, "k"); err != nil {
		t.Error(err)
	}
}

func TestServerAnswersPing(t *testing.T) {
	server, _ := serveStore(t, Config{})
	conn := testnet.RawDial(t, server.Addr(), dial.Greeting(storeMagic, storeVersion),
		(&request{op: opPing, id: 7}).frame())
	if _, err := dial.ReadGreeting(conn, storeMagic); err != nil {
		t.Fatal(err)
	}
	body, err := dial.ReadFrame(conn, maxReplyBytes)
	if err != nil {
		t.Fatal(err)
	}
	if r, err := decodeReply(body); err != nil || r.id != 7 || r.status != statusOK {
		t.Errorf("got reply %+v, %v", r, err)
	}
}

func TestDialTCP(t *testing.T) {
	addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(testnet.FreePort(t)))
	t.Run("refused", func(t *testing.T) {
		err := testnet.EventuallyError(t, func(ctx context.Context) error {
			_, err := Dial(ctx, addr, Config{})
			return err
		}, addr, "connection refused")
		if !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("got %v, want that dials were refused until the deadline", err)
		}
	})
	t.Run("server comes later", func(t *testing.T) {
		got := make(chan error)
		go func() {
			s, err := Dial(testnet.Context(t), addr, Config{})
			if err == nil {
				err = s.Set(testnet.Context(t), "k", nil)
				s.Close()
			}
			got <- err
		}()
		server, err := Serve(addr, NewHashStore(Limits{}), Config{})
		if err != nil {
			t.Skip("another process took the port: ", err)
		}
		defer server.Close()
		if err := <-got; err != nil {
			t.Error(err)
		}
	})
	t.Run("no port", func(t *testing.T) {
		_, err := Dial(testnet.Context(t), "127.0.0.1", Config{})
		testnet.WantError(t, err, "missing port")
	})
	t.Run("not a store", func(t *testing.T) {
		_, err := Dial(testnet.Context(t), testnet.FakeServer(t, func(conn net.Conn) {
			io.WriteString(conn, "SSH-2.0-x\r\n")
		}), Config{})
		testnet.WantError(t, err, `greeting is "SSH-", want "GHVS"`)
	})
	t.Run("Horovod's store", func(t *testing.T) {
		key, _ := secret.New()
		for _, refuses := range []bool{false, true} { // a server that sends nothing, and one that answers
			for _, s := range []secret.Secret{{}, key} {
				addr := testnet.FakeServer(t, func(conn net.Conn) {
					first := make([]byte, 4)
					io.ReadFull(conn, first)
					if string(first) != "GET " && !refuses {
						// This server sends nothing. Like Horovod's, it waits for the end of a request line.
						io.Copy(io.Discard, conn)
						return
					}
					io.WriteString(conn, "HTTP/1.0 404 Not Found\r\nServer: BaseHTTP/0.6\r\n\r\n")
				})
				parts := []string{"dial " + addr, "an HTTP server such as Horovod's rendezvous server",
					"start the ranks with hvdrun"}
				dial := func(ctx context.Context) error {
					_, err := Dial(ctx, addr, Config{Secret: s})
					return err
				}
				if refuses {
					testnet.WantError(t, dial(testnet.Context(t)), parts...)
				} else {
					testnet.EventuallyError(t, dial, parts...)
				}
			}
		}
	})
	t.Run("another version", func(t *testing.T) {
		_, err := Dial(testnet.Context(t), testnet.FakeServer(t, func(conn net.Conn) {
			dial.ReadGreeting(conn, storeMagic)
			conn.Write(dial.Greeting(storeMagic, 9))
		}), Config{})
		testnet.WantError(t, err, "version 9 of the protocol, want 3")
	})
}

func frameOf(body ...byte) []byte { return dial.SealFrame(append(dial.NewFrame(0), body...)) }

func TestGarbageToServer(t *testing.T) {
	t.Run("plain", func(t *testing.T) { testGarbageToServer(t, secret.Secret{}) })
	t.Run("TLS", func(t *testing.T) {
		key, _ := secret.New()
		testGarbageToServer(t, key)
	})
}

func testGarbageToServer(t *testing.T, key secret.Secret) {
	hello := dial.Greeting(storeMagic, storeVersion)
	get := (&request{op: opGet, id: 1, key: "missing"}).frame()
	unknown := (&request{op: numOps, id: 1, key: "k"}).frame()
	for _, test := range []struct {
		name   string
		parts  [][]byte
		reason string
	}{
		{"no greeting", [][]byte{[]byte("GET / HTTP/1.1\r\n\r\n")}, `greeting is \"GET \"`},
		{"old version", [][]byte{dial.Greeting(storeMagic, 0)}, "version 0"},
		{"oversized", [][]byte{hello, {0xff, 0xff, 0xff, 0xff}}, "frame of 4294967295 bytes"},
		{"just oversized", [][]byte{hello, binary.BigEndian.AppendUint32(nil, maxRequestBytes+1)},
			fmt.Sprintf("frame of %d bytes", maxRequestBytes+1)},
		{"empty frame", [][]byte{hello, frameOf()}, "malformed"},
		{"short frame", [][]byte{hello, frameOf(2, 0, 0)}, "malformed"},
		{"long frame", [][]byte{hello, frameOf(append(get[dial.FrameHeaderBytes:], 0)...)}, "malformed"},
		{"too many keys", [][]byte{hello, (&request{op: opWait, keys: make([]string, MaxKeys+1)}).frame()}, "malformed"},
		{"unused values", [][]byte{hello, (&request{op: opWatch, key: "k", values: [][]byte{{}}}).frame()},
			"watch has fields that it does not use"},
		{"unknown operation", [][]byte{hello, unknown}, fmt.Sprint("unknown operation ", uint8(numOps))},
	} {
		t.Run(test.name, func(t *testing.T) {
			log, entries := testnet.Logs()
			server, _ := serveStore(t, Config{Secret: key, Log: log})
			client := dialStore(t, server.Addr(), key)
			conn, err := key.Encrypted().Dial(testnet.RawDial(t, server.Addr()), storeMagic)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := conn.Write(bytes.Join(test.parts, nil)); err != nil {
				t.Fatal(err)
			}
			if _, err := io.Copy(io.Discard, conn); errors.Is(err, context.DeadlineExceeded) {
				t.Error(err)
			}
			testnet.Eventually(t, "the reason", func() bool {
				return testnet.Logged(entries, "closed a connection", strings.ReplaceAll(test.reason, `\"`,
					`"`))
			})
			if err := client.Set(testnet.Context(t), "k", []byte("v")); err != nil {
				t.Errorf("another client: %v", err)
			}
		})
	}
}

// If client and server do not have the same secret, the server refuses the client and logs the reason, and
// the error of the client says why. If the server has no secret but the client has one, the client retries
// until its deadline. Connections use TLS whether HVD_TLS is set or not.
func TestSecret(t *testing.T) {
	key, _ := secret.New()
	other, _ := secret.New()
	for _, test := range []struct {
		name           string
		server, client secret.Secret
		want           error
		logged         string
	}{
		{"the same", key, key, nil, ""},
		{"another", key, other, secret.ErrWrong, "bad certificate"},
		{"none at the client", key, secret.Secret{}, secret.ErrNeeded, `its first bytes are "GHVS"`},
		{"none at the server", secret.Secret{}, key, context.DeadlineExceeded, "requires the secret"},
		{"HVD_TLS at the client", key, key.Encrypted(), nil, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			log, entries := testnet.Logs()
			server, hash := serveStore(t, Config{Secret: test.server, Log: log})
			hangTimeout := time.Minute
			if test.want == context.DeadlineExceeded {
				// The client retries until the timeout: the server might belong to an earlier job that is
				// about to end.
				hangTimeout = 100 * time.Millisecond
			}
			ctx, cancel := context.WithTimeout(t.Context(), hangTimeout)
			defer cancel()
			client, err := Dial(ctx, server.Addr(), Config{Secret: test.client})
			if err == nil {
				err = client.Set(ctx, "k", nil)
				client.Close()
			}
			if !errors.Is(err, test.want) || (err == nil) != (test.want == nil) {
				t.Errorf("got %v, want %v", err, test.want)
			}
			if test.logged != "" {
				testnet.Eventually(t, "the reason", func() bool {
					return testnet.Logged(entries, "closed a connection", test.logged)
				})
			}
			if n, err := hash.NumKeys(t.Context()); err != nil || (n == 1) != (test.want == nil) {
				t.Errorf("%d keys, %v", n, err)
			}
		})
	}
}

// If a client stops sending in the middle of the proof, the server closes its connection. Until then the
// server serves other clients.
func TestHalfOpen(t *testing.T) {
	key, _ := secret.New()
	for name, say := range map[string]string{
		"silent":    "",
		"in a word": "\x16\x03\x01\x40\x00\x01\x00\x3f\xfc\x03\x03",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // the tests spend most of their time waiting
			testHalfOpen(t, key, []byte(say))
		})
	}
}

func testHalfOpen(t *testing.T, key secret.Secret, say []byte) {
	server, _ := serveStore(t, Config{Secret: key, handshake: 2 * time.Second})
	const many = 1000
	conns := make([]net.Conn, many)
	for i := range conns {
		conns[i] = testnet.RawDial(t, server.Addr(), say)
	}
	if err := dialStore(t, server.Addr(), key).Set(testnet.Context(t), "k", nil); err != nil {
		t.Error(err)
	}
	for _, conn := range conns {
		if _, err := io.Copy(io.Discard, conn); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatal("a connection without a proof stays open")
		}
	}
}

func TestDuplicateWait(t *testing.T) {
	server, hash := serveStore(t, Config{})
	get := (&request{op: opGet, id: 1, key: "missing"}).frame()
	conn := testnet.RawDial(t, server.Addr(), dial.Greeting(storeMagic, storeVersion), get, get)
	dial.ReadGreeting(conn, storeMagic)
	body, err := dial.ReadFrame(conn, maxReplyBytes)
	if err != nil {
		t.Fatal(err)
	}
	r, err := decodeReply(body)
	if err != nil {
		t.Fatal(err)
	}
	testnet.WantError(t, r.err(), "a request with number 1 is already waiting")
	if n := hash.Waits(); n > 1 {
		t.Errorf("%d waits, want 1", n)
	}
}

func FuzzDecodeRequest(f *testing.F) {
	for _, q := range []request{
		{}, {op: opCancel, id: 1}, {op: opAdd, id: 1 << 63, key: "n", delta: -1},
		{op: opSet, id: 2, key: "k", first: []byte("v")},
		{op: opCompareAndSet, id: 3, key: "k", second: []byte{}},
		{op: opWatch, id: 4, key: strings.Repeat("k", 1024), first: []byte{}},
	} {
		f.Add(q.frame()[dial.FrameHeaderBytes:])
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		q, err := decodeRequest(body)
		if err != nil {
			return
		}
		if out := q.frame()[dial.FrameHeaderBytes:]; !bytes.Equal(out, body) {
			t.Fatalf("%x is encoded again as %x", body, out)
		}
	})
}

func FuzzDecodeReply(f *testing.F) {
	for _, r := range []reply{
		{}, {id: 1, ok: true, value: []byte{}}, {id: 2, number: -1, value: []byte("v")},
		{id: 3, status: statusLimit, value: []byte("too much")},
	} {
		f.Add(r.frame()[dial.FrameHeaderBytes:])
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		r, err := decodeReply(body)
		if err != nil {
			return
		}
		if (r.err() == nil) != (r.status == statusOK) {
			t.Fatalf("status %d gives error %v", r.status, r.err())
		}
		if out := r.frame()[dial.FrameHeaderBytes:]; !bytes.Equal(out, body) {
			t.Fatalf("%x is encoded again as %x", body, out)
		}
	})
}

func FuzzCutRecord(f *testing.F) {
	f.Add(appendRecord(nil, "key", []byte("value")))
	f.Add(appendRecord(appendRecord(nil, "", nil), "k", []byte{0}))
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, 'k'})
	f.Fuzz(func(t *testing.T, b []byte) {
		if key, value, n := cutRecord(b); n > 0 && !bytes.Equal(appendRecord(nil, key, value), b[:n]) {
			t.Errorf("%x was read as %q, %x of %d bytes", b, key, value, n)
		}
	})
}
