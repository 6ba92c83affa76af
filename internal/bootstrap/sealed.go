package bootstrap

import (
	"context"
	"fmt"
	"strings"

	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/store"
)

// sealedStore is a view of a store that processes without the secret can change, such as PyTorch's TCPStore.
// It seals each value that it sets (secret.Secret.Seal), and a value that was not sealed is an error. Numbers
// (Add) are not sealed, because the store itself computes them. Methods of a Store that ranks do not need to
// meet return store.ErrUnsupported.
//
// Another process can still delete a value or put back an older one. Then the ranks do not meet, but they do
// not connect to a process without the secret either.
type sealedStore struct {
	store.Store
	key secret.Secret
}

// sealed returns a view of s whose values are sealed with key. If key is zero, it returns s.
func sealed(s store.Store, key secret.Secret) store.Store {
	if key.IsZero() {
		return s
	}
	return &sealedStore{s, key}
}

func (s *sealedStore) seal(key string, value []byte) []byte {
	if value == nil {
		return nil // the key has no value
	}
	return s.key.Seal(key, value)
}

// unseal returns the value in sealed, which an operation of the store has returned with err.
func (s *sealedStore) unseal(op, key string, sealed []byte, err error) ([]byte, error) {
	if err != nil || sealed == nil {
		return nil, err
	}
	value, err := s.key.Unseal(key, sealed)
	if err != nil {
		return nil, sealError(op, key, err)
	}
	return value, nil
}

// Set implements store.Store.
func (s *sealedStore) Set(ctx context.Context, key string, value []byte) error {
	return s.Store.Set(ctx, key, s.key.Seal(key, value))
}

// Get implements store.Store.
func (s *sealedStore) Get(ctx context.Context, key string) ([]byte, error) {
	value, err := s.Store.Get(ctx, key)
	return s.unseal("get", key, value, err)
}

// TryGet implements store.Store.
func (s *sealedStore) TryGet(ctx context.Context, key string) (value []byte, ok bool, err error) {
	value, ok, err = s.Store.TryGet(ctx, key)
	value, err = s.unseal("try-get", key, value, err)
	return value, ok && err == nil, err
}

// CompareAndSet implements store.Store.
func (s *sealedStore) CompareAndSet(ctx context.Context, key string, expected,
	desired []byte) (actual []byte, swapped bool, err error) {
	actual, swapped, err = s.Store.CompareAndSet(ctx, key, s.seal(key, expected), s.key.Seal(key, desired))
	actual, err = s.unseal("compare-and-set", key, actual, err)
	return actual, swapped, err
}

// Watch implements store.Store.
func (s *sealedStore) Watch(ctx context.Context, key string, prev []byte) ([]byte, error) {
	value, err := s.Store.Watch(ctx, key, s.seal(key, prev))
	return s.unseal("watch", key, value, err)
}

// sealError adds the operation and the key to err, as the stores do.
func sealError(op, key string, err error) error {
	return fmt.Errorf("store: %s %.128q: %w", op, key, err)
}

func unsupported(op, key string) error {
	return sealError(op, key, fmt.Errorf("%w: its values are sealed", store.ErrUnsupported))
}

// Append implements store.Store.
func (s *sealedStore) Append(_ context.Context, key string, _ []byte) error {
	return unsupported("append", key)
}

// MultiGet implements store.Store.
func (s *sealedStore) MultiGet(_ context.Context, keys ...string) ([][]byte, error) {
	return nil, unsupported("multi-get", strings.Join(keys, " "))
}

// MultiSet implements store.Store.
func (s *sealedStore) MultiSet(_ context.Context, keys []string, _ [][]byte) error {
	return unsupported("multi-set", strings.Join(keys, " "))
}

// Push implements store.Store.
func (s *sealedStore) Push(_ context.Context, key string, _ []byte) error {
	return unsupported("push", key)
}

// Pop implements store.Store.
func (s *sealedStore) Pop(_ context.Context, key string) ([]byte, error) {
	return nil, unsupported("pop", key)
}

// TryPop implements store.Store.
func (s *sealedStore) TryPop(_ context.Context, key string) ([]byte, bool, error) {
	return nil, false, unsupported("try-pop", key)
}
