package rendezvous

import (
	"context"
	"errors"
	"fmt"
)

// Bounds on what a store takes. A call beyond them gives an error that is ErrLimit.
const (
	MaxKeyBytes   = 1024
	MaxValueBytes = 1 << 20
)

var (
	// ErrClosed is the error of pending and later calls on a store or handle that was closed.
	ErrClosed = errors.New("store is closed")
	// ErrLimit is the error of a call that goes beyond a bound of the store.
	ErrLimit = errors.New("limit exceeded")
	// ErrNotNumber is the error of Add on a value that is not a decimal number, or whose sum overflows.
	ErrNotNumber = errors.New("not a number")
)

// Store is a map from keys to values that processes share, with waits. Its methods are safe for concurrent use, and
// each is atomic. A waiting call delays no other.
//
// Keys have 1 to MaxKeyBytes bytes, values 0 to MaxValueBytes. Values are copied in both directions. A call whose
// ctx ends returns an error that wraps ctx.Err(); whether a change was made is then unknown. Package storetest holds
// implementations to this contract.
type Store interface {
	// Set gives key a value. nil is the empty value.
	Set(ctx context.Context, key string, value []byte) error

	// Get waits until key exists and returns its value, which is never nil.
	Get(ctx context.Context, key string) ([]byte, error)

	// Add adds delta to the decimal number at key, 0 if key does not exist, and returns the sum. The value becomes
	// the sum as text.
	Add(ctx context.Context, key string, delta int64) (int64, error)

	// CompareAndSet gives key the value desired if its value is expected, or if expected is nil and key does not
	// exist. actual is the value after the call; nil means that key does not exist.
	CompareAndSet(ctx context.Context, key string, expected, desired []byte) (actual []byte, swapped bool, err error)

	// Watch waits until key exists with a value other than prev and returns that value. With prev nil any value
	// will do. A value that lasted only a moment may be missed.
	Watch(ctx context.Context, key string, prev []byte) ([]byte, error)

	// Delete removes key and reports whether it existed.
	Delete(ctx context.Context, key string) (existed bool, err error)

	// Close gives up this handle: pending and later calls fail with ErrClosed. Later calls return nil.
	Close() error
}

// refusal is why a store did not do what was asked. It can be sent from a server to its client.
type refusal struct {
	kind   error // one of the errors above
	detail string
}

func (r *refusal) Error() string { return r.kind.Error() + ": " + r.detail }

func (r *refusal) Unwrap() error { return r.kind }

// storeError says which call on which store failed. where is empty for a store in this process.
func storeError(op, key, where string, err error) error {
	if where != "" {
		where = " at " + where
	}
	return fmt.Errorf("rendezvous: %s %.128q%s: %w", op, key, where, err)
}

func checkKey(key string) error {
	if len(key) < 1 || len(key) > MaxKeyBytes {
		return &refusal{ErrLimit, fmt.Sprintf("key has %d bytes, want 1 to %d", len(key), MaxKeyBytes)}
	}
	return nil
}

func checkValue(value []byte) error {
	if len(value) > MaxValueBytes {
		return &refusal{ErrLimit, fmt.Sprintf("value has %d bytes, want at most %d", len(value), MaxValueBytes)}
	}
	return nil
}
