// Package serve accepts connections: each has a goroutine, there are not too many, and Close ends all.
package serve

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/logs"
)

// Handler serves a connection until it ends, and says why: io.EOF if the peer left as it may. ctx ends when the connection
// is to be closed. Whoever calls the Handler closes it.
type Handler func(ctx context.Context, conn net.Conn) error

// Listener accepts connections until Close.
type Listener struct {
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

// Listen listens on addr, host:port with port 0 for any free one, and gives connections to handle, at most so many at a
// time. What goes wrong is logged, and storms are cut short (logs.Quiet); name says whose connections these are. log may be nil.
func Listen(addr, name string, most int, log *zap.Logger, handle Handler) (*Listener, error) {
	ln, err := dial.Listen(addr)
	if err != nil {
		return nil, err
	}
	l := &Listener{name: name, most: most, log: logs.Quiet(log), handle: handle, ln: ln, conns: make(map[net.Conn]struct{})}
	l.ctx, l.stop = context.WithCancel(context.Background())
	l.close = sync.OnceValue(l.closeOnce)
	l.wg.Go(l.accept)
	return l, nil
}

// Addr is the address that l listens on.
func (l *Listener) Addr() string { return l.ln.Addr().String() }

// Close closes all connections and waits for the goroutines of l.
func (l *Listener) Close() error { return l.close() }

func (l *Listener) closeOnce() error {
	l.stop()
	err := l.ln.Close()
	l.mu.Lock()
	for conn := range l.conns {
		conn.Close()
	}
	l.mu.Unlock()
	l.wg.Wait()
	return err
}

func (l *Listener) accept() {
	var wait dial.Backoff
	for {
		conn, err := l.ln.Accept()
		switch {
		case err == nil:
			wait = 0
		case l.ctx.Err() != nil:
			return
		default:
			// Out of file descriptors, as a rule. Connections that end give some back.
			l.log.Error(l.name+" cannot accept", zap.Error(err))
			dial.Pause(l.ctx, wait.Next(), nil)
			continue
		}
		l.mu.Lock()
		full := len(l.conns) >= l.most
		if full || l.ctx.Err() != nil {
			conn.Close()
		} else {
			l.conns[conn] = struct{}{}
			l.wg.Go(func() { l.serve(conn) })
		}
		l.mu.Unlock()
		if full {
			l.log.Warn(l.name+" refused a client: too many", zap.Stringer("client", conn.RemoteAddr()), zap.Int("clients", l.most))
		}
	}
}

func (l *Listener) serve(conn net.Conn) {
	err := l.handle(l.ctx, conn)
	conn.Close()
	l.mu.Lock()
	delete(l.conns, conn)
	l.mu.Unlock()
	if !errors.Is(err, io.EOF) && l.ctx.Err() == nil {
		l.log.Warn(l.name+" closed a connection", zap.Stringer("client", conn.RemoteAddr()), zap.Error(err))
	}
}
