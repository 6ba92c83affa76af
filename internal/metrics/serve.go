package metrics

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/dial"
)

const (
	// scrapeTimeout is the limit for reading a request, and also the limit for writing the response.
	scrapeTimeout = 10 * time.Second
	// grace is how long Close waits for responses in progress. It is short, so that a scrape does not delay
	// the end of a job.
	grace = 250 * time.Millisecond
	// maxConns limits the number of simultaneous connections, so that clients cannot use up the process's
	// file descriptors.
	maxConns = 32
)

// Address returns the address to listen on. addr has the form HOST:PORT, :PORT or PORT. Without HOST the
// address is 127.0.0.1. For a server that other hosts can reach, HOST must be an address of this host, or
// 0.0.0.0. Unless the port is 0, the argument plus is added to it: if several processes of a host get the
// same addr, each rank passes its local rank as plus, and each node of a parameter server its number.
func Address(addr string, plus int) (string, error) {
	host, port, err := net.SplitHostPort(addr)
	if _, notNumber := strconv.Atoi(addr); notNumber == nil {
		host, port, err = "", addr, nil
	}
	if err != nil {
		return "", fmt.Errorf("metrics: address %q: %w", addr, err)
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return "", fmt.Errorf("metrics: address %q: got port %q, want a number from 0 to 65535", addr, port)
	}
	if n != 0 {
		n += uint64(plus)
	}
	if n > 65535 {
		return "", fmt.Errorf("metrics: address %q: the port of this process is %s + %d = %d, want at most 65535",
			addr, port, plus, n)
	}
	if host == "" {
		host = "127.0.0.1"
	}
	return net.JoinHostPort(host, strconv.FormatUint(n, 10)), nil
}

// Server serves metrics, or the state of a sidecar, over HTTP.
type Server struct {
	listener net.Listener
	http     http.Server
	cancel   context.CancelFunc
	close    sync.Once

	running sync.WaitGroup // counts the server's goroutine and the responses in progress
	mu      sync.Mutex
	closed  bool // if set, no new response begins
}

// Serve starts a server, which serves requests at addr with the handler h until Close. Address describes the
// forms of addr. log may be nil.
func Serve(addr string, h http.Handler, log *zap.Logger) (*Server, error) {
	at, err := Address(addr, 0)
	if err != nil {
		return nil, err
	}
	l, err := net.Listen("tcp", at)
	if err != nil {
		return nil, fmt.Errorf("metrics: %w", err)
	}
	if log == nil {
		log = zap.NewNop()
	}
	return serveOn(l, h, log, scrapeTimeout), nil
}

// serveOn serves requests on l. timeout limits the time for reading a request, and the time for writing the
// response.
func serveOn(l net.Listener, h http.Handler, log *zap.Logger, timeout time.Duration) *Server {
	ctx, cancel := context.WithCancel(context.Background())
	// A further client closes the oldest connection, so that clients that stay connected cannot keep others
	// out. If Prometheus loses an idle connection in this way, it opens a new one.
	s := &Server{listener: dial.NewLimiter(maxConns).Listener(l), cancel: cancel}
	s.http = http.Server{
		Handler:     http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { s.answer(h, w, r) }),
		ReadTimeout: timeout, WriteTimeout: timeout, IdleTimeout: 3 * time.Minute,
		MaxHeaderBytes: 8 << 10,
		ErrorLog:       zap.NewStdLog(log),
		BaseContext:    func(net.Listener) context.Context { return ctx },
	}
	s.running.Go(func() {
		if err := s.http.Serve(s.listener); !errors.Is(err, http.ErrServerClosed) {
			log.Error("the HTTP server has ended", zap.String("address", s.Addr()), zap.Error(err))
		}
	})
	return s
}

// answer serves a request with the handler h. It counts the request in s.running, so that Close waits for it.
func (s *Server) answer(h http.Handler, w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return // Close closes the connection, so no response is needed
	}
	s.running.Add(1)
	s.mu.Unlock()
	defer s.running.Done()
	if !ourHost(r) {
		http.Error(w, "this name of the host is not known here: use localhost or an IP address",
			http.StatusForbidden)
		return
	}
	h.ServeHTTP(w, r)
}

// ourHost reports whether the header Host of a request fits. A browser on this host can connect to loopback
// addresses, and an attacker can let a name of his own resolve to such an address (DNS rebinding). Then the
// browser lets the attacker's page read the answers. Therefore a request on a loopback address must have an
// IP address as Host, or a name that an attacker cannot choose: localhost or the name of this host.
func ourHost(r *http.Request) bool {
	local, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
	if !ok || !local.IP.IsLoopback() || r.Host == "" {
		return true
	}
	name := r.Host
	if host, _, err := net.SplitHostPort(name); err == nil {
		name = host
	}
	_, notIP := netip.ParseAddr(strings.Trim(name, "[]"))
	if notIP == nil || strings.EqualFold(name, "localhost") {
		return true
	}
	own, err := os.Hostname()
	return err == nil && strings.EqualFold(name, own)
}

// Addr returns the address on which the server listens, as host:port.
func (s *Server) Addr() string { return s.listener.Addr().String() }

// Close stops the server. It waits up to 250 ms for responses in progress. Then it closes the remaining
// connections and waits until the handlers have returned. A further call only waits.
func (s *Server) Close() error {
	s.close.Do(func() {
		ctx, cancel := context.WithTimeout(context.Background(), grace)
		defer cancel()
		// The errors are ignored, because they only mean that connections had to be closed.
		_ = s.http.Shutdown(ctx)
		s.cancel()
		_ = s.http.Close()
		s.mu.Lock()
		defer s.mu.Unlock()
		s.closed = true
	})
	s.running.Wait()
	return nil
}
