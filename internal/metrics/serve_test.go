package metrics_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/metrics"
	"github.com/gohvd/gohvd/internal/testnet"
)

func TestAddress(t *testing.T) {
	for _, c := range []struct {
		addr string
		plus int
		want string
	}{
		{"127.0.0.1:9100", 0, "127.0.0.1:9100"}, {"h1:9100", 3, "h1:9103"}, {"[::1]:9100", 1, "[::1]:9101"},
		{":9100", 0, "127.0.0.1:9100"}, {"9100", 2, "127.0.0.1:9102"}, {"0.0.0.0:0", 5, "0.0.0.0:0"},
		{"[::]:65530", 5, "[::]:65535"},
	} {
		if got, err := metrics.Address(c.addr, c.plus); got != c.want || err != nil {
			t.Errorf("%q and %d: got %q and error %v, want %q", c.addr, c.plus, got, err, c.want)
		}
	}
	for _, c := range []struct {
		addr string
		plus int
		want string
	}{
		{"", 0, "missing port"}, {"h1", 0, `"h1"`}, {"h1:", 0, `port ""`}, {":http", 0, `"http"`},
		{":65536", 0, "65536"}, {":-1", 0, "-1"},
		{"::1", 0, "too many colons"}, {":65530", 6, "65530 + 6 = 65536"}, {"70000", 0, "70000"},
	} {
		_, err := metrics.Address(c.addr, c.plus)
		testnet.WantError(t, err, "metrics: address", c.want)
	}
}

// serve starts a server whose timeouts are longer than the test, so that no wait of the test ends because of
// them. The server is closed when the test ends.
func serve(t *testing.T, h http.Handler) *metrics.Server {
	t.Helper()
	log, entries := testnet.Logs()
	l := testnet.Listen(t)
	s := metrics.ServeOn(l, h, log, time.Hour)
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		if entries.Len() > 0 {
			t.Errorf("logged %v", entries.All())
		}
	})
	return s
}

// TestHost checks which hosts a request on a loopback address may name. An attacker could make any other name
// resolve to this address, so it is refused.
func TestHost(t *testing.T) {
	own, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	s := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {}))
	for host, want := range map[string]int{
		"localhost": 200, "LOCALHOST:9610": 200, "127.0.0.1": 200, "10.0.0.1:9610": 200, "[::1]": 200,
		"[::1]:9610": 200, own: 200, own + ":9610": 200,
		"rebound.example": 403, "rebound.example:9610": 403, "localhost.example": 403,
		"127.0.0.1.example": 403,
	} {
		req, err := http.NewRequestWithContext(testnet.Context(t), http.MethodGet, "http://"+s.Addr(), nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Host = host
		resp, err := (&http.Transport{DisableKeepAlives: true}).RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		if resp.StatusCode != want {
			t.Errorf("%s: got status %d, want %d", host, resp.StatusCode, want)
		}
		if err := resp.Body.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestServe(t *testing.T) {
	s := serve(t, metrics.Handler(full))
	var all sync.WaitGroup
	for range 10 {
		all.Go(func() {
			body, err := testnet.Get(testnet.Context(t), "http://"+s.Addr()+"/metrics")
			if err != nil || !strings.Contains(body, "\nhvd_world_size 4\n") {
				t.Errorf("got %q and error %v", body, err)
			}
		})
	}
	all.Wait()

	_, err := metrics.Serve(s.Addr(), metrics.Handler(full), nil)
	testnet.WantError(t, err, "metrics: ", s.Addr(), "address already in use")
	_, err = metrics.Serve("nothing", metrics.Handler(full), nil)
	testnet.WantError(t, err, "metrics: ", `"nothing"`)
}

// Many clients connect and send nothing or half a request. The server closes the oldest of these connections,
// and other clients can still scrape.
func TestSilentClientsAreBounded(t *testing.T) {
	s := serve(t, metrics.Handler(full))
	first := testnet.RawDial(t, s.Addr(), []byte("GET /metrics HT"))
	for range 40 {
		testnet.RawDial(t, s.Addr(), []byte("GET /metrics HTTP/1.1\r\n"))
	}
	if _, err := testnet.Get(testnet.Context(t), "http://"+s.Addr()+"/metrics"); err != nil {
		t.Error(err)
	}
	if n, err := first.Read(make([]byte, 1)); n > 0 || isTimeout(err) {
		t.Errorf("the oldest of too many connections is open: read %d bytes and error %v", n, err)
	}
}

func isTimeout(err error) bool {
	e, ok := err.(net.Error)
	return ok && e.Timeout()
}

// Many connections begin and end. The server does not close an older open connection, because connections
// that have ended do not count.
func TestConnectionsThatEndMakeRoom(t *testing.T) {
	s := serve(t, metrics.Handler(full))
	idle := testnet.RawDial(t, s.Addr(), []byte("GET /metrics HTTP/1.1\r\n"))
	for range 40 {
		if _, err := testnet.Get(testnet.Context(t), "http://"+s.Addr()+"/metrics"); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := idle.Write([]byte("Host: localhost\r\n\r\n")); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(idle), nil)
	if err != nil {
		t.Fatalf("one that others have not crowded out got no answer: %v", err)
	}
	resp.Body.Close()
}

// waitLimit is the limit for waits in tests.
const waitLimit = time.Minute

// Close is called during two scrapes. A response that takes less than 100 ms is sent completely, and a
// response that takes longer is cancelled. Close waits for both handlers.
func TestCloseDuringScrapes(t *testing.T) {
	for range 20 {
		if closeDuringScrapes(t) {
			return
		}
	}
	t.Fatal("no answer of twenty ended within 100 ms")
}

// closeDuringScrapes tests one call of Close. It returns false if the machine was so slow that Close
// cancelled even the quick response.
func closeDuringScrapes(t *testing.T) bool {
	begun, end, ended, leave := make(chan string, 2), make(chan struct{}), make(chan struct{}),
		make(chan struct{})
	s := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		begun <- r.URL.Path
		if r.URL.Path == "/quick" {
			<-end
			fmt.Fprint(w, "all of it")
			return
		}
		select {
		case <-r.Context().Done():
		case <-time.After(waitLimit):
			t.Error("the slow answer was not told to end")
		}
		close(ended)
		<-leave
	}))
	quick := testnet.RawDial(t, s.Addr(), []byte("GET /quick HTTP/1.1\r\nHost: localhost\r\n\r\n"))
	<-begun
	// The client announces a body and does not send it. So the server does not watch for the end of the
	// connection, and only Close can tell the handler to stop.
	testnet.RawDial(t, s.Addr(), []byte("GET /slow HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n"))
	<-begun
	silent := testnet.RawDial(t, s.Addr())
	closed := make(chan struct{})
	closing := time.Now()
	go func() {
		s.Close()
		close(closed)
	}()
	testnet.Eventually(t, "the port is closed", func() bool {
		conn, err := net.Dial("tcp", s.Addr())
		if err == nil {
			conn.Close()
		}
		return err != nil
	})
	close(end)
	var body []byte
	resp, err := http.ReadResponse(bufio.NewReader(quick), nil)
	if err == nil {
		body, err = io.ReadAll(resp.Body)
	}
	if string(body) != "all of it" || err != nil {
		if time.Since(closing) > 100*time.Millisecond {
			close(leave)
			<-closed
			return false
		}
		t.Errorf("got %q and error %v", body, err)
	}
	<-ended
	if n, err := silent.Read(make([]byte, 1)); n > 0 || isTimeout(err) {
		t.Errorf("a connection is open: read %d bytes and error %v", n, err)
	}
	select {
	case <-closed:
		t.Error("Close has returned before an answer")
		close(leave)
	case <-time.After(50 * time.Millisecond):
		close(leave)
		select {
		case <-closed:
		case <-time.After(waitLimit):
			t.Fatal("Close hangs")
		}
	}
	if err := s.Close(); err != nil {
		t.Errorf("a second Close: %v", err)
	}
	return true
}

// pipes is a listener whose connections are in-memory pipes. Unlike sockets, they can be used in a synctest
// bubble.
type pipes struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error {
	p.once.Do(func() { close(p.closed) })
	return nil
}

func (p *pipes) Addr() net.Addr { return &net.TCPAddr{} }

func (p *pipes) dial() net.Conn {
	ours, theirs := net.Pipe()
	p.conns <- theirs
	return ours
}

// One client sends half a request, and another does not read the response. The server closes both connections
// after 10 s.
func TestSlowClients(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &pipes{conns: make(chan net.Conn), closed: make(chan struct{})}
		answered := make(chan time.Time, 1)
		s := metrics.ServeOn(l, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_, err := w.Write(make([]byte, 1<<20))
			if err == nil {
				t.Error("the answer was written, and nobody has read it")
			}
			answered <- time.Now()
		}), zap.NewNop(), metrics.ScrapeTimeout)
		defer s.Close()

		begun := time.Now()
		half := l.dial()
		fmt.Fprint(half, "GET /metrics HTTP/1.1\r\nHost:")
		if n, _ := io.Copy(io.Discard, half); time.Since(begun) != 10*time.Second {
			t.Errorf("half a request: %d bytes after %v, want an end after 10 s", n, time.Since(begun))
		}
		begun = time.Now()
		deaf := l.dial()
		defer deaf.Close()
		fmt.Fprint(deaf, "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
		if took := (<-answered).Sub(begun); took != 10*time.Second {
			t.Errorf("an answer that nobody reads took %v, want 10 s", took)
		}
	})
}
