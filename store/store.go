// Package store provides small maps from keys to values that several processes share. A process can wait for
// a change of a value. Processes use stores to find each other before they have other connections.
//
// [Store] is the contract. A [HashStore] is in the memory of one process. A [Server] serves a HashStore to
// [Client]s in other processes, in a protocol of its own. Package c10d serves a HashStore to PyTorch, and has
// a client for PyTorch's servers. A [FileStore] is in a file, which PyTorch's processes can use too. A
// [PrefixStore] is a view of another store. Package storetest tests all implementations against the contract.
package store

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/store/internal/call"
)

// These limits on keys and values are the same as PyTorch's. A call that exceeds one of them returns an error
// that wraps ErrLimit.
const (
	MaxKeyBytes   = call.MaxKeyBytes
	MaxValueBytes = call.MaxValueBytes
	// MaxKeys is the maximum number of keys in one call.
	MaxKeys = call.MaxKeys
)

var (
	// ErrClosed is returned by pending and later calls on a store or handle that has been closed.
	ErrClosed = errors.New("the store is closed")
	// ErrLimit reports that a call exceeds a limit of the store.
	ErrLimit = call.ErrLimit
	// ErrNotNumber is returned by Add if the value is not a decimal number or if the sum overflows 64 bits.
	ErrNotNumber = errors.New("the value is not a decimal number of 64 bits")
	// ErrUnsupported reports that this kind of store does not support the call.
	ErrUnsupported = errors.New("not supported by this store")
)

// Store is a map from keys to values that processes share. Its methods are safe for concurrent use. Each call
// that does not wait is atomic. A waiting call does not delay other calls.
//
// A key has 1 to MaxKeyBytes bytes, and a value has 0 to MaxValueBytes bytes. The store copies each value
// that it gets or returns, so the caller may modify its slices. If ctx ends during a call, the call returns
// an error that wraps ctx.Err(), and it is unknown whether the call made its change. Besides its value, a key
// may have a queue of values. For Wait and Check, a key is present if it has a value or if its queue is not
// empty.
//
// The semantics are the same as those of PyTorch's stores (c10d), with two exceptions: Add to a value that is
// not a number is an error, and a nil value means that a key has no value, as distinct from an empty value.
type Store interface {
	// Set sets the value of key. A nil value counts as the empty value.
	Set(ctx context.Context, key string, value []byte) error

	// Get waits until key has a value, and returns the value, which is never nil.
	Get(ctx context.Context, key string) ([]byte, error)

	// TryGet is like Get, but does not wait. If key has no value, ok is false.
	TryGet(ctx context.Context, key string) (value []byte, ok bool, err error)

	// Add adds delta to the decimal number that is the value of key, or to 0 if key has no value. It stores
	// the sum as text and returns the sum.
	Add(ctx context.Context, key string, delta int64) (int64, error)

	// CompareAndSet sets the value of key to desired if the current value is equal to expected. If expected
	// is nil, it sets the value only if key has no value. actual is the value after the call, or nil if key
	// then has no value.
	CompareAndSet(ctx context.Context, key string, expected,
		desired []byte) (actual []byte, swapped bool, err error)

	// Append appends value to the value of key. If key has no value, Append sets it to value.
	Append(ctx context.Context, key string, value []byte) error

	// Delete removes the value of key, and reports whether there was one.
	Delete(ctx context.Context, key string) (existed bool, err error)

	// Watch waits until key has a value that differs from prev, and returns that value. If prev is nil, Watch
	// waits until key has any value. Watch may miss a value that exists only for a short time.
	Watch(ctx context.Context, key string, prev []byte) ([]byte, error)

	// Wait waits until all keys are present at the same time.
	Wait(ctx context.Context, keys ...string) error

	// Check reports whether all keys are present.
	Check(ctx context.Context, keys ...string) (bool, error)

	// NumKeys returns the number of keys that have a value. A store may also count keys of its own, such as
	// the counters of a FileStore.
	NumKeys(ctx context.Context) (int64, error)

	// MultiGet waits until all keys have values, and returns the values in the order of keys.
	MultiGet(ctx context.Context, keys ...string) ([][]byte, error)

	// MultiSet sets the value of keys[i] to values[i] for each i. If a key occurs more than once, it gets the
	// last of its values.
	MultiSet(ctx context.Context, keys []string, values [][]byte) error

	// Push appends value to the queue of key.
	Push(ctx context.Context, key string, value []byte) error

	// Pop waits until the queue of key is not empty, and removes and returns the first value in it.
	Pop(ctx context.Context, key string) ([]byte, error)

	// TryPop is like Pop, but does not wait. If the queue is empty, ok is false.
	TryPop(ctx context.Context, key string) (value []byte, ok bool, err error)

	// QueueLen returns the number of values in the queue of key.
	QueueLen(ctx context.Context, key string) (int64, error)

	// Close closes this handle. Pending and later calls fail with ErrClosed. Further calls of Close return
	// nil.
	Close() error
}

// Secret is the secret of a job. The zero Secret means that there is none. Printing a Secret, or a Config
// that contains it, does not disclose the secret.
type Secret = secret.Secret

// ParseSecret makes a Secret from a text of 16 to 4096 bytes, such as the value of HVD_SECRET. It ignores
// white space around the text. Its error does not contain the text.
func ParseSecret(text string) (Secret, error) {
	s, err := secret.Parse(text)
	if err != nil {
		return Secret{}, fmt.Errorf("store: %w", err)
	}
	return s, nil
}

// Config configures a Server or its Clients.
type Config struct {
	// Secret is the secret of the job. Connections use TLS, and both ends prove that they know the secret. If
	// Secret is zero, any process that can connect to the server can read and change everything.
	Secret Secret
	// Log is the log of the server. It may be nil.
	Log *zap.Logger

	handshake     time.Duration // the time limit for the handshake; 0 means serverIOTimeout
	silence       time.Duration // how long a client may be silent; 0 means clientSilence
	maxCallsBytes int64         // limit of a Server; 0 means the default
}

// first returns the first element of keys. The error of a call with several keys names only this key.
func first(keys []string) string {
	if len(keys) == 0 {
		return ""
	}
	return keys[0]
}
