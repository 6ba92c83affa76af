package store

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/store/internal/call"
)

const (
	pingInterval = 5 * time.Second
	// serverSilence is how long a client waits for data from the server before it considers the connection
	// broken. The server answers pings, so a working server is never silent for this long.
	serverSilence = 20 * time.Second
	// clientSilence is how long a server waits for data from a client before it closes the connection. It is
	// longer than serverSilence, because a client process may be paused for a while, for example by a
	// debugger. A half of each is at least two intervals between pings (awaitFrame).
	clientSilence = time.Minute
)

// Client is a Store whose values are in a Server. All calls share one connection. Replies carry the numbers
// of their requests, so that a waiting call does not delay other calls.
//
// If the connection breaks, or the server is silent for 20 s, the Client does not work any more: pending and
// later calls return the reason, and it is unknown whether the server has made a pending change. A single
// stop of this process while it waits for a frame does not end the connection. The Client does not reconnect,
// because a restarted server has lost all values.
type Client struct {
	addr string
	conn net.Conn
	wg   sync.WaitGroup

	requests chan []byte   // frames to send
	cancels  chan struct{} // has an element if cancelled is not empty; capacity 1
	done     chan struct{} // closed when the connection has ended and err is set

	mu        sync.Mutex
	lastID    uint64
	pending   map[uint64]chan<- reply
	cancelled []uint64 // numbers of the requests whose cancellations have not been sent yet
	err       error    // why the connection has ended
}

var _ Store = (*Client)(nil)

// Dial connects to the server at addr, which has the form host:port. If the server cannot be reached, Dial
// retries until ctx ends. Its error then wraps ctx.Err() and the error of the last attempt. After Dial has
// returned, the end of ctx has no effect.
func Dial(ctx context.Context, addr string, cfg Config) (*Client, error) {
	return connect(ctx, addr, cfg, pingInterval, serverSilence)
}

func connect(ctx context.Context, addr string, cfg Config, ping, silence time.Duration) (*Client, error) {
	var conn net.Conn
	http := false
	err := dial.Retry(ctx, func() (err error) {
		conn, err = dial.Greet(ctx, addr, cfg.Secret.Encrypted(), storeMagic, storeVersion)
		// Horovod's rendezvous server sends nothing until it has a request, so with such a server Greet ends
		// with a timeout.
		if err != nil && !errors.Is(err, syscall.ECONNREFUSED) && !errors.Is(ctx.Err(), context.Canceled) &&
			speaksHTTP(addr) {
			http, err = true, errHTTP
		}
		return err
	})
	if http {
		err = errHTTP // replaces the error of ctx, which may have ended too
	}
	if err != nil {
		return nil, fmt.Errorf("store: dial %s: %w", addr, err)
	}
	s := &Client{
		addr: addr, conn: conn,
		requests: make(chan []byte), cancels: make(chan struct{}, 1), done: make(chan struct{}),
		pending: make(map[uint64]chan<- reply),
	}
	s.wg.Go(func() { s.read(silence) })
	s.wg.Go(func() { s.write(ping) })
	return s, nil
}

var errHTTP = errors.New(
	"the server is an HTTP server such as Horovod's rendezvous server, not a store of gohvd: " +
		"start the ranks with hvdrun instead of horovodrun, or set HOROVOD_GLOO_RENDEZVOUS_ADDR and HOROVOD_GLOO_RENDEZVOUS_PORT to the address of a store that hvdrun store serves")

// httpTimeout is the maximum duration of a call of speaksHTTP.
const httpTimeout = 2 * time.Second

// speaksHTTP reports whether the server at addr answers an HTTP request with HTTP.
func speaksHTTP(addr string) bool {
	conn, err := net.DialTimeout("tcp", addr, httpTimeout)
	if err != nil {
		return false
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(httpTimeout)); err != nil {
		return false
	}
	if _, err := io.WriteString(conn, "GET / HTTP/1.0\r\n\r\n"); err != nil {
		return false
	}
	answer := make([]byte, len("HTTP/"))
	_, err = io.ReadFull(conn, answer)
	return err == nil && string(answer) == "HTTP/"
}

// Set implements Store.
func (s *Client) Set(ctx context.Context, key string, value []byte) error {
	_, err := s.call(ctx, request{op: opSet, key: key, first: value})
	return err
}

// Get implements Store.
func (s *Client) Get(ctx context.Context, key string) ([]byte, error) {
	r, err := s.call(ctx, request{op: opGet, key: key})
	return r.value, err
}

// TryGet implements Store.
func (s *Client) TryGet(ctx context.Context, key string) (value []byte, ok bool, err error) {
	r, err := s.call(ctx, request{op: opTryGet, key: key})
	return r.value, r.ok, err
}

// Add implements Store.
func (s *Client) Add(ctx context.Context, key string, delta int64) (int64, error) {
	r, err := s.call(ctx, request{op: opAdd, key: key, delta: delta})
	return r.number, err
}

// CompareAndSet implements Store.
func (s *Client) CompareAndSet(ctx context.Context, key string, expected,
	desired []byte) ([]byte, bool, error) {
	r, err := s.call(ctx, request{op: opCompareAndSet, key: key, first: expected, second: desired})
	return r.value, r.ok, err
}

// Watch implements Store.
func (s *Client) Watch(ctx context.Context, key string, prev []byte) ([]byte, error) {
	r, err := s.call(ctx, request{op: opWatch, key: key, first: prev})
	return r.value, err
}

// Delete implements Store.
func (s *Client) Delete(ctx context.Context, key string) (bool, error) {
	r, err := s.call(ctx, request{op: opDelete, key: key})
	return r.ok, err
}

// Append implements Store.
func (s *Client) Append(ctx context.Context, key string, value []byte) error {
	_, err := s.call(ctx, request{op: opAppend, key: key, first: value})
	return err
}

// Wait implements Store.
func (s *Client) Wait(ctx context.Context, keys ...string) error {
	_, err := s.call(ctx, request{op: opWait, keys: keys})
	return err
}

// Check implements Store.
func (s *Client) Check(ctx context.Context, keys ...string) (bool, error) {
	r, err := s.call(ctx, request{op: opCheck, keys: keys})
	return r.ok, err
}

// NumKeys implements Store.
func (s *Client) NumKeys(ctx context.Context) (int64, error) {
	r, err := s.call(ctx, request{op: opNumKeys})
	return r.number, err
}

// MultiGet implements Store. The values may have at most 32 MiB together.
func (s *Client) MultiGet(ctx context.Context, keys ...string) ([][]byte, error) {
	r, err := s.call(ctx, request{op: opMultiGet, keys: keys})
	if err == nil && len(r.values) != len(keys) {
		err = call.Error("multi-get", first(keys), s.addr, fmt.Errorf("the server sent %d values, want %d",
			len(r.values), len(keys)))
	}
	return r.values, err
}

// MultiSet implements Store. The keys and values may have at most 32 MiB together.
func (s *Client) MultiSet(ctx context.Context, keys []string, values [][]byte) error {
	if err := call.CheckPairs(keys, values); err != nil {
		return call.Error("multi-set", first(keys), s.addr, err)
	}
	_, err := s.call(ctx, request{op: opMultiSet, keys: keys, values: values})
	return err
}

// Push implements Store.
func (s *Client) Push(ctx context.Context, key string, value []byte) error {
	_, err := s.call(ctx, request{op: opPush, key: key, first: value})
	return err
}

// Pop implements Store.
func (s *Client) Pop(ctx context.Context, key string) ([]byte, error) {
	r, err := s.call(ctx, request{op: opPop, key: key})
	return r.value, err
}

// TryPop implements Store.
func (s *Client) TryPop(ctx context.Context, key string) ([]byte, bool, error) {
	r, err := s.call(ctx, request{op: opTryPop, key: key})
	return r.value, r.ok, err
}

// QueueLen implements Store.
func (s *Client) QueueLen(ctx context.Context, key string) (int64, error) {
	r, err := s.call(ctx, request{op: opQueueLen, key: key})
	return r.number, err
}

// Close implements Store. The values stay at the server, and other clients are not affected.
func (s *Client) Close() error {
	s.fail(ErrClosed)
	s.wg.Wait()
	return nil
}

func (s *Client) call(ctx context.Context, q request) (reply, error) {
	r, err := s.roundTrip(ctx, q)
	if err != nil {
		if q.key == "" {
			q.key = first(q.keys)
		}
		return reply{}, call.Error(q.op.String(), q.key, s.addr, err)
	}
	return r, nil
}

func (s *Client) roundTrip(ctx context.Context, q request) (reply, error) {
	// The client checks the lengths first, because the server closes the connection if a frame is too long.
	if err := q.check(); err != nil {
		return reply{}, err
	}
	if err := ctx.Err(); err != nil {
		return reply{}, err
	}
	answer := make(chan reply, 1)
	s.mu.Lock()
	if s.err != nil {
		s.mu.Unlock()
		return reply{}, s.err
	}
	s.lastID++
	q.id = s.lastID
	s.pending[q.id] = answer
	s.mu.Unlock()

	select {
	case s.requests <- q.frame():
	case <-ctx.Done():
		s.forget(q.id, false)
		return reply{}, ctx.Err()
	case <-s.done:
		return reply{}, s.err
	}
	select {
	case r := <-answer:
		return r, r.err()
	case <-ctx.Done():
		s.forget(q.id, true)
		return reply{}, ctx.Err()
	case <-s.done:
		select {
		case r := <-answer: // the answer arrived before the connection ended
			return r, r.err()
		default:
			return reply{}, s.err
		}
	}
}

// forget gives up the call with the number id. If the parameter cancel is set, the goroutine that runs the
// method write sends a cancellation to the server later.
func (s *Client) forget(id uint64, cancel bool) {
	s.mu.Lock()
	delete(s.pending, id)
	if cancel {
		s.cancelled = append(s.cancelled, id)
	}
	s.mu.Unlock()
	if cancel {
		select {
		case s.cancels <- struct{}{}:
		default:
		}
	}
}

// fail closes the connection and makes all calls fail with err. Only the first error counts.
func (s *Client) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil {
		s.err = err
		close(s.done)
		s.conn.Close()
	}
}

func (s *Client) read(silence time.Duration) {
	in := bufio.NewReader(s.conn)
	for {
		err := awaitFrame(s.conn, in, silence)
		var body []byte
		if err == nil {
			body, err = dial.ReadFrame(in, maxReplyBytes)
		}
		if err != nil {
			s.fail(lostServer(err, silence))
			return
		}
		r, err := decodeReply(body)
		if err != nil {
			s.fail(fmt.Errorf("malformed reply from the server: %w", err))
			return
		}
		s.mu.Lock()
		answer := s.pending[r.id]
		delete(s.pending, r.id)
		s.mu.Unlock()
		if answer != nil {
			answer <- r // does not block: the channel has room for the only reply to this request
		}
	}
}

// awaitFrame waits for the next frame. It returns an error if the peer is silent for the time silence. After
// that, the rest of the frame has the same time to arrive.
//
// It waits in two halves, each of which is long enough for a peer that pings or answers pings. A single stop
// of this process while it waits for a frame does not end the connection: only one of them ends early.
func awaitFrame(conn net.Conn, in *bufio.Reader, silence time.Duration) error {
	for half := 0; in.Buffered() == 0; half++ {
		conn.SetReadDeadline(time.Now().Add(silence / 2))
		if _, err := in.Peek(1); err != nil && (half > 0 || !isTimeout(err)) {
			return err
		}
	}
	return conn.SetReadDeadline(time.Now().Add(silence))
}

func isTimeout(err error) bool {
	ne, ok := errors.AsType[net.Error](err)
	return ok && ne.Timeout()
}

func lostServer(err error, silence time.Duration) error {
	if isTimeout(err) {
		return fmt.Errorf("the server sent no data for %v, not even answers to pings: %w", silence, err)
	}
	if errors.Is(err, io.EOF) {
		return fmt.Errorf("the server closed the connection: %w", err)
	}
	return fmt.Errorf("the connection to the server was lost: %w", err)
}

func (s *Client) write(ping time.Duration) {
	tick := time.NewTicker(ping)
	defer tick.Stop()
	for {
		var frames []byte
		select {
		case frames = <-s.requests:
		case <-s.cancels:
			s.mu.Lock()
			ids := s.cancelled
			s.cancelled = nil
			s.mu.Unlock()
			for _, id := range ids {
				frames = append(frames, (&request{op: opCancel, id: id}).frame()...)
			}
		case <-tick.C:
			frames = (&request{op: opPing}).frame()
		case <-s.done:
			return
		}
		s.conn.SetWriteDeadline(time.Now().Add(serverIOTimeout))
		if _, err := s.conn.Write(frames); err != nil {
			s.fail(fmt.Errorf("the connection to the server was lost: %w", err))
			return
		}
	}
}
