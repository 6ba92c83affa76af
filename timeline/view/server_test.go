package view

import (
	"bufio"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/gohvd/gohvd/internal/testnet"
)

// get returns the answer of a server to a request.
func get(s *Server, change func(*http.Request)) *http.Response {
	r := httptest.NewRequest(http.MethodGet, "http://127.0.0.1:1234/", nil)
	change(r)
	w := httptest.NewRecorder()
	s.ServeHTTP(w, r)
	return w.Result()
}

func TestAccess(t *testing.T) {
	s := NewServer(straggler.read(t), "127.0.0.1:1234")
	token := s.token
	in := func(r *http.Request) { r.AddCookie(&http.Cookie{Name: "hvd_view_1234", Value: s.cookie}) }
	to := func(path string) func(*http.Request) {
		return func(r *http.Request) { r.URL.Path, r.URL.RawQuery, _ = strings.Cut(path, "?") }
	}
	both := func(all ...func(*http.Request)) func(*http.Request) {
		return func(r *http.Request) {
			for _, f := range all {
				f(r)
			}
		}
	}
	host := func(name string) func(*http.Request) { return func(r *http.Request) { r.Host = name } }
	// Parts of this list depend on those before: the token works once.
	for _, c := range []struct {
		what   string
		change func(*http.Request)
		status int
		text   string
	}{
		{"without a cookie", both(), 403, "open the address that hvdrun view printed"},
		{"data without a cookie", to("/data/report"), 403, "no access"},
		{"a file without a cookie", to("/main.js"), 403, "no access"},
		{"a wrong cookie", func(r *http.Request) {
			r.AddCookie(&http.Cookie{Name: "hvd_view_1234", Value: "x"})
		}, 403, "no access"},
		{"a wrong token", to("/?token=AAAA"), 403, "has expired"},
		{"an empty token", to("/?token="), 403, "has expired"},
		{"the token", to("/?token=" + token), 303, ""},
		{"the token again", to("/?token=" + token), 403, "has expired"},
		{"no token after its use", to("/?token="), 403, "has expired"},
		{"the token again in the same browser", both(in, to("/?token="+token)), 303, ""},
		{"the page", in, 200, "<h1 id=\"sentence\">"},
		{"a module", both(in, to("/main.js")), 200, "hvdrun view"},
		{"the report", both(in, to("/data/report")), 200, "held up all others"},
		{"another file", both(in, to("/server.go")), 404, "no such page"},
		{"a path outside", both(in, to("/../../etc/passwd")), 404, "no such page"},
		{"other data", both(in, to("/data/../report.go")), 400, "no such data"},
		{"a wrong number", both(in, to("/data/tile?level=x&rows=ranks")), 400, "want a number"},
		{"a tile that there is not", both(in, to("/data/tile?level=1&index=2&rows=ranks")), 400, "one of 2^level"},
		{"localhost", both(in, host("localhost:9")), 200, ""},
		{"IPv6", both(in, host("[::1]:9")), 200, ""},
		{"a name of somebody else", both(in, host("evil.example:1234")), 421, "want localhost"},
		{"such a name with the token", both(host("evil.example"), to("/?token="+token)), 421, "want localhost"},
		{"POST", both(in, func(r *http.Request) { r.Method = "POST" }), 405, "want GET"},
		{"HEAD", both(in, func(r *http.Request) { r.Method = "HEAD" }), 405, "want GET"},
	} {
		a := get(s, c.change)
		body, err := io.ReadAll(a.Body)
		if err != nil || a.StatusCode != c.status || !strings.Contains(string(body), c.text) {
			t.Errorf("%s: got %d %.200q, want %d and %q", c.what, a.StatusCode, body, c.status, c.text)
		}
		policy := a.Header.Get("Content-Security-Policy")
		if !strings.HasPrefix(policy, "default-src 'none';") || !strings.Contains(policy, "require-trusted-types-for 'script'") {
			t.Errorf("%s: got the policy %q", c.what, policy)
		}
		for _, cookie := range a.Cookies() {
			if !cookie.HttpOnly || cookie.SameSite != http.SameSiteLaxMode {
				t.Errorf("%s: got the cookie %v", c.what, cookie)
			}
		}
	}
}

// The files of uPlot 1.6.32 are those of the registry of npm (dist/uPlot.iife.min.js, dist/uPlot.min.css and
// LICENSE).
func TestVendoredFiles(t *testing.T) {
	for name, want := range map[string]string{
		"uplot.js":      "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
		"uplot.css":     "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
		"uplot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
	} {
		text, err := page.ReadFile("page/" + name)
		if got := fmt.Sprintf("%x", sha256.Sum256(text)); err != nil || got != want {
			t.Errorf("%s: got the SHA-256 %s, %v, want %s", name, got, err, want)
		}
	}
}

// counted counts the tiles that are made.
type counted struct {
	Source
	mu   sync.Mutex
	made int
}

func (c *counted) Tile(q Request) ([]byte, error) {
	c.mu.Lock()
	c.made++
	c.mu.Unlock()
	return c.Source.Tile(q)
}

// A tile is made once, even if many ask for it at the same time, and over a real connection the browser gets
// it as the tile that it is.
func TestTilesAreMadeOnce(t *testing.T) {
	source := &counted{Source: straggler.read(t)}
	l := testnet.Listen(t)
	s := NewServer(source, l.Addr().String())
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, l) }()
	client := testnet.Browser(t)
	client.Transport = &http.Transport{MaxConnsPerHost: 8}
	a, err := client.Get(s.URL())
	if err != nil || a.StatusCode != 200 {
		t.Fatal(a, err)
	}
	want, err := source.Source.Tile(Request{Rows: "ranks"})
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	for range 20 {
		all.Go(func() {
			a, err := client.Get(fmt.Sprintf("http://%s/data/tile?rows=ranks&run=%s", l.Addr(), s.id))
			if err != nil {
				t.Error(err)
				return
			}
			defer a.Body.Close()
			got, err := io.ReadAll(a.Body)
			if err != nil || string(got) != string(want) || !strings.Contains(a.Header.Get("Cache-Control"), "immutable") {
				t.Errorf("got %d bytes, %v, %v, want %d", len(got), err, a.Header, len(want))
			}
		})
	}
	all.Wait()
	if source.made != 1 {
		t.Errorf("the tile was made %d times, want once", source.made)
	}
	client.CloseIdleConnections()
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// sized is a Source whose tiles have a number of bytes.
type sized struct {
	Source
	bytes int
}

func (s sized) Tile(Request) ([]byte, error) { return make([]byte, s.bytes), nil }

// Short answers are not compressed, and long ones only for a browser that accepts it.
func TestLongAnswersAreCompressed(t *testing.T) {
	for _, bytes := range []int{leastPacked - 1, leastPacked} {
		s := NewServer(sized{straggler.read(t), bytes}, "127.0.0.1:1234")
		for _, accepted := range []string{"", "gzip"} {
			a := get(s, func(r *http.Request) {
				r.AddCookie(&http.Cookie{Name: "hvd_view_1234", Value: s.cookie})
				r.URL.Path = "/data/tile"
				r.Header.Set("Accept-Encoding", accepted)
			})
			packed := bytes == leastPacked && accepted == "gzip"
			body, err := io.ReadAll(a.Body)
			got := a.Header.Get("Content-Encoding") == "gzip"
			if got != packed || err != nil || (len(body) == bytes) == packed {
				t.Errorf("%d bytes, accepted %q: got %d bytes, %v, compressed %v, want %v", bytes, accepted,
					len(body), err, got, packed)
			}
		}
	}
}

// The cache has a limit, also for many small answers.
func TestCacheIsLimited(t *testing.T) {
	s := NewServer(straggler.read(t), "127.0.0.1:1234")
	s.maxBytes = 20 * entryBytes
	for i := range 100 {
		a := get(s, func(r *http.Request) {
			r.AddCookie(&http.Cookie{Name: "hvd_view_1234", Value: s.cookie})
			r.URL.Path, r.URL.RawQuery = "/data/window", fmt.Sprint("x=", i)
		})
		if a.StatusCode != 200 {
			t.Fatal(a.Status)
		}
	}
	sum := 0
	for _, a := range s.cached {
		sum += a.size
	}
	if n := len(s.cached); n < 10 || n > 20 || sum != s.bytes {
		t.Errorf("the cache has %d answers of %d bytes, want 10 to 20 of %d", n, sum, s.bytes)
	}
}

// broken is a Source of which a method panics.
type broken struct{ Source }

func (broken) Grid(string) ([]byte, error) { panic("broken") }

// A panic ends only the requests for the answer. It takes no place of those that can be made at a time.
func TestPanicsTakeNoPlace(t *testing.T) {
	s := NewServer(broken{straggler.read(t)}, "127.0.0.1:1234")
	for range 2 * cap(s.work) {
		func() {
			defer func() {
				if recover() == nil {
					t.Error("there was no panic")
				}
			}()
			get(s, func(r *http.Request) {
				r.AddCookie(&http.Cookie{Name: "hvd_view_1234", Value: s.cookie})
				r.URL.Path, r.URL.RawQuery = "/data/grid", "name=held"
			})
		}()
	}
	if taken := cap(s.work) - len(s.work); taken != 0 || len(s.cached) != 0 {
		t.Errorf("got %d places taken and %d answers, want none", taken, len(s.cached))
	}
}

// Many connections without the cookie do not lock out the browser that has it, and do not end its connection,
// nor the one on which it has got the cookie.
func TestConnectionsAreLimited(t *testing.T) {
	s := serve(t, straggler.read(t))
	address := net.JoinHostPort(s.host, s.port)
	dial := func() net.Conn {
		t.Helper()
		c, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	get := func(what string, c net.Conn, path, cookie string, want int) {
		t.Helper()
		_, err := fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: %s\r\nCookie: %s=%s\r\n\r\n", path, address, s.cookieName(), cookie)
		if err != nil {
			t.Fatal(what, err)
		}
		a, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatal(what, err)
		}
		if _, err := io.Copy(io.Discard, a.Body); err != nil || a.StatusCode != want {
			t.Errorf("%s: got %s, %v", what, a.Status, err)
		}
	}
	answers := func(what string, c net.Conn) {
		t.Helper()
		get(what, c, "/", s.cookie, 200)
	}
	first, own := dial(), dial()
	get("the token", first, "/?token="+s.token, "", 303)
	answers("before", own)
	for range maxConnections {
		dial()
	}
	answers("a new connection", dial())
	answers("the open connection", own)
	answers("the connection of the token", first)
}
