package store

import "context"

// PrefixStore is a view of another store. It puts a prefix and a slash before each key, so stores with
// different prefixes do not see each other's keys. They share the limits of the underlying store, and NumKeys
// counts all keys of the underlying store.
type PrefixStore struct {
	prefix string
	under  Store
}

var _ Store = (*PrefixStore)(nil)

// NewPrefixStore returns a view of another store, given by the parameter under. The view puts prefix and a
// slash before each key.
func NewPrefixStore(prefix string, under Store) *PrefixStore {
	return &PrefixStore{prefix: prefix + "/", under: under}
}

// Underlying returns the store of which s is a view.
func (s *PrefixStore) Underlying() Store { return s.under }

// key returns the key in the underlying store. An empty key stays empty, so that the underlying store refuses
// it.
func (s *PrefixStore) key(key string) string {
	if key == "" {
		return ""
	}
	return s.prefix + key
}

func (s *PrefixStore) keys(keys []string) []string {
	full := make([]string, len(keys))
	for i, k := range keys {
		full[i] = s.key(k)
	}
	return full
}

// Set implements Store.
func (s *PrefixStore) Set(ctx context.Context, key string, value []byte) error {
	return s.under.Set(ctx, s.key(key), value)
}

// Get implements Store.
func (s *PrefixStore) Get(ctx context.Context, key string) ([]byte, error) {
	return s.under.Get(ctx, s.key(key))
}

// TryGet implements Store.
func (s *PrefixStore) TryGet(ctx context.Context, key string) (value []byte, ok bool, err error) {
	return s.under.TryGet(ctx, s.key(key))
}

// Add implements Store.
func (s *PrefixStore) Add(ctx context.Context, key string, delta int64) (int64, error) {
	return s.under.Add(ctx, s.key(key), delta)
}

// CompareAndSet implements Store.
func (s *PrefixStore) CompareAndSet(ctx context.Context, key string, expected,
	desired []byte) ([]byte, bool, error) {
	return s.under.CompareAndSet(ctx, s.key(key), expected, desired)
}

// Append implements Store.
func (s *PrefixStore) Append(ctx context.Context, key string, value []byte) error {
	return s.under.Append(ctx, s.key(key), value)
}

// Delete implements Store.
func (s *PrefixStore) Delete(ctx context.Context, key string) (bool, error) {
	return s.under.Delete(ctx, s.key(key))
}

// Watch implements Store.
func (s *PrefixStore) Watch(ctx context.Context, key string, prev []byte) ([]byte, error) {
	return s.under.Watch(ctx, s.key(key), prev)
}

// Wait implements Store.
func (s *PrefixStore) Wait(ctx context.Context, keys ...string) error {
	return s.under.Wait(ctx, s.keys(keys)...)
}

// Check implements Store.
func (s *PrefixStore) Check(ctx context.Context, keys ...string) (bool, error) {
	return s.under.Check(ctx, s.keys(keys)...)
}

// NumKeys implements Store. It counts all keys of the underlying store.
func (s *PrefixStore) NumKeys(ctx context.Context) (int64, error) { return s.under.NumKeys(ctx) }

// MultiGet implements Store.
func (s *PrefixStore) MultiGet(ctx context.Context, keys ...string) ([][]byte, error) {
	return s.under.MultiGet(ctx, s.keys(keys)...)
}

// MultiSet implements Store.
func (s *PrefixStore) MultiSet(ctx context.Context, keys []string, values [][]byte) error {
	return s.under.MultiSet(ctx, s.keys(keys), values)
}

// Push implements Store.
func (s *PrefixStore) Push(ctx context.Context, key string, value []byte) error {
	return s.under.Push(ctx, s.key(key), value)
}

// Pop implements Store.
func (s *PrefixStore) Pop(ctx context.Context, key string) ([]byte, error) {
	return s.under.Pop(ctx, s.key(key))
}

// TryPop implements Store.
func (s *PrefixStore) TryPop(ctx context.Context, key string) ([]byte, bool, error) {
	return s.under.TryPop(ctx, s.key(key))
}

// QueueLen implements Store.
func (s *PrefixStore) QueueLen(ctx context.Context, key string) (int64, error) {
	return s.under.QueueLen(ctx, s.key(key))
}

// Close closes the underlying store.
func (s *PrefixStore) Close() error { return s.under.Close() }
