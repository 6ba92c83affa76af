package store

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/store/internal/call"
)

// Limits of a Server.
const (
	maxClients        = 16 << 10 // maximum number of connections
	maxWaitsPerClient = 1024     // maximum number of waiting calls of one connection
	serverIOTimeout   = 10 * time.Second

	// maxCallsBytes and maxAnswersBytes limit the memory that the requests and the replies of all clients
	// together take. A request or a reply of at most freeBytes does not count, unless the request waits.
	// Until a longer request is decoded, it counts with the most that it can take.
	maxCallsBytes   = 256 << 20
	maxAnswersBytes = 128 << 20
	freeBytes       = 4 << 10
)

// Server serves a HashStore to Clients. If there is no secret, it refuses processes of other users of this
// host, except root.
//
// If a client violates the protocol, the server closes its connection and logs the reason. Other clients are
// not affected. The server also closes the connection of a client that does not read its replies for 10 s, or
// sends nothing for a minute (clients ping every 5 s). A single stop of the server's process while it waits
// for a frame does not end the connection. When a connection ends, the server drops the client's waiting
// calls.
type Server struct {
	store          *HashStore
	cfg            Config
	calls, answers *dial.Budget
	accepts        *dial.Acceptor
}

// Serve listens on addr and serves store until Close. addr has the form host:port, where port 0 means any
// free port. The caller stays responsible for closing store.
func Serve(addr string, store *HashStore, cfg Config) (*Server, error) {
	cfg.handshake = cmp.Or(cfg.handshake, serverIOTimeout)
	cfg.silence = cmp.Or(cfg.silence, clientSilence)
	cfg.Secret = cfg.Secret.Encrypted()
	s := &Server{store: store, cfg: cfg,
		calls:   dial.NewBudget("their requests", cmp.Or(cfg.maxCallsBytes, maxCallsBytes)),
		answers: dial.NewBudget("replies", maxAnswersBytes)}
	var err error
	if s.accepts, err = dial.Serve(addr, "store: server", maxClients, cfg.Log,
		dial.SameUser(cfg.Secret, cfg.Log, s.serve)); err != nil {
		return nil, fmt.Errorf("store: serve: %w", err)
	}
	return s, nil
}

// Addr returns the address that s listens on.
func (s *Server) Addr() string { return s.accepts.Addr() }

// Idle waits until no client is connected. Then the store has executed all calls of processes that have
// ended. Idle returns an error if ctx ends first.
func (s *Server) Idle(ctx context.Context) error { return s.accepts.Idle(ctx) }

// Close closes all connections and waits until they have ended. The store stays open.
func (s *Server) Close() error { return s.accepts.Close() }

func (s *Server) serve(ctx context.Context, conn net.Conn, slot *dial.Slot) error {
	c := &serverConn{store: s.store, calls: s.calls, answers: s.answers, conn: conn,
		waits: make(map[uint64]context.CancelFunc)}
	c.ctx, c.cancel = context.WithCancelCause(ctx)
	c.end(c.run(s, slot))
	c.wg.Wait()
	return context.Cause(c.ctx)
}

// serverConn is the server's end of a connection. One goroutine reads the requests and executes every call
// that does not wait. Each waiting call has a goroutine of its own.
type serverConn struct {
	store          *HashStore
	calls, answers *dial.Budget
	conn           net.Conn
	ctx            context.Context // ends when the connection ends
	cancel         context.CancelCauseFunc
	wg             sync.WaitGroup

	mu    sync.Mutex
	waits map[uint64]context.CancelFunc

	writing sync.Mutex
}

// end closes the connection because of err. Only the first error counts.
func (c *serverConn) end(err error) {
	c.cancel(err)
	c.conn.Close()
}

// run serves requests until the connection ends, and returns the reason. The reason is io.EOF if the client
// closed the connection between two requests.
func (c *serverConn) run(s *Server, slot *dial.Slot) error {
	c.conn.SetDeadline(time.Now().Add(s.cfg.handshake))
	in, version, err := c.handshake(s.cfg.Secret)
	if !slot.Release() {
		return dial.ErrEvicted
	}
	if err != nil {
		return err
	}
	if err := c.write(dial.Greeting(storeMagic, storeVersion)); err != nil {
		return err
	}
	if version != storeVersion {
		return fmt.Errorf("the client speaks version %d of the store protocol, want %d", version,
			storeVersion)
	}
	for {
		if err := awaitFrame(c.conn, in, s.cfg.silence); err != nil {
			return err
		}
		if err := c.serveNext(in); err != nil {
			return err
		}
	}
}

// serveNext reads and handles one request.
func (c *serverConn) serveNext(in *bufio.Reader) error {
	n, err := dial.PeekFrame(in)
	if err != nil {
		return err
	}
	n = min(n, maxRequestBytes)
	var held int64
	defer func() { c.calls.Release(held) }()
	if n > freeBytes {
		// If connections needed more while they hold some, they could wait for each other.
		most := mostMemory(n)
		if err := c.calls.Acquire(c.ctx, most); err != nil {
			return err
		}
		held = most
	}
	body, err := dial.ReadFrame(in, maxRequestBytes)
	if err != nil {
		return err
	}
	q, err := decodeRequest(body)
	if err != nil {
		return err
	}
	all := q.memory(n)
	// count makes a short request count. It does not wait, because the connection may have requests whose end
	// would make room, and their cancellations come after this request.
	count := func() (release func(), err error) {
		if held == 0 {
			if err := c.calls.TryAcquire(all); err != nil {
				return nil, call.Refuse(ErrLimit, err.Error())
			}
			held = all
		}
		return func() { c.calls.Release(all) }, nil
	}
	if held > 0 {
		c.calls.Release(held - all)
		held = all
	} else if all > freeBytes {
		if _, err := count(); err != nil {
			r := reply{id: q.id}
			r.fail(err)
			return c.reply(&r)
		}
	}
	waits, err := c.handle(&q, count)
	if waits {
		held = 0 // belongs to the wait
	}
	return err
}

// hold takes n bytes from b, unless they are few. The caller calls release when it has freed them.
func hold(ctx context.Context, b *dial.Budget, n int64) (release func(), err error) {
	if n <= freeBytes {
		return func() {}, nil
	}
	return func() { b.Release(n) }, b.Acquire(ctx, n)
}

// handshake checks that the client knows the secret, and reads its greeting.
func (c *serverConn) handshake(s secret.Secret) (in *bufio.Reader, version uint32, err error) {
	over, err := s.Accept(c.conn, storeMagic)
	if err != nil {
		return nil, 0, err
	}
	// This needs no lock, because no other goroutine uses c yet.
	c.conn = over
	in = bufio.NewReader(c.conn)
	version, err = dial.ReadGreeting(in, storeMagic)
	return in, version, err
}

// handle executes a request and replies. If the request waits, handle returns true. Then it has called count,
// which counts the memory of the request, and the function release that count returns is called when the
// request has ended.
func (c *serverConn) handle(q *request, count func() (release func(), err error)) (waits bool, err error) {
	r := reply{id: q.id}
	switch q.op {
	case opPing:
	case opCancel:
		c.mu.Lock()
		if cancel := c.waits[q.id]; cancel != nil {
			cancel()
		}
		c.mu.Unlock()
		return false, nil
	case opSet:
		err = c.store.set(c.ctx, q.key, q.first)
	case opTryGet:
		r.value, r.ok, err = c.store.tryGet(c.ctx, q.key)
	case opAdd:
		r.number, err = c.store.add(c.ctx, q.key, q.delta)
	case opCompareAndSet:
		r.value, r.ok, err = c.store.compareAndSet(c.ctx, q.key, q.first, q.second)
	case opDelete:
		r.ok, err = c.store.delete(c.ctx, q.key)
	case opAppend:
		err = c.store.append(c.ctx, q.key, q.first)
	case opCheck:
		r.ok, err = c.store.check(c.ctx, q.keys)
	case opNumKeys:
		r.number, err = c.store.numKeys(c.ctx)
	case opMultiSet:
		err = c.store.multiSet(c.ctx, q.keys, q.values)
	case opPush:
		err = c.store.push(c.ctx, q.key, q.first)
	case opTryPop:
		r.value, r.ok, err = c.store.tryPop(c.ctx, q.key)
	case opQueueLen:
		r.number, err = c.store.queueLen(c.ctx, q.key)
	// All other operations may wait, except Get of a key that has a value.
	default:
		if q.op == opGet {
			if r.value, r.ok, err = c.store.tryGet(c.ctx, q.key); r.ok || err != nil {
				break
			}
		}
		release, full := count()
		if full != nil {
			err = full
		} else if waits, err = c.startWait(q, release); waits {
			return true, nil
		}
	}
	if err != nil {
		r.fail(err)
	}
	return false, c.reply(&r)
}

// startWait starts a goroutine that executes a waiting call and replies. If too many calls are waiting, or a
// waiting call has the same number, it starts no goroutine and returns an error, which the caller sends to
// the client. The goroutine calls release at its end.
func (c *serverConn) startWait(q *request, release func()) (started bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.waits) >= maxWaitsPerClient {
		return false, call.Refuse(ErrLimit,
			fmt.Sprintf("the connection has %d waiting calls already, which is the limit", len(c.waits)))
	}
	if c.waits[q.id] != nil {
		return false, fmt.Errorf("a request with number %d is already waiting", q.id)
	}
	ctx, cancel := context.WithCancel(c.ctx)
	c.waits[q.id] = cancel
	c.wg.Go(func() {
		defer release()
		defer cancel()
		r := reply{id: q.id}
		err := c.wait(ctx, q, &r)
		c.mu.Lock()
		delete(c.waits, q.id)
		c.mu.Unlock()
		if ctx.Err() != nil {
			return // the client has cancelled the call and expects no reply
		}
		if err != nil {
			r.fail(err)
		}
		if err := c.reply(&r); err != nil {
			c.end(err)
		}
	})
	return true, nil
}

// wait executes a call that may wait.
func (c *serverConn) wait(ctx context.Context, q *request, r *reply) (err error) {
	switch q.op {
	case opGet:
		r.value, err = c.store.wait(ctx, q.key, nil)
	case opWatch:
		r.value, err = c.store.wait(ctx, q.key, q.first)
	case opWait:
		err = c.store.waitAll(ctx, q.keys, c.store.isThere)
	case opMultiGet:
		if r.values, err = c.store.multiGet(ctx, q.keys); listBytes(r.values) > maxListBytes {
			r.values, err = nil, errTooMuch(listBytes(r.values))
		}
	case opPop:
		r.value, err = c.store.pop(ctx, q.key)
	}
	return err
}

func errTooMuch(numBytes int) error {
	return call.Refuse(ErrLimit, fmt.Sprintf("got %d bytes in one call, want at most %d", numBytes,
		maxListBytes))
}

// reply sends a reply.
func (c *serverConn) reply(r *reply) error {
	release, err := hold(c.ctx, c.answers, int64(len(r.value)+listBytes(r.values)))
	if err != nil {
		return err
	}
	defer release()
	return c.write(r.frame())
}

func (c *serverConn) write(b []byte) error {
	c.writing.Lock()
	defer c.writing.Unlock()
	c.conn.SetWriteDeadline(time.Now().Add(serverIOTimeout))
	_, err := c.conn.Write(b)
	return err
}
