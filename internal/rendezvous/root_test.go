package rendezvous

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/rendezvous/rendezvouspb"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/testnet"
)

// rootRequest returns the encoded JoinRequest that a rank sends to root.
func rootRequest(t *testing.T, root *rendezvouspb.Root, nonce []byte, rank, size int) []byte {
	t.Helper()
	record := recordOf(rank, 0)
	frame, err := appendMessage(nil, &rendezvouspb.JoinRequest{
		Job: "job", Token: root.GetToken(), Nonce: nonce, Rank: int32(rank), Size: int64(size),
		Record: recordToProto(&record),
	})
	if err != nil {
		t.Fatal(err)
	}
	return frame
}

// If the connection of a rank breaks, the rank asks again with the same nonce. The root does not treat the
// rank as a duplicate, and sends it the table, even if the epoch has become complete meanwhile.
func TestRankAsksAgain(t *testing.T) { overBoth(t, testRankAsksAgain) }

func testRankAsksAgain(t *testing.T, key secret.Secret) {
	ctx := testnet.Context(t)
	kv := newStore(t)
	log, entries := testnet.Logs()
	zero := keyed(kv, 0, 3, key)
	zero.Log = log
	r := start(t, ctx, zero)
	root := rootOf(t, kv)
	ask := func(nonce []byte) net.Conn {
		conn := say(t, key, root.GetAddr(), dial.Greeting(rootMagic, rootVersion),
			rootRequest(t, root, nonce, 1, 3))
		if _, err := dial.ReadGreeting(conn, rootMagic); err != nil {
			t.Fatal(err)
		}
		return conn
	}
	wantKind := func(conn net.Conn, kind rendezvouspb.Answer_Kind) {
		t.Helper()
		var a rendezvouspb.Answer
		body, err := dial.ReadFrame(conn, maxAnswerBytes)
		if err == nil {
			err = proto.Unmarshal(body, &a)
		}
		if err != nil || a.GetKind() != kind {
			t.Fatalf("got answer %v, %v, want %v", &a, err, kind)
		}
		for rank := 0; kind == rendezvouspb.Answer_TABLE && rank < 3; rank++ {
			body, err := dial.ReadFrame(conn, maxRecordBytes)
			if err != nil {
				t.Fatal(err)
			}
			if got, err := decodeRecord(body); err != nil || !same(got, recordOf(rank, 0)) {
				t.Errorf("record %d: got %v, %v", rank, got, err)
			}
		}
		if kind == rendezvouspb.Answer_TABLE {
			return // the records come after this frame
		}
		if n, err := conn.Read(make([]byte, 1)); n != 0 || err != io.EOF {
			t.Errorf("after the answer: got %d bytes, %v", n, err)
		}
	}
	nonce := newToken()
	broken := ask(nonce)
	testnet.Eventually(t, "rank 1", func() bool {
		return testnet.Logged(entries, "rank has joined", "peer:1")
	})
	again := ask(nonce)
	if _, err := broken.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("the first connection: got %v, want EOF", err)
	}
	two := start(t, ctx, keyed(kv, 2, 3, key))
	wantKind(again, rendezvouspb.Answer_TABLE)
	formed(t, []result{<-r}, recordOf(0, 0), recordOf(1, 0), recordOf(2, 0))
	<-two
	wantKind(ask(nonce), rendezvouspb.Answer_TABLE)
	wantKind(ask(newToken()), rendezvouspb.Answer_COMPLETE)
	root.Token = newToken()
	wantKind(ask(nonce), rendezvouspb.Answer_STALE)
}

// If a root closes the connection without an answer, the rank asks the same root again, with the same nonce.
func TestJoinerTriesAgain(t *testing.T) {
	records := []Record{recordOf(0, 0), recordOf(1, 0)}
	var mu sync.Mutex
	var nonces [][]byte
	addr := testnet.FakeServer(t, func(conn net.Conn) {
		dial.ReadGreeting(conn, rootMagic)
		conn.Write(dial.Greeting(rootMagic, rootVersion))
		body, err := dial.ReadFrame(conn, maxJoinRequestBytes)
		if err != nil {
			t.Errorf("reading the request: %v", err)
			return
		}
		q, err := decodeJoinRequest(body)
		if err != nil {
			t.Error(err)
			return
		}
		mu.Lock()
		defer mu.Unlock()
		nonces = append(nonces, q.GetNonce())
		if len(nonces) < 3 {
			return
		}
		table, err := appendMessage(nil, &rendezvouspb.Answer{Kind: rendezvouspb.Answer_TABLE, Epoch: 1})
		for i := 0; i < len(records) && err == nil; i++ {
			table, err = appendMessage(table, recordToProto(&records[i]))
		}
		if err != nil {
			t.Error(err)
		}
		conn.Write(table)
	})
	kv := newStore(t)
	publishRoot(t, kv, addr, 1)
	formed(t, []result{<-start(t, testnet.Context(t), config(kv, 1, 2))}, records...)
	for _, nonce := range nonces {
		if !bytes.Equal(nonce, nonces[0]) {
			t.Errorf("one call of Join used the nonces %x", nonces)
		}
	}
}

// If the table arrives after the store has a newer root, the rank still uses the table. The old root was
// closed because its epoch is complete, and all other ranks belong to that epoch.
func TestTableIsLateButValid(t *testing.T) {
	ctx := testnet.Context(t)
	kv := newStore(t)
	records := []Record{recordOf(0, 0), recordOf(1, 0)}
	addr := testnet.FakeServer(t, func(conn net.Conn) {
		dial.ReadGreeting(conn, rootMagic)
		conn.Write(dial.Greeting(rootMagic, rootVersion))
		if _, err := dial.ReadFrame(conn, maxJoinRequestBytes); err != nil {
			t.Errorf("reading the request: %v", err)
		}
		testnet.Eventually(t, "rank 1 watches", func() bool { return kv.Waits() == 1 })
		publishRoot(t, kv, closedPort(t), 2)
		testnet.Eventually(t, "rank 1 knows the newer root", func() bool { return kv.Waits() == 0 })
		table, err := appendMessage(nil, &rendezvouspb.Answer{Kind: rendezvouspb.Answer_TABLE, Epoch: 1})
		for i := 0; i < len(records) && err == nil; i++ {
			conn.Write(table) // sent in pieces, so that time passes between them
			table, err = appendMessage(nil, recordToProto(&records[i]))
		}
		if err != nil {
			t.Error(err)
		}
		conn.Write(table)
	})
	publishRoot(t, kv, addr, 1)
	cfg := config(kv, 1, 2)
	formed(t, []result{<-start(t, ctx, cfg)}, records...)
}

func TestGarbageToRoot(t *testing.T) { overBoth(t, testGarbageToRoot) }

func testGarbageToRoot(t *testing.T, key secret.Secret) {
	ctx := testnet.Context(t)
	kv := newStore(t)
	log, entries := testnet.Logs()
	zero := keyed(kv, 0, 4, key)
	zero.Log = log
	r := start(t, ctx, zero)
	one := start(t, ctx, keyed(kv, 1, 4, key))
	root := rootOf(t, kv)
	testnet.Eventually(t, "rank 1", func() bool {
		return testnet.Logged(entries, "rank has joined", "peer:1")
	})

	hello := dial.Greeting(rootMagic, rootVersion)
	request := rootRequest(t, root, newToken(), 2, 4)
	shortNonce := rootRequest(t, root, []byte("short"), 2, 4)
	early, err := appendMessage(nil, &rendezvouspb.Status{Kind: rendezvouspb.Status_FAILED,
		Text: "too early"})
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name   string
		parts  [][]byte
		reason string
	}{
		{"web browser", [][]byte{[]byte("GET / HTTP/1.1\r\n\r\n")}, `greeting is "GET "`},
		{"the other protocol", [][]byte{dial.Greeting("GHVS", 2)}, `greeting is "GHVS"`},
		{"another version", [][]byte{dial.Greeting(rootMagic, 1)},
			fmt.Sprintf("version 1 of the protocol, want %d", rootVersion)},
		{"oversized", [][]byte{hello, {0xff, 0, 0, 0}}, "frame of 4278190080 bytes"},
		{"not protobuf", [][]byte{hello, dial.SealFrame(append(dial.NewFrame(2), 0xff, 0xff))}, "proto"},
		{"empty", [][]byte{hello, dial.SealFrame(dial.NewFrame(0))}, "token has 0 bytes"},
		{"nonce", [][]byte{hello, shortNonce}, "the nonce has 5 bytes"},
		{"two requests", [][]byte{hello, request, request}, "reading a status"},
		{"a failure before the table", [][]byte{hello, request, early},
			"reading a status: got FAILED before all ranks have joined"},
	} {
		conn := say(t, key, root.GetAddr(), test.parts...)
		io.Copy(io.Discard, conn)
		testnet.Eventually(t, test.name, func() bool {
			return testnet.Logged(entries, "closed a connection", test.reason)
		})
	}
	// This client sends half a request and nothing after that.
	say(t, key, root.GetAddr(), hello, request[:10])

	rest := joinAll(t, ctx, keyed(kv, 2, 4, key), keyed(kv, 3, 4, key))
	formed(t, append([]result{<-r, <-one}, rest...), recordOf(0, 0), recordOf(1, 0), recordOf(2, 0),
		recordOf(3, 0))
}

// The root limits the number of connections whose handshake is not complete. If there are more, it closes the
// oldest of them, so that a rank can still join.
func TestRootBoundsHandshakes(t *testing.T) { overBoth(t, testRootBoundsHandshakes) }

func testRootBoundsHandshakes(t *testing.T, key secret.Secret) {
	ctx := testnet.Context(t)
	kv := newStore(t)
	r := start(t, ctx, keyed(kv, 0, 2, key))
	root := rootOf(t, kv)
	var clients []net.Conn
	for i := range maxHandshakes {
		// Only every 32nd client and the last one run the handshake, because a thousand TLS handshakes take
		// too long.
		if i%32 > 0 && i < maxHandshakes-1 {
			clients = append(clients, testnet.RawDial(t, root.GetAddr()))
			continue
		}
		conn := say(t, key, root.GetAddr(), dial.Greeting(rootMagic, rootVersion))
		// When the greeting of the root arrives, the root has accepted the connection.
		if _, err := dial.ReadGreeting(conn, rootMagic); err != nil {
			t.Fatal(err)
		}
		clients = append(clients, conn)
	}
	one := start(t, ctx, keyed(kv, 1, 2, key))
	formed(t, []result{<-r, <-one}, recordOf(0, 0), recordOf(1, 0))
	// This deadline is earlier than the root's handshake timeout. So if the connection is closed, the reason
	// is the limit on handshakes and not the timeout.
	clients[0].SetReadDeadline(time.Now().Add(handshakeTimeout / 2))
	if _, err := io.Copy(io.Discard, clients[0]); err != nil && !errors.Is(err, syscall.ECONNRESET) &&
		!errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("the oldest client: got %v, want a closed connection", err)
	}
	clients[maxHandshakes-1].SetReadDeadline(time.Now().Add(10 * time.Millisecond))
	if _, err := clients[maxHandshakes-1].Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the newest client: got %v, want an open connection", err)
	}
}

// If the process of the root may open only 1024 descriptors, more connections than that do not fail the root.
// A rank can still join.
func TestFloodOfRoot(t *testing.T) {
	testnet.LimitDescriptors(t, 1024)
	ctx := testnet.Context(t)
	kv := newStore(t)
	key, _ := secret.New()
	r := start(t, ctx, keyed(kv, 0, 2, key))
	testnet.Flood(t, rootOf(t, kv).GetAddr(), 3000)
	one := start(t, ctx, keyed(kv, 1, 2, key))
	formed(t, []result{<-r, <-one}, recordOf(0, 0), recordOf(1, 0))
}

// If a process has another secret or none, or does not begin with TLS, it is refused and its error says why.
// The ranks are not affected.
func TestSecret(t *testing.T) {
	ctx := testnet.Context(t)
	key, _ := secret.New()
	other, _ := secret.New()
	kv := newStore(t)
	log, entries := testnet.Logs()
	zero := keyed(kv, 0, 2, key)
	zero.Log = log
	r := start(t, ctx, zero)
	root := rootOf(t, kv)
	for _, wrong := range []struct {
		key  secret.Secret
		want error
	}{{other.Encrypted(), secret.ErrWrong}, {secret.Secret{}, secret.ErrNeeded}, {key, secret.ErrMixed}} {
		conn, err := dial.Greet(ctx, root.GetAddr(), wrong.key, rootMagic, rootVersion)
		if err == nil {
			conn.Close()
		}
		if !errors.Is(err, wrong.want) {
			t.Errorf("%v: got %v, want %v", wrong, err, wrong.want)
		}
	}
	testnet.Eventually(t, "the log", func() bool {
		return testnet.Logged(entries, "closed a connection", "HVD_TLS")
	})
	one := start(t, ctx, keyed(kv, 1, 2, key))
	formed(t, []result{<-r, <-one}, recordOf(0, 0), recordOf(1, 0))
}

// A process without the secret has made a rank dial it, and relays the rank's connection to the root. It sees
// no record of the table, and if it changes a byte of the table, the rank refuses the table.
func TestRelay(t *testing.T) {
	key, _ := secret.New()
	for _, changes := range []bool{false, true} {
		t.Run(fmt.Sprint("changes ", changes), func(t *testing.T) {
			ctx := testnet.Context(t)
			kv, foreign := newStore(t), newStore(t)
			wait, cancel := context.WithCancelCause(ctx)
			defer cancel(nil)
			errLeft := errors.New("rank 1 has closed the connection on which bytes were changed")
			var (
				addr   atomic.Value // of the root
				seen   bytes.Buffer
				relays sync.WaitGroup
			)
			relay, err := dial.Serve("127.0.0.1:0", "relay", 1, nil, func(_ context.Context,
				rank net.Conn, slot *dial.Slot) error {
				slot.Release()
				conn := testnet.RawDial(t, addr.Load().(string))
				defer conn.Close()
				relays.Go(func() {
					_, _ = io.Copy(conn, rank)
					if changes {
						cancel(errLeft) // otherwise rank 1 dials again
					}
					_ = conn.(*net.TCPConn).CloseWrite()
				})
				for b := make([]byte, 64<<10); ; {
					n, err := conn.Read(b)
					seen.Write(b[:n])
					if changes && n > 0 {
						b[n-1] ^= 1
					}
					if _, writeErr := rank.Write(b[:n]); err != nil || writeErr != nil {
						return err
					}
				}
			})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { // called when the ranks have left
				relay.Close()
				relays.Wait()
				if seen.Len() == 0 {
					t.Error("rank 1 has not used the relay")
				}
				if record := recordOf(0, 0); bytes.Contains(seen.Bytes(), []byte(record.Addr)) {
					t.Error("the relay has read the table")
				}
			})
			r := start(t, ctx, keyed(kv, 0, 2, key))
			root := rootOf(t, kv)
			addr.Store(root.GetAddr())
			root.Addr = relay.Addr()
			value, err := proto.Marshal(root)
			if err != nil {
				t.Fatal(err)
			}
			one := keyed(foreign, 1, 2, key)
			if err := foreign.Set(ctx, one.rootKey(), value); err != nil {
				t.Fatal(err)
			}
			got := <-start(t, wait, one)
			if changes {
				if got.err == nil {
					t.Error("rank 1 has joined over a connection on which bytes were changed")
				}
				if context.Cause(wait) != errLeft {
					t.Errorf("got %v, want that %v", context.Cause(wait), errLeft)
				}
				got = <-start(t, ctx, keyed(kv, 1, 2, key))
			}
			formed(t, []result{<-r, got}, recordOf(0, 0), recordOf(1, 0))
		})
	}
}

// If rank 0 calls Close as soon as it has the table, the other ranks still get the table.
func TestCloseDeliversTables(t *testing.T) { overBoth(t, testCloseDeliversTables) }

func testCloseDeliversTables(t *testing.T, key secret.Secret) {
	for range 20 {
		ctx := testnet.Context(t)
		kv := newStore(t)
		r := start(t, ctx, keyed(kv, 0, 3, key))
		one, two := start(t, ctx, keyed(kv, 1, 3, key)), start(t, ctx, keyed(kv, 2, 3, key))
		zero := <-r
		if zero.err == nil {
			zero.Close()
		}
		formed(t, []result{zero, <-one, <-two}, recordOf(0, 0), recordOf(1, 0), recordOf(2, 0))
	}
}

func FuzzDecodeRoot(f *testing.F) {
	for _, root := range []*rendezvouspb.Root{{}, {Attempt: 1, Token: make([]byte, tokenBytes),
		Addr: "127.0.0.1:1", Host: "h", Pid: -1}} {
		value, err := proto.Marshal(root)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(value)
	}
	f.Fuzz(func(t *testing.T, value []byte) {
		root, err := decodeRoot(value)
		if err != nil {
			return
		}
		again, err := proto.Marshal(root)
		if err != nil {
			t.Fatal(err)
		}
		if same, err := decodeRoot(again); err != nil || !proto.Equal(root, same) {
			t.Fatalf("%v is decoded again as %v, %v", root, same, err)
		}
	})
}

func FuzzDecodeJoinRequest(f *testing.F) {
	record := recordOf(2, 0)
	for _, q := range []*rendezvouspb.JoinRequest{
		{},
		{Job: "j", Token: newToken(), Nonce: newToken(), Rank: -1, Size: 1 << 40, LastEpoch: maxEpoch,
			Record: recordToProto(&record)},
	} {
		body, err := proto.Marshal(q)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(body)
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		q, err := decodeJoinRequest(body)
		if err != nil {
			return
		}
		if err := q.record.check(); err != nil || q.GetLastEpoch() > maxEpoch ||
			len(q.GetNonce()) != tokenBytes {
			t.Fatalf("%v was accepted: %v", q.JoinRequest, err)
		}
		again, err := proto.Marshal(q.JoinRequest)
		if err != nil {
			t.Fatal(err)
		}
		if same, err := decodeJoinRequest(again); err != nil ||
			!proto.Equal(q.JoinRequest, same.JoinRequest) {
			t.Fatalf("%v is decoded again as %v, %v", q, same, err)
		}
	})
}
