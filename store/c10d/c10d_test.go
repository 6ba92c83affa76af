package c10d_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest"

	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/store"
	"github.com/gohvd/gohvd/store/c10d"
	"github.com/gohvd/gohvd/store/storetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// serve starts a server. It returns the server's address and the store that it serves.
func serve(t testing.TB, cfg c10d.Config) (addr string, hash *store.HashStore) {
	t.Helper()
	return serveWith(t, func(addr string, hash *store.HashStore) (*c10d.Server, error) {
		return c10d.Serve(addr, hash, cfg)
	})
}

// serveWith is like serve, but calls the given function to start the server.
func serveWith(t testing.TB, serve func(addr string, hash *store.HashStore) (*c10d.Server, error)) (
	addr string, hash *store.HashStore) {
	t.Helper()
	hash = store.NewHashStore(store.Limits{})
	server, err := serve("127.0.0.1:0", hash)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Close(); err != nil {
			t.Error(err)
		}
	})
	return server.Addr(), hash
}

func open(t testing.TB, addr string, d c10d.Dialect) *c10d.Store {
	t.Helper()
	s, err := c10d.Dial(testnet.Context(t), addr, d)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func TestStoreConforms(t *testing.T) {
	for name, kind := range map[string]struct {
		dialect c10d.Dialect
		lacks   storetest.Lacks
	}{
		"modern": {c10d.Modern, storetest.Lacks{Empty: true, Reasons: true}},
		"2.1":    {c10d.Torch21, storetest.Lacks{Empty: true, Reasons: true, Queues: true}},
	} {
		t.Run(name, func(t *testing.T) {
			storetest.Run(t, kind.lacks, func(t *testing.T) store.Store {
				addr, _ := serve(t, c10d.Config{Torch21: kind.dialect == c10d.Torch21,
					Log: zaptest.NewLogger(t)})
				return open(t, addr, kind.dialect)
			})
		})
	}
}

// wire converts text to bytes, word by word: 'text' is a string or value preceded by its length, +5 and -1
// are 64-bit integers, [n starts a list of n elements, and any other word is bytes in hexadecimal.
func wire(t *testing.T, text string) []byte {
	t.Helper()
	var b []byte
	for _, word := range strings.Fields(text) {
		var n int64
		switch word[0] {
		case '\'':
			s := strings.Trim(word, "'")
			b = append(binary.LittleEndian.AppendUint64(b, uint64(len(s))), s...)
		case '+', '-', '[':
			if _, err := fmt.Sscan(strings.TrimLeft(word, "[+"), &n); err != nil {
				t.Fatalf("%q: %v", word, err)
			}
			b = binary.LittleEndian.AppendUint64(b, uint64(n))
		default:
			h, err := hex.DecodeString(word)
			if err != nil {
				t.Fatalf("%q: %v", word, err)
			}
			b = append(b, h...)
		}
	}
	return b
}

// client is a connection on which the test sends and receives bytes itself.
type client struct {
	t *testing.T
	net.Conn
}

func dialRaw(t *testing.T, addr string, hello string) *client {
	t.Helper()
	return &client{t, testnet.RawDial(t, addr, wire(t, hello))}
}

// say sends a request and checks that the answer arrives.
func (c *client) say(request, answer string) {
	c.t.Helper()
	if _, err := c.Write(wire(c.t, request)); err != nil {
		c.t.Fatalf("%s: %v", request, err)
	}
	c.hear(request, answer)
}

func (c *client) hear(what, answer string) {
	c.t.Helper()
	want := wire(c.t, answer)
	got := make([]byte, len(want))
	if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, want) {
		c.t.Fatalf("%s: got %x (%v), want %x", what, got, err, want)
	}
}

// closed checks that the server closes the connection without an answer.
func (c *client) closed(why string) {
	c.t.Helper()
	if got, err := io.ReadAll(c); len(got) > 0 || err != nil && !errors.Is(err, syscall.ECONNRESET) {
		c.t.Errorf("%s: got %x (%v), want that the server closes the connection", why, got, err)
	}
}

// hello is the first message of modern clients. Since PyTorch 2.5 they send a ping after it.
const hello = "00 ce f7 85 3c"

// TestDialects sends requests as clients of each version do, and compares the answers byte by byte.
func TestDialects(t *testing.T) {
	for name, test := range map[string]struct {
		hello, ping string
		// n converts the modern number of an operation to the number that this version uses.
		n      func(modern int) string
		many   bool // whether the version has append and calls with many keys
		queues bool
	}{
		"1.13": {n: func(m int) string {
			if m == 8 {
				return "08"
			}
			return fmt.Sprintf("%02x", m-1)
		}},
		"2.1": {n: func(m int) string { return fmt.Sprintf("%02x", m-1) }, many: true},
		"2.2": {hello: hello, n: func(m int) string { return fmt.Sprintf("%02x", m) }, many: true},
		"2.8": {hello: hello, ping: "0d 39300000", n: func(m int) string { return fmt.Sprintf("%02x", m) },
			many: true, queues: true},
	} {
		t.Run(name, func(t *testing.T) {
			addr, _ := serve(t, c10d.Config{Log: zaptest.NewLogger(t), Torch21: name == "2.1"})
			c := dialRaw(t, addr, test.hello)
			if test.ping != "" {
				c.say(test.ping, "39300000")
			}
			// Each client increments the counter of workers, and rank 0 reads it.
			c.say(test.n(4)+" 'init/' +1", "+1")
			c.say(test.n(3)+" 'init/'", "'1'")
			if name == "1.13" {
				// Version 1.13 opens a second connection, for watch_key, on which it sends nothing in this
				// test.
				silent := dialRaw(t, addr, "")
				defer silent.Close()
			}
			c.say(test.n(1)+" '/k' 'v1' "+test.n(6)+" [1 '/k' "+test.n(3)+" '/k'", "00 'v1'")
			c.say(test.n(4)+" '/n' +5", "+5")
			c.say(test.n(4)+" '/n' -7", "-2")
			c.say(test.n(3)+" '/n'", "'-2'")
			for _, cas := range []string{"'' 'a' = 'a'", "'b' 'c' = 'a'", "'a' 'c' = 'c'"} {
				args, want, _ := strings.Cut(cas, " = ")
				c.say(test.n(2)+" '/c' "+args, want)
			}
			c.say(test.n(2)+" '/none' 'x' 'y'", "'x'")
			c.say(test.n(5)+" [2 '/k' '/none'", "01")
			c.say(test.n(5)+" [2 '/k' '/n'", "00")
			c.say(test.n(7), "+4")
			c.say(test.n(8)+" '/c'", "+1")
			c.say(test.n(8)+" '/c'", "+0")
			c.say(test.n(6)+" [0", "00")
			c.say(test.n(3)+" '/none'", "''")
			if test.many {
				c.say(test.n(9)+" '/a' 'x' "+test.n(9)+" '/a' 'yz' "+test.n(3)+" '/a'", "'xyz'")
				c.say(test.n(11)+" [2 '/m1' '1' '/m2' '' "+test.n(10)+" [3 '/m2' '/m1' '/a'", "'' '1' 'xyz'")
				c.say(test.n(12), "01")
			}
			if test.queues {
				c.say("0f '/q'", "+0")
				c.say("0e '/q' 'one' 0e '/q' 'two' 10 '/q'", "+2")
				c.say("06 [1 '/q'", "00")
				c.say("0f '/q'", "+2 'one'")
				c.say("0f '/q'", "+1 'two'")
				c.say("05 [1 '/q'", "01")
				c.say("0e '/q' 'three' 11", "[6 '/a' '/k' '/m1' '/m2' '/n' 'init/'")
			}
		})
	}
}

// The server accepts a request that arrives one byte at a time.
func TestPieces(t *testing.T) {
	addr, _ := serve(t, c10d.Config{})
	for _, hello := range []string{"", hello} {
		c := dialRaw(t, addr, "")
		set, ask := "00 '/k' 'value'", "06"
		if hello != "" {
			set, ask = hello+" 01 '/k' 'value'", "07"
		}
		for _, b := range wire(t, set) {
			if _, err := c.Write([]byte{b}); err != nil {
				t.Fatal(err)
			}
			runtime.Gosched()
		}
		c.say(ask, "+1")
	}
}

// If an old client has used an operation that only PyTorch 2.1 has, or if Torch21 is set, the server
// interprets operations 7 and 8 as delete_key and append. Otherwise it interprets 8 as delete_key, and closes
// the connection if the client uses 7.
func TestOldVersions(t *testing.T) {
	addr, hash := serve(t, c10d.Config{})
	unsure := dialRaw(t, addr, "")
	unsure.say("00 '/k' 'v' 08 '/k'", "+1") // operation 8 is delete_key here
	dialRaw(t, addr, "07 '/k'").closed("an operation 7 that may be watch_key")
	shown := dialRaw(t, addr, "")
	// Operation 10 is multi_set, which only 2.1 has. So a later operation 8 is append.
	shown.say("0a [1 '/k' 'v' 08 '/k' 'w' 02 '/k'", "'vw'")
	shown.say("07 '/k'", "+1")
	torch21, _ := serve(t, c10d.Config{Torch21: true})
	dialRaw(t, torch21, "").say("08 '/k' 'w' 02 '/k'", "'w'")
	dialRaw(t, torch21, "").say("07 '/k'", "+1")
	if n, err := hash.NumKeys(t.Context()); n != 0 || err != nil {
		t.Errorf("%d keys are left (%v), want 0", n, err)
	}
}

// The server answers cancel_wait with one byte. If the wait has ended before, the answer to the wait arrives
// before this byte.
func TestCancelWait(t *testing.T) {
	addr, hash := serve(t, c10d.Config{})
	c := dialRaw(t, addr, hello)
	c.say("0c", "01") // there is no wait to cancel
	c.say("06 [1 '/k' 0c", "01")
	if err := hash.Set(t.Context(), "/k", nil); err != nil {
		t.Fatal(err)
	}
	c.say("07", "+1") // a cancelled wait gets no answer
	for i := range 200 {
		key := fmt.Sprintf("/k%d", i)
		if _, err := c.Write(wire(t, "06 [1 '"+key+"'")); err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			if err := hash.Set(t.Context(), key, nil); err != nil {
				t.Error(err)
			}
		})
		if _, err := c.Write(wire(t, "0c 0d 01020304")); err != nil {
			t.Fatal(err)
		}
		var b [1]byte
		if _, err := io.ReadFull(c, b[:]); err != nil {
			t.Fatal(err)
		}
		if b[0] == 0 {
			c.hear("the cancellation", "01")
		} else if b[0] != 1 {
			t.Fatalf("got %d", b[0])
		}
		c.hear("the ping", "01020304")
		wg.Wait()
	}
}

// An old client gives up a wait without telling the server. When the client has sent another request, the
// server does not answer the wait any more, because the client would take this answer for the answer to its
// new request.
func TestStaleWait(t *testing.T) {
	addr, hash := serve(t, c10d.Config{})
	c := dialRaw(t, addr, "")
	c.say("05 [1 '/late' 06", "+0")
	if err := hash.Set(t.Context(), "/late", nil); err != nil {
		t.Fatal(err)
	}
	c.say("06", "+1")
	c.say("05 [1 '/late'", "00")
}

// If a client waits for a key, every operation with which another client sets the key wakes the waiting
// client.
func TestWake(t *testing.T) {
	addr, hash := serve(t, c10d.Config{})
	for i, request := range []string{"02 '/k0' '' 'v'", "04 '/k1' +1", "09 '/k2' 'v'", "0b [1 '/k3' 'v'",
		"01 '/k4' 'v'", "0e '/k5' 'v'"} {
		c := dialRaw(t, addr, hello+fmt.Sprintf(" 06 [1 '/k%d'", i))
		testnet.Eventually(t, "the wait", func() bool { return hash.Waits() == 1 })
		dialRaw(t, addr, hello+" "+request)
		c.hear(request, "00")
	}
}

// An old and a modern client connect to the same port, and each reads the values that the other has set.
func TestFamiliesShare(t *testing.T) {
	addr, _ := serve(t, c10d.Config{})
	older, newer := dialRaw(t, addr, ""), dialRaw(t, addr, hello)
	older.say("00 '/a' '1' 06", "+1")
	newer.say("03 '/a'", "'1'")
	newer.say("01 '/b' '2' 07", "+2")
	older.say("02 '/b'", "'2'")
}

func TestGarbage(t *testing.T) {
	huge := "0000000000000010" // a length of 2^60
	for name, test := range map[string]struct{ sent, reason string }{
		"web browser":        {hex.EncodeToString([]byte("GET / HTTP/1.1\r\n\r\n")), "unknown operation 71"},
		"almost validated":   {"00 ce f7 85 3d 00000000", "set: got 1032189902 bytes, want at most 8192"},
		"validated twice":    {hello + " " + hello, "a second validation"},
		"unknown operation":  {hello + " 12", "unknown operation 18"},
		"a watch":            {"07 '/k'", "operation 7 is watch_key, which is not supported"},
		"unknown to the old": {"0d", "unknown operation 13"},
		"huge key":           {"02 " + huge, "get: got 1152921504606846976 bytes"},
		"huge value":         {"00 '/k' " + huge, "set: got 1152921504606846976 bytes"},
		"huge list":          {"05 " + huge, "wait: got a list of 1152921504606846976"},
		"huge pairs":         {hello + " 0b " + huge, "multi_set: got a list of"},
		"half a request":     {"00 '/k'", "set: unexpected EOF"},
		"half a validation":  {"00 ce", "unexpected EOF"},
		"no key":             {"02 ''", "get: store: try-get"},
		"not a number":       {"00 '/k' 'v1' 03 '/k' +1", "add: store: add"},
	} {
		t.Run(name, func(t *testing.T) {
			log, entries := testnet.Logs()
			addr, hash := serve(t, c10d.Config{Log: log})
			other := dialRaw(t, addr, hello)
			c := dialRaw(t, addr, test.sent)
			if err := c.Conn.(*net.TCPConn).CloseWrite(); err != nil {
				t.Fatal(err)
			}
			if _, err := io.Copy(io.Discard, c); errors.Is(err, context.DeadlineExceeded) {
				t.Error(err)
			}
			testnet.Eventually(t, "the reason", func() bool {
				return testnet.Logged(entries, "closed a connection", test.reason)
			})
			if _, err := hash.Delete(t.Context(), "/k"); err != nil {
				t.Fatal(err)
			}
			other.say("07", "+0")
		})
	}
}

// If the keys and values of one multi_set exceed 64 MiB, the server closes the connection and stores none of
// them. (It has to keep all of them in memory before it stores the first.)
func TestPairsAreBounded(t *testing.T) {
	log, entries := testnet.Logs()
	addr, hash := serve(t, c10d.Config{Log: log})
	c := dialRaw(t, addr, hello+" 0b +9")
	pair := append([]byte{2, 0, 0, 0, 0, 0, 0, 0, '/', 'k', 0, 0, 0x80, 0, 0, 0, 0, 0},
		make([]byte, store.MaxValueBytes)...)
	for range 9 {
		if _, err := c.Write(pair); err != nil {
			break // the server has closed the connection
		}
	}
	testnet.Eventually(t, "the reason", func() bool {
		return testnet.Logged(entries, "closed a connection",
			"multi_set: got more than 67108864 bytes in one call")
	})
	if ok, err := hash.Check(t.Context(), "/k"); ok || err != nil {
		t.Errorf("the key is there: %v, %v", ok, err)
	}
}

// A process of another user of this host is refused.
func TestOtherUsers(t *testing.T) {
	log, entries := testnet.Logs()
	addr, _ := serve(t, c10d.Config{Log: log})
	ask := wire(t, hello+" 07") // asks for the number of keys
	if got := testnet.AskAs(t, uint32(os.Geteuid()), addr, ask); len(got) != 1 {
		t.Error("this user was refused")
	}
	if got := testnet.AskAs(t, 65534, addr, ask); len(got) != 0 {
		t.Errorf("another user was served: %v", got)
	}
	testnet.Eventually(t, "the reason", func() bool {
		return testnet.Logged(entries, "closed a connection", "the client runs as user 65534")
	})
}

// A server keeps at most half of the descriptors that its process may open, because its clients prove
// nothing.
func TestFloodOfServer(t *testing.T) {
	testnet.LimitDescriptors(t, 1024)
	log, entries := testnet.Logs()
	addr, _ := serve(t, c10d.Config{Log: log})
	testnet.Flood(t, addr, 2000)
	testnet.Eventually(t, "a refusal", func() bool {
		return testnet.Logged(entries, "the maximum number of clients is connected", "512")
	})
	if n := testnet.OpenFiles(t); n > 600 {
		t.Errorf("%d descriptors are open", n)
	}
}

// A list of 128Ki keys of 8 KiB has 1 GiB. A server that waits for the keys has to keep all of them, so it
// closes the connection after 64 MiB.
func TestListsAreBounded(t *testing.T) {
	for op, name := range map[string]string{"05": "check", "06": "wait", "0a": "multi_get"} {
		t.Run(name, func(t *testing.T) {
			log, entries := testnet.Logs()
			addr, _ := serve(t, c10d.Config{Log: log})
			c := dialRaw(t, addr, hello+" "+op+" [131072")
			key := append([]byte{0, 0x20, 0, 0, 0, 0, 0, 0}, make([]byte, store.MaxKeyBytes)...)
			sent := 0
			for range store.MaxKeys {
				if _, err := c.Write(key); err != nil {
					break // the server has closed the connection
				}
				sent += len(key)
			}
			if sent > 128<<20 {
				t.Errorf("the server has taken %d bytes", sent)
			}
			testnet.Eventually(t, "the reason", func() bool {
				return testnet.Logged(entries, "closed a connection",
					name+": got more than 67108864 bytes in one call")
			})
		})
	}
}

// The keys for which a client waits take most of the memory for requests of all clients. So there is no room
// for the long request of another client, until the first client ends its wait. Short requests have room.
func TestRequestsShareMemory(t *testing.T) {
	t.Parallel() // the server waits for 10 s until it refuses the request
	log, entries := testnet.Logs()
	addr, hash := serveWith(t, func(addr string, hash *store.HashStore) (*c10d.Server, error) {
		return c10d.ServeWithin(addr, hash, c10d.Config{Log: log}, 100<<10, 8<<20)
	})
	key := strings.Repeat("k", 8000)
	long := " 01 '/k' '" + strings.Repeat("v", 80000) + "'"
	first := dialRaw(t, addr, hello+" 06 [8"+strings.Repeat(" '"+key+"'", 8))
	testnet.Eventually(t, "the wait", func() bool { return hash.Waits() == 1 })
	dialRaw(t, addr, hello+long)
	testnet.Eventually(t, "the reason", func() bool {
		return testnet.Logged(entries, "closed a connection", "set: all clients together hold",
			"want at most 102400 in all")
	})
	dialRaw(t, addr, hello).say("03 '/k'", "''")
	first.say("0c", "01") // cancels the wait
	dialRaw(t, addr, hello).say(long+" 07", "+1")
}

// Four clients have each sent a part of a long request. There is room for two such requests, so the others
// must wait. A client that does not send the rest is refused after a minute.
func TestLongRequestsDoNotWaitForEachOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hash := store.NewHashStore(store.Limits{})
		defer hash.Close()
		serve := c10d.ServeEach(hash, 1<<20)
		begun, served := make(chan struct{}), make(chan error)
		begin := func(request []byte) net.Conn {
			client, server := net.Pipe()
			go func() { served <- serve(server) }()
			go func() {
				client.Write(request[:len(request)*5/8])
				<-begun
				client.Write(request[len(request)*5/8:])
				client.Close()
			}()
			return client
		}
		request := wire(t, hello+" 01 '/k' '"+strings.Repeat("v", 400<<10)+"'")
		for range 4 {
			begin(request)
		}
		synctest.Wait()
		close(begun)
		for range 4 {
			if err := <-served; !errors.Is(err, io.EOF) {
				t.Error(err)
			}
		}
		begun = make(chan struct{})
		defer close(begun)
		began := time.Now()
		begin(request)
		if err := <-served; !errors.Is(err, os.ErrDeadlineExceeded) || time.Since(began) != time.Minute {
			t.Errorf("a client that sends no more: got %v after %v", err, time.Since(began))
		}
	})
}

// Once the server knows how long the last part of a request is, it no longer holds memory for the longest
// one.
func TestRequestHoldsWhatItTakes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hash := store.NewHashStore(store.Limits{})
		defer hash.Close()
		serve := c10d.ServeEach(hash, 1<<20)
		value := " '" + strings.Repeat("v", 400<<10) + "'"
		client, server := net.Pipe()
		first, second := make(chan error), make(chan error)
		go func() { first <- serve(server) }()
		request := wire(t, hello+" 02 '/k'"+value+" 'new'")
		client.Write(request[:len(request)-1])
		began := time.Now()
		go func() {
			client, server := net.Pipe()
			go func() { second <- serve(server) }()
			client.Write(wire(t, hello+" 01 '/k'"+value))
			client.Close()
		}()
		if err := <-second; !errors.Is(err, io.EOF) || time.Since(began) != 0 {
			t.Errorf("beside a request with little more to come: got %v after %v", err, time.Since(began))
		}
		client.Close()
		<-first
	})
}

// A list of keys counts as an answer with the keys and the memory for the list. So the server refuses to send
// one that is larger than the limit of all answers.
func TestListOfKeysIsBounded(t *testing.T) {
	log, entries := testnet.Logs()
	addr, hash := serveWith(t, func(addr string, hash *store.HashStore) (*c10d.Server, error) {
		return c10d.ServeWithin(addr, hash, c10d.Config{Log: log}, 1<<20, 8100)
	})
	long := "/" + strings.Repeat("k", 7999)
	if err := hash.Set(t.Context(), long, nil); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second list has room if the first one has been released
		dialRaw(t, addr, hello).say("11", "[1 '"+long+"'")
	}
	for _, k := range []string{"/a", "/b", "/c"} {
		if err := hash.Set(t.Context(), k, nil); err != nil {
			t.Fatal(err)
		}
	}
	dialRaw(t, addr, hello+" 11")
	testnet.Eventually(t, "the reason", func() bool {
		return testnet.Logged(entries, "closed a connection", "list_keys", "this client needs 8198 more",
			"want at most 8100 in all")
	})
}

// A list of keys has one deadline, however long it is. The other one is for the rest in the buffer, when the
// list does not count any more.
func TestListOfKeysHasOneDeadline(t *testing.T) {
	hash := store.NewHashStore(store.Limits{})
	defer hash.Close()
	for i := range 20 {
		if err := hash.Set(t.Context(), strings.Repeat("k", 5000+i), nil); err != nil {
			t.Fatal(err)
		}
	}
	n, err := c10d.WriteDeadlines(hash, wire(t, hello+" 11"))
	if n > 2 || !errors.Is(err, io.EOF) {
		t.Errorf("the server has set %d deadlines for 100,000 bytes, want at most 2 (%v)", n, err)
	}
}

// If clients send the lengths of long values but not the values, the server allocates little memory, because
// it allocates memory as bytes arrive.
func TestLengthsAreNotBelieved(t *testing.T) {
	addr, _ := serve(t, c10d.Config{})
	other := dialRaw(t, addr, hello)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range 100 {
		c := dialRaw(t, addr, "00 '/k' 0000800000000000") // announces 8 MiB and sends nothing
		defer c.Close()
	}
	other.say("07", "+0")
	runtime.ReadMemStats(&after)
	if got := after.HeapAlloc - before.HeapAlloc; after.HeapAlloc > before.HeapAlloc && got > 32<<20 {
		t.Errorf("100 clients that have sent some bytes take %d bytes", got)
	}
}

// If 1000 clients wait for one key, all of them get an answer when the key is set.
func TestManyWaiters(t *testing.T) {
	const n = 1000
	addr, hash := serve(t, c10d.Config{})
	clients := make([]*client, n)
	for i := range clients {
		clients[i] = dialRaw(t, addr, hello+" 06 [1 '/k'")
	}
	clients[0].say("0c 06 [1 '/k'", "01") // the answer shows that the server has read the wait
	if err := hash.Set(t.Context(), "/k", nil); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	for _, c := range clients {
		c.hear("the wait", "00")
	}
	t.Logf("%d clients awake after %v", n, time.Since(began))
}

// answerModern plays a modern server: it answers the client's requests for the number of keys with 3. If the
// first bytes are those of an old client, it calls the function old.
func answerModern(t *testing.T, conn net.Conn, old func()) {
	var b [5]byte
	if _, err := io.ReadFull(conn, b[:1]); err != nil {
		return
	}
	if b[0] != 0 {
		old()
		return
	}
	if _, err := io.ReadFull(conn, b[1:]); err != nil || !bytes.Equal(b[:], wire(t, hello)) {
		t.Errorf("the client began with %x (%v), want %s", b, err, hello)
		return
	}
	for {
		if _, err := io.ReadFull(conn, b[:1]); err != nil || b[0] != 7 {
			return
		}
		conn.Write(wire(t, "+3"))
	}
}

// answerOld plays an old server: it answers the client's requests for the number of keys with 3. If the first
// bytes are those of a modern client, it reads them as a request to set a key, as PyTorch's old servers do.
// When it has read the length of the key, which must exceed the size of any memory, it calls the function
// modern.
func answerOld(t *testing.T, conn net.Conn, modern func()) {
	for {
		var b [9]byte
		if _, err := io.ReadFull(conn, b[:1]); err != nil {
			return
		}
		if b[0] == 6 {
			conn.Write(wire(t, "+3"))
			continue
		}
		if _, err := io.ReadFull(conn, b[1:]); err != nil {
			t.Errorf("an old server was left waiting for the length of a key (%v)", err)
			return
		}
		if n := binary.LittleEndian.Uint64(b[1:]); b[0] != 0 || n < 1<<47 {
			t.Errorf("an old server was asked for operation %d with a key of %d bytes, want that this cannot be", b[0], n)
		}
		modern()
		return
	}
}

// lateConn is a connection on which each write is delayed by 4 ms.
type lateConn struct{ net.Conn }

func (c lateConn) Write(b []byte) (int, error) {
	time.Sleep(4 * time.Millisecond)
	return c.Conn.Write(b)
}

// CountWorker increments the counter of workers in the server and returns its new value.
func TestCountWorker(t *testing.T) {
	addr, hash := serve(t, c10d.Config{})
	dialRaw(t, addr, hello).say("04 'init/' +1", "+1")
	n, err := open(t, addr, c10d.Unknown).CountWorker(testnet.Context(t))
	if v, _, lookErr := hash.TryGet(t.Context(), "init/"); n != 2 || err != nil || lookErr != nil ||
		string(v) != "2" {
		t.Errorf("the worker is number %d (%v), and init/ is %q (%v); want 2", n, err, v, lookErr)
	}
}

func TestDial(t *testing.T) {
	for name, c := range map[string]struct {
		serve   func(net.Conn)
		timeout time.Duration
		queues  bool // whether queues work, as they do if Dial finds a modern server
	}{
		// PyTorch's server with libuv does not answer an old client, and keeps the connection open.
		"modern, silent to the old": {func(conn net.Conn) {
			answerModern(t, conn, func() { io.Copy(io.Discard, conn) })
		}, time.Minute, true},
		"modern, closes on the old": {func(conn net.Conn) { answerModern(t, conn, func() {}) }, time.Minute,
			true},
		"old": {func(conn net.Conn) { answerOld(t, conn, func() {}) }, time.Minute, false},
		// If the first message of a modern client were shorter, an old server would read it as the start of a
		// key's length. It would wait for the rest, and would not serve other clients meanwhile.
		"old, silent to the modern": {func(conn net.Conn) {
			answerOld(t, conn, func() { io.Copy(io.Discard, conn) })
		}, time.Millisecond, false},
		"modern, late": {func(conn net.Conn) {
			answerModern(t, lateConn{conn}, func() { io.Copy(io.Discard, conn) })
		}, time.Millisecond, true},
		"old, late": {func(conn net.Conn) { answerOld(t, lateConn{conn}, func() {}) }, time.Millisecond,
			false},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := c10d.DialTimeout(testnet.Context(t), testnet.FakeServer(t, c.serve), c10d.Unknown,
				c.timeout)
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			if err := s.Push(canceled(t), "q", nil); errors.Is(err, store.ErrUnsupported) {
				t.Errorf("%v before the context", err)
			}
			// If the server is modern, it reads this request and closes the connection. If it is old, Push
			// returns ErrUnsupported.
			ctx := testnet.Context(t)
			if got := !errors.Is(s.Push(ctx, "q", nil), store.ErrUnsupported); got != c.queues {
				t.Errorf("the server is taken for one with queues: %v, want %v", got, c.queues)
			}
		})
	}
	for name, c := range map[string]struct {
		serve func(net.Conn)
		parts []string
	}{
		"silent": {func(conn net.Conn) { io.Copy(io.Discard, conn) },
			[]string{"using the protocol of PyTorch 2.2 and later: the server did not answer for",
				"using the protocol of PyTorch before 2.1: the server did not answer for"}},
		"closes": {func(conn net.Conn) {}, []string{"using the protocol of PyTorch 2.2 and later",
			"using the protocol of PyTorch before 2.1"}},
	} {
		t.Run(name, func(t *testing.T) {
			err := testnet.EventuallyError(t, func(ctx context.Context) error {
				addr := testnet.FakeServer(t, c.serve)
				_, err := c10d.DialTimeout(ctx, addr, c10d.Unknown, time.Millisecond)
				return err
			}, append(c.parts, "c10d: dial 127.0.0.1:")...)
			wantTimeout(t, err)
		})
	}
	t.Run("a web server", func(t *testing.T) {
		addr := testnet.FakeServer(t, func(conn net.Conn) {
			io.WriteString(conn, "HTTP/1.1 400 Bad Request\r\n\r\n")
			io.Copy(io.Discard, conn)
		})
		_, err := c10d.Dial(testnet.Context(t), addr, c10d.Unknown)
		testnet.WantError(t, err, `the server answered "HTTP/1.1", so it is not a TCPStore`)
	})
	t.Run("refused", func(t *testing.T) {
		err := testnet.EventuallyError(t, func(ctx context.Context) error {
			_, err := c10d.Dial(ctx, "127.0.0.1:1", c10d.Unknown)
			return err
		}, "c10d: dial 127.0.0.1:1", "connection refused")
		wantTimeout(t, err)
	})
	t.Run("no port", func(t *testing.T) {
		_, err := c10d.Dial(testnet.Context(t), "127.0.0.1", c10d.Modern)
		testnet.WantError(t, err, "missing port")
	})
}

// wantTimeout checks that err is the error of a context whose time is over.
func wantTimeout(t *testing.T, err error) {
	t.Helper()
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want that the time is over", err)
	}
}

func canceled(t *testing.T) context.Context {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	return ctx
}

// If the context of a waiting call ends, later calls still work, and the server drops the wait.
func TestGivenUp(t *testing.T) {
	addr, hash := serve(t, c10d.Config{})
	s := open(t, addr, c10d.Modern)
	for i := range 20 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*100*time.Microsecond)
		_, err := s.Get(ctx, "late")
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("got %v", err)
		}
		if n, err := s.Add(testnet.Context(t), "n", 1); n != int64(i)+1 || err != nil {
			t.Fatalf("got %d, %v", n, err)
		}
	}
	testnet.Eventually(t, "no waits", func() bool { return hash.Waits() == 0 })
}

func FuzzServer(f *testing.F) {
	seed := func(text string) []byte {
		var b []byte
		for _, w := range strings.Fields(text) {
			h, _ := hex.DecodeString(w)
			b = append(b, h...)
		}
		return b
	}
	f.Add(seed(hello + " 0d 01020304 07 0c"))
	f.Add(seed(hello + " 01 0100000000000000 6b 0100000000000000 76 03 0100000000000000 6b"))
	f.Add(seed("05 0100000000000000 0100000000000000 6b 06"))
	f.Add(seed("03 0500000000000000 696e69742f 0100000000000000"))
	f.Fuzz(func(t *testing.T, in []byte) {
		hash := store.NewHashStore(store.Limits{Keys: 100, Bytes: 1 << 20})
		defer hash.Close()
		c10d.ServeBytes(hash, slices.Clone(in))
	})
}

func BenchmarkSetGet(b *testing.B) {
	storetest.SetGet(b, func(b *testing.B, clients int) (stores []store.Store) {
		addr, _ := serve(b, c10d.Config{Log: zap.NewNop()})
		for range clients {
			stores = append(stores, open(b, addr, c10d.Modern))
		}
		return stores
	})
}

func FuzzClient(f *testing.F) {
	f.Add([]byte{0, 1, 0, 0, 0, 0, 0, 0, 0, 'v'})
	f.Add([]byte{0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff})
	f.Add([]byte{7, 0, 0, 0, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, in []byte) {
		for name, ask := range map[string]func(s *c10d.Store) ([]byte, error){
			"get": func(s *c10d.Store) ([]byte, error) { return s.Get(t.Context(), "k") },
			"add": func(s *c10d.Store) ([]byte, error) {
				_, err := s.Add(t.Context(), "k", 1)
				return nil, err
			},
			"check": func(s *c10d.Store) ([]byte, error) { _, err := s.Check(t.Context(), "k"); return nil, err },
			"count": func(s *c10d.Store) ([]byte, error) { _, err := s.NumKeys(t.Context()); return nil, err },
			"compare and set": func(s *c10d.Store) ([]byte, error) {
				v, _, err := s.CompareAndSet(t.Context(), "k", nil, in)
				return v, err
			},
			"get many": func(s *c10d.Store) ([]byte, error) {
				v, err := s.MultiGet(t.Context(), "k", "l")
				return bytes.Join(v, nil), err
			},
			"take from queues": func(s *c10d.Store) ([]byte, error) {
				v, _, err := s.TryPop(t.Context(), "k")
				return v, err
			},
		} {
			s := c10d.ClientOf(in)
			if value, err := ask(s); err == nil && len(value) > len(in) {
				t.Errorf("%s: %d bytes of %d that were answered", name, len(value), len(in))
			}
			s.Close()
		}
	})
}
