package c10d_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"strconv"
	"sync"
	"testing"

	"go.uber.org/zap/zaptest"

	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/store/c10d"
)

// All calls of PyTorch's client give the right results with our server.
func TestTorchClient(t *testing.T) {
	addr, hash := serve(t, c10d.Config{Log: zaptest.NewLogger(t)})
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	const script = `
import datetime, sys, threading, time
import torch.distributed as dist

seconds = lambda s: datetime.timedelta(seconds=s)
host, port = sys.argv[1], int(sys.argv[2])
connect = lambda: dist.TCPStore(host, port, 2, False, timeout=seconds(60))
a, b = connect(), connect()
assert (a.host, a.port) == (host, port)
assert a.get("from go") == b"hello"

def same(got, want):
    assert got == want, (got, want)

def fails(f, *args):
    began = time.time()
    try:
        f(*args)
    except RuntimeError as e:
        return time.time() - began
    raise AssertionError("no error")

a.set("k", "v1")
same(b.get("k"), b"v1")
b.set("k", "x" * 5000)
same(b.get("k"), b"x" * 5000) # a set has no answer, so this request follows it
same(a.get("k"), b"x" * 5000)
big = "0123456789abcdef" * (9 << 15)
a.set("big", big)
same(b.get("big").decode(), big)
same(a.add("n", 5), 5)
same(b.add("n", -7), -2)
same(a.add("n", 0), -2)
same(b.get("n"), b"-2")
same(a.compare_set("c", "", "one"), b"one")
same(b.compare_set("c", "two", "three"), b"one")
same(b.compare_set("c", "one", "two"), b"two")
same(a.compare_set("missing", "x", "y"), b"x")
# init/, from go, k, big, n and c
same(a.num_keys(), 6)
same(a.delete_key("c"), True)
same(a.delete_key("c"), False)
same(a.num_keys(), 5)
same(a.timeout, seconds(60))

# Keys that look like something else.
for key in ["-dash", "/slash", "", "with space", "\u00fc"]:
    a.set(key, "here")
    same(b.get(key), b"here")
    same(b.delete_key(key), True)

# Waits, for keys that come by each of the calls that make them.
def wakes(make, *keys):
    woken = []
    def wait():
        b.wait(list(keys), seconds(60))
        woken.append(True)
    t = threading.Thread(target=wait)
    t.start()
    time.sleep(0.05)
    assert not woken
    make()
    t.join(60)
    assert woken
wakes(lambda: a.set("w1", ""), "w1")
wakes(lambda: a.add("w2", 1), "w1", "w2")
wakes(lambda: a.compare_set("w3", "", "x"), "w3", "w3")
b.wait(["w1", "w2"])

# A wait that times out, also with its key coming later, leaves the client as it was.
assert fails(b.wait, ["late"], seconds(1)) >= 0.9
same(b.num_keys(), 8)
a.set("late", "now")
same(b.get("late"), b"now")
b.set_timeout(seconds(1))
assert fails(b.get, "never") >= 0.9
same(b.add("n", 1), -1)

# Stores within the store, and many clients.
pa, pb = dist.PrefixStore("outer", dist.PrefixStore("inner", a)), dist.PrefixStore("outer", dist.PrefixStore("inner", b))
pa.set("k", "inside")
same(pb.get("k"), b"inside")
same(a.get("inner/outer/k"), b"inside")
same(len(a.get("k")), 5000)
def count():
    c = connect()
    for _ in range(50):
        c.add("count", 1)
threads = [threading.Thread(target=count) for _ in range(10)]
for t in threads: t.start()
for t in threads: t.join()
same(a.get("count"), b"500")
a.set("from python", "done")
`
	if err := hash.Set(t.Context(), "/from go", []byte("hello")); err != nil {
		t.Fatal(err)
	}
	wait := testnet.StartTorch(t, script, host, port)
	wait()
	// Our client reads the value that PyTorch's client has written.
	s := open(t, addr, c10d.Unknown)
	if v, err := s.Get(testnet.Context(t), "from python"); err != nil || string(v) != "done" {
		t.Errorf("got %q, %v", v, err)
	}
}

// All calls of our client give the right results with PyTorch's server. That server waits for two workers and
// counts our client as one of them.
func TestTorchServer(t *testing.T) {
	testnet.NeedTorch(t)
	port := strconv.Itoa(testnet.FreePort(t))
	addr := net.JoinHostPort("127.0.0.1", port)
	wait := testnet.StartTorch(t, `
import datetime, sys
import torch.distributed as dist
s = dist.TCPStore("127.0.0.1", int(sys.argv[1]), 2, True, timeout=datetime.timedelta(seconds=60))
s.set("taken", "yes")
s.set("from python", "hello")
assert s.get("from go") == b"here", s.get("from go")
s.get("bye")
`, port)
	ctx := testnet.Context(t)
	s := open(t, addr, c10d.Unknown)
	if _, err := s.CountWorker(ctx); err != nil {
		t.Error(err)
	}
	if v, err := s.Get(ctx, "from python"); err != nil || string(v) != "hello" {
		t.Errorf("got %q, %v", v, err)
	}
	for i := range int64(3) {
		if n, err := s.Add(ctx, "n", 2); err != nil || n != 2*(i+1) {
			t.Errorf("got %d, %v", n, err)
		}
	}
	if v, swapped, err := s.CompareAndSet(ctx, "taken", nil, []byte("no")); err != nil || swapped ||
		string(v) != "yes" {
		t.Errorf("got %q, %v, %v", v, swapped, err)
	}
	if ok, err := s.Check(ctx, "n", "nothing"); ok || err != nil {
		t.Errorf("got %v, %v", ok, err)
	}
	if existed, err := s.Delete(ctx, "n"); !existed || err != nil {
		t.Errorf("got %v, %v", existed, err)
	}
	waited := make(chan error, 1)
	go func() { waited <- s.Wait(ctx, "from go") }()
	if err := s.Set(ctx, "from go", []byte("here")); err != nil {
		t.Error(err)
	}
	if err := <-waited; err != nil {
		t.Error(err)
	}
	if n, err := strconv.Atoi(port); err != nil || n == 0 {
		t.Error(port)
	}
	if err := s.Set(ctx, "bye", nil); err != nil {
		t.Error(err)
	}
	wait()
}

// BenchmarkServers measures the time that a client of an old dialect needs to set a key and get it. Like
// PyTorch's clients, it waits for two answers: to a wait and to a get. "torch" is PyTorch's server, and
// "ours" is our Server.
func BenchmarkServers(b *testing.B) {
	ours, _ := serve(b, c10d.Config{})
	theirs, stop := torchServer(b)
	defer stop()
	for _, server := range []struct{ name, addr string }{{"torch", theirs}, {"ours", ours}} {
		for _, clients := range []int{1, 64} {
			b.Run(fmt.Sprintf("%s/clients=%d", server.name, clients), func(b *testing.B) {
				conns := make([]net.Conn, clients)
				for i := range conns {
					var err error
					if conns[i], err = net.Dial("tcp", server.addr); err != nil {
						b.Fatal(err)
					}
					defer conns[i].Close()
				}
				each := (b.N + clients - 1) / clients
				b.ResetTimer()
				var wg sync.WaitGroup
				for i, conn := range conns {
					wg.Go(func() {
						if err := setGet(conn, fmt.Sprintf("/key%d", i), each); err != nil {
							b.Error(err)
						}
					})
				}
				wg.Wait()
				b.ReportMetric(float64(each*clients)/b.Elapsed().Seconds(), "pairs/s")
			})
		}
	}
}

// setGet sets key, waits for it and gets it, n times.
func setGet(conn net.Conn, key string, n int) error {
	field := func(b []byte, s string) []byte {
		return append(binary.LittleEndian.AppendUint64(b, uint64(len(s))), s...)
	}
	const value = "some value"
	set := field(field([]byte{0}, key), value)
	set = field(binary.LittleEndian.AppendUint64(append(set, 5), 1), key) // a wait for one key
	get := field([]byte{2}, key)
	want := field(nil, value)
	got := make([]byte, len(want))
	for range n {
		if _, err := conn.Write(set); err != nil {
			return err
		}
		if _, err := io.ReadFull(conn, got[:1]); err != nil {
			return err
		}
		if _, err := conn.Write(get); err != nil {
			return err
		}
		if _, err := io.ReadFull(conn, got); err != nil || !bytes.Equal(got, want) {
			return fmt.Errorf("got %q, %w", got, err)
		}
	}
	return nil
}

// torchServer starts PyTorch's server and returns its address. The server runs until stop is called.
func torchServer(b *testing.B) (addr string, stop func()) {
	testnet.NeedTorch(b)
	port := strconv.Itoa(testnet.FreePort(b))
	addr = net.JoinHostPort("127.0.0.1", port)
	wait := testnet.StartTorch(b, `
import datetime, sys
import torch.distributed as dist
s = dist.TCPStore("127.0.0.1", int(sys.argv[1]), None, True, timeout=datetime.timedelta(seconds=100))
s.get("bye")
`, port)
	s, err := c10d.Dial(testnet.Context(b), addr, c10d.Old)
	if err != nil {
		b.Fatal(err)
	}
	return addr, func() {
		if err := s.Set(testnet.Context(b), "bye", nil); err != nil {
			b.Error(err)
		}
		wait()
		s.Close()
	}
}
