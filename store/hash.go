package store

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"

	"github.com/gohvd/gohvd/store/internal/call"
)

// Limits has the limits of a HashStore. A field that is 0 means the default.
type Limits struct {
	Keys  int   // number of keys, default 1<<20
	Bytes int64 // total length of keys and values, also of those in queues, default 256 MiB
}

// HashStore is a Store in the memory of this process. It starts no goroutine and reads no clock, so it works
// inside testing/synctest.
type HashStore struct {
	limits Limits
	closed chan struct{}

	mu sync.Mutex
	// A value in the map is replaced and never modified in place, because waiting calls share it.
	values map[string][]byte
	queues map[string]*queue // a queue is removed when it becomes empty
	bytes  int64
	waits  map[string]*wait
	isDone bool // whether the channel closed has been closed
}

var _ Store = (*HashStore)(nil)

// wait is shared by all calls that wait for the next change of the same key.
type wait struct {
	changed chan struct{}
	n       int // number of waiting calls
}

// queue is the queue of a key. Its values are never modified in place.
type queue struct {
	values [][]byte
	popped int // number of values at the front that have been popped
}

func (q *queue) len() int { return len(q.values) - q.popped }

// queued returns how many bytes a value in a queue counts against Limits.Bytes. Even an empty value counts
// some bytes, because the queue needs memory for its slice, and keeps room for more of them.
func queued(value []byte) int64 { return int64(len(value)) + 64 }

// pop removes the first value of the queue and returns it. When more than half of q.values has been popped,
// pop moves the rest to the front, so that the memory is reused.
func (q *queue) pop() []byte {
	v := q.values[q.popped]
	q.values[q.popped] = nil
	if q.popped++; 2*q.popped > len(q.values) {
		q.values = append(q.values[:0], q.values[q.popped:]...)
		q.popped = 0
	}
	return v
}

// NewHashStore returns an empty store.
func NewHashStore(l Limits) *HashStore {
	if l.Keys == 0 {
		l.Keys = 1 << 20
	}
	if l.Bytes == 0 {
		l.Bytes = 256 << 20
	}
	return &HashStore{
		limits: l,
		closed: make(chan struct{}),
		values: make(map[string][]byte),
		queues: make(map[string]*queue),
		waits:  make(map[string]*wait),
	}
}

// Set implements Store.
func (s *HashStore) Set(ctx context.Context, key string, value []byte) error {
	return failed("set", key, s.set(ctx, key, value))
}

// Get implements Store.
func (s *HashStore) Get(ctx context.Context, key string) ([]byte, error) {
	value, err := s.wait(ctx, key, nil)
	return clone(value), failed("get", key, err)
}

// TryGet implements Store.
func (s *HashStore) TryGet(ctx context.Context, key string) (value []byte, ok bool, err error) {
	value, ok, err = s.tryGet(ctx, key)
	return clone(value), ok, failed("try-get", key, err)
}

// Watch implements Store.
func (s *HashStore) Watch(ctx context.Context, key string, prev []byte) ([]byte, error) {
	value, err := s.wait(ctx, key, prev)
	return clone(value), failed("watch", key, err)
}

// Add implements Store.
func (s *HashStore) Add(ctx context.Context, key string, delta int64) (int64, error) {
	sum, err := s.add(ctx, key, delta)
	return sum, failed("add", key, err)
}

// CompareAndSet implements Store.
func (s *HashStore) CompareAndSet(ctx context.Context, key string, expected,
	desired []byte) ([]byte, bool, error) {
	actual, swapped, err := s.compareAndSet(ctx, key, expected, desired)
	return clone(actual), swapped, failed("compare-and-set", key, err)
}

// Append implements Store.
func (s *HashStore) Append(ctx context.Context, key string, value []byte) error {
	return failed("append", key, s.append(ctx, key, value))
}

// Delete implements Store.
func (s *HashStore) Delete(ctx context.Context, key string) (bool, error) {
	existed, err := s.delete(ctx, key)
	return existed, failed("delete", key, err)
}

// Wait implements Store.
func (s *HashStore) Wait(ctx context.Context, keys ...string) error {
	return failed("wait", first(keys), s.waitAll(ctx, keys, s.isThere))
}

// Check implements Store.
func (s *HashStore) Check(ctx context.Context, keys ...string) (bool, error) {
	ok, err := s.check(ctx, keys)
	return ok, failed("check", first(keys), err)
}

// NumKeys implements Store.
func (s *HashStore) NumKeys(ctx context.Context) (int64, error) {
	n, err := s.numKeys(ctx)
	return n, failed("number of keys", "", err)
}

// Keys returns the keys that have a value, in ascending order.
func (s *HashStore) Keys(ctx context.Context) ([]string, error) {
	if err := s.begin(ctx); err != nil {
		return nil, failed("list of keys", "", err)
	}
	keys := slices.AppendSeq(make([]string, 0, len(s.values)), maps.Keys(s.values))
	s.mu.Unlock()
	slices.Sort(keys)
	return keys, nil
}

// KeysBytes returns the total length of the keys that have a value.
func (s *HashStore) KeysBytes(ctx context.Context) (n int64, err error) {
	if err := s.begin(ctx); err != nil {
		return 0, failed("length of keys", "", err)
	}
	defer s.mu.Unlock()
	for k := range s.values {
		n += int64(len(k))
	}
	return n, nil
}

// MultiGet implements Store.
func (s *HashStore) MultiGet(ctx context.Context, keys ...string) ([][]byte, error) {
	values, err := s.multiGet(ctx, keys)
	for i, v := range values {
		values[i] = clone(v)
	}
	return values, failed("multi-get", first(keys), err)
}

// MultiSet implements Store.
func (s *HashStore) MultiSet(ctx context.Context, keys []string, values [][]byte) error {
	return failed("multi-set", first(keys), s.multiSet(ctx, keys, values))
}

// Push implements Store.
func (s *HashStore) Push(ctx context.Context, key string, value []byte) error {
	return failed("push", key, s.push(ctx, key, value))
}

// Pop implements Store.
func (s *HashStore) Pop(ctx context.Context, key string) ([]byte, error) {
	value, err := s.pop(ctx, key)
	return clone(value), failed("pop", key, err)
}

// TryPop implements Store.
func (s *HashStore) TryPop(ctx context.Context, key string) ([]byte, bool, error) {
	value, ok, err := s.tryPop(ctx, key)
	return clone(value), ok, failed("try-pop", key, err)
}

// QueueLen implements Store.
func (s *HashStore) QueueLen(ctx context.Context, key string) (int64, error) {
	n, err := s.queueLen(ctx, key)
	return n, failed("queue length", key, err)
}

// Close implements Store. It drops all values and queues.
func (s *HashStore) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.isDone {
		s.isDone = true
		close(s.closed)
		s.values, s.queues, s.bytes = nil, nil, 0
	}
	return nil
}

// Waits returns the number of keys for which calls are waiting.
func (s *HashStore) Waits() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.waits)
}

// failed adds the name of the operation and the key to err. If err is nil, it returns nil.
func failed(op, key string, err error) error {
	if err == nil {
		return nil
	}
	return call.Error(op, key, "", err)
}

// The methods below return values that are shared with the store. Callers must not modify them.

func (s *HashStore) set(ctx context.Context, key string, value []byte) error {
	if err := s.lock(ctx, key); err != nil {
		return err
	}
	defer s.mu.Unlock()
	return s.put(key, value)
}

func (s *HashStore) wait(ctx context.Context, key string, prev []byte) ([]byte, error) {
	for {
		if err := s.lock(ctx, key); err != nil {
			return nil, err
		}
		if value, ok := s.values[key]; ok && (prev == nil || !bytes.Equal(value, prev)) {
			s.mu.Unlock()
			return value, nil
		}
		s.sleep(ctx, key)
	}
}

func (s *HashStore) tryGet(ctx context.Context, key string) (value []byte, ok bool, err error) {
	if err := s.lock(ctx, key); err != nil {
		return nil, false, err
	}
	defer s.mu.Unlock()
	value, ok = s.values[key]
	return value, ok, nil
}

// sleep waits until the value or the queue of key changes, s is closed, or ctx ends. The caller must hold
// s.mu. sleep unlocks s.mu and does not lock it again.
func (s *HashStore) sleep(ctx context.Context, key string) {
	w := s.waits[key]
	if w == nil {
		w = &wait{changed: make(chan struct{})}
		s.waits[key] = w
	}
	w.n++
	s.mu.Unlock()
	select {
	case <-w.changed:
	case <-s.closed:
	case <-ctx.Done():
		s.mu.Lock()
		if w.n--; w.n == 0 && s.waits[key] == w {
			delete(s.waits, key)
		}
		s.mu.Unlock()
	}
}

// wake wakes the calls that wait for key. The caller holds s.mu.
func (s *HashStore) wake(key string) {
	if w := s.waits[key]; w != nil {
		delete(s.waits, key)
		close(w.changed)
	}
}

// isThere reports whether key has a value or a queue. The caller holds s.mu.
func (s *HashStore) isThere(key string) bool { return s.hasValue(key) || s.queues[key] != nil }

// hasValue reports whether key has a value. The caller holds s.mu.
func (s *HashStore) hasValue(key string) bool {
	_, ok := s.values[key]
	return ok
}

// waitAll waits until the function there returns true for all keys at the same time.
func (s *HashStore) waitAll(ctx context.Context, keys []string, there func(key string) bool) error {
	if err := s.lockAll(ctx, keys, there); err != nil {
		return err
	}
	s.mu.Unlock()
	return nil
}

// lockAll waits until the function there returns true for all keys at the same time, and returns with s.mu
// held. If it returns an error, s.mu is not held.
func (s *HashStore) lockAll(ctx context.Context, keys []string, there func(key string) bool) error {
	if err := call.CheckKeys(keys); err != nil {
		return err
	}
	for {
		if err := s.begin(ctx); err != nil {
			return err
		}
		missing := -1
		for i, k := range keys {
			if !there(k) {
				missing = i
				break
			}
		}
		if missing < 0 {
			return nil
		}
		s.sleep(ctx, keys[missing])
	}
}

func (s *HashStore) check(ctx context.Context, keys []string) (bool, error) {
	if err := call.CheckKeys(keys); err != nil {
		return false, err
	}
	if err := s.begin(ctx); err != nil {
		return false, err
	}
	defer s.mu.Unlock()
	for _, k := range keys {
		if !s.isThere(k) {
			return false, nil
		}
	}
	return true, nil
}

func (s *HashStore) numKeys(ctx context.Context) (int64, error) {
	if err := s.begin(ctx); err != nil {
		return 0, err
	}
	defer s.mu.Unlock()
	return int64(len(s.values)), nil
}

func (s *HashStore) multiGet(ctx context.Context, keys []string) ([][]byte, error) {
	if err := s.lockAll(ctx, keys, s.hasValue); err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	values := make([][]byte, len(keys))
	for i, k := range keys {
		values[i] = s.values[k]
	}
	return values, nil
}

func (s *HashStore) multiSet(ctx context.Context, keys []string, values [][]byte) error {
	if err := call.CheckPairs(keys, values); err != nil {
		return err
	}
	if err := s.begin(ctx); err != nil {
		return err
	}
	defer s.mu.Unlock()
	// The store accepts either all values or none, so the limits are checked for all values before the first
	// is set.
	var numKeys int
	var numBytes int64
	for i, k := range keys {
		old, ok := s.values[k]
		if !ok {
			numKeys++
			numBytes += int64(len(k))
		}
		numBytes += max(int64(len(values[i])-len(old)), 0)
	}
	if err := s.room(numKeys, numBytes); err != nil {
		return err
	}
	for i, k := range keys {
		if err := s.put(k, values[i]); err != nil {
			return err
		}
	}
	return nil
}

func (s *HashStore) add(ctx context.Context, key string, delta int64) (int64, error) {
	if err := s.lock(ctx, key); err != nil {
		return 0, err
	}
	defer s.mu.Unlock()
	sum, err := sumOf(s.values[key], s.hasValue(key), delta)
	if err != nil {
		return 0, err
	}
	return sum, s.put(key, strconv.AppendInt(nil, sum, 10))
}

// sumOf returns the sum that Add stores. The parameter there is set if the key has a value. In that case the
// sum is value plus delta, otherwise it is delta. sumOf returns an error if value is not a decimal number or
// the sum overflows.
func sumOf(value []byte, there bool, delta int64) (int64, error) {
	var old int64
	if there {
		var err error
		if old, err = strconv.ParseInt(string(value), 10, 64); err != nil {
			return 0, call.Refuse(ErrNotNumber, fmt.Sprintf("got %.32q", value))
		}
	}
	sum := old + delta
	if (sum > old) != (delta > 0) && delta != 0 {
		return 0, call.Refuse(ErrNotNumber, fmt.Sprintf("%d + %d overflows 64 bits", old, delta))
	}
	return sum, nil
}

func (s *HashStore) compareAndSet(ctx context.Context, key string, expected,
	desired []byte) ([]byte, bool, error) {
	if err := s.lock(ctx, key); err != nil {
		return nil, false, err
	}
	defer s.mu.Unlock()
	actual, ok := s.values[key]
	if ok != (expected != nil) || !bytes.Equal(actual, expected) {
		return actual, false, nil
	}
	if err := s.put(key, desired); err != nil {
		return nil, false, err
	}
	return s.values[key], true, nil
}

func (s *HashStore) append(ctx context.Context, key string, value []byte) error {
	if err := s.lock(ctx, key); err != nil {
		return err
	}
	defer s.mu.Unlock()
	// append makes a new slice, because calls that have read the old value share the old slice.
	return s.put(key, append(clone(s.values[key]), value...))
}

func (s *HashStore) delete(ctx context.Context, key string) (bool, error) {
	if err := s.lock(ctx, key); err != nil {
		return false, err
	}
	defer s.mu.Unlock()
	value, ok := s.values[key]
	if ok {
		delete(s.values, key)
		s.bytes -= int64(len(key) + len(value))
	}
	return ok, nil
}

func (s *HashStore) push(ctx context.Context, key string, value []byte) error {
	if err := call.CheckValue(value); err != nil {
		return err
	}
	if err := s.lock(ctx, key); err != nil {
		return err
	}
	defer s.mu.Unlock()
	q := s.queues[key]
	grow, keys := queued(value), 0
	if q == nil {
		q = new(queue)
		grow += int64(len(key))
		keys = 1
	}
	if err := s.room(keys, grow); err != nil {
		return err
	}
	s.queues[key] = q
	q.values = append(q.values, append([]byte{}, value...))
	s.bytes += grow
	s.wake(key)
	return nil
}

func (s *HashStore) pop(ctx context.Context, key string) ([]byte, error) {
	for {
		if err := s.lock(ctx, key); err != nil {
			return nil, err
		}
		if value, ok := s.take(key); ok {
			s.mu.Unlock()
			return value, nil
		}
		s.sleep(ctx, key)
	}
}

func (s *HashStore) tryPop(ctx context.Context, key string) ([]byte, bool, error) {
	if err := s.lock(ctx, key); err != nil {
		return nil, false, err
	}
	defer s.mu.Unlock()
	value, ok := s.take(key)
	return value, ok, nil
}

// take removes and returns the first value of the queue of key. The caller holds s.mu.
func (s *HashStore) take(key string) ([]byte, bool) {
	q := s.queues[key]
	if q == nil {
		return nil, false
	}
	value := q.pop()
	s.bytes -= queued(value)
	if q.len() == 0 {
		delete(s.queues, key)
		s.bytes -= int64(len(key))
	}
	return value, true
}

func (s *HashStore) queueLen(ctx context.Context, key string) (int64, error) {
	if err := s.lock(ctx, key); err != nil {
		return 0, err
	}
	defer s.mu.Unlock()
	if q := s.queues[key]; q != nil {
		return int64(q.len()), nil
	}
	return 0, nil
}

// lock locks s.mu for a call on key. It returns an error if key is invalid, ctx has ended or s is closed.
func (s *HashStore) lock(ctx context.Context, key string) error {
	if err := call.CheckKey(key); err != nil {
		return err
	}
	return s.begin(ctx)
}

// begin locks s.mu. It returns an error if ctx has ended or s is closed.
func (s *HashStore) begin(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	s.mu.Lock()
	if s.isDone {
		s.mu.Unlock()
		return ErrClosed
	}
	return nil
}

// put sets the value of key to a copy of value, and wakes the calls that wait for key. The caller holds s.mu.
func (s *HashStore) put(key string, value []byte) error {
	if err := call.CheckValue(value); err != nil {
		return err
	}
	old, ok := s.values[key]
	grow, keys := int64(len(value)-len(old)), 0
	if !ok {
		grow += int64(len(key))
		keys = 1
	}
	if err := s.room(keys, grow); err != nil {
		return err
	}
	s.bytes += grow
	s.values[key] = append([]byte{}, value...)
	s.wake(key)
	return nil
}

// room returns an error if the limits do not allow this number of additional keys and bytes. The caller holds
// s.mu.
func (s *HashStore) room(keys int, bytes int64) error {
	if keys > 0 && len(s.values)+len(s.queues)+keys > s.limits.Keys {
		return call.Refuse(ErrLimit, fmt.Sprintf("the store has %d keys, and at most %d are allowed",
			len(s.values)+len(s.queues), s.limits.Keys))
	}
	if bytes > 0 && s.bytes+bytes > s.limits.Bytes {
		return call.Refuse(ErrLimit,
			fmt.Sprintf("the store has %d of at most %d bytes, and this call needs %d more",
				s.bytes, s.limits.Bytes, bytes))
	}
	return nil
}

// clone returns a copy of value. Unlike bytes.Clone, it never returns nil for an empty value that is not nil.
func clone(value []byte) []byte {
	if value == nil {
		return nil
	}
	return append([]byte{}, value...)
}
