package dial

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/logs"
)

// Handler is a function that serves conn until the connection ends, and returns the reason. The reason is
// io.EOF if the peer has closed the connection in an orderly way. When ctx ends, the Handler must return. Its
// caller closes conn. The Handler must call slot.Release once, when the peer has proved its identity or conn
// has ended.
type Handler func(ctx context.Context, conn net.Conn, slot *Slot) error

// Acceptor accepts connections until Close is called, and serves each in a goroutine of its own. It serves
// only a limited number of connections at a time. Close closes all of them.
type Acceptor struct {
	name     string
	most     int
	log      *zap.Logger
	handle   Handler
	unproven *Limiter

	ln    net.Listener
	ctx   context.Context // cancelled when Close is called
	stop  context.CancelFunc
	wg    sync.WaitGroup
	close func() error

	mu    sync.Mutex
	conns map[net.Conn]struct{}
	ended chan struct{} // closed and replaced when a connection has ended
}

// maxUnproven is the maximum number of connections of an Acceptor whose peer has not proved its identity yet.
const maxUnproven = 1024

// Serve listens on addr and calls handle for each connection. addr is as in Listen. The parameter most is
// the maximum number of connections at a time. Serve closes any further connection. Those whose peer has not
// proved its identity are limited by a Limiter. Serve logs errors at a limited rate (logs.Quiet). The log
// lines begin with name, for example "store: server". log may be nil.
func Serve(addr, name string, most int, log *zap.Logger, handle Handler) (*Acceptor, error) {
	ln, err := Listen(addr)
	if err != nil {
		return nil, err
	}
	a := &Acceptor{name: name, most: most, log: logs.Quiet(log), handle: handle, ln: ln,
		unproven: NewLimiter(maxUnproven), conns: make(map[net.Conn]struct{}), ended: make(chan struct{})}
	a.ctx, a.stop = context.WithCancel(context.Background())
	a.close = sync.OnceValue(a.closeOnce)
	a.wg.Go(a.accept)
	return a, nil
}

// Addr returns the address on which the Acceptor listens. For a Unix socket it has no prefix.
func (a *Acceptor) Addr() string { return a.ln.Addr().String() }

// Close closes all connections and waits for the goroutines of the Acceptor.
func (a *Acceptor) Close() error { return a.close() }

// StopListening makes further connections be refused. Those that were accepted are served as before.
func (a *Acceptor) StopListening() { _ = a.ln.Close() }

// Idle waits until no connection is served. It returns an error if ctx ends first.
func (a *Acceptor) Idle(ctx context.Context) error {
	for {
		a.mu.Lock()
		n, ended := len(a.conns), a.ended
		a.mu.Unlock()
		if n == 0 {
			return nil
		}
		select {
		case <-ended:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (a *Acceptor) closeOnce() error {
	a.stop()
	err := a.ln.Close()
	if errors.Is(err, net.ErrClosed) {
		err = nil // StopListening
	}
	a.mu.Lock()
	for conn := range a.conns {
		conn.Close()
	}
	a.mu.Unlock()
	a.wg.Wait()
	return err
}

func (a *Acceptor) accept() {
	var wait Backoff
	for {
		conn, err := a.ln.Accept()
		switch {
		case err == nil:
			wait = 0
		case a.ctx.Err() != nil || errors.Is(err, net.ErrClosed):
			return
		default:
			// The usual cause is that the process has no free file descriptor. The retry succeeds when
			// another connection has ended.
			a.log.Error(a.name+": accepting a connection failed", zap.Error(err))
			Pause(a.ctx, wait.Next(), nil)
			continue
		}
		a.mu.Lock()
		full := len(a.conns) >= a.most
		if full || a.ctx.Err() != nil {
			conn.Close()
		} else {
			a.conns[conn] = struct{}{}
			slot := a.unproven.Acquire(conn)
			a.wg.Go(func() { a.serve(conn, slot) })
		}
		a.mu.Unlock()
		a.unproven.Settle()
		if full {
			a.log.Warn(a.name+" refused a client, because the maximum number of clients is connected",
				zap.Stringer("client", conn.RemoteAddr()), zap.Int("maximum", a.most))
		}
	}
}

func (a *Acceptor) serve(conn net.Conn, slot *Slot) {
	err := a.handle(a.ctx, conn, slot)
	conn.Close()
	a.mu.Lock()
	delete(a.conns, conn)
	close(a.ended)
	a.ended = make(chan struct{})
	a.mu.Unlock()
	if !errors.Is(err, io.EOF) && a.ctx.Err() == nil {
		a.log.Warn(a.name+" closed a connection", zap.Stringer("client", conn.RemoteAddr()), zap.Error(err))
	}
}
