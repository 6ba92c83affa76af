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

// A Handler serves a connection until it ends, and returns why: io.EOF if the peer left regularly. ctx ends
// when the connection must be closed. The caller of the Handler closes it.
type Handler func(ctx context.Context, conn net.Conn) error

// Acceptor accepts connections until Close. Each has a goroutine, their number is bounded, and Close ends
// all.
type Acceptor struct {
	name   string
	most   int
	log    *zap.Logger
	handle Handler

	ln    net.Listener
	ctx   context.Context // ends in Close
	stop  context.CancelFunc
	wg    sync.WaitGroup
	close func() error

	mu    sync.Mutex
	conns map[net.Conn]struct{}
}

// Serve listens on addr, host:port with port 0 for any free one, and passes connections to handle, at most
// most at a time. Errors are logged, and floods of them are shortened (logs.Quiet); name says in the log
// whose connections these are. log may be nil.
func Serve(addr, name string, most int, log *zap.Logger, handle Handler) (*Acceptor, error) {
	ln, err := Listen(addr)
	if err != nil {
		return nil, err
	}
	a := &Acceptor{name: name, most: most, log: logs.Quiet(log), handle: handle, ln: ln,
		conns: make(map[net.Conn]struct{})}
	a.ctx, a.stop = context.WithCancel(context.Background())
	a.close = sync.OnceValue(a.closeOnce)
	a.wg.Go(a.accept)
	return a, nil
}

// Addr returns the address that a listens on.
func (a *Acceptor) Addr() string { return a.ln.Addr().String() }

// Close closes all connections and waits for the goroutines of a.
func (a *Acceptor) Close() error { return a.close() }

func (a *Acceptor) closeOnce() error {
	a.stop()
	err := a.ln.Close()
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
		case a.ctx.Err() != nil:
			return
		default:
			// The usual cause is that the process has no free file descriptor. Connections that end free
			// some.
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
			a.wg.Go(func() { a.serve(conn) })
		}
		a.mu.Unlock()
		if full {
			a.log.Warn(a.name+" refused a client, because it has too many",
				zap.Stringer("client", conn.RemoteAddr()), zap.Int("clients", a.most))
		}
	}
}

func (a *Acceptor) serve(conn net.Conn) {
	err := a.handle(a.ctx, conn)
	conn.Close()
	a.mu.Lock()
	delete(a.conns, conn)
	a.mu.Unlock()
	if !errors.Is(err, io.EOF) && a.ctx.Err() == nil {
		a.log.Warn(a.name+" closed a connection", zap.Stringer("client", conn.RemoteAddr()), zap.Error(err))
	}
}
