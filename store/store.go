// Package store provides small maps from keys to values that processes share, with waits. Processes use them
// to find each other before anything else connects them.
//
// [Store] is the contract. A [HashStore] lives in one process. A [Server] serves it to [Client]s in other
// processes, in a protocol of its own; package c10d serves it to PyTorch, and is a client of PyTorch's. A
// [FileStore] is a file that it can share with PyTorch. A [PrefixStore] is a part of another store. Package
// storetest checks all of them against the contract.
package store

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/secret"
)

// Bounds on what a store takes, those of PyTorch's. A call beyond them gives an error that is ErrLimit.
const (
	MaxKeyBytes   = 8 << 10
	MaxValueBytes = 8 << 20
	// MaxKeys is how many keys a call may name.
	MaxKeys = 128 << 10
)

var (
	// ErrClosed is the error of pending and later calls on a store or handle that was closed.
	ErrClosed = errors.New("the store is closed")
	// ErrLimit is the error of a call that goes beyond a bound of the store.
	ErrLimit = errors.New("limit exceeded")
	// ErrNotNumber is the error of Add on a value that is not a decimal number, or whose sum overflows.
	ErrNotNumber = errors.New("the value is not a decimal number of 64 bits")
	// ErrUnsupported is the error of a call that this kind of store does not have.
	ErrUnsupported = errors.New("not supported by this store")
)

// Store is a map from keys to values that processes share, with waits. Its methods are safe for concurrent
// use, and each is atomic unless it waits. A waiting call delays no other.
//
// Keys have 1 to MaxKeyBytes bytes, values 0 to MaxValueBytes. Values are copied in both directions. A call
// whose ctx ends returns an error that wraps ctx.Err(); whether a change was made is then unknown. Beside its
// value a key may have a queue of values; to Wait and Check, a key is there if it has a value or a queue that
// is not empty.
//
// The semantics are those of PyTorch's stores (c10d), except that adding to what is no number is an error,
// and that nil tells a key that is not there from one with an empty value.
type Store interface {
	// Set gives key a value. nil is the empty value.
	Set(ctx context.Context, key string, value []byte) error

	// Get waits until key has a value and returns it; it is never nil.
	Get(ctx context.Context, key string) ([]byte, error)

	// Add adds delta to the decimal number at key, 0 if key has no value, and returns the sum. The value
	// becomes the sum as text.
	Add(ctx context.Context, key string, delta int64) (int64, error)

	// CompareAndSet gives key the value desired if its value is expected, or if expected is nil and key has
	// none. actual is the value after the call; nil means that key has none.
	CompareAndSet(ctx context.Context, key string, expected,
		desired []byte) (actual []byte, swapped bool, err error)

	// Append adds to the end of the value of key, or gives it that value if it has none.
	Append(ctx context.Context, key string, value []byte) error

	// Delete removes the value of key and reports whether it had one.
	Delete(ctx context.Context, key string) (existed bool, err error)

	// Watch waits until key has a value other than prev and returns that value. With prev nil any value
	// will do. A value that lasted only a moment may be missed.
	Watch(ctx context.Context, key string, prev []byte) ([]byte, error)

	// Wait waits until all keys are there at once.
	Wait(ctx context.Context, keys ...string) error

	// Check reports whether all keys are there.
	Check(ctx context.Context, keys ...string) (bool, error)

	// NumKeys is the number of keys with a value. Where a store has keys of its own, as for the processes
	// that joined, they count.
	NumKeys(ctx context.Context) (int64, error)

	// MultiGet is Get for many keys. It waits until all have values.
	MultiGet(ctx context.Context, keys ...string) ([][]byte, error)

	// MultiSet is Set for many keys. A key may come more than once; the last value counts.
	MultiSet(ctx context.Context, keys []string, values [][]byte) error

	// Push adds value to the end of the queue of key.
	Push(ctx context.Context, key string, value []byte) error

	// Pop waits until the queue of key is not empty and takes its first value.
	Pop(ctx context.Context, key string) ([]byte, error)

	// TryPop is Pop without the wait. ok says whether there was a value.
	TryPop(ctx context.Context, key string) (value []byte, ok bool, err error)

	// QueueLen is the number of values in the queue of key.
	QueueLen(ctx context.Context, key string) (int64, error)

	// Close gives up this handle: pending and later calls fail with ErrClosed. Later calls of Close return
	// nil.
	Close() error
}

// Secret is the secret of a job. The zero Secret is none. Its method Encrypted returns it with TLS on all
// connections, which both ends must use. It prints as a word, so that printing a Config does not disclose it.
type Secret = secret.Secret

// ParseSecret makes the Secret of a text of 16 to 4096 bytes, the same as HVD_SECRET has. White space around
// the text does not count. The error does not contain the text.
func ParseSecret(text string) (Secret, error) {
	s, err := secret.Parse(text)
	if err != nil {
		return Secret{}, fmt.Errorf("store: %w", err)
	}
	return s, nil
}

// Config configures a Server or its Clients.
type Config struct {
	// Secret is the secret of the job. Without one, any process that can connect to the server can read and
	// change everything.
	Secret Secret
	// Log is the log of the server; it may be nil.
	Log *zap.Logger

	handshake time.Duration // default serverIOTimeout
}

// refusal is why a store refused a call. A server can send it to its client.
type refusal struct {
	kind   error // one of the errors above
	detail string
}

func (r *refusal) Error() string { return r.kind.Error() + ": " + r.detail }

func (r *refusal) Unwrap() error { return r.kind }

// Error returns err with the call and the store that failed: where is an address or a path, and empty for a
// store in this process.
func Error(op, key, where string, err error) error {
	if where != "" {
		where = " at " + where
	}
	return fmt.Errorf("store: %s %.128q%s: %w", op, key, where, err)
}

// CheckKey returns an error if a key is empty or too long.
func CheckKey(key string) error {
	if len(key) < 1 || len(key) > MaxKeyBytes {
		return &refusal{ErrLimit, fmt.Sprintf("key has %d bytes, want 1 to %d", len(key), MaxKeyBytes)}
	}
	return nil
}

// CheckKeys returns an error if there are too many keys, or one of them is empty or too long.
func CheckKeys(keys []string) error {
	if len(keys) > MaxKeys {
		return &refusal{ErrLimit, fmt.Sprintf("got %d keys, want at most %d", len(keys), MaxKeys)}
	}
	for _, k := range keys {
		if err := CheckKey(k); err != nil {
			return err
		}
	}
	return nil
}

// CheckPairs checks the arguments of MultiSet.
func CheckPairs(keys []string, values [][]byte) error {
	if len(keys) != len(values) {
		return fmt.Errorf("got %d keys and %d values, want equal numbers", len(keys), len(values))
	}
	if err := CheckKeys(keys); err != nil {
		return err
	}
	for _, v := range values {
		if err := CheckValue(v); err != nil {
			return err
		}
	}
	return nil
}

// CheckValue returns an error if a value is too long.
func CheckValue(value []byte) error {
	if len(value) > MaxValueBytes {
		return &refusal{ErrLimit, fmt.Sprintf("value has %d bytes, want at most %d", len(value),
			MaxValueBytes)}
	}
	return nil
}

// first returns the key that an error of a call with many keys names.
func first(keys []string) string {
	if len(keys) == 0 {
		return ""
	}
	return keys[0]
}
