package bootstrap

import (
	"context"
	"errors"
	"net"
	"testing"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/frame"
	"github.com/gohvd/gohvd/internal/serve"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/topo"
)

func TestRingFailures(t *testing.T) { overBoth(t, testRingFailures) }

func testRingFailures(t *testing.T, encrypt bool) {
	form := func(t *testing.T) []result {
		ctx := testnet.Context(t)
		ids, _ := openRoots(t, ctx, 1, Config{Encrypt: encrypt}, defaultLimits)
		cfgs := configs(4)
		results := joinAll(t, ctx, ids, cfgs...)
		joined(t, results, cfgs)
		return results
	}
	gather := func(t *testing.T, ctx context.Context, rings []result) {
		errs := make(chan error)
		for _, r := range rings {
			go func() {
				_, err := r.Allgather(ctx, nil)
				errs <- err
			}()
		}
		for range rings {
			testnet.WantError(t, <-errs, "bootstrap: allgather at rank", "of 4: ")
		}
	}
	t.Run("a rank leaves", func(t *testing.T) {
		rings := form(t)
		rings[2].Close()
		gather(t, testnet.Context(t), []result{rings[0], rings[1], rings[3]})
		_, err := rings[0].Allgather(testnet.Context(t), nil)
		testnet.WantError(t, err, "rank 0 of 4")
	})
	t.Run("context", func(t *testing.T) {
		rings := form(t)
		ctx, cancel := context.WithCancel(t.Context())
		failed := make(chan error)
		go func() {
			_, err := rings[1].Allgather(ctx, nil)
			failed <- err
		}()
		cancel()
		if err := <-failed; !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
		// Rank 1 again, for its ring is of no use any more, and one that needs it to pass a piece on.
		gather(t, testnet.Context(t), rings[1:3])
		if _, err := rings[1].Allgather(testnet.Context(t), nil); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v, want why the ring is of no use", err)
		}
	})
	t.Run("too large", func(t *testing.T) {
		rings := form(t)
		_, err := rings[0].Allgather(t.Context(), make([]byte, MaxInfoBytes+1))
		testnet.WantError(t, err, "rank 0 of 4: 4097 bytes, want at most 4096")
		gatherAll(t, testnet.Context(t), rings, 0) // and nothing is lost
	})
	t.Run("wrong piece", func(t *testing.T) {
		rings := form(t)
		if _, err := rings[0].next.Write(appendPiece(nil, 3, nil)); err != nil {
			t.Fatal(err)
		}
		_, err := rings[1].Allgather(testnet.Context(t), nil)
		testnet.WantError(t, err, "received the piece of rank 3 from rank 0, want that of rank 0")
	})
}

// What is given stays the caller's.
func TestAllgatherCopies(t *testing.T) { overBoth(t, testAllgatherCopies) }

func testAllgatherCopies(t *testing.T, encrypt bool) {
	ctx := testnet.Context(t)
	ids, _ := openRoots(t, ctx, 1, Config{Encrypt: encrypt}, defaultLimits)
	r := joinAll(t, ctx, ids, Config{Size: 1})[0]
	if r.err != nil {
		t.Fatal(r.err)
	}
	mine := []byte("a")
	all, err := r.Allgather(ctx, mine)
	mine[0] = 'b'
	if err != nil || string(all[0]) != "a" {
		t.Errorf("got %q, %v", all, err)
	}
}

// ringOf waits until rank has reported and returns the address of its ring listener.
func ringOf(t *testing.T, r *Root, rank int) string {
	t.Helper()
	reported(t, r, 1)
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.members[rank].addr
}

func TestStrangersAtTheRing(t *testing.T) { overBoth(t, testStrangersAtTheRing) }

func testStrangersAtTheRing(t *testing.T, encrypt bool) {
	ctx := testnet.Context(t)
	log, logs := testnet.Logs()
	ids, roots := openRoots(t, ctx, 1, Config{Encrypt: encrypt}, defaultLimits)
	cfgs := configs(3)
	cfgs[0].Log = log
	first := start(t, ctx, ids, cfgs[0])
	addr := ringOf(t, roots[0], 0)
	if n, err := readToEnd(testnet.RawDial(t, addr, []byte("GET / HTTP/1.1\r\n\r\n"))); isTimeout(err) {
		t.Errorf("read %d bytes, %v", n, err)
	}
	_, _, key, err := meetings(ids)
	if err != nil {
		t.Fatal(err)
	}
	root, err := ids[0].open()
	if err != nil {
		t.Fatal(err)
	}
	// The key of the root is not that of the ring.
	if _, err := dial.Greet(ctx, addr, root.key, ringMagic, protocolVersion); err == nil {
		t.Error("the key of the root opened the ring")
	}
	// Nor is that of the ring of another job.
	others, _ := openRoots(t, ctx, 1, Config{Encrypt: encrypt}, defaultLimits)
	_, _, otherKey, err := meetings(others)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := dial.Greet(ctx, addr, otherKey, ringMagic, protocolVersion); err == nil {
		t.Error("the key of another ring opened the ring")
	}
	greet := func(f []byte) net.Conn {
		conn, err := dial.Greet(ctx, addr, key, ringMagic, protocolVersion)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		if _, err := conn.Write(f); err != nil {
			t.Fatal(err)
		}
		return conn
	}
	for _, h := range []hello{{1, 0, 3}, {2, 1, 3}, {2, 0, 4}} {
		why := readFailure(t, greet(encodeHello(h)))
		testnet.WantError(t, why, "rank 0 (pid 1000", "want rank 2 of 3, once")
	}
	if n, err := readToEnd(greet(encodePlain(kindDone))); n != 0 || isTimeout(err) {
		t.Errorf("read %d bytes, %v", n, err)
	}
	refusal := "the other end gave no proof"
	if encrypt {
		refusal = "bad certificate"
	}
	for _, want := range []string{"not let in: secret: the other end has no secret", refusal, "was dialed by rank 1 of 3 for rank 0", "frame is of kind 6"} {
		testnet.Eventually(t, want, func() bool { return testnet.Logged(logs, "ring closed a connection", want) })
	}
	rest := joinAll(t, ctx, ids, cfgs[1:]...)
	joined(t, append([]result{<-first}, rest...), cfgs)
	// The place is taken now.
	why := readFailure(t, greet(encodeHello(hello{2, 0, 3})))
	testnet.WantError(t, why, "want rank 2 of 3, once")
	keepsKeys(t, ids, logs, why)
}

// fakeRoot is a root that answers a report with frames and then closes.
func fakeRoot(t *testing.T, frames ...[]byte) []ID {
	t.Helper()
	l := defaultLimits
	ids, roots := openRoots(t, testnet.Context(t), 1, Config{}, l)
	m, err := ids[0].open()
	if err != nil {
		t.Fatal(err)
	}
	d := &door{key: m.key, magic: rootMagic, way: serve.NewDoorway(10), timeout: l.proof}
	addr := testnet.FakeServer(t, func(conn net.Conn) {
		over, _, err := d.meet(conn)
		if err != nil {
			return
		}
		for _, f := range frames {
			if _, err := over.Write(f); err != nil {
				return
			}
		}
		if len(frames) > 0 {
			_, _ = frame.Read(over, maxControlBytes) // until the rank says why it fails
		}
	})
	roots[0].Close()
	tcp, err := net.ResolveTCPAddr("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	id, err := newID(tcp.AddrPort(), [keyBytes]byte(ids[0][idKey:]), false)
	if err != nil {
		t.Fatal(err)
	}
	return []ID{id}
}

func TestWrongRoots(t *testing.T) {
	next := func(rank topo.Rank) []byte { return encodeNext(peer{rank, 1, "h", "127.0.0.1:1"}) }
	for _, c := range []struct {
		name   string
		frames [][]byte
		want   string
	}{
		{"closes", nil, "is lost: it closed the connection"},
		{"wrong next", [][]byte{next(2)}, "as the next one, want rank 1"},
		{"two next", [][]byte{next(1), next(1), next(1)}, "it named the next rank twice"},
		{"wrong kind", [][]byte{encodePlain(kindDone)}, "frame is of kind 6, want one of [2 7 8]"},
		{"long complete", [][]byte{{0, 0, 0, 2, byte(kindComplete), 0}}, "1 bytes too many"},
		{"short next", [][]byte{{0, 0, 0, 1, byte(kindNext)}}, "4 bytes early"},
		{"bad failure", [][]byte{{0, 0, 0, 2, byte(kindFailure), 0}}, "reason is 0"},
		{"huge", [][]byte{{0xff, 0xff, 0xff, 0xff}}, "frame of 4294967295 bytes"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := Join(testnet.Context(t), fakeRoot(t, c.frames...), configOf(0, 3))
			testnet.WantError(t, err, "join as rank 0 of 3", c.want)
		})
	}
}
