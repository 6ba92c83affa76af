package c10d

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/store"
	"github.com/gohvd/gohvd/store/internal/call"
)

// Store is a client of a TCPStore, which PyTorch or a Server serves. A Store and PyTorch's clients see each
// other's keys, because all of them put a slash before each key.
//
// The protocol restricts what a Store can do:
//
//   - CompareAndSet does not distinguish between an empty value and no value. If the current value equals
//     desired, CompareAndSet reports success whatever value was expected. With PyTorch's servers without
//     libuv, CompareAndSet does not wake waiting calls.
//   - Watch polls every 50 ms.
//   - If a server refuses a call, it closes the connection and gives no reason.
//   - PyTorch before 2.1 supports neither Append nor calls with many keys. PyTorch before 2.8 does not
//     support queues.
//
// Each call in progress has its own connection, so that calls do not wait for each other. If ctx ends during
// a call, the Store closes the connection of the call.
type Store struct {
	addr string

	mu      sync.Mutex
	dialect Dialect // dialect of the server
	idle    []*conn
	busy    map[*conn]struct{}
	closed  bool
}

var _ store.Store = (*Store)(nil)

// keyPrefix is the text that all clients of the protocol put before every key.
const keyPrefix = "/"

const (
	// maxIdle bounds the number of open connections that no call uses.
	maxIdle = 4
	// watchPeriod is the time between two polls of Watch.
	watchPeriod = 50 * time.Millisecond
)

// Dial connects to the TCPStore at addr, which has the form host:port and speaks the dialect d. If the server
// cannot be reached or does not answer, Dial retries until ctx ends. Its error then wraps ctx.Err() and the
// error of the last attempt.
//
// If d is Unknown, Dial detects whether the server speaks Modern or Old. A Server of this package speaks
// Modern.
func Dial(ctx context.Context, addr string, d Dialect) (*Store, error) {
	return dialStore(ctx, addr, d, firstTimeout)
}

const (
	// firstTimeout is how long the first attempt of Dial waits for an answer in each dialect. The time
	// doubles with each further attempt, up to maxTimeout.
	firstTimeout = time.Second
	maxTimeout   = 10 * time.Second
)

func dialStore(ctx context.Context, addr string, d Dialect, timeout time.Duration) (*Store, error) {
	s := &Store{addr: addr, busy: make(map[*conn]struct{})}
	dialects := []Dialect{d}
	if d == Unknown {
		dialects = []Dialect{Modern, Old}
	}
	err := dial.Retry(ctx, func() error {
		err := s.probe(ctx, dialects, timeout)
		timeout = min(2*timeout, maxTimeout)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("c10d: dial %s: %w", addr, err)
	}
	return s, nil
}

// probe sets s.dialect to the first of the dialects in which the server answers. Modern must come first,
// because PyTorch's libuv server, the default since 2.4, neither answers a request in an old dialect nor
// closes the connection.
func (s *Store) probe(ctx context.Context, dialects []Dialect, timeout time.Duration) error {
	var failed error
	for _, d := range dialects {
		s.dialect = d
		attempt, cancel := context.WithTimeout(ctx, timeout)
		err := s.probeDialect(attempt)
		cancel()
		if err == nil {
			return nil
		}
		if opErr := (*net.OpError)(nil); ctx.Err() != nil || !dial.MayRecover(err) ||
			errors.As(err, &opErr) && opErr.Op == "dial" {
			return err // an attempt in another dialect would end with the same error
		}
		if errors.Is(err, context.DeadlineExceeded) {
			err = fmt.Errorf("the server did not answer for %v: %w", timeout, err)
		}
		failed = errors.Join(failed, fmt.Errorf("using the protocol of %v: %w", d, err))
	}
	return failed
}

const (
	// probeRequests is the number of requests that probeDialect sends. An old server reads the validation and
	// these requests as the length of a key. This length is so great that the server closes the connection.
	// If there were fewer requests, the server would wait for the rest of the length and would not serve
	// other clients meanwhile.
	probeRequests = 4
	// maxPlausibleKeys is the greatest number of keys that probeDialect accepts as an answer. If the server
	// is of another kind and sends text, the text decodes to a greater number.
	maxPlausibleKeys = 1 << 40
)

// probeDialect sends requests that every TCPStore answers, and checks the answers.
func (s *Store) probeDialect(ctx context.Context) error {
	return s.exchange(ctx, func(x *exchange) error {
		for range probeRequests {
			if err := x.add(opNumKeys, nil); err != nil {
				return err
			}
		}
		in, err := x.send()
		for range probeRequests {
			var n uint64
			if err == nil {
				n, err = in.u64()
			}
			if n > maxPlausibleKeys {
				err = fmt.Errorf("the server answered %q, so it is not a TCPStore", appendU64(nil, n))
			}
		}
		return err
	})
}

// conn is a connection to the server.
type conn struct {
	net.Conn
	in reader
	// first has the bytes that have to be sent before the first request. They are sent in the same write as
	// that request, so that no server receives them without a request.
	first []byte
}

// take returns an idle connection, or a new one.
func (s *Store) take(ctx context.Context) (*conn, error) {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil, store.ErrClosed
	}
	if n := len(s.idle); n > 0 {
		c := s.idle[n-1]
		s.idle = s.idle[:n-1]
		s.busy[c] = struct{}{}
		s.mu.Unlock()
		return c, nil
	}
	d := s.dialect
	s.mu.Unlock()
	nc, err := dial.Connect(ctx, s.addr)
	if err != nil {
		// At the deadline of ctx, the dialer may return a timeout of its own.
		if deadline, ok := ctx.Deadline(); ok && !time.Now().Before(deadline) {
			err = fmt.Errorf("%w: %w", context.DeadlineExceeded, err)
		}
		return nil, err
	}
	c := &conn{Conn: nc, in: reader{Reader: bufio.NewReader(nc)}}
	if d == Modern {
		c.first = appendU32([]byte{byte(opValidate)}, magic)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		c.Close()
		return nil, store.ErrClosed
	}
	s.busy[c] = struct{}{}
	return c, nil
}

// release ends a call's use of a connection. If good is set and fewer than maxIdle connections are idle, the
// connection is kept for another call. Otherwise it is closed.
func (s *Store) release(c *conn, good bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.busy, c)
	if good && !s.closed && len(s.idle) < maxIdle {
		s.idle = append(s.idle, c)
		return
	}
	c.Close()
}

// number returns the number of op in the server's dialect.
func (s *Store) number(op opcode) (byte, error) {
	s.mu.Lock()
	d := s.dialect
	s.mu.Unlock()
	if i := slices.Index(ops[d], op); i >= 0 {
		return byte(i), nil
	}
	return 0, fmt.Errorf("%w: the server's PyTorch is too old for %v", store.ErrUnsupported, op)
}

// exchange is the use of a connection by one call.
type exchange struct {
	store *Store
	*conn
	out []byte // requests that have been added but not sent
}

// add adds a request to x.out.
func (x *exchange) add(op opcode, args []byte) error {
	n, err := x.store.number(op)
	x.out = append(append(x.out, n), args...)
	return err
}

// send sends the requests in x.out, and returns a reader for their answers.
func (x *exchange) send() (*reader, error) {
	_, err := x.Write(x.out)
	x.out = x.out[:0]
	return &x.in, err
}

// ask adds a request and sends x.out.
func (x *exchange) ask(op opcode, args []byte) (*reader, error) {
	if err := x.add(op, args); err != nil {
		return nil, err
	}
	return x.send()
}

// wait waits until all keys are present.
func (x *exchange) wait(keys []string) error {
	in, err := x.ask(opWait, appendKeys(nil, withPrefix(keys)))
	if err != nil {
		return err
	}
	b, err := in.ReadByte()
	if err == nil && b != waitStopped {
		err = fmt.Errorf("the server answered the WAIT request with byte %d, want %d", b, waitStopped)
	}
	return err
}

// whileThere waits until all keys are present, and then calls the function read. If read reports an empty
// value, a key may have been deleted after the wait. So whileThere then checks the keys again, and accepts an
// empty value only if all keys are present and read has reported an empty value twice in a row.
func (x *exchange) whileThere(keys []string, read func() (empty bool, err error)) error {
	for empties := 0; ; {
		if err := x.wait(keys); err != nil {
			return err
		}
		empty, err := read()
		if err != nil || !empty {
			return err
		}
		there, err := x.check(keys)
		if err != nil {
			return err
		}
		if empties++; !there {
			empties = 0
		}
		if empties == 2 {
			return nil
		}
	}
}

// check reports whether all keys are present.
func (x *exchange) check(keys []string) (bool, error) {
	in, err := x.ask(opCheck, appendKeys(nil, withPrefix(keys)))
	if err != nil {
		return false, err
	}
	b, err := in.ReadByte()
	if err == nil && b != checkReady && b != checkNotReady {
		err = fmt.Errorf("the server answered the CHECK request with byte %d, want %d or %d", b, checkReady,
			checkNotReady)
	}
	return b == checkReady, err
}

// exchange takes a connection and calls f with it. If ctx ends, reads and writes of f fail.
func (s *Store) exchange(ctx context.Context, f func(x *exchange) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	c, err := s.take(ctx)
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { c.SetDeadline(time.Unix(1, 0)) })
	x := &exchange{store: s, conn: c, out: c.first}
	c.first = nil
	err = f(x)
	s.release(c, stop() && err == nil)
	if err == nil {
		return nil
	}
	s.mu.Lock()
	closed := s.closed
	s.mu.Unlock()
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case closed:
		return store.ErrClosed
	}
	return err
}

func (s *Store) failed(op, key string, err error) error {
	if err == nil {
		return nil
	}
	return call.Error(op, key, s.addr, err)
}

// Set implements store.Store. The server does not answer a set request, so Set sends another request after it
// and waits for the answer to that one.
func (s *Store) Set(ctx context.Context, key string, value []byte) error {
	err := errors.Join(call.CheckKey(keyPrefix+key), noKey(key), call.CheckValue(value))
	if err == nil {
		err = s.setAndConfirm(ctx, opSet, appendBytes(appendBytes(nil, keyPrefix+key), value))
	}
	return s.failed("set", key, err)
}

// setAndConfirm sends a request that the server does not answer, and then another request. The answer to the
// second request shows that the server has handled the first.
func (s *Store) setAndConfirm(ctx context.Context, op opcode, args []byte) error {
	return s.exchange(ctx, func(x *exchange) error {
		if err := x.add(op, args); err != nil {
			return err
		}
		in, err := x.ask(opNumKeys, nil)
		if err == nil {
			_, err = in.u64()
		}
		return err
	})
}

// noKey returns an error if key is empty. The check is needed because, with the slash before it, an empty key
// would be valid at the server.
func noKey(key string) error {
	if key == "" {
		return call.CheckKey(key)
	}
	return nil
}

// Get implements store.Store.
func (s *Store) Get(ctx context.Context, key string) (value []byte, err error) {
	if err = errors.Join(noKey(key), call.CheckKey(keyPrefix+key)); err == nil {
		value, err = s.get(ctx, key)
	}
	return value, s.failed("get", key, err)
}

func (s *Store) get(ctx context.Context, key string) (value []byte, err error) {
	err = s.exchange(ctx, func(x *exchange) error {
		return x.whileThere([]string{key}, func() (empty bool, err error) {
			in, err := x.ask(opGet, appendBytes(nil, keyPrefix+key))
			if err == nil {
				value, err = in.value(0)
			}
			return len(value) == 0, err
		})
	})
	if err != nil {
		return nil, err
	}
	return value, nil
}

// TryGet implements store.Store. If key has a queue and no value, it returns an empty value.
func (s *Store) TryGet(ctx context.Context, key string) (value []byte, ok bool, err error) {
	if err = errors.Join(noKey(key), call.CheckKey(keyPrefix+key)); err == nil {
		err = s.exchange(ctx, func(x *exchange) (err error) {
			value, ok, err = x.tryGet(key)
			return err
		})
	}
	return value, ok && err == nil, s.failed("try-get", key, err)
}

// tryGet returns the value of key. An old server closes the connection if it is asked for a missing key, so
// tryGet checks first whether key is present. A newer one sends an empty value. So tryGet accepts an empty
// value only if key is present and tryGet has got an empty value twice in a row.
func (x *exchange) tryGet(key string) (value []byte, ok bool, err error) {
	for empties := 0; ; empties++ {
		if ok, err = x.check([]string{key}); err != nil || !ok || empties == 2 {
			return value, ok, err
		}
		in, err := x.ask(opGet, appendBytes(nil, keyPrefix+key))
		if err == nil {
			value, err = in.value(0)
		}
		if err != nil || len(value) > 0 {
			return value, true, err
		}
	}
}

func withPrefix(keys []string) []string {
	full := make([]string, len(keys))
	for i, k := range keys {
		full[i] = keyPrefix + k
	}
	return full
}

// Wait implements store.Store.
func (s *Store) Wait(ctx context.Context, keys ...string) error {
	err := call.CheckKeys(keys)
	if err == nil {
		err = s.exchange(ctx, func(x *exchange) error { return x.wait(keys) })
	}
	return s.failed("wait", fmt.Sprint(keys), err)
}

// Watch implements store.Store.
func (s *Store) Watch(ctx context.Context, key string, prev []byte) ([]byte, error) {
	if err := noKey(key); err != nil {
		return nil, s.failed("watch", key, err)
	}
	for {
		value, err := s.get(ctx, key)
		if err != nil {
			return nil, s.failed("watch", key, err)
		}
		if prev == nil || !bytes.Equal(value, prev) {
			return value, nil
		}
		dial.Pause(ctx, watchPeriod, nil)
	}
}

// Add implements store.Store.
func (s *Store) Add(ctx context.Context, key string, delta int64) (sum int64, err error) {
	if err = noKey(key); err == nil {
		sum, err = s.ask(ctx, opAdd, appendU64(appendBytes(nil, keyPrefix+key), uint64(delta)))
	}
	return sum, s.failed("add", key, err)
}

// ask sends a request whose answer is a number.
func (s *Store) ask(ctx context.Context, op opcode, args []byte) (n int64, err error) {
	err = s.exchange(ctx, func(x *exchange) error {
		in, err := x.ask(op, args)
		if err == nil {
			var v uint64
			v, err = in.u64()
			n = int64(v)
		}
		return err
	})
	return n, err
}

// CompareAndSet implements store.Store.
func (s *Store) CompareAndSet(ctx context.Context, key string, expected,
	desired []byte) (actual []byte, swapped bool, err error) {
	err = errors.Join(noKey(key), call.CheckValue(expected), call.CheckValue(desired))
	if err == nil {
		args := appendBytes(appendBytes(appendBytes(nil, keyPrefix+key), expected), desired)
		err = s.exchange(ctx, func(x *exchange) error {
			in, err := x.ask(opCompareSet, args)
			if err == nil {
				actual, err = in.value(0)
			}
			return err
		})
	}
	if err != nil {
		return nil, false, s.failed("compare-and-set", key, err)
	}
	swapped = bytes.Equal(actual, desired)
	if !swapped && bytes.Equal(actual, expected) {
		// The answer is the value in expected and not the one in desired. The server sends this answer if the
		// key has no value.
		actual = nil
	}
	return actual, swapped, nil
}

// Append implements store.Store.
func (s *Store) Append(ctx context.Context, key string, value []byte) error {
	err := errors.Join(noKey(key), call.CheckValue(value))
	if err == nil {
		err = s.setAndConfirm(ctx, opAppend, appendBytes(appendBytes(nil, keyPrefix+key), value))
	}
	return s.failed("append", key, err)
}

// Delete implements store.Store.
func (s *Store) Delete(ctx context.Context, key string) (bool, error) {
	err := noKey(key)
	var n int64
	if err == nil {
		n, err = s.ask(ctx, opDelete, appendBytes(nil, keyPrefix+key))
	}
	return n > 0, s.failed("delete", key, err)
}

// Check implements store.Store.
func (s *Store) Check(ctx context.Context, keys ...string) (ok bool, err error) {
	if err = call.CheckKeys(keys); err == nil {
		err = s.exchange(ctx, func(x *exchange) error {
			ok, err = x.check(keys)
			return err
		})
	}
	return ok && err == nil, s.failed("check", fmt.Sprint(keys), err)
}

// WorkersKey is the key in which a TCPStore with a world size counts its workers.
const WorkersKey = "init/"

// CountWorker counts this process as one of the workers for which a TCPStore with a world size waits. It
// returns the number of workers counted so far. Each worker must call it once; PyTorch's clients count
// themselves in their constructor.
func (s *Store) CountWorker(ctx context.Context) (int64, error) {
	n, err := s.ask(ctx, opAdd, appendU64(appendBytes(nil, WorkersKey), 1))
	return n, s.failed("count a worker", WorkersKey, err)
}

// NumKeys implements store.Store. The server also counts keys of its own.
func (s *Store) NumKeys(ctx context.Context) (int64, error) {
	n, err := s.ask(ctx, opNumKeys, nil)
	return n, s.failed("number of keys", "", err)
}

// MultiGet implements store.Store.
func (s *Store) MultiGet(ctx context.Context, keys ...string) (values [][]byte, err error) {
	if err = call.CheckKeys(keys); err == nil {
		err = s.exchange(ctx, func(x *exchange) error {
			return x.whileThere(keys, func() (empty bool, err error) {
				values = values[:0]
				in, err := x.ask(opMultiGet, appendKeys(nil, withPrefix(keys)))
				for range keys {
					if err != nil {
						return false, err
					}
					var v []byte
					v, err = in.value(0)
					values, empty = append(values, v), empty || len(v) == 0
				}
				return empty, err
			})
		})
	}
	if err != nil {
		return nil, s.failed("multi-get", fmt.Sprint(keys), err)
	}
	return values, nil
}

// MultiSet implements store.Store.
func (s *Store) MultiSet(ctx context.Context, keys []string, values [][]byte) error {
	err := call.CheckPairs(keys, values)
	if err == nil {
		args := appendU64(nil, uint64(len(keys)))
		for i, k := range keys {
			args = appendBytes(appendBytes(args, keyPrefix+k), values[i])
		}
		err = s.setAndConfirm(ctx, opMultiSet, args)
	}
	return s.failed("multi-set", fmt.Sprint(keys), err)
}

// Push implements store.Store.
func (s *Store) Push(ctx context.Context, key string, value []byte) error {
	err := errors.Join(noKey(key), call.CheckValue(value))
	if err == nil {
		err = s.setAndConfirm(ctx, opQueuePush, appendBytes(appendBytes(nil, keyPrefix+key), value))
	}
	return s.failed("push", key, err)
}

// Pop implements store.Store.
func (s *Store) Pop(ctx context.Context, key string) ([]byte, error) {
	if _, err := s.number(opQueuePop); err != nil {
		return nil, s.failed("pop", key, err)
	}
	for {
		if err := s.Wait(ctx, key); err != nil {
			return nil, err
		}
		if value, ok, err := s.TryPop(ctx, key); ok || err != nil {
			return value, err
		}
		// The wait has ended, but the queue is empty: another client has popped the value first, or the key
		// has a value and no queue.
		dial.Pause(ctx, watchPeriod, nil)
	}
}

// TryPop implements store.Store.
func (s *Store) TryPop(ctx context.Context, key string) (value []byte, ok bool, err error) {
	if err = noKey(key); err == nil {
		err = s.exchange(ctx, func(x *exchange) error {
			in, err := x.ask(opQueuePop, appendBytes(nil, keyPrefix+key))
			if err != nil {
				return err
			}
			n, err := in.u64()
			if ok = n > 0; err != nil || !ok {
				return err
			}
			value, err = in.value(0)
			return err
		})
	}
	return value, ok && err == nil, s.failed("try-pop", key, err)
}

// QueueLen implements store.Store.
func (s *Store) QueueLen(ctx context.Context, key string) (n int64, err error) {
	if err = noKey(key); err == nil {
		n, err = s.ask(ctx, opQueueLen, appendBytes(nil, keyPrefix+key))
	}
	return n, s.failed("queue length", key, err)
}

// Close implements store.Store.
func (s *Store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for _, c := range s.idle {
		c.Close()
	}
	s.idle = nil
	for c := range s.busy {
		c.Close()
	}
	return nil
}
