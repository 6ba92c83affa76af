package c10d

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/store"
)

const (
	// maxClients is the maximum number of connections of a server. An old client uses two connections.
	maxClients = 16 << 10
	// writeTimeout is how long the server waits until a client has received an answer. If the client has not
	// received it by then, the server closes the connection.
	writeTimeout = 10 * time.Second
	// readTimeout is how long the server waits for the rest of a request that counts in maxCallsBytes.
	readTimeout = time.Minute
	bufferBytes = 4 << 10
	// maxCallBytes is the maximum size of a request. The server keeps all of it in memory until the last byte
	// has arrived, or while it waits for the keys in it.
	maxCallBytes = 64 << 20
	// maxCallsBytes and maxAnswersBytes limit the memory that the requests and the answers of all clients
	// together take. Requests of at most bufferBytes do not count. Until a longer request has arrived, it
	// counts with the most that it can take.
	maxCallsBytes   = 128 << 20
	maxAnswersBytes = 8 * store.MaxValueBytes
)

// Config configures a Server.
type Config struct {
	// Torch21 makes the server interpret operations 7 and 8 of old clients as PyTorch 2.1 does: as delete_key
	// and append. Otherwise it interprets them as earlier versions do: as watch_key, which it refuses, and
	// delete_key. In both cases, if a connection uses an operation that only 2.1 has, the server interprets
	// all later operations of that connection as 2.1 does.
	Torch21 bool
	// Log is the log of the server. It may be nil.
	Log *zap.Logger
}

// Server serves a HashStore to PyTorch processes. If a client violates the protocol, the server closes its
// connection and logs the reason. It keeps the connection of a silent client open forever, because old
// clients have a second connection on which they never send anything. But the rest of a request of more than
// 4 KiB must arrive within a minute.
//
// The protocol has no secret. So a server refuses processes of other users of its host, except root. Whatever
// its clients do, it takes only a bounded amount of memory, and at most half of the file descriptors of its
// process.
type Server struct {
	store          *store.HashStore
	cfg            Config
	calls, answers *dial.Budget
	accepts        *dial.Acceptor
}

// Serve listens on addr and serves s until Close. addr has the form host:port, where port 0 means any free
// port. The caller stays responsible for closing s.
func Serve(addr string, s *store.HashStore, cfg Config) (*Server, error) {
	return newServer(s, cfg, maxCallsBytes, maxAnswersBytes).listen(addr)
}

func newServer(s *store.HashStore, cfg Config, maxCallsBytes, maxAnswersBytes int64) *Server {
	return &Server{store: s, cfg: cfg, calls: dial.NewBudget("their requests", maxCallsBytes),
		answers: dial.NewBudget("answers", maxAnswersBytes)}
}

func (s *Server) listen(addr string) (*Server, error) {
	most := min(maxClients, dial.Descriptors()/2)
	var err error
	if s.accepts, err = dial.Serve(addr, "c10d: server", most, s.cfg.Log,
		dial.SameUser(store.Secret{}, s.cfg.Log, s.serve)); err != nil {
		return nil, fmt.Errorf("c10d: serve: %w", err)
	}
	return s, nil
}

// Addr returns the address that s listens on.
func (s *Server) Addr() string { return s.accepts.Addr() }

// Close closes all connections and waits until they have ended. The store stays open.
func (s *Server) Close() error { return s.accepts.Close() }

func (s *Server) serve(ctx context.Context, conn net.Conn, slot *dial.Slot) error {
	if !slot.Release() { // the protocol has no proof
		return dial.ErrEvicted
	}
	ctx, cancel := context.WithCancel(ctx)
	c := &session{
		store: s.store, calls: s.calls, answers: s.answers, ctx: ctx, conn: conn, dialect: Old,
		in:  reader{Reader: bufio.NewReaderSize(conn, bufferBytes)},
		out: bufio.NewWriterSize(conn, bufferBytes),
	}
	if s.cfg.Torch21 {
		c.dialect = Torch21
	}
	c.in.hold = c.hold
	err := c.run()
	cancel()
	conn.Close()
	c.waiters.Wait()
	c.calls.Release(c.held)
	return err
}

// session is the server's end of a connection.
type session struct {
	store          *store.HashStore
	calls, answers *dial.Budget
	ctx            context.Context // ends when the connection ends
	conn           net.Conn
	in             reader
	dialect        Dialect
	waiters        sync.WaitGroup

	// call is the memory that the current request takes, and held is how much of it is taken from calls.
	call, held int64

	mu      sync.Mutex
	out     *bufio.Writer
	waiting context.CancelFunc // cancels the pending wait; nil if none is pending
	wait    uint64             // number of the most recent wait, counted from 1
}

// run serves requests until the connection ends, and returns the reason. The reason is io.EOF if the client
// closed the connection between two requests.
func (c *session) run() error {
	if err := c.validate(); err != nil {
		return err
	}
	for {
		if c.in.Buffered() == 0 {
			if err := c.flush(); err != nil {
				return err
			}
		}
		if c.call > bufferBytes {
			c.conn.SetReadDeadline(time.Time{})
		}
		c.calls.Release(c.held)
		c.call, c.held = 0, 0
		number, err := c.in.ReadByte()
		if err != nil {
			return err
		}
		if c.dialect == Old && is21(number) {
			c.dialect = Torch21
		}
		if int(number) >= len(ops[c.dialect]) {
			return fmt.Errorf("unknown operation %d in the protocol of %v", number, c.dialect)
		}
		op := ops[c.dialect][number]
		switch op {
		case opValidate:
			return errors.New("the client sent a second validation")
		case opWatch:
			return errors.New("operation 7 is watch_key, which is not supported; if the client runs PyTorch 2.1, operation 7 is delete_key: set Config.Torch21, or give --torch-2.1 to hvdrun store")
		}
		if err := c.handle(op); err != nil {
			return fmt.Errorf("%v: %w", op, unexpected(err))
		}
	}
}

// validate checks whether the client starts with a validation, which shows that it is modern.
func (c *session) validate() error {
	b, err := c.in.Peek(1)
	if err != nil || b[0] != 0 {
		return err
	}
	// The first byte of a validation is 0. An old client may start with 0 too, because 0 is its number for
	// the operation set. In that case the length of a key comes next, which cannot be as great as magic.
	if b, err = c.in.Peek(5); err != nil {
		return unexpected(err)
	}
	if string(b[1:]) == string(appendU32(nil, magic)) {
		c.dialect = Modern
		_, err = c.in.Discard(len(b))
	}
	return err
}

// handle serves one request. Any error ends the connection, because the protocol cannot report errors.
func (c *session) handle(op opcode) error {
	if op != opCancelWait {
		c.forgetWait()
	}
	switch op {
	case opSet:
		return c.set()
	case opCompareSet:
		return c.compareSet()
	case opGet:
		return c.get()
	case opAdd:
		return c.add()
	case opCheck:
		return c.check()
	case opWait:
		return c.startWait()
	case opCancelWait:
		c.forgetWait()
		return c.write([]byte{waitCanceled})
	case opNumKeys:
		n, err := c.store.NumKeys(c.ctx)
		return c.answerNumber(n, err)
	case opListKeys:
		return c.listKeys()
	case opDelete:
		return c.delete()
	case opAppend:
		key, value, err := c.pair()
		if err != nil {
			return err
		}
		return c.store.Append(c.ctx, key, value)
	case opMultiGet:
		return c.multiGet()
	case opMultiSet:
		return c.multiSet()
	case opPing:
		nonce, err := c.in.u32()
		if err != nil {
			return err
		}
		return c.write(appendU32(nil, nonce))
	case opQueuePush:
		key, value, err := c.pair()
		if err != nil {
			return err
		}
		return c.store.Push(c.ctx, key, value)
	case opQueuePop:
		return c.queuePop()
	case opQueueLen:
		key, err := c.in.key(0)
		if err != nil {
			return err
		}
		n, err := c.store.QueueLen(c.ctx, key)
		return c.answerNumber(n, err)
	}
	return fmt.Errorf("unsupported operation %v", op)
}

// hold counts memory that the current request takes, before its bytes are read. The later parts of the
// request take at most rest bytes.
func (c *session) hold(numBytes, rest int) error {
	c.call += int64(numBytes)
	if c.call > maxCallBytes {
		return fmt.Errorf("got more than %d bytes in one call", maxCallBytes)
	}
	// If connections needed more while they hold some, they could wait for each other.
	most := max(c.call, min(c.call+int64(rest), maxCallBytes, c.calls.Most()))
	if c.call <= max(bufferBytes, c.held) {
		if c.held > most {
			c.calls.Release(c.held - most)
			c.held = most
		}
		return nil
	}
	if err := c.calls.Acquire(c.ctx, most-c.held); err != nil {
		return err
	}
	c.held = most
	return c.conn.SetReadDeadline(time.Now().Add(readTimeout))
}

// pair reads a key and a value. The value is valid until the next read.
func (c *session) pair() (key string, value []byte, err error) {
	if key, err = c.in.key(mostValue); err == nil {
		value, err = c.in.bytes(store.MaxValueBytes, 0)
	}
	return key, value, err
}

func (c *session) set() error {
	key, value, err := c.pair()
	if err != nil {
		return err
	}
	return c.store.Set(c.ctx, key, value)
}

// compareSet serves compare_set. In this protocol an empty value is the same as no value. If the key has no
// value and the expected value is not empty, the answer is the expected value.
func (c *session) compareSet() error {
	key, err := c.in.key(2 * mostValue)
	if err != nil {
		return err
	}
	expected, err := c.in.value(mostValue)
	if err != nil {
		return err
	}
	desired, err := c.in.bytes(store.MaxValueBytes, 0)
	if err != nil {
		return err
	}
	none := expected
	if len(expected) == 0 {
		none = nil
	}
	if err := c.answers.Acquire(c.ctx, store.MaxValueBytes); err != nil {
		return err
	}
	defer c.answers.Release(store.MaxValueBytes)
	actual, swapped, err := c.store.CompareAndSet(c.ctx, key, none, desired)
	if err == nil && !swapped && len(expected) == 0 && len(actual) == 0 {
		actual, _, err = c.store.CompareAndSet(c.ctx, key, []byte{}, desired)
	}
	if err != nil {
		return err
	}
	if actual == nil {
		actual = expected
	}
	return c.writeValue(actual)
}

// get serves get. If the key has no value, the answer is an empty value. Clients wait for the key before they
// send get.
func (c *session) get() error {
	key, err := c.in.key(0)
	if err != nil {
		return err
	}
	return c.writeNow(key)
}

// writeNow writes the current value of a key, or an empty value if the key has no value.
func (c *session) writeNow(key string) error {
	if err := c.answers.Acquire(c.ctx, store.MaxValueBytes); err != nil {
		return err
	}
	defer c.answers.Release(store.MaxValueBytes)
	value, _, err := c.store.TryGet(c.ctx, key)
	if err != nil {
		return err
	}
	return c.writeValue(value)
}

// writeValue writes a value of an answer. The caller has acquired memory for the value from c.answers.
func (c *session) writeValue(value []byte) error {
	if err := c.write(appendU64(nil, uint64(len(value)))); err != nil {
		return err
	}
	return c.write(value)
}

func (c *session) add() error {
	key, err := c.in.key(0)
	if err != nil {
		return err
	}
	delta, err := c.in.u64()
	if err != nil {
		return err
	}
	sum, err := c.store.Add(c.ctx, key, int64(delta))
	return c.answerNumber(sum, err)
}

func (c *session) answerNumber(n int64, err error) error {
	if err != nil {
		return err
	}
	return c.write(appendU64(nil, uint64(n)))
}

func (c *session) check() error {
	keys, err := c.in.keys()
	if err != nil {
		return err
	}
	ok, err := c.store.Check(c.ctx, keys...)
	if err != nil {
		return err
	}
	if ok {
		return c.write([]byte{checkReady})
	}
	return c.write([]byte{checkNotReady})
}

// listKeys serves list_keys. The list counts as an answer, because it keeps keys in memory that the store may
// replace until the client has read it. So the client must receive the whole list within writeTimeout.
func (c *session) listKeys() error {
	keys, held, err := c.snapshotKeys()
	if err != nil {
		return err
	}
	defer c.answers.Release(held)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.setDeadline()
	if _, err := c.out.Write(appendU64(nil, uint64(len(keys)))); err != nil {
		return err
	}
	for _, k := range keys {
		if _, err := c.out.Write(appendBytes(nil, k)); err != nil {
			return err
		}
	}
	return nil
}

// snapshotKeys returns the keys of the store, for which it has acquired held bytes of c.answers.
func (c *session) snapshotKeys() (keys []string, held int64, err error) {
	for {
		numKeys, err := c.store.NumKeys(c.ctx)
		if err != nil {
			return nil, 0, err
		}
		numBytes, err := c.store.KeysBytes(c.ctx)
		if err != nil {
			return nil, 0, err
		}
		held = numBytes + elementBytes*numKeys
		if err := c.answers.Acquire(c.ctx, held); err != nil {
			return nil, 0, err
		}
		keys, err = c.store.Keys(c.ctx)
		need := int64(elementBytes * len(keys))
		for _, k := range keys {
			need += int64(len(k))
		}
		if err == nil && need <= held {
			return keys, held, nil
		}
		c.answers.Release(held) // the list has grown meanwhile
		if err != nil {
			return nil, 0, err
		}
	}
}

func (c *session) delete() error {
	key, err := c.in.key(0)
	if err != nil {
		return err
	}
	existed, err := c.store.Delete(c.ctx, key)
	n := int64(0)
	if existed {
		n = 1
	}
	return c.answerNumber(n, err)
}

func (c *session) multiGet() error {
	keys, err := c.in.keys()
	if err != nil {
		return err
	}
	for _, k := range keys {
		if err := c.writeNow(k); err != nil {
			return err
		}
	}
	return nil
}

func (c *session) multiSet() error {
	n, err := c.in.length()
	if err != nil {
		return err
	}
	var keys []string
	var values [][]byte
	for i := range n {
		rest := (n - 1 - i) * (mostKey + mostValue)
		k, err := c.in.key(rest + mostValue)
		if err != nil {
			return err
		}
		v, err := c.in.value(rest)
		if err != nil {
			return err
		}
		keys, values = append(keys, k), append(values, v)
	}
	return c.store.MultiSet(c.ctx, keys, values)
}

func (c *session) queuePop() error {
	key, err := c.in.key(0)
	if err != nil {
		return err
	}
	n, err := c.store.QueueLen(c.ctx, key)
	if err != nil {
		return err
	}
	if err := c.answers.Acquire(c.ctx, store.MaxValueBytes); err != nil {
		return err
	}
	defer c.answers.Release(store.MaxValueBytes)
	value, ok, err := c.store.TryPop(c.ctx, key)
	if err != nil || !ok {
		return c.answerNumber(0, err)
	}
	if err := c.answerNumber(max(n, 1), nil); err != nil {
		return err
	}
	return c.writeValue(value)
}

// startWait serves wait. If all keys are present, it answers at once. Otherwise it starts a goroutine that
// answers when they are present. Meanwhile the session reads the next request, which may cancel the wait. If
// it is any other request, the client has given up the wait without a cancellation.
func (c *session) startWait() error {
	keys, err := c.in.keys()
	if err != nil {
		return err
	}
	ok, err := c.store.Check(c.ctx, keys...)
	if err != nil {
		return err
	}
	if ok {
		return c.write([]byte{waitStopped})
	}
	ctx, cancel := context.WithCancel(c.ctx)
	c.mu.Lock()
	c.wait++
	this := c.wait
	c.waiting = cancel
	c.mu.Unlock()
	// The rest of what hold has taken belongs to the wait from now on.
	held := min(c.call, c.held)
	c.held -= held
	c.waiters.Go(func() {
		defer c.calls.Release(held)
		defer cancel()
		err := c.store.Wait(ctx, keys...)
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.waiting == nil || c.wait != this {
			return // the client has cancelled the wait
		}
		c.waiting = nil
		if err == nil {
			if err = c.out.WriteByte(waitStopped); err == nil {
				err = c.flushLocked()
			}
		}
		if err != nil {
			c.conn.Close() // the store is closed, or the client does not receive
		}
	})
	return nil
}

// forgetWait cancels the pending wait, if there is one.
func (c *session) forgetWait() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.waiting != nil {
		c.waiting()
		c.waiting = nil
	}
}

func (c *session) write(b []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.out.Available() < len(b) {
		c.setDeadline()
	}
	_, err := c.out.Write(b)
	return err
}

func (c *session) flush() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.flushLocked()
}

// flushLocked sends the buffered answers. The caller holds c.mu.
func (c *session) flushLocked() error {
	if c.out.Buffered() == 0 {
		return nil
	}
	c.setDeadline()
	return c.out.Flush()
}

func (c *session) setDeadline() { c.conn.SetWriteDeadline(time.Now().Add(writeTimeout)) }
