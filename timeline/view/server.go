package view

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"crypto/rand"
	"crypto/subtle"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"html"
	"net"
	"net/http"
	"net/url"
	"os"
	"path"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/gohvd/gohvd/internal/dial"
)

//go:embed page
var page embed.FS

const (
	// maxCached limits the bytes of the answers that a Server keeps, and of their addresses. An answer counts
	// for entryBytes more, so that their number is limited too.
	// Those about a running job are soon out of date.
	maxCached     = 64 << 20
	maxCachedLive = 16 << 20
	entryBytes    = 1 << 10
	// leastPacked is the size from which on an answer is compressed. Those about a running job are mostly
	// shorter, and to compress them takes more of the training's processors than the rest of the answer.
	leastPacked = 16 << 10
	// maxConnections limits the connections of a Server that have not shown the cookie. A browser opens six.
	maxConnections = 32
	// policy lets the page load only its own files, and lets no text of it become markup or script.
	policy = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; " +
		"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; " +
		"require-trusted-types-for 'script'; trusted-types 'none'"
)

// Server serves the page about a Source, or about a running job.
type Server struct {
	source Source
	live   *Live  // nil unless the job runs; then source is not used
	host   string // a further name by which a browser may reach the server
	port   string
	files  map[string][]byte
	cookie string
	id     string // differs between servers, so that a browser does not mix up their answers
	// work has a writer for each answer that may be made at a time. Writers take a megabyte each, so they are
	// reused.
	work chan *gzip.Writer

	mu     sync.Mutex
	token  string // empty after its first use
	cached map[string]*answer
	// bytes is the size of what cached has, and maxBytes its limit.
	bytes, maxBytes int
}

// answer is a cached body. done is closed when it is there. Then size is its size in the cache, and packed
// says that it is compressed by gzip.
type answer struct {
	done   chan struct{}
	body   []byte
	packed bool
	kind   string
	err    error
	size   int
}

// NewServer returns a Server that browsers reach at the address HOST:PORT. A browser may also use an IP
// address, localhost or the name of this host.
func NewServer(source Source, addr string) *Server {
	host, port, _ := net.SplitHostPort(addr)
	s := &Server{source: source, host: host, port: port, files: make(map[string][]byte), cookie: rand.Text(),
		id: rand.Text()[:8], work: make(chan *gzip.Writer, 2), token: rand.Text(),
		cached: make(map[string]*answer), maxBytes: maxCached}
	for range cap(s.work) {
		s.work <- newWriter()
	}
	entries, err := page.ReadDir("page")
	if err != nil {
		panic("view: " + err.Error()) // the folder is built into the program
	}
	for _, e := range entries {
		if s.files["/"+e.Name()], err = page.ReadFile("page/" + e.Name()); err != nil {
			panic("view: " + err.Error())
		}
	}
	s.files["/"] = s.files["/index.html"]
	return s
}

// NewLiveServer returns a Server for a running job.
func NewLiveServer(l *Live, addr string) *Server {
	s := NewServer(nil, addr)
	s.live, s.maxBytes = l, maxCachedLive
	return s
}

// of returns the Source that a request is about, and its name. run is the name that the request has, or
// empty.
func (s *Server) of(run string) (Source, string, error) {
	if s.live == nil {
		return s.source, s.id, nil
	}
	version := 0
	if run != "" {
		id, text, _ := strings.Cut(run, ".")
		version, _ = strconv.Atoi(text)
		if id != s.id || version < 1 {
			version = -1 // which is not kept
		}
	}
	source, version := s.live.at(version)
	if source == nil {
		return nil, "", errors.New("this moment of the job is not kept any more: choose Follow to see the present")
	}
	return source, s.runOf(version), nil
}

// runOf returns the name of a version of a running job.
func (s *Server) runOf(version int) string { return fmt.Sprintf("%s.%d", s.id, version) }

// URL returns the address of the page. Its token is valid for one use.
func (s *Server) URL() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return fmt.Sprintf("http://%s/?token=%s", net.JoinHostPort(s.host, s.port), s.token)
}

// Redirect returns an HTML page that leads a browser to URL.
func (s *Server) Redirect() []byte {
	return fmt.Appendf(nil, `<!DOCTYPE html><meta charset="utf-8"><title>hvdrun view</title>`+
		`<meta http-equiv="refresh" content="0; url=%s">`+"\n", html.EscapeString(s.URL()))
}

// Serve serves the page until ctx is done. It closes the listener.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	server := &http.Server{Handler: s, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 5 * time.Second,
		WriteTimeout: time.Minute, IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10,
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, connection{}, c)
		}}
	stopped := make(chan error, 1)
	stop := context.AfterFunc(ctx, func() { stopped <- server.Close() })
	err := server.Serve(dial.NewLimiter(maxConnections).Listener(l))
	if stop() || !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return <-stopped
}

// reachable reports whether a Host header is of this server. Another name could be that of a page elsewhere
// whose name resolves to this address (DNS rebinding).
func (s *Server) reachable(host string) bool {
	name := host
	if h, _, err := net.SplitHostPort(host); err == nil {
		name = h
	}
	own, err := os.Hostname()
	return name == "localhost" || net.ParseIP(strings.Trim(name, "[]")) != nil ||
		s.host != "" && strings.EqualFold(name, s.host) || err == nil && strings.EqualFold(name, own)
}

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Content-Security-Policy", policy)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Cache-Control", "no-store")
	switch {
	case !s.reachable(r.Host):
		http.Error(w, fmt.Sprintf("got the host %.64q, want localhost or the address of this server", r.Host),
			http.StatusMisdirectedRequest)
	case r.Method != http.MethodGet:
		h.Set("Allow", http.MethodGet)
		http.Error(w, fmt.Sprintf("got the method %.16q, want GET", r.Method), http.StatusMethodNotAllowed)
	case r.URL.Path == "/" && r.URL.Query().Has("token"):
		s.enter(w, r)
	case !s.known(r):
		http.Error(w, "This browser has no access: open the address that hvdrun view printed, with its token. It works once; if it has been used, start hvdrun view again.",
			http.StatusForbidden)
	case strings.HasPrefix(r.URL.Path, "/data/"):
		s.data(w, r)
	case r.URL.Path == "/live" && s.live != nil:
		s.live.stream(w, r, s.runOf)
	default:
		s.file(w, r)
	}
}

// cookieName returns the name of the cookie. Cookies of a host are sent to all of its ports, so the name has
// the port.
func (s *Server) cookieName() string { return "hvd_view_" + s.port }

// connection is the key of the connection of a request in its context.
type connection struct{}

// prove says that a request is of the owner. Its connection does not count for maxConnections any more, so
// that other users of this host cannot lock the owner out.
func prove(r *http.Request) {
	if conn, limited := r.Context().Value(connection{}).(*dial.LimitedConn); limited {
		conn.Prove()
	}
}

// known reports whether a request has the cookie.
func (s *Server) known(r *http.Request) bool {
	c, err := r.Cookie(s.cookieName())
	is := err == nil && subtle.ConstantTimeCompare([]byte(c.Value), []byte(s.cookie)) == 1
	if is {
		prove(r)
	}
	return is
}

// enter exchanges the token for the cookie.
func (s *Server) enter(w http.ResponseWriter, r *http.Request) {
	token := r.URL.Query().Get("token")
	s.mu.Lock()
	fits := s.token != "" && subtle.ConstantTimeCompare([]byte(token), []byte(s.token)) == 1
	if fits {
		prove(r) // otherwise others could close the connection before the browser has the cookie
		s.token = ""
	}
	s.mu.Unlock()
	if !fits && !s.known(r) {
		http.Error(w, "This address has expired, because it works once: start hvdrun view again, and open the address that it prints.",
			http.StatusForbidden)
		return
	}
	if fits {
		// After a link or a Redirect, a browser would not send a strict cookie to the page. A lax one is sent
		// with no other request of another site.
		http.SetCookie(w, &http.Cookie{Name: s.cookieName(), Value: s.cookie, Path: "/", HttpOnly: true,
			SameSite: http.SameSiteLaxMode})
	}
	w.Header().Set("Location", "/")
	w.WriteHeader(http.StatusSeeOther)
}

// types has the types of the files of the page. Those of the package mime depend on the machine.
var types = map[string]string{"": "text/html; charset=utf-8", ".html": "text/html; charset=utf-8",
	".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}

// file serves a file of the page.
func (s *Server) file(w http.ResponseWriter, r *http.Request) {
	text, is := s.files[r.URL.Path]
	if !is {
		http.Error(w, "there is no such page", http.StatusNotFound)
		return
	}
	w.Header().Set("Content-Type", cmp.Or(types[path.Ext(r.URL.Path)], "text/plain; charset=utf-8"))
	_, _ = w.Write(text) // if the browser has gone away, nobody needs the error
}

// data answers a request for data.
func (s *Server) data(w http.ResponseWriter, r *http.Request) {
	source, run, err := s.of(r.URL.Query().Get("run"))
	if err != nil {
		http.Error(w, err.Error(), http.StatusGone)
		return
	}
	key := run + " " + r.URL.RequestURI()
	s.mu.Lock()
	a := s.cached[key]
	fresh := a == nil
	if fresh {
		a = &answer{done: make(chan struct{})}
		s.cached[key] = a
	}
	s.mu.Unlock()
	if fresh {
		s.compute(key, a, r, source, run)
	}
	select {
	case <-a.done:
	case <-r.Context().Done():
		return
	}
	if a.err != nil {
		http.Error(w, a.err.Error(), http.StatusBadRequest)
		return
	}
	h := w.Header()
	h.Set("Content-Type", a.kind)
	h.Set("Vary", "Accept-Encoding")
	if s.live == nil && r.URL.Query().Get("run") == run {
		h.Set("Cache-Control", "private, max-age=86400, immutable")
	}
	accepted := strings.Contains(r.Header.Get("Accept-Encoding"), "gzip")
	if a.packed && accepted {
		h.Set("Content-Encoding", "gzip")
	}
	if !a.packed || accepted {
		_, _ = w.Write(a.body)
		return
	}
	if z, err := gzip.NewReader(bytes.NewReader(a.body)); err == nil {
		var b bytes.Buffer
		if _, err := b.ReadFrom(z); err == nil {
			_, _ = w.Write(b.Bytes())
		}
	}
}

// compute makes an answer. Only a few are made at a time. The answer stays in the cache if it is no error and
// the cache has room.
func (s *Server) compute(key string, a *answer, r *http.Request, source Source, run string) {
	z := <-s.work
	a.err = errors.New("the server has failed") // after a panic, which net/http logs
	defer func() {
		s.work <- z
		s.mu.Lock()
		defer s.mu.Unlock()
		close(a.done)
		if a.err != nil {
			delete(s.cached, key)
			return
		}
		a.size = len(key) + len(a.body) + entryBytes
		s.bytes += a.size
		for old, o := range s.cached { // in random order, which is good enough: the browser has a cache too
			if s.bytes <= s.maxBytes {
				break
			}
			if o != a && o.size > 0 {
				s.bytes -= o.size
				delete(s.cached, old)
			}
		}
	}()
	a.body, a.kind, a.err = answerTo(source, run, path.Base(r.URL.Path), r.URL.Query())
	a.packed = len(a.body) >= leastPacked
	if a.packed {
		a.body = pack(z, a.body)
	}
}

// newWriter returns a writer for pack.
func newWriter() *gzip.Writer {
	z, _ := gzip.NewWriterLevel(nil, gzip.BestSpeed) // the error is that of a wrong level
	return z
}

// pack compresses a text by gzip.
func pack(z *gzip.Writer, body []byte) []byte {
	var b bytes.Buffer
	z.Reset(&b)
	_, _ = z.Write(body) // a bytes.Buffer returns no error
	_ = z.Close()
	return b.Bytes()
}

// answerTo returns the body of the answer to a request for data, and its type.
func answerTo(source Source, id, name string, q url.Values) (body []byte, kind string, err error) {
	number := func(name string) (n int) {
		if err == nil {
			if n, err = strconv.Atoi(cmp.Or(q.Get(name), "0")); err != nil {
				err = fmt.Errorf("got %.32q for %s, want a number", q.Get(name), name)
			}
		}
		return n
	}
	const binary = "application/octet-stream"
	switch name {
	case "tile":
		t := Request{Rows: q.Get("rows"), Align: q.Get("align"), Level: number("level"),
			Index: number("index"), Group: number("group")}
		if err == nil {
			body, err = source.Tile(t)
		}
		return body, binary, err
	case "grid":
		body, err = source.Grid(q.Get("name"))
		return body, binary, err
	}
	var v any
	switch name {
	case "report":
		v = source.Report()
	case "comparison":
		v = source.Comparison()
	case "info":
		v = struct {
			*Info
			Run string `json:"run"`
		}{source.Info(), id}
	case "window":
		v, err = source.Window(q.Get("align"))
	case "labels":
		v, err = source.Labels(q.Get("rows"))
	case "find":
		us, bad := strconv.ParseFloat(q.Get("us"), 64)
		if row := number("row"); bad == nil && err == nil {
			v, err = source.Find(q.Get("rows"), row, q.Get("align"), us)
		}
		err = errors.Join(err, bad)
	case "operation":
		if rank, index := number("rank"), number("index"); err == nil {
			v, err = source.Operation(rank, index)
		}
	default:
		err = errors.New("there is no such data")
	}
	if err == nil {
		body, err = json.Marshal(v)
	}
	return body, "application/json", err
}
