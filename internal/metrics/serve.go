package metrics

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/dial"
)

const (
	// scrapeTimeout limits each part of a scrape: reading the request, and writing the response.
	scrapeTimeout = 10 * time.Second
	// grace is how long responses in progress may take when the server is closed: a scrape must not delay the
	// end of a job.
	grace = 250 * time.Millisecond
	// maxConns is the greatest number of connections at a time, so that clients cannot use up the process's
	// file descriptors.
	maxConns = 32
)

// Address returns the address to listen on for addr, which is HOST:PORT, :PORT or PORT. Without a host it is
// 127.0.0.1; to be reachable from elsewhere, addr must have an address of the host, or 0.0.0.0. plus is added
// to the port unless that is 0: processes of a host that get the same address add their local rank.
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
		return "", fmt.Errorf("metrics: address %q: the port of local rank %d is %d, want at most 65535",
			addr, plus, n)
	}
	if host == "" {
		host = "127.0.0.1"
	}
	return net.JoinHostPort(host, strconv.FormatUint(n, 10)), nil
}

// Server serves metrics over HTTP.
type Server struct {
	listener net.Listener
	http     http.Server
	cancel   context.CancelFunc
	close    sync.Once

	running sync.WaitGroup // counts the server and the responses in progress
	mu      sync.Mutex
	closed  bool // no further response may begin
}

// Serve serves h at addr, which has one of the forms of Address, until Close. log may be nil.
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
	return serveOn(l, h, log), nil
}

func serveOn(l net.Listener, h http.Handler, log *zap.Logger) *Server {
	ctx, cancel := context.WithCancel(context.Background())
	s := &Server{listener: &bounded{l, dial.NewLimiter(maxConns)}, cancel: cancel}
	s.http = http.Server{
		Handler:     http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { s.answer(h, w, r) }),
		ReadTimeout: scrapeTimeout, WriteTimeout: scrapeTimeout, IdleTimeout: 3 * time.Minute,
		MaxHeaderBytes: 8 << 10,
		ErrorLog:       zap.NewStdLog(log),
		BaseContext:    func(net.Listener) context.Context { return ctx },
	}
	s.running.Go(func() {
		if err := s.http.Serve(s.listener); !errors.Is(err, http.ErrServerClosed) {
			log.Error("metrics are no longer served", zap.String("address", s.Addr()), zap.Error(err))
		}
	})
	return s
}

// answer serves a request so that Close waits for it.
func (s *Server) answer(h http.Handler, w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return // the connection is being closed
	}
	s.running.Add(1)
	s.mu.Unlock()
	defer s.running.Done()
	h.ServeHTTP(w, r)
}

// Addr returns the address it listens on, host:port.
func (s *Server) Addr() string { return s.listener.Addr().String() }

// Close stops the server. It waits up to a quarter of a second for responses in progress, and then closes
// their connections and waits for the handlers to return. Further calls only wait.
func (s *Server) Close() error {
	s.close.Do(func() {
		ctx, cancel := context.WithTimeout(context.Background(), grace)
		defer cancel()
		// These errors only mean that connections had to be closed.
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

// bounded is a listener that keeps at most maxConns connections. One more closes the oldest. So clients that
// stay connected keep no other client out, and a Prometheus whose idle connection was closed opens another.
type bounded struct {
	net.Listener
	limiter *dial.Limiter
}

func (l *bounded) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &boundedConn{Conn: conn, slot: l.limiter.Acquire(conn)}, nil
}

type boundedConn struct {
	net.Conn
	slot  *dial.Slot
	leave sync.Once
}

func (c *boundedConn) Close() error {
	c.leave.Do(func() { c.slot.Release() })
	return c.Conn.Close()
}
