package rendezvous

import (
	"bytes"
	"context"
	"fmt"
	"strconv"
	"sync"
)

// Limits bounds the contents of a HashStore. Zero fields have the default.
type Limits struct {
	Keys  int   // number of keys, default 1<<20
	Bytes int64 // sum of the lengths of keys and values, default 256 MiB
}

// HashStore is a Store in the memory of this process. It starts no goroutine and reads no clock, so it works
// inside testing/synctest.
type HashStore struct {
	limits Limits
	closed chan struct{}

	mu     sync.Mutex
	values map[string][]byte // a value is never changed in place: waiters share it
	bytes  int64
	waits  map[string]*wait
	isDone bool // closed is closed
}

var _ Store = (*HashStore)(nil)

// wait is the next change of one key.
type wait struct {
	changed chan struct{}
	n       int // calls waiting
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
		waits:  make(map[string]*wait),
	}
}

// Set implements Store.
func (s *HashStore) Set(ctx context.Context, key string, value []byte) error {
	err := s.set(ctx, key, value)
	if err != nil {
		return storeError("set", key, "", err)
	}
	return nil
}

// Get implements Store.
func (s *HashStore) Get(ctx context.Context, key string) ([]byte, error) {
	value, err := s.wait(ctx, key, nil)
	if err != nil {
		return nil, storeError("get", key, "", err)
	}
	return clone(value), nil
}

// Watch implements Store.
func (s *HashStore) Watch(ctx context.Context, key string, prev []byte) ([]byte, error) {
	value, err := s.wait(ctx, key, prev)
	if err != nil {
		return nil, storeError("watch", key, "", err)
	}
	return clone(value), nil
}

// Add implements Store.
func (s *HashStore) Add(ctx context.Context, key string, delta int64) (int64, error) {
	sum, err := s.add(ctx, key, delta)
	if err != nil {
		return 0, storeError("add", key, "", err)
	}
	return sum, nil
}

// CompareAndSet implements Store.
func (s *HashStore) CompareAndSet(ctx context.Context, key string, expected, desired []byte) ([]byte, bool, error) {
	actual, swapped, err := s.compareAndSet(ctx, key, expected, desired)
	if err != nil {
		return nil, false, storeError("compare-and-set", key, "", err)
	}
	return clone(actual), swapped, nil
}

// Delete implements Store.
func (s *HashStore) Delete(ctx context.Context, key string) (bool, error) {
	existed, err := s.delete(ctx, key)
	if err != nil {
		return false, storeError("delete", key, "", err)
	}
	return existed, nil
}

// Close implements Store. The contents are gone.
func (s *HashStore) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.isDone {
		s.isDone = true
		close(s.closed)
		s.values, s.bytes = nil, 0
	}
	return nil
}

// The methods below return values that are shared with the store and must not be changed.

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
}

func (s *HashStore) add(ctx context.Context, key string, delta int64) (int64, error) {
	if err := s.lock(ctx, key); err != nil {
		return 0, err
	}
	defer s.mu.Unlock()
	var old int64
	if value, ok := s.values[key]; ok {
		var err error
		if old, err = strconv.ParseInt(string(value), 10, 64); err != nil {
			return 0, &refusal{ErrNotNumber, fmt.Sprintf("value is %.32q", value)}
		}
	}
	sum := old + delta
	if (sum > old) != (delta > 0) && delta != 0 {
		return 0, &refusal{ErrNotNumber, fmt.Sprintf("%d + %d overflows 64 bits", old, delta)}
	}
	return sum, s.put(key, strconv.AppendInt(nil, sum, 10))
}

func (s *HashStore) compareAndSet(ctx context.Context, key string, expected, desired []byte) ([]byte, bool, error) {
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

// lock locks s, unless the call is over before it begins.
func (s *HashStore) lock(ctx context.Context, key string) error {
	if err := checkKey(key); err != nil {
		return err
	}
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

// put stores a copy of value and wakes those who wait for key. s is locked.
func (s *HashStore) put(key string, value []byte) error {
	if err := checkValue(value); err != nil {
		return err
	}
	old, ok := s.values[key]
	grow := int64(len(value) - len(old))
	if !ok {
		if len(s.values) >= s.limits.Keys {
			return &refusal{ErrLimit, fmt.Sprintf("the store has %d keys, the most it takes", len(s.values))}
		}
		grow += int64(len(key))
	}
	if grow > 0 && s.bytes+grow > s.limits.Bytes {
		return &refusal{ErrLimit, fmt.Sprintf("the store has %d of at most %d bytes, this needs %d more", s.bytes, s.limits.Bytes, grow)}
	}
	s.bytes += grow
	s.values[key] = append([]byte{}, value...)
	if w := s.waits[key]; w != nil {
		delete(s.waits, key)
		close(w.changed)
	}
	return nil
}

// clone copies a value. Unlike bytes.Clone it is never nil for a value that is empty but there.
func clone(value []byte) []byte {
	if value == nil {
		return nil
	}
	return append([]byte{}, value...)
}
